"""Slides for the core lessons: one HTML file each, from the notebooks and the decks in book/teaching/slides/.

Usage: python tools/slides.py [folder]     (default: _build/slides)

A deck is a YAML list of slides with a ``title``, a list ``show`` and perhaps ``notes``. An entry of ``show`` is Markdown, or
begins with @ and takes something from the lesson, so that statements, figures and outputs cannot fall behind it:

    @banach-errors-figure           the output of a code cell: its figure, or what it prints
    @banach-layer code              the code of a cell
    @banach-theorem prf:theorem     the first such directive of a Markdown cell
    @banach-steps eq:banach-steps   the formula with this label

The first slide (the goals in the lesson's box) and the last two (its summary, its exercises) are made without being asked.
A file holds its pictures and MathJax itself and asks no host for anything.
"""

import base64
import html
import re
import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from portable import DISPLAY, ROOT, Book, blocks
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

DECKS = ROOT / "book" / "teaching" / "slides"
HERE = Path(__file__).resolve().parent
MATHJAX = "sphinx-mathjax-offline/static/mathjax/tex-svg-full.js"
CONFIG = 'window.MathJax = {startup: {typeset: false}, options: {enableMenu: false}, svg: {fontCache: "local", scale: 0.95}};'
MARKDOWN = MarkdownIt("commonmark").enable("table")
MARKDOWN.use(dollarmath_plugin, renderer=lambda text, opts: tex(text, opts["display_mode"]))


def tex(formula: str, display: bool) -> str:
    """A formula as MathJax finds it."""
    left, right = ("\\[", "\\]") if display else ("\\(", "\\)")
    return f"{left}{html.escape(formula)}{right}"


class Deck:
    """The slides of one lesson."""

    def __init__(self, book: Book, path: Path):
        self.book, self.name = book, path.stem
        self.slides = yaml.safe_load(path.read_text("utf8"))
        self.cells = {cell["id"]: cell for cell in book.notebooks[self.name]["cells"]}
        self.title = book.title(self.name)

    def markdown(self, text: str) -> str:
        return MARKDOWN.render(re.sub(r"\]\(\w+\.ipynb\)", "]()", self.book.plain(self.name, text)))

    def taken(self, reference: str) -> str:
        """The HTML of what ``@cell`` or ``@cell selector`` names."""
        cell_id, _, selector = reference[1:].partition(" ")
        if cell_id not in self.cells:
            raise ValueError(f"{self.name}: {reference}: the lesson has no cell {cell_id}")
        cell = self.cells[cell_id]
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            if selector == "code":
                return f'<pre class="code">{highlight(source, PythonLexer(), HtmlFormatter(nowrap=True))}</pre>'
            figures = [output for output in cell["outputs"] if "data" in output]
            return "".join(self.output(cell, output) for output in figures or cell["outputs"])
        found = None
        if selector.startswith("prf:"):
            found = next((b for b in blocks(source) if b.name == selector), None)
            found = found and MARKDOWN.render(self.book.plain_block(self.name, found))
        else:
            formula = next((m for m in DISPLAY.finditer(source) if m[2] == selector), None)
            found = formula and self.markdown(formula[0])
        if not found:
            raise ValueError(f"{self.name}: {reference}: the cell has nothing of that name")
        return found

    def output(self, cell: dict, output: dict) -> str:
        if output["output_type"] == "stream":
            text = html.escape("".join(output["text"]).rstrip())
            marked = re.sub(r"^([✓✗])", r"<b>\1</b>", text, flags=re.M)
            return f'<pre class="out">{marked}</pre>'
        svg = "".join(output["data"]["image/svg+xml"]).encode()
        image = cell["metadata"]["mystnb"]
        caption = self.markdown(re.sub(r"\s*Made by [^.]*\.", "", image["figure"]["caption"]))
        data = base64.b64encode(svg).decode()
        alt = html.escape(image["image"]["alt"], quote=True)
        return f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{alt}"><figcaption>{caption}</figcaption></figure>'

    def first(self) -> str:
        """Title, goals, and where it stands in the book; from the box at the head of the lesson."""
        box = next(b for b in blocks("".join(next(iter(self.cells.values()))["source"])) if b.name == "admonition")
        goals = re.search(r"\*\*You will be able to\*\* (.+?)\n\n", box.body, re.S)[1].rstrip(".")
        items = "\n".join(f"- {goal.strip()}" for goal in " ".join(goals.split()).split(";"))
        subtitle = f"{self.book.config['title']}, lesson {int(self.name[:2])}"
        return f'<p class="subtitle">{html.escape(subtitle)}</p><p>You will be able to</p>{self.markdown(items)}'

    def summary(self) -> str:
        text = "\n".join("".join(c["source"]) for c in self.cells.values() if c["cell_type"] == "markdown")
        return self.markdown(re.search(r"^## Summary\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1])

    def last(self) -> str:
        """The exercises, with their numbers in the book."""
        found = []
        for cell in self.cells.values():
            for block in blocks("".join(cell["source"])) if cell["cell_type"] == "markdown" else []:
                if block.name == "exercise":
                    called = self.book.labels[block.label][1]
                    found.append(f"**{called}.** {block.body.replace('**', '*')}")
        return self.markdown("\n\n".join(found))

    def html(self) -> str:
        pages = [self.slide(self.title, self.first(), "", "title")]
        for slide in self.slides:
            unknown = set(slide) - {"title", "show", "notes"}
            if unknown:
                raise ValueError(f"{self.name}: {sorted(unknown)}: a slide has title, show and notes")
            pieces = [self.taken(x) if x.startswith("@") else self.markdown(x) for x in slide["show"]]
            kind, body = arranged(pieces)
            title = MARKDOWN.renderInline(self.book.plain(self.name, slide["title"]))
            pages.append(self.slide(title, body, slide.get("notes", ""), kind))
        pages.append(self.slide("Summary", self.summary(), "", "text"))
        pages.append(self.slide("Exercises", self.last(), "", "text"))
        return page(self.title, "\n".join(pages), f"{self.name[:2]} · {self.title}")

    def slide(self, title: str, body: str, notes: str, kind: str) -> str:
        aside = f'<aside class="notes" hidden>{self.markdown(notes)}</aside>' if notes else ""
        body = body.replace('<a href="">', "<em>").replace("</a>", "</em>")  # nothing to click on a slide
        return f'<section class="slide {kind}"><h2>{title}</h2><div class="body">{body}</div>{aside}</section>'


def arranged(pieces: list[str]) -> tuple[str, str]:
    """Text to the left of a figure, printed lines below both; without a figure or without text one below the other."""
    figures = [piece for piece in pieces if piece.startswith("<figure")]
    printed = [piece for piece in pieces if piece.startswith("<pre")]
    text = [piece for piece in pieces if piece not in figures + printed]
    if not figures:
        return "text", "".join(pieces)
    if not text:
        return "figure", "".join(figures + printed)
    columns = f"<div>{''.join(text)}</div><div>{''.join(figures)}</div>"
    return "split", columns + (f'<div class="under">{"".join(printed)}</div>' if printed else "")


def page(title: str, slides: str, footer: str) -> str:
    """The whole file: slides, style, script, MathJax."""
    mathjax = Path(str(distribution("sphinx-mathjax-offline").locate_file(MATHJAX))).read_text("utf8")
    mathjax = mathjax.replace("</script", "<\\/script")
    style, script = ((HERE / f"slides.{kind}").read_text("utf8") for kind in ("css", "js"))
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style>\n'
        f'<main id="deck" data-footer="{html.escape(footer, quote=True)}">\n{slides}\n</main>\n'
        f"<script>{CONFIG}</script>\n<script>{mathjax}</script>\n"
        f"<script>\n{script}</script>\n</html>\n"
    )


def index(book: Book, decks: list[Deck]) -> str:
    """The page that lists all decks."""
    rows = "\n".join(
        f'<li value="{int(deck.name[:2])}"><a href="{deck.name}.html">{deck.title}</a>, {len(deck.slides) + 3} slides</li>'
        for deck in decks
    )
    style = (HERE / "slides.css").read_text("utf8")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Slides</title>\n<style>\n{style}</style>\n'
        f'<body class="index"><h1>{html.escape(book.config["title"])}: slides</h1>\n<ol>\n{rows}\n</ol>\n'
        "<p>Arrow keys move; N notes, O overview, D dark or light, ? all keys. Print for a PDF.</p></body></html>\n"
    )


def write(folder: Path, names: list[str] | None = None) -> list[Path]:
    """Write the decks (all, or those named) and the index into a folder; return the files of the decks."""
    book = Book()
    decks = [Deck(book, path) for path in sorted(DECKS.glob("*.yml")) if not names or path.stem in names]
    folder.mkdir(parents=True, exist_ok=True)
    for deck in decks:
        (folder / f"{deck.name}.html").write_text(deck.html(), "utf8")
    (folder / "index.html").write_text(index(book, decks), "utf8")
    return [folder / f"{deck.name}.html" for deck in decks]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "slides"
    shutil.rmtree(target, ignore_errors=True)
    print(f"Slides: {len(write(target))} lessons. Open: {target / 'index.html'}")
