"""Fixed-point solvers for z = f(z): Picard (Banach), Anderson, Broyden; the loop that they share.

A state is a tensor of shape (B, ...) or a list of such tensors (the branches of an MDEQ). Samples of a batch are
independent problems, each with its own residual, weights and stopping time: its result does not depend on its neighbours.
Solvers are options and remember nothing: what a solve may take over goes in (`expect`) and comes out (`Solution.expect`).
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from lipmdeq.bounds import check_choice, check_range, check_whole
from lipmdeq.solvers.fixed import in_blocks
from lipmdeq.solvers.layout import Layout, Map, State, select
from lipmdeq.solvers.solution import Calls, ConvergenceError, Options, Solution, SolverWarning, checked
from lipmdeq.solvers.steps import AndersonStep, BroydenStep, PicardStep

DIVERGED = 1e6  # a residual that grew by this factor will not come back
SLACK = 3.0  # the next evaluation may be the last if its residual is guessed below SLACK tol; tol, if more are expected


@dataclass(frozen=True, kw_only=True)
class Solver(Options):
    """Options of every solver.

    Attributes:
        tol: a sample has converged when its residual is below tol; 0 runs all max_iter evaluations.
        max_iter, min_iter: most evaluations of f, and those before a sample may have converged.
        relative: residual ||f(z)-z|| / ||f(z)|| (as in the paper), else ||f(z)-z||; norms over all branches.
        stop: "worst": when every sample has converged, each frozen at its own time; "mean": when their mean is below tol.
    """

    tol: float = checked(1e-3, check_range, 0, np.inf, "[)")
    max_iter: int = checked(50, check_whole)
    min_iter: int = checked(1, check_whole)
    relative: bool = True
    stop: str = checked("worst", check_choice, ("worst", "mean"))
    _step: ClassVar[type]

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.relative, bool):
            raise ValueError(f"relative = {self.relative!r}: must be True or False")

    def solve(self, f: Map, z0: State, *, throw=False, final: Map | None = None, expect: int | None = None) -> Solution:
        """Solve z = f(z) from z0, without graph.

        Args:
            f, z0: map of the batch, z -> f(z), same structure and shapes; where it starts.
            throw: raise ConvergenceError instead of a warning when a sample did not converge.
            final: replaces f in the evaluation that is expected to be the last (there `gradients.deq` records the graph).
            expect: evaluations that this solve should take, `Solution.expect` of the last one; a guess for `final`.
        """
        with torch.no_grad(), np.errstate(all="ignore"):
            solution = self._run(Calls(f, z0, final), expect)
        if solution.reason != "converged" and self.tol > 0:
            if throw:
                raise ConvergenceError(solution)
            text = f"a solve stopped before every sample converged ({solution.reason}); see Solution.converged"
            warnings.warn(text, SolverWarning, stacklevel=1)
        return solution

    def _run(self, calls: Calls, expect: int | None) -> Solution:
        return iterate(self, calls, expect)

    def target(self, size: np.ndarray) -> np.ndarray:
        """The residual norm (B,) to reach, where ||f(z)|| is `size`."""
        return self.tol * size if self.relative else np.full_like(size, self.tol)


def iterate(options: Solver, calls: Calls, expect: int | None) -> Solution:
    """The loop of every solver: evaluate, measure, stop or propose the next point."""
    z, before, last = calls.z0, (calls.z0, calls.z0), expect == 1
    for k in range(1, options.max_iter + 1):
        fz = calls(z, last)
        if k == 1:
            for dtype in (None, torch.float64):  # double precision where products would leave the range of single
                step = options._step(Layout(fz, dtype), options)
                r, size = step.measure(z, fz)
                if ((size > 1e-12) & (size < 1e15) & (r < 1e15)).all():
                    break
            track = Track(options, step.layout)
            held = np.zeros_like(track.kept)  # samples whose z was put back to their best point
        else:
            r, size = step.measure(z, fz)
        track.observe(r, size, (z, fz), before)
        if track.done or k == options.max_iter:
            break
        before, z = (z, fz), step.propose(r, size, track.active)
        slack = SLACK if expect is None or k + 1 >= expect else 1.0
        near = step.guess() < slack * options.target(size)
        last = k + 1 == expect or bool(near[track.active].all())
        # Broken samples return to their best point, for the graph all stopped ones; else they run on, ignored.
        held = track.kept & ~track.active if last else track.status > 1
        if held.any():
            z = select(held, track.saved[0], z)
            step.moved(z)
    del step, before  # the history, before copies are made
    used = calls.by_final and not (track.kept & ~held).any()
    z_in = z if used else select(track.kept, track.saved[0], z)
    found = calls.solution(select(track.kept, track.saved[1], fz), z_in, track.history, track.status)
    found.reason = "converged" if track.mean and track.active.all() else found.reason
    found.expect = found.nfe if found.reason == "converged" else None
    found.steps, found.final_used = torch.from_numpy(track.steps), used
    return found


class Track:
    """Residuals, stopping, and the best evaluation (z, f(z)) of every sample, which is saved only when it would be lost:
    when a sample stops before the others do, or when its residual grows."""

    def __init__(self, options: Solver, layout: Layout):
        b, self.options, self.history, self.done = layout.b, options, [], False
        self.status, self.steps, self.active = np.ones(b, int), np.zeros(b, int), np.ones(b, bool)  # places in STATUS
        self.best, self.kept = np.full(b, np.inf), np.zeros(b, bool)  # kept: the best evaluation is in `saved`
        self.rounding = 8 * torch.finfo(layout.dtype).eps

    def observe(self, r: np.ndarray, size: np.ndarray, here: tuple, before: tuple) -> None:
        """Record one evaluation, here = (z, f(z)), with ||f(z)-z|| and ||f(z)|| (B,); before is the previous one."""
        options, active = self.options, self.active
        value = r / np.maximum(size, 1e-300) if options.relative else r
        if not self.history:
            self.saved = here[1], here[1]  # states of their kind, no sample of which is kept yet
            self.limit = DIVERGED * np.maximum(r, size) if options.tol > 0 else np.inf
        else:
            value = np.where(active, value, self.history[-1])
        self.history.append(value)
        self.steps[active] = k = len(self.history)
        finite = np.isfinite(r) & np.isfinite(size)
        self.status[active & ~(finite & (r <= self.limit))] = 2
        self.status[active & ~finite] = 3
        bad = self.status > 1
        # Below the rounding level of the state all evaluations are equally good: the last one is kept.
        better = value < np.maximum(self.best, self.rounding * (1.0 if options.relative else size))
        better &= active & ~bad
        lost = active & ~better & ~self.kept
        self._save(lost, before)
        self.best, self.kept = np.where(better, value, self.best), (self.kept & ~better) | lost
        may = k >= min(options.min_iter, options.max_iter)
        self.status[active & ~bad & (value < options.tol) & may] = 0
        self.active = self.status == 1 if options.stop == "worst" else ~bad
        self.mean = options.stop == "mean" and may and self.active.any() and value[self.active].mean() < options.tol
        self.done = not self.active.any() or self.mean
        if not self.done:
            early = active & ~self.active & ~bad
            self._save(early, here)
            self.kept |= early

    def _save(self, mask: np.ndarray, evaluation: tuple) -> None:
        self.saved = [select(mask, now, old) for now, old in zip(evaluation, self.saved, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Picard(Solver):
    """z <- f(z), Banach's iteration.

    Attributes:
        damping: z <- (1-damping) z + damping f(z).
        L: a constant < 1 of f (in l2), which foretells the number of steps (Banach, from z = 0): as steps = "auto".
        steps: this many evaluations, whatever max_iter says; "auto": as many as the last solve, L or the observed rate
            foretells. The host reads residuals once after them ("auto": every few more); L makes `Solution.error` of it.
    """

    damping: float = checked(1.0, check_range, 0, 1, "(]")
    L: float | None = checked(None, check_range, 0, 1, "[)")
    steps: int | str | None = None
    _step: ClassVar[type] = PicardStep

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.steps, str) and self.steps != "auto":
            raise ValueError(f"steps = {self.steps!r}: must be a whole number >= 1, 'auto' or None")
        if self.steps not in (None, "auto"):
            object.__setattr__(self, "steps", check_whole("steps", self.steps))
        elif self.tol == 0 and (self.steps == "auto" or self.L is not None):
            raise ValueError("tol = 0: must be > 0 if L is given, or steps = 'auto'")

    def _run(self, calls: Calls, expect: int | None) -> Solution:
        foreseen = self.steps is not None or self.L is not None
        return in_blocks(self, calls, expect) if foreseen else iterate(self, calls, expect)


@dataclass(frozen=True, kw_only=True)
class Anderson(Solver):
    """Anderson acceleration, type II, with a relative ridge and the Picard safeguard.

    Attributes:
        m: evaluations kept (the last one included).
        ridge: relative, see `steps.anderson_weights`.
        beta: mixing of accelerated steps, z = sum alpha_i (z_i + beta g_i).
    """

    m: int = checked(6, check_whole, 2)
    ridge: float = checked(1e-4, check_range)
    beta: float = checked(1.0, check_range, 0, 1, "(]")
    _step: ClassVar[type] = AndersonStep


@dataclass(frozen=True, kw_only=True)
class Broyden(Solver):
    """Broyden's good method on f(z) - z, limited memory (restart after m updates), with the Picard safeguard.

    Attributes:
        m: updates kept, at most max_iter: two states each. Where f contracts slowly, a restart costs evaluations.
    """

    m: int = checked(60, check_whole)
    _step: ClassVar[type] = BroydenStep
