"""The certified family (block = "potential"): its constants from above, from below and under attack."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipmdeq.certificate import Prover, certify
from lipmdeq.jacobian import JacobianProbe
from lipmdeq.model import build
from lipmdeq.model.potential import Potential, PotentialMap, UnitConv, matrix_norm_bound
from lipmdeq.norms import conv_norm
from lipmdeq.solvers import Anderson
from lipmdeq.solvers.gradients import Implicit


def small(n=3, image_size=16, p=0.0, tau=0.9, **changes):
    net = build("cpu", block="potential", n=n, image_size=image_size, groups=2, p=p, tau=tau, **changes)
    return net.double()


def shaken(net, scale=1.0, seed=0):
    """The same with weights that no initialisation would give."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.f.parameters():
            p.mul_(1 + scale * torch.randn(p.shape, generator=g).to(p)).add_(
                0.1 * torch.randn(p.shape, generator=g).to(p)
            )
    return net


def dense(op, shape):
    """The matrix of a linear map on (C, H, W)."""
    eye = torch.eye(int(np.prod(shape)), dtype=torch.double).view(-1, *shape)
    return op(eye).flatten(1).T


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (3, 7), (40, 40), (64, 8)])
def test_matrix_norm_bound_is_above_and_tight(shape):
    torch.manual_seed(0)
    for scale in (1e-12, 1.0, 1e9):
        w = scale * torch.randn(shape, dtype=torch.double)
        true = float(torch.linalg.matrix_norm(w, 2))
        assert true <= float(matrix_norm_bound(w)) * (1 + 1e-12) <= true * min(shape) ** (1 / 1024) * (1 + 1e-9)
    q = torch.linalg.qr(torch.randn(32, 32, dtype=torch.double))[0]  # all singular values equal: the worst case
    assert 1 <= float(matrix_norm_bound(q)) <= 32 ** (1 / 1024) + 1e-12


def test_matrix_norm_bound_differentiates_like_the_norm():
    torch.manual_seed(0)
    w = torch.randn(6, 9, dtype=torch.double, requires_grad=True)
    (g,) = torch.autograd.grad(matrix_norm_bound(w), w)
    u, _, v = torch.linalg.svd(w.detach())
    assert torch.allclose(g, torch.outer(u[:, 0], v[0]), atol=1e-3)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_unit_convolution_has_norm_one_for_any_weight(k, scale):
    torch.manual_seed(k)
    conv = UnitConv(5, 7, k, (6, 6))
    with torch.no_grad():
        conv.weight.mul_(scale)
    for size in ((6, 6), (2, 4), (12, 8)):
        norm = conv_norm(conv.kernel().detach().double(), size, stride=k)
        assert 0.99 <= norm.value <= 1.0
    with torch.no_grad():
        conv.weight.zero_()
    assert not conv.kernel().any()


def test_bounds_leave_room_for_single_precision():
    """Matrices of one row, for which the bound is the norm itself: rounding may not take it below."""
    torch.manual_seed(0)
    for _ in range(50):
        conv, block = UnitConv(7, 1, 1, (4, 4)), Potential(1, 2, 0.0, (4, 4))
        with torch.no_grad():
            conv.weight.normal_()
            block.weight.normal_()
        assert 1 - 2e-4 < float(conv.kernel().detach().double().norm()) <= 1.0
        assert 9 * float(block.weight.detach().double().square().sum()) <= float(block.T().detach())
    f = build("cpu", block="potential", tau=0.9).f
    for _ in range(50):
        with torch.no_grad():
            f.weights.normal_()
        assert 0.9 * (1 - 1e-3) < float(torch.linalg.matrix_norm(f.mixing().detach().double(), 2)) <= 0.9


def test_mixing_is_a_softmax_over_the_other_branches():
    """M by hand from its definition, weights in an order that tells rows from columns and own from other shares."""
    f = small(n=3, tau=0.7, alpha2=0.2).f
    with torch.no_grad():
        f.weights.copy_(torch.tensor([[9.0, 0.0, 1.0], [2.0, -5.0, 0.0], [0.0, 3.0, 4.0]]))
    share = np.array([[0, 1, np.e], [np.e**2, 0, 1], [1, np.e**3, 0]])
    mix = 0.8 * np.eye(3) + 0.2 * share / share.sum(1, keepdims=True)
    np.testing.assert_allclose(f.mixing().detach().numpy(), 0.7 * mix / np.linalg.norm(mix, 2), rtol=2e-3)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 5), (6, 6)])
def test_T_is_above_the_square_of_the_norm(size):
    """Against the dense operator: random kernels and bad ones, of any scale."""
    torch.manual_seed(0)
    for kind in range(5):
        block = Potential(3, 2, 0.0, size).double()
        with torch.no_grad():
            if kind == 1:
                block.weight.normal_(0, 5.0)
            elif kind == 2:  # rows of very different sizes
                block.weight.mul_(torch.logspace(-8, 3, 6, dtype=torch.double)[:, None, None, None])
            elif kind == 3:  # all kernels equal and constant: windows overlap as badly as they can
                block.weight.fill_(0.3)
            elif kind == 4:
                block.weight.mul_(1e100)
        k = dense(lambda x, w=block.weight: F.conv2d(x, w, padding=1), (3, *size)).detach()
        assert float(torch.linalg.matrix_norm(k, 2)) ** 2 <= float(block.T())


def test_T_is_attained():
    """Constant kernels on a large map: T is ‖K‖² up to the border, so no smaller factor than 9 would do."""
    block = Potential(2, 1, 0.0, (24, 24)).double()
    with torch.no_grad():
        block.weight.fill_(0.5)
    norm = conv_norm(block.kernel().detach(), (24, 24), padding=1)
    assert 0.97 <= norm.value <= 1.0


@pytest.mark.parametrize("mutant", [1.0, 1.1, 2.0])
def test_residual_layer_is_symmetric_and_not_expansive(mutant):
    """The Jacobian is symmetric with eigenvalues in [−1, 1]; with a T that is too small the certificate's own formula holds."""
    torch.manual_seed(0)
    block = Potential(2, 3, 0.0, (6, 6)).double()
    with torch.no_grad():
        block.weight.fill_(0.5).add_(0.01 * torch.randn_like(block.weight))
    true = block.T
    block.T = lambda: true() / mutant
    s = conv_norm(block.kernel().detach(), (6, 6), padding=1).value ** 2
    bound = max(1.0, 2 * s - 1)
    assert Prover(block, {block: (6, 6)})(block)[0].value == pytest.approx(bound)
    u = 50.0 + torch.randn(1, 6, 6, 6, dtype=torch.double)  # all units on: the strongest step
    z = torch.randn(1, 2, 6, 6, dtype=torch.double)
    jac = torch.autograd.functional.jacobian(lambda t: block(t, u), z).view(72, 72)
    assert torch.allclose(jac, jac.T, atol=1e-12)
    norm = float(torch.linalg.matrix_norm(jac, 2))
    assert norm <= bound * (1 + 1e-9)
    if mutant == 1.0:
        assert bound == 1.0
    elif mutant == 2.0:
        assert norm > 1.2 and norm > 0.9 * bound  # the bound says what happens


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("tau", [0.3, 0.95])
def test_random_pairs_and_jacobians_stay_below_tau(p, train, tau):
    torch.manual_seed(1)
    net = shaken(small(n=2, image_size=8, p=p, tau=tau)).train(train)
    x = torch.randn(3, 3, 8, 8, dtype=torch.double)
    f, z0, _ = net.problem(x)
    worst = 0.0
    for scale in (0.01, 1.0, 100.0):
        a = [scale * torch.randn_like(t) for t in z0]
        b = [t + scale * 10 ** float(torch.empty(1).uniform_(-4, 1)) * torch.randn_like(t) for t in a]
        with torch.no_grad():
            fa, fb = f(a), f(b)
        top = sum((s - t).square().flatten(1).sum(1) for s, t in zip(fa, fb, strict=True))
        low = sum((s - t).square().flatten(1).sum(1) for s, t in zip(a, b, strict=True))
        worst = max(worst, float((top / low).sqrt().max()), float(JacobianProbe(f, a).norm(40).max()))
    assert 0.2 * tau < worst <= tau
    assert net.f.lipschitz() <= tau


def test_certificate_proves_tau_in_both_modes_and_at_other_sizes():
    net = shaken(small(p=0.3))
    proof = certify(net, measure=False, progress=False)
    for mode in (proof.test, proof.train):
        assert 0.85 < mode["perron"] <= mode["spectral"] * (1 + 1e-9) <= 0.9 * (1 + 1e-9)
    assert certify(net, 32, measure=False, progress=False).train["spectral"] <= 0.9 * (1 + 1e-9)


def test_certificate_does_not_trust_the_construction():
    """A T that is too small, a path of norm 1.1, an M that is too large: each one is seen."""
    honest = certify(small(n=2), measure=False, progress=False).test["perron"]
    net = small(n=2)
    block = net.f.residual[0]
    with torch.no_grad():
        block.weight.fill_(0.5)
    exact = block.T
    block.T = lambda: exact() / 1.3
    assert certify(net, measure=False, progress=False).test["perron"] > honest * 1.05
    net = small(n=2)
    conv = net.f.paths["1to2"][0]
    kernel = conv.kernel
    conv.kernel = lambda: 1.1 * kernel()
    assert certify(net, measure=False, progress=False).test["perron"] > honest * 1.001
    net = small(n=2)
    mixing = net.f.mixing
    net.f.mixing = lambda: 1.1 * mixing()
    assert certify(net, measure=False, progress=False).test["perron"] > honest * 1.09


def test_comparison_matrix_has_every_layer_in_its_place():
    """N_ij = M_ij·‖P_ij‖·L_j with constants other than 1: the path from 1 to 3 has two convolutions, L_2 is branch 2's alone."""
    f = small(n=3).f
    mixing = f.mixing().detach().numpy()
    paths = f.matrix(lambda m: 2.0 if isinstance(m, UnitConv) else None) / mixing
    np.testing.assert_allclose(paths, [[1, 2, 2], [2, 1, 2], [4, 2, 1]])
    layers = f.matrix(lambda m: 3.0 if m is f.residual[1] else None) / mixing
    np.testing.assert_allclose(layers, [[1, 3, 1], [1, 3, 1], [1, 3, 1]])


@pytest.mark.parametrize("train", [False, True])
def test_parameter_ascent_does_not_break_the_bound_and_comes_close(train):
    """Gradient ascent on ‖J‖ over all weights, in both modes: it stays below τ, and reaches .95 of it."""
    torch.manual_seed(0)
    net = small(n=2, image_size=8, p=0.2 if train else 0.0, tau=0.8).train(train)
    x = torch.randn(1, 3, 8, 8, dtype=torch.double)
    optimizer = torch.optim.Adam(net.f.parameters(), lr=0.05)
    v, seen = None, []
    for _ in range(60):
        torch.manual_seed(3)
        f, z0, _ = net.problem(x)
        probe = JacobianProbe(f, [t + 0.1 for t in z0])
        v = v or [torch.randn_like(t) for t in z0]
        for _ in range(2):
            v = [t.detach() for t in probe.vjp(probe.jvp(v))]
            size = sum(t.square().sum() for t in v).sqrt()
            v = [t / size for t in v]
        with torch.enable_grad():
            out = torch.autograd.grad(probe.back, probe.dummy, v, create_graph=True)
            norm = sum(t.square().sum() for t in out).sqrt()
        seen.append(float(norm.detach()))
        optimizer.zero_grad()
        (-norm).backward()
        optimizer.step()
    assert max(seen) <= 0.8 * (1 + 1e-9)
    assert max(seen) >= 0.95 * 0.8


def test_z_ascent_stays_below_the_certificate():
    torch.manual_seed(0)
    net = shaken(small(n=2, image_size=8)).eval()
    L = certify(net, measure=False, progress=False).test["spectral"]
    with torch.no_grad():
        f, z0, _ = net.problem(torch.randn(2, 3, 8, 8, dtype=torch.double))
    a = [torch.randn_like(t).requires_grad_() for t in z0]
    d = [torch.randn_like(t).requires_grad_() for t in z0]
    optimizer, best = torch.optim.Adam([*a, *d], lr=0.1), 0.0
    for _ in range(80):
        fa, fb = f(a), f([s + t for s, t in zip(a, d, strict=True)])
        top = sum((s - t).square().flatten(1).sum(1) for s, t in zip(fa, fb, strict=True))
        ratio = (top / sum(t.square().flatten(1).sum(1) for t in d)).sqrt()
        best = max(best, float(ratio.detach().max()))
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()
    assert 0.5 * L < best <= L


def test_gradient_equals_finite_differences():
    torch.manual_seed(0)
    net = shaken(small(n=3, image_size=4, stem_channels=2), 0.1).train()
    net.solver, net.adjoint = Anderson(tol=1e-12, max_iter=300), Implicit(Anderson(tol=1e-12, max_iter=300))
    x = torch.randn(2, 3, 4, 4, dtype=torch.double)
    net.stem.eval(), net.inject.eval(), net.down.eval(), net.head.eval()
    z, _ = net.equilibrium(x)
    sum(t.square().sum() for t in z).backward()
    found = {k: p.grad.clone() for k, p in net.named_parameters() if p.grad is not None}
    for name in ("f.residual.0.weight", "f.paths.1to2.0.weight", "f.weights", "f.residual.1.bias", "stem.0.0.weight"):
        p, eps = net.get_parameter(name), 1e-6
        index = tuple(0 if i else -1 for i in range(p.ndim))
        if name == "f.weights":
            index = (0, 1)
        values = []
        for sign in (1, -1):
            other = copy.deepcopy(net)
            with torch.no_grad():
                other.get_parameter(name)[index] += sign * eps
                values.append(sum(t.square().sum() for t in other.equilibrium(x)[0]))
        assert float(found[name][index]) == pytest.approx(float(values[0] - values[1]) / (2 * eps), rel=1e-5, abs=1e-8)


def test_the_last_product_is_free_here_too():
    """All that f closes over is listed, so that deq can join the last product with the gradient (no fall-back)."""
    torch.manual_seed(0)
    net = small(n=2, image_size=8)
    f, z0, inputs = net.problem(torch.randn(2, 3, 8, 8, dtype=torch.double))
    out = f([t.requires_grad_() for t in z0])
    grads = torch.autograd.grad(sum(t.sum() for t in out), inputs, allow_unused=True)
    assert all(g is not None for g in grads)
    z, solution = net.equilibrium(torch.randn(2, 3, 8, 8, dtype=torch.double))
    sum(t.sum() for t in z).backward()
    assert solution.backward.final_used


def test_dropout_keeps_the_bound_and_scales_at_test():
    torch.manual_seed(0)
    block = Potential(3, 4, 0.25, (5, 5)).double()
    z = torch.randn(2000, 3, 5, 5, dtype=torch.double)[:1].expand(4000, -1, -1, -1)
    masks = (block.drop.draw(4000, 12, z) > 0).double()
    mean = block(z, None, masks).mean(0)
    assert torch.allclose(mean, block.eval()(z[:1])[0], atol=0.02)


def test_masks_are_zeros_and_ones():
    """A mask of 1/(1−p) would break 0 ≤ S ≤ I, and with it the bound in training."""
    net = small(n=2, image_size=8, p=0.4).train()
    for mask in net.f.masks(torch.zeros(50, 1, dtype=torch.double)):
        assert set(mask.unique().tolist()) == {0.0, 1.0} and 0.5 < float(mask.mean()) < 0.7
    assert net.eval().f.masks(torch.zeros(50, 1)) == [None, None]


@pytest.mark.parametrize(
    "bad, match",
    [
        (dict(tau=1.0), "tau = 1.0"),
        (dict(tau=0.0), "tau = 0.0"),
        (dict(block="x"), "block = 'x'"),
        (dict(injection="none"), "injection = 'none'"),
    ],
)
def test_bad_configurations_are_named(bad, match):
    with pytest.raises(ValueError, match=match):
        build("cpu", **{"block": "potential", **bad})


def test_one_branch_works():
    net = small(n=1, image_size=8)
    assert isinstance(net.f, PotentialMap) and net.f.lipschitz() <= 0.9 * (1 + 1e-12)
    assert net(torch.randn(2, 3, 8, 8, dtype=torch.double)).shape == (2, 10)


@pytest.mark.parametrize("model", ["lipschitz", "mdeq"])
def test_image_in_every_branch_for_the_papers_block(model):
    torch.manual_seed(0)
    net = build("cpu", model, n=3, image_size=16, injection="all")
    x = torch.randn(2, 3, 16, 16)
    u = net.injected(x)
    assert [t.shape[1:] for t in u] == [(8, 16, 16), (16, 8, 8), (32, 4, 4)]
    net(x).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_constants_hold_under_autocast():
    """The user's own autocast would form the products of the bounds in half precision, which their margin does not cover."""
    torch.manual_seed(0)
    f = build("cpu", block="potential", tau=0.999).f
    with torch.no_grad():
        f.weights.normal_()
    convs = [m for m in f.modules() if isinstance(m, UnitConv)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixing, kernels = f.mixing(), [m.kernel() for m in convs]
    assert float(torch.linalg.matrix_norm(mixing.double(), 2)) <= 0.999
    assert max(float(torch.linalg.matrix_norm(k.double().flatten(1), 2)) for k in kernels) <= 1


def test_half_precision_is_bounded_in_single():
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        w = (torch.randn(30, 1, generator=g) @ torch.randn(1, 40, generator=g)).bfloat16()
        assert float(torch.linalg.matrix_norm(w.double(), 2)) <= float(matrix_norm_bound(w)) * (1 + 1e-4)


@pytest.mark.parametrize("tau", [0.6, 1 - 1e-6])
def test_one_branch_keeps_room_for_rounding(tau):
    assert build("digits", block="potential", n=1, tau=tau).f.lipschitz() <= tau


def test_a_path_of_weight_zero_is_certified():
    net = build("cpu", block="potential")
    with torch.no_grad():
        net.f.weights[0, 1] = -1000.0
    assert certify(net, dtype=torch.bfloat16, measure=False, progress=False).certified
