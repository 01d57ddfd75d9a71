"""How solvers propose the next point: Picard, Anderson, Broyden; `options` is the solver."""

import numpy as np
import torch
from torch import Tensor

from lipmdeq.solvers.layout import Layout, combine, dots, norms, select, to_device, to_host
from lipmdeq.solvers.safeguard import Safeguard


class _Step:
    """What all proposals share: z is known as (B, D), f(z) and g = f(z) - z lie in a slot of the history.

    One packed copy costs less than an operation on each branch: calls, not bytes, are what small states pay for.
    """

    def __init__(self, layout: Layout, options, history: Tensor, guard: Safeguard | None = None):
        self.layout, self.options, self.history, self.guard, self.k, self.z = layout, options, history, guard, -1, None

    def measure(self, z: list[Tensor], fz: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """||f(z)-z|| and ||f(z)||, (B,), of an evaluation."""
        if self.z is None:
            self.moved(z)
        self.k += 1
        self.slot = self.k % len(self.history)
        self.branches, (self.fz, self.g) = fz, self.history[self.slot, :2]
        torch.sub(self.layout.pack(fz, self.fz), self.z, out=self.g)
        size, r = self.read()
        return r, size

    def read(self) -> np.ndarray:
        """||f(z)|| and ||f(z)-z||, (2, B): the one look of the host at an evaluation."""
        return norms(self.history[self.slot, :2])

    def propose(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> list[Tensor]:
        """The next point."""
        z = self.step(r, size, active)
        out = self.branches if z is self.fz else self.layout.unpack(z)
        # z is kept as f sees it: rounded where branches hold less.
        self.z = self.layout.pack(out, z) if self.layout.rounds and z is not self.fz else z
        return out

    def moved(self, z: list[Tensor]) -> None:
        """Some rows of the next point were changed."""
        self.z = self.layout.pack(z, self.layout.empty())

    def guess(self) -> np.ndarray:
        """The residual norm (B,) to expect at the next point."""
        return self.guard.guess()


class PicardStep(_Step):
    """z <- (1 - damping) z + damping f(z)."""

    def __init__(self, layout: Layout, options):
        super().__init__(layout, options, layout.empty(2, 2))  # two slots in turn: z lies in the other one
        self.r = np.nan

    def step(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> Tensor:
        self.before, self.r = self.r, r
        return self.fz if self.options.damping == 1 else torch.lerp(self.z, self.fz, self.options.damping)

    def guess(self) -> np.ndarray:
        return self.r * np.minimum(self.r / self.before, 1)


class AndersonStep(_Step):
    """z <- sum alpha_i (z_i + beta g_i) over the last m evaluations, under the safeguard."""

    def __init__(self, layout: Layout, options):
        m = options.m
        super().__init__(layout, options, layout.empty(m, 2), Safeguard(patience=m - 1))  # no anchor is older than that
        self.eps, self.eye = torch.finfo(layout.dtype).eps, np.eye(m)
        self.gram, self.anchor = np.zeros((layout.b, m, m)), np.zeros(layout.b, int)

    def read(self) -> np.ndarray:
        """With the inner products of g: to wait again for a device costs more than to form some that are not needed."""
        n, place = min(self.k + 1, len(self.history)), self.history[self.slot]
        found = to_host(torch.cat([torch.linalg.vector_norm(place, dim=-1), dots(self.history[:n, 1], self.g).T]))
        self.gram[:, self.slot, :n] = self.gram[:, :n, self.slot] = found[2:].T
        return norms(place, found[:2])

    def step(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> Tensor:
        n, beta = min(self.k + 1, len(self.history)), self.options.beta
        accept, accelerate = self.guard.update(r, size, self.options.target(size))
        accelerate &= active
        self.anchor = np.where(accept, self.slot, self.anchor)
        alpha = self.eye[self.anchor, :n]
        if accelerate.any():
            found, promise = anderson_weights(self.gram[:, :n, :n], self.anchor, self.options.ridge, self.eps)
            alpha = np.where(accelerate[:, None], found, alpha)
            self.guard.promise = np.where(accelerate, promise, np.inf)
        elif (self.anchor == self.slot)[active].all():
            return self.fz
        out = combine(to_device(alpha, self.g), self.history[:n, 0])
        if beta != 1:  # mixing acts on accelerated samples only: the fallback stays Picard
            out -= combine(to_device((1 - beta) * accelerate[:, None] * alpha, self.g), self.history[:n, 1])
        return out


def anderson_weights(gram: np.ndarray, anchor: np.ndarray, ridge: float, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Weights alpha (B, n), sum 1, that minimise ||sum alpha_i g_i||^2 + ridge sum_{i != a} alpha_i^2 ||g_i - g_a||^2.

    gram: (B, n, n) inner products of the residuals g_i, rounded to eps. anchor: (B,) index a. The ridge is relative to each
    difference, so alpha does not change when z is scaled; a large one gives alpha = e_a, the Picard step from the anchor.
    Second result: ||sum alpha_i g_i|| (B,) up to rounding; if f is affine, the next residual is at most L times it.
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


class BroydenStep(_Step):
    """Good Broyden on g(z) = f(z) - z, under the safeguard: inverse Jacobian H = -I + sum u_i v_i^T, forgotten after m
    updates. z <- z - H g = f(z) - sum u_i (v_i . g) from the last point, though its residual may have grown: Broyden's
    steps teach H even then, and from the best point instead they would be taken back. A Picard step starts at the best."""

    def __init__(self, layout: Layout, options):
        # One slot: f(z), g, and from where the last step began the differences of f(z) and of z.
        super().__init__(layout, options, layout.empty(1, 4), Safeguard(patience=9, monotone=False))
        self.best = self.start = None  # (f(z), g, z) of the anchor, and where the last step began
        self.n, self.updates = 0, layout.empty(min(options.m, options.max_iter), 2)  # u, v

    def read(self) -> np.ndarray:
        if self.start is None:
            return super().read()
        now = self.history[0]
        torch.sub(self.fz, self.start[0], out=now[2])
        torch.sub(self.z, self.start[2], out=now[3])
        size, r, df, dz = norms(now)
        self.guard.quotient = df / dz
        return np.stack([size, r])

    def step(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> Tensor:
        accept, accelerate = self.guard.update(r, size, self.options.target(size))
        accelerate &= active
        here = [t.clone() for t in (self.fz, self.g, self.z)]  # the slot is written over
        if self.start is None:
            self.best = self.start = here
            return here[0].clone()
        self._learn(self.history[0, 3], self.g - self.start[1])
        self.best = here if accept.all() else select(accept, here, self.best)
        self.start = here if (accelerate | accept).all() else select(accelerate, here, self.best)
        self.guard.promise = self.guard.best * np.minimum(self.guard.q, 1)  # as good as Picard, at least
        us, vs = self.updates[: self.n].unbind(1)
        coef = dots(vs, self.start[1]) * to_device(accelerate, self.g)[:, None]  # 0, no correction: Picard
        return self.start[0] - combine(coef, us)

    def _learn(self, s: Tensor, y: Tensor) -> None:
        """Rank-one update H y = s for the step s with residual change y: v = H^T s, u = (s - H y) / (v . y)."""
        n = self.n = self.n % len(self.updates)
        us, vs = self.updates[:n].unbind(1)
        v = combine(dots(us, s), vs).sub_(s) if n else -s
        hy = combine(dots(vs, y), us).sub_(y) if n else -y
        vy, ss = (v * y).sum(1, keepdim=True), (s * s).sum(1, keepdim=True)
        tells = (vy.abs() > 1e-6 * ss) & (vy.abs() > torch.finfo(vy.dtype).tiny)  # 1 / vy is a number
        inverse = torch.where(tells, 1 / vy, 0)  # a step that tells nothing changes nothing
        torch.mul(s - hy, inverse, out=self.updates[n, 0])
        self.updates[n, 1].copy_(v)
        self.n = n + 1
