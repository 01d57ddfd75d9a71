"""Sphinx extension: one line under each title.

A notebook says when the build executed it, how long that took and with which versions; a page of prose says how
long it takes to read. Lessons have their minutes in the box. Pages to look things up in have no such line.
"""

import platform
from datetime import datetime
from importlib.metadata import version
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

LOOKED_UP = ("book/api/", "book/changelog", "book/references", "book/coverage", "book/glossary")
WORDS_PER_MINUTE = 200


def executed(data: dict[str, Any]) -> str:
    """A sentence about one execution, from MyST-NB's record of it."""
    when = datetime.fromtimestamp(data["mtime"])
    seconds = f" in {max(1, round(data['runtime']))} s" if data.get("runtime") else ""
    return (
        f"Executed on {when.day} {when:%B %Y}{seconds} with Python {platform.python_version()}, "
        f"torch {version('torch').split('+')[0]}, lipmdeq {version('lipmdeq')}."
    )


def reading_time(text: str) -> str:
    """A sentence about a page of prose."""
    minutes = max(1, round(len(text.split()) / WORDS_PER_MINUTE))
    return f"{minutes} minute{'s' * (minutes > 1)} to read."


def add_facts(app: Sphinx, doctree: nodes.document) -> None:
    name = app.env.docname
    title = next(iter(doctree.findall(nodes.title)), None)
    if title is None or name.startswith(LOOKED_UP):
        return
    data = getattr(app.env, "nb_metadata", {}).get(name, {}).get("exec_data")
    in_box = any("lesson" in box["classes"] for box in doctree.findall(nodes.admonition))
    facts = [] if in_box else [reading_time(" ".join(node.astext() for node in doctree.findall(nodes.paragraph)))]
    if data and data.get("succeeded"):
        facts.append(executed(data))
    if facts:
        line = nodes.paragraph("", " ".join(facts), classes=["page-facts"])
        title.parent.insert(title.parent.index(title) + 1, line)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("doctree-read", add_facts, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
