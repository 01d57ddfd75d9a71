"""Sphinx extension: one setting, ``repository: url`` in _config.yml, decides about every link to the repository.

Empty: no such link. Set: the header gets buttons for the source, an edit, an issue and, on notebooks, Binder and
Colab. ``make address`` then writes the cell into each notebook that installs the package on Colab. Also here: the
directive ``cite-this``, whose BibTeX entries come from CITATION.cff and name the address once it is set.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parents[2]
BRANCH = "main"
ADDRESS = re.compile(r"https://(github|gitlab)\.com/([\w.-]+)/([\w.-]+?)")


def address() -> str:
    """The setting, checked."""
    url = (yaml.safe_load((ROOT / "_config.yml").read_text("utf8")).get("repository") or {}).get("url") or ""
    return checked(url)


def checked(url: str) -> str:
    """``url`` without a trailing slash or ``.git``."""
    url = url.strip().rstrip("/").removesuffix(".git")
    if url and not ADDRESS.fullmatch(url):
        raise ExtensionError(
            f"repository.url = {url!r} in _config.yml: must be empty, or https://github.com/<owner>/<name> "
            "or https://gitlab.com/<owner>/<name>"
        )
    return url


def theme_options(url: str) -> dict[str, Any]:
    """Options of the theme that follow from the address."""
    url = checked(url)
    on = bool(url)
    return {
        "repository_url": url,
        "repository_branch": BRANCH,
        "path_to_docs": "",
        "use_repository_button": on,
        "use_edit_page_button": on,
        "use_issues_button": on,
        "launch_buttons": {
            "notebook_interface": "jupyterlab",
            "binderhub_url": "https://mybinder.org" if on else "",
            # Colab opens notebooks from GitHub only.
            "colab_url": "https://colab.research.google.com" if "//github.com/" in url else "",
            "thebe": False,
        },
    }


def colab_source(url: str) -> str:
    """Source of a notebook's first cell: on Colab, fetch the project and install it; elsewhere, nothing."""
    folder = url.rsplit("/", 1)[-1]
    return (
        "import os\nimport sys\n\n"
        'if "google.colab" in sys.modules:\n'
        f"    !git clone -q --depth 1 -b {BRANCH} {url}\n"
        f"    %pip install -q -e {folder}\n"
        f'    sys.path.insert(0, os.path.abspath("{folder}"))\n'
        f"    %cd -q {folder}/notebooks"
    )


def bibtex(citation: dict, url: str = "") -> tuple[str, str]:
    """The entries of the paper and of this project, from the fields of CITATION.cff."""
    paper = citation["preferred-citation"]
    authors = " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"])
    preprint = next(i["value"] for i in paper["identifiers"] if i["value"].startswith("arXiv:"))
    fields = {
        "title": f"{{{paper['title']}}}",
        "author": authors,
        "booktitle": paper["collection-title"],
        "year": paper["year"],
        "note": preprint,
    }
    own = {
        "title": f"{{{citation['title']}}}",
        "author": ", ".join(f"{{{a['name']}}}" for a in citation["authors"]),
        "year": citation["date-released"].year if "date-released" in citation else paper["year"],
        "note": f"Version {citation['version']}",
    } | ({"url": url} if url else {})

    def entry(kind: str, key: str, fields: dict) -> str:
        rows = "".join(f"  {name:<9} = {{{value}}},\n" for name, value in fields.items())
        return f"@{kind}{{{key},\n{rows}}}"

    key = f"{paper['authors'][0]['family-names'].lower()}{paper['year']}lipschitz"
    return entry("inproceedings", key, fields), entry("software", "lipmdeq", own)


class CiteThis(Directive):
    """Both entries as blocks that can be copied."""

    def run(self) -> list[nodes.Node]:
        citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))
        texts = ("The method, by the paper:", "This book or its code:")
        found: list[nodes.Node] = []
        for text, entry in zip(texts, bibtex(citation, address()), strict=True):
            found += [nodes.paragraph("", text), nodes.literal_block(entry, entry, language="bibtex")]
        return [nodes.container("", *found, classes=["cite-this"])]


def configure(app: Sphinx, config: Any) -> None:
    options = config.html_theme_options
    options.update(theme_options(options.get("repository_url") or ""))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("cite-this", CiteThis)
    app.connect("config-inited", configure, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
