"""Gradients through an equilibrium z* = f(z*; x, theta): implicit, JFB, Neumann, phantom, unrolled.

`deq` solves without graph, then evaluates f once with graph at the point where the solve ended ("attach"): the value is
the solver's z, and the ordinary graph behind it reaches all that f closes over (stem included). A gradient rule only says
which cotangent enters that graph: the exact one is x = g (I - J)^(-1), the fixed point of T(x) = x J + g (the map T of the
paper), J = df/dz at z*. No hooks, no state in modules, no reference cycles: the graph dies with the loss.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lipmdeq.bounds import check_range, check_whole
from lipmdeq.solvers.graph import Recorder, attached
from lipmdeq.solvers.layout import Map, State, branches, like
from lipmdeq.solvers.loop import Anderson, Picard, Solver
from lipmdeq.solvers.solution import Calls, ConvergenceError, Memory, Options, Solution, checked


@dataclass(frozen=True)
class Implicit:
    """The exact gradient of the equilibrium, to the tolerance of `solver`: solves x = x J + g, from x = g. The Solution of
    this solve appears as `solution.backward` when backward has run; its nfe counts products x J."""

    solver: Solver = field(default_factory=lambda: Anderson(tol=1e-3, max_iter=20))

    def __post_init__(self):
        if not isinstance(self.solver, Solver):
            raise ValueError(f"solver = {self.solver}: must be a solver, e.g. Anderson()")
        if getattr(self.solver, "steps", None) == 1:
            raise ValueError("steps = 1: must be at least 2 for the implicit gradient; one product is JFB()")

    def adjoint(self, T: Map, g: list[Tensor], **how) -> Solution:
        """The Solution whose z is the cotangent; T: x -> x J + g on lists of branches, how: as in `Solver.solve`."""
        # Two products at least: x = g alone, however small its residual, is JFB, which tells the weights nothing of J.
        return replace(self.solver, min_iter=max(2, self.solver.min_iter)).solve(T, g, **how)


@dataclass(frozen=True)
class Neumann(Options):
    """k terms of the Neumann series, x = sum_{i<k} g J^i: k - 1 products; relative error of x at most L^k."""

    k: int = checked(5, check_whole)

    def adjoint(self, T: Map, g: list[Tensor], **how) -> Solution:
        """As `Implicit.adjoint`, by k - 1 Picard steps without residuals."""
        calls, x, b = Calls(T, g), g, len(g[0])
        for _ in range(self.k - 1):
            x = calls(x)
        return calls.solution(x, x, [np.full(b, np.nan)], np.ones(b, int))


@dataclass(frozen=True)
class JFB:
    """Jacobian-free backpropagation: x = g, one Neumann term. Relative error of x at most L, angle at most arcsin L."""


@dataclass(frozen=True)
class Phantom(Options):
    """Phantom gradient: k damped steps z <- (1-lam) z + lam f(z) from z*, with graph. Error <= (1 - lam (1-L))^k."""

    k: int = checked(5, check_whole)
    lam: float = checked(0.5, check_range, 0, 1, "(]")


@dataclass(frozen=True)
class Unrolled(Options):
    """k Picard steps from z0 with the whole graph; the solver is not used. Memory grows with k."""

    k: int = checked(20, check_whole)


_RULES = (Implicit, JFB, Neumann, Phantom, Unrolled)


def deq(f: Map, z0: State, *, solver=None, adjoint=None, pair=False, throw=False, inputs=(), memory=None):
    """z* = f(z*) with gradients to all that f closes over.

    Args:
        f, z0: z -> f(z; x, theta), tensor (B, ...) or list of tensors in, the same out; where the solve starts.
        solver, adjoint: forward solver, default Anderson(); gradient rule, default Implicit().
        pair: keep (f(z_in), z_in) with graph in `solution.pair`, for `jacobian_regularisation`.
        throw: raise ConvergenceError if a sample does not converge.
        inputs: all tensors that f closes over and that want a gradient, as f uses them (parameters, injected input). With
            them the implicit gradient can save one product; if something is missing, it is as if none were given.
        memory: a `Memory`, what was learnt by the last call, and by this one; saves evaluations.

    Returns:
        (z, Solution). With grad mode `nfe_total` tells whether f was called again for its graph: the solver lets the
        evaluation that it expects to be the last record it, which saves a call.
    """
    solver, rule, memory = solver or Anderson(), adjoint or Implicit(), memory or Memory()
    if not isinstance(rule, _RULES):
        raise ValueError(f"adjoint = {rule}: must be one of {', '.join(r.__name__ for r in _RULES)}")
    if not isinstance(solver, Solver):
        raise ValueError(f"solver = {solver!r}: must be a solver, e.g. Anderson()")
    if pair and isinstance(rule, Unrolled):
        raise ValueError("pair = True: must be False for Unrolled, which has no single evaluation with a graph")
    if isinstance(rule, Unrolled):
        return _unroll(f, z0, rule.k, solver, throw)
    solves = isinstance(rule, Implicit | Neumann)
    recorder = Recorder(f, needs_z=solves or pair) if torch.is_grad_enabled() else None
    final = None if isinstance(rule, Phantom) and not pair else recorder
    solution = solver.solve(f, z0, throw=throw, final=final, expect=memory.forward)
    memory.forward, z_in, solution.z_in = solution.expect, solution.z_in, None
    if recorder is None:
        return solution.z, solution
    if final and not solution.final_used:
        recorder(z_in)
        solution.nfe_total += 1
    solution.pair = (recorder.fz, recorder.z_in) if pair else None
    if not solves:
        return (recorder.fz if isinstance(rule, JFB) else _phantom(f, solution, rule)), solution
    return like(attached(recorder, (rule, solution, memory), () if pair else inputs), z0), solution


def _phantom(f: Map, solution: Solution, rule: Phantom) -> State:
    torch.clear_autocast_cache()
    z = solution.z
    for _ in range(rule.k):
        steps = zip(branches(z), branches(f(z)), strict=True)
        z = like([torch.lerp(a, b.to(a.dtype), rule.lam) for a, b in steps], z)
    solution.nfe_total += rule.k
    return z


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

    fz = f(z), with graph from z (`deq(..., pair=True)`); d = numel per sample; `samples` random v. Can be differentiated.
    """
    samples, fs, estimate = check_whole("samples", samples), branches(fz), 0.0
    for _ in range(samples):
        v = [torch.randn_like(t) for t in fs]
        products = torch.autograd.grad(fs, branches(z), v, create_graph=True, allow_unused=True)
        wide = [p.to(torch.promote_types(p.dtype, torch.float32)) for p in products if p is not None]
        estimate = estimate + sum(p.square().sum() for p in wide)
    return estimate / (samples * sum(t.numel() for t in fs))
