"""Gradients through an equilibrium: against finite differences, unrolling, the explicit inverse and torchdeq."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from lipmdeq.bounds import banach
from lipmdeq.solvers import Anderson, Broyden, ConvergenceError, Memory, Picard
from lipmdeq.solvers.gradients import JFB, Implicit, Neumann, Phantom, Unrolled, deq, jacobian_regularisation

DOUBLE = torch.float64
TIGHT = Anderson(tol=1e-12, max_iter=300)
RULES = [Implicit(TIGHT), JFB(), Neumann(3), Phantom(3, 0.5), Unrolled(12)]
pytestmark = pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")


class Layer(nn.Module):
    """z = act(W z + U x + b) with ||W||_2 = rate."""

    def __init__(self, d=6, rate=0.8, act=torch.tanh, dtype=DOUBLE, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        draw = lambda *s: torch.randn(*s, generator=g, dtype=DOUBLE).to(dtype)  # noqa: E731
        w = torch.randn(d, d, generator=g, dtype=DOUBLE)
        self.w = nn.Parameter((w * rate / torch.linalg.matrix_norm(w, 2)).to(dtype))
        self.u, self.b, self.act = nn.Parameter(draw(d, d)), nn.Parameter(draw(d)), act

    def f(self, z, x):
        return self.act(linear(z, self.w) + linear(x, self.u, self.b))

    def forward(self, x, solver=TIGHT, adjoint=RULES[0], **kw):
        kw.setdefault("inputs", [x, *self.parameters()])
        return deq(lambda z: self.f(z, x), torch.zeros_like(x), solver=solver, adjoint=adjoint, **kw)


def data(b=3, d=6, seed=1, dtype=DOUBLE):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(b, d, generator=g, dtype=DOUBLE).to(dtype) for _ in range(2))


def gradients(layer, x, cot, adjoint, solver=TIGHT):
    x = x.clone().requires_grad_()
    z, solution = layer(x, solver=solver, adjoint=adjoint)
    return torch.autograd.grad((z * cot).sum(), [*layer.parameters(), x]), z, solution


def close(a, b, **kw):
    for s, t in zip(a, b, strict=True):
        torch.testing.assert_close(s, t, **kw)


# ---- exact gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [torch.tanh, torch.relu])
@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden])
def test_implicit_is_unrolled_is_explicit_inverse(act, solver):
    layer, (x, cot) = Layer(act=act), data()
    rule = Implicit(solver(tol=1e-12, max_iter=500))
    grads, z, solution = gradients(layer, x, cot, rule, solver(tol=1e-12, max_iter=500))
    unrolled, z_unrolled, _ = gradients(layer, x, cot, Unrolled(200))
    assert solution.backward.reason == "converged" and solution.backward.nfe > 1
    close([z, *grads], [z_unrolled, *unrolled], rtol=1e-8, atol=1e-10)
    # explicit: x_i = g_i (I - J_i)^-1, then one vector-Jacobian product of f
    star = z.detach()
    adjoint = []
    for i in range(3):
        j = torch.autograd.functional.jacobian(lambda s, i=i: layer.f(s[None], x[i : i + 1])[0], star[i])
        adjoint.append(torch.linalg.solve((torch.eye(6, dtype=DOUBLE) - j).T, cot[i]))
    xi = x.clone().requires_grad_()
    out = layer.f(star, xi)
    explicit = torch.autograd.grad(out, [*layer.parameters(), xi], torch.stack(adjoint))
    close(grads, explicit, rtol=1e-8, atol=1e-10)
    close([solution.backward.z[0]], [torch.stack(adjoint)], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rule", [Implicit(TIGHT), Neumann(80), Phantom(80, 0.9), Unrolled(80)])
def test_gradcheck(rule):
    layer, (x, _) = Layer(d=3, rate=0.7), data(b=2, d=3)
    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]

    def run(x, w, u, b):
        f = lambda z: torch.tanh(z @ w.T + x @ u.T + b)  # noqa: E731
        return deq(f, torch.zeros_like(x), solver=TIGHT, adjoint=rule)[0]

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *parameters), atol=1e-6)


def test_branches_of_different_shape():
    """Two branches that feed each other, one of them through a convolution."""
    g = torch.Generator().manual_seed(0)
    k = (0.1 * torch.randn(2, 2, 3, 3, generator=g, dtype=DOUBLE)).requires_grad_()
    m = (0.1 * torch.randn(18, 5, generator=g, dtype=DOUBLE)).requires_grad_()
    x = torch.randn(4, 2, 3, 3, generator=g, dtype=DOUBLE).requires_grad_()

    def f(z):
        a, b = z
        return [torch.tanh(torch.conv2d(a, k, padding=1) + x + (b @ m.T).view_as(a)), torch.tanh(a.flatten(1) @ m)]

    z0 = [torch.zeros(4, 2, 3, 3, dtype=DOUBLE), torch.zeros(4, 5, dtype=DOUBLE)]
    results = []
    for rule in (Implicit(TIGHT), Unrolled(200)):
        z, _ = deq(f, z0, solver=TIGHT, adjoint=rule)
        assert isinstance(z, list)
        results.append(torch.autograd.grad((z[0] ** 2).sum() + z[1].sin().sum(), (k, m, x)))
    close(*results, rtol=1e-8, atol=1e-10)
    z, solution = deq(f, z0, solver=TIGHT)  # one branch only enters the loss
    one = torch.autograd.grad(z[1].sum(), (k, m, x))
    z, _ = deq(f, z0, solver=TIGHT, adjoint=Unrolled(200))
    close(one, torch.autograd.grad(z[1].sum(), (k, m, x)), rtol=1e-2, atol=1e-3)
    assert solution.backward.converged.all()


@pytest.mark.parametrize("solver", ["anderson", "broyden", "fixed_point_iter"])
def test_against_torchdeq(solver):
    """Another package, other code: same equilibrium, same gradients."""
    torchdeq = pytest.importorskip("torchdeq")
    layer, (x, cot) = Layer(d=20, rate=0.9), data(b=5, d=20)
    grads, z, _ = gradients(layer, x, cot, Implicit(TIGHT))
    options = dict(f_max_iter=400, b_max_iter=400, f_tol=1e-11, b_tol=1e-11, f_stop_mode="rel", b_stop_mode="rel")
    oracle = torchdeq.get_deq(ift=True, f_solver=solver, b_solver="fixed_point_iter", **options)
    x = x.clone().requires_grad_()
    out, _ = oracle(lambda s: layer.f(s, x), torch.zeros_like(x))
    torch.testing.assert_close(z, out[-1], rtol=1e-8, atol=1e-9)
    theirs = torch.autograd.grad((out[-1] * cot).sum(), [*layer.parameters(), x])
    close(grads, theirs, rtol=1e-6, atol=1e-8)


# ---- approximate gradients stay within their bounds --------------------------------------------------------------


def adjoints(layer, x, cot, rule):
    """The cotangent that a rule sends into f, read off at an added input: f(z) + e."""
    e = torch.zeros_like(x, requires_grad=True)
    z, _ = deq(lambda s: layer.f(s, x) + e, torch.zeros_like(x), solver=TIGHT, adjoint=rule)
    return torch.autograd.grad((z * cot).sum(), e)[0]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("act", [torch.relu, torch.tanh, lambda t: t])
def test_errors_are_below_their_bounds(rate, act):
    for seed in range(5):
        layer, (x, cot) = Layer(d=8, rate=rate, act=act, seed=seed), data(b=4, d=8, seed=seed + 50)
        exact = adjoints(layer, x, cot, Implicit(TIGHT))
        size = exact.norm(dim=1)
        rules = [(JFB(), banach.jfb_error(rate))]
        rules += [(Neumann(k), banach.neumann_error(rate, k)) for k in (1, 2, 5, 9)]
        rules += [
            (Phantom(k, lam), banach.phantom_error(rate, k, lam))
            for k, lam in ((5, 0.5), (1, 1.0), (8, 0.9), (20, 0.3))
        ]
        for rule, bound in rules:
            error = (adjoints(layer, x, cot, rule) - exact).norm(dim=1) / size
            assert (error <= bound * (1 + 1e-9) + 1e-11).all(), (rule, error, bound)
        angle = torch.arccos((torch.cosine_similarity(cot, exact)).clamp(-1, 1))
        assert (angle <= math.asin(rate) + 1e-6).all()


def test_the_neumann_bound_is_reached():
    x, cot = torch.zeros(1, 3, dtype=DOUBLE), torch.ones(1, 3, dtype=DOUBLE)
    e = torch.zeros(1, 3, dtype=DOUBLE, requires_grad=True)
    for k in (1, 4):
        z, _ = deq(lambda s: 0.9 * s + e, x, solver=TIGHT, adjoint=Neumann(k))
        grad = torch.autograd.grad((z * cot).sum(), e)[0]
        torch.testing.assert_close(1 - grad / 10, torch.full((1, 3), 0.9**k, dtype=DOUBLE))


def test_jfb_is_one_neumann_term_and_reaches_the_input():
    layer, (x, cot) = Layer(), data()
    close(gradients(layer, x, cot, JFB())[0], gradients(layer, x, cot, Neumann(1))[0])
    assert all(g.abs().sum() > 0 for g in gradients(layer, x, cot, JFB())[0])


@pytest.mark.parametrize("rule", RULES)
def test_stem_and_every_parameter_get_a_gradient(rule):
    stem, layer, (x, cot) = nn.Linear(6, 6, dtype=DOUBLE), Layer(), data()
    z, _ = layer(stem(x), adjoint=rule)
    (z * cot).sum().backward()
    for name, p in [*stem.named_parameters(), *layer.named_parameters()]:
        assert p.grad is not None and p.grad.abs().sum() > 0, name


# ---- values and counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Implicit(TIGHT), JFB(), Neumann(3)])
@pytest.mark.parametrize("solver", [Picard, Anderson, Broyden])
@pytest.mark.parametrize("cap", [100, 3])
def test_value_is_the_solvers_and_calls_are_counted(rule, solver, cap):
    layer, (x, _) = Layer(), data()
    calls = [0]

    def f(z):
        calls[0] += 1
        return layer.f(z, x)

    solver = solver(tol=1e-3, max_iter=cap)
    z, s = deq(f, torch.zeros_like(x), solver=solver, adjoint=rule)
    assert calls[0] == s.nfe_total and s.nfe <= s.nfe_total <= s.nfe + 1
    with torch.no_grad():
        free, plain = deq(f, torch.zeros_like(x), solver=solver, adjoint=rule)
    assert plain.nfe == plain.nfe_total == s.nfe and not free.requires_grad
    assert z.requires_grad and z.equal(s.z) and z.equal(free)  # training and test see the same equilibrium


def test_what_is_remembered_is_seen():
    """Strong contraction: two evaluations, and from the second solve on no third one for the graph; solvers keep nothing."""
    layer, (x, cot) = Layer(rate=1e-4), data()
    solver, rule, memory = Anderson(), Implicit(Anderson()), Memory()
    before = dict(vars(solver)), dict(vars(rule.solver))
    counts = [(s.nfe, s.nfe_total) for s in (layer(x, solver=solver, memory=memory)[1] for _ in range(3))]
    assert counts == [(2, 3), (2, 2), (2, 2)] and (memory.forward, memory.backward) == (2, None)
    (layer(x, solver=solver, adjoint=rule, memory=memory)[0] * cot).sum().backward()
    assert memory.backward == 2
    assert (vars(solver), vars(rule.solver)) == before
    layer(x, solver=Anderson(tol=1e-12, max_iter=2), memory=memory)
    assert memory.forward is None  # a solve that did not converge says nothing about the next one
    memory.forget()
    assert layer(x, solver=solver, memory=memory)[1].nfe_total == 3
    assert layer(x, solver=solver)[1].nfe_total == layer(x, solver=solver)[1].nfe_total == 3


class Counted(torch.autograd.Function):
    """Identity that counts how often a gradient passes."""

    walks = 0

    @staticmethod
    def forward(ctx, z):
        ctx.set_materialize_grads(False)
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        Counted.walks += g is not None
        return g


@pytest.mark.parametrize("frozen", [False, True])
def test_the_last_product_and_the_gradient_are_one_walk(frozen):
    """Told the inputs of f, the solve for the adjoint saves a product; what it returns belongs to the same tolerance."""
    layer, (x, cot) = Layer(rate=0.3), data()
    layer.u.requires_grad_(not frozen)
    leaf = x.clone().requires_grad_()
    wanted = [leaf, *(p for p in layer.parameters() if p.requires_grad)]

    def run(inputs, tol=1e-4):
        rule, memory = Implicit(Anderson(tol=tol)), Memory()
        for _ in range(2):  # the second solve knows how long the first one took
            u = leaf * 1.0  # not a leaf, as the output of a stem
            z, s = deq(
                lambda z, u=u: Counted.apply(layer.f(z, u)),
                torch.zeros_like(x),
                solver=TIGHT,
                adjoint=rule,
                inputs=inputs(u),
                memory=memory,
            )
            Counted.walks = 0
            grads = torch.autograd.grad((z * cot).sum(), [u, *wanted])
        return grads, Counted.walks, s.backward

    plain, walks, s = run(lambda u: [])
    assert walks == s.nfe + 1 and not s.final_used
    merged, walks, s2 = run(lambda u: [u, *layer.parameters()])
    assert walks == s.nfe == s2.nfe and s2.final_used and s2.residuals.equal(s.residuals)
    exact, *_ = run(lambda u: [], tol=1e-13)
    close(merged, exact, rtol=0, atol=2e-3)
    close(plain, exact, rtol=0, atol=2e-3)
    assert max((a - b).abs().max() for a, b in zip(merged, plain, strict=True)) > 1e-9  # one product apart
    for short in (lambda u: [u, layer.w], lambda u: [leaf * 1.0, *layer.parameters()]):  # something is missing
        again, walks, _ = run(short)
        assert walks == s.nfe + 1
        close(again, plain, rtol=0, atol=0)


def told_and_not(make, again=2):
    """Gradients with and without `inputs`; make() returns (f, z0, inputs, loss of z, wanted); the last of some solves."""
    found = []
    for told in (True, False):
        rule, memory = Implicit(TIGHT), Memory()
        for _ in range(again):
            f, z0, inputs, loss, wanted = make()
            z, s = deq(f, z0, solver=TIGHT, adjoint=rule, inputs=inputs if told else (), memory=memory)
            grads = torch.autograd.grad(loss(z), wanted, allow_unused=True)
        found.append(grads)
        if told:
            merged = s.backward.final_used
    close([g for g in found[0] if g is not None], [g for g in found[1] if g is not None], rtol=1e-8, atol=1e-9)
    assert [g is None for g in found[0]] == [g is None for g in found[1]]
    return merged


@pytest.mark.parametrize("hook", ["parameter", "input", "retain", "inside", "accumulated"])
def test_hooks_see_a_gradient_once(hook):
    layer, (x, cot) = Layer(rate=0.3), data()

    def double(p):
        p.grad.mul_(2)

    def run(told, late=False):
        rule, leaf, memory = Implicit(TIGHT), x.clone().requires_grad_(), Memory()
        for _ in range(2):
            layer.zero_grad()
            leaf.grad, u, handles = None, leaf * 1.0, []

            def f(z, u=u):
                out = layer.f(z, u)
                if hook == "inside" and out.requires_grad:
                    out.register_hook(lambda g: g * 1.0)
                return out

            def put(u=u, handles=handles):
                if hook == "accumulated":
                    handles.append(layer.w.register_post_accumulate_grad_hook(double))
                elif hook == "retain":
                    u.retain_grad()
                elif hook != "inside":
                    handles.append((layer.w if hook == "parameter" else u).register_hook(lambda g: 2 * g))

            inputs = [u, *layer.parameters()] if told else ()
            if not late:
                put()
            z, _ = deq(f, torch.zeros_like(x), solver=TIGHT, adjoint=rule, inputs=inputs, memory=memory)
            if late:
                put()
            try:
                (z * cot).sum().backward()
            finally:
                for handle in handles:
                    handle.remove()
        return [leaf.grad, *(p.grad.clone() for p in layer.parameters()), *([u.grad] if hook == "retain" else [])]

    plain = run(False)
    close(run(True), plain, rtol=1e-9, atol=1e-10)
    if hook in ("inside", "accumulated"):
        close(run(True, late=True), plain, rtol=1e-9, atol=1e-10)
    else:
        with pytest.raises(RuntimeError, match="a hook was put on an input of deq after the solve"):
            run(True, late=True)


def test_inputs_of_every_kind():
    """Listed twice, behind one another, outputs of one node, made outside of f, a branch of f itself."""
    layer, (x, _) = Layer(), data()
    w, zeros = layer.w, torch.zeros_like(x)

    def tanh(z, u):
        return torch.tanh(linear(z, w) + u)

    def twice():
        leaf = x.clone().requires_grad_()
        return lambda z: tanh(z, leaf), zeros, [w, leaf, w], lambda z: z.sin().sum(), [w, leaf]

    def behind():
        leaf = x.clone().requires_grad_()
        u = linear(leaf, w)
        return lambda z: tanh(z, u), zeros, [w, u], lambda z: z.sin().sum(), [w, leaf]

    def siblings(both):
        leaf = torch.cat([x, x.flip(1)], 1).requires_grad_()
        a, b = leaf.chunk(2, 1)
        f = lambda z: torch.tanh(linear(z, w) * a.sigmoid() + b)  # noqa: E731
        return f, zeros, [w, b, *([a] if both else [])], lambda z: z.sin().sum(), [w, leaf]

    def outside():
        leaf = x.clone().requires_grad_()
        u = leaf * 2
        u.register_hook(lambda g: g.clamp(-0.5, 0.5))
        return lambda z: tanh(z, u), zeros, [w, leaf], lambda z: z.sin().sum() + u.sum(), [w, leaf]

    def branch():
        leaf, p = x.clone().requires_grad_(), x.flip(0).requires_grad_()
        f = lambda z: [tanh(z[0], leaf + z[1]), p]  # noqa: E731
        return f, [zeros, zeros], [w, leaf], lambda z: (z[0].sin() + z[1]).sum(), [w, leaf, p]

    assert told_and_not(twice)
    assert told_and_not(lambda: siblings(True))
    for make in (behind, lambda: siblings(False), outside, branch):
        assert not told_and_not(make)


def test_inputs_that_change_after_the_solve():
    """In place, or out of the graph: the gradient is that of what f has seen, and nothing stays in memory."""
    layer, (x, _) = Layer(), data()
    leaf = x.clone().requires_grad_()

    def make(change):
        def loss(z):
            return change(u, z)

        u = leaf * 2
        return (lambda z: torch.tanh(linear(z, layer.w) + u), torch.zeros_like(x), [u, layer.w], loss, [leaf, layer.w])

    def relu(u, z):
        u.relu_()
        return z.sin().sum()

    def add(u, z):
        u += z
        return u.sin().sum()

    def leave(u, z):
        u.detach_()
        return z.sin().sum()

    for change in (relu, add, leave):
        assert told_and_not(lambda change=change: make(change))

    def used():
        f, z0, inputs, loss, _ = make(add)
        loss(deq(f, z0, solver=TIGHT, inputs=inputs)[0]).backward()
        return weakref.ref(inputs[0])

    gc.collect()
    gc.disable()
    try:
        assert used()() is None
    finally:
        gc.enable()


def test_the_graph_is_freed_by_backward():
    """As autograd does: what f saved is gone when backward is over, although the loss still lives."""
    layer, (x, cot) = Layer(), data()
    kept = []

    class Big(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.big = torch.ones(10)
            kept.append(weakref.ref(ctx.big))
            return z.clone()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.big[0]

    z, _ = deq(lambda z: Big.apply(layer.f(z, x)), torch.zeros_like(x), solver=TIGHT, inputs=list(layer.parameters()))
    loss = (z * cot).sum()
    loss.backward(retain_graph=True)
    assert any(r() is not None for r in kept)
    loss.backward()
    assert not any(r() is not None for r in kept)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_a_solve_that_ends_at_its_cap_does_not_depend_on_the_one_before():
    x = torch.ones(1, 1, dtype=DOUBLE)
    for rates in (0.2, 0.8), (0.8,):
        rule, memory = Implicit(Picard(tol=1e-2, max_iter=3)), Memory()
        for rate in rates:
            leaf = x.clone().requires_grad_()
            z, _ = deq(
                lambda z, rate=rate, leaf=leaf: rate * z + leaf,
                torch.zeros_like(x),
                solver=TIGHT,
                adjoint=rule,
                inputs=[leaf],
                memory=memory,
            )
            (grad,) = torch.autograd.grad(z.sum(), leaf)
        assert grad.item() == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)


def test_a_merged_gradient_waits_for_every_sample():
    """Samples that stop early keep their own x: the gradient of each is that of the sample alone."""
    rate = torch.tensor([[0.02], [0.4], [0.85]], dtype=DOUBLE)
    (x, cot), w = data(d=9), torch.linspace(-1, 1, 9, dtype=DOUBLE)

    def run(i):
        xi, rule, grads, memory = x[i].clone().requires_grad_(), Implicit(Anderson(tol=1e-4)), [], Memory()
        for _ in range(2):
            z, s = deq(
                lambda s: torch.tanh(rate[i] * w * s.roll(1, 1) + xi),
                torch.zeros_like(xi),
                solver=TIGHT,
                adjoint=rule,
                inputs=[xi],
                memory=memory,
            )
            grads += torch.autograd.grad((z * cot[i]).sum(), xi)
        assert s.backward.final_used
        close(grads[:1], grads[1:], rtol=1e-12, atol=1e-14)  # foreseen or not: the same gradient
        return grads[0], s.backward

    grad, s = run(slice(None))
    assert len(set(s.steps.tolist())) == 3
    for i in range(3):
        torch.testing.assert_close(run(slice(i, i + 1))[0][0], grad[i], rtol=1e-12, atol=1e-14)


def test_slow_samples_do_not_change_fast_ones():
    """With a graph too: value, gradient and adjoint of a sample are those of the sample alone."""
    rate = torch.tensor([[0.05], [0.5], [0.9]], dtype=DOUBLE)
    (x, cot), w = data(d=9), torch.linspace(-1, 1, 9, dtype=DOUBLE)

    def run(i):
        xi = x[i].clone().requires_grad_()
        z, s = deq(
            lambda s: torch.tanh(rate[i] * w * s.roll(1, 1) + xi), torch.zeros_like(xi), solver=Anderson(tol=1e-4)
        )
        return z, torch.autograd.grad((z * cot[i]).sum(), xi)[0], s

    z, grad, solution = run(slice(None))
    assert len(set(solution.steps.tolist())) > 1
    for i in range(3):
        zi, gi, s = run(slice(i, i + 1))
        assert s.nfe == solution.steps[i] and s.backward.nfe == solution.backward.steps[i]
        close([zi[0], gi[0]], [z[i], grad[i]], rtol=1e-12, atol=1e-14)


def test_counts_of_the_other_rules():
    layer, (x, cot) = Layer(), data()
    _, _, s = gradients(layer, x, cot, Phantom(5, 0.5))
    assert s.nfe_total == s.nfe + 5 and s.backward is None
    _, z, s = gradients(layer, x, cot, Unrolled(7))
    assert s.nfe == s.nfe_total == 7 and s.residuals.shape == (7, 3) and z.equal(s.z) and s.reason == "max_iter"
    _, _, s = gradients(layer, x, cot, Unrolled(300))
    assert s.reason == "converged" and s.converged.all()
    _, _, s = gradients(layer, x, cot, Neumann(4))
    assert s.backward.nfe == 3


def test_constant_f_and_unused_branches():
    x = torch.randn(2, 3, dtype=DOUBLE).requires_grad_()
    z, s = deq(lambda z: 2 * x, torch.zeros(2, 3, dtype=DOUBLE))
    assert torch.autograd.grad(z.sum(), x)[0].equal(torch.full((2, 3), 2.0, dtype=DOUBLE)) and s.backward.nfe == 2
    fixed = torch.ones(2, 3, dtype=DOUBLE)
    z, _ = deq(lambda z: [0.5 * z[0] + x, fixed], [fixed, fixed], solver=TIGHT, adjoint=RULES[0])
    torch.testing.assert_close(torch.autograd.grad(z[0].sum() + z[1].sum(), x)[0], torch.full_like(x, 2.0).detach())


def test_known_constant_in_both_solves():
    layer, (x, cot) = Layer(rate=0.6), data()
    solver = Picard(L=0.6, tol=1e-10, max_iter=200)
    grads, _, s = gradients(layer, x, cot, Implicit(solver), solver)
    assert s.reason == "converged" and s.backward.reason == "converged" and s.nfe_total == s.nfe
    close(grads, gradients(layer, x, cot, Unrolled(200))[0], rtol=1e-7, atol=1e-9)


# ---- Jacobian regularisation -------------------------------------------------------------------------------------


def test_jacobian_regularisation_estimates_the_frobenius_norm():
    torch.manual_seed(0)
    layer, (x, _) = Layer(), data()
    z, s = layer(x, pair=True)
    fz, z_in = s.pair
    js = [
        torch.autograd.functional.jacobian(lambda t, i=i: layer.f(t[None], x[i : i + 1])[0], z_in[i]) for i in range(3)
    ]
    exact = sum(j.square().sum() for j in js) / (3 * 6)
    estimate = jacobian_regularisation(fz, z_in, samples=1500)
    assert abs(estimate / exact - 1) < 0.08
    grad = torch.autograd.grad(jacobian_regularisation(*layer(x, pair=True)[1].pair), layer.w)[0]
    assert torch.isfinite(grad).all() and grad.abs().sum() > 0


def test_jacobian_regularisation_of_bfloat16_is_summed_in_single_precision():
    z = torch.ones(2, 1000, dtype=torch.bfloat16, requires_grad=True)
    torch.manual_seed(0)
    found = jacobian_regularisation(0.5 * z, z, samples=2)
    torch.manual_seed(0)
    exact = sum((0.5 * torch.randn_like(z)).float().square().sum() for _ in range(2)) / 4000
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rule", [Implicit(TIGHT), JFB(), Phantom()])
def test_jacobian_regularisation_beside_the_loss(rule):
    layer, (x, cot) = Layer(), data()
    plain = gradients(layer, x, cot, rule)[0][:-1]
    z, s = layer(x, adjoint=rule, pair=True)
    torch.manual_seed(3)
    reg = jacobian_regularisation(*s.pair)
    alone = torch.autograd.grad(reg, [*layer.parameters()], retain_graph=True)
    both = torch.autograd.grad((z * cot).sum() + reg, [*layer.parameters()])
    close(both, [a + b for a, b in zip(plain, alone, strict=True)])


# ---- manners -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_no_grad_and_eval_and_deepcopy(rule):
    layer, (x, cot) = Layer(), data()
    with torch.no_grad():
        z, s = layer(x, adjoint=rule)
    assert not z.requires_grad and s.nfe == s.nfe_total
    twin = copy.deepcopy(layer).eval()
    close(gradients(layer, x, cot, rule)[0], gradients(twin, x, cot, rule)[0])
    copy.deepcopy(layer)  # after a backward pass too


@pytest.mark.parametrize("rule", RULES)
def test_several_forward_passes_before_one_backward(rule):
    layer, (x, cot) = Layer(), data()
    parts = [gradients(layer, x * s, cot, rule)[0][:-1] for s in (1.0, 2.0, -1.0)]
    total = sum((layer(x * s, adjoint=rule)[0] * cot).sum() for s in (1.0, 2.0, -1.0))
    close(torch.autograd.grad(total, [*layer.parameters()]), [sum(p) for p in zip(*parts, strict=True)])


@pytest.mark.parametrize("rule", RULES)
def test_backward_twice_is_the_same(rule):
    layer, (x, cot) = Layer(), data()
    z, _ = layer(x, adjoint=rule)
    loss = (z * cot).sum()
    first = torch.autograd.grad(loss, [*layer.parameters()], retain_graph=True)
    close(first, torch.autograd.grad(loss, [*layer.parameters()]), rtol=0, atol=0)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, [*layer.parameters()])


def test_equilibrium_of_an_equilibrium():
    """The same parameters in two layers, one feeding the other."""
    layer, (x, cot) = Layer(), data()
    results = []
    for rule in (Implicit(TIGHT), Unrolled(150)):
        z, _ = layer(layer(x, adjoint=rule)[0], adjoint=rule)
        results.append(torch.autograd.grad((z * cot).sum(), [*layer.parameters()]))
    close(*results, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_of_head_and_f(reentrant):
    layer, head, (x, _) = Layer(), nn.Linear(6, 2, dtype=DOUBLE), data()
    z, _ = layer(x)
    plain = torch.autograd.grad(head(z).tanh().sum(), [*layer.parameters(), *head.parameters()])
    z, _ = layer(x)
    checkpoint(lambda t: head(t).tanh(), z, use_reentrant=reentrant).sum().backward()
    close([p.grad for p in [*layer.parameters(), *head.parameters()]], plain)
    if not reentrant:  # inside f, and around the whole layer
        f = lambda s: checkpoint(layer.f, s, x, use_reentrant=False)  # noqa: E731
        z, _ = deq(f, torch.zeros_like(x), solver=TIGHT, adjoint=Implicit(TIGHT))
        close(torch.autograd.grad(head(z).tanh().sum(), [*layer.parameters()]), plain[:3])
        z = checkpoint(lambda t: layer(t)[0], x, use_reentrant=False)
        close(torch.autograd.grad(head(z).tanh().sum(), [*layer.parameters()]), plain[:3])


@pytest.mark.parametrize("rule", [Implicit(Anderson(tol=1e-2)), JFB(), Neumann(8), Phantom(8, 0.7)])
def test_autocast_loses_no_gradient(rule):
    """Bfloat16 inside f, float32 in the solver; no cast that was cached without graph is reused with graph."""
    layer, (x, cot) = Layer(d=16, rate=0.5, dtype=torch.float32), data(d=16, dtype=torch.float32)
    exact = gradients(layer, x, cot, rule, Anderson(tol=1e-4))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads, z, s = gradients(layer, x, cot, rule, Anderson(tol=1e-2))
    assert s.converged.all()
    for a, b in zip(grads, exact, strict=True):
        assert (a - b).norm() < 0.1 * b.norm()


def test_bfloat16_model():
    layer, (x, cot) = Layer(d=16, rate=0.5, dtype=torch.bfloat16), data(d=16, dtype=torch.bfloat16)
    grads, z, s = gradients(layer, x, cot, Implicit(Anderson(tol=2e-2)), Anderson(tol=2e-2))
    assert z.dtype == torch.bfloat16 and s.converged.all() and all(torch.isfinite(g).all() for g in grads)


def test_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer, (x, cot) = Layer(), data()
        plain = gradients(layer, x, cot, Implicit(TIGHT))[0][:-1]

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = layer

            def forward(self, x):
                return self.layer(x)[0]

        net = nn.parallel.DistributedDataParallel(Net())
        for _ in range(2):
            layer.zero_grad()
            (net(x) * cot).sum().backward()
            close([p.grad for p in layer.parameters()], plain)
    finally:
        torch.distributed.destroy_process_group()


def test_a_nan_sample_leaves_the_gradients_of_its_neighbours():
    layer, (x, cot) = Layer(), data(b=4)
    clean, z_clean, _ = gradients(layer, x, cot, Implicit(TIGHT))
    mask = torch.tensor([1.0, 1.0, float("nan"), 1.0], dtype=DOUBLE)[:, None]
    xi = x.clone().requires_grad_()
    z, s = deq(lambda z: layer.f(z, xi) * mask, torch.zeros_like(x), solver=TIGHT, adjoint=Implicit(TIGHT))
    grad = torch.autograd.grad((z * cot).sum(), xi)[0]
    good = [0, 1, 3]
    assert s.reason == "nan" and s.backward.reasons[2] == "nan" and torch.isfinite(s.z).all()
    close([z[good], grad[good]], [z_clean[good], clean[-1][good]])


@pytest.mark.parametrize("rule", RULES)
def test_nothing_is_left_behind(rule):
    """No cycle, no hook: the graph is gone when the loss is, without the garbage collector."""
    layer, (x, cot) = Layer(), data()
    gc.collect()
    gc.disable()
    try:
        seen = []
        for _ in range(3):
            z, s = layer(x, adjoint=rule, pair=not isinstance(rule, Unrolled))
            seen += [weakref.ref(z), weakref.ref(s.z), weakref.ref(s)]
            seen += [weakref.ref(t) for t in s.pair or ()]
            (z * cot).sum().backward()
            del z, s
        assert not [r for r in seen if r() is not None]
    finally:
        gc.enable()


def test_memory_does_not_grow_with_iterations():
    """What autograd keeps between forward and backward: independent of the solver's steps, unlike unrolling."""
    layer, (x, _) = Layer(d=40, rate=0.99), data(d=40)

    @contextlib.contextmanager
    def kept(total):
        def pack(t):
            total.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            yield

    sizes = {}
    for steps in (5, 40):
        for rule in (Implicit(Picard(tol=1e-3)), Unrolled(steps)):
            total = []
            with kept(total):
                layer(x, solver=Picard(tol=1e-30, max_iter=steps), adjoint=rule)
            sizes[type(rule).__name__, steps] = sum(total)
    assert sizes["Implicit", 5] == sizes["Implicit", 40]
    assert sizes["Unrolled", 40] > 6 * sizes["Unrolled", 5]


def test_throw():
    layer, (x, _) = Layer(rate=0.99), data()
    with pytest.raises(ConvergenceError):
        layer(x, solver=Picard(tol=1e-12, max_iter=3), throw=True)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Phantom(0), r"k = 0: must be a whole number >= 1"),
        (lambda: Phantom(3, 0.0), r"lam = 0.0: must be in \(0, 1\]"),
        (lambda: Neumann(0), r"k = 0"),
        (lambda: Unrolled(-1), r"k = -1"),
        (lambda: Implicit("anderson"), r"solver = anderson: must be a solver"),
        (lambda: deq(torch.cos, torch.zeros(1, 1), adjoint="ift"), r"adjoint = ift: must be one of Implicit"),
        (lambda: jacobian_regularisation(torch.ones(1), torch.ones(1), 0), r"samples = 0"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_unknown_keywords_raise():
    with pytest.raises(TypeError):
        deq(torch.cos, torch.zeros(1, 1), tol=1e-3)
    with pytest.raises(TypeError):
        Phantom(5, lamda=0.5)


def test_unrolled_can_throw():
    with pytest.raises(ConvergenceError, match="max_iter"):
        deq(torch.cos, torch.zeros(2, 3), adjoint=Unrolled(2), solver=Anderson(tol=1e-10), throw=True)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("solver", [Anderson(tol=1e-3), Picard(tol=1e-3), Broyden(tol=1e-3)])
def test_implicit_is_never_jfb(solver, given):
    """However small the first residual: the cotangent holds g J for every sample, also beside one that needs more."""
    torch.manual_seed(0)
    A = torch.randn(2, 6, 6, dtype=DOUBLE)
    A = (A / torch.linalg.matrix_norm(A, 2)[:, None, None]).requires_grad_()
    rate = torch.tensor([4e-4, 0.02], dtype=DOUBLE)[:, None]
    b, w = torch.randn(2, 6, dtype=DOUBLE), torch.randn(2, 6, dtype=DOUBLE)
    rule, memory = Implicit(solver), Memory()
    for _ in range(2):  # the second time the length of the solve is foreseen
        z, s = deq(
            lambda z: rate * torch.einsum("bij,bj->bi", A, z) + b,
            torch.zeros_like(b),
            solver=Anderson(tol=1e-12),
            adjoint=rule,
            inputs=[A] if given else [],
            memory=memory,
        )
        (got,) = torch.autograd.grad((w * z).sum(), A)
    x = torch.linalg.solve((torch.eye(6, dtype=DOUBLE) - rate[:, :, None] * A.detach()).mT, w)
    exact, jfb = (torch.einsum("bi,bj->bij", rate * c, z.detach()) for c in (x, w))
    error = (got - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert s.backward.steps.tolist() == [2, 2] and s.backward.reason == "converged"
    assert (jfb - exact)[0].norm() > 1e-4 * exact[0].norm() and error[0] < 2e-7 and error[1] < 1e-3


def test_one_product_may_be_all():
    layer = Layer(rate=1e-6)
    x = torch.randn(3, 6, dtype=DOUBLE)
    rule = Implicit(Anderson(tol=1e-3, max_iter=1))
    _, _, s = gradients(layer, x, torch.randn(3, 6, dtype=DOUBLE), rule)
    assert s.backward.nfe == 1 and s.backward.reason == "converged"


def test_what_deq_cannot_do_is_refused():
    z = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="solver = 'anderson': must be a solver"):
        deq(torch.tanh, z, solver="anderson")
    with pytest.raises(ValueError, match="pair = True: must be False for Unrolled"):
        deq(torch.tanh, z, adjoint=Unrolled(3), pair=True)
    with pytest.raises(ValueError, match="steps = 1: must be at least 2"):
        Implicit(Picard(steps=1))


def test_a_map_that_depends_on_nothing_has_no_gradient():
    w = torch.ones(3, requires_grad=True)
    z, _ = deq(lambda z: torch.ones_like(z), torch.zeros(2, 3), inputs=[w])
    assert torch.autograd.grad((z * w).sum(), w)[0].tolist() == [2.0] * 3
