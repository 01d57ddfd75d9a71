"""Gradients through an equilibrium z* = f(z*; x, theta): implicit, JFB, Neumann, phantom, unrolled.

`deq` solves without graph, then evaluates f once with graph at the point where the solve ended ("attach"): the value is
the solver's z, and the ordinary graph behind it reaches every parameter and every input that f closes over (stem
included). A gradient rule is an object that only says which cotangent enters that graph: the exact one is
x = g (I - J)^(-1), the fixed point of T(x) = x J + g (the map T of the paper), J = df/dz at z*.

No hooks, no state in modules, no reference cycles: the graph dies with the loss. How the last product and the gradient are
found in one walk is told in `graph`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipmdeq.solvers.graph import Recorder, add, branches, joined, like
from lipmdeq.solvers.layout import work_dtype
from lipmdeq.solvers.loop import Anderson, Picard, Solver
from lipmdeq.solvers.solution import ConvergenceError, Map, Memory, Solution, State, require, whole

# ---- gradient rules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Implicit:
    """The exact gradient of the equilibrium, to the tolerance of `solver`: solves x = x J + g, from x = g.

    The Solution of this solve appears as `solution.backward` when backward has run; its nfe counts products x J.
    """

    solver: Solver = field(default_factory=lambda: Anderson(tol=1e-3, max_iter=20))

    def __post_init__(self):
        require(isinstance(self.solver, Solver), "solver", self.solver, "a solver, e.g. Anderson()")

    def adjoint(self, T: Map, g: list[Tensor], **how) -> Solution:
        """The Solution whose z is the cotangent; T: x -> x J + g on lists of branches, how: as in `Solver.solve`.

        Two products at least: x = g alone, however small its residual, is the gradient of JFB, which tells the weights nothing
        of J.
        """
        return replace(self.solver, min_iter=max(2, self.solver.min_iter)).solve(T, g, **how)


@dataclass(frozen=True)
class Neumann:
    """k terms of the Neumann series, x = sum_{i<k} g J^i: k - 1 products; relative error of x at most L^k."""

    k: int = 5

    def __post_init__(self):
        require(whole(self.k, 1), "k", self.k, "a whole number >= 1")

    def adjoint(self, T: Map, g: list[Tensor], **how) -> Solution:
        """As `Implicit.adjoint`, by k - 1 Picard steps without residuals."""
        x, b = g, len(g[0])
        for _ in range(self.k - 1):
            x = T(x)
        unknown = torch.full((1, b), float("nan"), dtype=torch.float64)
        flags, steps = torch.zeros(b, dtype=torch.bool), torch.full((b,), self.k - 1)
        return Solution(x, unknown, self.k - 1, flags, "max_iter", steps, ["max_iter"] * b, self.k - 1)


@dataclass(frozen=True)
class JFB:
    """Jacobian-free backpropagation: x = g, one Neumann term. Relative error of x at most L, angle at most arcsin L."""


@dataclass(frozen=True)
class Phantom:
    """Phantom gradient: k damped steps z <- (1-lam) z + lam f(z) from z*, with graph. Error <= (1 - lam (1-L))^k."""

    k: int = 5
    lam: float = 0.5

    def __post_init__(self):
        require(whole(self.k, 1), "k", self.k, "a whole number >= 1")
        require(0 < self.lam <= 1, "lam", self.lam, "in (0, 1]")


@dataclass(frozen=True)
class Unrolled:
    """k Picard steps from z0 with the whole graph; the solver is not used. Memory grows with k."""

    k: int = 20

    def __post_init__(self):
        require(whole(self.k, 1), "k", self.k, "a whole number >= 1")


_RULES = (Implicit, JFB, Neumann, Phantom, Unrolled)


class _Adjoint(torch.autograd.Function):
    """f(z_in), whose backward replaces the gradient g of the loss by the cotangent of the rule."""

    @staticmethod
    def forward(ctx, rule, solution, recorder, memory, *fz):
        # Plain attributes: f(z_in) is wanted with its graph, which hooks on saved tensors (checkpointing) would cut.
        ctx.rule, ctx.solution, ctx.recorder, ctx.memory = rule, solution, recorder, memory
        return tuple(t.detach() for t in fz)

    @staticmethod
    @once_differentiable
    def backward(ctx, *g):
        recorder, memory = ctx.recorder, ctx.memory
        g = recorder.start(g)
        found = ctx.rule.adjoint(lambda x: add(recorder.product(x), g), g, expect=memory.backward, room=memory.room)
        ctx.solution.backward, memory.backward = found, found.expect
        return (None,) * 4 + tuple(x.to(t.dtype) for x, t in zip(found.z, branches(recorder.fz), strict=True))


# ---- the equilibrium layer ---------------------------------------------------------------------------------------


def deq(  # eight parameters: the problem (2), how it is solved (2), what is asked beside z (2), what saves time (2)
    f: Map,
    z0: State,
    *,
    solver: Solver | None = None,
    adjoint=None,
    pair: bool = False,
    throw: bool = False,
    inputs: Sequence[Tensor] = (),
    memory: Memory | None = None,
):
    """z* = f(z*) with gradients to all that f closes over.

    Args:
        f: z -> f(z; x, theta), tensor (B, ...) or list of tensors in, the same out. z0: where the solve starts.
        solver: forward solver; default Anderson(). adjoint: gradient rule; default Implicit().
        pair: keep (f(z_in), z_in) with graph in `solution.pair`, for `jacobian_regularisation`.
        throw: raise ConvergenceError if a sample does not converge.
        inputs: all that f closes over and that wants a gradient, as f uses it (parameters, injected input). Not needed;
            with it the implicit gradient can save one product. If something is missing, it is as if none were given.
        memory: what was learnt by the last call, and by this one. Not needed; saves evaluations.

    Returns:
        (z, Solution). Without grad mode no graph is made and f is not called again; with it `nfe_total` tells whether
        f was (the solver lets the evaluation that it expects to be the last record the graph, which saves a call).
    """
    solver, adjoint, memory = solver or Anderson(), adjoint or Implicit(), memory or Memory()
    require(isinstance(adjoint, _RULES), "adjoint", adjoint, "one of " + ", ".join(r.__name__ for r in _RULES))
    if isinstance(adjoint, Unrolled):
        return _unroll(f, z0, adjoint.k, solver, throw)
    recorder = Recorder(f, isinstance(adjoint, Implicit | Neumann) or pair) if torch.is_grad_enabled() else None
    final = None if isinstance(adjoint, Phantom) and not pair else recorder
    solution = solver.solve(f, z0, throw=throw, final=final, expect=memory.forward, room=memory.room)
    memory.forward, z_in, solution.z_in = solution.expect, solution.z_in, None
    if recorder is None:
        return solution.z, solution
    if final and not solution.final_used:
        recorder(z_in)
        solution.nfe_total += 1
    solution.pair = (recorder.fz, recorder.z_in) if pair else None
    return _attached(adjoint, solution, recorder, () if pair else inputs, memory), solution


def _attached(rule, solution: Solution, recorder: Recorder, inputs: Sequence[Tensor], memory: Memory) -> State:
    """z with the graph of the rule behind it."""
    if isinstance(rule, Phantom):
        return _phantom(recorder.f, solution, rule)
    if isinstance(rule, JFB):
        return recorder.fz
    found = joined(rule, solution, recorder, inputs, memory)
    if found is None:
        found = _Adjoint.apply(rule, solution, recorder, memory, *branches(recorder.fz))
    return like(found, solution.z)


def _phantom(f: Map, solution: Solution, rule: Phantom) -> State:
    torch.clear_autocast_cache()
    z = solution.z
    zs = branches(z)
    for _ in range(rule.k):
        zs = [torch.lerp(a, b.to(a.dtype), rule.lam) for a, b in zip(zs, branches(f(like(zs, z))), strict=True)]
    solution.nfe_total += rule.k
    return like(zs, z)


def _unroll(f: Map, z0: State, k: int, solver: Solver, throw: bool) -> tuple[State, Solution]:
    """k Picard steps with graph; residuals as a Picard solve sees them, convergence by the solver's tolerance."""
    last, grad = z0, torch.is_grad_enabled()

    def traced(_):
        nonlocal last
        with torch.set_grad_enabled(grad):
            last = f(last)
        return like([t.detach() for t in branches(last)], z0)

    trace = Picard(tol=0, max_iter=k, relative=solver.relative).solve(traced, z0)
    ok = trace.residuals[-1] < solver.tol
    trace.converged, trace.z, trace.z_in = ok, like([t.detach() for t in branches(last)], z0), None
    trace.reasons = ["converged" if o else r for o, r in zip(ok.tolist(), trace.reasons, strict=True)]
    trace.reason = next((r for r in ("nan", "max_iter") if r in trace.reasons), "converged")
    if throw and trace.reason != "converged":
        raise ConvergenceError(trace)
    return last, trace


def jacobian_regularisation(fz: State, z: State, samples: int = 2) -> Tensor:
    """Hutchinson estimate of ||J||_F^2 / d, mean over the batch (Bai, Koltun, Kolter 2021): E ||v J||^2, v ~ N(0, I).

    Args:
        fz, z: a pair with graph from z to fz = f(z) (`deq(..., pair=True)`), tensors or lists; d = numel per sample.
        samples: number of random v. The result can be differentiated.
    """
    require(whole(samples, 1), "samples", samples, "a whole number >= 1")
    fs, zs = branches(fz), branches(z)
    total = sum(t.numel() for t in fs)
    estimate = 0.0
    for _ in range(samples):
        v = [torch.randn_like(t) for t in fs]
        products = torch.autograd.grad(fs, zs, v, create_graph=True, allow_unused=True)
        estimate = estimate + sum(p.to(work_dtype(p.dtype)).square().sum() for p in products if p is not None)
    return estimate / (samples * total)
