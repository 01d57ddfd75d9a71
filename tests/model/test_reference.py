"""The fast f equals the printed one, in value and gradient, for every variant; no public module writes into its input."""

import itertools

import pytest
import torch
from torch import nn

from lipmdeq import model
from lipmdeq.bounds import ABLATIONS
from lipmdeq.model import (
    GN,
    MDEQ,
    MGN,
    Bottleneck,
    Chain,
    Conv,
    ConvNorm,
    DownPath,
    FixedPointMap,
    Fusion,
    Head,
    PostFusion,
    Potential,
    PotentialMap,
    ResidualBlock,
    SReLU,
    UnitConv,
    Up,
    UpPath,
    VariationalDropout,
    configure,
    reference,
)
from lipmdeq.model.fused import normed

ROWS = [("lipschitz", None), ("mdeq", None)] + [("lipschitz", row) for row in ABLATIONS if row != "MDEQ"]
SIZES = {1: (5, 7), 2: (6, 10), 3: (12, 20), 4: (24, 8)}  # of branch 1: odd in the last branch, and not square


def shaken(f, train):
    """The map in double precision with weights that no initialisation would give."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in f.named_parameters():
            p.copy_(0.5 * torch.rand_like(p) + 0.5 if name.endswith(".g") else 0.5 * torch.randn_like(p))
    return f.double().train(train)


def small(n, name="lipschitz", ablation=None, **changes):
    channels = (4, 6, 8, 2)[:n]
    sizes = dict(channels=channels, head_channels=(2,) * n, groups=2, expansion=3, image_size=8, p=0.3, head_features=8)
    return configure("cpu", name, ablation, n=n, **{**sizes, **changes})


def state(f, n, injection, channels, form=torch.channels_last):
    """Random z and u for f, (B, C_i, H_i, W_i); the image enters the first branch only, or all."""
    h, w = SIZES[n]
    wide = [
        block.weight.shape[0] if isinstance(block, Potential) else c
        for block, c in zip(f.residual, channels, strict=True)
    ]

    def maps(widths):
        found = [torch.randn(3, c, h >> i, w >> i, dtype=torch.double) for i, c in enumerate(widths)]
        return [t.to(memory_format=form).requires_grad_() for t in found]

    u = maps(wide)
    return maps(channels), [t if i == 0 or injection == "all" else None for i, t in enumerate(u)]


def compare(f, z, u, run, masks):
    """run(z, u) against the reference: with a graph, in a solve, and all gradients."""
    leaves = [t for t in (*z, *u) if t is not None] + list(f.parameters())
    cot = [torch.randn_like(t) for t in z]
    kept = [t.detach().clone() for t in z]
    plain = reference.certified if isinstance(f, PotentialMap) else reference.paper
    want = plain(f, z, u, masks or [None] * f.n)
    recorded = run(z, u)
    with torch.no_grad():
        solved = run(z, u)
    exact = dict(rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(recorded, want, **exact)
    torch.testing.assert_close(solved, want, **exact)
    assert all(torch.equal(a, b) for a, b in zip(kept, z, strict=True))
    grads = [torch.autograd.grad(out, leaves, cot, allow_unused=True) for out in (recorded, want)]
    for got, expected in zip(*grads, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            size = float(expected.abs().max())
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12 * max(1.0, size))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name, ablation", ROWS)
def test_fused_is_the_paper(name, ablation, n, train):
    """(M1)–(M3) and (L1)–(L3): both modes, one to four branches, with the image in one branch or in all."""
    cfg = small(n, name, ablation)
    f = shaken(FixedPointMap(cfg), train)
    for injection, form in (("first", torch.channels_last), ("all", torch.contiguous_format)):
        z, u = state(f, n, injection, cfg.channels, form)
        masks = f.masks(z[0])
        assert (masks[0] is not None) == train
        compare(f, z, u, lambda z, u, masks=masks: f(z, u, masks), masks)


@pytest.mark.parametrize(
    "post_affine, weight_norm, alpha1", [(True, True, 0.9), (True, False, 0.1), (False, True, 0.5)]
)
def test_fused_is_the_paper_in_rarer_settings(post_affine, weight_norm, alpha1):
    changes = dict(post_affine=post_affine, weight_norm=weight_norm, alpha1=alpha1, gamma=0.6)
    for name, ablation in (("lipschitz", None), ("mdeq", None), ("lipschitz", "S2")):
        cfg = small(3, name, ablation, **(changes if name == "lipschitz" else {"post_affine": post_affine}))
        f = shaken(FixedPointMap(cfg), True)
        z, u = state(f, 3, "first", cfg.channels)
        masks = f.masks(z[0])
        compare(f, z, u, lambda z, u, f=f, masks=masks: f(z, u, masks), masks)
        compare(f, z, u, lambda z, u, f=f: f(z, u[0]), None)  # u of the first branch alone, dropout off


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_fused_is_the_certified_family(n, train, p):
    """(P1)–(P2): both modes, one to four branches."""
    for injection in ("first", "all"):
        cfg = small(n, block="potential", p=p, injection=injection)
        f = shaken(PotentialMap(cfg), train)
        z, u = state(f, n, injection, cfg.channels)
        masks = f.masks(u[0])
        assert (masks[0] is not None) == (train and p > 0)

        def run(z, u, f=f, masks=masks):
            f.masks = lambda like: masks
            return f(z, u)

        compare(f, z, u, run, masks)


@pytest.mark.parametrize("block", ["paper", "potential"])
def test_hidden_units_are_those_whose_relu_is_on(block, monkeypatch):
    """The first ReLU of each residual layer of the reference is asked."""
    cfg = small(3, block=block, injection="all")
    f = shaken((PotentialMap if block == "potential" else FixedPointMap)(cfg), train=False)
    z, u = state(f, 3, "all", cfg.channels)
    told, relu = f.hidden(z, u), torch.nn.functional.relu
    plain = reference.potential if block == "potential" else reference.residual
    for i, layer in enumerate(f.residual):
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "relu", lambda t, seen=seen: seen.append(relu(t) > 0) or relu(t))
            plain(layer, z[i], u[i])
        assert torch.equal(told[i], seen[0]) and 0.1 < seen[0].double().mean() < 0.9


@pytest.mark.parametrize("block", ["paper", "potential"])
def test_compiled_is_the_reference(block):
    """What the compiler is given is f as well (its own kernels are not tried here: they need a C++ compiler)."""
    cfg = small(2, block=block, p=0.0)
    f = shaken((PotentialMap if block == "potential" else FixedPointMap)(cfg), True)
    z, u = state(f, 2, "all", cfg.channels)
    held = f.hold(u)
    compare(f, z, u, torch.compile(lambda z, u: f(z, u, held if block == "paper" else None), backend="aot_eager"), None)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_norm_compiled_is_the_same(affine, autocast):
    """Under the compiler the shift of the channels is a product of matrices: same values, same gradients."""
    torch.manual_seed(0)
    norm = MGN(4, 12, affine, gamma=1.5).to(torch.float32 if autocast else torch.float64)
    for p in norm.parameters():
        p.data.uniform_(-1, 1)
    y = torch.randn(3, 12, 5, 4, dtype=torch.float32 if autocast and affine else torch.float64).requires_grad_()
    cot, found = torch.randn_like(y), []
    for forward in (normed, torch.compile(normed, backend="aot_eager")):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = forward(norm, y, 0.3)
        found.append([out, *torch.autograd.grad((out * cot).sum(), [y, *norm.parameters()])])
    for plain, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- purity


def every_module(norm):
    """One of each public module, (module, arguments); norms of this kind."""

    def pair(cin, cout, k, stride=1):
        return ConvNorm(Conv(cin, cout, k, stride, size=(8, 8)), norm(2, cout))

    x, low, mask = torch.randn(2, 4, 8, 8), torch.randn(2, 6, 4, 4), torch.rand(2, 4).round()
    paths = [[None, UpPath(pair(6, 4, 1), 1)], [DownPath([pair(4, 6, 3, 2)], 0.5), None]]
    block = ResidualBlock([Conv(4, 8), Conv(8, 4)], [norm(2, 8), norm(2, 4), norm(2, 4)], 0.5, 0.3, 0.5)
    cfg = small(2, norm="mgn" if norm is MGN else "gn")
    certified = small(2, block="potential")
    wide = torch.randn(2, 12, 8, 8)
    return [
        (norm(2, 4), (x,)),
        (norm(2, 4, affine=False, gamma=0.5), (x,)),
        (Conv(4, 4), (x,)),
        (SReLU(0.5), (x,)),
        (SReLU(1.0), (x,)),
        (VariationalDropout(0.3), (x, mask)),
        (Up(2), (x,)),
        (Chain(norm(2, 4), SReLU(0.5)), (x,)),
        (pair(4, 4, 3), (x,)),
        (DownPath([pair(4, 4, 3, 2), pair(4, 4, 3, 2)], 0.5), (x,)),
        (UpPath(pair(4, 4, 1), 1), (x,)),
        (block, (x,)),
        (block, (x, torch.randn_like(x), mask)),
        (PostFusion(pair(4, 4, 1), 0.5), (x,)),
        (Fusion(paths, [[0, 1], [1, 0]], 0.3), ([x, low],)),
        (FixedPointMap(cfg), ([x, low], torch.randn_like(x), [mask, None])),
        (UnitConv(4, 6, 2, (8, 8)), (x,)),
        (Potential(4, 3, 0.3, (8, 8)), (x, wide, torch.rand(2, 12).round())),
        (PotentialMap(certified), ([x, low], [wide, None])),
        (Bottleneck(4, 2), (x,)),
        (Head(cfg), ([x, low],)),
        (MDEQ(cfg), (torch.randn(2, 3, 8, 8),)),
        (MDEQ(certified), (torch.randn(2, 3, 8, 8),)),
    ]


def tensors(tree):
    """All tensors of nested lists and tuples."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [t for part in tree for t in tensors(part)] if isinstance(tree, list | tuple) else []


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("norm", [GN, MGN])
def test_no_public_module_writes_into_its_input(norm, train):
    """In both modes, with and without a graph, in both memory formats: input untouched, two calls with equal values."""
    torch.manual_seed(0)
    seen = {GN, MGN}
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
    for module, arguments in every_module(norm):
        seen.add(type(module.train(train)))
        for mode, form in itertools.product(modes, (torch.channels_last, torch.contiguous_format)):
            for t in tensors(arguments):
                if t.dim() == 4:
                    t.data = t.contiguous(memory_format=form)
            before, values = [t.clone() for t in tensors(arguments)], []
            for _ in range(2):
                torch.manual_seed(1)  # dropout
                with mode():
                    values.append([t.clone() for t in tensors(module(*arguments))])
            for a, b in zip([*before, *values[0]], [*tensors(arguments), *values[1]], strict=True):
                assert torch.equal(a, b), (type(module).__name__, mode.__name__, form)
    assert seen == {c for c in vars(model).values() if isinstance(c, type) and issubclass(c, nn.Module)}


@pytest.mark.parametrize("changes", [{}, {"block": "potential"}])
def test_a_solve_under_autocast_computes_what_is_recorded(changes):
    """Written over a narrower tensor, the state would lose digits in a solve that the recorded evaluation has."""
    torch.manual_seed(0)
    net = model.build("cpu", **changes).eval()
    with torch.autocast("cpu", torch.bfloat16):
        u = net.injected(torch.randn(2, 3, 16, 16))
        z = [torch.randn_like(t, dtype=torch.float32) for t in net.z0(u[0])]
        held = net.f.hold(u)
        recorded = net.f(z, u, held)
        with torch.no_grad():
            solved = net.f(z, u, held)
    for a, b in zip(recorded, solved, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
