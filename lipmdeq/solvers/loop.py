"""Fixed-point solvers for z = f(z): Picard (Banach), Anderson, Broyden.

A state is a tensor of shape (B, ...) or a list of such tensors (the branches of an MDEQ). Samples of a batch are
independent problems: every sample has its own residual, its own weights and its own stopping time, so that its result
does not depend on its neighbours. Anderson and Broyden carry the same safeguard (`steps.Safeguard`): on a
contraction they always converge, and are never more than one evaluation behind the bound of Banach's theorem.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from lipmdeq.solvers.solution import (
    Calls,
    ConvergenceError,
    Map,
    Solution,
    SolverWarning,
    State,
    Track,
    number,
    require,
    whole,
)
from lipmdeq.solvers.steps import AndersonStep, BroydenStep, Layout, PicardStep

__all__ = ["Anderson", "Broyden", "ConvergenceError", "Picard", "Solution", "Solver", "SolverWarning"]

SLACK = 3.0  # the next evaluation may be the last if its residual is guessed below SLACK * tol (tol, if the last solve took more)


@dataclass(frozen=True, kw_only=True)
class Solver:
    """Options of every solver.

    Attributes:
        tol: a sample has converged when its residual is below tol; 0 runs all max_iter evaluations.
        max_iter: largest number of evaluations of f.
        relative: residual ||f(z)-z|| / ||f(z)|| (as in the paper), else ||f(z)-z||; norms over all branches.
        stop: "worst" ends when every sample has converged, each frozen at its own time; "mean" ends when the mean
            residual of the batch is below tol, and freezes none.
    """

    tol: float = 1e-3
    max_iter: int = 50
    relative: bool = True
    stop: str = "worst"

    def __post_init__(self):
        require(number(self.tol) and self.tol >= 0, "tol", self.tol, ">= 0")
        require(isinstance(self.relative, bool), "relative", repr(self.relative), "True or False")
        require(whole(self.max_iter, 1), "max_iter", self.max_iter, "a whole number >= 1")
        require(self.stop in ("worst", "mean"), "stop", repr(self.stop), "'worst' or 'mean'")

    def solve(self, f: Map, z0: State, *, throw: bool = False, final: Map | None = None, least: int = 1) -> Solution:
        """Solve z = f(z) from z0, without graph.

        Args:
            f: map of the batch, z -> f(z), same structure and shapes.
            z0: tensor (B, ...) or list of such tensors.
            throw: raise ConvergenceError instead of a warning when a sample did not converge.
            final: replaces f in the evaluation that is expected to be the last (there `gradients.deq` records the graph).
            least: evaluations before a sample may have converged.
        """
        with torch.no_grad(), np.errstate(all="ignore"):
            solution = self._solve(Calls(f, z0), final, least)
        if final:
            object.__setattr__(self, "_recent", solution.nfe if solution.reason == "converged" else None)
        if solution.reason != "converged" and self.tol > 0:
            if throw:
                raise ConvergenceError(solution)
            text = f"a solve stopped before every sample converged ({solution.reason}); see Solution.converged"
            warnings.warn(text, SolverWarning, stacklevel=1)
        return solution

    def forget(self) -> None:
        """Forget how many evaluations the last solve took (a guess for the next one, see `_solve`)."""
        self.__dict__.pop("_recent", None)

    def _target(self, size: np.ndarray) -> np.ndarray:
        return self.tol * size if self.relative else np.full_like(size, self.tol)

    def _first(self, z: list[torch.Tensor], fz: list[torch.Tensor]) -> tuple:
        """The proposals and the first measurement; in double precision where squares would leave the range of single."""
        step = self._step(Layout(fz))
        r, size = step.measure(z, fz)
        if step.layout.dtype == torch.float32 and not ((size > 1e-12) & (size < 1e15) & (r < 1e15)).all():
            step = self._step(Layout(fz, torch.float64))
            r, size = step.measure(z, fz)
        return step, (r, size)

    def _solve(self, calls: Calls, final: Map | None, least: int = 1) -> Solution:
        z, before, held = calls.z0, (calls.z0, calls.z0), None
        # How many evaluations this object's last solve took: a guess for this one. It decides which evaluation is `final`
        # (records a graph, say), so it affects cost, and rounding in the last digits: `forget` where bits must agree.
        recent = getattr(self, "_recent", None)
        last = final is not None and recent == 1
        for k in range(self.max_iter):
            fz = calls(z, final if last else None)
            if k == 0:
                step, (r, size) = self._first(z, fz)
                track = Track(self, step.layout, min(least, self.max_iter))
                exact = _without_autocast(step.layout.device.type)
            else:
                r, size = step.measure(z, fz)
            track.observe(r, size, (z, fz), before)
            if track.done or k == self.max_iter - 1:
                break
            with exact:
                z_next = step.propose(r, size, track.active)
            if final:
                slack = SLACK if recent is None or k + 2 >= recent else 1.0
                near = step.guess() < slack * self._target(size)
                last = k + 2 == recent or bool(near[track.active].all())
            if track.stopped:
                # Broken samples return to their best point, for the graph all stopped ones; else they run on, ignored.
                held = track.kept & ~track.active if last else track.bad
                if held.any():
                    z_next = track.patch(0, z_next, held)
                    step.moved(z_next)
            before, z = (z, fz), z_next
        step.close()
        del step, before  # the history, before copies are made
        if not track.kept.any():
            return track.solution(calls, fz, z, last)
        used = last and held is not None and not (track.kept & ~held).any()
        z_in = z if used or final is None else track.patch(0, z, track.kept)
        return track.solution(calls, track.patch(1, fz, track.kept), z_in, used)


@dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    """z <- f(z), Banach's iteration; z <- (1-damping) z + damping f(z).

    With a constant L < 1 of f (in l2) the number of steps comes from the a-priori bound, see `_count`, and no residual
    is computed: `residuals` is then one row, the proved bound, and z the last iterate itself, after that many calls.
    """

    damping: float = 1.0
    L: float | None = None

    def __post_init__(self):
        super().__post_init__()
        require(number(self.damping) and 0 < self.damping <= 1, "damping", self.damping, "in (0, 1]")
        require(self.L is None or number(self.L) and 0 <= self.L < 1, "L", self.L, "in [0, 1), or None")
        require(self.L is None or self.tol > 0, "tol", self.tol, "> 0 if L is given")

    def _step(self, layout: Layout) -> PicardStep:
        return PicardStep(layout, self.damping)

    def _solve(self, calls: Calls, final: Map | None, least: int = 1) -> Solution:
        return super()._solve(calls, final, least) if self.L is None else self._a_priori(calls)

    def _count(self, r0: np.ndarray | None, s0: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Per sample, the smallest k at which the residual is proved <= tol, and the bound there (k = 0: no proof).

        With e = ||z_0 - z*||, q = 1 - damping (1 - L): ||z_k - z*|| <= q^k e, ||f(z_k) - z_k|| <= (1+L) q^k e, also
        <= q^k r_0, and ||f(z_k)|| >= ||z*|| - L q^k e. From z_0 = 0, e = ||z*|| (r0 is None). Else e <= r_0 / (1-L) and
        ||z*|| >= s_0 - L e with r_0 = ||f(z_0)-z_0||, s_0 = ||f(z_0)||.
        """
        q, L = 1 - self.damping * (1 - self.L), self.L
        if r0 is None:
            top, bottom, drop = np.array([1 + L]), np.array([1.0]), np.array([L])
        else:
            top, drop = r0, L * r0 / (1 - L)
            bottom = s0 - drop
        if not self.relative:
            bottom, drop = np.ones_like(top), np.zeros_like(top)
        proved = ((bottom > 0) & np.isfinite(top)) | (top == 0)  # top = 0: the start is the fixed point
        # top x <= tol (bottom - drop x) with x = q^k
        x = np.where(proved & (top > 0), self.tol * bottom / (top + self.tol * drop), 1.0)
        k = np.ceil(np.log(x) / math.log(q) - 1e-9) if q > 0 else np.ones_like(x)
        k = np.where(proved, np.maximum(k, 1), 0).astype(int)
        return k, np.where(top == 0, 0.0, top * q**k / (bottom - drop * q**k))

    def _a_priori(self, calls: Calls) -> Solution:
        """Every sample stops after its own number of steps; one without a proof, or that leaves the numbers, spoils no other."""
        z, b = calls.z0, len(calls.z0[0])
        # evaluations of each sample, 0 while there is no proof
        need, bound = np.zeros(b, int), np.full(b, np.nan)
        if self.relative and not any(_largest(t).any() for t in z):
            need[:], bound[:] = self._count(None, None)
        least, last = _ends(need, self.max_iter)
        while calls.nfe < last:
            fz = calls(z)
            if not least:  # from here on, where there was no proof from an earlier point
                k, found = self._count(*self._first(z, fz)[1])
                fresh = (need == 0) & (k > 0)
                need[fresh], bound[fresh] = k[fresh] + calls.nfe - 1, found[fresh]
                least, last = _ends(need, self.max_iter)
            if self.damping < 1:
                fz = [torch.lerp(p.to(t.dtype), t, self.damping) for p, t in zip(z, fz, strict=True)]
            if least < calls.nfe:
                over = (need > 0) & (need < calls.nfe)
                fz = rows(over, z, fz) if over.any() else fz
            z = fz
        finite = torch.stack([_largest(t) for t in z]).isfinite().all(0).cpu().numpy()
        if not finite.all():
            z = rows(~finite, calls.z0, z)  # the last point that is known to be finite
        done = (need > 0) & (need <= calls.nfe)
        track = Track(self, Layout(z))
        track.history = [np.where(done & finite, bound, np.nan)]
        track.status, track.k = np.where(finite, np.where(done, 0, 1), 3), calls.nfe - 1
        track.active, track.steps = ~done, np.minimum(need, calls.nfe)
        return track.solution(calls, z, z, False)


def _ends(need: np.ndarray, cap: int) -> tuple[int, int]:
    """The smallest number of evaluations that a sample needs (0: one has no proof yet), and the largest for all."""
    least = int(need.min())
    return least, min(cap, int(need.max())) if least else cap


def _largest(t: torch.Tensor) -> torch.Tensor:
    """The largest absolute value of each sample, (B,); not finite where something in it is not."""
    if t[0].numel() == 0:
        return t.new_zeros(len(t))
    return t.abs().unsqueeze(-1).amax(tuple(range(1, t.dim() + 1)))


def rows(mask: np.ndarray, chosen: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
    """States with the samples of mask from `chosen`, the rest from `others`."""
    m = torch.from_numpy(mask).to(others[0].device, non_blocking=True)
    return [
        torch.where(m.view(-1, *[1] * (t.dim() - 1)), c.to(t.dtype), t) for c, t in zip(chosen, others, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver):
    """Anderson acceleration, type II, with a relative ridge and the Picard safeguard.

    Attributes:
        m: evaluations kept (the last one included); on the CPU their memory, above 32 MB, stays for the next solve.
        ridge: relative, see `steps.anderson_weights`.
        beta: mixing of accelerated steps, z = sum alpha_i (z_i + beta g_i).
    """

    m: int = 6
    ridge: float = 1e-4
    beta: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        require(whole(self.m, 2), "m", self.m, "a whole number >= 2")
        require(number(self.ridge) and self.ridge > 0, "ridge", self.ridge, "> 0")
        require(number(self.beta) and 0 < self.beta <= 1, "beta", self.beta, "in (0, 1]")

    def _step(self, layout: Layout) -> AndersonStep:
        return AndersonStep(layout, self._target, self.m, self.ridge, self.beta)


@dataclass(frozen=True, kw_only=True)
class Broyden(Solver):
    """Broyden's good method on f(z) - z, limited memory (restart after m updates), with the Picard safeguard."""

    m: int = 12

    def __post_init__(self):
        super().__post_init__()
        require(whole(self.m, 1), "m", self.m, "a whole number >= 1")

    def _step(self, layout: Layout) -> BroydenStep:
        return BroydenStep(layout, self._target, self.m)


def _without_autocast(device: str) -> AbstractContextManager:
    """Autocast is for f: the solver's own products stay in the work dtype."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
