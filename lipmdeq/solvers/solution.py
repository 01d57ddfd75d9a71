"""What f was asked in a solve (`Calls`), what was found (`Solution`), and what the next solve may take over (`Memory`)."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from lipmdeq.solvers.layout import Map, State, branches, like

STATUS = ("converged", "max_iter", "diverged", "nan")  # from good to bad


def checked(default, check: Callable, *allowed):
    """A field of `Options`, with a check of `bounds` and what it allows; None as well, if that is the default."""
    return field(default=default, metadata={"check": lambda name, value: check(name, value, *allowed)})


@dataclass(frozen=True)
class Options:
    """Fields that are checked when they are given, and never change."""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if "check" in f.metadata and not (value is None and f.default is None):
                kept = f.metadata["check"](f.name, value)  # as the check returns it: 4.0 counts as whole and becomes 4
                object.__setattr__(self, f.name, value if kept is None else kept)


class SolverWarning(UserWarning):
    """A solve ended before every sample converged."""


@dataclass
class Solution:
    """What a solve found. Book-keeping tensors live on the CPU; k counts evaluations, B samples.

    Attributes:
        z: per sample f(z_k) of the evaluation that converged, else of the best one (the last, if the number of steps was fixed).
        residuals: (k, B), a stopped sample repeats its last value; the last row only if the number of steps was fixed.
        nfe: true number of calls of f in this solve; `nfe_total` adds the call that attached the graph.
        converged: (B,) bool. steps: (B,) evaluations until the sample stopped (its own nfe).
        reason: "converged", "max_iter", "nan" or "diverged": the worst over the samples; `reasons` per sample.
        error: (B,) bound on ||z - z*|| by L (`bounds.a_posteriori_error`), foreseen steps only; rounding in f comes on top.
        expect: evaluations that a solve like this one should take (`expect` of the next); None if it did not converge.
        backward: the Solution of the adjoint solve, once backward has run (implicit gradient only).
        pair: (f(z_in), z_in) with graph, if asked for (Jacobian regularisation).
        z_in, final_used: z = f(z_in), and whether `final` computed it.
    """

    z: State
    residuals: Tensor
    nfe: int
    converged: Tensor
    reason: str
    steps: Tensor
    reasons: list[str]
    nfe_total: int = 0
    error: Tensor | None = None
    expect: int | None = None
    backward: "Solution | None" = None
    pair: tuple | None = field(default=None, repr=False)
    z_in: State | None = field(default=None, repr=False)
    final_used: bool = field(default=False, repr=False)


class ConvergenceError(RuntimeError):
    """Raised by `solve(..., throw=True)`; the attribute `solution` holds what was reached."""

    def __init__(self, solution: Solution):
        done = int(solution.converged.sum())
        super().__init__(f"{solution.reason}: {done} of {len(solution.converged)} samples converged")
        self.solution = solution


@dataclass
class Memory:
    """What `deq` may take over from its last call, and changes: the evaluations to expect in either solve. They decide which
    one records the graph: cost, and rounding in the last digits. `forget` where bits must agree with those of a fresh one."""

    forward: int | None = None
    backward: int | None = None

    def forget(self) -> None:
        self.forward = self.backward = None


class Calls:
    """f on lists of branches, with its calls counted and its output checked."""

    def __init__(self, f: Map, z0: State, final: Map | None = None):
        self.f, self.final, self.nfe, self.model, self.z0 = f, final, 0, z0, branches(z0)
        self.shapes = [t.shape for t in self.z0]
        sizes = sorted({len(t) if t.dim() else 0 for t in self.z0})
        if len(sizes) != 1 or not sizes[0]:
            raise ValueError(f"batch sizes of z0 = {sizes}: must be one whole number >= 1, dim 0 of every branch")
        for t in self.z0:
            if not t.is_floating_point():
                raise ValueError(f"dtype of z0 = {t.dtype}: must be a floating-point type")

    def __call__(self, z: list[Tensor], last: bool = False) -> list[Tensor]:
        """f(z); `final`, if there is one, computes it where this is expected to be the last call."""
        self.nfe, self.by_final = self.nfe + 1, last and self.final is not None
        fz = branches((self.final if self.by_final else self.f)(like(z, self.model)))
        if (found := [t.shape for t in fz]) != self.shapes:
            raise ValueError(f"shapes of f(z) = {found}: must be those of z, {self.shapes}")
        return fz

    def solution(self, z: list[Tensor], z_in: list[Tensor], history: list[np.ndarray], status: np.ndarray) -> Solution:
        """z = f(z_in), with the residuals of `history` and a place in STATUS for each sample."""
        converged, reasons = torch.from_numpy(status == 0), [STATUS[i] for i in status]
        z, z_in, residuals = like(z, self.model), like(z_in, self.model), torch.from_numpy(np.stack(history))
        steps, reason, n = torch.full((len(status),), self.nfe), STATUS[status.max()], self.nfe
        return Solution(z, residuals, n, converged, reason, steps, reasons, nfe_total=n, z_in=z_in)
