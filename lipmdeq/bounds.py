"""The Lipschitz constant L of Lipschitz MDEQ in closed form: L from a, c, γ̄, α1, α2, n, p, and the way
back.

Floats and numpy only. Everything of `constants` (single operations), `matrices` (norms of a comparison
matrix), `operations` (how L is composed, and its four readings) and `banach` (what L guarantees) can be
imported from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .banach import (  # noqa: F401
    a_posteriori_error,
    a_priori_error,
    a_priori_error_from_step,
    jfb_angle,
    jfb_error,
    neumann_error,
    phantom_error,
    relative_residual_bound,
    steps,
    steps_to_error,
)
from .constants import (  # noqa: F401
    check_choice,
    check_constant,
    check_range,
    check_whole,
    empirical_ratio,
    fusion_weights,
    lip_compose,
    lip_conv,
    lip_conv_reshaped,
    lip_convex,
    lip_down,
    lip_dropout,
    lip_gn,
    lip_mgn,
    lip_relu,
    lip_residual,
    lip_srelu,
    lip_sum,
    lip_up,
)
from .matrices import frobenius, perron, spectral  # noqa: F401
from .operations import READINGS, Operations

ABLATIONS = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "MDEQ")


@dataclass(frozen=True)
class LipschitzSpec:
    """Hyperparameters of Lipschitz MDEQ that fix its Lipschitz constant, under the paper's names.

    Attributes:
        a: slope of the scaled ReLU, in (0, 1].
        c: target norm of the conv operators, > 0.
        gamma: bound γ̄ on |γ| of the norms, > 0.
        alpha1, alpha2: convex mixes in the residual block and in the fusion, in (0, 1).
        n: number of resolutions, whole, 1 … 64. With n = 1 nothing is fused and M = [[1 − α2]]: the convex
            mix with an empty sum.
        p: dropout rate, in [0, 1). `train=False` in the methods switches dropout off.
        post_affine: the paper's L̄ = γ̄ca counts γ̄ for the norm after fusion too. If that norm has no
            affine part (as in the CIFAR model) its constant is 1, not γ̄: set False, then L̄ = ca. The same
            for γ̄ = 1; for γ̄ < 1 only False is sound.
    """

    a: float = 0.4
    c: float = 2.0
    gamma: float = 1.0
    alpha1: float = 0.5
    alpha2: float = 0.3
    n: int = 4
    p: float = 0.3
    post_affine: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # frozen: the checked and converted values are stored once, here
        set_(self, "a", check_range("a", self.a, 0, 1, "(]"))
        for name in ("c", "gamma"):
            set_(self, name, check_range(name, getattr(self, name)))
        for name in ("alpha1", "alpha2"):
            set_(self, name, check_range(name, getattr(self, name), 0, 1))
        set_(self, "n", check_whole("n", self.n, 1, 64))
        set_(self, "p", check_range("p", self.p, 0, 1, "[)"))
        if not isinstance(self.post_affine, bool):
            raise ValueError(f"post_affine = {self.post_affine!r}: must be True or False")

    def operations(self, train: bool = True) -> Operations:
        """The constants of all operations of this spec."""
        return Operations(
            norm=self.gamma,
            act=self.a,
            drop=lip_dropout(self.p, train),
            conv=self.c,
            conv_residual=self.c,
            conv_down=self.c,
            post_norm=self.gamma if self.post_affine else 1.0,
            mix1=(1 - self.alpha1, self.alpha1),
            mix2=(1 - self.alpha2, self.alpha2),
            weights=fusion_weights(self.n),
        )

    def L_hat(self, train: bool = True) -> float:
        """Residual block: (1−α1)γ̄a + α1γ̄³c²a²/(1−p)."""
        return self.operations(train).L_hat

    @property
    def L_bar(self) -> float:
        """Post-fusion: γ̄ca."""
        return self.operations().L_bar

    def L_tilde(self, reading: str = "reported") -> np.ndarray:
        """Fusion, row norms L̃_i of M (shape n)."""
        return self.operations().L_tilde(reading)

    def fusion_matrix(self, up: str = "full") -> np.ndarray:
        """Comparison matrix M of the fusion layer (n × n)."""
        return self.operations().fusion_matrix(up)

    def comparison_matrix(self, train: bool = True) -> np.ndarray:
        """Comparison matrix N = L̄ M L̂ of the whole f (n × n): ‖f_i(z)−f_i(z')‖ ≤ Σ_j N_ij‖z_j−z'_j‖."""
        return self.L_bar * self.fusion_matrix() * self.L_hat(train)

    def L(self, reading: str = "perron", train: bool = True) -> float:
        """The Lipschitz constant of f in one of the `READINGS`."""
        return self.operations(train).L(reading)

    def L_backward(self, reading: str = "perron", train: bool = True) -> float:
        """Constant of the backward map x ↦ xJ(z*) + v: at most L, in the dual norm (weights 1/D for
        "perron").
        """
        return self.L(reading, train)

    @property
    def D(self) -> np.ndarray:
        """Weights (n, min 1) of the norm ‖z‖_D² = Σd_i²‖z_i‖² in which the Perron reading holds; the same
        for every p.
        """
        return perron(self.fusion_matrix())[1]

    @property
    def cond_D(self) -> float:
        """max(D)/min(D): the price of reading a statement about ‖·‖_D in plain l2."""
        return float(self.D.max() / self.D.min())

    def test_mode(self) -> LipschitzSpec:
        """The same spec with dropout off, p = 0."""
        return replace(self, p=0.0)

    def reshaped(self, train: bool = True) -> Operations:
        """What c proves if it bounds only the reshaped kernels: 3c for 3x3, 2c for 3x3 stride 2, c for 1x1
        convs.
        """
        c3, c2 = lip_conv_reshaped(self.c, 3, 1), lip_conv_reshaped(self.c, 3, 2)
        return replace(self.operations(train), conv_residual=c3, conv_down=c2)

    def ablation(
        self,
        row: str,
        *,
        train: bool = True,
        eps: float = 1e-5,
        gamma: float = math.inf,
        conv: float = math.inf,
        weights: str = "sum",
    ) -> Operations:
        """The constants when a modification of the paper's ablation table is undone, or all of them
        ("MDEQ").

        S1 no clip of γ (constant `gamma`), S2 GN for MGN (γ̄/√eps), S3 free convs (constant `conv`), S4 no
        softmax in the fusion (`weights` "sum" as in the text, or "mean" as in the authors' code), S5/S6/S7
        plain sums for the first/second/both mixes. "MDEQ": GN, ReLU, plain sums everywhere, while γ and the
        conv norms are taken to be this spec's gamma and c (MDEQ bounds neither). Without a number for
        `gamma` (S1) or `conv` (S3) there is no bound: L is infinite.
        """
        check_choice("row", row, ABLATIONS)
        check_choice("weights", weights, ("sum", "mean"))
        ops = self.operations(train)
        everything = row == "MDEQ"
        changes: dict = {}
        if row == "S1":
            # "- MGN clip" frees the norms that have an affine part; without one the post-fusion norm
            # stays at 1
            changes = {"norm": gamma, "post_norm": gamma if self.post_affine else 1.0}
        if row == "S2" or everything:
            changes |= {"norm": lip_gn(ops.norm, eps), "post_norm": lip_gn(ops.post_norm, eps)}
        if row == "S3":
            changes = dict.fromkeys(("conv", "conv_residual", "conv_down"), conv)
        if row == "S4" or everything:
            share = 1.0 if weights == "sum" or everything else 1 / max(self.n - 1, 1)
            changes["weights"] = share * (1 - np.eye(self.n))
        if row in ("S5", "S7") or everything:
            changes["mix1"] = (1.0, 1.0)
        if row in ("S6", "S7") or everything:
            changes["mix2"] = (1.0, 1.0)
        if everything:
            changes["act"] = lip_relu()
        return replace(ops, **changes)


# ------------------------------------------------------------------------------------------------ inverse
# problems

_BELOW_1 = math.nextafter(1, 0)
# Smallest and largest float tried for each field; open ends of a range are approached, not touched.
_DOMAIN = {
    "a": (1e-300, 1.0),
    "c": (1e-300, 1e300),
    "gamma": (1e-300, 1e300),
    "alpha1": (1e-300, _BELOW_1),
    "alpha2": (1e-300, _BELOW_1),
    "p": (0.0, _BELOW_1),
}


def _bisect(good: float, bad: float, holds: Callable[[float], bool]) -> float:
    """The last float towards `bad` at which `holds` (true at `good`, false at `bad`, one change between)."""
    while True:
        low, high = min(good, bad), max(good, bad)
        # far apart: halve the exponent, else a range of 600 decades would take a thousand halvings
        middle = math.sqrt(low) * math.sqrt(high) if low > 0 and high > 2 * low else (low + high) / 2
        if not low < middle < high:
            return good
        good, bad = (middle, bad) if holds(middle) else (good, middle)


def feasible(
    spec: LipschitzSpec, field: str, target: float = 1.0, reading: str = "perron", train: bool = True
) -> tuple[float, float] | None:
    """All values of one field, the others fixed, for which L < target: (smallest, largest), or None if
    there is none.

    The values form an interval because L is quasi-convex in each single field: it increases with a, c, γ̄
    and p; it is affine in α1 (rising iff γ̄²c²a > 1−p in train mode); it is convex in α2, since M = (1−α2)I
    + α2B is affine and a norm is convex. In the Perron reading it is even affine in α2, ρ(M) = 1−α2+α2ρ(B);
    Frobenius and spectral have a minimum inside (0, 1). At both ends L < target has been evaluated. An end
    at the limit of the field's range is the last float before it.
    """
    check_choice("field", field, tuple(_DOMAIN))
    check_choice("reading", reading, READINGS)
    target = check_range("target", target)
    low, high = _DOMAIN[field]

    def L(x: float) -> float:
        return replace(spec, **{field: x}).L(reading, train)

    def holds(x: float) -> bool:
        return L(x) < target

    start = next((x for x in (getattr(spec, field), low, high) if holds(x)), None)
    if start is None and field == "alpha2":
        start = _minimiser(L, low, high)
        start = start if holds(start) else None
    if start is None:
        return None
    return tuple(end if holds(end) else _bisect(start, end, holds) for end in (low, high))


def _minimiser(f: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search for the minimum of a convex f on [low, high]."""
    g = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - g * (high - low), low + g * (high - low)
        low, high = (low, right) if f(left) < f(right) else (left, high)
    return (low + high) / 2


def largest(
    spec: LipschitzSpec, field: str = "a", target: float = 1.0, reading: str = "perron", train: bool = True
) -> float | None:
    """The largest value of `field` with L < target, the others fixed; None if no value does it (see
    `feasible`).
    """
    interval = feasible(spec, field, target, reading, train)
    return None if interval is None else interval[1]


@dataclass(frozen=True)
class Advice:
    """Change `field` from `now` to `to` (or beyond, away from `now`, within its range) and L is `L`."""

    field: str
    now: float
    to: float
    L: float

    def __str__(self) -> str:
        verb = "lower" if self.to < self.now else "raise"
        return f"{verb} {self.field} from {self.now:g} to {self.to:g}: L = {self.L:.4f}"


def advise(
    spec: LipschitzSpec, target: float = 1.0, reading: str = "perron", train: bool = True
) -> list[Advice]:
    """Every change of one single field that brings L below `target`; empty if L is there already.

    `to` is the nearest value that does it, rounded to four decimals towards the safe side. For n, the
    largest smaller n.
    """
    if spec.L(reading, train) < check_range("target", target):
        return []
    found = []
    for field in _DOMAIN:
        interval = feasible(spec, field, target, reading, train)
        if interval is None:
            continue
        now = getattr(spec, field)
        edge, round_ = (interval[1], math.floor) if now > interval[1] else (interval[0], math.ceil)
        rounded = round_(edge * 1e4) / 1e4 if edge < 1e10 else edge
        to = rounded if interval[0] <= rounded <= interval[1] else edge
        found.append(Advice(field, now, to, replace(spec, **{field: to}).L(reading, train)))
    for n in range(spec.n - 1, 0, -1):
        if (L := replace(spec, n=n).L(reading, train)) < target:
            found.append(Advice("n", spec.n, n, L))
            break
    return found
