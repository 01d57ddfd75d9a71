"""Fixed-point solvers for z = f(z): Picard (Banach), Anderson, Broyden.

A state is a tensor of shape (B, ...) or a list of such tensors (the branches of an MDEQ). Samples of a batch are
independent problems: every sample has its own residual, its own weights and its own stopping time, so that its result
does not depend on its neighbours. Anderson and Broyden carry the same safeguard (`safeguard.Safeguard`): on a
contraction they always converge, and are never more than one evaluation behind the bound of Banach's theorem.

Solvers are options and remember nothing: what a solve may take over from the last one goes in (`expect`, `room`) and comes
out (`Solution.expect`).
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipmdeq.solvers.fixed import a_priori, in_blocks
from lipmdeq.solvers.layout import Layout, Room
from lipmdeq.solvers.solution import ConvergenceError, Map, Solution, SolverWarning, State, number, require, whole
from lipmdeq.solvers.steps import AndersonStep, BroydenStep, PicardStep
from lipmdeq.solvers.track import Calls, Track

SLACK = (
    3.0  # the next evaluation may be the last if its residual is guessed below SLACK * tol (tol, if more are expected)
)


@dataclass(frozen=True, kw_only=True)
class Solver:
    """Options of every solver.

    Attributes:
        tol: a sample has converged when its residual is below tol; 0 runs all max_iter evaluations.
        max_iter: largest number of evaluations of f.
        min_iter: evaluations before a sample may have converged.
        relative: residual ||f(z)-z|| / ||f(z)|| (as in the paper), else ||f(z)-z||; norms over all branches.
        stop: "worst" ends when every sample has converged, each frozen at its own time; "mean" ends when the mean
            residual of the batch is below tol, and freezes none.
    """

    tol: float = 1e-3
    max_iter: int = 50
    min_iter: int = 1
    relative: bool = True
    stop: str = "worst"

    def __post_init__(self):
        require(number(self.tol) and self.tol >= 0, "tol", self.tol, ">= 0")
        require(isinstance(self.relative, bool), "relative", repr(self.relative), "True or False")
        require(whole(self.max_iter, 1), "max_iter", self.max_iter, "a whole number >= 1")
        require(whole(self.min_iter, 1), "min_iter", self.min_iter, "a whole number >= 1")
        require(self.stop in ("worst", "mean"), "stop", repr(self.stop), "'worst' or 'mean'")

    def solve(
        self,
        f: Map,
        z0: State,
        *,
        throw: bool = False,
        final: Map | None = None,
        expect: int | None = None,
        room: Room | None = None,
    ) -> Solution:
        """Solve z = f(z) from z0, without graph.

        Args:
            f: map of the batch, z -> f(z), same structure and shapes.
            z0: tensor (B, ...) or list of such tensors.
            throw: raise ConvergenceError instead of a warning when a sample did not converge.
            final: replaces f in the evaluation that is expected to be the last (there `gradients.deq` records the graph).
            expect: evaluations that this solve should take, `Solution.expect` of the last one; a guess for `final`.
            room: memory for the history, kept by the caller for its next solve.
        """
        with torch.no_grad(), np.errstate(all="ignore"):
            solution = self._run(Calls(f, z0, final), expect, room or Room())
        if solution.reason != "converged" and self.tol > 0:
            if throw:
                raise ConvergenceError(solution)
            text = f"a solve stopped before every sample converged ({solution.reason}); see Solution.converged"
            warnings.warn(text, SolverWarning, stacklevel=1)
        return solution

    def _run(self, calls: Calls, expect: int | None, room: Room) -> Solution:
        return iterate(self, calls, expect, room)

    def target(self, size: np.ndarray) -> np.ndarray:
        """The residual norm (B,) to reach, where ||f(z)|| is `size`."""
        return self.tol * size if self.relative else np.full_like(size, self.tol)


def iterate(options: Solver, calls: Calls, expect: int | None, room: Room) -> Solution:
    """The loop of every solver: evaluate, measure, stop or propose the next point."""
    z, before, held = calls.z0, (calls.z0, calls.z0), None
    last = calls.final is not None and expect == 1
    for k in range(options.max_iter):
        fz = calls(z, last)
        if k == 0:
            step, (r, size) = _first(options, room, z, fz)
            track, exact = Track(options, step.layout), _without_autocast(step.layout.device.type)
        else:
            r, size = step.measure(z, fz)
        track.observe(r, size, (z, fz), before)
        if track.done or k == options.max_iter - 1:
            break
        with exact:
            z_next = step.propose(r, size, track.active)
        if calls.final:
            slack = SLACK if expect is None or k + 2 >= expect else 1.0
            near = step.guess() < slack * options.target(size)
            last = k + 2 == expect or bool(near[track.active].all())
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
    z_in = z if used or calls.final is None else track.patch(0, z, track.kept)
    return track.solution(calls, track.patch(1, fz, track.kept), z_in, used)


def _first(options: Solver, room: Room, z: list[Tensor], fz: list[Tensor]) -> tuple:
    """The proposals and the first measurement; in double precision where squares would leave the range of single."""
    step = options.step(Layout(fz), room)
    r, size = step.measure(z, fz)
    if step.layout.dtype == torch.float32 and not ((size > 1e-12) & (size < 1e15) & (r < 1e15)).all():
        step = options.step(Layout(fz, torch.float64), room)
        r, size = step.measure(z, fz)
    return step, (r, size)


def _without_autocast(device: str) -> AbstractContextManager:
    """Autocast is for f: the solver's own products stay in the work dtype."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    """z <- f(z), Banach's iteration; z <- (1-damping) z + damping f(z).

    With a constant L < 1 of f (in l2) the number of steps comes from the a-priori bound, see `fixed.proved_count`, and no
    residual is computed: `residuals` is then one row, the proved bound, and z the last iterate itself, after that many calls.

    With `steps` the host decides nothing inside a solve: it looks at one row of residuals afterwards, and L, if it is
    given, turns them into the proved `Solution.error`.

    Attributes:
        steps: this many evaluations, whatever max_iter says; "auto": as many as the last solve, L or the observed rate
            foretells, the residuals being read after them and then every `check` evaluations; None: read after each.
    """

    damping: float = 1.0
    L: float | None = None
    steps: int | str | None = None
    check: int = 5

    def __post_init__(self):
        super().__post_init__()
        require(number(self.damping) and 0 < self.damping <= 1, "damping", self.damping, "in (0, 1]")
        require(self.L is None or number(self.L) and 0 <= self.L < 1, "L", self.L, "in [0, 1), or None")
        fixed = self.steps is None or self.steps == "auto" or whole(self.steps, 1)
        require(fixed, "steps", repr(self.steps), "a whole number >= 1, 'auto' or None")
        require(whole(self.check, 1), "check", self.check, "a whole number >= 1")
        counted = self.steps == "auto" or self.steps is None and self.L is not None
        require(not counted or self.tol > 0, "tol", self.tol, "> 0 if L is given, or steps = 'auto'")

    def step(self, layout: Layout, room: Room) -> PicardStep:
        return PicardStep(layout, self.damping)

    def _run(self, calls: Calls, expect: int | None, room: Room) -> Solution:
        if self.steps is not None:
            return in_blocks(self, calls, expect)
        return a_priori(self, calls) if self.L is not None else iterate(self, calls, expect, room)


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver):
    """Anderson acceleration, type II, with a relative ridge and the Picard safeguard.

    Attributes:
        m: evaluations kept (the last one included).
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

    def step(self, layout: Layout, room: Room) -> AndersonStep:
        return AndersonStep(layout, self.target, room, self.m, self.ridge, self.beta)


@dataclass(frozen=True, kw_only=True)
class Broyden(Solver):
    """Broyden's good method on f(z) - z, limited memory (restart after m updates), with the Picard safeguard.

    Attributes:
        m: updates kept, at most max_iter: two states each. Where f contracts slowly, a restart costs evaluations.
    """

    m: int = 60

    def __post_init__(self):
        super().__post_init__()
        require(whole(self.m, 1), "m", self.m, "a whole number >= 1")

    def step(self, layout: Layout, room: Room) -> BroydenStep:
        return BroydenStep(layout, self.target, room, min(self.m, self.max_iter))
