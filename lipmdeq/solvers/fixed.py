"""Picard iteration whose number of steps is known beforehand: fixed, foreseen from the observed rate, or proved from L.

No evaluation waits for a decision of the host. `options` is a `loop.Picard`.
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import torch
from torch import Tensor

from lipmdeq.bounds import banach
from lipmdeq.solvers.layout import Layout, norms, select
from lipmdeq.solvers.solution import Map, Solution, SolverWarning, State
from lipmdeq.solvers.track import Calls, conclude

WARM_UP = 3  # evaluations before a capture: torch asks for a few, on the stream that will capture
WORTH_CAPTURING = (
    16  # evaluations in a row: to capture one costs three to warm up, one to record and a wait of the host
)
_refused: set[object] = set()  # the code of maps that could not be captured: they are not tried again


def in_blocks(options, calls: Calls, expect: int | None) -> Solution:
    """`options.steps` evaluations, then one look at the residuals; "auto": blocks of evaluations with a look after each.

    The first block is as long as is expected: by the last solve, by L (Banach, from z = 0), else `check` evaluations. The
    next ones are as long as the slowest sample still needs at the rate that was seen, but at most `check`. No sample stops
    before the others.
    """
    auto, z, before, f = options.steps == "auto", calls.z0, None, calls.f
    todo = options.steps
    if auto:
        known = banach.steps(options.L, options.tol) + 1 if options.L is not None else options.check
        todo = min(max(expect or known, options.min_iter), options.max_iter)
    while True:
        for i in range(todo):
            if i == 1 and todo - 1 > WORTH_CAPTURING and z[0].is_cuda and calls.f is f:
                calls.f = captured(f, calls.pack(z))
            fz = calls(z, last=i == todo - 1)
            if i < todo - 1:
                before, z = z, _step(options, z, fz)
        r, size, rate = _look(options, before if auto else None, z, fz)
        value = r / np.maximum(size, 1e-300) if options.relative else r
        need = np.log(options.tol / value) / np.log(rate) if auto else None  # evaluations more; below 0: fewer
        left = options.max_iter - calls.nfe
        open_ = np.isfinite(value) & (value >= options.tol)
        if not auto or not open_.any() or not left:
            return _conclude(options, calls, (z, fz), (r, value), need)
        before, z = z, _step(options, z, fz)
        worst = np.where(open_ & (rate < 1), need, options.check)[open_].max()
        todo = int(min(max(math.ceil(worst), 1), options.check, left))


def _step(options, z: list[Tensor], fz: list[Tensor]) -> list[Tensor]:
    if options.damping == 1:
        return fz
    return [torch.lerp(p.to(t.dtype), t, options.damping) for p, t in zip(z, fz, strict=True)]


def _look(options, before: list[Tensor] | None, z: list[Tensor], fz: list[Tensor]) -> tuple:
    """||f(z)-z||, ||f(z)|| and the rate of the last step (nan if there was none), (B,) each, in one copy to the host."""
    points = [z, fz] if before is None else [before, z, fz]
    for dtype in (None, torch.float64):  # double precision where squares leave the range of single
        layout = Layout(fz, dtype)
        flat = layout.empty(len(points))
        for i, point in enumerate(points):
            layout.pack(point, flat[i])
            if i:
                torch.sub(flat[i], flat[i - 1], out=flat[i - 1])
        *moves, size = norms(flat)
        if layout.dtype == torch.float64 or ((size > 1e-12) & (size < 1e15) & (moves[-1] < 1e15)).all():
            break
    rate = np.full_like(size, np.nan) if before is None else moves[1] / (moves[0] / options.damping)
    return moves[-1], size, rate


def _conclude(options, calls: Calls, found: tuple, measured: tuple, need: np.ndarray | None) -> Solution:
    """z = f(z_in) of all samples; one that left the numbers returns to z_0."""
    (z_in, z), (r, value) = found, measured
    finite = np.isfinite(value)
    status = np.where(finite, np.where(value < options.tol, 0, 1), 3)
    if not finite.all():
        z, z_in = select(~finite, calls.z0, z), select(~finite, calls.z0, z_in)
    solution = conclude(calls, (z, z_in), [np.where(finite, value, np.nan)], status)
    solution.final_used = calls.final is not None and bool(finite.all())
    if need is not None and solution.reason == "converged":
        spare = math.floor(-np.clip(np.nan_to_num(need), -calls.nfe, 0).max())
        solution.expect = max(options.min_iter, calls.nfe - spare, 1)
    if options.L is not None:
        solution.error = torch.from_numpy(np.where(finite, options.L / (1 - options.L) * r, np.nan))
    return solution


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which maps are warmed up and captured: libraries keep a handle for each stream."""
    return torch.cuda.Stream(device)


def captured(f: Map, z: State) -> Map:
    """f as a CUDA graph, for the evaluations without gradient of one solve: they are launched as a whole.

    Written after the documentation of torch and tested with a stand-in; it has not been run on a GPU. Where f cannot be
    captured, f itself is returned, with a warning, and such an f is not tried again. Products with the Jacobian are
    expected to be among these: torch runs them on the stream on which f was recorded, which does not capture.
    """
    code = getattr(f, "__code__", type(f))
    if code in _refused:
        return f
    single = isinstance(z, Tensor)
    here, graph = [t.clone() for t in ([z] if single else z)], torch.cuda.CUDAGraph()
    side, current = _side_stream(here[0].device), torch.cuda.current_stream(here[0].device)
    try:
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                f(here[0] if single else list(here))
        current.wait_stream(side)
        # The outer `with`: where a capture fails, torch.cuda.graph does not go back to the current stream.
        with torch.cuda.stream(current), torch.cuda.graph(graph, stream=side):
            out = f(here[0] if single else list(here))
    except RuntimeError as e:
        _refused.add(code)
        warnings.warn(f"f was not captured as a CUDA graph ({e})", SolverWarning, stacklevel=2)
        return f

    def replay(z: State) -> State:
        for a, b in zip(here, [z] if single else z, strict=True):
            a.copy_(b)
        graph.replay()
        return out.clone() if single else [t.clone() for t in out]  # the next replay writes over out

    return replay


# ---- the number of steps proved from L -----------------------------------------------------------------------------


def proved_count(options, r0: np.ndarray | None, s0: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Per sample, the smallest k at which the residual is proved <= tol, and the bound there (k = 0: no proof).

    With e = ||z_0 - z*||, q = 1 - damping (1 - L): ||z_k - z*|| <= q^k e, ||f(z_k) - z_k|| <= (1+L) q^k e, also
    <= q^k r_0, and ||f(z_k)|| >= ||z*|| - L q^k e. From z_0 = 0, e = ||z*|| (r0 is None). Else e <= r_0 / (1-L) and
    ||z*|| >= s_0 - L e with r_0 = ||f(z_0)-z_0||, s_0 = ||f(z_0)||.
    """
    L, tol = options.L, options.tol
    q = 1 - options.damping * (1 - L)
    if r0 is None:
        top, bottom, drop = np.array([1 + L]), np.array([1.0]), np.array([L])
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
    if options.relative and not torch.stack([_largest(t).amax() for t in z]).any():
        need[:], bound[:] = proved_count(options, None, None)
    least, last = _ends(need, options.max_iter)
    while calls.nfe < last:
        fz = calls(z)
        if not least:  # from here on, where there was no proof from an earlier point
            k, found = proved_count(options, *_look(options, None, z, fz)[:2])
            fresh = (need == 0) & (k > 0)
            need[fresh], bound[fresh] = k[fresh] + calls.nfe - 1, found[fresh]
            least, last = _ends(need, options.max_iter)
        fz = _step(options, z, fz)
        if least < calls.nfe and (over := (need > 0) & (need < calls.nfe)).any():
            fz = select(over, z, fz)
        z = fz
    finite = torch.stack([_largest(t) for t in z]).isfinite().all(0).cpu().numpy()
    if not finite.all():
        z = select(~finite, calls.z0, z)  # the last point that is known to be finite
    done = (need > 0) & (need <= calls.nfe)
    status = np.where(finite, np.where(done, 0, 1), 3)
    solution = conclude(calls, (z, z), [np.where(done & finite, bound, np.nan)], status)
    solution.steps = torch.from_numpy(np.where(done, np.minimum(need, calls.nfe), calls.nfe))
    return solution


def _ends(need: np.ndarray, cap: int) -> tuple[int, int]:
    """The smallest number of evaluations that a sample needs (0: one has no proof yet), and the largest for all."""
    least = int(need.min())
    return least, min(cap, int(need.max())) if least else cap


def _largest(t: Tensor) -> Tensor:
    """The largest absolute value of each sample, (B,); not finite where something in it is not."""
    if t[0].numel() == 0:
        return t.new_zeros(len(t))
    return t.abs().unsqueeze(-1).amax(tuple(range(1, t.dim() + 1)))
