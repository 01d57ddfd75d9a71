"""The slides (tools/slides.py): every deck is made from its lesson; in Chromium nothing overflows or is asked for.

The browser part is skipped, with the reason, where there is no Chromium; a failure instead if LIPMDEQ_REQUIRE_BROWSER
is set.
"""

import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import slides  # noqa: E402
from portable import Book  # noqa: E402

CORE = ["01_banach", "02_deq", "06_backward", "07_normalisation", "09_convolution", "11_composition"]
CORE += ["12_bound", "13_certificate"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("slides")
    slides.write(target)
    everything = "".join(re.findall(r"<section.*?</section>", "".join(map(read, target.glob("[01]*.html"))), re.S))
    (target / "all.html").write_text(slides.page("all", everything, ""), "utf8")  # MathJax is loaded once
    return target


def read(path: Path) -> str:
    """The slides of a deck, without MathJax."""
    page = path.read_text("utf8")
    return page[page.index("<main") : page.index("</main>")]


def text_of(folder: Path, name: str) -> str:
    """The slides without the embedded pictures."""
    return re.sub(r'src="data:[^"]*"', "", read(folder / f"{name}.html"))


@pytest.mark.parametrize("name", CORE)
def test_a_deck_for_each_core_lesson(folder, name):
    text = text_of(folder, name)
    assert 10 <= text.count('<section class="slide') <= 18
    assert text.count("<figure") >= 2 and 'alt=""' not in text
    assert "✓" in text, "no deck without a check"
    assert not re.search(r"\{[\w:-]+\}`|`{3}|:::|\\norm\b|\\bm\b", text), "MyST or a macro is left"
    assert f'href="{name}.html"' in (folder / "index.html").read_text("utf8")


def test_no_other_decks():
    decks = sorted(path.stem for path in slides.DECKS.glob("*.yml"))
    assert decks == sorted(CORE)


@pytest.mark.parametrize(
    ("show", "message"), [("@nowhere", "has no cell nowhere"), ("@banach-theorem prf:lemma", "nothing of that name")]
)
def test_what_the_lesson_does_not_have_is_refused(tmp_path, show, message):
    deck = tmp_path / "01_banach.yml"
    deck.write_text(yaml.safe_dump([{"title": "x", "show": [show]}]))
    with pytest.raises(ValueError, match=message):
        slides.Deck(Book(), deck).html()


def test_a_misspelt_key_is_refused(tmp_path):
    deck = tmp_path / "01_banach.yml"
    deck.write_text(yaml.safe_dump([{"title": "x", "shows": []}]))
    with pytest.raises(ValueError, match="shows"):
        slides.Deck(Book(), deck).html()


@pytest.fixture
def open_deck(browser, folder):
    complaints, pages = [], []

    def opened(name: str):
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        pages.append(page)
        page.on("console", lambda m: m.type == "error" and complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or complaints.append(r.url))
        page.goto((folder / f"{name}.html").as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield opened
    for page in pages:
        page.close()
    assert not complaints, "console errors, or something outside was asked for"


@pytest.mark.browser
def test_nothing_overflows(open_deck):
    page = open_deck("all")
    fits = page.eval_on_selector_all(".slide", "all => all.map(s => [s.dataset.fit, s.innerText.slice(0, 60)])")
    assert len(fits) >= 80
    assert not [title for fit, title in fits if fit == "overflow"], "too much on a slide"
    assert page.locator("[data-mjx-error]").count() == 0, "a formula with an error"
    assert page.locator("mjx-container").count() > 100


@pytest.mark.browser
def test_keys(open_deck):
    page = open_deck("01_banach")
    shown = page.locator(".slide.now h2")
    assert "Banach" in shown.inner_text()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#2"
    page.keyboard.press("n")
    assert "smallest" in page.locator(".panel").inner_text()
    page.keyboard.press("End")
    assert shown.inner_text() == "Exercises"
    page.keyboard.press("o")
    assert page.locator(".slide:visible").count() == page.locator(".slide").count()
    page.locator(".slide").nth(1).click()
    assert page.evaluate("location.hash") == "#2"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.get_by_role("button", name="next slide").click()
    assert page.evaluate("location.hash") == "#3"
