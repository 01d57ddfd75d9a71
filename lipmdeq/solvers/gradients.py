"""Gradients through an equilibrium z* = f(z*; x, theta): implicit, JFB, Neumann, phantom, unrolled.

`deq` solves without graph, then evaluates f once with graph at the point where the solve ended ("attach"): the value is
the solver's z, and the ordinary graph behind it reaches every parameter and every input that f closes over (stem
included). A gradient rule is an object that only says which cotangent enters that graph: the exact one is
x = g (I - J)^(-1), the fixed point of x = x J + g (the map T of the paper), J = df/dz at z*.

The last product x J of that solve and the gradient x df/dtheta walk through the same graph. Where `deq` is told the
`inputs` of f, one walk gives both, if the solver foresees that it will be the last, which saves a product. Foreseen or
not, the gradient is taken at the very x whose residual was measured: a guess changes the cost, never the result.

No hooks, no state in modules, no reference cycles: the graph dies with the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lipmdeq.solvers.loop import Anderson, ConvergenceError, Picard, Solution, Solver, rows
from lipmdeq.solvers.solution import Map, State, require, whole
from lipmdeq.solvers.steps import work_dtype


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
        # Its own copy: a solver remembers how long its last solve took, and the forward one may be the same object.
        object.__setattr__(self, "solver", replace(self.solver))

    def adjoint(self, product: Map, g: list[Tensor], final: Map | None = None) -> Solution:
        """The Solution whose z is the cotangent; product: x -> x J on lists of branches, final: the same, for the last one.

        Two products at least: x = g alone, however small its residual, is the gradient of JFB, which tells the weights nothing
        of J.
        """
        last = None if final is None else lambda x: _add(final(x), g)
        return self.solver.solve(lambda x: _add(product(x), g), g, final=last, least=2)


@dataclass(frozen=True)
class Neumann:
    """k terms of the Neumann series, x = sum_{i<k} g J^i: k - 1 products; relative error of x at most L^k."""

    k: int = 5

    def __post_init__(self):
        require(whole(self.k, 1), "k", self.k, "a whole number >= 1")

    def adjoint(self, product: Map, g: list[Tensor], final: Map | None = None) -> Solution:
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
    """f(z_in), whose backward replaces g by the cotangent of the rule; or, if `ends` are given, f(z_in) as a function of the
    tensors there (its inputs), whose backward gives their gradients. The graph of f is then not part of the outer one.
    """

    @staticmethod
    def forward(ctx, rule, solution, z_in, fz, ends, *tensors):
        # Plain attributes: f(z_in) is wanted with its graph, which hooks on saved tensors (checkpointing) would cut.
        # Ends of the graph, not the inputs themselves: these may be changed in place later, and would close a cycle.
        ctx.rule, ctx.solution, ctx.z_in, ctx.fz, ctx.ends = rule, solution, z_in, fz, ends
        ctx.inputs = [weakref.ref(t) for t in tensors] if ends else []
        return tuple(t.detach() for t in fz)

    @staticmethod
    @once_differentiable
    def backward(ctx, *g):
        z_in, ends, grads = ctx.z_in, ctx.ends, ()
        if ctx.fz is None:
            raise RuntimeError("backward through an equilibrium a second time: use retain_graph=True the first time")
        for end, ref in zip(ends, ctx.inputs, strict=True):
            if _hooked(t := ref()) and _end(t) == _pair(end):
                raise RuntimeError(
                    "a hook was put on an input of deq after the solve: it would see its gradient twice; "
                    "put it there before, or leave `inputs` out"
                )
        live = [i for i, t in enumerate(ctx.fz) if t.requires_grad]
        fz = [ctx.fz[i] for i in live]

        def gradient(x, inputs, keep=True):
            cot = [x[i].to(t.dtype) for i, t in zip(live, fz, strict=True)]
            return torch.autograd.grad(fz, inputs, cot, retain_graph=keep, allow_unused=True)

        def filled(out):
            return [torch.zeros_like(z) if t is None else t for t, z in zip(out, z_in, strict=True)]

        def final(x):
            nonlocal grads
            out = gradient(x, (*z_in, *ends))
            grads = out[len(z_in) :]
            return filled(out[: len(z_in)])

        start = [t.to(z.dtype) for t, z in zip(g, z_in, strict=True)]
        ctx.solution.backward = found = ctx.rule.adjoint(
            lambda x: filled(gradient(x, z_in)), start, final if ends else None
        )
        if not ends:
            return (None,) * 5 + tuple(x.to(t.dtype) for x, t in zip(found.z, ctx.fz, strict=True))
        if not (found.final_used and found.reason == "converged"):
            grads = gradient(_measured(found), ends, _keeps_graph())
        if not _keeps_graph():  # freed, as autograd does with its own
            ctx.z_in = ctx.fz = None
        return (None,) * 5 + tuple(grads)


def _measured(found: Solution) -> list[Tensor]:
    """The x whose residual was small enough; where none was, the last step from the best one."""
    if found.z_in is None or found.reason == "converged":
        return found.z if found.z_in is None else found.z_in
    return rows(found.converged.numpy(), found.z_in, found.z)


# Whether the running backward pass was asked to retain the graph; not to know it costs memory only.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _hooked(t: Tensor | None) -> bool:
    return t is not None and bool(t._backward_hooks or t.retains_grad)


def _pair(edge) -> tuple:
    return edge.node, edge.output_nr


def _end(t: Tensor) -> tuple | None:
    """Where t stands in the graph, (node, number of its output)."""
    return _pair(get_gradient_edge(t)) if t.requires_grad else None


def _number() -> int:
    """Nodes of the graph that are made later, in this thread, have higher numbers."""
    with torch.enable_grad():
        return torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()


def _complete(fz: list[Tensor], known: set[tuple], first: int) -> bool:
    """Whether the gradients at the known places are all that fz gives: every way back through the graph ends at one of
    them, over nodes that f itself made (from number `first` on), and none of them lies behind another one."""
    seen, todo = set(), [_end(t) for t in fz if t.requires_grad]
    while todo:
        end = todo.pop()
        node = end[0]
        if end in known or node in seen:
            continue
        seen.add(node)
        before = node.next_functions
        if not before or node._sequence_nr() < first:
            return False
        todo += [e for e in before if e[0] is not None]
    seen, todo = set(), [e for node, _ in known for e in node.next_functions]
    while todo:
        end = todo.pop()
        if end in known:
            return False
        node = end[0]
        if node is not None and node not in seen:
            seen.add(node)
            todo += node.next_functions
    return True


# ---- the equilibrium layer ---------------------------------------------------------------------------------------


def deq(
    f: Map,
    z0: State,
    *,
    solver: Solver | None = None,
    adjoint=None,
    inputs: Sequence[Tensor] = (),
    pair: bool = False,
    throw: bool = False,
):
    """z* = f(z*) with gradients to all that f closes over.

    Args:
        f: z -> f(z; x, theta), tensor (B, ...) or list of tensors in, the same out.
        z0: where the solve starts.
        solver: forward solver; default Anderson().
        adjoint: gradient rule; default Implicit().
        inputs: all that f closes over and that wants a gradient, as f uses it (parameters, injected input). Not needed;
            with it the implicit gradient can save one product. If something is missing, it is as if none were given.
        pair: keep (f(z_in), z_in) with graph in `solution.pair`, for `jacobian_regularisation`.
        throw: raise ConvergenceError if a sample does not converge.

    Returns:
        (z, Solution). Without grad mode no graph is made and f is not called again; with it `nfe_total` tells whether
        f was (the solver lets the evaluation that it expects to be the last record the graph, which saves a call).
    """
    solver, adjoint = solver or Anderson(), adjoint or Implicit()
    require(isinstance(adjoint, _RULES), "adjoint", adjoint, "one of " + ", ".join(r.__name__ for r in _RULES))
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
    z_in, fz, first = attach.take()
    z_start, solution.z_in = solution.z, None
    if pair:
        solution.pair = (fz, z_in)
    if isinstance(adjoint, Phantom):
        return _phantom(f, z_start, adjoint, solution), solution
    if linear:
        fz = _same(_through(adjoint, solution, (z_in, fz, first), () if pair else inputs), z0)
    return fz, solution


def _through(rule, solution: Solution, attach: tuple, inputs: Sequence[Tensor]):
    """f(z_in) with the backward of the rule; over the inputs where they are all that f depends on."""
    z_in, fz, first = _branches(attach[0]), _branches(attach[1]), attach[2]
    unique = {_end(t): t for t in inputs if t.requires_grad}
    if unique and not any(map(_hooked, unique.values())):
        if _complete(fz, {*unique, *map(_end, z_in)}, first):
            ends = [get_gradient_edge(t) for t in unique.values()]
            return _Adjoint.apply(rule, solution, z_in, fz, ends, *unique.values())
    return _Adjoint.apply(rule, solution, z_in, fz, [], *fz)


class _Attach:
    """f with graph, at a detached copy of z; keeps the last evaluation only."""

    def __init__(self, f: Map, needs_z: bool):
        self.f, self.needs_z, self.last = f, needs_z, (None, None, 0)

    def __call__(self, z: State) -> State:
        self.last = (None, None, 0)  # frees the graph of a wrong guess before the next one is built
        # Older torch: casts of weights that autocast cached under no_grad have no graph and swallow the gradient.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            z_in = _same([t.detach().requires_grad_(self.needs_z) for t in _branches(z)], z)
            first = _number()
            fz = self.f(z_in)
        self.last = (z_in, fz, first)
        return _same([t.detach() for t in _branches(fz)], z)

    def take(self) -> tuple[State, State, int]:
        """(z, f(z)) of the last evaluation, and the number from which on its nodes were made."""
        last, self.last = self.last, (None, None, 0)
        return last


def _phantom(f: Map, z: State, rule: Phantom, solution: Solution) -> State:
    torch.clear_autocast_cache()
    zs = _branches(z)
    for _ in range(rule.k):
        zs = [torch.lerp(a, b.to(a.dtype), rule.lam) for a, b in zip(zs, _branches(f(_same(zs, z))), strict=True)]
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
