"""Norms of a comparison matrix: Frobenius (the paper's), spectral, and the Perron root with its weights.

If f maps [z_1 … z_n] to [f_1 … f_n] and ‖f_i(z) − f_i(z')‖ ≤ Σ_j M_ij ‖z_j − z'_j‖ with M ≥ 0, then f is ‖M‖₂-Lipschitz in
plain l2 (and ‖M‖₂ ≤ ‖M‖_F), and ‖D M D⁻¹‖₂-Lipschitz in ‖z‖_D = √Σ d_i²‖z_i‖². Results are rounded up by a few units in the
last place, so that rounding does not push them below the true value.
"""

from __future__ import annotations

import math
import sys

import numpy as np

SLACK = 1e-9  # what couplings between classes may add to the Perron root of a reducible matrix, relative


def _nonnegative(M: np.ndarray) -> np.ndarray:
    """Check that M is a square matrix of numbers >= 0 (infinity allowed: "no bound")."""
    A = np.array(M, dtype=float)
    if A.ndim != 2 or A.shape[0] != A.shape[1] or A.size == 0:
        raise ValueError(f"M has shape {A.shape}: must be n x n with n >= 1")
    if not (A >= 0).all():  # NaN fails this comparison too
        raise ValueError(f"M has the entry {A[~(A >= 0)][0]:g}: must be >= 0")
    return A


def _norm(A: np.ndarray, kind: str | int) -> float:
    """Norm of a checked matrix, safe from overflow and underflow of the squares, rounded up."""
    scale = float(A.max())
    if not math.isfinite(scale) or scale == 0 or A.size == 1:
        return scale
    return scale * float(np.linalg.norm(A / scale, kind)) * (1 + 4 * len(A) * sys.float_info.epsilon)


def frobenius(M: np.ndarray) -> float:
    """‖M‖_F = √ΣM_ij²: the paper's √ΣL̃_i²."""
    return _norm(_nonnegative(M), "fro")


def spectral(M: np.ndarray) -> float:
    """‖M‖₂, the largest singular value; never above `frobenius(M)`."""
    A = _nonnegative(M)
    return min(_norm(A, 2), _norm(A, "fro"))


def perron(M: np.ndarray) -> tuple[float, np.ndarray]:
    """The least ‖D M D⁻¹‖₂ over positive diagonal D, and the D that reaches it (Stoer & Witzgall 1962).

    For irreducible M it is the Perron root ρ(M), reached at d_i = √(l_i / r_i) with the left and right Perron vectors: then v_i
    = √(l_i r_i) is a left and a right eigenvector of D M D⁻¹, hence its top singular vector. For reducible M the infimum ρ(M)
    need not be reached; D then damps the one-way couplings until they add about SLACK · ρ (at the price of a large max(D)). In
    every case the value returned is the ‖D M D⁻¹‖₂ of the D returned, so it is a sound constant. It is at least ρ(M) and never
    above `spectral(M)`; D has the shape (n,) and min(D) = 1.
    """
    A = _nonnegative(M)
    scale, D = float(A.max()), np.ones(len(A))
    if len(A) == 1 or scale == 0 or not math.isfinite(scale):
        return scale, D
    A = A / scale
    best = spectral(A)
    # Entries of rounding size make a matrix irreducible only in name: try with and without them.
    for cut in sorted({float(A[A <= limit].max(initial=0.0)) for limit in (0, 1e-14, 1e-10)}):
        with np.errstate(all="ignore"):
            d = _perron_weights(np.where(A > cut, A, 0.0))
            B = A * (d[:, None] / d[None, :])
        if np.isfinite(d).all() and (d > 0).all() and np.isfinite(B).all() and (value := spectral(B)) < best:
            best, D = value, d / d.min()
    return min(scale * best, spectral(M)), D  # equal but for the last digit where D = 1 is best


def _perron_weights(A: np.ndarray) -> np.ndarray:
    """Weights for `perron`: √(l/r) inside each strongly connected class, damping t^−level between them."""
    n = len(A)
    reach = (A > 0) | np.eye(n, dtype=bool)  # reach[i, j]: z_i depends on z_j
    for k in range(n):
        reach |= np.outer(reach[:, k], reach[k])
    same = reach & reach.T
    d, level = np.ones(n), np.zeros(n)
    # A class that depends on another reaches strictly more nodes: this order visits sources first.
    for i in np.argsort(reach.sum(axis=1), kind="stable"):
        members = np.flatnonzero(same[i])
        if i == members[0] and len(members) > 1:
            block = A[np.ix_(members, members)]
            d[members] = np.sqrt(_perron_vector(block.T) / _perron_vector(block))
            d[members] /= np.exp(np.log(d[members]).mean())
        level[members] = level[reach[i] & ~same[i]].max(initial=-1) + 1
    if level.max() == 0:
        return d
    B = A * (d[:, None] / d[None, :])
    inside = float(np.linalg.norm(np.where(same, B, 0.0), 2)) or 1.0
    t = max(1.0, float(np.linalg.norm(np.where(same, 0.0, B))) / (SLACK * inside))
    return d * min(t, 10 ** (150 / level.max())) ** -level  # the cap keeps D finite on long chains


def _perron_vector(A: np.ndarray) -> np.ndarray:
    """Positive right Perron vector of an irreducible A >= 0."""
    values, vectors = np.linalg.eig(A)
    # The Perron root has the largest modulus; others of that modulus (periodic A) have a smaller real part.
    v = np.abs(vectors[:, np.argmax(values.real)])
    return np.maximum(v, 1e-150 * v.max())  # positive in theory, but tiny entries of A may round it to 0
