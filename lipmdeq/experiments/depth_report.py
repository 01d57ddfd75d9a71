"""Does a model use its equilibrium? The depth report: what each further evaluation of f is worth, on real images.

A proved L below 1 bounds how far the state moves after the first evaluation: ‖z* − f(0)‖ ≤ L‖z*‖ in the norm of the proof. That
is no bound on labels: most of z* may be the same for all images, and a head that removes this part (by batch normalisation)
sees a small move as a large one. So the report counts labels, and says how much of z* differs between images.
"""

from __future__ import annotations

import math
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
    variation: float | None = None  # median of ‖z* − its mean over a batch of images‖/‖z*‖; None in records without it

    @property
    def tightness(self) -> float:
        """Measured ‖D J D⁻¹‖₂ over the proved L: how much of the bound the model uses at real images."""
        return self.norm_D_worst / self.proved if 0 < self.proved < math.inf else 0.0

    @property
    def feed_forward(self) -> bool:
        return self.same_label[0] > FEED_FORWARD

    @property
    def verdict(self) -> str:
        """One sentence; ``print`` shows all numbers."""
        first = f"f(0) gives {self.same_label[0]:.1%} of its labels"
        if self.feed_forward:
            return f"is feed-forward: {first}"
        gain = 100 * (self.accuracy_star - self.accuracy[0])
        if gain < 0:
            return f"is not made for its equilibrium: {first}, and the iteration loses {-gain:.1f} points of accuracy"
        return f"uses its equilibrium: {first}, and the iteration gains {gain:.1f} points of accuracy"

    def to_dict(self) -> dict:
        return {**asdict(self), "tightness": self.tightness, "verdict": self.verdict}

    @classmethod
    def from_dict(cls, values: dict) -> Depth:
        """From the field ``depth`` of a record."""
        found = {k: values[k] for k in cls.__dataclass_fields__ if k in values or k != "variation"}
        return cls(**{**found, "proved": math.inf if found["proved"] is None else found["proved"]})

    def __str__(self) -> str:
        lines = [f"The model {self.verdict} ({self.images} images).", ""]
        lines.append(f"{'evaluations':>12} {'accuracy':>9} {'label of z*':>12} {'‖f^k(0) − z*‖/‖z*‖':>20}")
        for row in zip(self.steps, self.accuracy, self.same_label, self.distance, strict=True):
            lines.append("{:>12} {:>9.2%} {:>12.2%} {:>20.2e}".format(*row))
        lines.append(f"{'z*':>12} {self.accuracy_star:>9.2%} {1:>12.2%} {0:>20.2e}")
        proved = f"{self.proved:.4g}" if math.isfinite(self.proved) else "none"
        part = f"; part of z* that differs between them: {self.variation or 0:.2g} of its length"
        varies = "" if self.variation is None else part
        lines += [
            "",
            f"hidden ReLUs that switch between images: {self.switching:.1%}{varies}",
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
    """The depth report of a model on real images (on noise the numbers mean nothing), in test mode.

    Args:
        model: an :class:`lipmdeq.model.MDEQ`. images: (B, C, H, W). labels: (B,). certificate: that of the model, if it is
        there already. solver: how z* is found; default Anderson to 1e-5 with at most 100 evaluations. batch: images at a time.
    """
    if len(images) != len(labels) or not len(images):
        raise ValueError(f"labels = {len(labels)}: must be as many as images, {len(images)}, and at least one")
    was = model.training
    model.eval()
    try:
        solver = solver or Anderson(tol=1e-5, max_iter=100)
        proof = (certificate or certify(model, images.shape[-1], measure=False, progress=False)).test
        *parts, units = zip(*(_seen(model, x, solver) for x in images.split(batch)), strict=True)
        label, distance, variation, nfe, converged = (torch.cat(part, -1) for part in parts)
        *accuracy, accuracy_star = (label == labels.cpu()).double().mean(1).tolist()
        return Depth(
            images=len(images), steps=list(STEPS), accuracy=accuracy, accuracy_star=accuracy_star,
            same_label=(label[:-1] == label[-1]).double().mean(1).tolist(), distance=distance.median(1).values.tolist(),
            switching=float(torch.stack(units).any(0).all(0).double().mean()), proved=float(proof["perron"]),
            **_jacobian(model, images[:PROBED], solver, proof["D"]), probed=min(PROBED, len(images)),
            evaluations=float(nfe.mean()), converged=float(converged.mean()), variation=float(variation.median()),
        )  # fmt: skip
    finally:
        model.train(was)


def _seen(model: nn.Module, x: Tensor, solver: Solver) -> tuple[Tensor, ...]:
    """What one batch shows. A column for each image: its label at every f^k(0) and at z*, its distances to z*, that of z* to
    the mean of the batch, evaluations, whether it converged; and a column for each hidden unit: whether it was seen on, and
    seen off, at z*.
    """
    f, z0, _ = model.problem(x)
    found, usual = solver.solve(f, z0), model.solver.solve(f, z0)
    z, star, label, distance = z0, found.z, [], []
    size = norms([t.double() for t in star]).clamp_min(1e-30)
    for k in range(1, STEPS[-1] + 1):
        z = f(z)
        if k in STEPS:
            label.append(model.head(z).argmax(1))
            distance.append(norms([(a - b).double() for a, b in zip(z, star, strict=True)]) / size)
    label.append(model.head(star).argmax(1))
    variation = norms([(t - t.mean(0, keepdim=True)).double() for t in star]) / size
    hidden = model.f.hidden(star, model.injected(x))
    units = torch.cat([torch.stack([on.any(0), (~on).any(0)]).flatten(1) for on in hidden], 1)
    nfe, converged = torch.full((len(x),), float(usual.nfe)).double(), found.converged.double()
    return torch.stack(label).cpu(), torch.stack(distance).cpu(), variation.cpu(), nfe, converged.cpu(), units.cpu()


def _jacobian(model: nn.Module, x: Tensor, solver: Solver, d: list[float]) -> dict[str, float]:
    """‖J‖₂, ‖D J D⁻¹‖₂ and the spectral radius at z* of each image."""
    f, z0, _ = model.problem(x)
    star, random = solver.solve(f, z0).z, torch.Generator().manual_seed(0)
    plain, weighted = JacobianProbe(f, star), JacobianProbe(f, star, d)
    norm, radius = plain.norm(30, random), plain.spectral_radius(generator=random)
    return dict(
        norm_median=float(norm.median()),
        norm_worst=float(norm.max()),
        radius_median=float(radius.median()),
        radius_worst=float(radius.max()),
        norm_D_worst=float(weighted.norm(30, random).max()),
    )
