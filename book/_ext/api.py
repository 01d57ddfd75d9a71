"""Sphinx extension: links both ways between the lessons and the API pages in book/api.

* Under a documented name: the lessons that explain it (from book/coverage.yml) and those that import it.
* At the end of a lesson: the names of the package that it imports.
"""

import ast
import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
ROLES = {"dfn": "prf:ref", "lem": "prf:ref", "eq": "eq", "fig": "numref", "tab": "numref"}
DIRECTIVE = re.compile(r"^\.\. (module|currentmodule|auto\w+):: (\S+)$", re.M)
SEVERAL = re.compile(r"^:ivar (\w+(?:, \w+)+):")
MAGIC = re.compile(r"^( *)[%!].*", re.M)
LITERAL_OR_BAR = re.compile(r"``.*?``|\|", re.S)


@cache
def documented() -> tuple[str, ...]:
    """Full names of the functions and classes that book/api describes, in its order."""
    names = []
    for page in sorted((ROOT / "book" / "api").glob("*.md")):
        module = ""
        for kind, name in DIRECTIVE.findall(page.read_text("utf8")):
            if kind in ("module", "currentmodule"):
                module = name
            else:
                names.append(f"{module}.{name}")
    return tuple(names)


def full_name(name: str) -> str | None:
    """The documented name of ``spec.LipschitzSpec.L``, ``lipmdeq.bounds.lip_gn``…; None if there is none.

    A name that one file defines and another passes on is described under one of the two only.
    """
    parts = name.removeprefix("lipmdeq.").split(".")
    homes = [full for full in documented() if full.endswith(f".{parts[1]}")]
    exact = [full for full in homes if full == f"lipmdeq.{parts[0]}.{parts[1]}"]
    home = exact or homes
    return ".".join([home[0], *parts[2:]]) if len(home) == 1 else None


def imported(path: Path) -> list[str]:
    """Documented names that a notebook imports or writes as ``bounds.lip_gn``, in the order of the pages."""
    cells = json.loads(path.read_text("utf8"))["cells"]
    found: set[str | None] = set()
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse(MAGIC.sub(r"\1pass", "".join(cell["source"])))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lipmdeq."):
                found |= {full_name(f"{node.module}.{alias.name}") for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"lipmdeq.{node.value.id}.{node.attr}"
                found |= {name} & set(documented())
    return [name for name in documented() if name in found]


@cache
def explained() -> dict[str, dict[str, list[str]]]:
    """Documented name -> lesson -> links (reStructuredText) to the statements of the paper that it implements."""
    links: dict[str, dict[str, list[str]]] = {}
    for entry in yaml.safe_load((ROOT / "book" / "coverage.yml").read_text("utf8")):
        if "section" in entry or entry.get("pending"):
            continue
        label, role = entry["id"], ROLES[entry["id"].split(":")[0]]
        for name in entry["code"]:
            lessons = links.setdefault(full_name(name) or name, {})
            lessons.setdefault(entry["lesson"], []).append(f":{role}:`{label}`")
    return links


@cache
def used() -> dict[str, list[str]]:
    """Documented name -> notebooks that import it."""
    lessons: dict[str, list[str]] = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for name in imported(path):
            lessons.setdefault(name, []).append(path.stem)
    return lessons


def add_lessons(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Append to a doc string where its subject is explained and used.

    Doc strings write |γ| for an absolute value, which reStructuredText would take for a substitution; napoleon
    takes what stands before a colon in a property for its type, and "alpha1" in "alpha1, alpha2" as well.
    """
    if what == "property":
        lines[:] = (inspect.getdoc(obj) or "").splitlines()
    lines[:] = [SEVERAL.sub(lambda m: ":ivar " + m[1].replace(" ", "") + ":", line) for line in lines]
    text = LITERAL_OR_BAR.sub(lambda match: "\\|" if match[0] == "|" else match[0], "\n".join(lines))
    pages = {page.removeprefix("notebooks/") for page in app.env.found_docs if page.startswith("notebooks/")}
    where = [
        f":doc:`/notebooks/{lesson}`, {', '.join(links)}"
        for lesson, links in explained().get(name, {}).items()
        if lesson in pages
    ]
    if where:
        text += f"\n\n.. container:: lessons\n\n   Explained in {'; '.join(where)}."
    where = [f":doc:`{short(stem)} </notebooks/{stem}>`" for stem in used().get(name, []) if stem in pages]
    if where:
        text += f"\n\n.. container:: lessons\n\n   Used in lesson {', '.join(where)}."
    lines[:] = [*text.splitlines(), ""]


def short(stem: str) -> str:
    """7 for 07_normalisation, train for train."""
    return stem[:2].lstrip("0") if stem[:2].isdigit() else stem


def add_names(app: Sphinx, doctree: nodes.document) -> None:
    """Append to a notebook's page the names of the package that it uses."""
    docname = app.env.docname
    path = ROOT / f"{docname}.ipynb"
    section = next(iter(doctree.findall(nodes.section)), None)
    names = imported(path) if docname.startswith("notebooks/") and path.is_file() else []
    names = [name for name in names if name.split(".")[1] not in ("checks", "plotting")]  # in every lesson
    if section is None or not names:
        return
    paragraph = nodes.paragraph("", "From the package: ")
    for name in names:
        link = pending_xref("", refdomain="py", reftype="obj", reftarget=name, refdoc=docname, refwarn=True)
        link += nodes.literal("", name.removeprefix("lipmdeq."))
        paragraph += [link, nodes.Text(", " if name != names[-1] else ".")]
    section += nodes.container("", paragraph, classes=["lessons"])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", add_lessons, priority=900)
    app.connect("doctree-read", add_names)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
