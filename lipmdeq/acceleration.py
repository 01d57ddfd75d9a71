"""How solvers propose the next point: Picard, Anderson, Broyden, and the safeguard that ties them to Banach's theorem.

A proposal object sees one evaluation (z, f(z)) of the whole batch at a time and returns the next z. Tensors that are
proportional to z stay in the memory order of f(z) (no layout copies for channels_last); the algebra per sample is a few
small numpy arrays on the host, in double precision.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# ---- tensors: views in memory order, batched products -----------------------------------------------------------


def rows(t: Tensor) -> Tensor:
    """(B, ...) -> (B, D) in memory order: a view for contiguous and for channels_last tensors."""
    if t.dim() == 4 and not t.is_contiguous():
        t = t.permute(0, 2, 3, 1)
    return t.reshape(t.shape[0], -1)


def like(flat: Tensor, t: Tensor) -> Tensor:
    """(B, D) -> view of the shape and memory order of t; inverse of `rows`."""
    if t.dim() == 4 and not t.is_contiguous():
        b, c, h, w = t.shape
        return flat.view(b, h, w, c).permute(0, 3, 1, 2)
    return flat.view(t.shape)


def dots(stacks: list[Tensor], xs: list[Tensor]) -> Tensor:
    """(n, B, D_i), (B, D_i) -> (B, n): inner products per sample, summed over branches. Row-vector @ matrix is the
    orientation that is memory-bound on CPU (matrix @ column-vector is 5-10 times slower)."""
    return sum(
        torch.bmm(x.unsqueeze(1), s.permute(1, 2, 0)) for s, x in zip(stacks, xs, strict=True)
    ).squeeze(1)


def combine(coef: Tensor, stacks: list[Tensor]) -> list[Tensor]:
    """(B, n), (n, B, D_i) -> (B, D_i): linear combinations per sample."""
    return [torch.bmm(coef.unsqueeze(1), s.transpose(0, 1)).squeeze(1) for s in stacks]


def norms(groups: list[list[Tensor]]) -> np.ndarray:
    """Per-sample norms over all branches, one row per group, with a single transfer to the host."""
    single = [torch.linalg.vector_norm(r, dim=1, dtype=work_dtype(r.dtype)) for g in groups for r in g]
    host = torch.stack(single).double().cpu().numpy().reshape(len(groups), -1, single[0].shape[0])
    return np.sqrt((host * host).sum(1))


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- the safeguard: pure per-sample arithmetic -----------------------------------------------------------------


class Safeguard:
    """Decides per sample whether the next evaluation is accelerated or a Picard step from the anchor.

    The anchor is the best point so far, r_b its residual ||f(z)-z||, r_0 the first one, k the evaluations after the
    first, q the last residual ratio seen in a Picard step. On an L-contraction q <= L. Rule: accelerate only if

        kappa = log(r_b / r_0) / log(q) >= k,

    that is, if the progress made is worth k Picard steps even at the rate q. Then r_b <= L^(k-1) r_0 always (induction):
    a Picard step from the anchor multiplies r_b by at most L; an accelerated one is tried only when
    r_b <= q^k r_0 <= L^k r_0 and, even if it fails, leaves r_b where it was. So at most one evaluation is ever lost
    against Banach's bound, and r_b -> 0. No rule can promise more against the *actual* Picard path: f may be
    constant near the next Picard point, which no evaluation elsewhere reveals.

    Further, without harm to the argument: no acceleration where Picard is expected to finish by itself (q r_b below the
    target) or where ||f(z)-z|| > ||f(z)||; after `patience` evaluations without progress a run of Picard steps, its
    length doubling each time (so a map that contracts only in another norm, where r may grow for a while, converges as
    well). If a Picard step enlarges r, f is no contraction in this norm and acceleration is free.
    """

    def __init__(self, patience: int):
        self.patience = patience
        self.k = -1

    def update(self, r: np.ndarray, size: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Residual norms r, ||f(z)||, residual norm to reach, all (B,) -> (point becomes anchor, accelerate next)."""
        self.k += 1
        if self.k == 0:
            self.r0, self.best, self.rel = r, r, r > size
            self.q = np.zeros_like(r)
            self.picard, self.fails = np.ones(len(r), bool), np.zeros(len(r), int)
            self.run, self.length = self.fails.copy(), np.full(len(r), self.patience)
            return self.picard, ~self.picard
        self.q = np.where(self.picard, r / self.best, self.q)
        better, forced = r < self.best, self.run > 0
        accept = better | forced
        self.best, self.rel = np.where(accept, r, self.best), np.where(accept, r > size, self.rel)
        self.fails = np.where(better, 0, self.fails + 1)
        start = (self.fails >= self.patience) & ~forced
        self.run = np.where(start, self.length, np.maximum(self.run - 1, 0))
        self.length = np.where(start, 2 * self.length, self.length)
        self.fails[start] = 0
        slow, steps = self.q < 1, self.k - 1e-6
        ahead = np.log(self.best / self.r0) <= steps * np.log(np.minimum(self.q, 1))
        accelerate = ~slow | (ahead & ~self.rel & (self.q * self.best >= target))
        self.picard = (self.run > 0) | ~accelerate
        return accept, ~self.picard


def anderson_weights(gram: np.ndarray, anchor: np.ndarray, ridge: float, eps: float) -> np.ndarray:
    """Weights alpha, sum 1, that minimise ||sum alpha_i g_i||^2 + ridge sum alpha_i^2 ||g_i - g_a||^2 (i != anchor).

    The ridge is relative to each difference, so alpha does not change when z is scaled; a large ridge gives alpha = e_a,
    the Picard step. eps is the rounding level of the Gram matrix.

    Args:
        gram: (B, n, n) inner products of the residuals g_i. anchor: (B,) index a.
    """
    b = np.arange(len(gram))
    cross, own = gram[b, :, anchor], gram[b, anchor, anchor][:, None]
    diff = gram - cross[:, :, None] - cross[:, None, :] + own[:, :, None]
    diag = np.einsum("bii->bi", diff).clip(0) + 4 * eps * (np.einsum("bii->bi", gram) + own)
    scale = np.sqrt(np.where(diag > 0, diag, 1.0))
    system = diff / (scale[:, :, None] * scale[:, None, :]) + ridge * np.eye(gram.shape[1])
    alpha = np.linalg.solve(system, ((own - cross) / scale)[..., None])[..., 0] / scale
    alpha[b, anchor] = 0.0
    alpha[b, anchor] = 1.0 - alpha.sum(1)
    return alpha


# ---- proposals: where to evaluate next -------------------------------------------------------------------------


class PicardStep:
    def __init__(self, damping: float = 1.0):
        self.damping, self.scratch = damping, None

    def buffers(self, fz):
        """Where the driver writes f(z) - z: (B, D_i) per branch."""
        self.scratch = self.scratch or [torch.empty_like(rows(t), dtype=work_dtype(t.dtype)) for t in fz]
        return self.scratch

    def propose(self, z, fz, *_):
        return (
            fz if self.damping == 1 else [torch.lerp(a, b, self.damping) for a, b in zip(z, fz, strict=True)]
        )


class AndersonStep:
    def __init__(self, m: int, ridge: float, beta: float):
        self.m, self.ridge, self.beta = m, ridge, beta
        self.guard, self.k, self.f_hist = (
            Safeguard(m - 1),
            -1,
            None,
        )  # m - 1: the anchor never leaves the history

    def buffers(self, fz):
        m = self.m
        if self.f_hist is None:
            new = [rows(t).to(work_dtype(t.dtype)).new_empty((m, *rows(t).shape)) for t in fz]
            self.f_hist, self.g_hist = new, [torch.empty_like(t) for t in new]
            self.gram, self.anchor = np.zeros((len(fz[0]), m, m)), np.zeros(len(fz[0]), int)
        self.k += 1
        self.slot, self.n = self.k % m, min(self.k + 1, m)
        return [g[self.slot] for g in self.g_hist]

    def propose(self, z, fz, r, size, target, active):
        slot, n = self.slot, self.n
        for hist, t in zip(self.f_hist, fz, strict=True):
            like(hist[slot], t).copy_(t)
        g_hist = [g[:n] for g in self.g_hist]
        new = dots(g_hist, [g[slot] for g in self.g_hist]).double().cpu().numpy()
        self.gram[:, slot, :n] = self.gram[:, :n, slot] = new
        accept, accelerate = self.guard.update(r, size, target)
        self.anchor = np.where(accept, slot, self.anchor)
        accelerate &= active
        if not accelerate.any() and (self.anchor[active] == slot).all():
            return fz
        alpha = np.eye(n)[self.anchor]
        if accelerate.any():
            eps = torch.finfo(self.f_hist[0].dtype).eps
            gram = self.gram[accelerate, :n, :n]
            alpha[accelerate] = anderson_weights(gram, self.anchor[accelerate], self.ridge, eps)
        alpha = torch.from_numpy(alpha).to(self.f_hist[0])
        out = combine(alpha, [h[:n] for h in self.f_hist])
        if self.beta != 1:  # mixing acts on accelerated samples only: the fallback stays Picard
            beta = alpha * torch.from_numpy((self.beta - 1) * accelerate).to(alpha)[:, None]
            out = [a.add_(b) for a, b in zip(out, combine(beta, g_hist), strict=True)]
        return [like(o, t).to(t.dtype) for o, t in zip(out, fz, strict=True)]


class BroydenStep:
    """Good Broyden on g(z) = f(z) - z: inverse Jacobian H = -I + sum u_i v_i^T, rank-one updates along the steps."""

    def __init__(self, m: int):
        self.m, self.guard, self.n, self.u = m, Safeguard(5), 0, None

    def buffers(self, fz):
        self.g = [torch.empty_like(rows(t), dtype=work_dtype(t.dtype)) for t in fz]
        return self.g

    def propose(self, z, fz, r, size, target, active):
        flat = [rows(t).to(g.dtype) for t, g in zip(fz, self.g, strict=True)]
        if self.u is None:
            self.u = [f.new_empty((self.m, *f.shape)) for f in flat]
            self.v = [torch.empty_like(u) for u in self.u]
            self.f_anchor, self.g_anchor = flat, self.g
            self.guard.update(r, size, target)
            return fz
        self._learn(
            [rows(like(a, t).copy_(x)) for a, t, x in zip(map(torch.empty_like, flat), fz, z, strict=True)]
        )
        accept, accelerate = self.guard.update(r, size, target)
        keep = torch.from_numpy(accept).to(flat[0].device)[:, None]
        self.f_anchor = [torch.where(keep, a, b) for a, b in zip(flat, self.f_anchor, strict=True)]
        self.g_anchor = [torch.where(keep, a, b) for a, b in zip(self.g, self.g_anchor, strict=True)]
        coef = dots([v[: self.n] for v in self.v], self.g_anchor)
        coef = coef * torch.from_numpy(accelerate).to(coef)[:, None]  # no correction: z = f(z_anchor), Picard
        out = [
            a - c for a, c in zip(self.f_anchor, combine(coef, [u[: self.n] for u in self.u]), strict=True)
        ]
        return [like(o, t).to(t.dtype) for o, t in zip(out, fz, strict=True)]

    def _learn(self, z: list[Tensor]) -> None:
        """Rank-one update from the anchor to the new point: s = dz, y = dg, v = H^T s, u = (s - H y) / (v.y)."""
        if self.n == self.m:
            self.n = 0
        n = self.n
        s = [a - (f - g) for a, f, g in zip(z, self.f_anchor, self.g_anchor, strict=True)]
        y = [a - b for a, b in zip(self.g, self.g_anchor, strict=True)]
        u, v = [t[:n] for t in self.u], [t[:n] for t in self.v]
        hy = [c - b for c, b in zip(combine(dots(v, y), u), y, strict=True)] if n else [-t for t in y]
        vs = [c - b for c, b in zip(combine(dots(u, s), v), s, strict=True)] if n else [-t for t in s]
        vy, ss = dots([t[None] for t in vs], y), dots([t[None] for t in s], s)
        inverse = torch.where(vy.abs() > 1e-6 * ss, 1 / vy, 0)  # a step without information changes nothing
        for i in range(len(s)):
            torch.mul(s[i] - hy[i], inverse, out=self.u[i][n])
            self.v[i][n].copy_(vs[i])
        self.n = n + 1
