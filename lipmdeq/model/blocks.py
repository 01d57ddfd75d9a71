"""The fixed-point map f of MDEQ and Lipschitz MDEQ: residual blocks → fusion → post-fusion (M1–M3 and L1–L3
of the paper).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.model.layers import (
    GN,
    MGN,
    Conv,
    ConvNorm,
    DownPath,
    Leaf,
    SReLU,
    UpPath,
    VariationalDropout,
    add_scaled,
    add_up2,
    into,
    no_answer,
    norm_act,
    normed,
    per_channel,
    spatial_sum,
)

if TYPE_CHECKING:
    from lipmdeq.model.network import ModelConfig


def _key(i: int, j: int) -> str:
    """Name of the path from branch j to branch i, counted from 1 as in the paper."""
    return f"{j + 1}to{i + 1}"


class ResidualBlock(nn.Module):
    """One branch of M1 / L1: conv · norm1 · act · conv · dropout · + u · norm2 · mix with the input · act ·
    norm3.

    The mix is x + g(x), or (1−α1)·x + α1·g(x) when alpha is given. Written as κ·(x + r·g(x)), κ goes through
    the activation (positively homogeneous) and into norm3, so it costs nothing.
    """

    def __init__(
        self, make_conv: Callable, make_norm: Callable, channels: int, expansion: int, a: float, p: float, alpha
    ):
        super().__init__()
        wide = expansion * channels
        self.conv1, self.norm1 = make_conv(channels, wide), make_norm(wide)
        self.conv2, self.drop, self.norm2 = (make_conv(wide, channels), VariationalDropout(p), make_norm(channels))
        self.act, self.norm3, self.alpha = SReLU(a), make_norm(channels), alpha

    def forward(self, x: Tensor, u: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        kappa, r = (1.0, 1.0) if self.alpha is None else (1 - self.alpha, self.alpha / (1 - self.alpha))
        y, k = norm_act(self.norm1, self.conv1(x), self.act.a)
        y = self.conv2(y)
        if mask is not None:
            mask = per_channel(mask)
            y = torch.mul(y, mask, out=into(y)) if u is None else torch.addcmul(u, y, mask, value=k, out=into(y))
        elif u is not None:
            y = torch.add(u, y, alpha=k, out=into(y))
        k = k if u is None else 1.0
        if not isinstance(self.norm3, MGN):
            v = torch.add(x, normed(self.norm2, y, k), alpha=r).relu_()
            return normed(self.norm3, v, kappa * self.act.a)
        total, pixels = spatial_sum(y)
        s, b = self.norm2.affine(total, pixels / k)
        v, left = floored(add_scaled(x, y, s, r * k), -r * b)
        return shifted_norm(v, left, self.norm3, kappa * self.act.a)

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        if answer is not None:
            return answer
        inner = (self.conv1, self.norm1, self.act, self.conv2, self.drop, self.norm2)
        g = bounds.lip_compose(*(m.lipschitz(leaf, train) for m in inner))
        mix = bounds.lip_residual(g) if self.alpha is None else bounds.lip_convex(self.alpha, g)
        return bounds.lip_compose(mix, self.act.lipschitz(leaf, train), self.norm3.lipschitz(leaf, train))


def floored(v: Tensor, floor: Tensor | None, own: bool = True) -> tuple[Tensor, Tensor | None]:
    """max(0, v − floor) as (w, left), equal to w − left: floor and left (B, C) or None for zero. In a solve over v if it
    is ours.

    In a solve max(0, v − t) = max(v, t) − t, and − t joins what follows, which saves a pass. Under autograd it would cost
    more than it saves: the gradient of a maximum of two tensors takes five passes, that of ReLU one.
    """
    if floor is None:
        return (v.relu() if into(v, own) is None else v.relu_()), None
    if into(v) is None:
        return (v - per_channel(floor)).relu_(), None
    return torch.maximum(v, per_channel(floor), out=into(v, own)), floor


def shifted_norm(y: Tensor, floor: Tensor | None, norm: MGN, k: float) -> Tensor:
    """MGN(k·(y − floor)), floor (B, C) or None for zero, in two passes."""
    if floor is None:
        return normed(norm, y, k)
    total, pixels = spatial_sum(y)
    s, b = norm.affine(torch.sub(total, floor, alpha=pixels), pixels / k)
    if isinstance(s, Tensor):
        b = torch.addcmul(b, floor, s, value=-k)
    else:
        b = torch.sub(b, floor, alpha=k * s)
    return add_scaled(per_channel(b), y, s, k)


class PostFusion(nn.Module):
    """M3 / L3 for one branch: act · conv1x1 · norm. The (B, C) shift left over from the fusion enters here."""

    def __init__(self, pair: ConvNorm, a: float):
        super().__init__()
        self.act, self.pair = SReLU(a), pair

    def forward(self, z: Tensor, floor: Tensor | None = None, k: float = 1.0, own: bool = False) -> Tensor:
        """norm(conv(SReLU(k·(z − floor)))), k > 0; own: z may be overwritten."""
        k = k * self.act.a
        conv, norm = self.pair
        if not isinstance(norm, MGN):
            return normed(norm, conv(z.relu() if floor is None else (z - per_channel(floor)).relu_()), k)
        z, left = floored(z, floor, own)
        if left is not None:  # a 1x1 convolution sends channel shifts to channel shifts
            left = left @ conv.kernel()[:, :, 0, 0].mT
        return shifted_norm(conv(z), left, norm, k)

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return (
            answer
            if answer is not None
            else bounds.lip_compose(self.act.lipschitz(leaf, train), self.pair.lipschitz(leaf, train))
        )


class Fusion(nn.Module):
    """M2 / L2: every branch receives every other one.

    z̃_i = ẑ_i + Σ_j w_ij·Fuse_ij(ẑ_j), or (1−α2)·ẑ_i + α2·Σ_j w_ij·Fuse_ij(ẑ_j) when alpha is given. Returned
    as (z, floor, κ) with z̃_i = κ·(z_i − floor_i): the post-fusion layer absorbs κ and the floors, (B, C). The up
    paths are summed from the lowest resolution upwards, so that each map is up-sampled by 2 once.

    Args:
        paths: paths[i][j] is the module from branch j to branch i (None on the diagonal).
        weights: n x n matrix w (zero on the diagonal, and there only).
        alpha: α2, or None for plain sums.
    """

    def __init__(
        self, paths: Sequence[Sequence[nn.Module | None]], weights: Sequence[Sequence[float]], alpha: float | None
    ):
        super().__init__()
        self.n, self.alpha = len(paths), alpha
        self.weights = [[float(w) for w in row] for row in weights]
        for i, row in enumerate(self.weights):
            if any(w == 0.0 for j, w in enumerate(row) if j != i):
                raise ValueError(f"weights[{i}] = {row}: must be non-zero off the diagonal")
        self.paths = nn.ModuleDict(
            {_key(i, j): m for i, row in enumerate(paths) for j, m in enumerate(row) if m is not None}
        )

    def forward(self, z: list[Tensor], own: bool = False) -> tuple[list[Tensor], list[Tensor | None], float]:
        """(z, floor, κ) of the class's description; own: z may be overwritten (with one branch the result is z itself)."""
        kappa, r = (1.0, 1.0) if self.alpha is None else (1 - self.alpha, self.alpha / (1 - self.alpha))
        out, floors = [None] * self.n, [None] * self.n
        for i in reversed(range(self.n)):  # branch 1, the largest, last: nobody needs it any more
            acc, floor, weights = z[i], None, self.weights[i]
            for j in range(i):
                path = self.paths[_key(i, j)]
                x, k = path.head(z[j])
                acc, floor = path.pairs[-1].add_to(acc, floor, x, r * weights[j], k)
            low = None  # the sum over the lower branches is weights[j] · low
            for j in range(self.n - 1, i, -1):
                conv, norm = self.paths[_key(i, j)].pair
                y = normed(norm, conv(z[j]))
                low = y if low is None else add_up2(y, low, weights[j + 1] / weights[j])
            if low is not None:
                acc = add_up2(acc, low, r * weights[i + 1], own or i > 0)
            out[i], floors[i] = acc, floor
        return out, floors, kappa

    def matrix(self, leaf: Leaf = no_answer, train: bool = True) -> list[list[float]]:
        """The n x n comparison matrix M: ‖z̃_i − z̃'_i‖ ≤ Σ_j M_ij ‖ẑ_j − ẑ'_j‖."""
        own, other = (1.0, 1.0) if self.alpha is None else (1 - self.alpha, self.alpha)
        return [
            [
                own if i == j else other * self.weights[i][j] * self.paths[_key(i, j)].lipschitz(leaf, train)
                for j in range(self.n)
            ]
            for i in range(self.n)
        ]


class FixedPointMap(nn.Module):
    """f_θ(z; x) = post-fusion(fusion(residual(z))) on the list of branches; u is the injected input: that of branch 1, or a
    list with one for each branch (None: nothing enters there).
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n, ch, sizes = cfg.n, cfg.channels, cfg.sizes()
        c = cfg.c if cfg.constrain else None
        gamma = cfg.gamma if cfg.clip else None
        a = cfg.a

        def conv(i: int, k: int, stride: int = 1, wn: bool = False) -> Callable[[int, int], Conv]:
            return lambda cin, cout: Conv(cin, cout, k, stride, c, sizes[i], wn)

        def norm(channels: int, groups: int = cfg.groups, affine: bool = True):
            return (MGN if cfg.norm == "mgn" else GN)(groups, channels, affine, gamma if affine else cfg.gamma)

        def down(i: int, j: int) -> DownPath:
            pairs = []
            for s in range(j, i):
                cout = ch[i] if s == i - 1 else ch[j]
                pairs.append(ConvNorm(conv(s, 3, 2)(ch[j], cout), norm(cout)))
            return DownPath(pairs, a)

        def path(i: int, j: int) -> nn.Module | None:
            if i == j:
                return None
            return down(i, j) if j < i else UpPath(ConvNorm(conv(j, 1)(ch[j], ch[i]), norm(ch[i])), j - i)

        wn = cfg.weight_norm
        alpha1, alpha2 = (cfg.alpha1 if cfg.mix1 else None), (cfg.alpha2 if cfg.mix2 else None)
        self.residual = nn.ModuleList(
            ResidualBlock(conv(i, 3, wn=wn), norm, ch[i], cfg.expansion, a, cfg.p, alpha1) for i in range(self.n)
        )
        self.fusion = Fusion(
            [[path(i, j) for j in range(self.n)] for i in range(self.n)], fusion_weights(cfg.fusion, self.n), alpha2
        )
        post_groups = max(1, cfg.groups // 2)
        self.post = nn.ModuleList(
            PostFusion(ConvNorm(conv(i, 1, wn=wn)(ch[i], ch[i]), norm(ch[i], post_groups, cfg.post_affine)), a)
            for i in range(self.n)
        )

    def masks(self, like: Tensor) -> list[Tensor | None]:
        """Dropout masks for one forward pass, to be held through both solves; None where dropout is off."""
        return [block.drop.draw(like.shape[0], block.norm2.channels, like) for block in self.residual]

    def hold(self, u: Sequence[Tensor | None]) -> list[Tensor | None]:
        """What stays the same through both solves of a batch: the masks."""
        return self.masks(u[0])

    def forward(
        self, z: Sequence[Tensor], u: Tensor | Sequence[Tensor | None], masks: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        masks = masks or [None] * self.n
        u = [u] + [None] * (self.n - 1) if isinstance(u, Tensor) else u
        z = [block(z[i], u[i], masks[i]) for i, block in enumerate(self.residual)]
        z, floors, k = self.fusion(z, own=True)  # the residual blocks made them
        return [post(z[i], floors[i], k, own=True) for i, post in enumerate(self.post)]

    def hidden(self, z: Sequence[Tensor], u: Sequence[Tensor | None]) -> list[Tensor]:
        """Which hidden units of the residual blocks are on at z: booleans (B, E·C_i, H_i, W_i)."""
        return [normed(b.norm1, b.conv1(zi)) > 0 for b, zi in zip(self.residual, z, strict=True)]

    def matrix(self, leaf: Leaf = no_answer, train: bool = True) -> np.ndarray:
        """Comparison matrix N_ij = L̄_i·M_ij·L̂_j: ‖f(z)_i − f(z')_i‖ ≤ Σ_j N_ij ‖z_j − z'_j‖."""
        hat = np.array([block.lipschitz(leaf, train) for block in self.residual])
        bar = np.array([post.lipschitz(leaf, train) for post in self.post])
        return bar[:, None] * np.array(self.fusion.matrix(leaf, train)) * hat[None, :]

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True, reading: str = "perron") -> float:
        """L from the module tree: the "frobenius", "spectral" or "perron" reading of the comparison matrix."""
        return read(self.matrix(leaf, train), reading)

    def constrain(self, prove: bool = True) -> float:
        """‖W‖₂ ≤ c and |γ| ≤ γ̄ wherever the configuration asks for it; arguments as in :meth:`lipmdeq.model.MDEQ.constrain`."""
        worst = 0.0
        for module in self.modules():
            if isinstance(module, Conv):
                worst = max(worst, module.constrain(prove))
            elif isinstance(module, GN | MGN):
                module.constrain()
        return worst


def read(matrix: np.ndarray, reading: str) -> float:
    """L from a comparison matrix: the "frobenius", "spectral" or "perron" reading."""
    readings = {"frobenius": bounds.frobenius, "spectral": bounds.spectral, "perron": lambda m: bounds.perron(m)[0]}
    if reading not in readings:
        raise ValueError(f"reading = {reading!r}: must be one of {', '.join(readings)}")
    return readings[reading](matrix) if np.isfinite(matrix).all() else float("inf")


def fusion_weights(kind: str, n: int) -> np.ndarray:
    """w_ij: softmax of the level differences (the paper), their uniform mean (S4 as run) or ones (plain sum)."""
    if kind == "softmax":
        return np.asarray(bounds.fusion_weights(n), dtype=float)
    ones = np.ones((n, n)) - np.eye(n)
    return ones / max(1, n - 1) if kind == "mean" else ones
