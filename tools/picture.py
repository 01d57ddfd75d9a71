"""Draw the pictures of the README and the start page, or only one of them into a file.

``readings``: L against the slope a, in four readings, from ``lipmdeq.bounds``. ``depth``: accuracy against the number of
evaluations of f, from the depth reports of committed records. Usage: python tools/picture.py [readings|depth file.svg]
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import brentq

from lipmdeq.bounds import LipschitzSpec
from lipmdeq.experiments.record import read_record
from lipmdeq.plotting import COLOURS, LINES, ours, paper, save, shade_contraction, use_style

ROOT = Path(__file__).resolve().parent.parent
STATIC = ROOT / "book" / "_static"
DEPTH = {  # records of protocol cpu, eight epochs of all of CIFAR-10
    "beyond/potential-t0.9": "certified family, proved L = 0.9",
    "table1/mdeq": "MDEQ, no guarantee",
    "table1/lip-a0.4": "the paper's block, a = 0.4",
}
READINGS = {
    "reported": "as the paper reports it",
    "spectral": "spectral norm",
    "perron": "Perron root",
    "printed": "as printed (up path incomplete)",
}
REPORTED = {0.1: 0.03, 0.4: 1.0}  # the paper's L for c = 2, gamma = 1, alpha1 = .5, alpha2 = .3, n = 4, p = .3


def readings(path: Path) -> None:
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
    ax.set(xlim=(0.05, 0.55), ylim=(0, 2), xlabel="slope $a$ of the activation", ylabel="Lipschitz constant $L$")
    shade_contraction(ax, label="")
    ax.text(0.535, 0.06, "$L < 1$: unique equilibrium, guaranteed convergence", ha="right", color="#00507d")
    ax.legend(loc="upper left")
    save(fig, path)


def depth(path: Path) -> None:
    """Accuracy of head(f^k(0)) for each k, and at z* as the last point: the mean over seeds, thin lines for each."""
    use_style()
    fig, ax = plt.subplots(figsize=(7.2, 3.6))
    for (row, label), colour, line in zip(DEPTH.items(), COLOURS.values(), LINES, strict=False):
        paths = sorted((ROOT / "results" / "cpu" / row).glob("seed*.json"))
        reports = [read_record(path)["depth"] for path in paths]
        runs = 100 * np.array([[*found["accuracy"], found["accuracy_star"]] for found in reports])
        where, mean = range(runs.shape[1]), runs.mean(0)
        ax.plot(where, mean, color=colour, linestyle=line, marker="o", label=label)
        for accuracy in runs if len(runs) > 1 else ():
            ax.plot(where, accuracy, color=colour, linestyle=line, linewidth=0.9, alpha=0.5)
        for x, y in (where[0], mean[0]), (where[-1], mean[-1]):
            ax.annotate(f"{y:.0f} %", (x, y), xytext=(0, 7), textcoords="offset points", ha="center")
    ax.set_xticks(where, [*(str(k) for k in reports[0]["steps"]), "z*"])
    ax.set(xlabel="evaluations of $f$ from $z = 0$", ylabel="accuracy, %", ylim=(0, 85))
    ax.legend(loc="lower right")
    save(fig, path)


DRAWN = {"readings": readings, "depth": depth}

if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in DRAWN:
        DRAWN[sys.argv[1]](Path(sys.argv[2]))
    elif len(sys.argv) == 1:
        for name, draw in DRAWN.items():
            draw(STATIC / f"{name}.svg")
    else:
        sys.exit(f"picture = {' '.join(sys.argv[1:])}: must be nothing, or one of {', '.join(DRAWN)} and a file")
