"""One evaluation of f with its graph, and the adjoint solve on it: whatever asks autograd for more than a gradient.

The last product x J of the solve and the gradient x df/dtheta walk through the same graph. Where all inputs of f are known,
one walk gives both, if the solver foresees that it will be the last, which saves a product (13 % of a training step where
the solve takes two). Foreseen or not, the gradient is then taken at the very x whose residual was measured: a guess changes the
cost, never the result. Where they are not known, the cotangent is x J + g, one product further.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from lipmdeq.solvers.layout import Map, State, branches, like, select


class Recorder:
    """f with graph, at a detached copy of z; keeps the last evaluation only: `z_in` and `fz`, as f takes and gives them."""

    def __init__(self, f: Map, needs_z: bool):
        self.f, self.needs_z = f, needs_z

    def __call__(self, z: State) -> State:
        self.z_in = self.fz = None  # frees the graph of a wrong guess before the next one is built
        # Older torch: casts of weights that autocast cached under no_grad have no graph and swallow the gradient.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            self.z_in = like([t.detach().requires_grad_(self.needs_z) for t in branches(z)], z)
            # Nodes that are made later, in this thread, have higher numbers.
            self.first = torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()
            self.fz = self.f(self.z_in)
        return like([t.detach() for t in branches(self.fz)], z)

    def gradient(self, x: Sequence[Tensor], inputs: Sequence, keep: bool = True) -> tuple:
        """x df/d(inputs) for a cotangent x (branches); None where f does not depend on an input."""
        live = [(t, c.to(t.dtype)) for t, c in zip(branches(self.fz), x, strict=True) if t.requires_grad]
        if not live:
            return (None,) * len(inputs)
        fz, cotangent = zip(*live, strict=True)
        return torch.autograd.grad(fz, inputs, cotangent, retain_graph=keep, allow_unused=True)


def attached(recorder: Recorder, how: tuple, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Branches of f(z_in), whose backward solves for the cotangent; how = gradient rule, Solution of the forward solve, Memory.
    A function of `inputs`, where these are all that f depends on and have no hooks; else, the plain way, of f(z_in) itself,
    whose own graph takes the cotangent on."""
    unique = {_end(t): t for t in inputs if t.requires_grad}
    if unique and not any(map(_hooked, unique.values())) and _complete(recorder, unique):
        return _Attached.apply(recorder, how, [get_gradient_edge(t) for t in unique.values()], *unique.values())
    return _Attached.apply(recorder, how, (), *branches(recorder.fz))


class _Attached(torch.autograd.Function):
    """f(z_in) as a function of its inputs, which stand at the places `ends` of its graph; without ends, of f(z_in)."""

    @staticmethod
    def forward(ctx, recorder, how, ends, *inputs):
        # Plain attributes: f(z_in) is wanted with its graph, which hooks on saved tensors (checkpointing) would cut.
        # Ends of the graph, not the inputs themselves: these may be changed in place later, and would close a cycle.
        ctx.recorder, ctx.how, ctx.ends, ctx.inputs = recorder, how, ends, [weakref.ref(t) for t in inputs]
        return tuple(t.detach() for t in branches(recorder.fz))

    @staticmethod
    @once_differentiable
    def backward(ctx, *g):
        recorder, ends = ctx.recorder, ctx.ends
        if recorder is None:
            raise RuntimeError("backward through an equilibrium a second time: use retain_graph=True the first time")
        for ref, end in zip(ctx.inputs, ends, strict=False):
            if (t := ref()) is not None and _hooked(t) and _end(t) == end[:2]:
                text = "a hook was put on an input of deq after the solve, which would see its gradient twice"
                raise RuntimeError(f"{text}: put it there before, or leave `inputs` out")
        (rule, solution, memory), z_in, grads = ctx.how, branches(recorder.z_in), ()
        g = [t.to(z.dtype) for t, z in zip(g, z_in, strict=True)]

        def T(x: list[Tensor], ends: Sequence = ()) -> list[Tensor]:
            """x J + g, J = df/dz at z_in; with ends also x df/d(ends)."""
            nonlocal grads
            out = recorder.gradient(x, (*z_in, *ends))
            product, grads = out[: len(z_in)], out[len(z_in) :]
            return [t if p is None else p + t for p, t in zip(product, g, strict=True)]

        found = rule.adjoint(T, g, final=partial(T, ends=ends) if ends else None, expect=memory.backward)
        solution.backward, memory.backward = found, found.expect
        if not ends:
            return None, None, None, *(x.to(t.dtype) for x, t in zip(found.z, branches(recorder.fz), strict=True))
        keep, converged = _keeps_graph(), found.reason == "converged"
        if not (found.final_used and converged):  # where no x was good enough: the last step from the best one
            x = select(found.converged.numpy() | converged, found.z_in, found.z)
            grads = recorder.gradient(x, ends, keep)
        if not keep:  # freed, as autograd does with its own
            ctx.recorder = None
        return None, None, None, *grads


# Whether the running backward pass was asked to retain the graph; not to know it costs memory only.
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def _hooked(t: Tensor) -> bool:
    return t.requires_grad and bool(t._backward_hooks or t.retains_grad)


def _end(t: Tensor) -> tuple:
    """Where t stands in the graph: (node, number of its output)."""
    return get_gradient_edge(t)[:2]


def _complete(recorder: Recorder, inputs: Iterable[tuple]) -> bool:
    """Whether the gradients at z_in and the inputs are all that f(z_in) gives: every way back from it ends at one of them,
    over nodes that f itself made, and none of them lies behind another one."""
    known = {*inputs, *map(_end, branches(recorder.z_in))}
    todo = [(_end(t), True) for t in branches(recorder.fz) if t.requires_grad]  # True: inside f, on the way to an end
    todo += [(end, False) for node, _ in known for end in node.next_functions]
    seen = set()
    while todo:
        end, inside = todo.pop()
        node = end[0]
        if end in known and not inside:
            return False
        if end not in known and node is not None and (node, inside) not in seen:
            if inside and not (node.next_functions and node._sequence_nr() >= recorder.first):
                return False
            seen.add((node, inside))
            todo += [(e, inside) for e in node.next_functions]
    return True
