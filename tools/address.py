"""Bring the first cell of every notebook in line with the repository's address in _config.yml.

Set: a cell, not shown in the book, that installs the package on Colab. Empty: no such cell. Nothing is executed;
the stored outputs stay, and the cells are numbered anew.

Usage: python tools/address.py
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from repository import address, colab_source  # noqa: E402

TAG = "colab"


def with_cell(notebook: dict, url: str) -> dict:
    """The notebook with the cell for ``url``, or without one if ``url`` is empty."""
    cells = [cell for cell in notebook["cells"] if TAG not in cell["metadata"].get("tags", [])]
    if url:
        own = {
            "cell_type": "code",
            "execution_count": 1,
            "id": "colab",
            "metadata": {"tags": [TAG, "remove-cell"]},
            "outputs": [],
            "source": colab_source(url).splitlines(keepends=True),
        }
        cells.insert(0, own)
    ran = [cell for cell in cells if cell["cell_type"] == "code" and cell.get("execution_count")]
    for count, cell in enumerate(ran, 1):
        cell["execution_count"] = count
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = count
    return {**notebook, "cells": cells}


def main() -> None:
    url = address()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        old = json.loads(path.read_text("utf8"))
        new = with_cell(json.loads(path.read_text("utf8")), url)
        if new != old:
            path.write_text(json.dumps(new, indent=1, ensure_ascii=False) + "\n", "utf8")
            print(f"{path.relative_to(ROOT)}: {'first cell written' if url else 'first cell removed'}")
    print(f"address: {url or 'none, so no cell, and no button in the book'}")


if __name__ == "__main__":
    main()
