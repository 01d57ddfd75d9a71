"""Constants of the single operations: sound on random pairs, and reached (>= 0.99) where the lemma is tight."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipmdeq import bounds
from lipmdeq.bounds import (
    check_range,
    check_whole,
    empirical_ratio,
    lip_compose,
    lip_conv,
    lip_conv_reshaped,
    lip_convex,
    lip_down,
    lip_dropout,
    lip_gn,
    lip_mgn,
    lip_relu,
    lip_residual,
    lip_srelu,
    lip_sum,
    lip_up,
)


def mgn(z, gamma):
    return gamma * (z - z.mean())


def gn(z, gamma, eps):
    return gamma * (z - z.mean()) / np.sqrt(z.var() + eps)


def conv(x, kernel, stride):
    """Single-channel 3x3 conv with zero padding 1, by definition."""
    h = (x.shape[0] - 1) // stride + 1
    padded = np.pad(x, 1)
    windows = [[padded[stride * i : stride * i + 3, stride * j : stride * j + 3] for j in range(h)] for i in range(h)]
    return np.array([[(w * kernel).sum() for w in row] for row in windows])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(1e-3, 10), st.floats(0, 0.9))
def test_sound_on_random_pairs(seed, d, a, p):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, d)) * 10.0 ** rng.uniform(-3, 3)
    gamma, mask = rng.standard_normal(d), rng.random(d) >= p
    allow = 1 + 1e-9
    assert empirical_ratio(lambda z: mgn(z, gamma), x, y) <= lip_mgn(gamma) * allow
    assert empirical_ratio(lambda z: gn(z, gamma, 1e-5), x, y) <= lip_gn(gamma, 1e-5) * allow
    assert empirical_ratio(lambda z: np.maximum(z, 0), x, y) <= lip_relu() * allow
    slope = min(a, 1.0)
    assert empirical_ratio(lambda z: np.maximum(slope * z, 0), x, y) <= lip_srelu(slope) * allow
    assert empirical_ratio(lambda z: mask * z / (1 - p), x, y) <= lip_dropout(p) * allow
    A, B = rng.standard_normal((2, d, d))
    LA, LB = (lip_conv(np.linalg.norm(W, 2)) for W in (A, B))
    assert empirical_ratio(lambda z: A @ z + B @ z, x, y) <= lip_sum(LA, LB) * allow
    assert empirical_ratio(lambda z: A @ np.tanh(B @ z), x, y) <= lip_compose(LA, 1.0, LB) * allow
    assert empirical_ratio(lambda z: z + A @ z, x, y) <= lip_residual(LA) * allow
    alpha = min(max(p, 0.01), 0.99)
    assert empirical_ratio(lambda z: (1 - alpha) * z + alpha * (A @ z), x, y) <= lip_convex(alpha, LA) * allow


def test_witnesses():
    e = np.array([1.0, -1.0, 0.0, 0.0])
    zero = np.zeros(4)
    small = 1e-6 * e  # around zero variance GN is steepest
    assert empirical_ratio(lambda z: gn(z, -1.5, 1e-5), small, zero) >= 0.99 * lip_gn(-1.5)
    assert empirical_ratio(lambda z: gn(z, 1.0, 1e-5), small[:2], zero[:2]) >= 0.99 * lip_gn(1.0)  # d = 2 too
    assert empirical_ratio(lambda z: mgn(z, 0.7), e, zero) == pytest.approx(lip_mgn(0.7))
    assert empirical_ratio(lambda z: np.maximum(0.4 * z, 0), abs(e), zero) == pytest.approx(lip_srelu(0.4))
    mask = np.array([1, 0, 1, 0])
    assert empirical_ratio(lambda z: mask * z / 0.7, np.eye(4)[0], zero) == pytest.approx(lip_dropout(0.3))
    assert lip_dropout(0.3, train=False) == 1
    assert empirical_ratio(lambda z: z + 2 * z, e, zero) == pytest.approx(lip_residual(2))
    assert empirical_ratio(lambda z: 0.7 * z + 0.3 * 5 * z, e, zero) == pytest.approx(lip_convex(0.3, 5))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_up_sampling_is_reached_by_every_input(s, t, seed):
    x, y = np.random.default_rng(seed).standard_normal((2, 3, 5))
    ratio = empirical_ratio(lambda z: np.repeat(np.repeat(z, s, axis=0), t, axis=1), x, y)
    assert ratio == pytest.approx(lip_up(s, t))
    assert lip_up(2**s) == 2**s


@pytest.mark.parametrize(
    ("stride", "kernel"), [(1, np.ones((3, 3))), (2, np.array([[1, 0, 1], [0, 0, 0], [1, 0, 1.0]]))]
)
def test_reshaped_kernel_norm_misses_a_factor(stride, kernel):
    """A conv can be 3 (stride 1) or 2 (stride 2) times larger than its reshaped kernel: ⌈k/s⌉, and no more."""
    size = 65
    x = np.outer(*[np.sin(np.pi * (np.arange(size) + 1) / (size + 1))] * 2)
    if stride == 2:
        x *= np.outer(*[np.arange(size) % 2] * 2)  # the corner taps see the odd pixels only
    reshaped = np.linalg.norm(kernel)
    ratio = np.linalg.norm(conv(x, kernel, stride)) / np.linalg.norm(x)
    bound = lip_conv_reshaped(reshaped, 3, stride)
    assert bound == pytest.approx((3 if stride == 1 else 2) * reshaped)
    assert 0.99 * bound <= ratio <= bound


def test_down_chain():
    assert lip_down(1, 2, 1.5, 0.4) == pytest.approx(3)
    assert lip_down(3, 2, 1.5, 0.4) == pytest.approx(3 * (0.4 * 3) ** 2)
    assert lip_down(2, math.inf, 1, 0.4) == math.inf


def test_lemma_31_with_no_bound_and_with_constants():
    assert lip_sum(1, math.inf) == math.inf
    assert lip_compose(2, math.inf) == math.inf
    assert lip_compose(0, math.inf) == 0  # a constant map
    assert lip_compose() == 1 and lip_sum() == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: lip_gn(1, 0),
        lambda: lip_gn(math.nan),
        lambda: lip_mgn([1.0, math.inf]),
        lambda: lip_mgn("1"),
        lambda: lip_srelu(1.1),
        lambda: lip_dropout(1),
        lambda: lip_conv(-1),
        lambda: lip_conv(math.nan),
        lambda: lip_up(0),
        lambda: lip_up(2, 1.5),
        lambda: lip_down(0, 1, 1, 1),
        lambda: lip_sum(1, -1),
        lambda: lip_compose(1, math.nan),
        lambda: empirical_ratio(lambda z: z, np.ones(2), np.ones(2)),
        lambda: check_range("x", 2, 0, 1, "[]"),
        lambda: check_whole("k", True),
    ],
)
def test_bad_input(call):
    with pytest.raises(ValueError, match=" = .*: must be"):
        call()


def test_a_product_that_underflows_on_the_way_is_not_zero():
    assert bounds.lip_compose(1e-200, 1e-200, 1e200, 1e200) == pytest.approx(1.0)
    assert bounds.lip_compose(1e-200, 1e-200, math.inf) == math.inf and bounds.lip_compose(0.0, math.inf) == 0.0
    assert bounds.a_priori_error(math.inf, 1, 0.0) == 0.0
