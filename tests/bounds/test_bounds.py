"""Closed forms of L: golden numbers of the paper's settings, properties, inverse problems, bad input."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lipmdeq.bounds import (
    ABLATIONS,
    READINGS,
    LipschitzSpec,
    PotentialSpec,
    empirical_ratio,
    feasible,
    fusion_weights,
    largest,
    lip_convex,
)
from lipmdeq.experiments.bound import advise

specs = st.builds(
    LipschitzSpec,
    a=st.floats(0.01, 1),
    c=st.floats(0.05, 5),
    gamma=st.floats(0.05, 3),
    alpha1=st.floats(0.01, 0.99),
    alpha2=st.floats(0.01, 0.99),
    n=st.integers(1, 6),
    p=st.floats(0, 0.9),
    post_affine=st.booleans(),
)


# ------------------------------------------------------------------------------------------------ golden numbers


@pytest.mark.parametrize(
    ("a", "p", "expected", "digits"),
    [
        (0.1, 0.3, (0.0252, 0.0297, 0.0267, 0.0232), 4),
        (0.35, 0.3, (0.5947, 0.6993, 0.6424, 0.5917), 4),
        (0.4, 0.3, (0.8543, 1.0035, 0.9255, 0.8611), 4),
        (1, 0.3, (12.765, 14.427, 13.641, 13.276), 3),
        (0.1, 0, (0.0224, 0.0264, 0.0238, 0.0206), 4),
        (0.4, 0, (0.6760, 0.7940, 0.7323, 0.6814), 4),
    ],
)
def test_L_golden(a, p, expected, digits):
    spec = LipschitzSpec(a=a, p=p)
    assert tuple(round(spec.L(r), digits) for r in READINGS) == expected


@pytest.mark.parametrize(("a", "expected"), [(0.1, 0.0264), (0.4, 0.794), (1, 10.74)])
def test_L_in_test_mode_golden(a, expected):
    spec = LipschitzSpec(a=a)
    digits = len(str(expected).split(".")[1])
    assert round(spec.L("reported", train=False), digits) == expected
    for r in READINGS:
        assert spec.L(r, train=False) == replace(spec, p=0.0).L(r)


def test_fusion_weights_golden():
    w = fusion_weights(4)
    assert np.all(np.diag(w) == 0)
    off = np.round(w[~np.eye(4, dtype=bool)].reshape(4, 3), 3)
    assert off.tolist() == [[0.665, 0.245, 0.090], [0.665, 0.245, 0.090], [0.422, 0.422, 0.155], [0.333, 0.333, 0.333]]


@pytest.mark.parametrize(("train", "expected"), [(True, (0.3995, 0.4114, 0.4216)), (False, (0.4363, 0.4491, 0.4593))])
def test_largest_slope_golden(train, expected):
    found = [largest(LipschitzSpec(), "a", 1.0, r, train) for r in ("reported", "spectral", "perron")]
    assert tuple(round(a, 4) for a in found) == expected


def test_condition_of_the_perron_weights_golden():
    spec = LipschitzSpec(a=0.4)
    assert round(spec.cond_D, 2) == 1.73
    assert spec.D.min() == 1


@pytest.mark.parametrize(("a", "expected", "digits"), [(0.1, 0.129, 3), (0.4, 8.78, 2), (1, 378, 0)])
def test_reshaped_kernel_norm_golden(a, expected, digits):
    # 3x3 convs count 3c, stride-2 ones 2c, 1x1 ones c; Frobenius with the full up path, p = 0.3
    assert round(LipschitzSpec(a=a).reshaped().L("reported"), digits) == expected


def test_factors_are_the_formulas_of_the_paper():
    spec = LipschitzSpec(a=0.3, c=1.7, gamma=1.2, alpha1=0.4, alpha2=0.25, n=3, p=0.2)
    a, c, g = spec.a, spec.c, spec.gamma
    assert spec.L_hat() == pytest.approx(0.6 * g * a + 0.4 * g**3 * c**2 * a**2 / 0.8)
    assert spec.L_hat(train=False) == pytest.approx(0.6 * g * a + 0.4 * g**3 * c**2 * a**2)
    assert spec.L_bar == pytest.approx(g * c * a)
    assert replace(spec, post_affine=False).L_bar == pytest.approx(c * a)
    w = fusion_weights(3)
    for up, extra in (("printed", 1), ("full", c * g)):
        expected = [
            [0.75, 0.25 * w[0, 1] * 2 * extra, 0.25 * w[0, 2] * 4 * extra],
            [0.25 * w[1, 0] * c * g, 0.75, 0.25 * w[1, 2] * 2 * extra],
            [0.25 * w[2, 0] * c * g * (a * c * g), 0.25 * w[2, 1] * c * g, 0.75],
        ]
        np.testing.assert_allclose(spec.fusion_matrix(up), expected)
    for r in ("printed", "reported"):
        tilde = spec.L_tilde(r)
        assert spec.L(r) == pytest.approx(spec.L_hat() * math.sqrt((tilde**2).sum()) * spec.L_bar)
    np.testing.assert_allclose(spec.comparison_matrix(), spec.L_hat() * spec.fusion_matrix() * spec.L_bar)


def test_one_resolution_has_no_partners():
    spec = LipschitzSpec(n=1)
    assert spec.fusion_matrix().tolist() == [[0.7]]
    assert fusion_weights(1).tolist() == [[0.0]]
    assert {spec.L(r) for r in READINGS} == {spec.L_hat() * 0.7 * spec.L_bar}
    assert spec.cond_D == 1
    assert 0.4 < largest(spec, "a") < 1


# ------------------------------------------------------------------------------------------------ MDEQ and ablations


def test_mdeq_explodes():
    spec = LipschitzSpec(c=2.0, gamma=1.0, p=0.3)
    ops, G, c = spec.ablation("MDEQ"), 1 / math.sqrt(1e-5), 2.0
    assert ops.L_hat == pytest.approx(G * (1 + G**2 * c**2 / 0.7))
    assert ops.L_bar == pytest.approx(G * c)
    M = ops.fusion_matrix()
    assert M[0, 0] == 1
    assert M[0, 3] == pytest.approx(8 * c * G)
    assert M[3, 0] == pytest.approx((G * c) ** 3)
    assert all(ops.L(r) > 1e16 for r in READINGS)


def test_ablations_raise_the_bound():
    spec = LipschitzSpec()
    base = spec.operations()
    for row in ABLATIONS:
        changed = spec.ablation(row)
        for r in READINGS:
            assert changed.L(r) > base.L(r), (row, r)
    assert spec.ablation("S1").L() == spec.ablation("S3").L() == math.inf  # nothing bounds gamma, nor the convs
    for n in (1, 2, 3):
        D = replace(spec, n=n).D
        assert replace(spec, n=n).cond_D == max(D) / min(D) and (n == 1 or max(D) > 1.01)
    fixed = replace(spec, post_affine=False)  # no γ after the fusion: nothing to free there
    assert fixed.ablation("S1").L_bar == fixed.L_bar < math.inf == spec.ablation("S1").L_bar
    assert spec.ablation("S2").L_hat == LipschitzSpec(gamma=1 / math.sqrt(1e-5)).L_hat()
    assert spec.ablation("S5").L() == pytest.approx(2 * base.L())  # alpha1 = 1/2
    assert spec.ablation("S7").L() == pytest.approx(2 * spec.ablation("S6").L())


def test_ablations_in_both_readings():
    """S4, S6, S7: weights that sum to one; with "-sum" every weight is one. M by hand, numbers as golden values."""
    spec = LipschitzSpec()
    levels = np.array([[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0]])
    down = 2 * 0.8 ** (np.maximum(levels.T, 1) - 1)  # ca per level, the last one without activation
    paths = np.where(levels > 0, 2 * 2.0**levels, down) * (1 - np.eye(4))
    w = np.exp(-levels) * (1 - np.eye(4))
    w /= w.sum(axis=1, keepdims=True)
    by_hand = {
        "S4": 0.7 * np.eye(4) + 0.3 * paths / 3,
        "S4-sum": 0.7 * np.eye(4) + 0.3 * paths,
        "S6": np.eye(4) + w * paths,
        "S6-sum": np.eye(4) + paths,
    }
    for row, M in by_hand.items():
        np.testing.assert_allclose(spec.ablation(row).fusion_matrix(), M, rtol=1e-12)
    np.testing.assert_array_equal(spec.ablation("S7-sum").fusion_matrix(), spec.ablation("S6-sum").fusion_matrix())
    golden = {  # reported, Perron; train mode, a = 0.4
        "S4": (1.337, 0.9015),
        "S4-sum": (3.4284, 1.9686),
        "S6": (2.5049, 2.1692),
        "S6-sum": (11.2109, 5.8611),
        "S7": (5.0098, 4.3384),
        "S7-sum": (22.4218, 11.7222),
    }
    for row, values in golden.items():
        found = [spec.ablation(row).L(way) for way in ("reported", "perron")]
        assert found == pytest.approx(values, abs=5.1e-5), row
    assert replace(spec, n=1).ablation("S6-sum").L() == replace(spec, n=1).ablation("S6").L()


# ------------------------------------------------------------------------------------------------ properties


@settings(deadline=None)
@given(specs)
def test_each_reading_is_tighter(spec):
    for train in (True, False):
        printed, reported, spectral, perron = (spec.L(r, train) for r in READINGS)
        assert 0 < perron <= spectral <= reported
        if spec.c * spec.gamma >= 1:
            assert printed <= reported
        else:
            assert reported <= printed


@settings(deadline=None)
@given(specs, st.sampled_from(["a", "c", "gamma", "p"]), st.floats(0, 1), st.sampled_from(READINGS))
def test_L_increases_with_a_c_gamma_p(spec, field, share, reading):
    top = {"a": 1.0, "c": 10.0, "gamma": 6.0, "p": 0.95}[field]
    now = getattr(spec, field)
    more = replace(spec, **{field: min(top, now + share * (top - now))})
    assert spec.L(reading) <= more.L(reading) * (1 + 1e-12)


@settings(deadline=None)
@given(specs, st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.sampled_from(READINGS))
def test_L_is_affine_in_alpha1_and_convex_in_alpha2(spec, x, y, reading):
    def L(field, value):
        return replace(spec, **{field: value}).L(reading)

    for field in ("alpha1", "alpha2"):
        middle, mean = L(field, (x + y) / 2), (L(field, x) + L(field, y)) / 2
        if field == "alpha1" or reading == "perron":
            assert middle == pytest.approx(mean, rel=1e-9)
        else:
            assert middle <= mean * (1 + 1e-9)
    rises = spec.gamma**2 * spec.c**2 * spec.a > 1 - spec.p
    assume(x < y and abs(spec.gamma**2 * spec.c**2 * spec.a / (1 - spec.p) - 1) > 1e-6 and y - x > 1e-6)
    assert (L("alpha1", y) > L("alpha1", x)) == rises


def _contraction(rng, rows, columns):
    """A random matrix of norm exactly 1."""
    Q = rng.standard_normal((rows, columns))
    return Q / np.linalg.norm(Q, 2)


def _network(spec, rng, dims, nonlinear):
    """f with the block structure of Lipschitz MDEQ, in which every conv has norm c, every norm γ̄, every slope a."""
    c, g, n = spec.c, spec.gamma, spec.n

    def act(x):
        return spec.a * (np.maximum(x, 0) if nonlinear else x)

    w = fusion_weights(n)
    post = spec.gamma if spec.post_affine else 1.0
    conv = [[c * _contraction(rng, d, d) for d in dims] for _ in range(3)]
    norm = [[g * _contraction(rng, d, d) for d in dims] for _ in range(3)]
    down = {  # (i, j): norm∘conv for each of the i − j steps; channels change in the last one
        (i, j): [
            g * _contraction(rng, d, d) @ (c * _contraction(rng, d, dims[j]))
            for d in [dims[j]] * (i - j - 1) + [dims[i]]
        ]
        for i in range(n)
        for j in range(i)
    }
    up = {(i, j): 2 ** (j - i) * g * c * _contraction(rng, dims[i], dims[j]) for i in range(n) for j in range(i + 1, n)}
    # of the size of f's own part, so that differences of f lose no digits
    shift = spec.L("spectral") * rng.standard_normal(sum(dims)) if nonlinear else np.zeros(sum(dims))

    def f(flat):
        z = np.split(flat, np.cumsum(dims)[:-1])
        hat = []
        for i, x in enumerate(z):
            branch = norm[1][i] @ (conv[1][i] @ act(norm[0][i] @ (conv[0][i] @ x))) / (1 - spec.p)
            hat.append(norm[2][i] @ act((1 - spec.alpha1) * x + spec.alpha1 * branch))
        out = []
        for i in range(n):
            total = (1 - spec.alpha2) * hat[i]
            for j in range(n):
                x = hat[j]
                if j < i:
                    for k, step in enumerate(down[i, j]):
                        x = step @ x if k == i - j - 1 else act(step @ x)
                elif j > i:
                    x = up[i, j] @ x
                if j != i:
                    total = total + spec.alpha2 * w[i, j] * x
            out.append(post * (conv[2][i] @ act(total)))
        return np.concatenate(out) + shift

    return f


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(0, 2**32 - 1), st.data())
def test_L_is_sound_for_random_networks(spec, seed, data):
    rng = np.random.default_rng(seed)
    dims = data.draw(st.lists(st.integers(1, 4), min_size=spec.n, max_size=spec.n))
    weights = np.repeat(spec.D, dims)
    linear = _network(spec, rng, dims, nonlinear=False)
    J = np.stack([linear(e) for e in np.eye(sum(dims))], axis=1)
    allow = 1 + 1e-9
    assert np.linalg.norm(J, 2) <= spec.L("spectral") * allow
    assert np.linalg.norm(J * weights[:, None] / weights, 2) <= spec.L("perron") * allow
    assert np.abs(np.linalg.eigvals(J)).max() <= spec.L("perron") * allow
    f = _network(spec, rng, dims, nonlinear=True)
    for size in (1e-2, 1, 10):
        x, y = size * rng.standard_normal((2, sum(dims)))
        assert empirical_ratio(f, x, y) <= spec.L("spectral") * allow
        assert empirical_ratio(lambda v: weights * f(v / weights), x, y) <= spec.L("perron") * allow


@settings(deadline=None)
@given(specs)
def test_L_is_reached_by_aligned_blocks(spec):
    """With scalar blocks that are all aligned, on positive inputs, f is z ↦ Nz: no smaller constant is possible."""

    class Aligned:
        def standard_normal(self, shape):
            return np.ones(shape)

    f = _network(spec, Aligned(), [1] * spec.n, nonlinear=True)
    N = spec.comparison_matrix()
    x = np.linalg.svd(N)[2][0]  # Perron–Frobenius: one sign throughout
    x = np.abs(x)
    assert empirical_ratio(f, 1 + x, np.ones(spec.n)) >= spec.L("spectral") * (1 - 1e-9)
    D = spec.D
    y = np.abs(np.linalg.svd(D[:, None] * N / D)[2][0])
    ratio = empirical_ratio(lambda v: D * f(v / D), 1 + y, np.ones(spec.n))
    assert ratio == pytest.approx(spec.L("perron"), rel=1e-7)


# ------------------------------------------------------------------------------------------------ inverse problems


@settings(max_examples=40, deadline=None)
@given(
    specs, st.sampled_from(["a", "c", "gamma", "alpha1", "alpha2", "p"]), st.floats(0.05, 5), st.sampled_from(READINGS)
)
def test_feasible_values_are_exactly_those_below_the_target(spec, field, target, reading):
    def L(x):
        return replace(spec, **{field: x}).L(reading)

    interval = feasible(spec, field, target, reading)
    ranges = {"a": (0, 1), "c": (0, 12), "gamma": (0, 8), "alpha1": (0, 1), "alpha2": (0, 1), "p": (0, 0.999)}
    low, high = ranges[field]
    grid = [low + (high - low) * k / 40 for k in range(0 if field == "p" else 1, 40)]
    for x in grid:
        inside = interval is not None and interval[0] <= x <= interval[1]
        margin = interval is not None and min(abs(x - e) for e in interval) < 1e-9
        assert margin or abs(L(x) / target - 1) < 1e-9 or (L(x) < target) == inside
    if interval is not None:
        assert L(interval[0]) < target and L(interval[1]) < target
        assert largest(spec, field, target, reading) == interval[1]
        if field in ("a", "c", "gamma") and interval[1] < high:
            assert L(interval[1] * (1 + 1e-9)) >= target


def test_impossible_targets_give_none():
    assert largest(LipschitzSpec(a=0.5), "p") is None  # even without dropout L > 1
    assert feasible(LipschitzSpec(a=1), "alpha2") is None
    assert feasible(LipschitzSpec(a=0.4), "alpha2", 1.0, "reported") is not None
    assert largest(LipschitzSpec(a=0.5), "p", train=False) is None
    assert largest(LipschitzSpec(a=0.4), "p", train=False) == math.nextafter(1, 0)  # p does not matter there


def test_alpha2_has_a_lower_and_an_upper_limit_in_the_frobenius_readings():
    low, high = feasible(LipschitzSpec(), "alpha2", 1.0, "reported")
    assert 0.05 < low < high < 0.3  # 0.3, the paper's value, is just outside: L = 1.0035
    assert replace(LipschitzSpec(), alpha2=low * 0.99).L("reported") > 1


def test_alpha1_can_have_a_lower_limit():
    # a weak branch: more of it, less of the identity, lowers L
    spec = LipschitzSpec(a=0.9, c=0.6, gamma=1.5, alpha1=0.05, p=0)
    low, high = feasible(spec, "alpha1", 0.9 * spec.L())
    assert low > 0.05 and high == math.nextafter(1, 0)
    (change,) = [x for x in advise(spec, 0.9 * spec.L()) if x.field == "alpha1"]
    assert change.to >= low and str(change).startswith("raise alpha1")


@settings(max_examples=40, deadline=None)
@given(specs, st.sampled_from(READINGS), st.booleans())
def test_advice_works(spec, reading, train):
    changes = advise(spec, 1.0, reading, train)
    if spec.L(reading, train) < 1:
        assert changes == []
    for x in changes:
        assert replace(spec, **{x.field: x.to}).L(reading, train) == x.L < 1
        assert float(str(x).split("L =")[1]) < 1
    if spec.L(reading, train) >= 1:
        assert {"a", "c", "gamma"} <= {x.field for x in changes}


def test_advice_golden():
    found = {x.field: x.to for x in advise(LipschitzSpec(a=0.45))}
    assert found["a"] == pytest.approx(0.4216)
    assert set(found) == {"a", "c", "gamma", "alpha1", "alpha2", "p", "n"}
    assert found["p"] > 0 and found["n"] < 4


# ------------------------------------------------------------------------------------------------ the certified family


@pytest.mark.parametrize("tau", [0.3, 0.9])
@pytest.mark.parametrize("n", [1, 3])
def test_tau_is_the_constant_of_the_certified_family(tau, n):
    """Proved from the layers of a model with random weights, in both modes: L is tau, but for the room for rounding."""
    import torch

    from lipmdeq.model import build

    torch.manual_seed(n)
    f = build("digits", block="potential", tau=tau, n=n, p=0.4).f
    with torch.no_grad():
        for weights in f.parameters():
            weights.add_(torch.randn_like(weights))
    for train in (True, False):
        L = PotentialSpec(tau).L(train)
        assert L * (1 - 1e-3) <= f.lipschitz(train=train) <= L * (1 + 1e-6)


def test_the_certified_family_keeps_its_promises():
    """On f(z) = b − tau·z, the worst case: the relative residual, and the error by the residual at hand."""
    for tau in (0.2, 0.5, 0.9, 0.97):
        spec, star = PotentialSpec(tau), 1 / (1 + tau)
        for tol in (1e-3, 1e-6):
            z = 0.0
            for _ in range(spec.steps(tol)):
                z = 1 - tau * z
            assert abs(1 - tau * z - z) <= tol * abs(1 - tau * z) * (1 + 1e-9)
            assert abs(z - star) <= spec.error_factor * abs(1 - tau * z - z) * (1 + 1e-9)
    # reached: f(z) = 1 + tau·z moves the least for its distance
    assert abs(0 - 1 / (1 - 0.9)) == pytest.approx(PotentialSpec(0.9).error_factor * 1)
    assert PotentialSpec(math.nextafter(1, 0)).steps() > 1e15


# ------------------------------------------------------------------------------------------------ bad input

BAD = [math.nan, math.inf, -math.inf, True, False, "0.4", None, [0.4], 1j]


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("a", [0, -0.1, 7, 1.0001], "must be in (0, 1]"),
        ("c", [0, -1], "must be in (0, inf)"),
        ("gamma", [0, -1], "must be in (0, inf)"),
        ("alpha1", [0, 1, -0.5, 1.5], "must be in (0, 1)"),
        ("alpha2", [0, 1, -0.5, 1.5], "must be in (0, 1)"),
        ("p", [1, -0.1, 1.5], "must be in [0, 1)"),
        ("n", [0, -1, 2.5, 65, 10**400], "must be a whole number >= 1"),
        ("tau", [0, 1, -0.5, 1.5], "must be in (0, 1)"),
    ],
)
def test_bad_fields_are_named(field, values, allowed):
    for value in values + BAD:
        with pytest.raises(ValueError) as error:
            (PotentialSpec if field == "tau" else LipschitzSpec)(**{field: value})
        text = str(error.value)
        shown = repr(value) if isinstance(value, str) else str(value)
        assert text.startswith(f"{field} = {shown}: ") and allowed in text


def test_exact_message():
    with pytest.raises(ValueError, match=r"^a = 7: must be in \(0, 1\]$"):
        LipschitzSpec(a=7)
    with pytest.raises(ValueError, match=r"^post_affine = 1: must be True or False$"):
        LipschitzSpec(post_affine=1)


def test_other_numbers_are_accepted():
    spec = LipschitzSpec(a=np.float32(0.5), c=2, n=4.0, p=np.float64(0.25), alpha1=Fraction(1, 2))
    assert spec == LipschitzSpec(a=0.5, c=2.0, n=4, p=0.25, alpha1=0.5)
    assert isinstance(spec.n, int) and all(type(x) is float for x in (spec.a, spec.c, spec.p, spec.alpha1))


@pytest.mark.parametrize(
    "call",
    [
        lambda: LipschitzSpec().L("frobenius"),
        lambda: LipschitzSpec().L_tilde(None),
        lambda: LipschitzSpec().fusion_matrix("half"),
        lambda: LipschitzSpec().ablation("S8"),
        lambda: LipschitzSpec().ablation("S4-max"),
        lambda: LipschitzSpec().ablation("S5-sum"),
        lambda: feasible(LipschitzSpec(), "n"),
        lambda: feasible(LipschitzSpec(), "a", target=0),
        lambda: feasible(LipschitzSpec(), "a", target=math.nan),
        lambda: largest(LipschitzSpec(), "a", reading="best"),
        lambda: lip_convex(1.0, 0.5),
    ],
)
def test_bad_choices_are_refused(call):
    with pytest.raises(ValueError, match="must be"):
        op = call()
        op.L()
