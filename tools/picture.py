"""Draw the picture of the README and the start page: L against the slope a, in four readings.

Every number comes from ``lipmdeq.bounds``. Usage: python tools/picture.py [file.svg]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import brentq

from lipmdeq.bounds import LipschitzSpec
from lipmdeq.plotting import COLOURS, LINES, ours, paper, save, shade_contraction, use_style

TARGET = Path(__file__).resolve().parent.parent / "book" / "_static" / "readings.svg"
READINGS = {
    "reported": "as the paper reports it",
    "spectral": "spectral norm",
    "perron": "Perron root",
    "printed": "as printed (up path incomplete)",
}
REPORTED = {
    0.1: 0.03,
    0.4: 1.0,
}  # the paper's L for c = 2, gamma = 1, alpha1 = .5, alpha2 = .3, n = 4, p = .3


def draw(path: Path) -> None:
    """Four curves over a, the region L < 1, the paper's two values, the largest slope certified."""
    use_style()
    slopes = np.linspace(0.05, 0.55, 101)
    fig, ax = plt.subplots(figsize=(7.2, 4.0))
    for (reading, label), colour, line in zip(READINGS.items(), COLOURS.values(), LINES, strict=False):
        values = [LipschitzSpec(a=a).L(reading) for a in slopes]
        ax.plot(slopes, values, color=colour, linestyle=line, label=label)
    paper(ax, list(REPORTED), list(REPORTED.values()), label="values in the paper", color=COLOURS["black"])
    best = brentq(lambda a: LipschitzSpec(a=a).L("perron") - 1, 0.1, 1.0)
    ours(ax, [best], [1.0], label=f"largest slope certified, a = {best:.3f}", color=COLOURS["green"])
    ax.set(
        xlim=(0.05, 0.55),
        ylim=(0, 2),
        xlabel="slope $a$ of the activation",
        ylabel="Lipschitz constant $L$",
    )
    shade_contraction(ax, label="")
    ax.text(0.535, 0.06, "$L < 1$: unique equilibrium, guaranteed convergence", ha="right", color="#00507d")
    ax.legend(loc="upper left")
    save(fig, path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
