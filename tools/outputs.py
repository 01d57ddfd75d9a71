"""Execute notebooks in place and store their outputs, the same bytes at each run, also on a machine that rounds differently.

Usage: python tools/outputs.py notebooks/07_normalisation.ipynb …
"""

import copy
import sys
import time
from pathlib import Path

import nbformat
from compare import settle
from nbclient import NotebookClient

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def refresh(path: Path) -> None:
    """Run one notebook in its own folder; keep no time stamps and no version of the machine's Python."""
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["kernelspec"] = KERNEL
    stored = {cell.id: copy.deepcopy(cell.get("outputs", [])) for cell in notebook.cells}
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    kept = {key: notebook.metadata[key] for key in notebook.metadata if key not in ("language_info", "widgets")}
    notebook.metadata = nbformat.from_dict({**kept, "language_info": {"name": "python"}})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    merge_streams(notebook)
    for cell in notebook.cells:  # what looks as before stays as it was
        if cell.cell_type == "code":
            cell.outputs = settle(stored[cell.id], cell.outputs, "measured" in cell.metadata.get("tags", []))
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def merge_streams(notebook: nbformat.NotebookNode) -> None:
    """Join neighbouring pieces of printed text: how a kernel cuts them depends on timing."""
    for cell in notebook.cells:
        merged: list = []
        for output in cell.get("outputs", []):
            last = merged[-1] if merged else None
            if last and output.output_type == last.output_type == "stream" and output.name == last.name:
                last.text += output.text
            else:
                merged.append(output)
        if cell.cell_type == "code":
            cell.outputs = merged


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        start = time.monotonic()
        refresh(Path(name))
        print(f"{name}: executed in {time.monotonic() - start:.1f} s")
