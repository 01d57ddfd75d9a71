"""Norms of comparison matrices: the Perron value is attained by its D, never below ρ(M), and close to it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lipmdeq.bounds import LipschitzSpec, frobenius, perron, spectral

entry = st.one_of(st.just(0.0), st.floats(1e-3, 10))
matrices = st.integers(1, 6).flatmap(lambda n: arrays(float, (n, n), elements=entry))
wild = st.integers(1, 5).flatmap(
    lambda n: arrays(float, (n, n), elements=st.one_of(st.just(0.0), st.floats(-200, 100).map(lambda e: 10.0**e)))
)


def powers(M, k):
    """(lower, upper) bounds of ρ(M) without eigenvalues: (tr M^m / n)^(1/m) and ‖M^m‖_F^(1/m), m = 2^k."""
    log_scale, A, m = 0.0, M, 1
    for _ in range(k):
        size = np.linalg.norm(A)
        if size == 0:
            return 0.0, 0.0
        A, log_scale, m = (A / size) @ (A / size), 2 * (log_scale + math.log(size)), 2 * m
    low, high = np.trace(A) / len(A), np.linalg.norm(A)
    return tuple(math.exp((log_scale + math.log(x)) / m) if x > 0 else 0.0 for x in (low, high))


def weighted(M, D):
    return M * (D[:, None] / D[None, :])


@settings(deadline=None)
@given(matrices)
def test_perron_is_sound_and_attained(M):
    value, D = perron(M)
    assert value <= spectral(M) <= frobenius(M)
    assert D.shape == (len(M),) and D.min() == 1
    attained = np.linalg.norm(weighted(M, D), 2)
    assert attained <= value
    assert value <= max(attained, 1e-300) * (1 + 1e-12)
    low, high = powers(M, 10)
    assert value >= low * (1 - 1e-12)
    # reducible or not, the infimum is approached
    assert value <= high * (1 + 1e-6) + 1e-8 * M.max()


@settings(deadline=None)
@given(wild)
def test_extreme_entries_stay_sound(M):
    value, D = perron(M)
    assert np.isfinite(D).all() and D.min() == 1
    assert value >= M.diagonal().max()
    for k in range(len(M)):  # cycles of length two bound ρ from below
        for i in range(k):
            assert value >= math.sqrt(M[i, k]) * math.sqrt(M[k, i]) * (1 - 1e-12)
    assert value <= spectral(M) <= frobenius(M)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_positive_matrices_reach_the_perron_root_and_no_D_beats_it(n, seed):
    rng = np.random.default_rng(seed)
    M = rng.random((n, n)) + 1e-3
    value, D = perron(M)
    assert value == pytest.approx(np.abs(np.linalg.eigvals(M)).max(), rel=1e-12)
    left, right = (np.abs(np.linalg.eig(A)[1][:, np.argmax(np.linalg.eigvals(A).real)]) for A in (M.T, M))
    np.testing.assert_allclose(D, np.sqrt(left / right) / np.sqrt(left / right).min(), rtol=1e-6)
    for _ in range(20):
        other = D * np.exp(0.3 * rng.standard_normal(n))
        assert np.linalg.norm(weighted(M, other), 2) >= value * (1 - 1e-12)


def test_perron_is_not_above_spectral_where_both_are_one_number():
    """Symmetric matrices: D = 1 is best, and the order of the readings holds in the last digit too."""
    rng = np.random.default_rng(0)
    for n in (2, 3, 4, 5) * 20:
        A = rng.random((n, n)) * 10 ** rng.uniform(-3, 3)
        value = perron(A + A.T)[0]
        assert value <= spectral(A + A.T) and value == pytest.approx(np.linalg.eigvalsh(A + A.T)[-1], rel=1e-12)


@pytest.mark.parametrize(
    ("M", "rho"),
    [
        ([[0.7]], 0.7),
        ([[0.0]], 0.0),
        (np.zeros((3, 3)), 0.0),
        (np.diag([0.2, 0.9, 0.5]), 0.9),
        ([[0, 1], [1, 0]], 1.0),  # periodic
        ([[0, 1, 0], [0, 0, 1], [1, 0, 0]], 1.0),  # periodic
        ([[0, 1], [0, 0]], 0.0),  # nilpotent: ρ = 0 is not attained
        ([[0.5, 1], [0, 0.3]], 0.5),  # reducible, not attained in general
        ([[0.5, 1], [0, 0.5]], 0.5),  # defective
        (np.triu(np.ones((4, 4))), 1.0),  # defective, and the chain is long
        (np.triu(np.ones((6, 6)), 1), 0.0),
        ([[0.5, 1], [1e-30, 0.3]], 0.5),  # irreducible in name only
        ([[0.1, 0.2, 3], [0.3, 0.1, 5], [0, 0, 0.2]], 0.1 + math.sqrt(0.06)),
        (1e-200 * np.ones((3, 3)), 3e-200),  # squares would underflow
        (1e200 * np.ones((3, 3)), 3e200),  # squares would overflow
    ],
)
def test_special_matrices(M, rho):
    M = np.array(M, dtype=float)
    value, D = perron(M)
    assert rho <= value <= rho * (1 + 1e-8) + 2e-8 * M.max()
    assert (D >= 1).all() and np.isfinite(D).all()
    if M.max() < 1e100:
        assert np.linalg.norm(weighted(M, D), 2) <= value


def test_no_bound_stays_no_bound():
    M = np.array([[0.5, math.inf], [0.1, 0.5]])
    value, D = perron(M)
    assert value == spectral(M) == frobenius(M) == math.inf
    assert D.tolist() == [1, 1]


def test_weights_do_not_depend_on_alpha2_or_p():
    # M = (1−α2)I + α2B has the eigenvectors of B, and p is not in M
    first = LipschitzSpec(alpha2=0.3, p=0.3).D
    np.testing.assert_allclose(LipschitzSpec(alpha2=0.8, p=0.0).D, first, rtol=1e-9)


def test_the_adjoint_contracts_in_the_dual_norm():
    spec = LipschitzSpec()
    N, D = spec.comparison_matrix(), spec.D
    assert np.linalg.norm(weighted(N.T, 1 / D), 2) == pytest.approx(spec.L("perron"))


@pytest.mark.parametrize("norm", [frobenius, spectral, perron])
@pytest.mark.parametrize("M", [[[1.0, -0.1], [0, 1]], [[math.nan]], [[1.0, 2.0]], [1.0], np.zeros((0, 0))])
def test_bad_matrices(norm, M):
    with pytest.raises(ValueError, match="must be"):
        norm(M)
