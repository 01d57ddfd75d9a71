"""Sphinx extension: what a cross reference shows when it is hovered or focused.

Statements, numbered equations, glossary and bibliography entries and API names of all pages are collected into
``_static/previews.js``, which book.js loads when it is first needed. A script can be loaded from disk; a page cannot
be fetched from there.
"""

import json
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin

from bs4 import BeautifulSoup, Tag
from sphinx.application import Sphinx

LONGEST = 3000  # characters; a longer statement is better read in its place
TARGETS = "div.proof[id], div.exercise[id], div.math[id], dt[id^=term-], div.citation[id], dl.py > dt[id]"


def content(target: Tag) -> str:
    """The target as HTML, without ids, links and pictures; of an API name, its signature and first paragraph."""
    copy = BeautifulSoup(str(target), "html.parser")
    for node in copy.select("a.headerlink, .viewcode-link, span.backrefs, img"):
        node.decompose()
    described = target.find_next_sibling("dd") if target.name == "dt" else None
    if described and not target["id"].startswith("term-"):
        first = described.find("p", recursive=False)
        signature = escape(" ".join(copy.get_text().split()))
        copy = BeautifulSoup(f"<p><code>{signature}</code></p>{first or ''}", "html.parser")
    elif described:
        copy = BeautifulSoup(f"<p><b>{copy.get_text().strip()}</b></p>{described.decode_contents()}", "html.parser")
    for link in copy.find_all("a"):
        link.unwrap()
    for node in copy.find_all(True):
        node.attrs = {key: value for key, value in node.attrs.items() if key == "class"}
    return str(copy)


def collect(html: Path) -> dict[str, str]:
    """``book/page.html#id`` -> HTML of what is there, for every target to which some page has a link."""
    found, wanted = {}, set()
    for page in sorted([*html.glob("book/**/*.html"), *html.glob("notebooks/*.html")]):
        text, name = page.read_text("utf8"), page.relative_to(html).as_posix()
        article = BeautifulSoup(text[text.find("<article") : text.rfind("</article>")], "html.parser")
        for link in article.select("a.internal[href*='#']:not(.headerlink)"):
            wanted.add(unquote(urljoin(name, link["href"])))
        for target in article.select(TARGETS):
            found[f"{name}#{target['id']}"] = content(target)
    return {name: shown for name, shown in found.items() if name in wanted and len(shown) <= LONGEST}


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        html = Path(app.outdir)
        data = json.dumps(collect(html), ensure_ascii=False, indent=0)
        (html / "_static" / "previews.js").write_text(f"window.bookPreviews = {data};\n", "utf8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
