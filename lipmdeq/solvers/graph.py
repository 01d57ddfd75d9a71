"""One evaluation of f with its graph, and the last product x J together with the gradient.

The last product of the adjoint solve and the gradient x df/dtheta walk through the same graph. Where all inputs of f are
known, one walk gives both, if the solver foresees that it will be the last, which saves a product (13 % of a training step
where the solve takes two). Foreseen or not, the gradient is taken at the very x whose residual was measured: a guess changes
the cost, never the result. Whatever asks autograd for more than its public interface is in this file; `joined` says where
it does not apply, and then `gradients` goes the plain way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lipmdeq.solvers.layout import select
from lipmdeq.solvers.solution import Map, Memory, Solution, State


def branches(z: State) -> list[Tensor]:
    return [z] if isinstance(z, Tensor) else list(z)


def like(z: Sequence[Tensor], model: State) -> State:
    return z[0] if isinstance(model, Tensor) else list(z)


class Recorder:
    """f with graph, at a detached copy of z; keeps the last evaluation only: `z_in` and `fz`, as f takes and gives them."""

    def __init__(self, f: Map, needs_z: bool):
        self.f, self.needs_z, self.z_in, self.fz = f, needs_z, None, None

    def __call__(self, z: State) -> State:
        self.z_in = self.fz = None  # frees the graph of a wrong guess before the next one is built
        # Older torch: casts of weights that autocast cached under no_grad have no graph and swallow the gradient.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            self.z_in = like([t.detach().requires_grad_(self.needs_z) for t in branches(z)], z)
            self.first = _number()  # nodes of this evaluation have numbers from here on
            self.fz = self.f(self.z_in)
        return like([t.detach() for t in branches(self.fz)], z)

    def gradient(self, x: Sequence[Tensor], inputs: Sequence, keep: bool = True) -> tuple:
        """x df/d(inputs) for a cotangent x (branches); None where f does not depend on an input."""
        live = [(t, c.to(t.dtype)) for t, c in zip(branches(self.fz), x, strict=True) if t.requires_grad]
        fz, cotangent = zip(*live, strict=True)
        return torch.autograd.grad(fz, inputs, cotangent, retain_graph=keep, allow_unused=True)

    def product(self, x: Sequence[Tensor]) -> list[Tensor]:
        """x J, J = df/dz at z_in."""
        return self.filled(self.gradient(x, branches(self.z_in)))

    def filled(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        return [torch.zeros_like(z) if t is None else t for t, z in zip(grads, branches(self.z_in), strict=True)]

    def start(self, g: Sequence[Tensor]) -> list[Tensor]:
        """The gradient g of the loss, in the dtype of the states."""
        return [t.to(z.dtype) for t, z in zip(g, branches(self.z_in), strict=True)]


def add(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    return [s + t for s, t in zip(a, b, strict=True)]


def joined(rule, solution: Solution, recorder: Recorder, inputs: Sequence[Tensor], memory: Memory):
    """Branches of f(z_in) as a function of the inputs, whose backward joins product and gradient.

    None where this is not possible: the inputs are not all that f depends on, or have hooks.
    """
    unique = {_end(t): t for t in inputs if t.requires_grad}
    known = {*unique, *map(_end, branches(recorder.z_in))}
    if not unique or any(map(_hooked, unique.values())) or not _complete(recorder, known):
        return None
    ends = [get_gradient_edge(t) for t in unique.values()]
    return _Joined.apply(rule, solution, recorder, ends, memory, *unique.values())


class _Joined(torch.autograd.Function):
    """f(z_in) as a function of its inputs; the graph of f is not part of the outer one."""

    @staticmethod
    def forward(ctx, rule, solution, recorder, ends, memory, *inputs):
        # Plain attributes: f(z_in) is wanted with its graph, which hooks on saved tensors (checkpointing) would cut.
        # Ends of the graph, not the inputs themselves: these may be changed in place later, and would close a cycle.
        ctx.rule, ctx.solution, ctx.recorder, ctx.ends, ctx.memory = rule, solution, recorder, ends, memory
        ctx.inputs = [weakref.ref(t) for t in inputs]
        return tuple(t.detach() for t in branches(recorder.fz))

    @staticmethod
    @once_differentiable
    def backward(ctx, *g):
        recorder, ends, memory, grads = ctx.recorder, ctx.ends, ctx.memory, ()
        if recorder is None:
            raise RuntimeError("backward through an equilibrium a second time: use retain_graph=True the first time")
        _refuse_hooks(ends, ctx.inputs)
        z_in, g = branches(recorder.z_in), recorder.start(g)

        def final(x):
            nonlocal grads
            out = recorder.gradient(x, (*z_in, *ends))
            grads = out[len(z_in) :]
            return add(recorder.filled(out[: len(z_in)]), g)

        how = dict(final=final, expect=memory.backward, room=memory.room)
        ctx.solution.backward = found = ctx.rule.adjoint(lambda x: add(recorder.product(x), g), g, **how)
        memory.backward = found.expect
        keep = _keeps_graph()
        if not (found.final_used and found.reason == "converged"):
            grads = recorder.gradient(_measured(found), ends, keep)
        if not keep:  # freed, as autograd does with its own
            ctx.recorder = None
        return (None,) * 5 + tuple(grads)


def _measured(found: Solution) -> list[Tensor]:
    """The x whose residual was small enough; where none was, the last step from the best one."""
    if found.z_in is None or found.reason == "converged":
        return found.z if found.z_in is None else found.z_in
    return select(found.converged.numpy(), found.z_in, found.z)


# Whether the running backward pass was asked to retain the graph; not to know it costs memory only.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _refuse_hooks(ends: Sequence, inputs: Sequence[weakref.ref]) -> None:
    for end, ref in zip(ends, inputs, strict=True):
        if _hooked(t := ref()) and _end(t) == _pair(end):
            raise RuntimeError(
                "a hook was put on an input of deq after the solve: it would see its gradient twice; "
                "put it there before, or leave `inputs` out"
            )


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


def _complete(recorder: Recorder, known: set[tuple]) -> bool:
    """Whether the gradients at the known places are all that f(z_in) gives: every way back through the graph ends at one of
    them, over nodes that f itself made, and none of them lies behind another one."""
    seen, todo = set(), [_end(t) for t in branches(recorder.fz) if t.requires_grad]
    while todo:
        end = todo.pop()
        node = end[0]
        if end in known or node in seen:
            continue
        seen.add(node)
        before = node.next_functions
        if not before or node._sequence_nr() < recorder.first:
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
