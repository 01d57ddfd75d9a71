"""Write book/coverage.md, the tables "Coverage of the paper", from book/coverage.yml.

Usage: python tools/coverage_table.py
"""

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from api import full_name  # noqa: E402

SOURCE, TARGET = ROOT / "book" / "coverage.yml", ROOT / "book" / "coverage.md"
ROLES = {"dfn": "prf:ref", "lem": "prf:ref", "eq": "eq", "fig": "numref", "tab": "numref"}

HEAD = """\
# Coverage of the paper

% Written by tools/coverage_table.py from book/coverage.yml; change that file and run it again.

Every definition, lemma, numbered equation, figure and table of the paper {{cite}}`sato2026lipschitz`: where it is
explained, the code that implements it, the unit tests that hold the code to it. In the lesson, at least one cell
asserts it; a ⊥ marks statements that are also checked from below, by an input that reaches the bound. The project's
tests check each row of this table.

**{covered} of {total} are covered, {pending} are pending**{names}.

| in the paper | in the book | in code | unit tests |
|---|---|---|---|
"""

SECTIONS = """
## Sections and appendices

All {total} sections and appendices, with the lessons that cover them, and the statements of the table above that stand in them.
Named paragraphs without a statement of their own have the heading under which they are treated.

| in the paper | in the book | statements | paragraphs |
|---|---|---|---|
"""


def entries() -> list[dict]:
    """The statements in book/coverage.yml."""
    return [entry for entry in yaml.safe_load(SOURCE.read_text("utf8")) if "id" in entry]


def sections() -> list[dict]:
    """The sections and appendices in book/coverage.yml."""
    return [entry for entry in yaml.safe_load(SOURCE.read_text("utf8")) if "section" in entry]


def code_link(name: str) -> str:
    """A link to the API page that describes ``name``."""
    full = full_name(name)
    return f"{{py:obj}}`{name} <{full}>`" if full else f"`{name}`"


def row(entry: dict) -> str:
    """One line of the table."""
    name = entry["id"]
    if entry.get("pending"):
        lesson = f"{entry['lesson']}: pending"
    else:
        here = ROLES[name.split(":")[0]]
        lesson = f"{{doc}}`../notebooks/{entry['lesson']}`, {{{here}}}`{name}`" + (" ⊥" if entry.get("tight") else "")
    code = "<br>".join(map(code_link, entry["code"]))
    tests = "<br>".join(f"`{item}`" for item in entry["tests"])
    return f"| **{entry['paper']}**: {entry['says']} | {lesson} | {code} | {tests} |\n"


def section_row(entry: dict, numbers: dict[str, str]) -> str:
    """One line of the table of sections; ``numbers`` says how the paper numbers each statement."""
    kind = "Section" if entry["section"][0].isdigit() else "Appendix"
    lessons = "<br>".join(f"{{doc}}`../notebooks/{lesson}`" for lesson in entry["lessons"])
    statements = ", ".join(numbers[name] for name in entry["statements"]) or "none"
    places = [(name, *place.split("#")) for name, place in entry.get("paragraphs", {}).items()]
    paragraphs = "<br>".join(f"{name}: “{heading}”" for name, _, heading in places)
    return f"| **{kind} {entry['section']}**: {entry['title']} | {lessons} | {statements} | {paragraphs} |\n"


def page() -> str:
    """The whole page."""
    rows = entries()
    pending = [entry["paper"] for entry in rows if entry.get("pending")]
    head = HEAD.format(
        covered=len(rows) - len(pending),
        total=len(rows),
        pending=len(pending),
        names=f" ({', '.join(pending)}: their lessons wait for the runs)" if pending else "",
    )
    numbers = {entry["id"]: entry["paper"] for entry in rows}
    below = SECTIONS.format(total=len(sections())) + "".join(section_row(s, numbers) for s in sections())
    return head + "".join(row(entry) for entry in rows) + below


if __name__ == "__main__":
    TARGET.write_text(page(), "utf8")
    print(f"{TARGET.relative_to(ROOT)}: {len(entries())} statements, {len(sections())} sections")
