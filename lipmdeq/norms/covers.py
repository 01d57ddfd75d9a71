"""Covers of a convolution: families of small matrices whose largest norm bounds the norm of the operator.

One axis of the convolution is y(o) = Σ_t W_t x(o·s + e_t), e_t = t·dilation − padding, 0 ≤ o < H_out, x zero
outside 0..H−1. Write e_t = s·q_t + r_t with 0 ≤ r_t < s: on the samples x_r(i) = x(i·s + r), 0 ≤ i < H_r, a tap is the
plain shift q_t, so that T is a row of blocks T_r(o, i) = Σ_{t: r_t = r} W_t [i − o = q_t], without a stride.

**Twisted torus.** Let N ≥ H_out, N ≥ H_r, N ≥ H_out + q_t and N ≥ H_r − q_t for every tap, and let θ be any angle. The
N×N block matrix C_r(o, i) = Σ_{t: r_t = r} Σ_m W_t e^{imθ} [i − o + mN = q_t] has T_r as its corner: for o < H_out,
i < H_r and m ≠ 0 the number q_t − mN is ≤ −H_out (m ≥ 1) or ≥ H_r (m ≤ −1), and so it is not i − o. The vectors
v_k(i) = e^{iω_k i}/√N, ω_k = (2πk + θ)/N, are orthonormal, and (put i = o + q_t − mN)
C_r v_k = (Σ_{t: r_t = r} W_t e^{iω_k q_t}) v_k. So ‖T‖ ≤ ‖[C_r]_r‖ = max_k ‖[Ŵ_r(ω_k)]_r‖ for every such N and θ. We use
θ ∈ {0, π}: the set of ω_k is then its own negative and, W being real, half of the frequencies are enough. The common
N = H breaks N ≥ H_r − q_t when there is padding: it is unsound.

**Exact axis.** No torus: the block index is the position itself. Two exact axes give the Gram matrix of T; one exact
axis and one torus ("half") lose only what a torus in one dimension loses, with far smaller matrices.

**One formula for all.** With K(t, u) = W_tᵀ W_u (W_t W_uᵀ when the output side is smaller) every Gram matrix is
G_f(a, b) = Σ_{t,u} A_f(a, b, t, u) K(t, u), where A is the product of one table for each axis: phases e^{iω(q_u − q_t)}
on a torus, numbers of pairs of positions on an exact axis.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from lipmdeq.norms.geometry import Axis, Torus

CHUNK = 1 << 23  # entries of a batch of Gram matrices that are in memory at once


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
        n = 1
        for axis, torus in zip(self.axes, self.tori, strict=True):
            if torus is None:
                n *= axis.size if side == "in" else axis.out
            elif side == "in":
                n *= len(axis.residues)
        return n

    def side(self, cin: int, cout: int) -> str:
        """The side with the smaller Gram matrices."""
        return "in" if cin * self.blocks("in") <= cout * self.blocks("out") else "out"

    def order(self, cin: int, cout: int) -> int:
        """Order n of the Gram matrices."""
        return min(cin * self.blocks("in"), cout * self.blocks("out"))

    def entries(self, side: str) -> int:
        """Size of the table A."""
        frequencies = math.prod(t[0] for t in self.tori if t)
        return frequencies * (self.blocks(side) * len(self.axes[0].taps) * len(self.axes[1].taps)) ** 2

    @cached_property
    def uses(self) -> float:
        """How often a tap occurs in the matrix of T at most, each time alone (zero padding, two exact axes)."""
        if self.tori != (None, None) or any(a.circular for a in self.axes):
            return math.inf
        return math.prod(float(a.incidence().sum((1, 2)).max()) for a in self.axes)

    def light(self, cin: int, cout: int) -> bool:
        """Is the table small enough to be made and kept without a thought?"""
        return self.entries(self.side(cin, cout)) <= 1 << 24


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
    y, x = axes[0].tori(), axes[1].tori()
    covers = []
    for first in (0, 2):
        for ty in y[first : first + 2] or y[:2]:
            covers += [Cover(axes, (ty, tx)) for tx in x[first : first + 2] or x[:2]]

    def hits(cover: Cover) -> int:
        return sum((odd == 0) + ((n + odd) % 2 == 0) for n, odd in cover.tori)

    return sorted(dict.fromkeys(covers), key=hits)


def half_covers(axes: tuple[Axis, Axis]) -> list[Cover]:
    """One axis exact, the other on its tori."""
    return [Cover(axes, (None, t)) for t in axes[1].tori()] + [Cover(axes, (t, None)) for t in axes[0].tori()]


def _plain_single(w: Tensor) -> bool:
    """Are products of this single-precision tensor really formed in single precision (no bf16, no TF32)?"""
    if w.dtype != torch.float32 or w.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by a newer interface, to whatever
        return False


def _table(cover: Cover, side: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A for both axes, (F, 1 or 2, A², T²) real: one of every pair of frequencies ±ω, real and imaginary part."""
    (y, fy), (x, fx) = (a.table(side, t) for a, t in zip(cover.axes, cover.tori, strict=True))
    index = {}
    for i, (k, n) in enumerate(fy):
        for j, (m, p) in enumerate(fx):
            index.setdefault(max((k, m), (-k % n, -m % p)), (i, j))
    i, j = torch.tensor(sorted(index.values())).T
    a = torch.einsum("fabtu,fcdvw->facbdtvuw", y[i], x[j])
    a = a.reshape(len(i), cover.blocks(side) ** 2, -1)
    parts = [a.real] if cover.tori == (None, None) else [a.real, a.imag]
    return torch.stack(parts, 1).to(device, dtype)


_kept_table = lru_cache(maxsize=256)(_table)


class Kernel:
    """The taps of a weight (C_out, C_in/groups, kh, kw), and their products K(t, u).

    ``fast``: if the weight is in single precision, form the products in it, and work on with small Gram matrices in it, in
    half the time; the error bound knows it (it costs up to 0.5 % of the norm). Everything else is in double precision.
    """

    def __init__(self, weight: Tensor, axes: tuple[Axis, Axis], groups: int = 1, fast: bool = False):
        cout, self.cin = weight.shape[:2]
        self.groups, self.cout = groups, cout // groups
        self.rows = len(axes[0].taps)
        self.taps = self.rows * len(axes[1].taps)
        w = kept_taps(weight.detach(), axes)
        self.norm = float(torch.linalg.vector_norm(w, dtype=torch.double))  # ‖W‖_F
        if self.norm < 1e-140 and w.numel():  # squares vanish
            self.norm = math.sqrt(w.numel()) * float(w.abs().max())
        # Squares must be far from the limits of single precision.
        single = fast and 1e-12 < self.norm < 1e12 and _plain_single(w)
        self.w = (w if single else w.double()).reshape(groups, self.cout, self.cin, self.taps)
        self._products: dict[str, Tensor] = {}

    def wide(self) -> Kernel:
        """The same kernel with everything in double precision."""
        other = copy.copy(self)
        other.w, other._products = self.w.double(), {}
        return other

    def dtype(self, cover: Cover) -> torch.dtype:
        """Precision of the Gram matrices of a cover."""
        return self.w.dtype if cover.order(self.cin, self.cout) <= 128 else torch.float64

    def products(self, side: str) -> Tensor:
        """K as (groups, T², C²), in the dtype of the taps."""
        if side not in self._products:
            w = self.w.permute(0, 3, 2, 1) if side == "in" else self.w.permute(0, 3, 1, 2)
            g, t, c, m = w.shape
            a = w.reshape(g, t * c, m)
            if (t * c) ** 2 * m < 1e7:
                k = a @ a.mT
            else:  # K(t, u) is the transpose of K(u, t): a third of the work is saved by rows of the kernel
                k = a.new_empty(g, t * c, t * c)
                cut = t * c // self.rows
                for i in range(0, t * c, cut):
                    k[:, i : i + cut, i:] = a[:, i : i + cut] @ a[:, i:].mT
                    k[:, i + cut :, i : i + cut] = k[:, i : i + cut, i + cut :].mT
            self._products[side] = k.view(g, t, c, t, c).transpose(2, 3).reshape(g, t * t, c * c)
        return self._products[side]

    def rounding(self, cover: Cover, order: int = 0) -> tuple[float, float]:
        """(δ, e): λ_max(G) ≤ ℓ²(1 + δ) + e when a computed test says "≤ ℓ²" (Cholesky, or eigvalsh returns ℓ²).

        Cholesky (Higham, Accuracy and Stability, Theorem 10.3; Rump, BIT 46, 2006): if the factorisation of
        A = ℓ²I − Ĝ runs to its end, LL* = A + ΔA with |ΔA| ≤ γ_{n+1}|L||L*|, hence
        ‖ΔA‖ ≤ γ_{n+1}‖L‖_F² ≤ γ_{n+1} tr A/(1 − γ_{n+1}), and tr A ≤ nℓ². Eigenvalues are backward stable with an
        error of a modest multiple of n·u·‖Ĝ‖. We take 8n(n + 2)u for both, with room for complex numbers.
        Forming Ĝ: inner products of m and of T² terms give |Ĝ − G| ≤ (γ_m + γ_{T²} + few u)·Σ|A||W_t|ᵀ|W_u|, twice for
        real and imaginary parts. The norm of that sum is at most (Σ_t‖W_t‖_F)² ≤ T‖W‖_F², and with two exact axes also
        at most ‖T‖_F² ≤ (uses of a tap)·‖W‖_F². The last term is for products of doubles that vanish.
        """
        n = order or cover.order(self.cin, self.cout)
        first, later = (torch.finfo(d).eps / 2 for d in (self.w.dtype, self.dtype(cover)))
        forming = (max(self.cin, self.cout) + 2) * first + (self.taps**2 + 32) * later
        return 8 * n * (n + 2) * later, 2.1 * forming * min(self.taps, cover.uses) * self.norm**2 + 1e-290

    def level(self, cover: Cover, bound: float, order: int = 0) -> float:
        """The ℓ² below which a computed test has to stay for ‖T‖ ≤ bound to be proved, rounding included."""
        delta, error = self.rounding(cover, order)
        return ((bound / cover.scale) ** 2 - error) / (1 + delta)

    def grams(self, cover: Cover) -> Iterator[Tensor]:
        """Gram matrices of the cover, in batches (B, n, n), Hermitian."""
        side = cover.side(self.cin, self.cout)
        make = _kept_table if cover.entries(side) <= 1 << 18 else _table
        dtype = self.dtype(cover)
        table, k = make(cover, side, self.w.device, dtype), self.products(side).to(dtype)
        c, a = (self.cin if side == "in" else self.cout), cover.blocks(side)
        step = max(1, CHUNK // (table.shape[1] * self.groups * (a * c) ** 2))
        for part in table.split(step):
            f, p = part.shape[:2]
            g = (part.reshape(-1, part.shape[-1]) @ k).view(self.groups, f, p, a, a, c, c)
            g = g.transpose(4, 5).reshape(self.groups * f, p, a * c, a * c)
            yield g[:, 0] if p == 1 else torch.complex(g[:, 0], g[:, 1])


def below(gram: Tensor, level: float) -> bool:
    """Does the Cholesky factorisation of level·I − G succeed for every G of the batch?"""
    shifted = gram.neg()
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    return not bool(torch.linalg.cholesky_ex(shifted).info.any())


def least(kernel: Kernel, covers: list[Cover]) -> tuple[float, Cover]:
    """Smallest bound among the covers, and the cover that gives it."""
    best, choice = math.inf, covers[0]
    for cover in covers:
        bound = largest(kernel, cover, best)
        if bound < best:
            best, choice = bound, cover
    return best, choice


def proves(kernel: Kernel, cover: Cover, c: float) -> bool:
    """True is a proof of ‖T‖ ≤ c (batched Cholesky, rounding included); False proves nothing."""
    level = kernel.level(cover, c)
    return math.isfinite(kernel.norm) and level > 0 and all(below(g, level) for g in kernel.grams(cover))


def top_eigenvalue(gram: Tensor) -> float:
    """Largest eigenvalue in the batch; nan where the library gives none, or a wrong one.

    In single precision it does both when entries are graded down to the smallest numbers (a row of a kernel without
    gradient shrinks at every rescaling). So a factorisation must agree there, a few roundings above.
    """
    try:
        top = float(torch.linalg.eigvalsh(gram)[:, -1].max())
    except torch.linalg.LinAlgError:
        return math.nan
    if gram.dtype in (torch.float64, torch.complex128) or not math.isfinite(top):
        return top
    above = top * (1 + 8 * gram.shape[-1] * torch.finfo(torch.float32).eps)
    return above if below(gram, above) else math.nan


def largest(kernel: Kernel, cover: Cover, stop: float = math.inf) -> float:
    """Upper bound on ‖T‖: the largest norm in the cover by eigvalsh (inf as soon as it reaches ``stop``).

    Where single precision gives no eigenvalue, all is done again in double.
    """
    delta, error = kernel.rounding(cover)
    bound = 0.0
    for g in kernel.grams(cover):
        top = top_eigenvalue(g)
        if not math.isfinite(top):
            return math.inf if kernel.dtype(cover) == torch.float64 else largest(kernel.wide(), cover, stop)
        top = max(0.0, top)
        bound = max(bound, cover.scale * math.sqrt(top * (1 + delta) + error))
        if bound >= stop:
            return math.inf
    return bound


def climb(kernel: Kernel, cover: Cover, guess: float, stop: float = math.inf, excess: float = 5e-4) -> float:
    """Upper bound on ‖T‖ near ``guess`` by Cholesky, where eigvalsh is slow (inf when there is none below ``stop``).

    The level starts at guess·(1 + excess) and rises only when a factorisation fails.
    """
    guess, bound = max(guess, 1e-9 * kernel.norm), 0.0
    for g in kernel.grams(cover):
        while True:
            bound = guess * (1 + excess)
            if bound >= stop:
                return math.inf
            level = kernel.level(cover, bound)
            if level > 0 and below(g, level):
                break
            excess *= 1.5
    return bound
