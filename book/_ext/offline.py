"""Sphinx extension: a built book that is light and asks no other host for anything.

* MathJax is copied from the package ``sphinx-mathjax-offline``. Its SVG output is used because it needs no
  font files: browsers may refuse those on pages that are opened from disk.
* Jupyter Book always loads ``sphinx_thebe``, which writes the address of a CDN into every page. Nothing here
  uses it, so its event handlers are disconnected again.
* The theme ships all of Font Awesome, MathJax every alphabet of Unicode: what no page uses is dropped (2 MB per
  page).
* Labels such as ``lem:gn`` have a colon, which Sphinx's search forgets to escape.
"""

import re
from importlib.metadata import distribution
from pathlib import Path
from shutil import copy, copytree
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

UNUSED = ("sphinx_thebe", "sphinx_comments")
MATHJAX = ["core", "input/tex", "output/svg", "a11y/assistive-mml"]
# One icon in Font Awesome's script, "name":[width,height,[aliases],"code","path"], and in its style sheet
ICON = re.compile(r'"?([a-z0-9-]+)"?:\[\d+,\d+,\[([^\]]*)\],"[0-9a-f]+","[^"]*"\],?')
ICON_RULE = re.compile(r'\.fa-([a-z0-9-]+):before\{content:"[^"]*"\}')
# Alphabets in MathJax's font: the commands that need one, its variants, its ranges among the Unicode letters
GLYPH = re.compile(r'\b(\d{6}):"[^"]*",?')
VARIANT = re.compile(r"(\w+\.(\w+)=\(0,\w+\.AddPaths\)\(\w+\.\2,)\{[^{}]*\}")
ALPHABETS = [
    ("mathfrak|frak", {"fraktur", "frakturBold"}, [(0x1D504, 0x1D537), (0x1D56C, 0x1D59F)]),
    ("mathscr|scr", {"script", "scriptBold"}, [(0x1D49C, 0x1D503)]),
    ("mathtt|texttt|tt", {"monospace"}, [(0x1D670, 0x1D6A3), (0x1D7F6, 0x1D7FF)]),
    ("oldstyle", {"texOldstyle", "texOldstyleBold"}, []),
    (
        "mathsf|textsf|sf|mathbfsf",
        {"sansSerif", "sansSerifBold", "sansSerifItalic", "sansSerifBoldItalic"},
        [(0x1D5A0, 0x1D66F), (0x1D756, 0x1D7C9), (0x1D7E2, 0x1D7F5)],
    ),
]


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
    package = distribution("sphinx-mathjax-offline")
    source = Path(str(package.locate_file("sphinx-mathjax-offline/static/mathjax")))
    for name in ["startup", *MATHJAX, "output/svg/fonts/tex"]:
        target = static / "mathjax" / f"{name}.js"
        target.parent.mkdir(parents=True, exist_ok=True)
        copy(source / f"{name}.js", target)
    copytree(source / "input/tex/extensions", static / "mathjax/input/tex/extensions", dirs_exist_ok=True)


def rewrite(path: Path, pattern: re.Pattern[str], keep: Any) -> None:
    """Delete the matches of ``pattern`` in a file for which ``keep(match)`` is false."""
    text = path.read_text("utf8")
    path.write_text(pattern.sub(lambda match: match[0] if keep(match) else "", text), "utf8")


def trim_font(font: Path, text: str) -> None:
    """Empty the alphabets for which ``text`` has neither a command nor a letter."""
    for commands, variants, ranges in ALPHABETS:
        letters = "".join(f"{chr(low)}-{chr(high)}" for low, high in ranges)
        if re.search(rf"\\(?:{commands})(?![a-zA-Z])" + (f"|[{letters}]" if letters else ""), text):
            continue
        emptied = VARIANT.sub(
            lambda part, names=variants: f"{part[1]}{{}}" if part[2] in names else part[0], font.read_text("utf8")
        )
        font.write_text(emptied, "utf8")
        rewrite(font, GLYPH, lambda glyph, out=ranges: not any(a <= int(glyph[1]) <= b for a, b in out))


def trim(html: Path, static: Path) -> None:
    """Drop icons and alphabets that no page uses, and source maps."""
    icons = static / "scripts" / "fontawesome.js"
    scripts = [path for path in [*static.glob("*.js"), *icons.parent.glob("*.js")] if path != icons]
    text = "\n".join(path.read_text("utf8") for path in [*html.rglob("*.html"), *scripts])
    used = set(re.findall(r"\bfa-([a-z0-9-]+)", text))
    rewrite(icons, ICON, lambda icon: used & {icon[1], *re.findall(r'"([a-z0-9-]+)"', icon[2])})
    rewrite(static / "styles" / "pydata-sphinx-theme.css", ICON_RULE, lambda rule: rule[1] in used)
    trim_font(static / "mathjax" / "output/svg/fonts/tex.js", text)
    for source_map in static.rglob("*.map"):
        source_map.unlink()


def mend_search(static: Path) -> None:
    """Sphinx looks an anchor up as a CSS selector, where the colon of ``#lem:gn`` must be escaped."""
    script = static / "searchtools.js"
    text = script.read_text("utf8")
    plain = '`[role="main"] ${anchor}`'
    if plain not in text:
        raise ExtensionError("searchtools.js has changed: look at mend_search in book/_ext/offline.py")
    script.write_text(text.replace(plain, '`[role="main"] #${CSS.escape(anchor.slice(1))}`'), "utf8")


def finish(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        html = Path(app.outdir)
        copy_mathjax(html / "_static")
        trim(html, html / "_static")
        mend_search(html / "_static")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", configure, priority=900)
    app.connect("build-finished", finish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
