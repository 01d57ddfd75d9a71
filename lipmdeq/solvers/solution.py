"""What a fixed-point solve found (`Solution`), how it fails, and what the next one may take over (`Memory`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from lipmdeq.solvers.layout import Room

State = Tensor | list[Tensor]
Map = Callable[[State], State]


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
        residuals: (k, B), as used by the stopping rule; a stopped sample repeats its last value. A fixed number of steps
            has the last row only.
        nfe: true number of calls of f in this solve; `nfe_total` adds the call that attached the graph.
        converged: (B,) bool. steps: (B,) evaluations until the sample stopped (its own nfe).
        reason: "converged", "max_iter", "nan" or "diverged": the worst over the samples; `reasons` per sample.
        error: (B,) proved bound on ||z - z*||, with a fixed number of steps and a known L (`bounds.a_posteriori_error`).
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
    backward: Solution | None = None
    pair: tuple | None = field(default=None, repr=False)
    z_in: State | None = field(default=None, repr=False)
    final_used: bool = field(default=False, repr=False)


@dataclass
class Memory:
    """What `deq` may take over from its last call; it belongs to the caller, and is changed by the call.

    It decides which evaluation records the graph, so it affects cost, and rounding in the last digits: `forget` where bits
    must agree with those of a fresh one.

    Attributes:
        forward, backward: evaluations to expect in either solve; None if nothing is known.
        room: memory of the histories.
    """

    forward: int | None = None
    backward: int | None = None
    room: Room = field(default_factory=Room, repr=False)

    def forget(self) -> None:
        self.forward = self.backward = None


def number(value) -> bool:
    """A finite number, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def whole(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(ok: bool, name: str, value, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} = {value}: must be {allowed}")
