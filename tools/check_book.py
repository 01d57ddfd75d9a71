"""Does the built book hold every page of the table of contents, did every notebook run to its end, do links inside
the book lead somewhere, is no page heavy, does none ask another host for anything?

Exit code 0 and one line, or 1 and one line for each fault.
"""

import json
import re
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import yaml

ROOT = Path(__file__).resolve().parent.parent
HEAVIEST = 3_000_000  # bytes of a page with its scripts, styles and pictures; pages of the API may have more
LINK = re.compile(r'<a\b[^>]*? href="([^"]*)"')
PART = re.compile(r'<(?:img|script|iframe|source)\b[^>]*? src="([^"]*)"|<link\b[^>]*?stylesheet[^>]*? href="([^"]*)"')
LINK_FIRST = re.compile(r'<link href="([^"]*)" rel="stylesheet"')


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


def page_faults(html: Path, names: list[str]) -> list[str]:
    """One sentence per link that leads nowhere, part from another host, and page that is too heavy."""
    texts = {html / f"{name}.html": (html / f"{name}.html").read_text("utf8") for name in names}
    ids = {path: set(map(unescape, re.findall(r' id="([^"]+)"', text))) for path, text in texts.items()}
    scripts = (html / "_static" / "mathjax").rglob("*.js")
    mathjax = sum(path.stat().st_size for path in scripts if path.parent.name != "extensions")  # on demand only
    found = []
    for path, text in texts.items():
        name = path.relative_to(html).with_suffix("").as_posix()
        for href in {unescape(href) for href in LINK.findall(text)}:
            target, fragment = urldefrag(href)
            if urlparse(href).scheme:
                continue
            file = (path.parent / unquote(target.split("?")[0])).resolve() if target else path
            if not file.is_file():
                found.append(f"{name}: a link to {target}, which does not exist")
            elif fragment and file in ids and unquote(fragment) not in ids[file]:
                found.append(f"{name}: a link to {href}, but there is no {fragment}")
        weight = len(text.encode("utf8")) + (mathjax if "window.MathJax" in text else 0)
        for source in {a or b for a, b in PART.findall(text)} | set(LINK_FIRST.findall(text)):
            if source.startswith("data:"):
                continue
            file = (path.parent / unquote(unescape(source).split("?")[0])).resolve()
            if urlparse(source).scheme or source.startswith("//"):
                found.append(f"{name}: asks another host for {source}")
            elif not file.is_file():
                found.append(f"{name}: {source} does not exist")
            else:
                weight += file.stat().st_size
        if weight > HEAVIEST and not name.startswith("book/api/"):
            found.append(f"{name}: weighs {weight / 1e6:.1f} MB, more than {HEAVIEST / 1e6:g} MB")
    return found


if __name__ == "__main__":
    found = faults()
    if not found:
        names = pages(yaml.safe_load((ROOT / "_toc.yml").read_text("utf8")))
        found = page_faults((ROOT / "_build" / "html").resolve(), names)
    for fault in found:
        print(f"check_book: {fault}", file=sys.stderr)
    if not found:
        print("Book: every page is there, every notebook ran to its end, every link inside leads somewhere")
    sys.exit(bool(found))
