"""The model: constants from the tree, sizes, bad input; test_reference.py compares f with the paper's equations."""

import copy

import numpy as np
import pytest
import torch

from lipmdeq.bounds import ABLATIONS
from lipmdeq.model import build, configure
from lipmdeq.model.layers import Conv
from lipmdeq.norms import conv_norm, lower_norm
from lipmdeq.solvers import Anderson
from lipmdeq.solvers.gradients import Implicit, Unrolled


def small(model="lipschitz", ablation=None, seed=0, **changes):
    """A small model with four branches, norms of different scale and shift, weights large enough to matter."""
    torch.manual_seed(seed)
    net = build("cpu", model, ablation, **changes).double()
    with torch.no_grad():
        for name, p in net.f.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.3)
            elif p.ndim == 1:
                p.copy_(torch.rand_like(p) * 2 - 1)
            else:
                p.normal_(0, 0.1)
    net.constrain()
    return net.to(memory_format=torch.channels_last)


def random_state(net, batch=3, seed=1):
    torch.manual_seed(seed)
    u = torch.randn(batch, net.cfg.channels[0], *net.cfg.sizes()[0], dtype=torch.double)
    u = u.to(memory_format=torch.channels_last)
    return [torch.randn_like(t) for t in net.z0(u)], u


@pytest.mark.parametrize("a", [0.1, 0.4, 1.0])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_constant_from_the_tree_is_the_closed_form(a, train, n):
    net = build("cpu", a=a, n=n, gamma=0.9)
    for tree, closed in (("frobenius", "reported"), ("spectral", "spectral"), ("perron", "perron")):
        assert net.f.lipschitz(train=train, reading=tree) == pytest.approx(
            net.cfg.spec().L(closed, train=train), rel=1e-9
        )


@pytest.mark.parametrize("ablation", [s for s in ABLATIONS if s not in ("S1", "S2", "S3", "MDEQ")])
@pytest.mark.parametrize("train", [True, False])
def test_one_name_is_one_ablation(ablation, train):
    """The model that a name builds has the constant that the closed form gives for the same name."""
    net = build("cpu", ablation=ablation)
    closed = net.cfg.spec().ablation(ablation, train=train)
    for tree, reading in (("frobenius", "reported"), ("spectral", "spectral"), ("perron", "perron")):
        assert net.f.lipschitz(train=train, reading=tree) == pytest.approx(closed.L(reading), rel=1e-9)


@pytest.mark.parametrize("row", ["S6", "S7"])
def test_without_alpha2_the_softmax_stays_or_goes(row):
    """B4: as in the text f keeps its softmax weights; as the authors' code ran it, f adds plainly. The maps differ."""
    text, run = small(ablation=row).eval(), small(ablation=f"{row}-sum").eval()
    run.load_state_dict(text.state_dict())
    assert run.f.fusion.weights[0][1:] == [1.0] * 3 != text.f.fusion.weights[0][1:]
    z, u = random_state(text)
    with torch.no_grad():
        one, other = text.f(z, u), run.f(z, u)
    assert (other[0] - one[0]).norm() > 0.1 * one[0].norm()


def test_free_parts_have_no_constant():
    for ablation in ("S1", "S3"):
        assert build("cpu", ablation=ablation).f.lipschitz() == float("inf")
    assert build("cpu", "mdeq").f.lipschitz() == float("inf")
    assert build("cpu", ablation="S2").f.lipschitz() > 1e6  # GN: 1/sqrt(eps) at every norm


@pytest.mark.parametrize(
    "preset,count,paper",
    [("paper-cifar10", 11_094_134, 10e6), ("paper-imagenet", 16_806_504, 18e6), ("mdeq-tiny", 158_578, 0.17e6)],
)
def test_sizes_of_the_presets(preset, count, paper):
    """The sizes that the published widths give; the papers round them to 10M, 18M and 0.17M."""
    assert sum(p.numel() for p in build(preset).parameters()) == count
    assert count == pytest.approx(paper, rel=0.12)


def test_paper_model_has_28_convolutions():
    assert sum(isinstance(m, Conv) for m in build("paper-cifar10").f.modules()) == 28


def test_comparison_matrix_has_every_block_in_its_place():
    """N_ij = L̄_i·M_ij·L̂_j: a larger residual block fills a column, a larger post-fusion a row, a larger path one entry."""
    f = build("cpu").f
    for part, rows, columns in (
        (f.residual[1], range(4), [1]),
        (f.post[2], [2], range(4)),
        (f.fusion.path(0, 3), [0], [3]),
    ):
        ratio = f.matrix(lambda m, part=part: 3 * m.constant(None, True) if m is part else None) / f.matrix()
        expected = np.ones((4, 4))
        expected[np.ix_(rows, columns)] = 3
        np.testing.assert_allclose(ratio, expected)


def test_masks():
    """One per sample and channel, kept at rate 1-p and scaled; off in test mode."""
    net = build("cpu").train()
    u = torch.zeros(4000, 8, 1, 1)
    masks = net.f.masks(u)
    assert [m.shape for m in masks] == [(4000, c) for c in net.cfg.channels]
    assert {round(v, 4) for v in masks[0].unique().tolist()} == {0.0, round(1 / 0.7, 4)}
    assert abs(masks[0].mean() - 1) < 0.05
    assert net.eval().f.masks(u) == [None] * 4


def test_images_of_another_size_and_copies():
    net = build("digits").eval()
    net.largest_image = 16
    x = torch.randn(2, 1, 16, 16)
    assert build("digits", block="potential").eval()(x).shape == (2, 10)  # for all sizes
    assert torch.equal(net(x), copy.deepcopy(net)(x))


def test_images_without_a_bound_are_refused():
    """The constraint is for the maps of the configuration: larger ones need a certificate, smaller ones are parts of them."""
    net = build("digits").eval()
    for h, w in ((32, 32), (8, 16), (16, 8)):
        x = torch.randn(1, 1, h, w)
        for run in (net, net.equilibrium):
            with pytest.raises(
                ValueError, match=f"image size = {h}x{w}: must be at most 8x8.*certify.model, {max(h, w)}"
            ):
                run(x)
    for h, w in ((6, 8), (8, 6)):
        with pytest.raises(ValueError, match=f"image size = {h}x{w}: must be multiples of 4"):
            net(torch.randn(1, 1, h, w))
    assert net(torch.randn(2, 1, 4, 8)).shape == build("digits", "mdeq").eval()(torch.randn(2, 1, 8, 16)).shape
    with torch.no_grad():
        for p in net.f.parameters():
            p.normal_()
    net.constrain()
    for conv in (m for m in net.f.modules() if isinstance(m, Conv)):
        h = conv.size[0]
        for size in {(h, max(1, h // 2)), (max(1, h // 2), h), (max(1, h // 2),) * 2}:
            assert lower_norm(conv.kernel(), size, stride=conv.stride, padding=conv.padding).value <= conv.c


def test_a_new_model_keeps_to_its_constraint():
    """Before any step: at the start norms are small, but c may be smaller."""
    net = build("digits", c=0.005, gamma=0.5)
    for conv in (m for m in net.f.modules() if isinstance(m, Conv)):
        assert conv_norm(conv.kernel().detach(), conv.size, stride=conv.stride, padding=conv.padding).value <= 0.005


def test_the_stem_learns():
    """Gradients of the loss reach the stem through z*, and are those of a model whose z* is unrolled."""
    net = small().train()
    x, v = torch.randn(2, 3, 16, 16, dtype=torch.double), None
    found = []
    for adjoint in (Implicit(Anderson(tol=1e-9, max_iter=60)), Unrolled(40)):
        torch.manual_seed(3)  # the same dropout masks
        net.zero_grad()
        z, _ = net.equilibrium(x, Anderson(tol=1e-9, max_iter=60), adjoint)
        v = v or [torch.randn_like(t) for t in z]
        sum((a * b).sum() for a, b in zip(z, v, strict=True)).backward()
        found.append([p.grad.clone() for p in net.stem.parameters()])
    for implicit, unrolled in zip(*found, strict=True):
        assert implicit.norm() > 1e-3
        torch.testing.assert_close(implicit, unrolled, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"a": 7}, "a = 7"),
        ({"a": 0.0}, "a = 0.0"),
        ({"c": -1.0}, "c = -1.0"),
        ({"alpha1": 1.0}, "alpha1 = 1.0"),
        ({"p": 1.0}, "p = 1.0"),
        ({"n": 2.5}, "n = 2.5"),
        ({"n": 9}, "n = 9"),
        ({"groups": 3}, "channels = 8"),
        ({"image_size": 20}, "image_size = 20"),
        ({"norm": "bn"}, "norm = 'bn'"),
        ({"slope": 0.4}, "slope"),
        ({"preset": "huge"}, "preset = 'huge'"),
        ({"ablation": "S9"}, "ablation = 'S9'"),
    ],
)
def test_bad_input(changes, text):
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        configure(**{"preset": "cpu", **changes})
