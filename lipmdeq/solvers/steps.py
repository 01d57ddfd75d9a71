"""How solvers propose the next point: Picard, Anderson, Broyden, and the safeguard that ties them to Banach's theorem.

Histories hold a whole batch of states as one tensor (B, D), see `Layout`. What is proportional to D stays on its device
and costs a few passes over memory; the algebra per sample is a few small numpy arrays on the host, in double precision.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Target = Callable[[np.ndarray], np.ndarray]


class Layout:
    """Branches (B, ...) <-> one tensor (B, D), in the memory order of the branches (no permuting copies).

    The work dtype is float32 at least, so that residuals of bfloat16 states are formed and measured in float32;
    `dtype` sets it.
    """

    def __init__(self, branches: list[Tensor], dtype: torch.dtype | None = None):
        self.b, self.shapes, self.dtypes = (len(branches[0]), [t.shape for t in branches], [t.dtype for t in branches])
        last = [t.dim() == 4 and not t.is_contiguous() for t in branches]
        self.formats = [torch.channels_last if x else torch.contiguous_format for x in last]
        self.strides = [t.contiguous(memory_format=m).stride() for t, m in zip(branches, self.formats, strict=True)]
        self.sizes = [t[0].numel() for t in branches]
        self.dtype, self.device = dtype or work_dtype(*self.dtypes), branches[0].device
        self.rounds = any(d != self.dtype for d in self.dtypes)  # branches hold less than the work dtype

    def empty(self, *lead: int) -> Tensor:
        return torch.empty((*lead, self.b, sum(self.sizes)), dtype=self.dtype, device=self.device)

    def rows(self, branches: list[Tensor]) -> list[Tensor]:
        """(B, D_i) views of the memory of each branch; a copy only where a branch has another memory order."""
        out = []
        for t, stride, form, size in zip(branches, self.strides, self.formats, self.sizes, strict=True):
            t = t if t.stride() == stride else t.contiguous(memory_format=form)
            out.append(t.as_strided((self.b, size), (size, 1)))
        return out

    def copy(self, branches: list[Tensor]) -> list[Tensor]:
        """Copies in the memory order of the layout."""
        return [t.new_empty_strided(t.shape, s).copy_(t) for t, s in zip(branches, self.strides, strict=True)]

    def pack(self, branches: list[Tensor], out: Tensor) -> Tensor:
        """Copies the branches into out (B, D)."""
        return torch.cat(self.rows(branches), 1, out=out)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """Branches, each dense in memory; a view of flat if there is only one."""
        parts = [flat] if len(self.sizes) == 1 else torch.split_with_sizes_copy(flat, self.sizes, 1)
        named = zip(parts, self.shapes, self.strides, self.dtypes, strict=True)
        return [t.as_strided(shape, stride).to(dtype) for t, shape, stride, dtype in named]


# A history of the last solve, for the next one. The C library gives blocks above 32 MB back to the system as soon as they
# are free, and to get them again page by page costs about as much as all else that a solver does. On a GPU torch keeps them.
_SPARE: list[Tensor] = []
_LARGE = 2**25


def take(layout: Layout, *lead: int) -> Tensor:
    """As `layout.empty(*lead)`, in the memory that was last given back if it fits."""
    try:
        spare = _SPARE.pop()
    except IndexError:
        return layout.empty(*lead)
    fits = spare.shape == (*lead, layout.b, sum(layout.sizes)) and spare.dtype == layout.dtype
    usable = layout.device.type == "cpu" and (torch.is_inference_mode_enabled() or not spare.is_inference())
    return spare if fits and usable else layout.empty(*lead)


def give_back(block: Tensor) -> None:
    """Keep a large block on the CPU for the next solve; nobody may use it any more."""
    if type(block) is Tensor and block.device.type == "cpu" and block.nbytes > _LARGE:
        _SPARE[:] = [block]


def work_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def dots(stack: Tensor, x: Tensor) -> Tensor:
    """(n, B, D), (B, D) -> (B, n): inner products per sample. Row vector times matrix is the orientation that is
    memory-bound on a CPU; matrix times column vector is 5 to 10 times slower."""
    return torch.bmm(x.unsqueeze(1), stack.permute(1, 2, 0)).squeeze(1)


def combine(coef: Tensor, stack: Tensor) -> Tensor:
    """(B, n), (n, B, D) -> (B, D): linear combinations per sample."""
    return torch.bmm(coef.unsqueeze(1), stack.transpose(0, 1)).squeeze(1)


def to_host(t: Tensor) -> np.ndarray:
    return t.cpu().numpy().astype(np.float64)


def norms(x: Tensor) -> np.ndarray:
    """Norms over the last dimension, in double precision on the host; also where squares vanish."""
    found = to_host(torch.linalg.vector_norm(x, dim=-1))
    low = found < (1e-15 if x.dtype == torch.float32 else 1e-150)
    if not low.any() or not x.shape[-1]:
        return found
    top = x.abs().amax(-1).clamp_min(torch.finfo(x.dtype).tiny)
    return np.where(low, to_host(top) * to_host(torch.linalg.vector_norm(x / top[..., None], dim=-1)), found)


class Safeguard:
    """Decides per sample whether the next evaluation is accelerated or a Picard step from the anchor.

    The anchor is the best point so far, r_b its residual ||f(z)-z||, r_0 the first one, k the evaluations after the
    first, q the last residual ratio seen in a Picard step. On an L-contraction q <= L. Rule: accelerate only if

        log(r_b / r_0) / log(q) >= k,

    that is, if the progress so far is worth k Picard steps at the rate q. Then r_b <= L^(k-1) r_0 always, by induction:
    a Picard step from the anchor multiplies r_b by at most L; an accelerated one is tried only when
    r_b <= q^k r_0 <= L^k r_0 and, even if it fails, leaves r_b where it was. So at most one evaluation is ever lost
    against Banach's bound, and r_b -> 0. No rule can promise this against the *actual* Picard path: f may be constant
    near the next Picard point, which no evaluation elsewhere reveals. Further Picard steps make that rare (they can only
    help the argument above):

    - where Picard is expected to finish by itself (q r_b below the target), or ||f(z)-z|| > ||f(z)||;
    - one, after an accelerated step whose residual is larger than its `promise`, impossible if f were affine;
    - a run of 2, 4, 8, ... after an accelerated step without progress.

    If a Picard step enlarges r, f is no contraction in l2. Then acceleration is free, with a run of Picard steps after
    `patience` evaluations without progress: as runs grow, a map that contracts in another norm converges as well.
    """

    def __init__(self, patience: int):
        self.patience, self.k = patience, -1
        self.promise = None  # (B,) residual norm that the model of the last accelerated step allows

    def update(self, r: np.ndarray, size: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """||f(z)-z||, ||f(z)||, residual norm to reach, all (B,) -> (point becomes the anchor, accelerate next)."""
        self.k += 1
        if self.k == 0:
            self.r0, self.best, self.far, self.q, self.promise = r, r, r > size, np.zeros_like(r), r
            self.picard, self.fails = np.ones(len(r), bool), np.zeros(len(r), int)
            self.run, self.length = self.fails.copy(), np.full(len(r), 2)
            return self.picard, ~self.picard
        self.q = np.where(self.picard, r / self.best, self.q)
        better, slow, doubt = r < self.best, self.q < 1, ~self.picard & (r > self.promise)
        if better.all():
            accept, self.best, self.far = better, r, r > size
            self.run = np.maximum(self.run - 1, 0)
            self.fails[:] = 0
        else:
            forced = self.run > 0
            accept = better | forced
            self.best, self.far = np.where(accept, r, self.best), np.where(accept, r > size, self.far)
            self.fails = np.where(accept, 0, self.fails + 1)
            start = ~accept & ((slow & ~self.picard) | (self.fails >= self.patience))
            self.run = np.where(start, self.length, np.maximum(self.run - 1, 0))
            self.length[start] *= 2
        ahead = np.log(self.best / self.r0) <= (self.k - 1e-6) * np.log(np.minimum(self.q, 1))
        worthwhile = ahead & ~doubt & ~self.far & (self.q * self.best >= target)
        self.picard = (self.run > 0) | (slow & ~worthwhile)
        return accept, ~self.picard

    def guess(self) -> np.ndarray:
        """The residual norm to expect next: rate times that of the anchor, or of the model."""
        if self.k == 0:
            return np.full_like(self.r0, np.inf)
        return np.minimum(self.q, 1) * np.where(self.picard, self.best, self.promise)


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


# Proposals. `measure(z, fz)` takes an evaluation (lists of branches) and returns ||f(z)-z||, ||f(z)|| (B,); `propose(r, size,
# active)` returns the next point, `fz` itself for a Picard step of the whole batch; `guess()` tells the residual norm (B,) to
# expect there; `moved(z)` says that some rows of it were changed; `close()` ends it. `target` maps ||f(z)|| to the residual
# norm to reach.


class _FlatStep:
    """What all proposals share: f(z) and f(z) - z go to `room()`, (2, B, D); z itself is known as (B, D).

    One packed copy costs less than an operation on each branch: calls, not bytes, are what small states pay for.
    """

    def __init__(self, layout: Layout):
        self.layout, self.z = layout, None

    def measure(self, z: list[Tensor], fz: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        if self.z is None:
            self.moved(z)
        room = self.room()
        self.branches, (self.fz, self.g) = fz, room
        torch.sub(self.layout.pack(fz, self.fz), self.z, out=self.g)
        size, r = norms(room)
        return r, size

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
        self.damping, self.r, self.rooms = damping, np.nan, []

    def room(self) -> Tensor:
        if len(self.rooms) < 2:  # two in turn: z lies in the other one
            self.rooms.append(self.layout.empty(2))
        else:
            self.rooms.reverse()
        return self.rooms[-1]

    def propose(self, r: np.ndarray, size: np.ndarray, active: np.ndarray) -> list[Tensor]:
        self.before, self.r = self.r, r
        if self.damping == 1:
            self.z = self.fz
            return self.branches
        return self.branches_of(torch.lerp(self.z, self.fz, self.damping))

    def guess(self) -> np.ndarray:
        return self.r * np.minimum(self.r / self.before, 1)


class _SafeStep(_FlatStep):
    """What Anderson and Broyden share: the safeguard decides before each step."""

    def __init__(self, layout: Layout, target: Target, patience: int):
        super().__init__(layout)
        self.target, self.guard = target, Safeguard(patience)

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

    def __init__(self, layout: Layout, target: Target, m: int, ridge: float, beta: float):
        super().__init__(layout, target, patience=m - 1)  # so the anchor is never older than the history
        self.m, self.ridge, self.beta, self.k = m, ridge, beta, -1
        self.history, self.eye, self.eps = take(layout, m, 2), np.eye(m), torch.finfo(layout.dtype).eps
        self.gram, self.anchor = np.zeros((layout.b, m, m)), np.zeros(layout.b, int)
        self.fresh = []  # slots whose inner products are not in gram yet: they wait until an accelerated step needs them

    def close(self) -> None:
        give_back(self.history)

    def room(self) -> Tensor:
        self.k += 1
        slot = self.k % self.m
        self.fresh = [i for i in self.fresh if i != slot] + [slot]
        return self.history[slot]

    def step(self, accept: np.ndarray, accelerate: np.ndarray, active: np.ndarray) -> Tensor:
        slot, n, guard = self.k % self.m, min(self.k + 1, self.m), self.guard
        fs, gs = self.history[:n, 0], self.history[:n, 1]
        self.anchor = np.where(accept, slot, self.anchor)
        if not accelerate.any():
            if (self.anchor == slot)[active].all():
                return self.fz
            alpha = self.eye[self.anchor, :n]
        else:
            for i in self.fresh:
                self.gram[:, i, :n] = self.gram[:, :n, i] = to_host(dots(gs, gs[i]))
            self.fresh = []
            if accelerate.all():
                gram, anchor = self.gram[:, :n, :n], self.anchor
                alpha, guard.promise = anderson_weights(gram, anchor, self.ridge, self.eps)
            else:
                gram, anchor = self.gram[accelerate, :n, :n], self.anchor[accelerate]
                alpha, guard.promise = self.eye[self.anchor, :n], np.full(len(accept), np.inf)
                some = anderson_weights(gram, anchor, self.ridge, self.eps)
                alpha[accelerate], guard.promise[accelerate] = some
        out = combine(torch.from_numpy(alpha).to(self.g, non_blocking=True), fs)
        if self.beta != 1:  # mixing acts on accelerated samples only: the fallback stays Picard
            out -= combine(torch.from_numpy((1 - self.beta) * accelerate[:, None] * alpha).to(self.g), gs)
        return out


class BroydenStep(_SafeStep):
    """Good Broyden on g(z) = f(z) - z, under the safeguard: inverse Jacobian H = -I + sum u_i v_i^T, forgotten after m
    updates. z <- z_a - H g_a = f(z_a) - sum u_i (v_i . g_a) from the anchor z_a."""

    def __init__(self, layout: Layout, target: Target, m: int):
        super().__init__(layout, target, patience=5)
        self.m, self.n, self.uv = m, 0, take(layout, m, 2)
        self.now, self.f_a, self.g_a, self.z_a = layout.empty(2), None, None, None

    def close(self) -> None:
        give_back(self.uv)

    def room(self) -> Tensor:
        return self.now

    def step(self, accept: np.ndarray, accelerate: np.ndarray, active: np.ndarray) -> Tensor:
        here = (self.fz, self.g, self.z)
        if self.z_a is None:
            self.f_a, self.g_a, self.z_a = (t.clone() for t in here)
            return self.fz.clone()  # room() is overwritten, the anchor too
        self._learn(self.z - self.z_a, self.g - self.g_a)
        if accept.all():
            self.f_a, self.g_a, self.z_a = (t.clone() for t in here)
        elif accept.any():
            i = torch.from_numpy(np.flatnonzero(accept)).to(self.g.device, non_blocking=True)
            for anchor, t in zip((self.f_a, self.g_a, self.z_a), here, strict=True):
                anchor[i] = t[i]
        self.guard.promise = self.guard.best * np.minimum(self.guard.q, 1)  # as good as Picard, at least
        coef = (
            dots(self.uv[: self.n, 1], self.g_a) * torch.from_numpy(accelerate).to(self.g, non_blocking=True)[:, None]
        )
        return self.f_a - combine(coef, self.uv[: self.n, 0])  # no correction: Picard from the anchor

    def _learn(self, s: Tensor, y: Tensor) -> None:
        """Rank-one update H y = s for the step s with residual change y: v = H^T s, u = (s - H y) / (v . y)."""
        n = self.n = 0 if self.n == self.m else self.n
        us, vs = self.uv[:n, 0], self.uv[:n, 1]
        v = combine(dots(us, s), vs).sub_(s) if n else -s
        hy = combine(dots(vs, y), us).sub_(y) if n else -y
        vy, ss = (v * y).sum(1, keepdim=True), (s * s).sum(1, keepdim=True)
        tells = (vy.abs() > 1e-6 * ss) & (vy.abs() > torch.finfo(vy.dtype).tiny)  # 1 / vy is a number
        inverse = torch.where(tells, 1 / vy, 0)  # a step that tells nothing changes nothing
        torch.mul(s.sub_(hy), inverse, out=self.uv[n, 0])
        self.uv[n, 1].copy_(v)
        self.n = n + 1
