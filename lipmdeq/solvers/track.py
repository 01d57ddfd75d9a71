"""Book-keeping while a solve runs: what f was asked (`Calls`), which sample stopped when and why (`Track`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lipmdeq.solvers.layout import Layout
from lipmdeq.solvers.solution import Map, Solution, State, require

Evaluation = tuple[list[Tensor], list[Tensor]]  # branches of z and of f(z)
STATUS = ("converged", "max_iter", "diverged", "nan")  # from good to bad
DIVERGED = 1e6  # a residual that grew by this factor will not come back


class Calls:
    """f with its calls counted, its output checked, and states unpacked to lists of branches."""

    def __init__(self, f: Map, z0: State, final: Map | None = None):
        self.f, self.final, self.nfe, self.single = f, final, 0, isinstance(z0, Tensor)
        self.z0 = [z0] if self.single else list(z0)
        sizes = sorted({t.shape[0] if t.dim() else 0 for t in self.z0})
        one = len(sizes) == 1 and sizes[0] > 0
        require(one, "batch sizes of z0", sizes, "one whole number >= 1, dim 0 of every branch")
        self.shapes = [t.shape for t in self.z0]
        kinds = [str(t.dtype) for t in self.z0 if not t.is_floating_point()]
        require(not kinds, "dtype of z0", ", ".join(kinds), "a floating-point type")

    def pack(self, z: list[Tensor]) -> State:
        return z[0] if self.single else z

    def __call__(self, z: list[Tensor], last: bool = False) -> list[Tensor]:
        """f(z); `final` computes it if this is expected to be the last call."""
        self.nfe += 1
        out = (self.final if last and self.final else self.f)(self.pack(z))
        fz = [out] if isinstance(out, Tensor) else list(out)
        found = [t.shape for t in fz]
        if found != self.shapes:
            require(False, "shapes of f(z)", found, f"those of z, {self.shapes}")
        return fz


class Track:
    """Residuals, stopping, and the best evaluation (z, f(z)) of every sample, for the options of a solver.

    Rows are copied only when they would be lost: when a sample stops before the others do, or when its residual grows.
    """

    def __init__(self, options, layout: Layout):
        b, self.layout, self.options, self.k, self.history = layout.b, layout, options, -1, []
        self.done = self.stopped = False
        self.active, self.bad, self.status = np.ones(b, bool), np.zeros(b, bool), np.ones(b, int)
        self.best, self.steps = np.full(b, np.inf), np.zeros(b, int)
        self.kept = np.zeros(b, bool)  # the best evaluation is in `saved`, not the last one
        self.saved, self.calm = None, options.stop == "worst"
        self.rounding = 8 * torch.finfo(layout.dtype).eps
        self.least = min(options.min_iter, options.max_iter)

    def observe(self, r: np.ndarray, size: np.ndarray, here: Evaluation, before: Evaluation) -> None:
        """Record one evaluation, here = (z, f(z)), with ||f(z)-z|| and ||f(z)|| (B,); before is the previous one."""
        options, active = self.options, self.active
        self.k += 1
        if self.k == 0:
            self.limit = DIVERGED * np.maximum(r, size) if options.tol > 0 else np.full_like(r, np.inf)
            self.ceiling = self.limit.min()
        value = r / np.maximum(size, 1e-300) if options.relative else r
        if self.stopped:
            value = np.where(active, value, self.history[-1])
        self.history.append(value)
        # Below the rounding level of the state all evaluations are equally good: the last one is kept.
        better = value < np.maximum(self.best, self.rounding * (1.0 if options.relative else size))
        if self.calm and better.all() and value.min() >= options.tol and r.max() <= self.ceiling:
            self.best = value  # all samples active and better, none done: the usual case, kept short
            return
        finite = np.isfinite(r) & np.isfinite(size)
        bad = active & ~(finite & (r <= self.limit))
        better &= active & ~bad
        lost = active & ~better & ~self.kept
        if lost.any():
            self._save(lost, before)
        self.best, self.kept = np.where(better, value, self.best), (self.kept & ~better) | lost
        self.status[bad] = np.where(finite[bad], 2, 3)
        self._stop(value, bad)
        early = active & ~self.active & ~bad
        if early.any() and not self.done:
            self._save(early, here)
            self.kept |= early
        self.calm = options.stop == "worst" and not (self.stopped or self.kept.any())

    def _stop(self, value: np.ndarray, bad: np.ndarray) -> None:
        """Which samples stop at this evaluation, with the residuals `value`, and whether all is done."""
        options, active, may = self.options, self.active, self.k + 1 >= self.least
        met = active & ~bad & (value < options.tol) & may
        self.status[met] = 0
        self.bad |= bad
        self.active = active & ~bad & ~met if options.stop == "worst" else ~self.bad
        self.steps[self.active != active] = self.k + 1
        mean = options.stop == "mean" and may and self.active.any() and value[~self.bad].mean() < options.tol
        self.done = not self.active.any() or mean
        self.stopped = not self.active.all()

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
        mean = self.options.stop == "mean" and self.done and not self.bad.any()
        found = conclude(calls, (z, z_in), self.history, self.status)
        found.reason = "converged" if mean else found.reason
        found.steps = torch.from_numpy(np.where(self.active, self.k + 1, self.steps))
        found.expect, found.final_used = (found.nfe if found.reason == "converged" else None), final_used
        return found


def conclude(calls: Calls, found: Evaluation, history: list[np.ndarray], status: np.ndarray) -> Solution:
    """The Solution z = f(z_in), found = (z, z_in), with the residuals of `history` and a place in STATUS for each sample."""
    return Solution(
        z=calls.pack(found[0]),
        residuals=torch.from_numpy(np.stack(history)),
        nfe=calls.nfe,
        converged=torch.from_numpy(status == 0),
        reason=STATUS[status.max()],
        steps=torch.full((len(status),), calls.nfe),
        reasons=[STATUS[i] for i in status],
        nfe_total=calls.nfe,
        z_in=calls.pack(found[1]),
    )
