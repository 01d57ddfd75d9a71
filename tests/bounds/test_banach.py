"""Banach's bounds, step counts and adjoint errors: golden numbers, random contractions, and cases that reach them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipmdeq.bounds import (
    a_posteriori_error,
    a_priori_error,
    a_priori_error_from_step,
    jfb_angle,
    jfb_error,
    neumann_error,
    phantom_error,
    relative_residual_bound,
    steps,
    steps_to_error,
)

rates = st.floats(0, 0.98)
seeds = st.integers(0, 2**32 - 1)


def contraction(seed, L, d=6, D=None):
    """A random matrix J with ‖D J D⁻¹‖₂ = L."""
    rng = np.random.default_rng(seed)
    J = rng.standard_normal((d, d))
    if rng.random() < 0.5:
        J = np.linalg.qr(J)[0]
    J *= L / np.linalg.norm(J, 2)
    return J if D is None else J * (D[None, :] / D[:, None])


@pytest.mark.parametrize(("L", "few", "many"), [(0.0297, 2, 4), (0.6814, 20, 38), (0.8611, 51, 97), (0.9255, 98, 187)])
def test_steps_golden(L, few, many):
    assert steps(L) == steps(L, 1e-3) == few
    assert steps(L, 1e-6) == many


def test_steps_at_the_ends():
    assert steps(0) == 1  # a constant map: f(z_0) is the answer
    assert steps(1) is None and steps(1.0035) is None and steps(math.inf) is None
    assert steps_to_error(0.5, 1e-3) == 10 and steps_to_error(1) is None and steps_to_error(0) == 1
    assert steps(1 - 1e-15, 1e-6) > 1e15
    assert steps(0.5, 5e-324, cond=3.0) > 1000


@given(rates, st.floats(1e-9, 0.5), st.floats(1, 1e3))
def test_steps_is_the_first_that_holds(L, tol, cond):
    k = steps(L, tol, cond)
    assert relative_residual_bound(L, k, cond) <= tol < relative_residual_bound(L, k - 1, cond)
    assert steps(L, tol) <= k
    m = steps_to_error(L, tol, cond)
    assert cond * L**m <= tol < cond * L ** (m - 1)


@settings(deadline=None)
@given(rates, seeds, st.booleans())
def test_picard_stays_within_the_bounds(L, seed, weighted):
    """In the norm of the contraction, and with cond(D) in plain l2."""
    rng = np.random.default_rng(seed)
    D = np.exp(rng.uniform(0, 2, 6)) if weighted else np.ones(6)
    cond = D.max() / D.min()
    J, b = contraction(seed, L, D=D), rng.standard_normal(6)
    star = np.linalg.solve(np.eye(6) - J, b)
    allow, tiny = 1 + 1e-9, 1e-12 * np.linalg.norm(D * star)
    z, first = np.zeros(6), None
    for k in range(25):
        f = J @ z + b
        first = f - z if first is None else first
        for scale, factor in ((D, 1.0), (np.ones(6), cond)):

            def norm(x, scale=scale):
                return np.linalg.norm(scale * x)

            error = norm(z - star)
            assert error <= a_priori_error(L, k, norm(star), factor) * allow + tiny
            assert error <= a_priori_error_from_step(L, k, norm(first), factor) * allow + tiny
            assert error <= a_posteriori_error(L, norm(f - z), factor) * allow + tiny
            assert norm(f - z) / norm(f) <= relative_residual_bound(L, k, factor) * allow + 1e-12
        z = f


@pytest.mark.parametrize("L", [0.1, 0.5, 0.9])
def test_residual_bound_is_reached(L):
    """f(z) = 1 − Lz: at odd k the relative residual equals the bound."""
    z = 0.0
    for k in range(12):
        f = 1 - L * z
        if k % 2:
            assert abs(f - z) / abs(f) == pytest.approx(relative_residual_bound(L, k), rel=1e-9)
        z = f


def test_a_posteriori_is_reached():
    L, z = 0.7, 5.0  # f(z) = Lz, z* = 0
    assert a_posteriori_error(L, abs(L * z - z)) == pytest.approx(z)
    assert a_posteriori_error(1.0, 1e-9) == math.inf


@settings(deadline=None)
@given(rates, seeds, st.integers(1, 8), st.floats(0.05, 1), st.booleans())
def test_adjoint_errors(L, seed, k, lam, weighted):
    """Row vectors g = v(I−J)⁻¹: in the dual norm (weights 1/D), and with cond(D) in plain l2."""
    rng = np.random.default_rng(seed)
    D = np.exp(rng.uniform(0, 2, 6)) if weighted else np.ones(6)
    J, v, eye = contraction(seed, L, D=D), rng.standard_normal(6), np.eye(6)
    g = v @ np.linalg.inv(eye - J)
    neumann = sum(v @ np.linalg.matrix_power(J, t) for t in range(k))
    # the phantom gradient as it is computed: k damped steps of the backward map from zero
    phantom = np.zeros(6)
    for _ in range(k):
        phantom = (1 - lam) * phantom + lam * (phantom @ J + v)
    for scale, cond in ((1 / D, 1.0), (np.ones(6), D.max() / D.min())):
        size = np.linalg.norm(scale * g)
        for x, bound in (
            (neumann, neumann_error(L, k, cond)),
            (v, jfb_error(L, cond)),
            (phantom, phantom_error(L, k, lam, cond)),
        ):
            assert np.linalg.norm(scale * (x - g)) / size <= bound * (1 + 1e-9) + 1e-9
        cosine = (scale * v) @ (scale * g) / np.linalg.norm(scale * v) / size
        assert math.acos(min(1, max(-1, cosine))) <= jfb_angle(L, cond) + 1e-6


def test_adjoint_errors_are_reached():
    L = 0.6
    turn = math.acos(L)
    J = L * np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]])
    g = np.array([1.0, 0.0])
    v = g @ (np.eye(2) - J)
    assert np.linalg.norm(v - g) == pytest.approx(jfb_error(L))
    assert math.acos(v @ g / np.linalg.norm(v)) == pytest.approx(jfb_angle(L))
    assert jfb_angle(L) == math.asin(0.6)
    # J = L·I reaches the other two
    full, k, lam = 1 / (1 - L), 3, 0.5
    assert 1 - sum(L**t for t in range(k)) / full == pytest.approx(neumann_error(L, k))
    A = (1 - lam) + lam * L
    assert 1 - lam * sum(A**t for t in range(k)) / full == pytest.approx(phantom_error(L, k, lam))


def test_phantom_floor_golden():
    assert round(phantom_error(0, 5, 0.5), 3) == 0.031
    assert phantom_error(0.3, 4, 1.0) == pytest.approx(neumann_error(0.3, 4))


def test_no_contraction_no_guarantee():
    assert relative_residual_bound(1.0, 5) == a_priori_error_from_step(2.0, 3, 1.0) == math.inf
    assert jfb_angle(1.0) == jfb_angle(0.9, cond=2.0) == math.pi
    assert neumann_error(1e10, 1000) == math.inf


@pytest.mark.parametrize(
    "call",
    [
        lambda: steps(-0.1),
        lambda: steps(math.nan),
        lambda: steps(True),
        lambda: steps("0.5"),
        lambda: steps(0.5, 0),
        lambda: steps(0.5, math.inf),
        lambda: steps(0.5, 1e-3, cond=0.9),
        lambda: neumann_error(0.5, -1),
        lambda: neumann_error(0.5, 1.5),
        lambda: phantom_error(0.5, 5, 0),
        lambda: phantom_error(0.5, 5, 1.1),
        lambda: a_posteriori_error(0.5, -1),
        lambda: a_priori_error(0.5, 3, math.nan),
    ],
)
def test_bad_input(call):
    with pytest.raises(ValueError, match=" = .*: must be"):
        call()
