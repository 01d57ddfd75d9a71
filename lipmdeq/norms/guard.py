"""The proof of the constraint ‖W‖₂ ≤ c in training (Conv*, Lemma ``lem:conv``); between two proofs ``Conv.estimate`` holds it.

A proof first *decides*: does a batched Cholesky factorisation of c²I − G succeed over a cover (:mod:`lipmdeq.norms`)? Only if
it does over none, the *value* is computed, the largest eigenvalue over the best cover, and the weight is divided accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from lipmdeq.bounds import check_range
from lipmdeq.norms.covers import Cover, Kernel, half_covers, proves, torus_covers, upper
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


def project(weight: Tensor, size: Pair, c: float, **geometry) -> float:
    """Scale the weight in place to norm ≤ c if this is not proved already; returns the factor (1.0: untouched)."""
    return NormGuard(size, **geometry).enforce(weight, c)


class NormGuard:
    """Keeps ‖T_W‖ ≤ c for one convolution, described as in :func:`conv_norm`: proved after every :meth:`enforce`. It remembers
    only the cover that served last, and tries it first: what is proved is proved for the weight at hand."""

    def __init__(self, size: Pair, **geometry):
        self.size, self._geometry, self._cover = size, geometry, None
        self.found = math.inf  # proved by the last enforce before it scaled anything: c, or the bound that was above it

    @torch.no_grad()
    def enforce(self, weight: Tensor, c: float) -> float:
        """Make ‖T_W‖ ≤ c a proved fact, scaling ``weight`` in place if need be; returns the factor (1.0: untouched)."""
        (factor,) = factors([(self, weight, c)])
        weight.mul_(factor)
        return factor


class _Claim:
    """‖T_W‖ ≤ c for one weight; its kernel, and its covers in the order in which they are tried."""

    def __init__(self, guard: NormGuard, weight: Tensor, c: float):
        check_range("c", c)
        where = geometry_of(weight, guard.size, **guard._geometry)
        self.guard, self.weight, self.c, self.kernel = guard, weight, c, Kernel(weight, where.axes, where.groups)
        self.covers = sorted(fast_covers(self.kernel, where.axes), key=lambda cover: cover != guard._cover)
        guard.found, self.factor = c, 1.0

    def scaled(self, square: float, bounds: list[float]) -> float:
        """The factor that leads from the best of the covers' bounds to just below c; ``square`` is ‖W‖_F².

        There is room for the rounding of the scaled entries: a tap alone is a shift with a matrix W_t, in which an input occurs
        once for each copy of the map; so an error E of the weight changes T by at most √copies·Σ‖E_t‖ ≤ √(copies·taps)·‖E‖_F.
        """
        bound, norm = min(bounds), math.sqrt(square) if square >= 0 else math.nan
        if not norm < 1e150 or bound == math.inf:  # squares overflow, or no eigenvalues were found
            check_finite(self.weight)
            raise ValueError(f"weight of Frobenius norm {norm}: too large to be bounded")
        self.guard._cover = self.covers[bounds.index(bound)]
        if bound <= self.c:
            return 1.0
        self.guard.found = bound
        uses = self.kernel.taps * math.prod(a.copies for a in self.guard._cover.axes)
        kind = torch.finfo(self.weight.dtype)
        room = max(0.0, (1 - ROOM) * self.c - math.sqrt(uses * self.weight.numel()) * kind.tiny * kind.eps)
        return room / (bound + 8 * kind.eps * math.sqrt(uses) * norm)


@torch.no_grad()
def factors(jobs: Iterable[tuple[NormGuard, Tensor, float]]) -> list[float]:
    """For each (guard, weight, c) the factor, at most 1, with which ‖T_W‖ ≤ c is a proved fact; nothing is scaled here.

    A GPU is waited for once if every norm is proved over the cover that is tried first, and three times if not: for the other
    covers of all layers in doubt, and for the values where no cover decides (whose eigenvalues torch itself waits for).
    """
    claims = [_Claim(*job) for job in jobs]
    doubt = [claim for claim in claims if claim.kernel.taps]  # without taps: all windows lie in the padding, T = 0
    for tried in slice(0, 1), slice(1, None):
        pairs = [(claim, cover) for claim in doubt for cover in claim.covers[tried]]
        sure = _read(proves(claim.kernel, cover, claim.c) for claim, cover in pairs)
        proved = {claim: cover for (claim, cover), yes in zip(pairs[::-1], sure[::-1], strict=True) if yes}
        for claim, cover in proved.items():
            claim.guard._cover = cover
        doubt = [claim for claim in doubt if claim not in proved]
    found = iter(_read(x for d in doubt for x in (d.kernel.square, *(upper(d.kernel, cover) for cover in d.covers))))
    for claim in doubt:
        claim.factor = claim.scaled(next(found), [next(found) for _ in claim.covers])
    return [claim.factor for claim in claims]


def _read(answers: Iterable[Tensor]) -> list:
    """Numbers from the device in one copy."""
    return torch.stack(found).cpu().tolist() if (found := list(answers)) else []
