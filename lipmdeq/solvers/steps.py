"""How solvers propose the next point: Picard, Anderson, Broyden.

`measure(z, fz)` takes an evaluation (lists of branches) and returns ||f(z)-z||, ||f(z)|| (B,); `propose(r, size, active)`
returns the next point, `fz` itself for a Picard step of the whole batch; `guess()` tells the residual norm (B,) to expect
there; `moved(z)` says that some rows of it were changed; `close()` ends it. `target` maps ||f(z)|| to the residual norm to
reach.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lipmdeq.solvers.layout import Layout, Room, combine, dots, mask_of, norms, to_device, to_host
from lipmdeq.solvers.safeguard import Safeguard

Target = Callable[[np.ndarray], np.ndarray]


class _FlatStep:
    """What all proposals share: f(z) and f(z) - z go to `place()`, (2, B, D); z itself is known as (B, D).

    One packed copy costs less than an operation on each branch: calls, not bytes, are what small states pay for.
    """

    def __init__(self, layout: Layout):
        self.layout, self.z = layout, None

    def measure(self, z: list[Tensor], fz: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        if self.z is None:
            self.moved(z)
        place = self.place()
        self.branches, (self.fz, self.g) = fz, place
        torch.sub(self.layout.pack(fz, self.fz), self.z, out=self.g)
        size, r = self.read(place)
        return r, size

    def read(self, place: Tensor) -> np.ndarray:
        """||f(z)|| and ||f(z)-z||, (2, B): the one look of the host at an evaluation."""
        return norms(place)

    def branches_of(self, z: Tensor) -> list[Tensor]:
        """Branches of the next point z (B, D), which is kept as f sees it: rounded where branches hold less."""
        out = self.layout.unpack(z)
        self.z = self.layout.pack(out, z) if self.layout.rounds else z
        return out

    def moved(self, z: list[Tensor]) -> None:
        self.z = self.layout.pack(z, self.layout.empty())

    def close(self) -> None:
        """The solve is over."""


class PicardStep(_FlatStep):
    """z <- (1 - damping) z + damping f(z)."""

    def __init__(self, layout: Layout, damping: float = 1.0):
        super().__init__(layout)
        self.damping, self.r, self.places = damping, np.nan, []

    def place(self) -> Tensor:
        if len(self.places) < 2:  # two in turn: z lies in the other one
            self.places.append(self.layout.empty(2))
        else:
            self.places.reverse()
        return self.places[-1]

    def propose(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> list[Tensor]:
        self.before, self.r = self.r, r
        if self.damping == 1:
            self.z = self.fz
            return self.branches
        return self.branches_of(torch.lerp(self.z, self.fz, self.damping))

    def guess(self) -> np.ndarray:
        return self.r * np.minimum(self.r / self.before, 1)


class _SafeStep(_FlatStep):
    """What Anderson and Broyden share: the safeguard decides before each step; the history lies in the caller's room."""

    def __init__(self, layout: Layout, target: Target, room: Room, m: int, guard: Safeguard):
        super().__init__(layout)
        self.target, self.room, self.m, self.guard = target, room, m, guard
        self.history = room.take(layout, m, 2)

    def close(self) -> None:
        self.room.give_back(self.history)

    def propose(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> list[Tensor]:
        accept, accelerate = self.guard.update(r, size, self.target(size))
        z = self.step(accept, accelerate & active, active)
        if z is self.fz:
            self.z = z
            return self.branches
        return self.branches_of(z)

    def guess(self) -> np.ndarray:
        return self.guard.guess()


class AndersonStep(_SafeStep):
    """z <- sum alpha_i (z_i + beta g_i) over the last m evaluations, under the safeguard."""

    def __init__(self, layout: Layout, target: Target, room: Room, m: int, ridge: float, beta: float):
        super().__init__(layout, target, room, m, Safeguard(patience=m - 1))  # no anchor is older than the history
        self.ridge, self.beta, self.k, self.eye = ridge, beta, -1, np.eye(m)
        self.eps, self.lazy = torch.finfo(layout.dtype).eps, layout.device.type == "cpu"
        self.gram, self.anchor = np.zeros((layout.b, m, m)), np.zeros(layout.b, int)
        self.fresh = []  # slots whose inner products are not in gram yet: they wait until an accelerated step needs them

    def place(self) -> Tensor:
        self.k += 1
        self.slot, self.n = self.k % self.m, min(self.k + 1, self.m)
        self.fresh = [i for i in self.fresh if i != self.slot] + [self.slot]
        return self.history[self.slot]

    def read(self, place: Tensor) -> np.ndarray:
        if self.lazy:
            return norms(place)
        # The inner products come along: to wait once for a device costs more than to form some that are not needed.
        found = to_host(torch.cat([torch.linalg.vector_norm(place, dim=-1), self._products(self.slot).T]))
        self._learn(self.slot, found[2:].T)
        self.fresh = []
        return norms(place, found[:2])

    def _products(self, i: int) -> Tensor:
        return dots(self.history[: self.n, 1], self.history[i, 1])

    def _learn(self, i: int, products: np.ndarray) -> None:
        self.gram[:, i, : self.n] = self.gram[:, : self.n, i] = products

    def step(self, accept: np.ndarray, accelerate: np.ndarray, active: np.ndarray) -> Tensor:
        fs, gs = self.history[: self.n, 0], self.history[: self.n, 1]
        self.anchor = np.where(accept, self.slot, self.anchor)
        if accelerate.any():
            for i in self.fresh:
                self._learn(i, to_host(self._products(i)))
            self.fresh = []
            alpha = self._weights(accelerate)
        elif (self.anchor == self.slot)[active].all():
            return self.fz
        else:
            alpha = self.eye[self.anchor, : self.n]
        out = combine(to_device(alpha, self.g), fs)
        if self.beta != 1:  # mixing acts on accelerated samples only: the fallback stays Picard
            out -= combine(to_device((1 - self.beta) * accelerate[:, None] * alpha, self.g), gs)
        return out

    def _weights(self, accelerate: np.ndarray) -> np.ndarray:
        """alpha (B, n): `anderson_weights` for the samples to accelerate, the anchor for the others."""
        n, every = self.n, accelerate.all()
        some = slice(None) if every else accelerate
        found = anderson_weights(self.gram[some, :n, :n], self.anchor[some], self.ridge, self.eps)
        if every:
            alpha, self.guard.promise = found
        else:
            alpha, self.guard.promise = self.eye[self.anchor, :n], np.full(len(accelerate), np.inf)
            alpha[some], self.guard.promise[some] = found
        return alpha


def anderson_weights(gram: np.ndarray, anchor: np.ndarray, ridge: float, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights alpha, sum 1, that minimise ||sum alpha_i g_i||^2 + ridge sum_{i != a} alpha_i^2 ||g_i - g_a||^2.

    The ridge is relative to each difference, so alpha does not change when z is scaled; a large ridge gives alpha = e_a,
    the Picard step from the anchor a. eps is the rounding level of the Gram matrix.

    Args:
        gram: (B, n, n) inner products of the residuals g_i. anchor: (B,) index a.

    Returns:
        alpha (B, n), and ||sum alpha_i g_i|| (B,) up to rounding: if f is affine, the next residual is at most L times it.
    """
    n, b = gram.shape[1], np.arange(len(gram))
    cross, diag = gram[b, anchor], np.diagonal(gram, axis1=1, axis2=2)
    own = cross[b, anchor][:, None]
    right = own - cross
    system = gram - cross[:, :, None]
    system += right[:, None, :]  # inner products of the differences g_i - g_a
    ends = system.reshape(len(gram), n * n)[:, :: n + 1]  # its diagonal
    noise = eps * (diag + own)
    square = np.maximum(ends, 0) + 4 * noise
    square[square == 0] = 1.0
    scale = np.sqrt(square)
    system /= scale[:, :, None]
    system /= scale[:, None, :]
    ends += max(ridge, 1e-14)
    alpha = np.linalg.solve(system, (right / scale)[..., None])[..., 0] / scale
    alpha[b, anchor] = 0.0
    predicted = own[:, 0] + ((16 * noise - ridge * square) * (alpha * alpha) - alpha * right).sum(1)
    alpha[b, anchor] = 1.0 - alpha.sum(1)
    return alpha, np.sqrt(np.maximum(predicted, eps * own[:, 0]))


class BroydenStep(_SafeStep):
    """Good Broyden on g(z) = f(z) - z, under the safeguard: inverse Jacobian H = -I + sum u_i v_i^T, forgotten after m
    updates. z <- z - H g = f(z) - sum u_i (v_i . g) from the last point, though its residual may have grown: Broyden's
    steps teach H even then, and from the best point instead they would be taken back. A Picard step starts at the best."""

    def __init__(self, layout: Layout, target: Target, room: Room, m: int):
        super().__init__(layout, target, room, m, Safeguard(patience=9, monotone=False))
        self.n, self.best, self.start = 0, None, None  # (f(z), g, z) of the anchor, and where the last step began
        self.now = layout.empty(4)  # f(z), g, and from where the step began: the differences of f(z) and of z

    def place(self) -> Tensor:
        return self.now[:2]

    def read(self, place: Tensor) -> np.ndarray:
        if self.start is None:
            return norms(place)
        torch.sub(self.fz, self.start[0], out=self.now[2])
        torch.sub(self.z, self.start[2], out=self.now[3])
        size, r, df, dz = norms(self.now)
        self.guard.quotient = df / dz
        return np.stack([size, r])

    def step(self, accept: np.ndarray, accelerate: np.ndarray, active: np.ndarray) -> Tensor:
        here = [t.clone() for t in (self.fz, self.g, self.z)]  # place() is written over
        if self.start is None:
            self.best = self.start = here
            return here[0].clone()
        self._learn(self.now[3], self.g - self.start[1])
        self.best = here if accept.all() else self._choose(accept, here, self.best)
        self.start = here if (accelerate | accept).all() else self._choose(accelerate, here, self.best)
        self.guard.promise = self.guard.best * np.minimum(self.guard.q, 1)  # as good as Picard, at least
        coef = dots(self.history[: self.n, 1], self.start[1]) * to_device(accelerate, self.g)[:, None]
        return self.start[0] - combine(coef, self.history[: self.n, 0])  # no correction: Picard

    @staticmethod
    def _choose(mask: np.ndarray, these: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        m = mask_of(mask, these[0])
        return [torch.where(m, a, b) for a, b in zip(these, others, strict=True)]

    def _learn(self, s: Tensor, y: Tensor) -> None:
        """Rank-one update H y = s for the step s with residual change y: v = H^T s, u = (s - H y) / (v . y)."""
        n = self.n = 0 if self.n == self.m else self.n
        us, vs = self.history[:n, 0], self.history[:n, 1]
        v = combine(dots(us, s), vs).sub_(s) if n else -s
        hy = combine(dots(vs, y), us).sub_(y) if n else -y
        vy, ss = (v * y).sum(1, keepdim=True), (s * s).sum(1, keepdim=True)
        tells = (vy.abs() > 1e-6 * ss) & (vy.abs() > torch.finfo(vy.dtype).tiny)  # 1 / vy is a number
        inverse = torch.where(tells, 1 / vy, 0)  # a step that tells nothing changes nothing
        torch.mul(s - hy, inverse, out=self.history[n, 0])
        self.history[n, 1].copy_(v)
        self.n = n + 1
