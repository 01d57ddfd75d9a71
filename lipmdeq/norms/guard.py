"""The proof of the constraint ‖W‖₂ ≤ c in training (Conv*, Lemma ``lem:conv``); between two proofs ``Conv.estimate`` holds it.

A proof first *decides*: does a batched Cholesky factorisation of c²I − G succeed over a cover (:mod:`lipmdeq.norms`)? Only if
it does over none, the *value* is computed, the largest eigenvalue over the best cover, and the weight is divided accordingly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipmdeq.bounds import check_range
from lipmdeq.norms.covers import Cover, Kernel, half_covers, least, proves, torus_covers
from lipmdeq.norms.geometry import Axis, Pair, check_finite, geometry_of

ROOM = 1e-3  # a scaled weight stays so much below c: another proof, as of the certificate, may be looser
EXACT_ORDER = 256  # largest order of a full Gram matrix that is used in the place of tori: tight, but slower


def fast_covers(kernel: Kernel, axes: tuple[Axis, Axis]) -> list[Cover]:
    """Covers for the constraint, likely best first: as exact as small Gram matrices allow, else the tori."""
    small = max(a.size for a in axes) <= 4  # where tori are loose: 1.1-1.4 times on 4x4, 1.5-3 times on 2x2
    if all(a.disjoint for a in axes):
        return torus_covers(axes)
    if kernel.order(Cover(axes)) <= EXACT_ORDER:
        return [Cover(axes)]
    halves = [h for h in half_covers(axes) if small and kernel.order(h) <= EXACT_ORDER // 2]
    return halves or torus_covers(axes)


def fits(weight: Tensor, size: Pair, c: float, **geometry) -> bool:
    """True proves that the operator norm on maps of this size is at most c > 0; False means "not proved"."""
    return project(weight.detach().clone(), size, c, **geometry) == 1.0


def project(weight: Tensor, size: Pair, c: float, **geometry) -> float:
    """Scale the weight in place to norm ≤ c if this is not proved already; returns the factor (1.0: untouched)."""
    return NormGuard(size, **geometry).enforce(weight, c)


class NormGuard:
    """Keeps ‖T_W‖ ≤ c for one convolution, described as in :func:`conv_norm`: proved after every :meth:`enforce`.

    It remembers only the cover that served last, and tries it first: what is proved is proved for the weight at hand.
    """

    def __init__(self, size: Pair, **geometry):
        self.size, self._geometry, self._cover = size, geometry, None
        self.found = math.inf  # proved by the last enforce before it scaled anything: c, or the bound that was above it

    def _covered(self, weight: Tensor, c: float) -> tuple[Kernel, list[Cover]]:
        """The kernel, and its covers in the order in which they are tried."""
        check_range("c", c)
        where = geometry_of(weight, self.size, **self._geometry)
        kernel = Kernel(weight, where.axes, where.groups)
        return kernel, sorted(fast_covers(kernel, where.axes), key=lambda cover: cover != self._cover)

    @torch.no_grad()
    def proves(self, weight: Tensor, c: float) -> Tensor:
        """True proves ‖T_W‖ ≤ c, over the cover that is tried first; False proves nothing. It stays on the device."""
        kernel, covers = self._covered(weight, c)
        self.found = c
        return proves(kernel, covers[0], c)

    @torch.no_grad()
    def enforce(self, weight: Tensor, c: float) -> float:
        """Make ‖T_W‖ ≤ c a proved fact, scaling ``weight`` in place if need be; returns the factor (1.0: untouched).

        From a proved bound it scales to just below c, with room for the rounding of the scaled entries: a tap alone is a shift
        with a matrix W_t, in which an input occurs once for each copy of the map; so an error E of the weight changes T by at
        most √copies·Σ‖E_t‖ ≤ √(copies·taps)·‖E‖_F.
        """
        (kernel, covers), self.found = self._covered(weight, c), c
        for cover in covers:
            if proves(kernel, cover, c):
                self._cover = cover
                return 1.0
        if not kernel.norm < 1e150:  # else squares overflow
            check_finite(weight)
            raise ValueError(f"weight of Frobenius norm {kernel.norm}: too large to be bounded")
        bound, self._cover = least(kernel, covers)
        if bound <= c:
            return 1.0
        if bound == math.inf:
            raise ValueError(f"weight of Frobenius norm {kernel.norm}: no eigenvalues found, not to be bounded")
        self.found = bound
        uses = kernel.taps * math.prod(a.copies for a in self._cover.axes)
        kind = torch.finfo(weight.dtype)
        room = max(0.0, (1 - ROOM) * c - math.sqrt(uses * weight.numel()) * kind.tiny * kind.eps)
        factor = room / (bound + 8 * kind.eps * math.sqrt(uses) * kernel.norm)
        weight.mul_(factor)
        return factor
