"""Gradients through an equilibrium z* = f(z*; x, theta): implicit, JFB, Neumann, phantom, unrolled.

`deq` solves without graph, then evaluates f once with graph at the point where the solve ended ("attach"): the value is
the solver's z, and the ordinary graph behind it reaches every parameter and every input that f closes over (stem
included). A gradient rule is an object that only says which cotangent enters that graph: the exact one is
x = g (I - J)^(-1), the fixed point of x = x J + g (the map T of the paper), J = df/dz at z*.

No hooks, no state in modules, no reference cycles: the graph dies with the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipmdeq.acceleration import work_dtype
from lipmdeq.solvers import Anderson, ConvergenceError, Picard, Solution, Solver
from lipmdeq.tracking import Map, State, require, whole


def _branches(z: State) -> list[Tensor]:
    return [z] if isinstance(z, Tensor) else list(z)


def _same(z: Sequence[Tensor], model: State) -> State:
    return z[0] if isinstance(model, Tensor) else list(z)


# ---- gradient rules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Implicit:
    """The exact gradient of the equilibrium, to the tolerance of `solver`: solves x = x J + g, from x = g.

    The Solution of this solve appears as `solution.backward` when backward has run; its nfe counts products x J.
    """

    solver: Solver = field(default_factory=lambda: Anderson(tol=1e-3, max_iter=20))

    def __post_init__(self):
        require(isinstance(self.solver, Solver), "solver", self.solver, "a solver, e.g. Anderson()")

    def adjoint(self, product: Map, g: list[Tensor]) -> Solution:
        """product: x -> x J on lists of branches. Returns the Solution whose z is the cotangent."""
        return self.solver.solve(lambda x: _add(product(x), g), g)


@dataclass(frozen=True)
class Neumann:
    """k terms of the Neumann series, x = sum_{i<k} g J^i: k - 1 products; relative error of x at most L^k."""

    k: int = 5

    def __post_init__(self):
        require(whole(self.k, 1), "k", self.k, "a whole number >= 1")

    def adjoint(self, product: Map, g: list[Tensor]) -> Solution | None:
        """As `Implicit.adjoint`, by k - 1 Picard steps without residuals."""
        x = g
        for _ in range(self.k - 1):
            x = _add(product(x), g)
        return _plain(x, self.k - 1)


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


def _add(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [s + t for s, t in zip(a, b, strict=True)]


class _Adjoint(torch.autograd.Function):
    """Identity on f(z_in) whose backward replaces g by the cotangent of the rule."""

    @staticmethod
    def forward(ctx, rule, solution, z_in, *fz):
        # Plain attributes: f(z_in) is wanted with its graph, which hooks on saved tensors (checkpointing) would cut.
        # It is an input, so there is no cycle.
        ctx.rule, ctx.solution, ctx.z_in, ctx.fz = rule, solution, z_in, fz
        return tuple(t.detach() for t in fz)

    @staticmethod
    @once_differentiable
    def backward(ctx, *g):
        z_in = ctx.z_in
        live = [i for i, t in enumerate(ctx.fz) if t.requires_grad]
        fz = [ctx.fz[i] for i in live]

        def product(x):
            cot = [x[i].to(t.dtype) for i, t in zip(live, fz, strict=True)]
            out = torch.autograd.grad(fz, z_in, cot, retain_graph=True, allow_unused=True)
            return [torch.zeros_like(z) if t is None else t for t, z in zip(out, z_in, strict=True)]

        start = [t.to(z.dtype) for t, z in zip(g, z_in, strict=True)]
        ctx.solution.backward = found = ctx.rule.adjoint(product, start)
        return None, None, None, *(x.to(t.dtype) for x, t in zip(found.z, ctx.fz, strict=True))


# ---- the equilibrium layer ---------------------------------------------------------------------------------------


def deq(
    f: Map, z0: State, *, solver: Solver | None = None, adjoint=None, pair: bool = False, throw: bool = False
):
    """z* = f(z*) with gradients to all that f closes over.

    Args:
        f: z -> f(z; x, theta), tensor (B, ...) or list of tensors in, the same out.
        z0: where the solve starts.
        solver: forward solver; default Anderson().
        adjoint: gradient rule; default Implicit().
        pair: keep (f(z_in), z_in) with graph in `solution.pair`, for `jacobian_regularisation`.
        throw: raise ConvergenceError if a sample does not converge.

    Returns:
        (z, Solution). Without grad mode no graph is made and f is not called again; with it `nfe_total` tells whether
        f was (the solver lets the evaluation that it expects to be the last record the graph, which saves a call).
    """
    solver, adjoint = solver or Anderson(), adjoint or Implicit()
    require(
        isinstance(adjoint, _RULES), "adjoint", adjoint, "one of " + ", ".join(r.__name__ for r in _RULES)
    )
    if isinstance(adjoint, Unrolled):
        return _unroll(f, z0, adjoint.k, solver, throw)
    if not torch.is_grad_enabled():
        solution = solver.solve(f, z0, throw=throw)
        solution.z_in = None
        return solution.z, solution
    linear = isinstance(adjoint, Implicit | Neumann)
    attach = _Attach(f, linear or pair)
    speculate = linear or isinstance(adjoint, JFB) or pair
    solution = solver.solve(f, z0, throw=throw, final=attach if speculate else None)
    if speculate and not solution.final_used:
        attach(solution.z_in)
        solution.nfe_total += 1
    z_in, fz = attach.take()
    z_start, solution.z_in = solution.z, None
    if pair:
        solution.pair = (fz, z_in)
    if isinstance(adjoint, Phantom):
        return _phantom(f, z_start, adjoint, solution), solution
    if linear:
        fz = _same(_Adjoint.apply(adjoint, solution, _branches(z_in), *_branches(fz)), z0)
    return fz, solution


class _Attach:
    """f with graph, at a detached copy of z; keeps the last evaluation only."""

    def __init__(self, f: Map, needs_z: bool):
        self.f, self.needs_z, self.last = f, needs_z, (None, None)

    def __call__(self, z: State) -> State:
        self.last = (None, None)  # frees the graph of a wrong guess before the next one is built
        # Older torch: casts of weights that autocast cached under no_grad have no graph and swallow the gradient.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            z_in = _same([t.detach().requires_grad_(self.needs_z) for t in _branches(z)], z)
            fz = self.f(z_in)
        self.last = (z_in, fz)
        return _same([t.detach() for t in _branches(fz)], z)

    def take(self) -> tuple[State, State]:
        last, self.last = self.last, (None, None)
        return last


def _phantom(f: Map, z: State, rule: Phantom, solution: Solution) -> State:
    torch.clear_autocast_cache()
    zs = _branches(z)
    for _ in range(rule.k):
        zs = [
            torch.lerp(a, b.to(a.dtype), rule.lam)
            for a, b in zip(zs, _branches(f(_same(zs, z))), strict=True)
        ]
    solution.nfe_total += rule.k
    return _same(zs, z)


def _unroll(f: Map, z0: State, k: int, solver: Solver, throw: bool) -> tuple[State, Solution]:
    """k Picard steps with graph; residuals as a Picard solve sees them, convergence by the solver's tolerance."""
    last, grad = z0, torch.is_grad_enabled()

    def traced(_):
        nonlocal last
        with torch.set_grad_enabled(grad):
            last = f(last)
        return _same([t.detach() for t in _branches(last)], z0)

    trace = Picard(tol=0, max_iter=k, relative=solver.relative).solve(traced, z0)
    ok = trace.residuals[-1] < solver.tol
    trace.converged, trace.z, trace.z_in = ok, _same([t.detach() for t in _branches(last)], z0), None
    trace.reasons = ["converged" if o else r for o, r in zip(ok.tolist(), trace.reasons, strict=True)]
    trace.reason = next((r for r in ("nan", "max_iter") if r in trace.reasons), "converged")
    if throw and trace.reason != "converged":
        raise ConvergenceError(trace)
    return last, trace


def _plain(z: State, nfe: int) -> Solution:
    """A Solution of a fixed number of steps, without residuals."""
    b = len(_branches(z)[0])
    empty = torch.full((1, b), float("nan"), dtype=torch.float64)
    flags, steps = torch.zeros(b, dtype=torch.bool), torch.full((b,), nfe)
    return Solution(z, empty, nfe, flags, "max_iter", steps, ["max_iter"] * b, nfe)


_RULES = (Implicit, JFB, Neumann, Phantom, Unrolled)


def jacobian_regularisation(fz: State, z: State, samples: int = 2) -> Tensor:
    """Hutchinson estimate of ||J||_F^2 / d, mean over the batch (Bai, Koltun, Kolter 2021): E ||v J||^2, v ~ N(0, I).

    Args:
        fz, z: a pair with graph from z to fz = f(z) (`deq(..., pair=True)`), tensors or lists; d = numel per sample.
        samples: number of random v. The result can be differentiated.
    """
    require(whole(samples, 1), "samples", samples, "a whole number >= 1")
    fs, zs = _branches(fz), _branches(z)
    total = sum(t.numel() for t in fs)
    estimate = 0.0
    for _ in range(samples):
        v = [torch.randn_like(t) for t in fs]
        products = torch.autograd.grad(fs, zs, v, create_graph=True, allow_unused=True)
        estimate = estimate + sum(p.to(work_dtype(p.dtype)).square().sum() for p in products if p is not None)
    return estimate / (samples * total)
