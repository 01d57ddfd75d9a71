"""Convolution norms against the dense operator: every value is what its kind says, tight, and the constraint holds."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lipmdeq.bounds import lip_conv_reshaped
from lipmdeq.norms import Norm, NormGuard, conv_norm, lower_norm, project, reshaped_norm
from lipmdeq.norms import guard as guards
from lipmdeq.norms.banded import BandedGram
from lipmdeq.norms.covers import Cover, Kernel, climb, half_covers, torus_covers, upper
from lipmdeq.norms.geometry import geometry_of


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fits(weight: Tensor, size, c: float, **kw) -> bool:
    """Is the norm proved to be at most c?"""
    return project(weight.clone(), size, c, **kw) == 1.0


def true_norm(weight: Tensor, size: tuple[int, int], padding_mode: str = "zeros", **kw) -> float:
    """Oracle: singular values of the matrix that torch's own layer has on the identity, in double precision."""
    groups = kw.get("groups", 1)
    cin = weight.shape[1] * groups
    layer = torch.nn.Conv2d(
        cin, weight.shape[0], tuple(weight.shape[2:]), bias=False, padding_mode=padding_mode, **kw
    ).double()
    n = cin * size[0] * size[1]
    with torch.no_grad():
        layer.weight.copy_(weight)
        columns = layer(torch.eye(n, dtype=torch.double).view(n, cin, *size))
    return float(torch.linalg.matrix_norm(columns.reshape(n, -1), 2))


def holds(norm: Norm, true: float) -> bool:
    return {
        "exact": abs(norm.value - true) <= 1e-8 * true,
        "upper": norm.value >= true * (1 - 1e-12),
        "lower": norm.value <= true * (1 + 1e-12),
    }[norm.kind]


@st.composite
def convolutions(draw):
    """A weight and a legal geometry: any kernel, stride, padding, dilation, groups, map; zero or circular padding."""
    small = st.integers(1, 3)
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    size = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular"]))
    padding = draw(st.one_of(st.just("same"), st.tuples(st.integers(0, 3), st.integers(0, 3))))
    stride = (1, 1) if padding == "same" else draw(st.tuples(small, small))
    if padding != "same":
        # Enough padding for the kernel to find a place, not more than a circular map can give.
        need = [-(-(d * (k - 1) + 1 - h) // 2) for d, k, h in zip(dilation, kernel, size, strict=True)]
        padding = tuple(max(p, n, 0) for p, n in zip(padding, need, strict=True))
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    most = [-(-s // 2) if padding == "same" else p for s, p in zip(spans, padding, strict=False)]
    if any(p > h for p, h in zip(most, size, strict=True)):
        mode = "zeros"
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    shape = (draw(small) * groups, draw(small), *kernel)
    weight = torch.randn(shape, generator=seeded(draw(st.integers(0, 10**6))))
    if draw(st.booleans()):
        weight = weight.abs()  # largest at frequency 0, where wrapping round the border costs most
    kw = dict(stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=mode)
    return weight * 10.0 ** draw(st.integers(-3, 3)), size, kw


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(deadline=None, max_examples=250)
@given(convolutions())
def test_every_kind_is_true_on_any_convolution(case):
    weight, size, kw = case
    true = true_norm(weight, size, **kw)
    values = {m: conv_norm(weight, size, method=m, **kw) for m in ("auto", "torus", "cholesky")}
    values["lanczos"] = lower_norm(weight, size, **kw)
    for method, norm in values.items():
        assert holds(norm, true), (method, norm, true)
    assert values["auto"].kind in ("exact", "upper") and values["auto"].value <= true * 1.002
    assert values["cholesky"].value <= true * 1.002
    assert values["lanczos"].kind == "lower"
    if true > 0:
        for dtype in (torch.float32, torch.float64):
            assert not fits(weight.to(dtype), size, true * (1 - 1e-6), **kw)
        assert fits(weight, size, float(conv_norm(weight, size, method="torus", **kw)) * 1.01, **kw)
    if kw["padding_mode"] == "zeros" and kw["groups"] == 1 and kw["dilation"] == (1, 1):
        windows = max(weight.shape[2:]), min(kw["stride"])
        assert true <= lip_conv_reshaped(reshaped_norm(weight), *windows) * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(deadline=None, max_examples=60)
@given(convolutions())
def test_slower_methods_on_any_convolution(case):
    weight, size, kw = case
    true = true_norm(weight, size, **kw)
    assert holds(conv_norm(weight, size, method="dense", **kw), true)
    assert holds(lower_norm(weight, size, steps=3, **kw), true)
    axes = geometry_of(weight, size, **kw).axes
    if not (axes[0].taps and axes[1].taps) or true == 0:
        return
    kernel = Kernel(weight, axes, kw["groups"])
    # Every single torus is a bound, not only the best one, also with one exact axis, however it is found.
    for cover in [*torus_covers(axes), *half_covers(axes)]:
        assert true * (1 - 1e-12) <= upper(kernel, cover) <= climb(kernel, cover, true / 1.3) * (1 + 1e-9) < math.inf
        assert climb(kernel, cover, true / 2, stop=true) == math.inf
        assert true * (1 - 1e-12) <= climb(kernel, cover, 0.0) < math.inf  # a search that found nothing
    # The banded matrix is the Gram matrix.
    gram = BandedGram(kernel, axes)
    rows = gram.axes[gram.along].size if gram.side == "in" else gram.axes[gram.along].out
    full = torch.cat([torch.cat([gram.block(j, i) for i in range(rows)], 2) for j in range(rows)], 1)
    assert math.sqrt(float(torch.linalg.eigvalsh(full).max())) == pytest.approx(true, rel=1e-9)
    # Its factorisation decides, and a guess that is too low does no harm.
    assert gram.below((true * (1 + 1e-6)) ** 2) and not gram.below((true * (1 - 1e-6)) ** 2)
    assert true <= gram.bound(true / 1.3) < 2 * true and gram.bound(true / 2, stop=true) == math.inf


def test_laplacian_where_the_plain_torus_is_wrong():
    """(−1, 2, −1) on 3 pixels: true 2 + √2; FFT on N = H says 3; the twisted torus is exact."""
    weight = torch.tensor([-1.0, 2.0, -1.0]).view(1, 1, 1, 3)
    assert float(torch.fft.fft(weight).abs().max()) == pytest.approx(3.0)
    for method in ("auto", "dense", "torus"):
        norm = conv_norm(weight, (1, 3), padding=(0, 1), method=method)
        assert norm.value == pytest.approx(2 + math.sqrt(2), rel=1e-9), method
    assert float(conv_norm(weight, (1, 3), padding=(0, 1), padding_mode="circular")) == pytest.approx(3.0)


@pytest.mark.parametrize("h", [2, 5, 8, 31])
def test_twisted_torus_is_exact_for_the_box(h):
    """(1, 1, 1) on h pixels is a tridiagonal Toeplitz matrix of norm 1 + 2cos(π/(h + 1)); the plain torus says 3."""
    weight = torch.ones(1, 1, 1, 3)
    exact = 1 + 2 * math.cos(math.pi / (h + 1))
    norm = conv_norm(weight, (1, h), padding=(0, 1), method="torus")
    assert norm.value == pytest.approx(exact, rel=1e-9)
    axes = geometry_of(weight, (1, h), padding=(0, 1)).axes
    plain = upper(Kernel(weight, axes), Cover(axes, (axes[0].tori()[0], (h + 1, 0))))
    assert plain == pytest.approx(3.0)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_every_torus_is_long_enough(stride):
    """Kernels whose sums are largest where nothing is cut off, on all small maps: a torus that is too short by one lies below.

    With stride 2 the ends (1, 0, 1) on 2h pixels have TTᵀ = tridiagonal (1, 2, 1) but for a 1 in the first corner, with the norm
    2 + 2cos(2π/(2h + 1)); a twisted torus of h positions says 2 + 2cos(π/h).
    """
    for taps, h, padding in itertools.product((2, 3, 4), range(2, 8), range(3)):
        for middle in (0.0, 1.0):
            weight = torch.ones(1, 1, 1, taps).double()
            weight[..., 1:-1] = middle
            if h + 2 * padding < taps:
                continue
            kw = dict(stride=(1, stride), padding=(0, padding))
            axes, true = geometry_of(weight, (1, h), **kw).axes, true_norm(weight, (1, h), **kw)
            for torus in axes[1].tori():
                bound = float(upper(Kernel(weight, axes), Cover(axes, (None, torus))))
                assert bound >= true * (1 - 1e-12), (taps, h, padding, middle, torus)
            if (taps, stride, padding, middle, h % 2) == (3, 2, 1, 0.0, 0):
                assert true == pytest.approx(math.sqrt(2 + 2 * math.cos(2 * math.pi / (h + 1))))


def families(cin: int, cout: int, seed: int):
    """Kernels that peak at different frequencies: random, smooth, rough, mixed, in between, one strong filter."""
    g = seeded(seed)
    noise = torch.randn(cout, cin, 3, 3, generator=g)
    mix = torch.randn(cout, cin, 1, 1, generator=g)
    low, high, mid = (torch.tensor(v) for v in ([1.0, 2.0, 1.0], [-1.0, 2.0, -1.0], [1.0, 0.0, -1.0]))
    yield "gauss", noise
    yield "low", mix * torch.outer(low, low) + 0.05 * noise
    yield "high", mix * torch.outer(high, high) + 0.05 * noise
    yield "low-high", mix * torch.outer(low, high) + 0.05 * noise
    yield "mid", mix * torch.outer(mid, mid) + 0.05 * noise
    strong = torch.randn(cout, 1, 1, 1, generator=g) * torch.randn(1, cin, 1, 1, generator=g)
    yield "trained", noise + 2 * strong * torch.randn(3, 3, generator=g)


@pytest.mark.parametrize(
    "size, channels, stride, ratio",
    [
        (32, (4, 6), 1, 1.005),
        (16, (8, 40), 1, 1.005),
        (16, (40, 8), 2, 1.005),
        ((16, 24), (4, 8), (1, 2), 1.005),
        (8, (16, 40), 1, 1.02),
        (8, (32, 16), 2, 1.02),
        (4, (32, 80), 1, 1.002),
        ((3, 4), (48, 32), 1, 1.002),
        (2, (80, 80), 1, 1.002),
    ],
)
def test_tightness(size, channels, stride, ratio):
    for seed, (name, weight) in enumerate(families(*channels, seed=1)):
        norm = conv_norm(weight, size, stride=stride, padding=1)
        below = lower_norm(weight, size, stride=stride, padding=1, steps=200, seed=seed).value
        assert norm.kind in ("exact", "upper")
        assert below * (1 - 1e-9) <= norm.value <= ratio * below, (name, norm, below)


def test_proof_on_a_large_small_map():
    weight = 0.01 * torch.randn(320, 64, 3, 3, generator=seeded(3))
    norm = conv_norm(weight, 4, padding=1)
    below = lower_norm(weight, 4, padding=1)
    assert (norm.kind, norm.method) == ("upper", "cholesky")
    assert below.value <= norm.value <= 1.002 * below.value


def test_exact_cases():
    g = seeded(5)
    one = torch.randn(7, 5, 1, 1, generator=g)
    for stride in (1, 2):
        norm = conv_norm(one, 9, stride=stride)
        assert norm.kind == "exact" and norm.value == pytest.approx(reshaped_norm(one), rel=1e-9)
    patches = torch.randn(7, 5, 2, 2, generator=g)
    norm = conv_norm(patches, 10, stride=2)
    assert (norm.kind, norm.method) == ("exact", "svd") and norm.value == pytest.approx(reshaped_norm(patches))
    ring = torch.randn(12, 12, 3, 3, generator=g)
    norm = conv_norm(ring, 16, padding=1, padding_mode="circular")
    assert (norm.kind, norm.method) == ("exact", "torus")
    symbols = torch.fft.fft2(ring.double(), s=(16, 16)).permute(2, 3, 0, 1)
    assert norm.value == pytest.approx(float(torch.linalg.matrix_norm(symbols, 2).max()), rel=1e-9)
    # A 1x1 kernel whose stride steps over the only pixel is the zero map.
    assert conv_norm(torch.ones(1, 1, 1, 1), 1, stride=2, padding=1).value == 0.0
    assert conv_norm(torch.zeros(2, 3, 3, 3), 8, padding=1) == Norm(0.0, "exact", "zero operator")


def test_windows_that_never_lie_inside_give_an_upper_bound_only():
    """Two pixels, each read by a tap of its own: the map is diag(1, 1); a torus joins both taps and says √2."""
    kw = dict(stride=(1, 3), padding=(0, 2))
    assert true_norm(torch.ones(1, 1, 1, 3), (1, 2), **kw) == 1.0
    torus, found = (conv_norm(torch.ones(1, 1, 1, 3), (1, 2), method=m, **kw) for m in ("torus", "auto"))
    assert torus.kind == "upper" and torus.value == pytest.approx(math.sqrt(2)) and found.value == pytest.approx(1.0)


def test_reshaped_norm_misses_a_factor_of_three_and_two():
    box = torch.ones(1, 1, 3, 3)
    ratio = float(lower_norm(box, 48, padding=1)) / reshaped_norm(box)
    assert 2.97 < ratio <= lip_conv_reshaped(1.0, 3) == 3.0
    corners = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 0, 1]]).view(1, 1, 3, 3)
    ratio = float(lower_norm(corners, 48, stride=2, padding=1)) / reshaped_norm(corners)
    assert 1.98 < ratio <= lip_conv_reshaped(1.0, 3, 2) == 2.0


def test_estimates_are_reached_from_below():
    weight = torch.randn(6, 4, 3, 3, generator=seeded(7)).double()
    true = true_norm(weight, (6, 5), padding=1)
    lower = [lower_norm(weight, (6, 5), padding=1, steps=n).value for n in (1, 4, 100)]
    assert lower[0] < lower[1] < lower[2] <= true * (1 + 1e-12) and lower[2] > 0.9999 * true


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_scale_and_layout_do_not_matter(scale):
    weight = torch.randn(4, 3, 3, 3, generator=seeded(8))
    true = true_norm(weight, (9, 9), padding=1)
    scaled = (weight.double() * scale).to(memory_format=torch.channels_last)
    for method in ("auto", "torus", "cholesky"):
        norm = conv_norm(scaled, 9, padding=1, method=method)
        assert norm.value / scale == pytest.approx(conv_norm(weight.double(), 9, padding=1, method=method).value)
    assert lower_norm(scaled, 9, padding=1).value / scale == pytest.approx(lower_norm(weight, 9, padding=1).value)
    assert conv_norm(scaled, 9, padding=1).value / scale == pytest.approx(true, rel=1e-3)
    single = scaled.float()
    project(single, 9, 2.0, padding=1)
    assert true_norm(single, (9, 9), padding=1) <= 2.0


@pytest.mark.parametrize(
    "channels, size, kw", [((8, 40), (16, 16), dict(padding=1)), ((6, 9), (5, 8), dict(padding=1, stride=2))]
)
def test_fits_never_proves_a_false_claim(channels, size, kw):
    """The attack: kernels of all families whose norm is a hair above c, in both precisions."""
    for seed in range(4):
        for name, weight in families(*channels, seed=seed):
            true = lower_norm(weight, size, steps=200, **kw).value  # reached by an input: the norm is at least this
            for over in (1e-6, 1e-4, 1e-2):
                scaled = weight * (2.0 * (1 + over) / true)
                assert not fits(scaled, size, 2.0, **kw), (name, over)
                assert not fits(scaled.double(), size, 2.0, **kw), (name, over)
            assert fits(weight * (1.9 / true), size, 2.0, **kw), name


def test_project():
    weight = torch.randn(6, 4, 3, 3, generator=seeded(9))
    before = weight.clone()
    assert project(weight, 5, 1e3, padding=1) == 1.0 and torch.equal(weight, before)
    factor = project(weight, 5, 1.8, padding=1)
    assert torch.allclose(weight, before * factor)
    assert 0.99 * 1.8 <= true_norm(weight, (5, 5), padding=1) <= 1.8
    grouped = torch.randn(6, 2, 3, 3, generator=seeded(9))
    project(grouped, (7, 3), 1.0, padding="same", groups=3)
    assert 0.9 < true_norm(grouped, (7, 3), padding="same", groups=3) <= 1.0


GUARDED = [
    dict(shape=(8, 3, 3, 3), size=(5, 5), padding=1),
    dict(shape=(8, 3, 3, 3), size=(6, 6), padding=1, exact_order=0),
    dict(shape=(6, 4, 3, 3), size=(8, 6), padding=1, stride=2, exact_order=0),
    dict(shape=(9, 6, 1, 1), size=(3, 3)),
    dict(shape=(6, 2, 3, 3), size=(4, 4), padding=1, groups=3),
]


@pytest.mark.parametrize("layer", GUARDED, ids=lambda d: f"{d['shape']}@{d['size']}")
def test_guard_keeps_the_norm_in_500_steps(layer, monkeypatch):
    """Steps that push the norm up, as Adam would make them; the oracle looks after each step."""
    kw = {k: v for k, v in layer.items() if k in ("padding", "stride", "groups")}
    size, c = layer["size"], 2.0
    g = seeded(11)
    weight = torch.nn.Parameter(0.01 * torch.randn(layer["shape"], generator=g))
    monkeypatch.setattr(guards, "EXACT_ORDER", layer.get("exact_order", guards.EXACT_ORDER))
    guard = NormGuard(size, **kw)
    push = torch.randn(layer["shape"], generator=g).sign()
    largest_seen = 0.0
    for step in range(500):
        with torch.no_grad():
            rate = 3e-3 if step < 250 else 3e-4
            weight += rate * (push + torch.randn(layer["shape"], generator=g)).clamp(-1, 1)
        before = weight.detach().clone()
        factor = guard.enforce(weight, c)
        assert (factor == 1.0) == torch.equal(weight.detach(), before)
        true = true_norm(weight.detach(), size, **kw)
        assert true <= c * (1 + 1e-12), step
        largest_seen = max(largest_seen, true)
    assert largest_seen > 0.9 * c  # the constraint was active, and is not wasteful
    assert weight.requires_grad and weight.is_leaf and weight.grad_fn is None


def test_outputs_that_a_circular_map_repeats_are_counted():
    """A box with padding 3 on 18 pixels gives 22 outputs an axis, 4 of them twice: its norm is 15, that on the torus 9."""
    weight, kw = torch.ones(1, 1, 3, 3), dict(padding=3, padding_mode="circular")
    true = true_norm(weight, (18, 18), **kw)
    assert (
        true > 15
        and not fits(weight, 18, 9.5, **kw)
        and not fits(weight, 18, 15.0, **kw)
        and fits(weight, 18, 18.1, **kw)
    )
    axes = geometry_of(weight, 18, **kw).axes
    assert climb(Kernel(weight, axes), torus_covers(axes)[0], 9.0) >= true
    NormGuard(18, **kw).enforce(weight, 10.0)
    assert true * float(weight.max()) <= 10.0


def test_guard_state():
    weight = torch.randn(8, 4, 3, 3, generator=seeded(12))
    guard = NormGuard((9, 9), padding=1)
    assert guard.enforce(weight, 2.0) < 1.0 and guard.enforce(weight, 2.0) == 1.0
    for other in (copy.deepcopy(guard), pickle.loads(pickle.dumps(guard))):
        changed = weight * 1.5
        assert other.enforce(changed, 2.0) < 1.0
        assert true_norm(changed, (9, 9), padding=1) <= 2.0
    # Another weight, another shape or another c than before: nothing wrong is remembered.
    assert guard.enforce(weight, 1.0) < 1.0 and true_norm(weight, (9, 9), padding=1) <= 1.0
    wide = torch.randn(5, 4, 3, 3, generator=seeded(13)).double()
    guard.enforce(wide, 1.0)
    assert true_norm(wide, (9, 9), padding=1) <= 1.0
    zero = torch.zeros(2, 2, 3, 3)
    assert NormGuard(4, padding=1).enforce(zero, 1.0) == 1.0
    with pytest.raises(ValueError, match="nan.*finite"):
        guard.enforce(torch.full((5, 4, 3, 3), math.nan), 1.0)
    half = torch.randn(8, 4, 3, 3, generator=seeded(14)).bfloat16()
    NormGuard((9, 9), padding=1).enforce(half, 2.0)
    assert 1.4 < true_norm(half, (9, 9), padding=1) <= 2.0  # coarse entries: more room for their rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kw", [dict(padding=1), dict(padding=1, stride=2), dict(padding=3, padding_mode="circular")])
def test_scaling_leaves_room_for_the_rounding_of_the_entries(kw, dtype):
    """From far above to c: the rounded weight keeps to c, loses little, and what is proved need not be scaled again."""
    for seed, (name, weight) in enumerate(families(4, 6, seed=21)):
        weight = weight.to(dtype)
        guard = NormGuard((4, 5), **kw)
        assert guard.enforce(weight, 0.7) < 1.0 < guard.found
        true = true_norm(weight, (4, 5), **kw)
        assert (0.5 if dtype == torch.bfloat16 else 0.69) < true <= 0.7, (seed, name)
        assert guard.enforce(weight, 0.7) == 1.0 and guard.found == 0.7, (seed, name)


def test_equal_entries_that_all_round_upwards():
    """After the division all entries of a box are one number, and for some bounds c its rounding lies above it."""
    norm = true_norm(torch.ones(1, 1, 3, 3), (6, 6), padding=1)
    for c in torch.linspace(0.5, 1.0, 60, dtype=torch.double).tolist():
        weight = torch.full((1, 1, 3, 3), 1.7).bfloat16()
        assert NormGuard((6, 6), padding=1).enforce(weight, c) < 1.0
        assert float(weight[0, 0, 0, 0]) * norm <= c


def test_guard_tries_the_best_cover_first():
    """A kernel for which the first torus is not the best: the guard remembers which one was, for this kernel size only."""
    weight = torch.ones(5, 8, 3, 3).double()
    axes = geometry_of(weight, (8, 8), padding=1).axes
    bounds = [upper(Kernel(weight, axes), cover) for cover in torus_covers(axes)]
    guard = NormGuard((8, 8), padding=1)
    guard.enforce(weight, 2.0)
    assert guard.found == min(bounds) and guard._cover == torus_covers(axes)[bounds.index(min(bounds))]
    assert guard.enforce(weight, 2.0) == 1.0
    other = torch.ones(5, 8, 1, 3).double()  # another kernel, whose cover is none of these
    guard.enforce(other, 2.0)
    assert true_norm(other, (8, 8), padding=1) <= 2.0


def test_upper_is_above_the_norm_in_its_last_digits():
    """The box on h pixels has norm 1 + 2cos(π/(h + 1)), and a twisted torus gives just that: rounding must not fall below."""
    root = {n: Decimal(n).sqrt() for n in (2, 3, 5)}
    norms = {2: Decimal(2), 3: 1 + root[2], 4: (3 + root[5]) / 2, 5: 1 + root[3]}
    for h, norm in norms.items():
        axes = geometry_of(torch.ones(1, 1, 1, 3), (1, h), padding=(0, 1)).axes
        for scale in torch.rand(20, generator=seeded(20), dtype=torch.double).tolist():
            kernel = Kernel(torch.full((1, 1, 1, 3), scale, dtype=torch.double), axes)
            bound = min(float(upper(kernel, cover)) for cover in [*torus_covers(axes), Cover(axes)])
            assert bound == pytest.approx(scale * float(norm), rel=1e-9)
            assert Decimal(bound) >= Decimal(scale) * norm, (h, scale)


@pytest.mark.parametrize("channels", [8, 200])
def test_rounding_covers_how_gram_matrices_are_formed(channels):
    """Sums over channels in double precision against extended precision: the error e of a proof is above the difference."""
    weight = torch.randn(channels, 4, 3, 3, generator=seeded(21)).double()
    axes = geometry_of(weight, (8, 8), padding=1).axes
    kernel = Kernel(weight, axes)
    w = weight.numpy().astype(np.longdouble).reshape(channels, 4, 9)
    exact = np.einsum("oit,oju->tuij", w, w).reshape(81, 16)  # K(t, u) = W_tᵀW_u
    change = (kernel.products("in")[0].numpy() - exact).reshape(9, 9, 4, 4)
    for cover in torus_covers(axes):
        delta, error = kernel.rounding(cover)
        assert (
            0 < np.linalg.norm(change.astype(float)) <= float(error) < 1e-9 * float(kernel.square) and 0 < delta < 1e-9
        )


@pytest.mark.parametrize("shape, kw", [((3, 5, 3, 3), {}), ((4, 2, 5, 5), dict(padding=2)), ((60, 40, 1, 1), {})])
def test_rounding_is_at_least_that_of_the_theorems(shape, kw):
    """What an attack could show is far below what the theorems allow for, so it cannot tell whether a constant is too small.

    Cholesky of order n (Higham, Theorem 10.3): (n + 1)u·n/(1 − 2(n + 1)u) of ℓ². Gram matrices: (m + T²)u of Σ|A||W_t|ᵀ|W_u|,
    whose norm is at most T‖W‖_F², for real and imaginary part; m is the longest inner product of a tap, on either side.
    """
    weight, u = torch.randn(shape, generator=seeded(22)).double(), 2.0**-53
    axes = geometry_of(weight, (6, 6), **kw).axes
    kernel, (cout, cin, kh, kw_) = Kernel(weight, axes), shape
    for cover in [*torus_covers(axes), *half_covers(axes), Cover(axes)]:
        delta, error = kernel.rounding(cover)
        n, taps = max(cin, cout) * max(cover.blocks(side) for side in ("in", "out")), kh * kw_
        assert delta >= (n + 1) * u * n / (1 - 2 * (n + 1) * u)
        assert float(error) >= 2 * (max(cin, cout) + taps**2) * u * taps * float(weight.square().sum())
        assert delta < 100 * n * n * u + 1e-13 and float(error) < 1e-9 * float(weight.square().sum())


@pytest.mark.parametrize("shape, size, kw", [((200, 1, 1, 1), (1, 1), {}), ((1, 1, 3, 3), (8, 8), dict(padding=1))])
def test_banded_proof_fails_just_below_the_norm(shape, size, kw):
    """Guesses that lie below the norm by less than the rounding margin: what comes back is above it."""
    weight = torch.randn(shape, generator=seeded(19)).double()
    true = true_norm(weight, size, **kw)
    axes = geometry_of(weight, size, **kw).axes
    gram = BandedGram(Kernel(weight, axes), axes)
    for under in (1e-14, 1e-13, 1e-12):
        bound = gram.bound(true * (1 - under) / (1 + 5e-4))  # the first level is guess·(1 + 5e-4)
        assert true * (1 - 2e-15) <= bound < true * 1.001, under


@pytest.mark.parametrize("seed", range(6, 10))
@pytest.mark.parametrize("exponent", [-10, -18, -22, -26, -30, -38, -40])
def test_rows_that_all_but_vanished(seed, exponent):
    """Gram matrices with tiny entries, of which single-precision eigenvalues fail, or are wrong without a word."""
    g = seeded(seed)
    weight = torch.randn(8, 16, 3, 3, generator=g) * 0.1
    weight[torch.rand(8, generator=g) < 0.7] *= 10.0**exponent
    axes = geometry_of(weight, 8, padding=1).axes
    true = true_norm(weight, (8, 8), padding=1)
    for cover in torus_covers(axes):
        assert true * (1 - 1e-12) <= upper(Kernel(weight, axes), cover) <= true * 1.2
    assert NormGuard((8, 8), padding=1).enforce(weight, 1.0) <= 1.0
    assert true_norm(weight, (8, 8), padding=1) <= 1.0


def test_the_row_that_stopped_training():
    torch.manual_seed(6)
    weight = torch.randn(8, 16, 3, 3) * 0.1
    weight[torch.rand(8) < 0.7] *= 1e-22
    assert NormGuard((8, 8), padding=1).enforce(weight, 1.0) < 1.0
    assert 0.9 < true_norm(weight, (8, 8), padding=1) <= 1.0


def test_without_eigenvalues_there_is_no_bound(monkeypatch):
    """Whatever the library does when it finds none: no number is taken for a bound, no weight scaled by it."""
    weight = torch.randn(8, 16, 3, 3, generator=seeded(16))
    before, axes = weight.clone(), geometry_of(weight, 8, padding=1).axes

    def refuse(gram):
        raise torch.linalg.LinAlgError("no convergence")

    for broken in (refuse, lambda gram: torch.full(gram.shape[:2], math.nan)):
        monkeypatch.setattr(torch.linalg, "eigvalsh", broken)
        assert upper(Kernel(weight, axes), torus_covers(axes)[0]) == math.inf
        with pytest.raises(ValueError, match="to be bounded"):
            NormGuard((8, 8), padding=1).enforce(weight, 1.0)
        assert torch.equal(weight, before)


@pytest.mark.parametrize("top", [1e150, 1e200, 1e308])
def test_largest_numbers(top):
    """An entry near the largest double: a norm, or one sentence; never infinity as a lower bound."""
    weight = torch.randn(4, 4, 3, 3, generator=seeded(17)).double()
    weight[0, 0, 1, 1] = top
    for method in ("auto", "torus", "cholesky", "dense"):
        assert conv_norm(weight, 8, padding=1, method=method).value == pytest.approx(top, rel=1e-3)
    assert lower_norm(weight, 8, padding=1).value == pytest.approx(top, rel=1e-3)
    with pytest.raises(ValueError, match="too large to be bounded"):
        NormGuard(8, padding=1).enforce(weight, 2.0)
    for norm in (conv_norm, lower_norm):
        with pytest.raises(ValueError, match=r"norm = .*: must be at most 1.798e\+308"):
            norm(torch.full_like(weight, 1.7e308), 8, padding=1)


def test_smallest_numbers():
    """Products of entries of 1e-200 vanish: no bound of zero comes from it."""
    weight = 1e-200 * torch.randn(4, 4, 3, 3, generator=seeded(18)).double()
    c = 0.1 * conv_norm(weight, 8, padding=1).value
    assert 0 < c < 1e-199 and not fits(weight, 8, c, padding=1)
    NormGuard(8, padding=1).enforce(weight, c)
    assert conv_norm(weight, 8, padding=1).value <= c


def test_lower_matmul_precision_cannot_spoil_a_proof():
    """Products are formed in double precision, which neither autocast nor a setting of torch changes."""
    weight = torch.randn(40, 8, 3, 3, generator=seeded(15))
    norm = conv_norm(weight, 16, padding=1, method="torus").value
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert conv_norm(weight, 16, padding=1, method="torus").value == norm
            assert fits(weight, 16, norm, padding=1) and not fits(weight, 16, norm * (1 - 1e-9), padding=1)
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.inference_mode():
        assert conv_norm(weight, 16, padding=1).kind == "upper"


W = torch.ones(4, 2, 3, 3)
BAD = [
    (dict(weight=torch.full((4, 2, 3, 3), math.nan)), r"weight.*nan.*finite"),
    (dict(weight=torch.full((4, 2, 3, 3), math.inf)), r"weight.*inf.*finite"),
    (dict(weight=torch.ones(4, 2, 3)), r"weight = \(4, 2, 3\): must be"),
    (dict(weight=torch.ones(4, 2, 3, 3, dtype=torch.long)), r"int64: must be real floating point"),
    (dict(weight=torch.ones(0, 2, 3, 3)), r"weight = \(0, 2, 3, 3\): must be"),
    (dict(padding_mode="reflect"), r"padding_mode = 'reflect': cannot be bounded; must be zeros or circular"),
    (dict(padding_mode="replicate"), r"padding_mode = 'replicate': cannot be bounded"),
    (dict(size=2, padding=0), r"size = \(2, 2\): kernel \(3, 3\).*larger than the padded map"),
    (dict(size=0), r"size = 0: must be a whole number >= 1"),
    (dict(size=(8, 8, 8)), r"size = \(8, 8, 8\): must be"),
    (dict(size=8.0), r"size = 8.0: must be"),
    (dict(stride=0), r"stride = 0: must be"),
    (dict(dilation=-1), r"dilation = -1: must be"),
    (dict(padding=-1), r"padding = -1: must be"),
    (dict(padding="full"), r"padding = 'full': must be"),
    (dict(padding="same", stride=2), r"padding = 'same' with stride = \(2, 2\): must have stride 1"),
    (dict(padding=9, padding_mode="circular"), r"padding = \(9, 9\): must be at most size"),
    (dict(groups=3), r"groups = 3: must be .* divides C_out = 4"),
    (dict(groups=0), r"groups = 0: must be"),
    (dict(method="magic"), r"method = 'magic': must be one of auto"),
    (dict(method="dense", size=200), r"method = 'dense': the operator is too large"),
]


@pytest.mark.parametrize("change, message", BAD, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_bad_input_is_named(change, message):
    arguments = dict(weight=W, size=8, padding=1) | change
    with pytest.raises(ValueError, match=message):
        conv_norm(arguments.pop("weight"), arguments.pop("size"), **arguments)


def test_bad_bounds_are_named():
    for c in (0.0, -1.0, math.nan, math.inf):
        for call in (lambda c=c: fits(W, 8, c), lambda c=c: project(W, 8, c), lambda c=c: NormGuard(8).enforce(W, c)):
            with pytest.raises(ValueError, match=r"c = .*: must be in \(0, inf\)"):
                call()
    with pytest.raises(ValueError, match="weight.*nan"):
        fits(torch.full((4, 2, 3, 3), math.nan), 8, 1.0)
    with pytest.raises(ValueError, match="steps = 0"):
        lower_norm(W, 8, steps=0)


def test_constraint_where_entries_are_subnormal():
    """Half precision has steps of 6e-8: a kernel that is scaled to 1e-6 rounds by more than its relative precision."""
    weight = torch.randn(4, 4, 3, 3, generator=seeded(3)).half()
    project(weight, 8, 1e-6, padding=1)
    assert true_norm(weight.double(), (8, 8), padding=1) <= 1e-6
    step, box = (
        torch.finfo(torch.half).tiny * torch.finfo(torch.half).eps,
        true_norm(torch.ones(1, 1, 3, 3), (8, 8), padding=1),
    )
    for share in (0.7, 1.7, 40.6):  # all entries of a box would be rounded to the next step, upwards
        weight, c = torch.ones(1, 1, 3, 3).half(), share * step * box
        project(weight, 8, c, padding=1)
        assert box * float(weight.max()) <= c


def test_constraint_where_no_window_reaches_the_map():
    weight = torch.ones(2, 2, 1, 1)
    guard = NormGuard(1, padding=2, stride=3)
    assert guard.enforce(weight, 0.5) == 1.0 and guard.found == 0.5 and (weight == 1).all()


def test_taps_that_read_nothing_do_not_set_the_scale():
    weight = torch.ones(8, 9, 13, 13).double()
    weight[:, :, 1:-1, 1:-1] = 1e-60
    assert conv_norm(weight, 6, padding=6).value >= 0
