"""Covers of a convolution: families of small matrices whose largest norm bounds the norm of the operator.

One axis of the convolution is y(o) = Σ_t W_t x(o·s + e_t), e_t = t·dilation − padding, 0 ≤ o < H_out, x zero outside 0..H−1.
Write e_t = s·q_t + r_t with 0 ≤ r_t < s: on the samples x_r(i) = x(i·s + r), 0 ≤ i < H_r, a tap is the plain shift q_t, so that
T is a row of blocks T_r(o, i) = Σ_{t: r_t = r} W_t [i − o = q_t], without a stride.

**Twisted torus.** Let N ≥ H_out, N ≥ H_r, N ≥ H_out + q_t and N ≥ H_r − q_t for every tap, and let θ be any angle. The N×N
block matrix C_r(o, i) = Σ_{t: r_t = r} Σ_m W_t e^{imθ} [i − o + mN = q_t] has T_r as its corner: for o < H_out, i < H_r and m ≠
0 the number q_t − mN is ≤ −H_out (m ≥ 1) or ≥ H_r (m ≤ −1), and so it is not i − o. The vectors v_k(i) = e^{iω_k i}/√N, ω_k =
(2πk + θ)/N, are orthonormal, and (put i = o + q_t − mN) C_r v_k = (Σ_{t: r_t = r} W_t e^{iω_k q_t}) v_k. So ‖T‖ ≤ ‖[C_r]_r‖ =
max_k ‖[Ŵ_r(ω_k)]_r‖ for every such N and θ. We use θ ∈ {0, π}: the set of ω_k is then its own negative and, W being real, half
of the frequencies are enough. The common N = H breaks N ≥ H_r − q_t when there is padding: it is unsound.

**Exact axis.** No torus: the block index is the position itself. Two exact axes give the Gram matrix of T; one exact axis and
one torus ("half") lose only what a torus in one dimension loses, with far smaller matrices.

**One formula for all.** With K(t, u) = W_tᵀ W_u (W_t W_uᵀ when the output side is smaller) every Gram matrix is G_f(a, b) =
Σ_{t,u} A_f(a, b, t, u) K(t, u), where A is the product of one table for each axis: phases e^{iω(q_u − q_t)} on a torus, numbers
of pairs of positions on an exact axis.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from lipmdeq.norms.geometry import Axis, Torus

CHUNK = 1 << 23  # entries of a batch of Gram matrices that are in memory at once
Test = Callable[[Tensor], bool | Tensor]  # does the factorisation of level·I − G run to its end?


@dataclass(frozen=True)
class Cover:
    """Two axes, each exact (None) or on a torus (N, odd)."""

    axes: tuple[Axis, Axis]
    tori: tuple[Torus | None, Torus | None] = (None, None)

    @property
    def scale(self) -> float:
        """Factor for circular outputs that occur more than once (on a torus axis only)."""
        return math.sqrt(math.prod(a.copies for a, t in zip(self.axes, self.tori, strict=True) if t))

    def blocks(self, side: str) -> int:
        """Number of C×C blocks in a row of a Gram matrix."""
        return math.prod(axis.length(side, torus) for axis, torus in zip(self.axes, self.tori, strict=True))


def kept_taps(weight: Tensor, axes: tuple[Axis, Axis]) -> Tensor:
    """The weight without the rows and columns of taps that read nothing but padding."""
    for dim, axis in enumerate(axes, start=2):
        if len(axis.taps) < weight.shape[dim]:
            weight = weight.index_select(dim, torch.tensor(axis.taps, dtype=torch.long, device=weight.device))
    return weight


def torus_covers(axes: tuple[Axis, Axis]) -> list[Cover]:
    """The two smallest tori, plain and twisted on each axis; first those whose frequencies avoid 0 and π.

    Smooth and rough kernels have their largest symbol at 0 or π, where the zero-padded operator cannot reach it.
    """
    y, x = (axis.tori() for axis in axes)
    sizes = (y[:2], x[:2]), (y[2:] or y, x[2:] or x)
    covers = dict.fromkeys(Cover(axes, (ty, tx)) for ys, xs in sizes for ty in ys for tx in xs)
    return sorted(covers, key=lambda cover: sum((odd == 0) + ((n + odd) % 2 == 0) for n, odd in cover.tori))


def half_covers(axes: tuple[Axis, Axis]) -> list[Cover]:
    """One axis exact, the other on its tori."""
    return [Cover(axes, (None, t)) for t in axes[1].tori()] + [Cover(axes, (t, None)) for t in axes[0].tori()]


@lru_cache(maxsize=64)  # every proof of a layer asks for the same one
def _table(cover: Cover, side: str) -> Tensor:
    """A for both axes, (F, 1 or 2, A², T²) real: one of every pair of frequencies ±ω, real and imaginary part."""
    (y, fy), (x, fx) = (a.table(side, t) for a, t in zip(cover.axes, cover.tori, strict=True))
    pairs = ((i, j, *k, *m) for i, k in enumerate(fy) for j, m in enumerate(fx))
    i, j = torch.tensor([(i, j) for i, j, k, n, m, p in pairs if (k, m) >= (-k % n, -m % p)]).T
    a = torch.einsum("fabtu,fcdvw->facbdtvuw", y[i], x[j])
    a = a.reshape(len(i), cover.blocks(side) ** 2, -1)
    parts = [a.real] if cover.tori == (None, None) else [a.real, a.imag]
    return torch.stack(parts, 1)


class Kernel:
    """The taps of a weight (C_out, C_in/groups, kh, kw) in double precision, and their products K(t, u)."""

    def __init__(self, weight: Tensor, axes: tuple[Axis, Axis], groups: int = 1):
        w = kept_taps(weight.detach(), axes).double()
        self.groups, self.taps = groups, len(axes[0].taps) * len(axes[1].taps)
        self.channels = {"in": w.shape[1], "out": w.shape[0] // groups}
        self.w = w.reshape(groups, self.channels["out"], self.channels["in"], self.taps)
        self.square = w.square().sum()  # ‖W‖_F², on the device
        self._products: dict[str, Tensor] = {}

    norm = property(lambda self: float(self.square.sqrt()))  # ‖W‖_F

    def orders(self, cover: Cover) -> dict[str, int]:
        """Order of the Gram matrices of a cover on each side; the smaller side is used."""
        return {side: c * cover.blocks(side) for side, c in self.channels.items()}

    def order(self, cover: Cover) -> int:
        return min(self.orders(cover).values())

    def side(self, cover: Cover) -> str:
        return min("in", "out", key=self.orders(cover).get)

    def light(self, cover: Cover) -> bool:
        """Is the table A small enough to be made without a thought?"""
        frequencies = math.prod(t[0] for t in cover.tori if t)
        return frequencies * (cover.blocks(self.side(cover)) * self.taps) ** 2 <= 1 << 24

    def products(self, side: str) -> Tensor:
        """K as (groups, T², C²)."""
        if side not in self._products:
            w = self.w.permute(0, 3, 2, 1) if side == "in" else self.w.permute(0, 3, 1, 2)
            g, t, c, _ = w.shape
            a = w.flatten(1, 2)
            self._products[side] = (a @ a.mT).view(g, t, c, t, c).transpose(2, 3).reshape(g, t * t, c * c)
        return self._products[side]

    def rounding(self, cover: Cover) -> tuple[float, Tensor]:
        """(δ, e): λ_max(G) ≤ ℓ²(1 + δ) + e when a computed test says "≤ ℓ²" (Cholesky, or eigvalsh returns ℓ²).

        Cholesky (Higham, Accuracy and Stability, Theorem 10.3; Rump, BIT 46, 2006): if the factorisation of A = ℓ²I − Ĝ runs to
        its end, LL* = A + ΔA with |ΔA| ≤ γ_{n+1}|L||L*|, hence ‖ΔA‖ ≤ γ_{n+1}‖L‖_F² ≤ γ_{n+1} tr A/(1 − γ_{n+1}), and tr A ≤
        nℓ². Eigenvalues are backward stable with an error of a modest multiple of n·u·‖Ĝ‖. We take 8n(n + 2)u for both, with
        room for complex numbers. Forming Ĝ: inner products of m and of T² terms give |Ĝ − G| ≤ (γ_m + γ_{T²} + few
        u)·Σ|A||W_t|ᵀ|W_u|, twice for real and imaginary parts. The norm of that sum is at most (Σ_t‖W_t‖_F)² ≤ T‖W‖_F². The
        last term is for products that vanish.
        """
        # The larger side, since a banded factorisation (:mod:`lipmdeq.norms.banded`) may work on it.
        n, u = max(self.orders(cover).values()), sys.float_info.epsilon / 2
        forming = (max(self.channels.values()) + self.taps**2 + 34) * u
        return 8 * n * (n + 2) * u, 2.1 * forming * self.taps * self.square + 1e-290

    def level(self, cover: Cover, bound: float) -> Tensor:
        """The ℓ² below which a computed test has to stay for ‖T‖ ≤ bound to be proved, rounding included."""
        delta, error = self.rounding(cover)
        return ((bound / cover.scale) ** 2 - error) / (1 + delta)

    def grams(self, cover: Cover) -> Iterator[Tensor]:
        """Gram matrices of the cover, in batches (B, n, n), Hermitian."""
        side = self.side(cover)
        table, k = _table(cover, side).to(self.w.device, non_blocking=True), self.products(side)
        c, a = self.channels[side], cover.blocks(side)
        step = max(1, CHUNK // (table.shape[1] * self.groups * (a * c) ** 2))
        for part in table.split(step):
            f, p = part.shape[:2]
            g = (part.flatten(0, 2) @ k).view(self.groups, f, p, a, a, c, c)
            g = g.transpose(4, 5).reshape(self.groups * f, p, a * c, a * c)
            yield g[:, 0] if p == 1 else torch.complex(g[:, 0], g[:, 1])


def below(gram: Tensor, level: Tensor) -> Tensor:
    """Does the Cholesky factorisation of level·I − G succeed for every G of the batch? The answer stays on the device."""
    shifted = gram.neg()
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    return (level > 0) & ~torch.linalg.cholesky_ex(shifted).info.any()


def proves(kernel: Kernel, cover: Cover, c: float) -> Tensor:
    """True is a proof of ‖T‖ ≤ c (batched Cholesky, rounding included), False proves nothing; nothing waits for the answer."""
    level = kernel.level(cover, c)
    return torch.stack([kernel.square < 1e300, *(below(g, level) for g in kernel.grams(cover))]).all()


def upper(kernel: Kernel, cover: Cover) -> Tensor:
    """Upper bound on ‖T‖: the largest norm in the cover by eigvalsh (inf if there is none); it stays on the device."""
    delta, error = kernel.rounding(cover)
    try:
        top = torch.stack([torch.linalg.eigvalsh(g)[:, -1].max() for g in kernel.grams(cover)]).max()
    except torch.linalg.LinAlgError:
        return torch.full_like(kernel.square, math.inf)
    return (cover.scale * (top.clamp_min(0) * (1 + delta) + error).sqrt()).nan_to_num(math.inf, math.inf)


def least(kernel: Kernel, covers: list[Cover]) -> tuple[float, Cover]:
    """Smallest bound among the covers, and the cover that gives it."""
    bounds = [float(upper(kernel, cover)) for cover in covers]
    return min(bounds), covers[bounds.index(min(bounds))]


def climb(
    kernel: Kernel, cover: Cover, guess: float, stop: float = math.inf, excess: float = 5e-4, tests: Iterable[Test] = ()
) -> float:
    """Upper bound on ‖T‖ near ``guess`` by Cholesky, where eigvalsh is slow (inf when there is none below ``stop``).

    The level starts at guess·(1 + excess) and rises only when one of the tests, by default those of the Gram matrices, fails.
    """
    guess, bound = max(guess, 1e-9 * kernel.norm), 0.0
    for accepts in tests or (partial(below, gram) for gram in kernel.grams(cover)):
        while (bound := guess * (1 + excess)) < stop and not accepts(kernel.level(cover, bound)):
            excess *= 1.5
        if bound >= stop:
            return math.inf
    return bound
