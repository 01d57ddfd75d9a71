"""Norms of convolution operators (Lemma ``lem:conv``), each value marked exact, upper or lower.

‖W‖₂ here is the norm of the linear map that the layer really is: on its map size, with its padding and stride. It is not
the norm of the kernel reshaped to a matrix (:func:`reshaped_norm`), which may be 3 times smaller (3x3, stride 1).
The proofs are in ``covers`` and ``banded``, the constraint for training in ``guard``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipmdeq.norms.banded import BandedGram
from lipmdeq.norms.covers import Cover, Kernel, climb, half_covers, kept_taps, largest, least, torus_covers
from lipmdeq.norms.geometry import Geometry, Pair, check_finite, geometry_of

METHODS = ("auto", "svd", "torus", "half", "cholesky", "dense", "lanczos", "power")
CHEAP, DEAR = 5e9, 2.5e11  # floating-point operations of a proof that take about 0.2 s and 5-10 s


@dataclass(frozen=True)
class Norm:
    """A norm, what is known about it and how it was found.

    ``kind``: "exact" (up to rounding), "upper" (proved, rounding included) or "lower" (reached by an input).
    """

    value: float
    kind: str
    method: str

    def __float__(self) -> float:
        return self.value


def conv_norm(weight: Tensor, size: Pair, *, method: str = "auto", **geometry) -> Norm:
    """Operator norm of ``conv2d(x, weight, ...)`` for x of shape (B, C_in, H, W), in the Euclidean norm.

    ``auto`` gives a sound value (exact or upper) and spends time only where there is something to gain: exact where
    windows do not overlap (1x1), for circular padding and for small operators; else the best twisted torus; where that is
    more than 0.1-0.4 % above the Lanczos estimate, a proof by Cholesky with both axes exact (one, if too large).

    Args:
        weight: (C_out, C_in/groups, kh, kw), any real dtype.
        size: (H, W) of the input map, or one number for both.
        geometry: stride, padding, dilation, groups, padding_mode, as in ``torch.nn.Conv2d``; "reflect", "replicate" are refused.
        method: "auto"; "svd" (windows that do not overlap), "torus", "half" (one exact axis), "cholesky" (both exact),
            "dense" (eigenvalues of the full Gram matrix); "lanczos" and "power" are lower estimates.
    """
    if method not in METHODS:
        raise ValueError(f"method = {method!r}: must be one of {', '.join(METHODS)}")
    where = geometry_of(weight, size, **geometry)
    check_finite(weight)
    read = kept_taps(weight.detach(), where.axes)
    top = float(read.abs().max()) if read.numel() else 0.0
    if top == 0:
        return Norm(0.0, "exact", "zero operator")
    scaled, unit = _scaled(weight, top)
    if method in ("lanczos", "power"):
        return _norm(unit, _estimate(scaled, where, method), "lower", method)
    return _norm(unit, *_sound(Kernel(scaled, where.axes, where.groups), where, scaled, method))


def _scaled(weight: Tensor, top: float) -> tuple[Tensor, float]:
    """(W/u, u) in double precision, u a power of two near the largest |entry|: exact, and squares neither overflow nor
    vanish.
    """
    unit = 2.0 ** (math.frexp(top)[1] - 1) if top else 1.0
    return weight.detach().double() / unit, unit


def _norm(unit: float, value: float, kind: str, method: str) -> Norm:
    """The norm unit·value, if it is a number."""
    if not math.isfinite(unit * value):
        raise ValueError(f"norm = {value:.4g}·{unit:.4g}: must be at most {sys.float_info.max:.4g}")
    return Norm(unit * value, kind, method)


def _sound(kernel: Kernel, where: Geometry, weight: Tensor, method: str) -> tuple[float, str, str]:
    """Exact or upper value for a weight whose largest entry is about 1."""
    axes, cin, cout = where.axes, kernel.cin, kernel.cout
    full = Cover(axes)
    order = full.order(cin, cout)
    if all(a.disjoint for a in axes) and method in ("auto", "svd"):
        # Every pixel is in one window at most: T is block diagonal, with parts of the reshaped kernel as blocks.
        exact = all(a.interior for a in axes)
        if exact or order > 256 or method == "svd":
            value = float(torch.linalg.matrix_norm(kernel.w.flatten(2), 2).max())
            return value * (1 + 1e-12), "exact" if exact else "upper", "svd"
    if method == "svd":
        raise ValueError("method = 'svd': windows overlap; must be auto, torus, half, cholesky or dense")
    if method == "dense" and not (order <= 16384 and full.light(cin, cout)):
        raise ValueError("method = 'dense': the operator is too large; must be auto, torus, half or cholesky")
    if method == "dense" or (method == "auto" and order <= 256 and full.light(cin, cout)):
        return largest(kernel, full), "exact", "dense"
    if method in ("auto", "torus") and all(a.exact or (a.disjoint and a.interior) for a in axes):
        return largest(kernel, torus_covers(axes)[0]), "exact", "torus"
    if method == "torus":
        return least(kernel, torus_covers(axes))[0], "upper", "torus"
    guess = _estimate(weight, where, "lanczos")
    whole = BandedGram(kernel, axes)
    if method == "cholesky":
        return whole.bound(guess), "upper", "cholesky"
    if method == "half":
        return min(climb(kernel, cover, guess) for cover in half_covers(axes)), "upper", "half"
    if max(a.size for a in axes) <= 4 and whole.cost <= DEAR:
        return whole.bound(guess), "upper", "cholesky"
    (best, torus), how = least(kernel, torus_covers(axes)), "torus"
    slack = best / guess - 1
    if slack > 0.001 and whole.cost <= (CHEAP if slack <= 0.004 else DEAR):
        best, how = min((best, how), (whole.bound(guess, best), "cholesky"))
    elif slack > 0.004:
        # One exact axis, the other on the torus that was best: half of the slack at a small part of the cost.
        for half in (Cover(axes, (None, torus.tori[1])), Cover(axes, (torus.tori[0], None))):
            if half.order(cin, cout) <= 2048 and half.light(cin, cout):
                best, how = min((best, how), (climb(kernel, half, guess, best, slack / 4), "half"))
    return best, "upper", how


def lower_norm(
    weight: Tensor, size: Pair, *, method: str = "lanczos", steps: int = 100, seed: int = 0, **geometry
) -> Norm:
    """Lower estimate ‖T v‖/‖v‖ after ``steps`` of "lanczos" or "power" on TᵀT from a random start.

    ``geometry``: stride, padding, dilation, groups, padding_mode.
    """
    where = geometry_of(weight, size, **geometry)
    scaled, unit = _scaled(weight, check_finite(weight))
    return _norm(unit, _estimate(scaled, where, method, steps, seed), "lower", method)


def top_input(weight: Tensor, size: Pair, *, steps: int = 100, seed: int = 0, **geometry) -> Tensor:
    """Unit input (1, C_in, H, W), double, that the convolution stretches (nearly) most: a witness of the norm."""
    where = geometry_of(weight, size, **geometry)
    check_finite(weight)
    return _search(weight.detach().double(), where, "lanczos", steps, seed)


def _estimate(weight: Tensor, where: Geometry, method: str, steps: int = 100, seed: int = 0) -> float:
    """‖T v‖ for the unit v of the search, in double precision: reached, hence a lower bound."""
    v = _search(weight, where, method, steps, seed)
    return float(where.conv(weight)(v).norm())


@torch.inference_mode(False)
@torch.enable_grad()
def _search(weight: Tensor, where: Geometry, method: str, steps: int, seed: int) -> Tensor:
    """Unit input near the top right singular vector of T, by single-precision steps on the true operator."""
    if method not in ("lanczos", "power"):
        raise ValueError(f"method = {method!r}: must be lanczos or power")
    if steps < 1:
        raise ValueError(f"steps = {steps}: must be >= 1")
    unit = float(weight.abs().max()) or 1.0
    conv = where.conv((weight / unit).float())
    shape = (1, weight.shape[1] * where.groups, *where.size)
    x = torch.zeros(shape, dtype=torch.float, device=weight.device, requires_grad=True)
    y = conv(x)

    def adjoint(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True)[0]

    @torch.no_grad()
    def normal(v: Tensor) -> Tensor:
        """TᵀT or TTᵀ, on the smaller side."""
        return (adjoint(conv(v.view_as(x))) if inner else conv(adjoint(v.view_as(y)))).flatten()

    inner = x.numel() <= y.numel()
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(min(x.numel(), y.numel()), generator=random, dtype=torch.float)
    v = (_lanczos if method == "lanczos" else _power)(normal, start.to(weight.device), steps)
    v = v.view_as(x) if inner else adjoint(v.view_as(y))
    v = v.detach().double()
    return v / v.norm().clamp_min(torch.finfo(torch.double).tiny)


def _power(normal: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        v = normal(v)
        v = v / v.norm().clamp_min(torch.finfo(v.dtype).tiny)
    return v


def _lanczos(normal: Callable[[Tensor], Tensor], v: Tensor, steps: int, tol: float = 2e-5) -> Tensor:
    """Top Ritz vector; full reorthogonalisation (twice); stops when the top Ritz value has settled."""
    basis = [v / v.norm()]
    diagonal, beside = [], []
    for step in range(min(steps, v.numel())):
        w = normal(basis[-1])
        diagonal.append(float(w @ basis[-1]))
        q = torch.stack(basis)
        for _ in range(2):
            w = w - q.T @ (q @ w)
        size = float(w.norm())
        t = torch.diag(torch.tensor(diagonal, dtype=torch.double))
        t += torch.diag(torch.tensor(beside, dtype=torch.double), -1)
        values, vectors = torch.linalg.eigh(t)
        top = float(values[-1])
        # |size·(last entry)| is the residual; the value is off by at most its square over the gap.
        if size <= 1e-6 * top or (step > 11 and abs(size * float(vectors[-1, -1])) <= tol * top):
            break
        basis.append(w / size)
        beside.append(size)
    return q.T @ vectors[:, -1].to(q)


def reshaped_norm(weight: Tensor) -> float:
    """Norm of the kernel as a C_out × C_in·kh·kw matrix, which common spectral normalisation bounds: NOT the operator's.

    The operator norm is at most √(windows that hold one pixel) times it: 3 times (3x3), 2 times (3x3 stride 2), 1 (1x1).
    """
    return float(torch.linalg.matrix_norm(weight.detach().double().flatten(1), 2))


def naive_fft_norm(weight: Tensor, size: Pair) -> float:
    """UNSOUND for zero padding, for lessons only: largest symbol on the torus N = H, stride 1.

    Kernel (−1, 2, −1) on 3 pixels: 3.000, but the zero-padded operator has norm 2 + √2 = 3.414.
    """
    where = geometry_of(weight, size)
    symbols = torch.fft.fft2(weight.detach().double(), s=where.size).permute(2, 3, 0, 1)
    return float(torch.linalg.matrix_norm(symbols, 2).max())
