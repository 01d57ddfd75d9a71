"""Each layer's constant from both sides: no pair of points exceeds it, a witness reaches it."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lipmdeq.model.layers import (
    GN,
    MGN,
    Chain,
    Conv,
    ConvNorm,
    DownPath,
    SReLU,
    Up,
    UpPath,
    VariationalDropout,
    constrain,
)
from lipmdeq.norms import conv_norm

torch.set_default_dtype(torch.float32)


def jacobian_norm(layer, x):
    """‖J‖₂ of the layer at x (one sample) from the full Jacobian."""
    shape = x.shape

    def flat(v):
        return layer(v.view(shape)).flatten()

    return torch.linalg.matrix_norm(torch.autograd.functional.jacobian(flat, x.flatten()), 2).item()


def norm_layer(kind, affine=True, seed=0, groups=2, channels=6):
    torch.manual_seed(seed)
    layer = kind(groups, channels, affine, 1.0).double()
    if affine:
        with torch.no_grad():
            layer.weight.uniform_(-1, 1)
            layer.weight[0] = 1.0
            layer.bias.normal_()
    return layer


@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-4, 1e-2, 1.0, 30.0]), kind=st.sampled_from([GN, MGN]))
@settings(max_examples=150, deadline=None)
def test_norms_stay_below_their_constant(seed, scale, kind):
    layer = norm_layer(kind, seed=seed)
    x = scale * torch.randn(1, 6, 3, 2, dtype=torch.double)
    bound = layer.lipschitz()
    assert jacobian_norm(layer, x) <= bound * (1 + 1e-9)
    y = x + scale * torch.randn_like(x)
    assert (layer(x) - layer(y)).norm() <= bound * (x - y).norm() * (1 + 1e-9)


@pytest.mark.parametrize("affine, gamma", [(True, 1.0), (False, 1.0), (False, 0.1), (False, 3.0), (False, None)])
@pytest.mark.parametrize("kind", [GN, MGN])
def test_norms_reach_their_constant(kind, affine, gamma):
    """GN at a constant group (variance 0) and MGN anywhere: a zero-sum direction in the channel of the largest |γ|."""
    layer = norm_layer(kind) if affine else kind(2, 6, False, gamma).double()
    x = torch.full((1, 6, 4, 4), 0.3, dtype=torch.double)
    v = torch.zeros_like(x)
    v[0, 0, 0, 0], v[0, 0, 1, 1] = 1e-7, -1e-7
    ratio = (layer(x + v) - layer(x)).norm() / v.norm()
    assert 0.99 * layer.lipschitz() <= ratio <= layer.lipschitz() * (1 + 1e-6)


def test_norms_are_their_definitions():
    layer, x = norm_layer(MGN), torch.randn(3, 6, 4, 5, dtype=torch.double)
    g = x.view(3, 2, -1)
    expected = (g - g.mean(2, keepdim=True)).view_as(x) * layer.weight[:, None, None] + layer.bias[:, None, None]
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(GN(2, 6).double()(x), F.group_norm(x, 2))


def test_mgn_without_affine_respects_gamma():
    """Without parameters the scale is min(1, γ̄), so that the closed form L̄ = γ̄·c·a holds for small γ̄ as well."""
    assert MGN(2, 6, affine=False, gamma=0.5).lipschitz() == 0.5
    assert MGN(2, 6, affine=False, gamma=3.0).lipschitz() == 1.0


def test_gamma_is_clipped():
    layer = MGN(2, 6, gamma=0.8)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([3.0, -3, 0.5, -0.5, 0, 1]))
    layer.constrain()
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([0.8, -0.8, 0.5, -0.5, 0, 0.8]))
    for prove in (False, True):  # at every step, also between two proofs
        with torch.no_grad():
            layer.weight.fill_(3.0)
        constrain([layer], prove)
        assert (layer.weight == 0.8).all()
    free = MGN(2, 6, gamma=None)
    with torch.no_grad():
        free.weight.fill_(3.0)
    free.constrain()
    assert free.max_scale() == 3.0 and free.lipschitz() == float("inf")


@pytest.mark.parametrize("a", [0.1, 0.4, 1.0])
def test_srelu(a):
    layer = SReLU(a)
    x, y = torch.randn(500, 20).abs(), torch.randn(500, 20).abs()
    torch.testing.assert_close(
        (layer(x) - layer(y)).norm(dim=1), a * (x - y).norm(dim=1)
    )  # attained for positive pairs
    x, y = torch.randn(500, 20), torch.randn(500, 20)
    assert ((layer(x) - layer(y)).norm(dim=1) <= layer.lipschitz() * (x - y).norm(dim=1) * (1 + 1e-6)).all()


def test_dropout():
    layer = VariationalDropout(0.3).train()
    x = torch.randn(50, 8, 2, 2)
    mask = layer.draw(50, 8, x)
    gain = layer(x, mask).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert (gain <= layer.lipschitz() * (1 + 1e-6)).all()
    one = F.one_hot(mask.argmax(1), 8)[:, :, None, None] * torch.ones_like(x)  # a channel that is kept: the witness
    assert (layer(one, mask).norm() / one.norm()) >= 0.99 * layer.lipschitz()
    assert layer.lipschitz(train=False) == 1.0 and layer.eval().draw(50, 8, x) is None
    with pytest.raises(ValueError, match=r"p = 1\.0"):
        VariationalDropout(1.0)


@pytest.mark.parametrize("s", [1, 2, 4, 8])
def test_up_is_attained_everywhere(s):
    x = torch.randn(3, 2, 4, 4, dtype=torch.double)
    torch.testing.assert_close(Up(s)(x).norm(), Up(s).lipschitz() * x.norm())


def big_conv(*args, weight_norm=False, scale=1.0, **kw):
    torch.manual_seed(0)
    conv = Conv(*args, c=2.0, weight_norm=weight_norm, **kw)
    with torch.no_grad():
        conv.weight.normal_(0, scale)
        if weight_norm:
            conv.g.fill_(5.0)
    return conv


def true_norm(conv):
    """Dense singular values of the operator that the forward pass applies."""
    cin = conv.weight.shape[1]
    eye = torch.eye(cin * conv.size[0] * conv.size[1]).view(-1, cin, *conv.size)
    with torch.no_grad():
        return torch.linalg.matrix_norm(conv(eye).flatten(1).double(), 2).item()


GEOMETRIES = [
    dict(k=3, stride=1, size=(8, 8)),
    dict(k=3, stride=2, size=(8, 8)),
    dict(k=1, stride=1, size=(4, 4)),
    dict(k=3, stride=1, size=(2, 2)),
    dict(k=3, stride=2, size=(4, 6)),
]


@pytest.mark.parametrize("weight_norm", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_constraint_on_the_operator_in_use(geometry, weight_norm):
    """After ``constrain`` the dense norm is at most c and not needlessly small; the next forward pass does not undo it."""
    conv = big_conv(3, 5, weight_norm=weight_norm, **geometry)
    assert true_norm(conv) > 2
    conv.constrain()
    conv(torch.randn(1, 3, *conv.size))
    assert 1.5 < true_norm(conv) <= 2
    before = conv.kernel().detach().clone()
    conv.constrain()
    assert torch.equal(before, conv.kernel().detach())  # a projection: nothing changes the second time


def test_a_bound_below_single_precision():
    """D4: c = 1e-300 is zero in the type of the weights, and zero over zero was no number."""
    conv = Conv(3, 5, 3, 1, 1e-300)
    for prove in (True, False, False, True):
        conv.constrain(prove)
        assert torch.equal(conv.kernel(), torch.zeros_like(conv.weight))


@pytest.mark.parametrize("scale", [1.0, 2e3])
def test_constraint_with_weight_norm_in_half_precision(scale):
    """B1: g/‖v‖ may be subnormal in half precision, or 0/0 in a row of zeros: the kernel was 1.5 c, or no number."""
    torch.manual_seed(1)
    conv = Conv(6, 5, 3, 2, 1e-3, (6, 5), weight_norm=True)
    with torch.no_grad():
        conv.weight.copy_(scale * torch.randn_like(conv.weight))
        conv.weight[0] = 0
        conv.g.copy_(10 * torch.rand_like(conv.g))
    conv.half().constrain()
    kernel = conv.kernel().detach()
    assert kernel.dtype == torch.half
    conv.double()  # so that the operator of this very kernel is measured
    conv.kernel = kernel.double
    assert 0.9e-3 < true_norm_double(conv) <= 1e-3


def test_small_weights_are_left_alone():
    conv = big_conv(3, 5, k=3, size=(8, 8), scale=0.01)
    before = conv.weight.detach().clone()
    conv.constrain()
    assert torch.equal(before, conv.weight.detach())


@pytest.mark.parametrize("how", ["copy", "save", "load", "eval"])
def test_constraint_survives(how):
    """Copies, saved and loaded models are constrained on the weights they have, whatever was known before."""
    conv = big_conv(3, 5, k=3, size=(8, 8))
    conv.constrain()
    if how == "copy":
        conv = copy.deepcopy(conv)
    elif how == "save":
        file = io.BytesIO()
        torch.save(conv, file)
        file.seek(0)
        conv = torch.load(file, weights_only=False)
    elif how == "load":
        conv.load_state_dict(big_conv(3, 5, k=3, size=(8, 8), scale=2.0).state_dict())
    else:
        conv.eval()
    with torch.no_grad():
        conv.weight.add_(0.3 * torch.randn_like(conv.weight))
    conv.constrain()
    assert true_norm(conv) <= 2


def test_true_norm_never_above_c_in_500_steps():
    """Adam pushes against the constraint as hard as it can; the dense norm is checked after every step."""
    torch.manual_seed(0)
    convs = [Conv(4, 6, g["k"], g["stride"], 2.0, (6, 6) if g["size"] == (8, 8) else g["size"]) for g in GEOMETRIES]
    inputs = [torch.randn(4, 4, *conv.size) for conv in convs]
    optimizer = torch.optim.Adam([p for conv in convs for p in conv.parameters()], lr=1e-2)
    worst = 0.0
    for _ in range(500):
        optimizer.zero_grad()
        (-sum(conv(x).pow(2).mean() for conv, x in zip(convs, inputs, strict=True))).backward()
        optimizer.step()
        for conv in convs:
            conv.constrain()
            worst = max(worst, true_norm(conv))
    assert 1.9 < worst <= 2.0


def test_paths_compose():
    """Down and up paths: product of the parts, and no pair of points exceeds it."""

    def pair(cin, cout, k, stride, size):
        return ConvNorm(Conv(cin, cout, k, stride, 2.0, size), MGN(2, cout, gamma=0.9))

    down = DownPath([pair(4, 4, 3, 2, (8, 8)), pair(4, 6, 3, 2, (4, 4))], 0.5)
    up = UpPath(pair(6, 4, 1, 1, (2, 2)), 2)
    assert down.lipschitz() == pytest.approx(2 * 0.9 * 0.5 * 2 * 0.9)
    assert up.lipschitz() == pytest.approx(2 * 0.9 * 4)
    assert Chain(up, SReLU(0.5)).lipschitz() == pytest.approx(2 * 0.9 * 4 * 0.5)
    for path, shape in ((down, (50, 4, 8, 8)), (up, (50, 6, 2, 2))):
        with torch.no_grad():
            for p in path.parameters():
                if p.ndim == 4:
                    p.normal_()
        for conv in path.modules():
            if isinstance(conv, Conv):
                conv.constrain()
        x, y = torch.randn(shape), torch.randn(shape)
        ratio = (path(x) - path(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
        assert (ratio <= path.lipschitz()).all()


def test_conv_witness():
    """The leading singular vector reaches 0.99 of the constraint."""
    conv = big_conv(3, 5, k=3, size=(8, 8)).double()
    conv.constrain()
    assert 0.99 * conv_norm(conv.weight.detach(), conv.size, padding=conv.padding).value <= true_norm_double(conv)


def true_norm_double(conv):
    cin = conv.weight.shape[1]
    eye = torch.eye(cin * conv.size[0] * conv.size[1], dtype=torch.double).view(-1, cin, *conv.size)
    return torch.linalg.matrix_norm(conv(eye).flatten(1).detach(), 2).item()


def test_bad_groups():
    with pytest.raises(ValueError, match="channels = 6: must be divisible by groups = 4"):
        MGN(4, 6)


# ---------------------------------------------------------------- the constraint between two proofs


@pytest.mark.parametrize("stride, size", [(1, (8, 8)), (2, (8, 8)), (2, (7, 5)), (1, (2, 2))])
def test_estimated_norm_is_from_below_and_close(stride, size):
    torch.manual_seed(0)
    conv = Conv(4, 6, 3, stride, 1.0, size).double()
    true = conv_norm(conv.kernel().detach(), size, stride=stride, padding=1).value
    for _ in range(40):
        found = float(conv.estimate())
    assert 0.97 * true <= found <= true * (1 + 1e-9)


@pytest.mark.parametrize("weight_norm", [False, True])
def test_attack_between_proofs_stays_below_c(weight_norm):
    """Adam pushes the norm up at every step; only power steps hold it, for as long as a run goes without a proof."""
    torch.manual_seed(0)
    conv = Conv(8, 12, 3, 1, 2.0, (6, 6), weight_norm)
    conv.constrain()
    adam, worst, largest = torch.optim.Adam(conv.parameters(), lr=4e-3), 0.0, 0.0
    x = torch.randn(1, 8, 6, 6)
    for step in range(150):
        adam.zero_grad()
        x = (x / x.norm()).detach().requires_grad_()
        (-conv(x).norm()).backward()
        x = x.grad  # follow the direction in which the operator is largest
        adam.step()
        assert conv.constrain(prove=False) == 0.0
        if step % 10 == 9:
            true = conv_norm(conv.kernel().detach(), (6, 6), padding=1).value
            worst, largest = max(worst, true / 2.0), max(largest, float(conv.estimate()) / 2.0)
    assert 0.9 < largest <= worst <= 1.0


@pytest.mark.parametrize("k", [1, 3])
def test_a_jump_in_a_new_direction_is_seen_at_once(k):
    """One update raises the norm to twice c in a direction in which the kernel was zero; no proof comes to help."""
    torch.manual_seed(0)
    conv = Conv(32, 48, k, 1, 2.0, (6, 6)).double()
    left, right = torch.linalg.qr(torch.randn(48, 32).double())[0], torch.linalg.qr(torch.randn(32, 32).double())[0]
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[:, :, k // 2, k // 2] = left[:, 1:] @ right[:, 1:].T
        conv.constrain(prove=False)
        conv.weight[:, :, k // 2, k // 2] += 4.0 * torch.outer(left[:, 0], right[:, 0])
    conv.constrain(prove=False)
    assert 1.0 < conv_norm(conv.kernel().detach(), (6, 6), padding=k // 2).value < 2.0


@pytest.mark.parametrize("c", [1.0, 2.5])
def test_constrain_says_how_far_above_c_it_found_a_norm(c):
    torch.manual_seed(0)
    conv = Conv(4, 4, 1, 1, c, (4, 4)).double()
    assert conv.constrain() <= 1.0
    with torch.no_grad():
        conv.weight.mul_(1.5 * c / torch.linalg.matrix_norm(conv.weight[:, :, 0, 0], 2))
    assert conv.constrain() == pytest.approx(1.5, rel=1e-3)
    assert conv.constrain() <= 1.0
    assert Conv(4, 4, 1, c=None).constrain() == 0.0


def test_estimates_recover_from_a_weight_that_was_zero():
    """0/0 starts the vectors anew: what grows afterwards is held between proofs too."""
    torch.manual_seed(0)
    conv = Conv(4, 6, 3, 1, 1.0, (6, 6)).double()
    with torch.no_grad():
        conv.weight.zero_()
    for _ in range(3):
        conv.constrain(prove=False)
    with torch.no_grad():
        conv.weight.normal_()
    for _ in range(30):
        conv.constrain(prove=False)
    assert 0.9 < conv_norm(conv.kernel().detach(), (6, 6), padding=1).value <= 1.0


def test_an_estimate_that_overflows_is_left_to_the_proof():
    """Squares of 1e25 are infinite in single precision: no weight is scaled by that, to zero."""
    conv = Conv(2, 3, 3, 1, 1.0, (4, 4))
    with torch.no_grad():
        conv.weight.fill_(1e25)
    conv.constrain(prove=False)
    assert (conv.weight == 1e25).all()
    assert conv.constrain() > 1e25 and 0.9 < conv_norm(conv.kernel().detach(), (4, 4), padding=1).value <= 1.0


def test_estimates_start_anew_in_another_precision():
    conv = Conv(2, 3, 3, 1, 1.0, (4, 4))
    conv.constrain(prove=False)
    conv.double().constrain(prove=False)
    assert conv.estimate().dtype == torch.double


def test_forgetting_makes_the_estimate_a_function_of_the_weights():
    torch.manual_seed(0)
    one, two = Conv(4, 4, 3, 1, 1.0, (6, 6)), Conv(4, 4, 3, 1, 1.0, (6, 6))
    for _ in range(5):
        one.estimate()
    two.load_state_dict(one.state_dict())
    one.forget()
    assert torch.equal(one.estimate(), two.estimate())


def test_a_module_that_stands_twice_counts_twice():
    conv = Conv(2, 2, 1, c=2.0)
    assert Chain(conv, conv).lipschitz() == 4.0


def test_constraint_follows_a_change_of_the_map():
    """On larger maps the same kernel has a larger norm: what was proved for the old size is not taken over."""
    conv = Conv(1, 1, 3, c=2.0, size=(2, 2))
    with torch.no_grad():
        conv.weight.fill_(0.4)
    assert conv.constrain() <= 1 and float(conv.weight.detach().max()) == pytest.approx(0.4)
    conv.size = (16, 16)
    assert conv.constrain() > 1  # the proof alone: no estimate has seen the weight
    assert conv_norm(conv.weight, (16, 16), padding=1).value <= 2.0
