"""The certificate against attacks: what is proved holds, what cannot be proved is refused, changed weights are noticed."""

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

from lipmdeq import bounds
from lipmdeq.certificate import Prover, certify, conv_sizes, fingerprint, mixed_1x1_norm, readings
from lipmdeq.jacobian import JacobianProbe
from lipmdeq.model import build
from lipmdeq.model.layers import MGN, Conv
from lipmdeq.model.potential import Potential
from lipmdeq.norms import conv_norm


def tiny(a=0.4, seed=0, scale=0.5, **changes):
    """Three branches of 8 channels at 8x8; weights so large that every constraint is active."""
    torch.manual_seed(seed)
    sizes = dict(channels=(8, 8, 8), image_size=8, expansion=2, groups=2, head_channels=(4, 4, 4), head_features=16)
    net = build("cpu", a=a, **{**sizes, **changes}).double()
    with torch.no_grad():
        for p in net.f.parameters():
            p.normal_(0, scale)
    net.constrain()
    return net.to(memory_format=torch.channels_last)


def state(net, batch, seed=1):
    torch.manual_seed(seed)
    u = torch.randn(batch, net.cfg.channels[0], *net.cfg.sizes()[0], dtype=torch.double)
    return [torch.randn_like(t) for t in net.z0(u)], u


def full_jacobian(net, z, u):
    """Dense ∂f/∂z for one sample, and the branch of each coordinate."""
    sizes = [t[0].numel() for t in z]

    def flat(v):
        parts = [p.view_as(t) for p, t in zip(v.split(sizes), z, strict=True)]
        return torch.cat([t.flatten() for t in net.f(parts, u)])

    j = torch.autograd.functional.jacobian(flat, torch.cat([t.flatten() for t in z]), vectorize=True)
    return j, np.repeat(np.arange(len(z)), sizes)


@pytest.mark.parametrize("a", [0.1, 0.4, 1.0])
def test_full_jacobian_obeys_every_reading(a):
    net = tiny(a).eval()
    cert = certify(net, measure=False, progress=False)
    z, u = state(net, 1)
    j, branch = full_jacobian(net, z, u)
    d = torch.as_tensor(cert.test["D"], dtype=torch.double)[branch]
    norm = torch.linalg.matrix_norm(j, 2).item()
    weighted = torch.linalg.matrix_norm(d[:, None] * j / d[None, :], 2).item()
    assert norm <= cert.test["spectral"] <= cert.test["frobenius"]
    assert weighted <= cert.test["perron"] <= cert.test["spectral"]
    n = np.array(cert.test["matrix"])
    for i in range(3):
        for k in range(3):
            block = j[branch == i][:, branch == k]
            assert torch.linalg.matrix_norm(block, 2).item() <= n[i, k] * (1 + 1e-9)
    probe = JacobianProbe(lambda t: net.f(t, u), z)
    assert probe.norm(200).item() == pytest.approx(norm, rel=1e-3)
    d = torch.tensor([1.0, 3.0, 0.5], dtype=torch.double)
    probe_d = JacobianProbe(lambda t: net.f(t, u), z, d.tolist())
    d = d[torch.as_tensor(branch)]
    weighted = torch.linalg.matrix_norm(d[:, None] * j / d[None, :], 2).item()
    assert probe_d.norm(200).item() == pytest.approx(weighted, rel=1e-3) != pytest.approx(norm, rel=1e-2)
    radius = torch.linalg.eigvals(j).abs().max().item()
    assert probe.spectral_radius(40).item() == pytest.approx(radius, rel=2e-2)
    assert radius <= norm


def test_live_is_at_most_the_closed_form():
    net = tiny(0.4)
    cert = certify(net, measure=False, progress=False)
    spec = net.cfg.spec()
    for mode, train in (("test", False), ("train", True)):
        assert getattr(cert, mode)["perron"] <= spec.L("perron", train=train) * (1 + 1e-9)
        assert getattr(cert, mode)["frobenius"] <= spec.L("reported", train=train) * (1 + 1e-9)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("a", [0.1, 0.4, 1.0])
def test_attack_on_the_parameters(a, train):
    """Gradient ascent on ‖J‖₂ over the parameters of f, 120 Adam steps, our constraint after each: it stays below L."""
    net = tiny(a, scale=0.1).train(train)
    z, u = state(net, 2)
    masks = net.f.masks(u)
    spec, worst = net.cfg.spec(), 0.0
    limit = spec.L("spectral", train=train)
    optimizer = torch.optim.Adam(net.f.parameters(), lr=2e-2)
    v = [torch.randn_like(t) for t in z]
    for step in range(120):
        size = sum(t.pow(2).sum() for t in v).sqrt()
        v = [t / size for t in v]
        probe = JacobianProbe(lambda t: net.f(t, u, masks), z)
        jv = torch.autograd.grad(probe.back, probe.dummy, v, create_graph=True)
        gain = sum(t.pow(2).sum() for t in jv).sqrt()
        v = [t.detach() for t in probe.vjp([t.detach() for t in jv])]
        optimizer.zero_grad()
        (-gain).backward()
        optimizer.step()
        net.constrain()
        worst = max(worst, gain.item())
        if step % 40 == 39:
            cert = certify(net, measure=False, progress=False)
            now = JacobianProbe(lambda t: net.f(t, u, masks), z).norm(20).max().item()
            assert now <= getattr(cert, "train" if train else "test")["spectral"]
    assert worst <= limit
    assert worst > 0.02 * limit  # the attack did push: the test can fail


def test_small_gamma_without_affine_part():
    """The post-fusion norm has no γ of its own: the certificate counts min(1, γ̄) there, and f must apply it (S2)."""
    net = tiny(1.0, channels=(8,), head_channels=(4,), ablation="S2", gamma=0.1, post_affine=False).eval()
    with torch.no_grad():  # positive maps that hardly vary: the last norm divides by √ε
        for name, p in net.f.named_parameters():
            if name.endswith("bias"):
                p.fill_(1.0 if "norm3" in name else 0.0)
        net.f.post[0].pair.conv.weight.copy_(1.9 * torch.eye(8)[:, :, None, None])
    proved = certify(net, measure=False, progress=False).test["spectral"]
    z, u = state(net, 1)
    found = JacobianProbe(lambda t: net.f(t, 1e-6 * u), [1e-6 * t for t in z]).norm(50).item()
    assert 0.1 * proved < found <= proved


@pytest.mark.parametrize("a", [0.1, 0.4])
def test_attack_on_pairs(a):
    """Gradient ascent on ‖f(z) − f(z')‖/‖z − z'‖ from 200 starts (one sample each)."""
    net = tiny(a).eval()
    limit = certify(net, measure=False, progress=False).test["spectral"]
    z, u = state(net, 200)
    pair = [t.clone().requires_grad_() for t in z] + [(t + torch.randn_like(t)).requires_grad_() for t in z]
    optimizer = torch.optim.Adam(pair, lr=0.1)
    for _ in range(25):
        x, y = pair[:3], pair[3:]
        up = sum((p - q).flatten(1).pow(2).sum(1) for p, q in zip(net.f(x, u), net.f(y, u), strict=True)).sqrt()
        down = sum((p - q).flatten(1).pow(2).sum(1) for p, q in zip(x, y, strict=True)).sqrt()
        ratio = up / down
        assert ratio.max().item() <= limit
        optimizer.zero_grad()
        (-ratio.sum()).backward()
        optimizer.step()


def test_ten_thousand_pairs():
    """50 random specifications and models, 200 pairs of points each: no violation in the plain and in the weighted norm."""
    rng = np.random.default_rng(0)
    for case in range(50):
        n = int(rng.integers(1, 4))
        spec = dict(
            a=rng.uniform(0.05, 1), c=rng.uniform(0.3, 4), gamma=rng.uniform(0.3, 2), alpha1=rng.uniform(0.05, 0.95),
            alpha2=rng.uniform(0.05, 0.95), p=rng.uniform(0, 0.6),
        )  # fmt: skip
        sizes = dict(channels=(8,) * n, head_channels=(4,) * n)
        net = tiny(seed=case, scale=rng.uniform(0.05, 1), **sizes, **spec).train()
        z, u = state(net, 200, seed=case)
        masks = net.f.masks(u)
        scale = 10 ** rng.uniform(-3, 1)
        y = [t + scale * torch.randn_like(t) for t in z]
        with torch.no_grad():
            out = [p - q for p, q in zip(net.f(z, u, masks), net.f(y, u, masks), strict=True)]
        s = net.cfg.spec()
        matrix = s.comparison_matrix(train=True)
        assert net.f.matrix() == pytest.approx(matrix) or spec["gamma"] > 1  # the tree says the same
        rho, d = bounds.perron(matrix)
        for limit, weights in ((bounds.spectral(matrix), [1.0] * n), (rho, d)):
            up = sum((w * t).flatten(1).pow(2).sum(1) for w, t in zip(weights, out, strict=True)).sqrt()
            down = sum((w * (p - q)).flatten(1).pow(2).sum(1) for w, p, q in zip(weights, z, y, strict=True)).sqrt()
            assert (up / down).max().item() <= limit * (1 + 1e-9), (case, spec)


def test_norm_of_mgn_after_1x1_is_exact():
    """Against the dense operator; folding γ into the kernel alone is wrong when a group has several channels."""
    torch.manual_seed(0)
    conv, norm = Conv(3, 4, 1, size=(3, 3)).double(), MGN(2, 4).double()
    with torch.no_grad():
        conv.weight.normal_()
        norm.weight.uniform_(-1, 1)

    def dense():
        eye = torch.eye(27, dtype=torch.double).view(27, 3, 3, 3)
        out = (norm(conv(eye)) - norm(conv(torch.zeros_like(eye)))).flatten(1)
        return torch.linalg.matrix_norm(out, 2).item()

    assert mixed_1x1_norm(conv, norm).value == pytest.approx(dense(), rel=1e-9)
    with torch.no_grad():  # all weight in a channel with γ = 0: its mean still reaches its neighbour
        conv.weight.zero_()
        conv.weight[1] = 1.0
        norm.weight.copy_(torch.tensor([1.0, 0, 1, 0]))
    folded = torch.linalg.matrix_norm((norm.weight[:, None] * conv.weight[:, :, 0, 0]).detach(), 2).item()
    assert folded == 0.0 < 0.5 < dense()
    assert mixed_1x1_norm(conv, norm).value == pytest.approx(dense(), rel=1e-9)


def test_norms_of_single_weights_are_above_the_truth_in_their_last_digits():
    """Two products γ·w in one column have the norm √(p² + q²): rounding may not take the constant below it."""
    conv, norm = Conv(1, 2, 1, size=(2, 2)).double(), MGN(1, 2).double()
    torch.manual_seed(0)
    for _ in range(40):
        with torch.no_grad():
            conv.weight.uniform_(0.5, 1)
            norm.weight.uniform_(0.5, 1)
        w, gamma = conv.weight.flatten().tolist(), norm.weight.tolist()
        true = sum((Decimal(a) * Decimal(g)) ** 2 for a, g in zip(w, gamma, strict=True)).sqrt()
        assert true <= Decimal(mixed_1x1_norm(conv, norm).value) < true * Decimal(1 + 1e-10)
        plain = sum(Decimal(a) ** 2 for a in w).sqrt()
        assert plain <= Decimal(conv_norm(conv.weight, 2).value) < plain * Decimal(1 + 1e-10)


def rounding_up(w):
    """(kernel just above the middle of two neighbours in bfloat16, the neighbour it is rounded to, away from zero)."""
    low = w.bfloat16()
    high = (low.view(torch.int16) + 1).view(torch.bfloat16).to(w.dtype)
    return low.to(w.dtype) + 0.51 * (high - low.to(w.dtype)), high


def test_rounded_kernels_have_a_proof_of_their_own():
    """The attack: every entry is rounded away from zero. The proof for the kernels as they are does not hold then."""
    net, used = tiny(0.4), tiny(0.4)
    with torch.no_grad():
        for a, b in zip(net.f.modules(), used.f.modules(), strict=True):
            if isinstance(a, Conv):
                low, high = rounding_up(a.weight)
                a.weight.copy_(low), b.weight.copy_(high)
    plain, cert, true = (
        certify(m, dtype=dtype, measure=False, progress=False)
        for m, dtype in ((net, None), (net, torch.bfloat16), (used, None))
    )
    assert cert.test["matrix"] == true.test["matrix"]
    ratio = np.array(cert.train["matrix"]) / np.array(true.train["matrix"])
    assert 1 < ratio.min() <= ratio.max() < 1.001  # the masks of dropout are rounded too
    assert all(r["norm"] == t["norm"] for r, t in zip(cert.layers, true.layers, strict=True))
    assert cert.test["spectral"] > 1.003 * plain.test["spectral"]
    z, u = state(used.eval(), 4)
    assert JacobianProbe(lambda t: used.f(t, u), z).norm(50).max().item() <= cert.test["spectral"]
    assert "kernels in bfloat16" in str(cert) and cert.dtype == "bfloat16" and plain.dtype is None


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("smooth", [False, True])
def test_rounded_potential_layers(smooth, train):
    """J = I − BSA of a residual layer with the two kernels that are really used, each rounded by itself, for many S."""
    torch.manual_seed(0)
    net = build("cpu", block="potential", n=2, channels=(8, 8), head_channels=(4, 4), image_size=8, expansion=1, p=0.3)
    net = net.double().train(train)
    layer, size = net.f.residual[0], net.f.residual[0].size
    with torch.no_grad():
        if smooth:  # reaches ‖A‖ = 1 on large maps
            layer.weight.copy_(0.7 * torch.eye(8)[:, :, None, None].expand(8, 8, 3, 3))
        eye = torch.eye(8 * size[0] * size[1], dtype=torch.double).view(-1, 8, *size)
        kernels = [k.bfloat16().double() for k in layer.held(layer.bound(), None)[:2]]
        a, b = (torch.nn.functional.conv2d(eye, k, padding=1).flatten(1).T for k in kernels)
        proved = certify(net, dtype=torch.bfloat16, measure=False, progress=False)
        limit = next(row["norm"] for row in proved.layers if row["name"] == "residual.0")
        for share in (0.0, 0.3, 0.9, 1.0):
            slopes = (torch.rand(len(a)) < share).double()
            found = torch.linalg.matrix_norm(torch.eye(len(a)).double() - b @ (slopes[:, None] * a), 2).item()
            assert found <= limit < 1.02
    # A path: its last kernel is rounded after M_ij, and 2^(i−j), are multiplied into it.
    weights = net.f.mixing().detach()
    for name, path in net.f.paths.items():
        j, i = (int(k) - 1 for k in name.split("to"))
        w = weights[i, j] * 2.0 ** min(0, i - j)
        used = (w * path[-1].kernel().detach()).bfloat16().double() / w
        limit = next(row["norm"] for row in proved.layers if row["name"] == f"paths.{name}.{len(path) - 1}")
        assert limit == pytest.approx(torch.linalg.matrix_norm(used.flatten(1), 2).item(), rel=1e-9)


def test_rounded_potential_layer_where_only_the_kernel_of_test_mode_is_rounded():
    """2K/T needs no rounding, (1 − p)·2K/T does: J = I − Bᵀ A is no longer symmetric, and its norm above one."""
    layer = Potential(2, 1, 0.3, (1, 1)).double()
    layer.T = lambda bound=None: torch.tensor(4.0, dtype=torch.double)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, :, 1, 1] = torch.tensor([1.0, 1.25])  # on a map of one pixel: one hidden unit, ‖K‖² < 4
    back = (0.7 * 2 / 4 * layer.weight.detach()).bfloat16().double()[0, :, 1, 1]
    found = torch.linalg.matrix_norm(torch.eye(2).double() - torch.outer(back, layer.weight.detach()[0, :, 1, 1]), 2)
    assert 1 + 1e-8 < float(found) <= Prover(layer, {layer: (1, 1)}, torch.bfloat16)(layer)[0].value < 1.01


def test_report():
    net = tiny(0.3)
    cert = certify(net, progress=False)
    assert cert.certified and cert.test["steps"] == bounds.steps(cert.test["perron"])
    assert cert.measured_norm <= cert.test["spectral"] and cert.measured_norm_D <= cert.test["perron"]
    assert cert.spectral_radius <= cert.measured_norm * 1.01 and cert.slack >= 1
    for key in ("norm", "norm_D"):  # the largest of what was seen, at z* and elsewhere
        seen = [p[key] for p in cert.points]
        assert getattr(cert, f"measured_{key}") == max(seen) > min(seen) > 0
    assert cert.slack == cert.test["spectral"] / cert.measured_norm  # both in the plain norm
    assert cert.observed_steps <= cert.test["steps"] + 1
    text = str(cert)
    assert "PROVED" in text and "residual.0.conv1" in text and "upper" in text
    assert "<table>" in cert._repr_html_()
    saved = cert.to_dict()
    assert {"test", "train", "measured_norm", "spectral_radius", "layers", "seconds"} <= set(saved)
    assert {"frobenius", "spectral", "perron"} <= set(saved["test"]) & set(saved["train"])
    assert all(row["kind"] in ("exact", "upper") for row in saved["layers"])
    assert net.training  # the mode is given back


def test_weights_changed_behind_its_back():
    net = tiny(0.4)
    cert = certify(net, measure=False, progress=False)
    assert cert.matches(net)
    with torch.no_grad():
        net.f.residual[0].conv1.weight.mul_(40)
    assert not cert.matches(net)
    assert not certify(net, measure=False, progress=False).certified  # the live weights count, not the promise c
    rows = {row["name"]: row for row in certify(net, measure=False, progress=False).layers}
    assert rows["residual.0.conv1"]["norm"] > rows["residual.0.conv1"]["limit"]


def test_rounded_potential_layer_reaches_its_constant():
    """One pixel, one unit, ‖A‖ = 1: 2K/T = 4/3 is rounded up by a part δ, and J = 1 − 2(1 + δ) is as large as is proved."""
    layer = Potential(1, 1, 0.3, (1, 1)).double()
    layer.T = lambda bound=None: torch.tensor(2.25, dtype=torch.double)
    with torch.no_grad():
        layer.weight.zero_()[0, 0, 1, 1] = 1.5
    back = float(torch.tensor(2 / 2.25 * 1.5).bfloat16())
    assert 1.0038 < abs(1 - back * 1.5) <= Prover(layer, {layer: (1, 1)}, torch.bfloat16)(layer)[0].value < 1.004


def test_a_constant_of_one_is_no_contraction():
    found = readings(np.array([[0.5, 0.9], [0.1, 0.5]]), 1e-3)
    assert found["perron"] == pytest.approx(0.8) and found["spectral"] > 1 and found["certified"] is True
    assert found["steps"] == bounds.steps(0.8 + 1e-9, 1e-3)
    assert (
        readings(np.array([[1.0]]), 1e-3)["certified"] is False and readings(np.array([[1.0]]), 1e-3)["steps"] is None
    )
    assert readings(np.array([[0.999]]), 1e-3)["certified"] is True


def test_the_same_numbers_under_other_names_are_other_weights():
    one, two = (nn.ParameterDict({name: torch.ones(3)}) for name in ("gamma", "beta"))
    assert fingerprint(one) == fingerprint(nn.ParameterDict({"gamma": torch.ones(3)})) != fingerprint(two)


def set_fusion(net):
    net.f.fusion.weights[0][1] *= 2


CONSTANTS = {
    "a": lambda net: setattr(net.f.residual[1].act, "a", 0.9),
    "p": lambda net: setattr(net.f.residual[1].drop, "p", 0.6),
    "alpha1": lambda net: setattr(net.f.residual[1], "alpha", 0.6),
    "alpha2": lambda net: setattr(net.f.fusion, "alpha", 0.9),
    "fusion": set_fusion,
    "gamma": lambda net: setattr(net.f.residual[1].norm1, "gamma", 2.0),
    "scale": lambda net: setattr(net.f.post[1].pair.norm, "fixed", 2.0),
    "groups": lambda net: setattr(net.f.post[1].pair.norm, "groups", 2),
    "c": lambda net: setattr(net.f.residual[1].conv1, "c", 3.0),
    "stride": lambda net: setattr(net.f.residual[1].conv1, "stride", 3),
    "padding": lambda net: setattr(net.f.residual[1].conv1, "padding", 0),
    "size": lambda net: setattr(net.f.residual[1].conv1, "size", (7, 7)),
    "up": lambda net: setattr(net.f.fusion.paths["2to1"].up, "scale", 4),
    "kind": lambda net: setattr(net.f.residual[1].act, "__class__", nn.ReLU),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_changed_behind_its_back(name):
    """Every number that enters L beside the weights belongs to what was certified."""
    net = tiny(0.4)
    cert = certify(net, measure=False, progress=False)
    assert cert.matches(net) and cert.matches(net.eval())
    CONSTANTS[name](net)
    assert not cert.matches(net)


def test_a_certificate_without_constants_compares_weights():
    net = tiny(0.4)
    cert = replace(certify(net, measure=False, progress=False), constants=None)
    assert cert.matches(net)


def test_modes_are_not_swapped():
    """Dropout scales in train mode only: its constant is larger there, test mode is the one with L of p = 0."""
    net = tiny(0.4, p=0.5)
    cert = certify(net, measure=False, progress=False)
    assert cert.test["perron"] < cert.train["perron"]
    for block in net.f.residual:
        block.drop.p = 0.0
    calm = certify(net, measure=False, progress=False)
    assert cert.test["matrix"] == calm.test["matrix"] == calm.train["matrix"]


def test_a_certificate_for_a_larger_image_is_larger():
    net = tiny(0.4)
    small, large = (certify(net, 8, measure=False, progress=False), certify(net, 16, measure=False, progress=False))
    assert large.test["spectral"] >= small.test["spectral"] * 0.999
    with pytest.raises(ValueError, match="image_size = 9"):
        certify(net, 9)


@pytest.mark.parametrize("configured", [8, 44, 60])
def test_map_sizes_are_whole_numbers(configured):
    """60/44 · 44 is 59.99… in floating point: a map of 59 pixels has a smaller norm than that of 60."""
    sizes = dict(channels=(8, 8, 8), groups=8, expansion=1, head_channels=(4, 4, 4), head_features=8)
    net = build("cpu", constrain=False, image_size=configured, **sizes)
    for size in range(4, 65, 4):
        found = conv_sizes(net.f, size, configured)
        for i, block in enumerate(net.f.residual):
            assert found[block.conv1] == net.cfg.sizes(size)[i]
        assert found[net.f.fusion.paths["1to3"].pairs[1].conv] == net.cfg.sizes(size)[1]
    net.f.residual[0].conv1.size = (configured + 1, configured)
    with pytest.raises(ValueError, match=r"image_size = 62: layer f\.residual\.0\.conv1.* no whole size"):
        conv_sizes(net.f, 62, configured)


def test_free_models_get_a_live_certificate():
    """S1, S3 have no constant by construction; their weights have one. GN's constant is finite and useless."""
    assert math.isfinite(certify(tiny(ablation="S3"), measure=False, progress=False).test["perron"])
    assert certify(tiny(ablation="S2", scale=0.1), measure=False, progress=False).test["perron"] > 100
    assert math.isfinite(certify(build("cpu", "mdeq"), measure=False, progress=False).test["frobenius"])


def test_largest_numbers():
    """An entry of 1e308 has a norm; where the constant overflows there is no certificate, or a sentence with the layer."""
    net = tiny(0.4)
    with torch.no_grad():
        net.f.residual[0].conv1.weight[0, 0, 0, 0] = 1e308
    cert = certify(net, measure=False, progress=False)
    assert 1e290 < cert.test["perron"] < math.inf and not cert.certified
    with torch.no_grad():
        net.f.post[0].pair.conv.weight.fill_(1e200)
        net.f.residual[0].norm3.weight.fill_(1e200)
    assert certify(net, measure=False, progress=False).test["perron"] == math.inf
    with torch.no_grad():
        net.f.residual[0].conv1.weight.fill_(1e308)
    with pytest.raises(ValueError, match=r"layer f\.residual\.0\.conv1: cannot be bounded; norm = "):
        certify(net, measure=False, progress=False)


@pytest.mark.parametrize("what", ["unknown", "subclass", "hook", "hook before", "nan", "inf", "slope"])
def test_refusals_name_the_layer(what):
    net = tiny(0.4)
    block = net.f.residual[1]
    if what == "unknown":
        block.conv1, name = nn.Conv2d(8, 16, 3, padding=1), "residual.1.conv1"
    elif what == "subclass":

        class Louder(Conv):
            def forward(self, x):
                return 100 * super().forward(x)

        block.conv1.__class__, name = Louder, "residual.1.conv1"
    elif what == "hook":
        block.norm2.register_forward_hook(lambda m, i, o: 100 * o)
        name = "residual.1.norm2"
    elif what == "hook before":
        block.conv2.register_forward_pre_hook(lambda m, i: tuple(100 * t for t in i))
        name = "residual.1.conv2"
    elif what == "slope":
        block.act.a, name = 7.0, "a = 7.0"
    else:
        with torch.no_grad():
            block.conv2.weight[0, 0, 0, 0] = float(what)
        name = "residual.1.conv2"
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        certify(net, progress=False)


def test_images_of_the_measurement_are_not_larger_than_those_of_the_proof():
    for h, w in ((16, 16), (16, 8), (8, 16)):
        with pytest.raises(ValueError, match=rf"x = \(2, 1, {h}, {w}\): must be .* at most 8 high"):
            certify(build("digits"), x=torch.randn(2, 1, h, w), progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int32}, "dtype = torch.int32: must be torch.bfloat16"),
        ({"dtype": "bfloat16"}, "dtype = bfloat16: must be torch.bfloat16"),
        ({"image_size": "8"}, "image_size = '8': must be a whole number"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        certify(build("digits"), progress=False, **arguments)


def test_a_map_that_is_constant_or_nearly_so():
    """J = 0 has no slack to print; a J of 1e-13 is still measured from below, though its squares vanish in single precision."""
    net = build("digits", n=1)
    with torch.no_grad():
        for p in net.f.post.parameters():
            p.zero_()
    found = certify(net, progress=False)
    assert found.measured_norm == 0 and found.slack is None
    assert "slack" in str(found) and "slack" in found._repr_html_()
    found = certify(build("digits", a=1e-6), progress=False)
    assert 0 < found.measured_norm <= found.test["spectral"] < 1e-12


def test_measuring_leaves_the_modes_of_all_modules_alone():
    net = build("digits").train()
    net.stem.eval()
    before = [m.training for m in net.modules()]
    certify(net, progress=False)
    assert [m.training for m in net.modules()] == before


def test_rounded_masks_of_dropout_are_counted():
    """1/(1 - p) is rounded upwards in bfloat16 at p = 0.3, and enters the constant of training."""
    net = build("digits", p=0.3)
    drop = net.f.residual[0].drop.train()
    largest = float(drop.draw(64, 8, torch.zeros((), dtype=torch.bfloat16)).max())
    assert largest > drop.lipschitz()
    rounded = certify(net, dtype=torch.bfloat16, measure=False, progress=False)
    free = build("digits", p=0.3)
    free.load_state_dict(net.state_dict())
    for block in free.f.residual:
        block.drop.p = 0.0
    without = certify(free, dtype=torch.bfloat16, measure=False, progress=False)
    assert (
        without.train["spectral"] < rounded.train["spectral"] and without.test["spectral"] == rounded.test["spectral"]
    )
