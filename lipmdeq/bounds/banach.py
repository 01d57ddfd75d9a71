"""What a constant L guarantees: errors of Picard iteration, step counts, errors of approximate adjoints.

Setting: z_{k+1} = f(z_k), f Lipschitz with L < 1 in some norm, z* its fixed point. All norms in a statement are that norm. If
it is the weighted ‖z‖_D of `matrices.perron`, ``cond = max(D)/min(D)`` gives the same statement with plain l2 norms throughout:
‖z‖₂ ≤ ‖z‖_D ≤ cond·‖z‖₂ (min D = 1). The adjoint contracts with the same L in the dual norm, weights 1/D, which has the same
cond. Where a bound needs L < 1, it is infinity (no bound) for L >= 1, and a number of steps is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from lipmdeq.bounds.operations import check_constant, check_range, check_whole, lip_compose


def _inputs(L: float, k: int = 0, cond: float = 1.0) -> tuple[float, int, float]:
    return check_constant("L", L), check_whole("k", k, 0), check_range("cond", cond, 1, math.inf, "[)")


def a_priori_error(L: float, k: int, distance: float, cond: float = 1.0) -> float:
    """‖z_k − z*‖ ≤ L^k ‖z_0 − z*‖ (Banach), with `distance` = ‖z_0 − z*‖; from z_0 = 0 that is ‖z*‖."""
    return lip_compose(neumann_error(L, k, cond), check_range("distance", distance, 0, math.inf, "[)"))


def a_priori_error_from_step(L: float, k: int, first_step: float, cond: float = 1.0) -> float:
    """‖z_k − z*‖ ≤ L^k/(1−L) ‖z_1 − z_0‖: needs no knowledge of z*."""
    L, k, cond = _inputs(L, k, cond)
    first_step = check_range("first_step", first_step, 0, math.inf, "[)")
    return cond * L**k / (1 - L) * first_step if L < 1 else math.inf


def a_posteriori_error(L: float, residual: float, cond: float = 1.0) -> float:
    """‖z − z*‖ ≤ ‖f(z) − z‖ / (1−L) for *any* z, however it was found.

    Proof: ‖z − z*‖ ≤ ‖z − f(z)‖ + ‖f(z) − f(z*)‖ ≤ residual + L‖z − z*‖. For the point f(z) itself multiply by L.
    """
    L, _, cond = _inputs(L, 0, cond)
    residual = check_range("residual", residual, 0, math.inf, "[)")
    return cond * residual / (1 - L) if L < 1 else math.inf


def relative_residual_bound(L: float, k: int, cond: float = 1.0) -> float:
    """‖f(z_k) − z_k‖ / ‖f(z_k)‖ ≤ (1+L)L^k / (1−L^(k+1)) from z_0 = 0.

    Proof: e_k = ‖z_k − z*‖ ≤ L^k‖z*‖, so the residual is ≤ e_{k+1} + e_k ≤ (1+L)L^k‖z*‖ and ‖f(z_k)‖ ≥ (1−L^(k+1))‖z*‖. Reached
    for odd k by f(z) = b − Lz. If z* = 0 the iteration is done at z_0.
    """
    L, k, cond = _inputs(L, k, cond)
    # −expm1((k+1) log L) = 1 − L^(k+1) without cancellation when L is close to 1
    below = -math.expm1((k + 1) * math.log(L)) if 0 < L < 1 else 1.0
    return cond * (1 + L) * L**k / below if L < 1 else math.inf


def _first(L: float, bound: Callable[[int], float], tol: float, log_power: float) -> int | None:
    """Smallest k >= 0 with bound(k) <= tol; ``log_power`` is the log of the L^k that solves it, but for rounding."""
    if L >= 1:
        return None
    k = max(0, math.ceil(log_power / math.log(L))) if L > 0 else 1
    while k > 0 and bound(k - 1) <= tol:
        k -= 1
    while bound(k) > tol:
        k += 1
    return k


def steps(L: float, tol: float = 1e-3, cond: float = 1.0) -> int | None:
    """Picard steps from z_0 = 0 after which the relative residual is at most `tol`.

    The smallest k with `relative_residual_bound(L, k, cond)` <= tol. k applications of f make z_k; seeing its residual takes
    one evaluation more. With ``cond = max(D)/min(D)`` the residual is the plain l2 one though L is the Perron constant.
    """
    L, _, cond = _inputs(L, 0, cond)
    tol = check_range("tol", tol)
    # cond(1+L)x <= tol(1−Lx) with x = L^k, solved for x
    log_power = math.log(tol) - math.log(cond * (1 + L) + tol * L)
    return _first(L, lambda k: relative_residual_bound(L, k, cond), tol, log_power)


def steps_to_error(L: float, tol: float = 1e-3, cond: float = 1.0) -> int | None:
    """Smallest k with cond·L^k <= tol: Picard steps until ‖z_k − z*‖ ≤ tol·‖z_0 − z*‖, or Neumann terms for the error tol."""
    L, _, cond = _inputs(L, 0, cond)
    tol = check_range("tol", tol)
    return _first(L, lambda k: cond * L**k, tol, math.log(tol) - math.log(cond))


def neumann_error(L: float, k: int, cond: float = 1.0) -> float:
    """k Neumann terms Σ_{t<k} vJ^t for the adjoint g = v(I−J)⁻¹: relative error ‖g − g_k‖/‖g‖ ≤ L^k.

    Proof: g − g_k = gJ^k. This bounds the adjoint vector (the A of the paper's backward equation), not the parameter gradient
    g·∂f/∂θ, in which ∂f/∂θ can weigh the error more than the signal. For L >= 1 it needs I−J invertible.
    """
    L, k, cond = _inputs(L, k, cond)
    try:
        return cond * L**k
    except OverflowError:
        return math.inf


def jfb_error(L: float, cond: float = 1.0) -> float:
    """Jacobian-free backpropagation takes v for g = v(I−J)⁻¹, one Neumann term: relative error ≤ L."""
    return neumann_error(L, 1, cond)


def jfb_angle(L: float, cond: float = 1.0) -> float:
    """Angle (radians) between JFB's v and the exact adjoint g: ≤ arcsin L; π (says nothing) if L·cond >= 1.

    Proof: v lies in the ball of radius L‖g‖ around g; its tangents from the origin make the angle arcsin L.
    """
    error = jfb_error(L, cond)
    return math.asin(error) if error < 1 else math.pi


def phantom_error(L: float, k: int = 5, lam: float = 0.5, cond: float = 1.0) -> float:
    """Phantom gradient (k steps at z*, damping λ in (0, 1]): relative error of the adjoint ≤ (1−λ(1−L))^k.

    Proof: with A = (1−λ)I + λJ, so that I−A = λ(I−J), the unrolled adjoint is vλΣ_{t<k}A^t = v(I−J)⁻¹(I−A^k), and
    ‖A‖ ≤ 1−λ(1−L). Even L = 0 leaves (1−λ)^k.
    """
    lam = check_range("lam", lam, 0, 1, "(]")
    return neumann_error((1 - lam) + lam * check_constant("L", L), k, cond)
