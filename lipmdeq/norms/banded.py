"""Proof of ‖T‖ ≤ c by one Cholesky factorisation of the full matrix c²I − TᵀT, block by block.

Along one axis two positions share an output only if they are close, so that TᵀT (or TTᵀ) is block banded: with H block rows of
order b = C·W and h blocks beside the diagonal, the factorisation costs about H·b³(h² + 2h + 1/3) operations and keeps h rows in
memory, where the dense one costs (Hb)³/3 and keeps everything. Blocks are sums of tap products K(t, u) (:mod:`lipmdeq.norms`).
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from lipmdeq.norms.covers import Cover, Kernel, climb
from lipmdeq.norms.geometry import Axis


class BandedGram:
    """The Gram matrix of T on the side, and along the axis, that make the factorisation cheapest."""

    def __init__(self, kernel: Kernel, axes: tuple[Axis, Axis]):
        self.kernel, self.axes = kernel, axes
        sides = ((side, along) for side in ("in", "out") for along in (0, 1))
        self.cost, self.side, self.along = min((self._cost(*one), *one) for one in sides)

    def _cost(self, side: str, along: int) -> float:
        """Floating-point operations of one factorisation."""
        main, other = self.axes[along], self.axes[1 - along]
        b, h = self.kernel.channels[side] * other.length(side), main.reach(side)
        return self.kernel.groups * main.length(side) * float(b) ** 3 * (h * h + 2 * h + 1 / 3)

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """A(a, b, t, u) along the band and across it, real."""
        main, other = (self.axes[d].table(self.side, None)[0][0].real for d in (self.along, 1 - self.along))
        return main.to(self.kernel.w.device), other.to(self.kernel.w.device)

    def block(self, j: int, i: int) -> Tensor:
        """Block (j, i) of the Gram matrix, (groups, b, b)."""
        main, other = self._tables
        n, c = other.shape[0], self.kernel.channels[self.side]
        table = torch.einsum("tu,abvw->abtvuw" if self.along == 0 else "vw,abtu->abtvuw", main[j, i], other)
        g = (table.reshape(n * n, -1) @ self.kernel.products(self.side)).view(-1, n, n, c, c)
        return g.transpose(2, 3).reshape(-1, n * c, n * c)

    def below(self, level: float) -> bool:
        """Does the Cholesky factorisation of level·I − G run to its end?"""
        if level <= 0:
            return False
        rows, h = self._tables[0].shape[0], self.axes[self.along].reach(self.side)
        factor: dict[tuple[int, int], Tensor] = {}
        for j in range(rows):
            first = max(0, j - h)
            for i in range(first, j + 1):
                s = self.block(j, i).neg()
                for m in range(first, i):
                    if (i, m) in factor:
                        s.baddbmm_(factor[j, m], factor[i, m].mT, alpha=-1)
                if i < j:
                    factor[j, i] = torch.linalg.solve_triangular(factor[i, i], s.mT, upper=False).mT
                    continue
                s.diagonal(dim1=-2, dim2=-1).add_(level)
                factor[j, j], info = torch.linalg.cholesky_ex(s)
                if bool(info.any()):
                    return False
            for key in [key for key in factor if key[0] < j + 1 - h]:
                del factor[key]
        return True

    def bound(self, guess: float, stop: float = math.inf) -> float:
        """Proved upper bound on ‖T‖ from guess·(1 + 5e-4) upwards, inf when there is none below ``stop``."""
        return climb(self.kernel, Cover(self.axes), guess, stop, tests=[self.below])
