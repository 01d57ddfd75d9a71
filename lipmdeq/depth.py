"""Does a model use its equilibrium? The depth report: what each further evaluation of f is worth, on real images.

A proved L below 1 bounds how much there is to gain: ‖z* − f(0)‖ ≤ L‖z*‖ in the norm of the proof, so a model with a small L *is*
one application of f, within L. The report measures what is left of the equilibrium in a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from lipmdeq.certificate import Certificate, certify
from lipmdeq.jacobian import JacobianProbe, norms
from lipmdeq.solvers import Anderson, Solver

STEPS = (1, 2, 3, 5, 10)  # numbers of evaluations at which the head is read
FEED_FORWARD = 0.95  # share of images whose label at f(0) is that at z*, from which on a model is called feed-forward
PROBED = 8  # images at which the Jacobian is measured


@dataclass(frozen=True)
class Depth:
    """What was measured in test mode. Lists go with ``steps``; ``distance`` is the median of ‖f^k(0) − z*‖/‖z*‖."""

    images: int
    steps: list[int]
    accuracy: list[float]  # of head(f^k(0))
    accuracy_star: float  # of head(z*)
    same_label: list[float]  # share of images whose label at f^k(0) is that at z*
    distance: list[float]
    switching: float  # share of hidden ReLUs that are on for some of the images and off for others
    norm_median: float  # ‖J‖₂ at z*, a lower bound for each image
    norm_worst: float
    radius_median: float  # spectral radius of J at z*, an estimate
    radius_worst: float
    norm_D_worst: float  # ‖D J D⁻¹‖₂, the norm of the proof
    proved: float  # L of the certificate, test mode, in that norm
    probed: int  # images at which J was measured
    evaluations: float  # mean number of evaluations of f to the tolerance of the model's solver
    converged: float  # share of images whose z* met the tolerance of this report

    @property
    def tightness(self) -> float:
        """Measured ‖D J D⁻¹‖₂ over the proved L: how much of the bound the model uses at real images."""
        return self.norm_D_worst / self.proved if math.isfinite(self.proved) else 0.0

    @property
    def feed_forward(self) -> bool:
        return self.same_label[0] > FEED_FORWARD

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.feed_forward:
            return f"is feed-forward: f(0) gives {self.same_label[0]:.1%} of its labels"
        gain = 100 * (self.accuracy_star - self.accuracy[0])
        word = "gains" if gain >= 0 else "loses"
        return (
            f"uses its equilibrium: f(0) gives {self.same_label[0]:.1%} of its labels, "
            f"and the iteration {word} {abs(gain):.1f} points of accuracy"
        )

    def to_dict(self) -> dict:
        return {**asdict(self), "tightness": self.tightness, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: dict) -> Depth:
        """From the field ``depth`` of a record."""
        found = {k: values[k] for k in cls.__dataclass_fields__}
        return cls(**{**found, "proved": math.inf if found["proved"] is None else found["proved"]})

    def __str__(self) -> str:
        lines = [f"The model {self.verdict} ({self.images} images).", ""]
        lines.append(f"{'evaluations':>12} {'accuracy':>9} {'label of z*':>12} {'‖f^k(0) − z*‖/‖z*‖':>20}")
        for row in zip(self.steps, self.accuracy, self.same_label, self.distance, strict=True):
            lines.append("{:>12} {:>9.2%} {:>12.2%} {:>20.2e}".format(*row))
        lines.append(f"{'z*':>12} {self.accuracy_star:>9.2%} {1:>12.2%} {0:>20.2e}")
        proved = f"{self.proved:.4g}" if math.isfinite(self.proved) else "none"
        lines += [
            "",
            f"hidden ReLUs that switch between images: {self.switching:.1%}",
            f"‖J‖₂ at z*: median {self.norm_median:.3g}, worst {self.norm_worst:.3g} (lower bounds, {self.probed} images)",
            f"spectral radius at z*: median {self.radius_median:.3g}, worst {self.radius_worst:.3g} (estimates)",
            f"proved L (test mode): {proved}; tightness {self.tightness:.2f}",
            f"evaluations of f: {self.evaluations:.1f} on average; {self.converged:.1%} of the images converged",
        ]
        return "\n".join(lines)

    def plot(self, ax=None):
        """Accuracy against the number of evaluations, with z* as a line; returns the axes."""
        import matplotlib.pyplot as plt

        ax = ax or plt.subplots(figsize=(4.8, 3.0))[1]
        ax.plot(self.steps, [100 * a for a in self.accuracy], marker="o", label="after k evaluations")
        ax.axhline(100 * self.accuracy_star, linestyle="--", color="black", linewidth=1, label="at z*")
        ax.set(xscale="log", xlabel="evaluations of f from z = 0", ylabel="accuracy, %", ylim=(0, 100))
        ax.set_xticks(self.steps, [str(k) for k in self.steps])
        ax.minorticks_off()
        ax.legend()
        return ax


class _Switches:
    """Counts for every hidden unit (channel and pixel) of the residual layers whether it was seen on and off."""

    def __init__(self) -> None:
        self.on: dict[int, Tensor] = {}
        self.off: dict[int, Tensor] = {}

    def see(self, index: int, active: Tensor) -> None:
        on, off = active.any(0), (~active).any(0)
        self.on[index] = on | self.on.get(index, on)
        self.off[index] = off | self.off.get(index, off)

    def share(self) -> float:
        both = [self.on[i] & self.off[i] for i in self.on]
        return sum(int(b.sum()) for b in both) / max(1, sum(b.numel() for b in both))


@torch.no_grad()
def depth(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    certificate: Certificate | None = None,
    solver: Solver | None = None,
    batch: int = 250,
) -> Depth:
    """The depth report of a model on real images, in test mode.

    Args:
        model: an :class:`lipmdeq.model.MDEQ`. images: (B, C, H, W), real ones: on noise the numbers mean nothing. labels: (B,).
        certificate: that of the model, if it is there already. solver: how z* is found; default Anderson to 1e-5 with at
        most 100 evaluations. batch: images at a time.
    """
    if len(images) != len(labels) or not len(images):
        raise ValueError(f"labels = {len(labels)}: must be as many as images, {len(images)}, and at least one")
    was = model.training
    model.eval()
    try:
        solver = solver or Anderson(tol=1e-5, max_iter=100)
        certificate = certificate or certify(model, images.shape[-1], measure=False, progress=False)
        counts, switches = _Counts(), _Switches()
        for start in range(0, len(images), batch):
            _count(model, images[start : start + batch], labels[start : start + batch], solver, counts, switches)
        proof = certificate.test
        jacobian = _jacobian(model, images[:PROBED], solver, proof["D"])
        return Depth(
            images=len(images), steps=list(STEPS), **counts.means(), switching=switches.share(),
            **jacobian, proved=float(proof["perron"]), probed=min(PROBED, len(images)),
        )  # fmt: skip
    finally:
        model.train(was)


class _Counts:
    """Sums over the batches."""

    def __init__(self) -> None:
        self.right, self.same = torch.zeros(2, len(STEPS), dtype=torch.double)
        self.right_star, self.evaluations, self.converged = 0, 0.0, 0
        self.distance: list[Tensor] = []

    def means(self) -> dict:
        distances = torch.cat(self.distance, 1)
        n = distances.shape[1]
        return dict(
            accuracy=(self.right / n).tolist(),
            accuracy_star=self.right_star / n,
            same_label=(self.same / n).tolist(),
            distance=distances.median(1).values.tolist(),
            evaluations=self.evaluations / n,
            converged=self.converged / n,
        )


def _norms(z: Iterable[Tensor]) -> Tensor:
    return norms([t.double() for t in z]).cpu()


def _count(model, x: Tensor, y: Tensor, solver: Solver, counts: _Counts, switches: _Switches) -> None:
    """One batch: z*, then f^k(0) for each k, and the hidden units at z*."""
    f, z0, _ = model.problem(x)
    found = solver.solve(f, z0)
    star, size = found.z, _norms(found.z).clamp_min(1e-30)
    usual = model.solver.solve(f, z0)
    label = model.head(star).argmax(1)
    counts.right_star += int((label == y).sum())
    counts.converged += int(found.converged.sum())
    counts.evaluations += usual.nfe * len(y)
    z, rows = z0, []
    for k in range(1, STEPS[-1] + 1):
        z = f(z)
        if k in STEPS:
            i, at_k = STEPS.index(k), model.head(z).argmax(1)
            counts.right[i] += int((at_k == y).sum())
            counts.same[i] += int((at_k == label).sum())
            rows.append(_norms(a - b for a, b in zip(z, star, strict=True)) / size)
    counts.distance.append(torch.stack(rows))
    for i, active in enumerate(model.f.hidden(star, model.injected(x))):
        switches.see(i, active)


def _jacobian(model, x: Tensor, solver: Solver, d: list[float]) -> dict:
    """‖J‖₂, ‖D J D⁻¹‖₂ and the spectral radius at z* of each image."""
    f, z0, _ = model.problem(x)
    star = solver.solve(f, z0).z
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        plain, weighted = JacobianProbe(f, star), JacobianProbe(f, star, d)
    norm, radius = plain.norm(30, generator), plain.spectral_radius(generator=generator)
    norm_d = weighted.norm(30, generator)
    return dict(
        norm_median=float(norm.median()),
        norm_worst=float(norm.max()),
        radius_median=float(radius.median()),
        radius_worst=float(radius.max()),
        norm_D_worst=float(norm_d.max()),
    )
