"""Does the built book hold every page of the table of contents, and did every notebook run to its end?

Exit code 0 and one line, or 1 and one line for each fault.
"""

import json
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def pages(entry: object) -> list[str]:
    """All documents named in a table of contents, in reading order, without suffix."""
    if isinstance(entry, list):
        return [page for item in entry for page in pages(item)]
    if not isinstance(entry, dict):
        return []
    own = [entry[key] for key in ("root", "file") if key in entry]
    return own + [page for value in entry.values() for page in pages(value)]


def faults(root: Path = ROOT) -> list[str]:
    """One sentence per missing page, page without content, and notebook cell that failed or never ran."""
    found = []
    build = root / "_build"
    for page in pages(yaml.safe_load((root / "_toc.yml").read_text("utf8"))):
        html = build / "html" / f"{page}.html"
        if not html.is_file():
            found.append(f"{page}: no page {html.relative_to(root)}")
        elif "<h1>" not in html.read_text("utf8"):
            found.append(f"{page}: the page has no title")
        if not (root / f"{page}.ipynb").is_file():
            continue
        executed = build / "jupyter_execute" / f"{page}.ipynb"
        if not executed.is_file():
            found.append(f"{page}: the notebook was not executed")
            continue
        for index, cell in enumerate(json.loads(executed.read_text("utf8"))["cells"]):
            if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
                continue
            if cell.get("execution_count") is None:
                found.append(f"{page}: cell {index} was not executed")
            if any(output["output_type"] == "error" for output in cell["outputs"]):
                found.append(f"{page}: cell {index} raised an error")
    return found


if __name__ == "__main__":
    found = faults()
    for fault in found:
        print(f"check_book: {fault}", file=sys.stderr)
    if not found:
        print("Book: every page is there, every notebook ran to its end")
    sys.exit(bool(found))
