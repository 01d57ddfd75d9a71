"""The whole book as one PDF, _build/pdf/book.pdf, printed by Chromium; no LaTeX.

The articles of the built pages are put one after the other into one HTML file, in the order of _toc.yml, behind a
title page and a table of contents.
Interactive pages keep their text. `make book` is run first if the book is not built or not the current one.

Usage: python tools/pdf.py [--html folder] [--out file]
"""

import argparse
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from urllib.parse import unquote, urldefrag

import yaml
from bs4 import BeautifulSoup, Tag
from check_book import ROOT, faults, pages

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
NOT_PRINTED = "a.headerlink, .viewcode-link, script, button, .prev-next-footer, noscript, .lip-app"

STYLE = re.compile(r'<link[^>]* href="[./]*_static/([^"?]+\.css)')
FILL_IN = """numbers => document.querySelectorAll(".chapters a").forEach(
    link => link.querySelector("b").textContent = numbers[link.getAttribute("href").slice(1)] ?? "")"""


def slug(page: str) -> str:
    return re.sub(r"\W+", "-", page)


def parts(toc: dict) -> list[tuple[str, list[str]]]:
    """(caption, pages) of each part; the start page stands alone before them."""
    return [("", [toc["root"]])] + [(part["caption"], pages(part["chapters"])) for part in toc["parts"]]


def link(href: str, page: str, known: set[str]) -> str:
    """A link of ``page`` as one inside the single file; to a page that is not in it, no link."""
    if re.match(r"[a-z]+:", href):
        return href
    target, fragment = urldefrag(href)
    other = page
    if target:
        joined = Path("/" + page).parent.joinpath(unquote(target)).as_posix()
        other = re.sub(r"[^/]+/\.\./", "", re.sub(r"[^/]+/\.\./", "", joined)).strip("/").removesuffix(".html")
    if other not in known:
        return ""
    return f"#{slug(other)}" + (f"--{unquote(fragment)}" if fragment else "")


def article(html: Path, page: str, known: set[str]) -> Tag:
    """The article of one built page, with ids, links and pictures that work in the single file."""
    text = (html / f"{page}.html").read_text("utf8")
    start = text.index('<article class="bd-article"')
    found = BeautifulSoup(text[start : text.index("</article>", start) + 10], "html.parser").article
    for node in found.select(".lip-app"):
        node.insert_after(
            BeautifulSoup(f"<p><i>Interactive: open {page}.html of the built book.</i></p>", "html.parser")
        )
    for node in found.select(NOT_PRINTED):
        node.decompose()
    for node in found.find_all("details"):
        node["open"] = ""
    for node in found.select("td code"):  # long names may break after a dot or an underscore
        node.string = re.sub(r"(::|[._])", "\\1\u200b", node.get_text())
    for node in found.find_all(True):
        if "id" in node.attrs:
            node["id"] = f"{slug(page)}--{node['id']}"
        if node.name == "a" and "href" in node.attrs:
            node["href"] = link(node["href"], page, known)
            if not node["href"]:
                del node["href"]
        for key in ("src", "data"):
            if key in node.attrs and not re.match(r"[a-z]+:", node[key]):
                node[key] = (html / f"{page}.html").parent.joinpath(unquote(node[key])).resolve().as_uri()
    return found


def title_of(chapter: Tag) -> str:
    return chapter.h1.get_text().strip()


def assemble(html: Path) -> str:
    """The single HTML file."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    settings = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
    known = set(pages(toc))
    contents, body = "", ""
    for caption, names in parts(toc):
        contents += f"<h2>{escape(caption)}</h2>" if caption else ""
        for index, name in enumerate(names):
            chapter = article(html, name, known)
            title = "Introduction" if name == toc["root"] else title_of(chapter)
            contents += f'<a href="#{slug(name)}"><span>{escape(title)}</span><i></i><b></b></a>'
            part = f'<p class="part">{escape(caption)}</p>' if caption and not index else ""
            body += f'<section class="chapter" id="{slug(name)}">{part}{chapter}</section>\n'
    source = (html / f"{toc['root']}.html").read_text("utf8")
    static = (html / "_static").as_uri()
    found = [re.findall(STYLE, (html / f"{name}.html").read_text("utf8")) for name in sorted(known)]
    styles = dict.fromkeys(re.findall(STYLE, source) + sum(found, []))  # some pages have their own
    mathjax = re.search(r"<script>window\.MathJax = .*?</script>", source)[0]
    mathjax = mathjax.replace(', "a11y/assistive-mml"', "")  # a copy of each formula that nobody sees on paper
    return f"""<!DOCTYPE html>
<html lang="en" data-theme="light" data-mode="light"><head><meta charset="utf-8"><title>{escape(settings["title"])}</title>
{"".join(f'<link rel="stylesheet" href="{static}/{style}">' for style in styles)}
<link rel="stylesheet" href="{(ROOT / "tools" / "pdf.css").as_uri()}">
{mathjax}<script defer src="{static}/mathjax/startup.js"></script></head>
<body><section class="cover"><img src="{static}/logo.svg" alt="">
<p class="title">{escape(settings["title"])}</p><p>An executable companion to the paper of Sato and Iiduka</p>
<p>{escape(settings["author"])}<br>Version {citation["version"]}</p>
<p class="licence">Code: MIT licence. Text and figures: CC BY 4.0.</p></section>
<nav class="chapters"><p class="title">Contents</p>{contents}</nav>
<main class="bd-content">{body}</main></body></html>
"""


def first_pages(pdf: bytes) -> dict[str, int]:
    """Named destination -> number of its page, from a PDF that Chromium wrote (its objects are plain text)."""
    objects = {int(n): text for n, text in re.findall(rb"\n(\d+) 0 obj\s(.*?)\sendobj", pdf, re.S)}

    def leaves(number: int) -> list[int]:
        kids = re.search(rb"/Kids\s*\[(.*?)\]", objects[number], re.S)
        if not kids or b"/Type /Pages" not in objects[number]:
            return [number]
        return [leaf for kid in re.findall(rb"(\d+) 0 R", kids[1]) for leaf in leaves(int(kid))]

    root = next(text for text in objects.values() if b"/Type /Catalog" in text)
    order = leaves(int(re.search(rb"/Pages (\d+) 0 R", root)[1]))
    number = {page: index for index, page in enumerate(order, 1)}
    found = {}
    for name, page in re.findall(rb"/([^\s/\[\]()<>]+)\s*\[(\d+) 0 R /XYZ", pdf):
        plain = re.sub(rb"#([0-9a-fA-F]{2})", lambda m: bytes([int(m[1], 16)]), name).decode("utf8", "replace")
        found.setdefault(plain, number.get(int(page), 0))
    return found


def print_pdf(browser: str, single: Path, out: Path) -> None:
    """Wait until mathematics and pictures are there, then print twice: the first print has the page numbers."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=browser, args=FLAGS)
        page = started.new_page()
        page.set_default_timeout(600_000)
        page.goto(single.as_uri(), wait_until="load")
        page.evaluate("MathJax.startup.promise")
        for _ in range(2):
            page.pdf(path=out, prefer_css_page_size=True, print_background=True, outline=True, tagged=True)
            page.evaluate(FILL_IN, first_pages(out.read_bytes()))
        started.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--html", type=Path, default=ROOT / "_build" / "html", help="the built book")
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "pdf" / "book.pdf")
    args = parser.parse_args()
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        print("pdf: no Chromium on this machine (Debian, Ubuntu: apt-get install chromium)", file=sys.stderr)
        return 1
    if args.html == ROOT / "_build" / "html" and faults():
        subprocess.run([ROOT / "tools" / "book.sh"], check=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    single = args.out.with_suffix(".html")
    single.write_text(assemble(args.html.resolve()), "utf8")
    print("pdf: printing", flush=True)
    print_pdf(browser, single, args.out)
    print(f"pdf: {args.out}, {args.out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
