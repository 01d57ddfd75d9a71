"""Sphinx extension: small repairs of the theme's pages for screen readers, made when all pages are written.

The accessible name of a control must contain the words that are seen on it; a control needs a name; what stands on
a page belongs to a landmark. tests/test_browser.py looks at the result with axe-core.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# What is wrong, what it becomes, and whether every page has it
DONE = '<nav aria-label="Start">'
REPAIRS = [
    (re.compile(r'(<button class="btn search-button-field[^>]*?) title="Search" aria-label="Search"'), r"\1", True),
    (re.compile(r'(<i class="theme-switch [^>]*?)\s+title="[^"]*"'), r"\1", True),
    (re.compile(r'<a class="navbar-brand logo".*?</a>', re.S), rf"{DONE}\g<0></nav>", True),
    (re.compile(r'<summary aria-label="Toggle hidden content">'), "<summary>", False),
    (re.compile(r'<summary>(<span class="toctree-toggle")'), r'<summary aria-label="Pages below">\1', False),
]


def repaired(text: str, name: str) -> str:
    """The page's HTML with all repairs; an error if the theme no longer writes what is to be repaired."""
    for wrong, right, everywhere in REPAIRS:
        text, count = wrong.subn(right, text)
        if everywhere and not count:
            raise ExtensionError(f"{name} has no {wrong.pattern!r}: look at REPAIRS in book/_ext/accessible.py")
    return text


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for page in Path(app.outdir).rglob("*.html"):
            text = page.read_text("utf8")
            if "bd-sidebar-primary" in text and DONE not in text:
                page.write_text(repaired(text, page.name), "utf8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
