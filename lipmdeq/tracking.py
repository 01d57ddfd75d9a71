"""Book-keeping of a fixed-point solve: what was found (`Solution`), what f was asked (`Calls`), which sample stopped when
and why (`Track`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lipmdeq.acceleration import like, norms, rows

if TYPE_CHECKING:
    from lipmdeq.solvers import Solver

State = Tensor | list[Tensor]
Map = Callable[[State], State]
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
        sizes = {t.shape[0] if t.dim() else None for t in self.z0}
        require(
            len(sizes) == 1 and None not in sizes, "z0", sizes, "tensors with the same batch size in dim 0"
        )
        self.plain = None

    def pack(self, z: list[Tensor]) -> State:
        return z[0] if self.single else z

    def __call__(self, z: list[Tensor], other: Map | None = None) -> list[Tensor]:
        self.nfe += 1
        out = (other or self.f)(self.pack(z))
        fz = [out] if isinstance(out, Tensor) else list(out)
        found, wanted = [tuple(t.shape) for t in fz], [tuple(t.shape) for t in z]
        require(found == wanted, "shape of f(z)", found, f"that of z, {wanted}")
        if self.plain is None:
            self.plain = [t.is_contiguous() for t in fz]
        return [layout(t, plain) for t, plain in zip(fz, self.plain, strict=True)]


def layout(t: Tensor, plain: bool) -> Tensor:
    """Keep the memory order of the first evaluation: histories are compared element by element."""
    if t.dim() != 4 or t.is_contiguous() == plain:
        return t
    return t.contiguous(memory_format=torch.contiguous_format if plain else torch.channels_last)


def residual(z: list[Tensor], fz: list[Tensor], out: list[Tensor]) -> np.ndarray:
    """Writes f(z) - z into out, (B, D_i) per branch; returns ||f(z)-z|| and ||f(z)||, (2, B), in at least float32."""
    for g, a, b in zip(out, fz, z, strict=True):
        torch.sub(a.to(g.dtype), b.to(g.dtype), out=like(g, a))
    return norms([out, [rows(t) for t in fz]])


def put(target: list[Tensor], source: list[Tensor], idx: np.ndarray) -> None:
    for t, s in zip(target, source, strict=True):
        i = torch.from_numpy(idx).to(t.device)
        t[i] = s[i].to(t.dtype)


def whole(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(ok: bool, name: str, value, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value}: must be {allowed}")


class Track:
    """Residuals, stopping and the best iterate of every sample. Copies rows only when a better past must be kept."""

    def __init__(self, cfg: Solver, z0: list[Tensor]):
        b = len(z0[0])
        self.cfg, self.k, self.history = cfg, -1, []
        self.status = np.full(b, "max_iter", dtype=object)
        self.frozen, self.bad = np.zeros(b, bool), np.zeros(b, bool)
        self.best, self.best_k, self.steps = np.full(b, np.inf), np.full(b, -1), np.zeros(b, int)
        self.prev, self.saved = (z0, z0), None
        self.expect_end = self.done = False

    def observe(self, z: list[Tensor], fz: list[Tensor], r: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Record one evaluation; returns the (B,) residual norms that would count as converged."""
        cfg = self.cfg
        self.k += 1
        if self.k == 0:
            self.limit = DIVERGED * np.maximum(r, size)
        active = ~self.frozen
        target = cfg.tol * size if cfg.relative else np.full_like(r, cfg.tol)
        value = np.where(r == 0, 0.0, np.minimum(r / np.maximum(size, 1e-300), 1e300)) if cfg.relative else r
        before = self.history[-1] if self.history else np.full_like(r, np.inf)
        value = np.where(active, value, before)
        self.history.append(value)
        broken = active & ~(np.isfinite(r) & np.isfinite(size))
        diverged = active & (r > self.limit) & ~broken & (cfg.tol > 0)
        improved = active & ~broken & ~diverged & (value < self.best)
        lost = np.flatnonzero(active & ~improved & (self.best_k == self.k - 1))
        if len(lost):
            self._save(lost)
        self.best, self.best_k = np.where(improved, value, self.best), np.where(improved, self.k, self.best_k)
        met = active & (value < cfg.tol)
        self.status[met], self.status[broken], self.status[diverged] = "converged", "nan", "diverged"
        self.steps[active] = self.k + 1
        self.bad |= broken | diverged
        self.frozen |= self.bad | (met if cfg.stop == "worst" else False)
        rest = value[~self.bad]
        self.done = self.frozen.all() or (cfg.stop == "mean" and rest.mean() < cfg.tol)
        ahead = value * np.minimum(value / before, 1)
        self.expect_end = self.k > 0 and bool((ahead[~self.frozen] < 2 * cfg.tol).all())
        self.prev = (z, fz)
        return target

    def _save(self, idx: np.ndarray) -> None:
        self.saved = self.saved or [[torch.empty_like(t) for t in s] for s in self.prev]
        for keep, now in zip(self.saved, self.prev, strict=True):
            put(keep, now, idx)

    def hold(self, z_next: list[Tensor], z: list[Tensor], fz: list[Tensor]) -> list[Tensor]:
        """Stopped samples stay at the input of their best evaluation, whatever the others do."""
        if not self.frozen.any():
            return z_next
        z_next = [t.clone() for t in z_next] if z_next is fz else z_next
        put(z_next, z, np.flatnonzero(self.frozen & ~self.bad))
        if self.bad.any():
            put(z_next, self.saved[0], np.flatnonzero(self.bad))
        return z_next

    def solution(self, calls: Calls, final_used: bool) -> Solution:
        old = np.flatnonzero(self.bad | (~self.frozen & (self.best_k < self.k)))
        z_in, z = self.prev
        if len(old):
            z_in, z = [t.clone() for t in z_in], [t.clone() for t in z]
            put(z_in, self.saved[0], old)
            put(z, self.saved[1], old)
        status = self.status.tolist()
        mean_met = self.cfg.stop == "mean" and self.done and not self.bad.any()
        found = [s for s in ("nan", "diverged", "max_iter") if s in status]
        return Solution(
            z=calls.pack(z),
            residuals=torch.from_numpy(np.stack(self.history)),
            nfe=calls.nfe,
            converged=torch.tensor([s == "converged" for s in status]),
            reason="converged" if mean_met or not found else found[0],
            steps=torch.from_numpy(self.steps),
            reasons=status,
            nfe_total=calls.nfe,
            z_in=calls.pack(z_in),
            final_used=final_used and not len(old),
        )
