"""MyST Markdown of the lessons in plain Markdown, which every notebook program and every Markdown reader shows.

Used by tools/student.py and tools/slides.py. Numbers of lemmas and exercises are those of the book, because the
notebooks are read in the order of ``_toc.yml``.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml
from check_book import pages

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(`{3,}|:{3,})\{([\w:-]+)\}[ \t]*(.*)$")
OPTION = re.compile(r"^:[\w-]+:.*$")
DISPLAY = re.compile(r"^\$\$\n(.*?)\n\$\$(?:[ ]\(([\w:-]+)\))?", re.M | re.S)
ROLE = re.compile(r"\{([\w:]+)\}`([^`]+)`")
TITLED = re.compile(r"(.+?)\s*<([^<>]+)>", re.S)  # of {ref}`words <label>`
NAME = re.compile(r"^:name: (\S+)$", re.M)
LABEL = re.compile(r"^:label: (\S+)$", re.M)
BUTTON = re.compile(r"<button[^>]*data-try.*?</button>[ ]*")  # they move an interactive element of the book


@dataclass
class Block:
    """A directive (``name`` such as prf:lemma) or a stretch of plain text (``name`` empty)."""

    name: str
    title: str
    options: str
    body: str

    @property
    def label(self) -> str:
        found = LABEL.search(self.options)
        return found[1] if found else ""


def blocks(text: str) -> list[Block]:
    """Cut Markdown into directives and the text between them."""
    lines, found, plain = text.split("\n"), [], []
    while lines:
        opening = FENCE.match(lines[0])
        if not opening:
            plain.append(lines.pop(0))
            continue
        if "".join(plain).strip():
            found.append(Block("", "", "", "\n".join(plain).strip("\n")))
        plain, fence = [], lines.pop(0)
        end = lines.index(opening[1])  # a ValueError here is a fence that is never closed
        inside, lines = lines[:end], lines[end + 1 :]
        options = []
        while inside and OPTION.match(inside[0]):
            options.append(inside.pop(0))
        body = "\n".join(inside).strip("\n")
        found.append(Block(opening[2], FENCE.match(fence)[3].strip(), "\n".join(options), body))
    if "".join(plain).strip():
        found.append(Block("", "", "", "\n".join(plain).strip("\n")))
    return found


def expand(text: str, macros: dict[str, str | list]) -> str:
    """Replace the book's own TeX commands by what they stand for."""
    for name, meaning in macros.items():
        template, takes = (meaning, 0) if isinstance(meaning, str) else meaning
        command = re.compile(rf"\\{name}(?![a-zA-Z])")
        while found := command.search(text):
            end, argument = found.end(), ""
            if takes:
                start = re.compile(r"\s*").match(text, end).end()
                argument, end = next_token(text, start)
            text = text[: found.start()] + template.replace("#1", argument) + text[end:]
    return text


def next_token(text: str, start: int) -> tuple[str, int]:
    """The TeX argument at ``start``: a group in braces, a command, or one character."""
    if text[start] == "\\":
        end = re.compile(r"\\([a-zA-Z]+|.)").match(text, start).end()
        return text[start:end] + " ", end
    if text[start] != "{":
        return text[start], start + 1
    depth = 0
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0) if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[start + 1 : end], end + 1
    raise ValueError(f"unbalanced braces: {text[start : start + 40]}")


class Book:
    """All notebooks of the table of contents, and what their labels are called."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.names = [
            Path(page).name
            for page in pages(yaml.safe_load((root / "_toc.yml").read_text("utf8")))
            if (root / f"{page}.ipynb").is_file()
        ]
        self.notebooks = {
            name: json.loads((root / "notebooks" / f"{name}.ipynb").read_text("utf8")) for name in self.names
        }
        self.config = yaml.safe_load((root / "_config.yml").read_text("utf8"))
        self.macros = self.config["sphinx"]["config"]["mathjax3_config"]["tex"]["macros"]

    def title(self, name: str) -> str:
        first = "".join(self.notebooks[name]["cells"][0]["source"])
        return re.search(r"^# (.+)$", first, re.M)[1]

    @cached_property
    def labels(self) -> dict[str, tuple[str, str]]:
        """From each label to the lesson that has it and to its name there, such as ("05_…", "Lemma 2")."""
        found, counts = {}, {}
        for name, notebook in self.notebooks.items():
            equation = figure = 0
            for cell in notebook["cells"]:
                source = "".join(cell["source"])
                if caption := cell["metadata"].get("mystnb", {}).get("figure"):
                    figure += 1
                    # a page without a number, such as train, has plain numbers
                    chapter = f"{int(name[:2])}." if name[:2].isdecimal() else ""
                    found[caption["name"]] = name, f"Figure {chapter}{figure}"
                if cell["cell_type"] != "markdown":
                    continue
                for block in blocks(source):
                    if named := NAME.search(block.options):
                        found[named[1]] = name, "the table"
                    if block.name == "exercise" or (block.name.startswith("prf:") and block.label):
                        kind = block.name.removeprefix("prf:").capitalize()
                        counts[kind] = counts.get(kind, 0) + 1
                        found[block.label] = name, f"{kind} {counts[kind]}"
                for _, label in DISPLAY.findall(source):
                    if label:
                        equation += 1
                        found[label] = name, f"({equation})"
                for label in re.findall(r"^\(([\w-]+)\)=$", source, re.M):
                    found[label] = name, self.title(name)
        return found

    @cached_property
    def sources(self) -> dict[str, str]:
        """From each key of the bibliography to "Authors (year)"."""
        text = (self.root / "book" / "references.bib").read_text("utf8")
        found = {}
        for key, entry in re.findall(r"^@\w+\{(\S+),\n(.*?)^\}", text, re.M | re.S):
            author, year = (re.search(rf"{f}\s*=\s*\{{(.+?)\}},?$", entry, re.M) for f in ("author", "year"))
            family = [person.split(",")[0].strip("{} ") for person in author[1].split(" and ")]
            short = f"{family[0]} et al." if len(family) > 2 else " and ".join(family)
            found[key] = f"{short} ({year[1]})"
        return found

    def role(self, lesson: str, kind: str, target: str) -> str:
        """The plain Markdown of one role, such as {doc}`07_normalisation` or {ref}`words <label>`."""
        if kind.startswith("cite"):
            named = ", ".join(self.sources[key.strip()] for key in target.split(","))
            return named if kind == "cite:t" else f"({named.replace(' (', ', ').replace(')', '')})"
        if titled := TITLED.fullmatch(target):
            return self.link(lesson, kind, *titled.groups())
        if kind == "doc":
            target = target.removeprefix("/notebooks/")
            return f"[{self.title(target)}]({target}.ipynb)" if target in self.names else f"*{target}*"
        home, called = self.labels[target]
        called = f"equation {called}" if kind == "eq" and home != lesson else called
        return called if home == lesson else f"{called} of [{self.title(home)}]({home}.ipynb)"

    def link(self, lesson: str, kind: str, words: str, target: str) -> str:
        """The words of a role with a title, linked where another notebook of the edition holds the target."""
        if kind == "doc":
            home = target.removeprefix("/notebooks/")
        else:
            home = self.labels.get(target, (lesson,))[0]  # a label of a page that is no notebook: the words alone
        return f"[{words}]({home}.ipynb)" if home in self.names and home != lesson else words

    def plain(self, lesson: str, text: str) -> str:
        """Plain Markdown of a piece of MyST text of a lesson; formulas on one line, as block quotes need it."""
        text = re.sub(r"^\([\w-]+\)=\n", "", text, flags=re.M)
        return "\n\n".join(self.plain_block(lesson, block) for block in blocks(text))

    def plain_block(self, lesson: str, block: Block) -> str:
        if block.name == "interactive":
            return f"*(In the book an interactive element stands here; it has a page of its own, book/{block.title}.)*"
        text = DISPLAY.sub(lambda m: self.display(*m.groups()), BUTTON.sub("", block.body))
        text = ROLE.sub(lambda m: self.role(lesson, *m.groups()), text)
        text = expand(text, self.macros)
        if not block.name:
            return text
        called = self.labels[block.label][1] if block.label in self.labels else block.title
        if block.name == "list-table":
            rows = [re.split(r"\n  - ", row) for row in re.split(r"^\* - ", text, flags=re.M)[1:]]
            lines = ["| " + " | ".join(" ".join(cell.split()) for cell in row) + " |" for row in rows]
            return "\n".join([f"*{block.title}*", "", lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
        if block.name == "exercise":
            return f"### {called}\n\n{text}"
        if block.name == "prf:proof":
            text = f"*Proof.* {text}"
        elif block.name == "admonition":
            text = f"**{block.title}**\n\n{text}"
        else:
            text = f"**{called}{f' ({block.title})' if block.title else ''}.** {text}"
        return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))

    def display(self, formula: str, label: str | None) -> str:
        tag = f" \\tag{{{self.labels[label][1].strip('()')}}}" if label else ""
        return f"$$ {' '.join(formula.split())}{tag} $$"
