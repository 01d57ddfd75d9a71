"""Picard iteration whose number of steps is known beforehand (fixed, foreseen from the observed rate, or proved from L), so
that no evaluation waits for a decision of the host. `options` is a `loop.Picard`."""

import math

import numpy as np
import torch
from torch import Tensor

from lipmdeq.bounds import banach
from lipmdeq.solvers.capture import WORTH_CAPTURING, captured
from lipmdeq.solvers.layout import Layout, norms, select
from lipmdeq.solvers.solution import Calls, Solution, like

BLOCK = 5  # evaluations between two looks at the residuals, at most, once one was seen


def in_blocks(options, calls: Calls, expect: int | None) -> Solution:
    """`options.steps` evaluations, then one look at the residuals; "auto": blocks of evaluations with a look after each.

    The first block is as long as is expected: by the last solve, by L (Banach, from z = 0), else BLOCK; the next ones as long
    as the slowest sample still needs at the rate that was seen, at most BLOCK. No sample stops before the others.
    """
    todo, auto, before, z, fz, f = options.steps, options.steps == "auto", None, calls.z0, None, calls.f
    if auto:
        known = BLOCK if options.L is None else banach.steps(options.L, options.tol) + 1
        todo = min(max(expect or known, options.min_iter), options.max_iter)
    while todo > 0:
        for left in reversed(range(todo)):
            if fz is not None:
                before, z = z, _step(options, z, fz)
                if left >= WORTH_CAPTURING and z[0].is_cuda and calls.f is f:
                    calls.f = captured(f, like(z, calls.model))
            fz = calls(z, last=left == 0)
        *move, r, size = _look(before, z, fz)
        value = r / np.maximum(size, 1e-300) if options.relative else r
        rate = r / (move[0] / options.damping) if move else np.full_like(r, np.nan)
        need = np.log(options.tol / value) / np.log(rate)  # evaluations more; below 0: fewer
        late = np.where(rate < 1, need, BLOCK)[np.isfinite(value) & (value >= options.tol)]
        more = min(max(math.ceil(late.max()), 1), BLOCK) if auto and late.size else 0
        todo = min(more, options.max_iter - calls.nfe)
    status = np.where(np.isfinite(value), np.where(value < options.tol, 0, 1), 3)
    solution = _conclude(calls, (z, fz), value, status)
    solution.final_used = calls.by_final and "nan" not in solution.reasons
    if auto and solution.reason == "converged":
        spare = math.floor(-np.clip(np.nan_to_num(need), -calls.nfe, 0).max())
        solution.expect = max(options.min_iter, calls.nfe - spare, 1)
    if options.L is not None:
        solution.error = torch.from_numpy(np.where(status < 3, options.L / (1 - options.L) * r, np.nan))
    return solution


def _step(options, z: list[Tensor], fz: list[Tensor]) -> list[Tensor]:
    if options.damping == 1:
        return fz
    return [torch.lerp(p.to(t.dtype), t, options.damping) for p, t in zip(z, fz, strict=True)]


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


def _conclude(calls: Calls, found: tuple, value: np.ndarray, status: np.ndarray) -> Solution:
    """found = (z_in, z) of all samples; one that left the numbers returns to z_0."""
    z_in, z = (select(status == 3, calls.z0, t) for t in found)
    return calls.solution(z, z_in, [np.where(status < 3, value, np.nan)], status)


def proved_count(options, r0: np.ndarray | None, s0: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Per sample, the smallest k at which the residual is proved <= tol, and the bound there (k = 0: no proof).

    With e = ||z_0 - z*||, q = 1 - damping (1 - L): ||z_k - z*|| <= q^k e, ||f(z_k) - z_k|| <= (1+L) q^k e, also
    <= q^k r_0, and ||f(z_k)|| >= ||z*|| - L q^k e. From z_0 = 0, e = ||z*|| (r0 is None). Else e <= r_0 / (1-L) and
    ||z*|| >= s_0 - L e with r_0 = ||f(z_0)-z_0||, s_0 = ||f(z_0)||.
    """
    L, tol = options.L, options.tol
    q = 1 - options.damping * (1 - L)
    if r0 is None:
        top, bottom, drop = np.array([[1 + L], [1.0], [L]])
    else:
        top, drop = r0, L * r0 / (1 - L)
        bottom = s0 - drop
    if not options.relative:
        bottom, drop = np.ones_like(top), np.zeros_like(top)
    proved = ((bottom > 0) & np.isfinite(top)) | (top == 0)  # top = 0: the start is the fixed point
    # top x <= tol (bottom - drop x) with x = q^k
    x = np.where(proved & (top > 0), tol * bottom / (top + tol * drop), 1.0)
    k = np.ceil(np.log(x) / math.log(q) - 1e-9) if q > 0 else np.ones_like(x)
    k = np.where(proved, np.maximum(k, 1), 0).astype(int)
    return k, np.where(top == 0, 0.0, top * q**k / (bottom - drop * q**k))


def a_priori(options, calls: Calls) -> Solution:
    """Every sample stops after its own number of steps; one without a proof, or that leaves the numbers, spoils no other."""
    z, b = calls.z0, len(calls.z0[0])
    need, bound = np.zeros(b, int), np.full(b, np.nan)  # evaluations of each sample, 0 while there is no proof
    if options.relative and not any(t.any() for t in z):
        need[:], bound[:] = proved_count(options, None, None)
    while calls.nfe < options.max_iter and (need.min() == 0 or calls.nfe < need.max()):
        fz = calls(z)
        if need.min() == 0:  # from here on, where there was no proof from an earlier point
            k, found = proved_count(options, *_look(z, fz))
            fresh = (need == 0) & (k > 0)
            need[fresh], bound[fresh] = k[fresh] + calls.nfe - 1, found[fresh]
        z = select((need > 0) & (need < calls.nfe), z, _step(options, z, fz))
    done = (need > 0) & (need <= calls.nfe)
    status = np.where(np.isfinite(_look(z)[0]), np.where(done, 0, 1), 3)
    solution = _conclude(calls, (z, z), np.where(done, bound, np.nan), status)
    solution.steps = torch.from_numpy(np.where(done, need, calls.nfe))
    return solution
