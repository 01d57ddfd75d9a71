"""The book's own code: API pages against what lessons use, buttons against the one address."""

import inspect
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "book" / "_ext"), str(ROOT / "tools")]

import address  # noqa: E402
import api  # noqa: E402
import check_book  # noqa: E402
import facts  # noqa: E402
import pdf  # noqa: E402
import repository  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ROOMS = ("bounds", "norms", "model", "solvers", "data", "experiments")


def look_up(name: str) -> object:
    _, module, *path = name.split(".")
    found = import_module(f"lipmdeq.{module}")
    for part in path:
        found = getattr(found, part)
    return found


# ---- API pages


@pytest.mark.parametrize("name", api.documented())
def test_described_names_exist_and_have_doc_strings(name):
    assert inspect.getdoc(look_up(name))


def test_no_name_is_described_twice():
    assert len(api.documented()) == len(set(api.documented()))


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_offers_is_described(room):
    """Every class and function that a room passes on from its files."""
    module = import_module(f"lipmdeq.{room}")
    names = getattr(module, "__all__", vars(module))
    offered = [n for n in names if n[0] != "_" and (inspect.isclass(x := getattr(module, n)) or inspect.isroutine(x))]
    assert len(offered) > 5 or room == "norms"
    assert not [name for name in offered if f"lipmdeq.{room}.{name}" not in api.documented()]


def test_every_public_name_of_the_package_is_described():
    import lipmdeq

    names = [f"lipmdeq.{home}.{name}" for home, words in lipmdeq._HOMES.items() for name in words.split()]
    assert len(names) == len(lipmdeq.__all__) - 1  # and the version
    assert not [name for name in names if api.full_name(name) is None]


def test_the_coverage_table_links_to_descriptions():
    for entry in yaml.safe_load((ROOT / "book" / "coverage.yml").read_text("utf8")):
        for name in entry.get("code", []):  # sections have none
            full = api.full_name(name)
            assert full and look_up(full) is not None, name
            owner, _, method = full.rpartition(".")
            if inspect.isclass(look_up(owner)):  # pages list what a class itself defines, not what it inherits
                assert method in vars(look_up(owner)) | look_up(owner).__dict__.get("__annotations__", {}), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lessons_end_with_links_to_what_they_import(path):
    assert api.imported(path)


# ---- the bibliography


def cited() -> set[str]:
    """The keys that some page of the book cites."""
    texts = [path.read_text("utf8") for path in (ROOT / "book").rglob("*.md")]
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text("utf8"))["cells"]
        texts += ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    found = re.findall(r"\{cite(?::\w+)?\}`([^`]+)`", "\n".join(texts))
    return {key.strip() for keys in found for key in keys.split(",")}


def test_every_entry_of_the_bibliography_is_cited_and_every_citation_has_an_entry():
    keys = re.findall(r"^@\w+\{([^,]+),$", (ROOT / "book" / "references.bib").read_text("utf8"), re.M)
    assert len(keys) == len(set(keys)) > 60
    assert set(keys) == cited(), sorted(set(keys) ^ cited())


# ---- the address of the repository


def links(options: dict) -> list:
    launch = options["launch_buttons"]
    return [
        options["repository_url"],
        *(options[f"use_{name}_button"] for name in ("repository", "edit_page", "issues")),
        launch["binderhub_url"],
        launch["colab_url"],
    ]


def test_without_an_address_there_is_no_button():
    assert not any(links(repository.theme_options("")))


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_with_an_address_every_button_is_there(end):
    options = repository.theme_options("https://github.com/someone/lipmdeq" + end)
    assert all(links(options))
    assert options["repository_url"] == "https://github.com/someone/lipmdeq"
    assert options["repository_branch"] == "main" and options["path_to_docs"] == ""


def test_colab_opens_github_only():
    options = repository.theme_options("https://gitlab.com/someone/lipmdeq")
    assert options["use_edit_page_button"] and not options["launch_buttons"]["colab_url"]


@pytest.mark.parametrize("url", ["lipmdeq", "http://github.com/a/b", "https://github.com/a"])
def test_a_wrong_address_is_named(url):
    with pytest.raises(Exception, match=f"repository.url = '{url}' in _config.yml: must be empty, or https"):
        repository.theme_options(url)


def test_the_configuration_has_no_second_setting():
    """The extension alone decides; the address is checked where it is read."""
    settings = yaml.safe_load((ROOT / "_config.yml").read_text("utf8"))
    assert set(settings["repository"]) == {"url"} and "launch_buttons" not in settings
    theme = settings["sphinx"]["config"]["html_theme_options"]
    assert not [key for key in [*theme, *settings["html"]] if "repository" in key or "edit_page" in key]
    assert repository.address() == settings["repository"]["url"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_cell_follows_the_address(path):
    """With an address a hidden cell that does nothing outside Colab; without one the notebook as it is."""
    stored = path.read_text("utf8")
    assert address.with_cell(json.loads(stored), repository.address()) == json.loads(stored), "run: make address"
    url = "https://github.com/someone/lipmdeq"
    first, *rest = address.with_cell(json.loads(stored), url)["cells"]
    source = "".join(first["source"])
    assert "remove-cell" in first["metadata"]["tags"] and f"-b main {url}\n" in source
    assert 'if "google.colab" in sys.modules:' in source
    assert (
        'sys.path.insert(0, os.path.abspath("lipmdeq"))\n    %cd' in source
    )  # wherever Colab starts; `make colab` runs it
    assert len(rest) == len(address.with_cell(json.loads(stored), "")["cells"])
    counts = [cell["execution_count"] for cell in [first, *rest] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    again = address.with_cell(address.with_cell(json.loads(stored), url), "")
    assert again == address.with_cell(json.loads(stored), "")


def test_binder_installs_the_tested_versions():
    script = (ROOT / ".binder" / "postBuild").read_text("utf8")
    assert "-c constraints.txt -e ." in script and os.access(ROOT / ".binder" / "postBuild", os.X_OK)
    environment = yaml.safe_load((ROOT / ".binder" / "environment.yml").read_text("utf8"))
    assert "python=3.11" in environment["dependencies"]


def test_cite_this_has_the_data_of_the_citation_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
    paper, own = repository.bibtex(citation)
    for text in ("Sato, Naoki and Iiduka, Hideaki", citation["preferred-citation"]["title"], "arXiv:2602.03297"):
        assert text in paper
    assert citation["title"] in own and "url" not in own
    assert "https://github.com/a/b" in repository.bibtex(citation, "https://github.com/a/b")[1]
    for entry in (paper, own):
        assert entry.count("{") == entry.count("}")


# ---- the line under a title


def test_a_page_says_when_it_was_executed_and_with_what():
    text = facts.executed({"mtime": 1_790_000_000.0, "runtime": 3.6, "succeeded": True})
    import lipmdeq

    assert re.match(r"Executed on \d{1,2} September 2026 in 4 s with Python 3\.\d+\.\d+, torch 2\.", text)
    assert text.endswith(f"lipmdeq {lipmdeq.__version__}.")
    assert " in " not in facts.executed({"mtime": 0.0, "runtime": None})


@pytest.mark.parametrize("words, said", [(3, "1 minute to read."), (640, "3 minutes to read.")])
def test_prose_says_how_long_it_takes(words, said):
    assert facts.reading_time("word " * words) == said


# ---- the book on paper


@pytest.mark.parametrize(
    "href, becomes",
    [
        ("#lem:gn", "#notebooks-05--lem:gn"),
        ("06.html", "#notebooks-06"),
        ("../book/intro.html#fig", "#book-intro--fig"),
        ("../_modules/x.html", ""),
        ("https://example.org/a", "https://example.org/a"),
    ],
)
def test_links_stay_inside_the_single_file(href, becomes):
    known = {"notebooks/05", "notebooks/06", "book/intro", "book/api/bounds"}
    assert pdf.link(href, "notebooks/05", known) == becomes
    assert pdf.link("../../notebooks/05.html#a", "book/api/bounds", known) == "#notebooks-05--a"


def test_every_page_is_printed_once():
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf8"))
    printed = [page for _, names in pdf.parts(toc) for page in names]
    assert printed == pdf.pages(toc) and len(printed) == len(set(printed))


def test_page_numbers_are_read_from_a_pdf():
    text = b"""%PDF-1.4
1 0 obj
<</Type /Catalog /Pages 2 0 R /Dests 6 0 R>>
endobj
2 0 obj
<</Type /Pages /Kids [3 0 R 4 0 R]>>
endobj
3 0 obj
<</Type /Page>>
endobj
4 0 obj
<</Type /Page>>
endobj
6 0 obj
<</book-intro [4 0 R /XYZ 0 700 0] /a--eq#3Ax [3 0 R /XYZ 0 1 0]>>
endobj
"""
    assert pdf.first_pages(text) == {"book-intro": 2, "a--eq:x": 1}


# ---- the check after a build


def test_the_check_finds_dead_links_other_hosts_and_heavy_pages(tmp_path):
    (tmp_path / "_static" / "mathjax").mkdir(parents=True)
    (tmp_path / "big.svg").write_bytes(b"x" * (check_book.HEAVIEST + 1))
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a class="x" href="b.html#here">b</a><a href="b.html#gone">b</a><a href="c.html">c</a>'
        '<a href="https://example.org">e</a><img alt="" src="big.svg"><script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1><a href="a.html#top">a</a>')
    found = check_book.page_faults(tmp_path, ["a", "b"])
    assert sorted(fault.split(": ", 1)[1] for fault in found) == [
        "a link to b.html#gone, but there is no gone",
        "a link to c.html, which does not exist",
        "asks another host for https://example.org/x.js",
        "weighs 3.0 MB, more than 3 MB",
    ]
    assert all(fault.startswith("a: ") for fault in found)
