"""Sphinx extension: ``{interactive} player`` or ``{interactive} explorer`` puts an interactive element into a lesson.

The element keeps its own page, book/player.md or book/explorer.md, and that page holds the only copy of its markup: the
directive repeats the raw html block found there. The markup asks for ``../_static``, so the lesson must lie one folder
deep, as all lessons do.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BOOK = Path(__file__).resolve().parent.parent
ELEMENTS = ("player", "explorer")
BLOCK = re.compile(r"^```\{raw\} html\n(.*?)^```$", re.M | re.S)


def markup(name: str) -> str:
    """The raw html block of ``book/<name>.md``.

    Raises:
        ValueError: there is no such element, or its page does not have exactly one block.
    """
    if name not in ELEMENTS:
        raise ValueError(f"interactive {name}: must be one of {', '.join(ELEMENTS)}")
    found = BLOCK.findall((BOOK / f"{name}.md").read_text("utf8"))
    if len(found) != 1:
        raise ValueError(f"book/{name}.md: {len(found)} raw html blocks, must be one")
    return found[0]


class Interactive(SphinxDirective):
    """The element of another page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.env.docname.count("/") != 1:
            raise self.error(f"interactive in {self.env.docname}: must be in a page one folder deep")
        name = self.arguments[0]
        try:
            text = markup(name)
        except ValueError as error:
            raise self.error(str(error)) from None
        self.env.note_dependency(str(BOOK / f"{name}.md"))
        return [nodes.raw("", text, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("interactive", Interactive)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
