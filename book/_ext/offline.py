"""Sphinx extension: a built book that is light and asks no other host for anything.

* MathJax is copied from the package ``sphinx-mathjax-offline``. Its SVG output is used because it needs no
  font files: browsers may refuse those on pages that are opened from disk.
* Jupyter Book always loads ``sphinx_thebe``, which writes the address of a CDN into every page. Nothing here
  uses it, so its event handlers are disconnected again.
* The theme ships all of Font Awesome (1.5 MB of JavaScript); icons that no page names are dropped from it.
"""

import re
from importlib.metadata import distribution
from pathlib import Path
from shutil import copy, copytree
from typing import Any

from sphinx.application import Sphinx

UNUSED = ("sphinx_thebe", "sphinx_comments")
MATHJAX = ["core", "input/tex", "output/svg", "a11y/assistive-mml"]
# One icon in Font Awesome's table: "name":[width,height,[aliases],"code","path"]
ICON = re.compile(r'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],"[0-9a-f]+","[^"]*"\],?')


def configure(app: Sphinx, config: Any) -> None:
    """Point MathJax at the local copy; drop the handlers of extensions that only add outside scripts."""
    config.mathjax_path = "mathjax/startup.js"
    config.mathjax3_config = {**(config.mathjax3_config or {}), "loader": {"load": MATHJAX}}
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            if getattr(listener.handler, "__module__", "").split(".")[0] in UNUSED:
                app.disconnect(listener.id)
    app.registry.css_files = [entry for entry in app.registry.css_files if "thebe" not in entry[0]]


def copy_mathjax(static: Path) -> None:
    """Copy the parts that are loaded at once, and the TeX extensions that are loaded on demand."""
    source = Path(
        str(distribution("sphinx-mathjax-offline").locate_file("sphinx-mathjax-offline/static/mathjax"))
    )
    for name in ["startup", *MATHJAX, "output/svg/fonts/tex"]:
        target = static / "mathjax" / f"{name}.js"
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(source / f"{name}.js", target)
    copytree(source / "input/tex/extensions", static / "mathjax/input/tex/extensions", dirs_exist_ok=True)


def trim_icons(html: Path, static: Path) -> None:
    """Keep only the Font Awesome icons whose class name occurs in a page or in the theme's scripts."""
    scripts = static / "scripts"
    bundle = scripts / "fontawesome.js"
    readers = [*html.rglob("*.html"), *(path for path in scripts.glob("*.js") if path != bundle)]
    used = {name for path in readers for name in re.findall(r"\bfa-([a-z0-9-]+)", path.read_text("utf8"))}

    def keep(icon: re.Match[str]) -> str:
        names = {icon[1], *re.findall(r'"([a-z0-9-]+)"', icon[2])}
        return icon[0] if names & used else ""

    bundle.write_text(ICON.sub(keep, bundle.read_text("utf8")), "utf8")
    for source_map in static.rglob("*.map"):  # of no use to a reader
        source_map.unlink()


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        html = Path(app.outdir)
        copy_mathjax(html / "_static")
        trim_icons(html, html / "_static")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", configure, priority=900)
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
