"""The built book in headless Chromium: no outside request, no console error, mathematics rendered.

Skipped, with the reason, where there is no Chromium or no built book; a failure instead if the environment
variable LIPMDEQ_REQUIRE_BROWSER is set, as it is in `.ci/run` after the book is built.
"""

import hashlib
import subprocess
import sys
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlparse

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"
sys.path.insert(0, str(ROOT / "tools"))

from check_book import faults, pages  # noqa: E402

PAGES = pages(yaml.safe_load((ROOT / "_toc.yml").read_text("utf8")))
AXE = "axe-core-4.14.0.tgz"
AXE_SHA256 = "2277b0a3ef47af9b52497faa3e71598e86e0a0e5e6eb295207a5657ede4709af"
LESSON = "notebooks/07_normalisation"
# One page of each kind; a lesson, which has all there is on a page, in the dark and on a phone too
LOOKS = [(name, "light", 1280) for name in ("book/intro", LESSON, "book/explorer", "book/player")]
LOOKS += [(name, "light", 1280) for name in PAGES if "quiz" in name][:1]
LOOKS += [(LESSON, "dark", 1280), (LESSON, "light", 390)]
HEAVIEST = 3_100_000  # bytes that one page may load, uncompressed; the heaviest has the explorer and four figures
# A letter or number whose glyph is not in MathJax's font is drawn as an empty group.
INVISIBLE_LETTERS = """() => [...document.querySelectorAll("mjx-container")].flatMap(box => {
    const tokens = kind => [...box.querySelectorAll(`math ${kind}`)];
    const drawn = kind => [...box.querySelectorAll(`g[data-mml-node="${kind}"]`)];
    return ["mi", "mn"].flatMap(kind => tokens(kind).filter(
        (token, i) => token.textContent.trim() && !drawn(kind)[i]?.childElementCount)).map(t => t.textContent);
})"""
pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(browser, give_up):
    """Chromium, if there is a current book to look at."""
    if not HTML.is_dir():
        give_up("the book is not built (make book)")
    if found := faults():
        give_up(f"the built book is not the current one (make book): {found[0]}")
    return browser


@pytest.fixture(scope="module")
def server():
    """The book on http://127.0.0.1:<port>."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(HTML)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()


class Visit:
    """One opened page, with everything that it asked for and complained about."""

    def __init__(self, context, url: str):
        self.requests: set[str] = set()
        self.complaints: list[str] = []
        self.page = context.new_page()
        self.page.on("request", lambda request: self.requests.add(request.url))
        self.page.on("console", lambda m: m.type == "error" and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))
        self.page.goto(url, wait_until="load")
        if self.page.locator(".math").count():
            self.page.wait_for_function("window.MathJax?.startup?.promise")
            self.page.evaluate("MathJax.startup.promise")

    def outside(self, *allowed: str) -> list[str]:
        return sorted(url for url in self.requests if not url.startswith(("data:", "blob:", *allowed)))


@pytest.fixture
def visit(browser):
    """Opens pages in a fresh profile; keywords as of Playwright's new_context."""
    opened = []

    def open_page(url: str, **options) -> Visit:
        opened.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}))
        return Visit(opened[-1], url)

    yield open_page
    for context in opened:
        context.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core from its npm package, kept in _build/axe; skipped where npm or its registry is missing."""
    archive = ROOT / "_build" / "axe" / AXE
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        name, version = AXE.removesuffix(".tgz").rsplit("-", 1)
        command = ["npm", "pack", f"{name}@{version}", "--ignore-scripts"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=archive.parent)
        except FileNotFoundError:
            pytest.skip("npm is not installed, so axe-core cannot be fetched")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip("npm does not reach its registry, so axe-core cannot be fetched")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found == AXE_SHA256, f"{archive} is not the published package: delete it"
    with tarfile.open(archive) as tar:
        return tar.extractfile("package/axe.min.js").read().decode("utf8")


@pytest.mark.parametrize("name, scheme, width", LOOKS)
def test_no_serious_barrier(visit, axe, name, scheme, width):
    shape = {"width": width, "height": 900}
    page = visit((HTML / f"{name}.html").as_uri(), color_scheme=scheme, viewport=shape).page
    # Half of a lesson's elements are strokes of formulas: nothing to check there, and slow.
    page.evaluate("document.querySelectorAll('mjx-container svg > *').forEach(node => node.remove())")
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert len(result["passes"]) > 20, "axe-core did not run"
    serious = [
        f"{rule['id']}: {rule['nodes'][0]['html'][:150]}"
        for rule in result["violations"]
        if rule["impact"] in ("serious", "critical")
    ]
    assert not serious


@pytest.mark.parametrize("reach", ["hover", "focus"])
def test_a_reference_shows_what_it_points_to(visit, reach):
    """From disk, for a lemma of another page; Escape closes it."""
    seen = visit((HTML / "book/coverage.html").as_uri(), offline=True)
    link = seen.page.locator("article a[href$='07_normalisation.html#lem:mgn']").first
    getattr(link, reach)()
    preview = seen.page.locator("#preview")
    preview.locator("mjx-container").first.wait_for()
    assert "Mean-only group normalisation" in preview.inner_text()
    assert link.get_attribute("aria-describedby") == "preview"
    seen.page.keyboard.press("Escape")
    assert preview.is_hidden()
    assert not seen.outside("file://") and not seen.complaints


@pytest.mark.parametrize("name", PAGES)
def test_page_from_disk_without_network(visit, name):
    seen = visit((HTML / f"{name}.html").as_uri(), offline=True)
    page = seen.page
    assert not seen.outside("file://"), "asks for something outside the book"
    assert not seen.complaints
    formulas = page.locator("span.math, div.math").count()
    assert page.locator("mjx-container").count() >= formulas, "mathematics not rendered"
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0, "a formula with an error"
    unknown = page.locator("mjx-container text").all_text_contents()
    assert not [text for text in unknown if text.strip()], "a character that the font does not have"
    assert not page.evaluate(INVISIBLE_LETTERS), "a glyph was left out of the font"
    broken = page.eval_on_selector_all(
        "img", "images => images.filter(i => !i.complete || !i.naturalWidth || !i.alt).map(i => i.src)"
    )
    assert not broken, "images without alt text, or not loaded"
    files = {Path(unquote(urlparse(url).path)) for url in seen.requests if url.startswith("file:")}
    assert name.startswith("book/api/") or sum(file.stat().st_size for file in files) <= HEAVIEST


@pytest.mark.parametrize("name", PAGES)
def test_page_served(visit, server, name):
    seen = visit(f"{server}/{name}.html")
    assert not seen.outside(server)
    assert not seen.complaints


@pytest.mark.parametrize("name", PAGES)
def test_page_on_a_phone(visit, name):
    page = visit((HTML / f"{name}.html").as_uri(), viewport={"width": 390, "height": 844}).page
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, "the page scrolls sideways"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_follows_the_readers_colour_scheme(visit, scheme):
    page = visit((HTML / f"{PAGES[0]}.html").as_uri(), color_scheme=scheme).page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    assert (sum(brightness) > 600) == (scheme == "light")


def test_start_page_leads_to_the_book(visit):
    page = visit((HTML / "index.html").as_uri()).page
    page.wait_for_url(f"**/{PAGES[0]}.html")


def test_search_when_served(visit, server):
    seen = visit(f"{server}/search.html?q=normalisation")
    links = seen.page.locator("#search-results li a")
    links.first.wait_for(timeout=15_000)
    assert any("07_normalisation" in (link.get_attribute("href") or "") for link in links.all())
    assert not seen.outside(server)
    assert not seen.complaints


def test_links_inside_the_book_resolve(visit):
    """Every relative link of every page names a file that exists and, after the #, an element in it."""
    links: dict[str, set[str]] = {}
    ids: dict[str, set[str]] = {}
    for name in PAGES:
        url = (HTML / f"{name}.html").as_uri()
        page = visit(url).page
        ids[url] = set(page.eval_on_selector_all("[id]", "nodes => nodes.map(n => n.id)"))
        hrefs = page.eval_on_selector_all("a[href]", "nodes => nodes.map(n => n.getAttribute('href'))")
        links[url] = {urljoin(url, href) for href in hrefs}
    dead = []
    for source, targets in links.items():
        for target in targets:
            file, fragment = urldefrag(target)
            if not file.startswith("file:"):
                continue
            exists = Path(unquote(urlparse(file).path)).is_file()
            named = not fragment or file not in ids or unquote(fragment) in ids[file]
            if not exists or not named:
                dead.append(f"{Path(source).name} -> {Path(file).name}#{fragment}")
    assert not dead
