"""Every labelled statement of the paper has its lesson, its asserting cell, its code and its unit test; every section has
lessons that cover it."""

import ast
import json
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import coverage_table as table  # noqa: E402

# All labels of definitions, lemmas, numbered equations, figures and tables in the paper's source, in its order.
PAPER = """
eq:forward eq:back eq:linear eq:back-fix fig:mdeq dfn:lipschitz lem:01 eq:hat eq:bar fig:sensi eq:tilde eq:overall tab:speedup
fig:convergence fig:trade_off tab:ablation lem:gn lem:mgn lem:relu lem:srelu lem:drop lem:conv lem:up lem:back
fig:test_convergence tab:speedup2
""".split()
NUMBERS = {
    "Definition": ["3.1"],
    "Lemma": ["3.1", *(f"B.{k}" for k in range(1, 9))],
    "Equation": [f"({k})" for k in range(1, 9)],
    "Figure": list("12345"),
    "Table": list("123"),
}
# All sections and appendices with their titles, in the order of the paper (its macros and backslashes removed).
SECTIONS = """
1 Introduction
2 Background & Related Work
3 Main Results
3.1 Preliminaries
3.2 Lipschitz MDEQ Architecture
3.3 Lipschitz Constant of Lipschitz MDEQ
3.4 Side Effects in Backward Pass
4 Numerical Experiments
4.1 Ablation Study and Discussion
5 Conclusion
A Other Related Works
B Derivation of Lipschitz Constant for Each Operation
B.1 Normalization
B.2 Activation Function
B.3 Dropout
B.4 Convolution
B.5 Upsample
B.6 Backward Pass
C Additional Experimental Results
C.1 Experimental Settings and Hyperparameters
C.2 Comparison of Fixed Point Convergence
C.3 Experiments on ImageNet
""".strip().splitlines()
# The named paragraphs of the two sections on related work: text without a label, so nothing else would notice a gap.
PARAGRAPHS = {
    "2": ["Weight-tied Models", "Deep Equilibrium Models", "Theory", "Acceleration Techniques"],
    "A": ["Other Theory", "Application", "Adversarial Robustness", "Implicit Layers Family", "Lipschitz Networks"],
}
KINDS = {"dfn": "Definition", "lem": "Lemma", "eq": "Equation", "fig": "Figure", "tab": "Table"}
FIELDS = {"id", "paper", "says", "lesson", "code", "tests"}
ENTRIES = table.entries()
ASSERTS = re.compile(r"^\s*assert |\bcheck(_equal|_broken)?\(", re.M)


def entry_id(entry: dict) -> str:
    return entry["id"]


@cache
def cells(lesson: str) -> list[dict]:
    path = ROOT / "notebooks" / f"{lesson}.ipynb"
    return json.loads(path.read_text("utf8"))["cells"] if path.is_file() else []


def checks(entry: dict) -> list[str]:
    """Sources of the cells of the lesson that are tagged with the statement's id."""
    tag = f"check:{entry['id']}"
    return ["".join(c["source"]) for c in cells(entry["lesson"]) if tag in c["metadata"].get("tags", [])]


@cache
def test_names(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text("utf8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


test_names.__test__ = False


def test_every_label_of_the_paper_is_listed_once():
    assert len(PAPER) == 26
    assert sorted(map(entry_id, ENTRIES)) == sorted(PAPER)
    for kind, numbers in NUMBERS.items():
        listed = [e["paper"].split(" ", 1) for e in ENTRIES if KINDS[e["id"].split(":")[0]] == kind]
        assert [word for word, _ in listed] == [kind] * len(numbers)
        assert sorted(number for _, number in listed) == sorted(numbers)


# ---- sections and appendices


def section_id(entry: dict) -> str:
    return f"section-{entry['section']}"


def headings(lesson: str) -> list[str]:
    """The headings of a lesson, without their marks."""
    text = "\n".join("".join(c["source"]) for c in cells(lesson) if c["cell_type"] == "markdown")
    return re.findall(r"^#+ (.+)$", text, re.M)


def test_every_section_of_the_paper_is_listed_in_order():
    assert [f"{s['section']} {s['title']}" for s in table.sections()] == SECTIONS


def test_every_statement_stands_in_one_section():
    assert sorted(name for s in table.sections() for name in s["statements"]) == sorted(PAPER)


@pytest.mark.parametrize("section", table.sections(), ids=section_id)
def test_section_is_covered(section):
    """By lessons that exist, assert something, and hold the statements of the section."""
    number, lessons = section["section"], section["lessons"]
    assert set(section) - {"paragraphs"} == {"section", "title", "lessons", "statements"} and lessons
    for lesson in lessons:
        assert any(ASSERTS.search("".join(c["source"])) for c in cells(lesson) if c["cell_type"] == "code"), lesson
    homes = {entry["id"]: entry["lesson"] for entry in ENTRIES}
    assert {homes[name] for name in section["statements"]} <= set(lessons)
    assert list(section.get("paragraphs", {})) == PARAGRAPHS.get(number, [])
    for place in section.get("paragraphs", {}).values():
        lesson, heading = place.split("#")
        assert lesson in lessons and heading in headings(lesson), place


# ---- statements


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_fields(entry):
    assert FIELDS <= set(entry) <= FIELDS | {"tight", "pending"}
    assert all(entry[field] for field in FIELDS)
    assert not (entry.get("tight") and entry.get("pending"))


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_lesson_has_an_asserting_cell(entry):
    """Pending means that there is none; a lesson that has come must be marked as done."""
    found = checks(entry)
    assert bool(found) != bool(entry.get("pending", False)), f"cells tagged check:{entry['id']}: {len(found)}"
    silent = [source.splitlines()[0] for source in found if not ASSERTS.search(source)]
    assert not silent, f"tagged cells without an assertion: {silent}"
    if entry.get("tight"):
        assert any("at_least=" in source for source in found), "no check reaches the bound from below"


@pytest.mark.parametrize("entry", [e for e in ENTRIES if not e.get("pending")], ids=entry_id)
def test_lesson_states_it(entry):
    """The paper's label is defined in that lesson and in no other page."""
    name = re.escape(entry["id"])
    label = re.compile(rf"^:label: {name}$|^\$\$ \({name}\)$|^:name: {name}$", re.M)
    homes = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text("utf8"))["cells"]:
            figure = cell["metadata"].get("mystnb", {}).get("figure", {}).get("name")
            prose = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            homes += [path.stem] * (len(label.findall(prose)) + (figure == entry["id"]))
    for path in sorted((ROOT / "book").glob("*.md")):
        homes += [path.stem] * len(label.findall(path.read_text("utf8")))
    assert homes == [entry["lesson"]]


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_code_exists(entry):
    for name in entry["code"]:
        module, *path = name.split(".")
        found = import_module(f"lipmdeq.{module}")
        for part in path:
            found = getattr(found, part)


@pytest.mark.parametrize("entry", ENTRIES, ids=entry_id)
def test_unit_tests_exist(entry):
    for name in entry["tests"]:
        file, test = name.split("::")
        assert test.startswith("test_") and test in test_names(file), name


def test_pending_ones_are_those_of_the_experiments():
    """What waits, waits for runs: figures and tables of the numerical experiments, and nothing else."""
    pending = {e["id"] for e in ENTRIES if e.get("pending")}
    experiments = {e["id"] for e in ENTRIES if "17" < e["lesson"] < "21"}
    assert pending <= experiments and len(experiments) == 6


def test_tags_name_statements_of_the_paper():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in cells(path.stem):
            tags = [t.removeprefix("check:") for t in cell["metadata"].get("tags", []) if t.startswith("check:")]
            assert set(tags) <= set(PAPER), f"{path.name}, cell {cell['id']}: {tags}"


def test_the_page_is_current():
    assert table.TARGET.read_text("utf8") == table.page(), "run: python tools/coverage_table.py"
