"""The student edition: every lesson without solutions and outputs, in plain Markdown, ready to run and to hand out.

Usage: python tools/student.py [folder]     (default: _build/student)

The folder holds all that is needed: notebooks, the package, the small trained model and the configurations that
two lessons read. Nothing in it is written by hand, so it is never stored in the repository.
"""

import copy
import re
import shutil
import sys
from pathlib import Path

import nbformat
from portable import ROOT, Book, blocks

COPIED = ["lipmdeq", "pyproject.toml", "constraints.txt", "LICENSE", "LICENSE-TEXT", "configs/paper"]
COPIED += ["configs/cpu", "results/digits", "results/cpu", "results/bench", "results/paper.yaml"]
ANSWER = "**Your answer.** *Write here.*"
README = """# {title}: student edition

The lessons without solutions. Each exercise in code has a first attempt that runs, and a checker that answers ✓ or ✗
for each property; an unfinished answer gets "not yet". Answers on paper go into the cells "Your answer".

With Python 3.11 to 3.13 in this folder:

    python -m venv .venv
    .venv/bin/python -m pip install -c constraints.txt -e '.[book,workflow]'
    .venv/bin/python -m jupyterlab notebooks/

(on Windows `.venv\\Scripts\\python`). Start with `notebooks/01_banach.ipynb`; `notebooks/lab.md` is a lab
of two hours. Text and figures are CC BY 4.0, code is MIT.
"""


def strip(book: Book, name: str) -> list[dict]:
    """The cells of a lesson for students: solutions gone, exercises followed by room for an answer."""
    cells, hidden = [], False
    source_cells = book.notebooks[name]["cells"]
    for index, cell in enumerate(source_cells):
        if cell["cell_type"] == "code":
            if not hidden:
                cells += code_cells(book, name, cell)
            continue
        graded = index + 1 < len(source_cells) and source_cells[index + 1]["cell_type"] == "code"
        kept: list[str] = []
        parts = blocks(re.sub(r"^\([\w-]+\)=\n", "", "".join(cell["source"]), flags=re.M))
        for position, block in enumerate(parts):
            if block.name in ("solution-start", "solution-end"):
                hidden = block.name == "solution-start"
            elif not hidden and block.name != "solution":
                kept.append(book.plain_block(name, block))
                if block.name == "exercise" and not (graded and position == len(parts) - 1):
                    cells += markdown_cells(cell["id"], kept, len(cells))
                    cells.append(nbformat.v4.new_markdown_cell(ANSWER, id=f"answer-{len(cells)}"))
                    kept = []
        cells += markdown_cells(cell["id"], kept, len(cells))
    if hidden:
        raise ValueError(f"{name}: a {{solution-start}} without {{solution-end}}")
    return cells


def markdown_cells(cell_id: str, texts: list[str], count: int) -> list[dict]:
    """One cell with the texts, or none if there is nothing in them."""
    if not any(text.strip() for text in texts):
        return []
    return [nbformat.v4.new_markdown_cell("\n\n".join(texts), id=f"{cell_id[:50]}-{count}")]


def code_cells(book: Book, name: str, cell: dict) -> list[dict]:
    """The cell without outputs and, if it draws a numbered figure, its caption."""
    cleared = nbformat.from_dict(copy.deepcopy(cell))
    cleared.source = "".join(cell["source"])
    cleared.outputs, cleared.execution_count = [], None
    if "hide-input" in cleared.metadata.get("tags", []):  # JupyterLab's word for it
        cleared.metadata["jupyter"] = {"source_hidden": True}
    figure = cleared.metadata.get("mystnb", {}).get("figure")
    if not figure:
        return [cleared]
    called = book.labels[figure["name"]][1]
    text = f"*{called}.* " + book.plain(name, figure["caption"])
    return [cleared, nbformat.v4.new_markdown_cell(text, id=f"{cell['id'][:50]}-caption")]


def lab(book: Book) -> str:
    """The page of the lab without what is meant for the instructor."""
    text = (ROOT / "book" / "teaching" / "lab.md").read_text("utf8")
    return book.plain("lab", text.split("## For the instructor")[0]).rstrip() + "\n"


def write(folder: Path, book: Book | None = None) -> list[Path]:
    """Write the whole edition into an empty or a new folder; return the notebooks."""
    book = book or Book()
    (folder / "notebooks").mkdir(parents=True)
    written = []
    for name in book.names:
        notebook = nbformat.v4.new_notebook(cells=strip(book, name))
        notebook.metadata = {"kernelspec": book.notebooks[name]["metadata"]["kernelspec"]}
        nbformat.validate(notebook)
        written.append(folder / "notebooks" / f"{name}.ipynb")
        nbformat.write(notebook, written[-1])
    for item in COPIED:
        source, target = ROOT / item, folder / item
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    (folder / "notebooks" / "lab.md").write_text(lab(book), "utf8")
    (folder / "README.md").write_text(README.format(title=book.config["title"]), "utf8")
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "student"
    shutil.rmtree(target, ignore_errors=True)
    print(f"Student edition: {len(write(target))} notebooks in {target / 'notebooks'}")
