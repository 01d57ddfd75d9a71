"""Quizzes and instructor guide: one right answer each, numbers as lipmdeq computes them, minutes that add up.

The last test renders the quiz page with Sphinx alone and answers it in Chromium; it is skipped, with the reason, where
there is no Chromium, and fails instead if LIPMDEQ_REQUIRE_BROWSER is set.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lipmdeq import bounds

BOOK = Path(__file__).resolve().parents[2] / "book"
QUIZZES = yaml.safe_load((BOOK / "teaching" / "quizzes.yml").read_text("utf8"))
QUESTIONS = [(f"{part}-{i}", q) for part, found in QUIZZES.items() for i, q in enumerate(found, 1)]
CHOICES = [pytest.param(q, id=name) for name, q in QUESTIONS if "options" in q]
NUMBERS = [pytest.param(q, id=name) for name, q in QUESTIONS if "answer" in q]
GUIDES = [BOOK / "teaching" / f"{name}.md" for name in ("foundations", "lemmas", "model", "experiments")]


def value(expression: str) -> float:
    """What lipmdeq says; the expressions are our own, in the repository."""
    names = {name: getattr(bounds, name) for name in dir(bounds) if not name.startswith("_")}
    return eval(expression, names)


def test_a_quiz_for_each_part():
    assert list(QUIZZES) == ["foundations", "lemmas", "model", "beyond"]
    page = (BOOK / "teaching" / "quizzes.md").read_text("utf8")
    assert re.findall(r"^```\{quiz\} (\w+)$", page, re.M) == list(QUIZZES)
    assert all(5 <= len(questions) <= 7 for questions in QUIZZES.values())
    assert len(CHOICES) + len(NUMBERS) == len(QUESTIONS)


@pytest.mark.parametrize("question", CHOICES)
def test_choice(question):
    assert set(question) == {"question", "options"}
    options = question["options"]
    assert sum(option.get("right", False) for option in options) == 1
    assert 3 <= len(options) <= 5 and len({option["text"] for option in options}) == len(options)
    assert all(len(option["why"]) > 15 for option in options)


@pytest.mark.parametrize("question", NUMBERS)
def test_number(question):
    assert set(question) == {"question", "answer", "tolerance", "check", "why", "mistakes"}
    right = value(question["check"])
    assert abs(right - question["answer"]) <= question["tolerance"] + 1e-9
    assert len(question["why"]) > 15 and len(question["mistakes"]) >= 2
    for mistake in question["mistakes"]:
        wrong = mistake["value"]
        assert value(mistake["check"]) == pytest.approx(wrong, abs=5e-4), f"{wrong} is not that mistake"
        assert abs(wrong - right) > 2 * question["tolerance"], f"{wrong} would count as right"
        assert len(mistake["why"]) > 15


def test_the_right_answer_cannot_be_guessed_from_its_place_or_length():
    places = [[o.get("right", False) for o in q.values[0]["options"]].index(True) for q in CHOICES]
    assert all(2 <= places.count(place) <= len(places) / 2 for place in range(4))
    longest = [max(q.values[0]["options"], key=lambda o: len(o["text"])).get("right", False) for q in CHOICES]
    assert sum(longest) < 0.8 * len(longest)


# ---- the plans of the guide and the syllabi


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_plans_add_up(path):
    plans = re.findall(r"^\| step \| 50 min \| 80 min \|\n\|[-|]+\|\n((?:\|.*\n)+)", path.read_text("utf8"), re.M)
    assert plans
    for plan in plans:
        rows = [line.strip("| ").split(" | ") for line in plan.strip().split("\n")]
        for column, minutes in (-2, 50), (-1, 80):
            assert sum(int(row[column]) for row in rows[:-1]) == minutes == int(rows[-1][column]), rows[0][0]


def test_minutes_of_the_syllabi_add_up():
    text = "".join((BOOK / "teaching" / f"{name}.md").read_text("utf8") for name in ("index", "lab"))
    tables = re.findall(r"^## [^\n]*, (\d+) minutes\n.*?^(\| minutes \|.*?)(?=\n\n)", text, re.M | re.S)
    assert [int(minutes) for minutes, _ in tables] == [90, 60, 120]
    for minutes, table in tables:
        assert sum(map(int, re.findall(r"^\| (\d+) \|", table, re.M))) == int(minutes)
        assert f"| **{minutes}** |" in table


def test_the_guide_has_every_lesson():
    text = "".join(path.read_text("utf8") for path in GUIDES)
    lessons = [path.stem for path in (BOOK.parent / "notebooks").glob("[0-9]*.ipynb")]
    missing = [n for n in lessons if f"/notebooks/{n}`" not in text]
    assert not missing


# ---- the page in a browser


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("quiz")
    (root / "book" / "teaching").mkdir(parents=True)
    shutil.copy(BOOK / "teaching" / "quizzes.md", root / "book" / "teaching")
    (root / "index.md").write_text("# x\n\n```{toctree}\nbook/teaching/quizzes\n```\n")
    (root / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(BOOK / '_ext')!r})\n"
        f"extensions = ['myst_parser', 'quiz']\nmyst_enable_extensions = ['dollarmath']\n"
        f"html_static_path = [{str(BOOK / '_static')!r}]\nhtml_theme = 'basic'\nmathjax_path = 'absent.js'\n"
    )
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(root), str(root / "out")]
    subprocess.run(build, check=True, capture_output=True)
    return root / "out" / "book" / "teaching" / "quizzes.html"


def test_answers_can_be_read_without_javascript(page_file):
    text = page_file.read_text("utf8")
    assert text.count("<fieldset") == text.count("<legend") == text.count("<details") == len(QUESTIONS)
    assert text.count("data-right") == len(QUESTIONS)
    assert "$" not in re.sub(r"<script.*?</script>", "", text[text.index("<fieldset") :], flags=re.S), (
        "a formula was not parsed"
    )


@pytest.mark.browser
def test_one_right_and_one_wrong_answer(page_file, browser):
    page = browser.new_page()
    page.set_default_timeout(10_000)
    complaints = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_file.as_uri())
    choice, number = page.locator("#quiz-foundations-1"), page.locator("#quiz-foundations-2")
    said = choice.get_by_role("status")
    choice.get_by_role("button", name="Check").click()
    assert "Choose" in said.inner_text()
    for i, option in enumerate(QUIZZES["foundations"][0]["options"]):
        choice.get_by_role("radio").nth(i).check()
        choice.get_by_role("button", name="Check").click()
        assert ("Right" if "right" in option else "Not yet") in said.inner_text()
        assert option["why"][:10] in said.inner_text()
    for text, verdict in ("", "number"), ("0,001", "residual"), ("7", "Try again"), ("1.0", "Right"):
        number.get_by_role("textbox").fill(text)
        number.get_by_role("textbox").press("Enter")
        assert verdict in number.get_by_role("status").inner_text()
    assert number.get_by_role("status").get_attribute("aria-live") == "polite"
    assert not complaints
