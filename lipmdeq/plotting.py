"""One figure style for the whole book: SVG, colour-blind safe, line styles as well as colours.

Figures are dark on white, readable in every viewer and on paper; the book's style sheet inverts their lightness on dark pages.
"""

from typing import Any

import matplotlib as mpl
from cycler import cycler

# Okabe and Ito's palette, the ones with enough contrast on white; each colour has its own line style.
COLOURS = {"blue": "#0072b2", "vermilion": "#d55e00", "green": "#00855f", "purple": "#b05a8a", "black": "#222222"}
LINES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))]
MARKERS = ["o", "s", "^", "D", "v"]

STYLE: dict[str, Any] = {
    "axes.prop_cycle": cycler(color=list(COLOURS.values())) + cycler(linestyle=LINES),
    "figure.figsize": (6.4, 3.6), "figure.facecolor": "white", "figure.constrained_layout.use": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "axes.titlesize": "medium", "axes.titleweight": "bold", "axes.titlelocation": "left",
    "grid.color": "#dddddd", "grid.linewidth": 0.6, "lines.linewidth": 1.8, "image.cmap": "cividis",
    "font.size": 10.5, "legend.frameon": False, "savefig.facecolor": "white",
    # Two runs must write the same bytes, because stored outputs are compared: fixed ids, text as outlines.
    "svg.hashsalt": "lipmdeq", "svg.fonttype": "path",
}  # fmt: skip
UNDATED = {"Date": None, "Creator": None}


def use_style() -> None:
    """Set the style; inside a notebook also choose SVG output without time stamps."""
    mpl.rcParams.update(STYLE)
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:  # plain Python without a notebook
        return
    if get_ipython() is not None:
        set_matplotlib_formats("svg", metadata=UNDATED)


def save(fig: Any, path: Any, source: str | None = None) -> None:
    """Write ``fig`` as SVG, the same bytes for the same figure; ``source``, what it was made from, is kept in the file."""
    if ".svg" not in str(path):  # an unfinished file has more behind it
        raise ValueError(f"path = {path}: must end in .svg")
    fig.savefig(path, format="svg", metadata={**UNDATED, "Source": source})


def shade_contraction(ax: Any, axis: str = "y", label: str = "contraction, $L < 1$", at: float = 1.0) -> None:
    """Shade the region where L, on the "y" or "x" ``axis``, stays below ``at``, and draw its border.

    Call it after the curves are drawn: limits are kept. An empty ``label`` keeps the region out of the legend.
    """
    if axis not in ("x", "y"):
        raise ValueError(f"axis = {axis}: must be 'x' or 'y'")
    limits = ax.get_ylim() if axis == "y" else ax.get_xlim()
    span, line = (ax.axhspan, ax.axhline) if axis == "y" else (ax.axvspan, ax.axvline)
    span(min(limits), at, color=COLOURS["blue"], alpha=0.09, linewidth=0, label=label or None, zorder=0)
    line(at, color="#555555", linewidth=0.9, linestyle="-", zorder=1)
    ax.set(**{f"{axis}lim": limits})


def ours(ax: Any, x: Any, y: Any, label: str = "ours", **kwargs: Any) -> Any:
    """Our value: a filled marker without a line."""
    style = {"linestyle": "none", "marker": "o", "color": COLOURS["blue"], **kwargs}
    return ax.plot(x, y, label=label, **style)


def paper(ax: Any, x: Any, y: Any, label: str = "paper", **kwargs: Any) -> Any:
    """The paper's value: a hollow marker without a line."""
    style = {"linestyle": "none", "marker": "o", "markersize": 8, "color": COLOURS["vermilion"], **kwargs}
    return ax.plot(x, y, label=label, markerfacecolor="none", markeredgewidth=1.6, **style)
