"""The proof of the constraint ‖W‖₂ ≤ c in training (Conv*, Lemma ``lem:conv``); between two proofs ``Conv.estimate`` holds it.

Three ways to know that an operator norm is at most c, from cheap to dear:

1. *Drift.* ‖T_W‖ ≤ ‖T_V‖ + k‖W − V‖_F for a weight V with a proved norm, k of :func:`drift_factor`: one pass over W.
2. *Decision.* A batched Cholesky factorisation of c²I − G over a cover (:mod:`lipmdeq.norms`) succeeds.
3. *Value.* The largest eigenvalue over the best cover; the weight is divided by what is too much.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipmdeq.bounds import check_range
from lipmdeq.norms.covers import Cover, Kernel, below, half_covers, largest, least, proves, torus_covers
from lipmdeq.norms.geometry import Axis, Geometry, Pair, check_finite, geometry_of, pair


def fast_covers(geometry: Geometry, cin: int, cout: int, exact_order: int = 256) -> list[Cover]:
    """Covers for the constraint, likely best first: as exact as small Gram matrices allow, else the tori.

    Tori are loose on small maps: up to 1.1-1.4 times on 4x4, 1.5-3 times on 2x2.
    """
    axes = geometry.axes
    if not all(a.disjoint for a in axes):
        if Cover(axes).order(cin, cout) <= exact_order:
            return [Cover(axes)]
        if max(a.size for a in axes) <= 4:
            halves = [h for h in half_covers(axes) if h.order(cin, cout) <= exact_order // 2]
            return halves or torus_covers(axes)
    return torus_covers(axes)


def drift_factor(kernel: Pair, stride: Pair = 1, dilation: Pair = 1) -> float:
    """k with ‖T_W‖ ≤ k‖W‖_F on every map: 3 for 3x3, 2 for 3x3 with stride 2, 1 for 1x1 (zero padding).

    k² is the number of windows that hold one pixel. Proof: T_W x at an output is R·(window of x), with R the kernel
    reshaped to C_out × C_in·kh·kw. So ‖T_W x‖² ≤ ‖R‖²·Σ‖window‖² ≤ ‖R‖²k²‖x‖², and ‖R‖ ≤ ‖R‖_F. On one axis, tap t reads
    pixel i only if t·dilation ≡ i + padding modulo stride, which holds for at most ⌈kernel·gcd(stride, dilation)/stride⌉
    taps, and each of them in one window. T is linear in W, hence ‖T_W‖ ≤ ‖T_V‖ + k‖W − V‖_F.
    """
    sizes = zip(pair("kernel", kernel, 1), pair("stride", stride, 1), pair("dilation", dilation, 1), strict=True)
    return math.sqrt(math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in sizes))


def map_drift(axes: tuple[Axis, Axis]) -> float:
    """The same constant for one map, counted: windows for each pixel or, by Tᵀ, pixels for each window if fewer."""
    windows, pixels = zip(*(a.overlap for a in axes), strict=True)
    return math.sqrt(min(math.prod(windows), math.prod(pixels)))


def _finite_kernel(weight: Tensor, where: Geometry) -> Kernel:
    kernel = Kernel(weight, where.axes, where.groups, fast=True)
    if not kernel.norm < 1e150:  # else squares overflow
        check_finite(weight)
        raise ValueError(f"weight of Frobenius norm {kernel.norm}: too large to be bounded")
    return kernel


def fits(weight: Tensor, size: Pair, c: float, *, tries: int = 4, **geometry) -> bool:
    """True proves that the operator norm is at most c; False means "not proved".

    Args:
        weight: (C_out, C_in/groups, kh, kw).
        size: (H, W) of the input map.
        c: the bound, > 0.
        tries: how many tori to try at most.
        geometry: stride, padding, dilation, groups, padding_mode.
    """
    check_range("c", c)
    where = geometry_of(weight, size, **geometry)
    kernel = _finite_kernel(weight, where)
    if kernel.norm == 0:
        return True
    covers = fast_covers(where, kernel.cin, kernel.cout)
    return any(proves(kernel, cover, c) for cover in covers[:tries])


@torch.no_grad()
def project(weight: Tensor, size: Pair, c: float, *, margin: float = 0.0, **geometry) -> float:
    """Scale the weight in place to norm ≤ c·(1 − margin) if its proved bound exceeds c; returns the factor."""
    check_range("c", c)
    check_range("margin", margin, 0, 1, "[)")
    return NormGuard(size, **geometry).rescale(weight, c, c * (1 - margin))


class NormGuard:
    """Keeps ‖T_W‖ ≤ c for one convolution: proved after every :meth:`enforce`, at the least cost that does it.

    Plain state of a layer, no parameter: a weight V, a bound that was proved for it, and the cover that proved it. What
    is known about V stays true whatever happens to the layer. Copies and files leave V out: the next call proves anew.

    Args:
        size: (H, W) of the input map.
        margin: a weight that is too large is brought below c by four steps like the last ones, at most by margin·c.
        exact_order: largest order of a full Gram matrix that is used in the place of tori (tight, but slower).
        geometry: stride, padding, dilation, groups, padding_mode, as in ``torch.nn.Conv2d``.
    """

    def __init__(self, size: Pair, *, margin: float = 0.04, exact_order: int = 256, **geometry):
        check_range("margin", margin, 0, 1, "[)")
        self.key = (size, geometry.get("stride", 1), geometry.get("padding", 0))
        self.margin, self.exact_order = margin, exact_order
        self._where = {"size": size, **geometry}
        self.forget()

    def forget(self) -> None:
        """Drop what is known; the next call proves anew."""
        self._seen: Tensor | None = None  # V
        self._bound = math.inf  # proved for V
        self._calls = 0  # since V was taken
        self._scalings = 0
        self._chosen = -64  # value of _scalings when the cover was chosen among all
        self._room = 8.0  # steps that the next bound is to leave free
        self._cover: Cover | None = None
        self._drift = math.inf
        self.found = math.inf  # proved by the last enforce before it scaled anything: c, or the bound that was above it

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_seen": None, "_bound": math.inf, "_calls": 0, "_cover": None}

    def _remember(self, weight: Tensor, bound: float) -> None:
        self._seen, self._bound, self._calls = weight.detach().clone(), bound, 0

    def _moved(self, weight: Tensor) -> float:
        """Bound on ‖T_W − T_V‖, inf when there is no V to compare with."""
        v, w = self._seen, weight.detach()
        if v is None or (v.shape, v.dtype) != (w.shape, w.dtype):
            return math.inf
        if v.device != w.device:  # the layer moved: what is known about V is true there too
            v = self._seen = v.to(w.device)
        return self._drift * (1 + 1e-6) * float(torch.linalg.vector_norm(w - v, dtype=torch.double))

    def _kernel(self, weight: Tensor) -> tuple[Kernel, Geometry]:
        where = geometry_of(weight, **self._where)
        if self._drift == math.inf:
            self._drift = map_drift(where.axes)
        return _finite_kernel(weight, where), where

    def _shrink(self, weight: Tensor, kernel: Kernel, bound: float, c: float) -> float:
        """Scale from a proved bound to c, with room for the rounding of the scaled entries in their own dtype."""
        if not math.isfinite(bound):
            raise ValueError(f"weight of Frobenius norm {kernel.norm}: too large to be bounded")
        rounding = 8 * torch.finfo(weight.dtype).eps * self._drift * kernel.norm
        factor = c / (bound + rounding)
        weight.mul_(factor)
        self.found = bound
        self._scalings += 1
        self._remember(weight, c)
        return factor

    def _covers(self, kernel: Kernel, where: Geometry) -> list[Cover]:
        return fast_covers(where, kernel.cin, kernel.cout, self.exact_order)

    @torch.no_grad()
    def rescale(self, weight: Tensor, c: float, target: float | None = None) -> float:
        """Choose the best cover; scale to ``target`` (default c) if its bound is above c. Returns the factor."""
        kernel, where = self._kernel(weight)
        if kernel.norm == 0:
            self._remember(weight, 0.0)
            return 1.0
        bound, self._cover = least(kernel, self._covers(kernel, where))
        self._chosen = self._scalings
        if bound <= c:
            self._remember(weight, bound)
            return 1.0
        return self._shrink(weight, kernel, bound, target or c)

    def _first(self, weight: Tensor, c: float) -> float:
        """A weight that is seen for the first time: try the cover that is likely best before choosing among all."""
        kernel, where = self._kernel(weight)
        if kernel.norm > 0:
            cover = self._covers(kernel, where)[0]
            if proves(kernel, cover, c):
                self._cover = cover
                self._remember(weight, c)
                return 1.0
        return self.rescale(weight, c)

    @torch.no_grad()
    def enforce(self, weight: Tensor, c: float) -> float:
        """Make ‖T_W‖ ≤ c a proved fact, scaling ``weight`` in place if need be; returns the factor (1.0: untouched)."""
        check_range("c", c)
        self._calls += 1
        self.found = c
        moved = self._moved(weight)
        if self._bound + moved <= c:
            return 1.0
        if self._cover is None or not moved < math.inf:
            return self._first(weight, c)
        kernel, _ = self._kernel(weight)
        grams = list(kernel.grams(self._cover))

        def holds(bound: float) -> bool:
            level = kernel.level(self._cover, bound)
            return bound > 0 and level > 0 and all(below(g, level) for g in grams)

        # A bound below c pays: that many steps like the last ones need no work. After failures ask for less, and rarely.
        step = moved / self._calls
        if self._room < 1:
            self._room *= 1.2
        elif holds(c - self._room * step):
            self._remember(weight, c - self._room * step)
            self._room = min(2 * self._room, 32.0)
            return 1.0
        else:
            self._room /= 2
        if holds(c):
            self._remember(weight, c)
            return 1.0
        target = c - min(4 * step, self.margin * c)
        if self._scalings >= self._chosen + 64:  # kernels change: is another cover better by now?
            return self.rescale(weight, c, target)
        for excess in (0.01, 0.03, 0.08):
            if holds(c * (1 + excess)):
                return self._shrink(weight, kernel, c * (1 + excess), target)
        return self._shrink(weight, kernel, largest(kernel, self._cover), target)
