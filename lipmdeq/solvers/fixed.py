"""Picard iteration whose number of steps is known beforehand (fixed, or foreseen from L or from the observed rate), so that no
evaluation waits for a decision of the host. `options` is a `loop.Picard`."""

import math

import numpy as np
import torch
from torch import Tensor

from lipmdeq.bounds import banach
from lipmdeq.solvers.capture import WARM_UP, WORTH_CAPTURING, captured
from lipmdeq.solvers.layout import Layout, norms, select
from lipmdeq.solvers.solution import Calls, Solution, like

BLOCK = 5  # evaluations between two looks at the residuals, at most, once one was seen


def in_blocks(options, calls: Calls, expect: int | None) -> Solution:
    """`options.steps` evaluations, then one look at the residuals; "auto": blocks of evaluations with a look after each.

    The first block is as long as is expected: by the last solve, by L (Banach, from z = 0), else BLOCK; the next ones as long
    as the slowest sample still needs at the rate that was seen, at most BLOCK. No sample stops before the others.
    """
    todo, auto, before, z, fz, f = options.steps, not isinstance(options.steps, int), None, calls.z0, None, calls.f
    if auto:
        known = BLOCK if options.L is None else banach.steps(1 - options.damping * (1 - options.L), options.tol) + 1
        todo = min(max(expect or known, options.min_iter), options.max_iter)
    while todo > 0:
        for left in reversed(range(todo)):
            if fz is not None:
                before, z = z, _step(options, z, fz)
                if calls.nfe >= WARM_UP and left >= WORTH_CAPTURING and z[0].is_cuda and calls.f is f:
                    calls.f = captured(f, like(z, calls.model))
            fz = calls(z, last=left == 0)
        *move, r, size = _look(before if auto else None, z, fz)
        value = r / np.maximum(size, 1e-300) if options.relative else r
        rate = r / (move[0] / options.damping) if move else np.full_like(r, np.nan)
        need = np.log(options.tol / value) / np.log(rate)  # evaluations more; below 0: fewer
        late = np.where(rate < 1, need, BLOCK)[np.isfinite(value) & (value >= options.tol)]
        more = min(max(math.ceil(late.max()), 1), BLOCK) if auto and late.size else 0
        todo = min(more, options.max_iter - calls.nfe)
    status = np.where(np.isfinite(value), np.where(value < options.tol, 0, 1), 3)
    z_in, z = (select(status == 3, calls.z0, t) for t in (z, fz))  # a sample that left the numbers returns to z_0
    solution = calls.solution(z, z_in, [np.where(status < 3, value, np.nan)], status)
    solution.final_used = calls.by_final and "nan" not in solution.reasons
    if auto and solution.reason == "converged":
        spare = math.floor(-np.clip(np.nan_to_num(need), -calls.nfe, 0).max())
        solution.expect = max(options.min_iter, calls.nfe - spare, 1)
    if options.L is not None:
        solution.error = torch.from_numpy(np.where(status < 3, options.L / (1 - options.L) * r, np.nan))
    return solution


def _step(options, z: list[Tensor], fz: list[Tensor]) -> list[Tensor]:
    both = zip(z, fz, strict=True)
    return fz if options.damping == 1 else [torch.lerp(p.to(t.dtype), t, options.damping) for p, t in both]


def _look(*points: list[Tensor] | None) -> np.ndarray:
    """The norms of the moves from each point to the next, and of the last point, (B,) each, in one copy to the host."""
    points = [p for p in points if p is not None]
    layout = Layout(points[-1])
    flat = layout.empty(len(points))
    for i, point in enumerate(points):
        layout.pack(point, flat[i])
        if i:
            torch.sub(flat[i], flat[i - 1], out=flat[i - 1])
    return norms(flat)
