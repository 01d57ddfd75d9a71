"""One figure style for the whole book: SVG, colour-blind safe, line styles as well as colours.

Figures are drawn dark on white, so that they are readable in every notebook viewer and on paper. On the
book's dark pages ``book/_static/custom.css`` inverts their lightness and keeps their hue.
"""

from typing import Any

import matplotlib as mpl
from cycler import cycler

# Okabe and Ito's palette, the ones with enough contrast on white; each colour has its own line style.
COLOURS = {"blue": "#0072b2", "vermilion": "#d55e00", "green": "#00855f", "purple": "#b05a8a", "black": "#222222"}
LINES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))]
MARKERS = ["o", "s", "^", "D", "v"]
CONTRACTION = "#0072b2"  # the region L < 1 is this blue, very light

STYLE: dict[str, Any] = {
    "axes.prop_cycle": cycler(color=list(COLOURS.values())) + cycler(linestyle=LINES),
    "figure.figsize": (6.4, 3.6),
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "font.size": 10.5,
    "legend.frameon": False,
    "image.cmap": "cividis",
    "savefig.facecolor": "white",
    # Two runs must write the same bytes, because stored outputs are compared: fixed ids, text as outlines.
    "svg.hashsalt": "lipmdeq",
    "svg.fonttype": "path",
}


def use_style() -> None:
    """Set the style; inside a notebook also choose SVG output without time stamps."""
    mpl.rcParams.update(STYLE)
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:  # plain Python without a notebook
        return
    if get_ipython() is not None:
        set_matplotlib_formats("svg", metadata={"Date": None, "Creator": None})


def save(fig: Any, path: Any, source: str | None = None) -> None:
    """Write ``fig`` as SVG; the same figure gives the same bytes.

    Args:
        fig: a matplotlib figure.
        path: where to write it, ending in ``.svg``.
        source: what it was made from, kept in the file for those who ask.
    """
    if not str(path).endswith(".svg"):
        raise ValueError(f"path = {path}: must end in .svg")
    fig.savefig(path, metadata={"Date": None, "Creator": None, "Source": source})


def shade_contraction(ax: Any, axis: str = "y", label: str = "contraction, $L < 1$", at: float = 1.0) -> None:
    """Shade the region where ``at`` is not reached (L < 1) and draw its border.

    Args:
        ax: a matplotlib Axes whose ``axis`` shows L. Call it after the curves are drawn: limits are kept.
        axis: "y" (L upwards) or "x" (L to the right).
        label: text for the legend; an empty string keeps the region out of it.
        at: where the border is.
    """
    if axis not in ("x", "y"):
        raise ValueError(f"axis = {axis}: must be 'x' or 'y'")
    limits = ax.get_ylim() if axis == "y" else ax.get_xlim()
    span, line = (ax.axhspan, ax.axhline) if axis == "y" else (ax.axvspan, ax.axvline)
    span(min(limits), at, color=CONTRACTION, alpha=0.09, linewidth=0, label=label or None, zorder=0)
    line(at, color="#555555", linewidth=0.9, linestyle="-", zorder=1)
    (ax.set_ylim if axis == "y" else ax.set_xlim)(limits)


def ours(ax: Any, x: Any, y: Any, label: str = "ours", **kwargs: Any) -> Any:
    """Our value: a filled marker without a line."""
    style = {"linestyle": "none", "marker": "o", "color": COLOURS["blue"], **kwargs}
    return ax.plot(x, y, label=label, **style)


def paper(ax: Any, x: Any, y: Any, label: str = "paper", **kwargs: Any) -> Any:
    """The paper's value: a hollow marker without a line."""
    style = {"linestyle": "none", "marker": "o", "markersize": 8, "color": COLOURS["vermilion"], **kwargs}
    return ax.plot(x, y, label=label, markerfacecolor="none", markeredgewidth=1.6, **style)
