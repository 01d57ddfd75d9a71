"""Norms of convolution operators (Lemma ``lem:conv``), each value marked exact, upper or lower.

‖W‖₂ here is the norm of the linear map that the layer really is: on its map size, with its padding and stride. It is not the
norm of the kernel reshaped to a matrix (:func:`reshaped_norm`), which may be 3 times smaller (3x3, stride 1). The proofs are in
``covers`` and ``banded``, the constraint for training in ``guard``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lipmdeq.bounds import check_choice, check_whole
from lipmdeq.norms.banded import BandedGram
from lipmdeq.norms.covers import Cover, Kernel, climb, kept_taps, least, torus_covers, upper
from lipmdeq.norms.geometry import Geometry, Pair, check_finite, geometry_of

METHODS = ("auto", "torus", "cholesky", "dense")
CHEAP, DEAR = 5e9, 2.5e11  # floating-point operations of a proof that take about 0.2 s and 5-10 s


@dataclass(frozen=True)
class Norm:
    """A norm, what is known about it and how it was found."""

    value: float
    kind: str  #: "exact" (up to rounding), "upper" (proved, rounding included) or "lower" (reached by an input)
    method: str

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"norm = {self.value}: must be at most {sys.float_info.max:.4g}")

    def __float__(self) -> float:
        return self.value


def conv_norm(weight: Tensor, size: Pair, *, method: str = "auto", **geometry) -> Norm:
    """Operator norm of ``conv2d(x, weight, ...)`` for x of shape (B, C_in, H, W), in the Euclidean norm: exact or upper.

    ``auto`` spends time only where there is something to gain: exact where windows do not overlap (1x1), for circular padding
    and for small operators; else the best twisted torus; where that is more than 0.1-0.4 % above the Lanczos estimate, a proof
    by Cholesky with both axes exact (one, if too large).

    Args:
        weight: (C_out, C_in/groups, kh, kw), any real dtype.
        size: (H, W) of the input map, or one number for both.
        geometry: stride, padding, dilation, groups, padding_mode, as in ``torch.nn.Conv2d``; "reflect", "replicate" are refused.
        method: "auto", "torus", "cholesky" (both axes exact) or "dense" (eigenvalues of the full Gram matrix).
    """
    check_choice("method", method, METHODS)
    where = geometry_of(weight, size, **geometry)
    check_finite(weight)
    read = kept_taps(weight.detach(), where.axes)
    top = float(read.abs().max()) if read.numel() else 0.0
    if top == 0:
        return Norm(0.0, "exact", "zero operator")
    unit = _unit(top)
    value, kind, how = _sound(weight.detach().double() / unit, where, method)
    return Norm(unit * value, kind, how)


def lower_norm(weight: Tensor, size: Pair, *, steps: int = 100, seed: int = 0, **geometry) -> Norm:
    """‖T v‖/‖v‖ after ``steps`` of Lanczos' method on TᵀT from a random start: reached, hence a lower bound."""
    where = geometry_of(weight, size, **geometry)
    unit = _unit(check_finite(weight))
    return Norm(unit * _search(weight.detach().double() / unit, where, steps, seed), "lower", "lanczos")


def _unit(top: float) -> float:
    """A power of two near ``top``: to divide by it is exact, and squares then neither overflow nor vanish."""
    return 2.0 ** (math.frexp(top)[1] - 1) if top else 1.0


def _sound(weight: Tensor, where: Geometry, method: str) -> tuple[float, str, str]:
    """Exact or upper value for a weight whose largest entry is about 1; its kind and the method."""
    axes, kernel, full = where.axes, Kernel(weight, where.axes, where.groups), Cover(where.axes)
    order, light = kernel.order(full), kernel.light(full)
    if method == "auto" and all(a.disjoint for a in axes):
        # Every pixel is in one window at most: T is block diagonal, with parts of the reshaped kernel as blocks.
        exact = all(a.interior for a in axes)
        if exact or order > 256:
            value = float(torch.linalg.matrix_norm(kernel.w.flatten(2), 2).max())
            return value * (1 + 1e-12), "exact" if exact else "upper", "svd"
    if method == "dense" and not (order <= 16384 and light):
        raise ValueError("method = 'dense': the operator is too large; must be auto, torus or cholesky")
    if method == "dense" or (method == "auto" and order <= 256 and light):
        return float(upper(kernel, full)), "exact", "dense"
    if method in ("auto", "torus") and all(a.exact or (a.disjoint and a.interior) for a in axes):
        return float(upper(kernel, torus_covers(axes)[0])), "exact", "torus"
    if method == "torus":
        return least(kernel, torus_covers(axes))[0], "upper", "torus"
    guess = _search(weight, where, steps=100, seed=0)
    whole = BandedGram(kernel, axes)
    if method == "cholesky" or (max(a.size for a in axes) <= 4 and whole.cost <= DEAR):
        return whole.bound(guess), "upper", "cholesky"
    return _refined(kernel, whole, guess)


def _refined(kernel: Kernel, whole: BandedGram, guess: float) -> tuple[float, str, str]:
    """The best torus and, where its slack over the estimate is worth the time, a factorisation."""
    axes, guess = whole.axes, max(guess, 1e-9 * kernel.norm)
    (best, torus), how = least(kernel, torus_covers(axes)), "torus"
    slack = best / guess - 1
    if slack > 0.001 and whole.cost <= (CHEAP if slack <= 0.004 else DEAR):
        best, how = min((best, how), (whole.bound(guess, best), "cholesky"))
    elif slack > 0.004:
        # One exact axis, the other on the torus that was best: half of the slack at a small part of the cost.
        for half in (Cover(axes, (None, torus.tori[1])), Cover(axes, (torus.tori[0], None))):
            if kernel.order(half) <= 2048 and kernel.light(half):
                best, how = min((best, how), (climb(kernel, half, guess, best, slack / 4), "half"))
    return best, "upper", how


@torch.inference_mode(False)
@torch.enable_grad()
def _search(weight: Tensor, where: Geometry, steps: int, seed: int) -> float:
    """‖T v‖ in double, v a unit input near the top right singular vector of T, by single-precision steps on the operator."""
    check_whole("steps", steps)
    conv = partial(where.conv, (weight / (float(weight.abs().max()) or 1.0)).float())
    shape = (1, weight.shape[1] * where.groups, *where.size)
    x = torch.zeros(shape, dtype=torch.float, device=weight.device, requires_grad=True)
    y = conv(x)
    inner = x.numel() <= y.numel()

    def adjoint(v: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, v.view_as(y), retain_graph=True)[0]

    @torch.no_grad()
    def normal(v: Tensor) -> Tensor:
        """TᵀT or TTᵀ, on the smaller side."""
        return (adjoint(conv(v.view_as(x))) if inner else conv(adjoint(v))).flatten()

    random = torch.Generator().manual_seed(seed)
    start = torch.randn(min(x.numel(), y.numel()), generator=random, dtype=torch.float)
    v = _lanczos(normal, start.to(weight.device), steps)
    v = (v.view_as(x) if inner else adjoint(v)).detach().double()
    v = v / v.norm().clamp_min(torch.finfo(torch.double).tiny)
    return float(where.conv(weight, v).norm())


def _lanczos(normal: Callable[[Tensor], Tensor], v: Tensor, steps: int, tol: float = 2e-5) -> Tensor:
    """Top Ritz vector; full reorthogonalisation (twice); stops when the top Ritz value has settled."""
    basis, diagonal, beside = [v / v.norm()], [], []
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
    """Norm of the kernel as a C_out × C_in·kh·kw matrix: NOT the operator's, see :func:`lipmdeq.bounds.lip_conv_reshaped`."""
    return float(torch.linalg.matrix_norm(weight.detach().double().flatten(1), 2))
