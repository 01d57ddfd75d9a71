"""Book-keeping of a fixed-point solve: what was found (`Solution`), what f was asked (`Calls`), which sample stopped when
and why (`Track`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lipmdeq.solvers.steps import Layout

if TYPE_CHECKING:
    from lipmdeq.solvers.loop import Solver

State = Tensor | list[Tensor]
Map = Callable[[State], State]
Evaluation = tuple[list[Tensor], list[Tensor]]  # branches of z and of f(z)
DIVERGED = 1e6  # a residual that grew by this factor will not come back


class SolverWarning(UserWarning):
    """A solve ended before every sample converged."""


class ConvergenceError(RuntimeError):
    """Raised by `solve(..., throw=True)`; the attribute `solution` holds what was reached."""

    def __init__(self, solution: Solution):
        done = int(solution.converged.sum())
        super().__init__(f"{solution.reason}: {done} of {len(solution.converged)} samples converged")
        self.solution = solution


@dataclass
class Solution:
    """What a solve found. Book-keeping tensors live on the CPU; k counts evaluations, B samples.

    Attributes:
        z: per sample f(z_k) of the evaluation that converged, else of the one with the smallest residual.
        residuals: (k, B), as used by the stopping rule; a stopped sample repeats its last value.
        nfe: true number of calls of f in this solve; `nfe_total` adds the call that attached the graph.
        converged: (B,) bool. steps: (B,) evaluations until the sample stopped (its own nfe).
        reason: "converged", "max_iter", "nan" or "diverged": the worst over the samples; `reasons` per sample.
        backward: the Solution of the adjoint solve, once backward has run (implicit gradient only).
        pair: (f(z_in), z_in) with graph, if asked for (Jacobian regularisation).
    """

    z: State
    residuals: Tensor
    nfe: int
    converged: Tensor
    reason: str
    steps: Tensor
    reasons: list[str]
    nfe_total: int = 0
    backward: Solution | None = None
    pair: tuple | None = field(default=None, repr=False)
    z_in: State | None = field(default=None, repr=False)  # z = f(z_in)
    final_used: bool = field(default=False, repr=False)


class Calls:
    """f with its calls counted, its output checked, and states unpacked to lists of branches."""

    def __init__(self, f: Map, z0: State):
        self.f, self.nfe, self.single = f, 0, isinstance(z0, Tensor)
        self.z0 = [z0] if self.single else list(z0)
        sizes = sorted({t.shape[0] if t.dim() else 0 for t in self.z0})
        require(
            len(sizes) == 1 and sizes[0] > 0, "batch sizes of z0", sizes, "one whole number >= 1, dim 0 of every branch"
        )
        self.shapes = [t.shape for t in self.z0]
        kinds = [str(t.dtype) for t in self.z0 if not t.is_floating_point()]
        require(not kinds, "dtype of z0", ", ".join(kinds), "a floating-point type")

    def pack(self, z: list[Tensor]) -> State:
        return z[0] if self.single else z

    def __call__(self, z: list[Tensor], other: Map | None = None) -> list[Tensor]:
        self.nfe += 1
        out = (other or self.f)(self.pack(z))
        fz = [out] if isinstance(out, Tensor) else list(out)
        found = [t.shape for t in fz]
        if found != self.shapes:
            require(False, "shapes of f(z)", found, f"those of z, {self.shapes}")
        return fz


STATUS = ("converged", "max_iter", "diverged", "nan")  # from good to bad


class Track:
    """Residuals, stopping, and the best evaluation (z, f(z)) of every sample.

    Rows are copied only when they would be lost: when a sample stops before the others do, or when its residual grows.
    """

    def __init__(self, solver: Solver, layout: Layout, least: int = 1):
        b, self.least = layout.b, least
        self.layout, self.solver, self.k, self.history, self.done, self.stopped = (layout, solver, -1, [], False, False)
        self.active, self.bad, self.status = np.ones(b, bool), np.zeros(b, bool), np.ones(b, int)
        self.best, self.steps = np.full(b, np.inf), np.zeros(b, int)
        self.kept = np.zeros(b, bool)  # the best evaluation is in `saved`, not the last one
        self.saved, self.calm = None, solver.stop == "worst"
        self.rounding = 8 * torch.finfo(layout.dtype).eps

    def observe(self, r: np.ndarray, size: np.ndarray, here: Evaluation, before: Evaluation) -> None:
        """Record one evaluation, here = (z, f(z)), with ||f(z)-z|| and ||f(z)|| (B,); before is the previous one."""
        s = self.solver
        self.k += 1
        if self.k == 0:
            self.limit = DIVERGED * np.maximum(r, size) if s.tol > 0 else np.full_like(r, np.inf)
            self.ceiling = self.limit.min()
        value = r / np.maximum(size, 1e-300) if s.relative else r
        active = self.active
        if self.stopped:
            value = np.where(active, value, self.history[-1])
        self.history.append(value)
        # Below the rounding level of the state all evaluations are equally good: the last one is kept.
        better = value < np.maximum(self.best, self.rounding * (1.0 if s.relative else size))
        if self.calm and better.all() and value.min() >= s.tol and r.max() <= self.ceiling:
            self.best = value  # all samples active and better, none done: the usual case, kept short
            return
        better &= active
        finite = np.isfinite(r) & np.isfinite(size)
        bad = active & ~(finite & (r <= self.limit))
        better &= ~bad
        lost = active & ~better & ~self.kept
        if lost.any():
            self._save(lost, before)
        self.best, self.kept = np.where(better, value, self.best), (self.kept & ~better) | lost
        met = active & ~bad & (value < s.tol) & (self.k + 1 >= self.least)
        self.status[met], self.status[bad] = 0, np.where(finite[bad], 2, 3)
        self.bad |= bad
        self.active = active & ~bad & ~met if s.stop == "worst" else ~self.bad
        self.steps[self.active != active] = self.k + 1
        self.done = not self.active.any() or (
            s.stop == "mean" and self.k + 1 >= self.least and value[~self.bad].mean() < s.tol
        )
        self.stopped = not self.active.all()
        early = active & ~self.active & ~bad
        if early.any() and not self.done:
            self._save(early, here)
            self.kept |= early
        self.calm = s.stop == "worst" and not (self.stopped or self.kept.any())

    def _save(self, mask: np.ndarray, evaluation: Evaluation) -> None:
        i = torch.from_numpy(np.flatnonzero(mask)).to(self.layout.device, non_blocking=True)
        self.saved = self.layout.empty(2) if self.saved is None else self.saved
        for keep, now in zip(self.saved, evaluation, strict=True):
            keep[i] = torch.cat([t[i] for t in self.layout.rows(now)], 1).to(keep.dtype)

    def patch(self, which: int, branches: list[Tensor], mask: np.ndarray) -> list[Tensor]:
        """Branches with the saved z (which = 0) or f(z) (1) in the rows of mask; copies, unless there are none."""
        if not mask.any():
            return branches
        i = torch.from_numpy(np.flatnonzero(mask)).to(self.layout.device, non_blocking=True)
        out = self.layout.copy(branches)
        parts = self.saved[which, i].split(self.layout.sizes, 1)
        for t, part in zip(self.layout.rows(out), parts, strict=True):
            t[i] = part.to(t.dtype)
        return out

    def solution(self, calls: Calls, z: list[Tensor], z_in: list[Tensor], final_used: bool) -> Solution:
        mean = self.solver.stop == "mean" and self.done and not self.bad.any()
        return Solution(
            z=calls.pack(z),
            residuals=torch.from_numpy(np.stack(self.history)),
            nfe=calls.nfe,
            converged=torch.from_numpy(self.status == 0),
            reason="converged" if mean else STATUS[self.status.max()],
            steps=torch.from_numpy(np.where(self.active, self.k + 1, self.steps)),
            reasons=[STATUS[i] for i in self.status],
            nfe_total=calls.nfe,
            z_in=calls.pack(z_in),
            final_used=final_used,
        )


def number(value) -> bool:
    """A finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(ok: bool, name: str, value, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value}: must be {allowed}")
