"""f of MDEQ and Lipschitz MDEQ as a module tree with its constants: residual blocks → fusion → post-fusion.

What the parts compute stands in :mod:`lipmdeq.model.reference`; f runs it in the merged form of :mod:`lipmdeq.model.fused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.model import fused, layers, reference
from lipmdeq.model.config import ModelConfig
from lipmdeq.model.layers import GN, MGN, Conv, ConvNorm, DownPath, Layer, Leaf, Maps, SReLU, UpPath, path_name


class ResidualBlock(Layer):
    """One branch of (M1), (L1): conv · norm · act · conv · dropout · + u · norm · mix with the input · act · norm.

    Args:
        convs: from C to E·C channels and back. norms: for E·C, C and C channels.
        a, p: of the activations and of dropout. alpha: α1, or None for the plain sum z + g(z).
    """

    def __init__(self, convs: Sequence[Conv], norms: Sequence[GN | MGN], a: float, p: float, alpha: float | None):
        super().__init__()
        self.conv1, self.norm1 = convs[0], norms[0]
        self.conv2, self.drop, self.norm2 = convs[1], layers.VariationalDropout(p), norms[1]
        self.act, self.norm3, self.alpha = SReLU(a), norms[2], alpha

    def forward(self, z: Tensor, u: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return reference.residual(self, z, u, mask)

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        inner = (self.conv1, self.norm1, self.act, self.conv2, self.drop, self.norm2)
        g = bounds.lip_compose(*(m.lipschitz(leaf, train) for m in inner))
        mix = bounds.lip_residual(g) if self.alpha is None else bounds.lip_convex(self.alpha, g)
        return bounds.lip_compose(mix, self.act.lipschitz(leaf, train), self.norm3.lipschitz(leaf, train))


class PostFusion(Layer):
    """One branch of (M3), (L3): act · conv1x1 · norm."""

    def __init__(self, pair: ConvNorm, a: float):
        super().__init__()
        self.act, self.pair = SReLU(a), pair

    def forward(self, tilde: Tensor) -> Tensor:
        return reference.post_fusion(self, tilde)


class Fusion(nn.Module):
    """(M2), (L2): every branch receives every other one.

    Args:
        paths: paths[i][j] is the module from branch j to branch i (None on the diagonal).
        weights: n x n matrix w, of which the diagonal is not used. alpha: α2, or None for plain sums.
    """

    def __init__(self, paths: Sequence[Sequence], weights: Sequence[Sequence[float]], alpha: float | None):
        super().__init__()
        self.n, self.alpha = len(paths), alpha
        self.weights = [[float(w) for w in row] for row in weights]
        named = {path_name(i, j): m for i, row in enumerate(paths) for j, m in enumerate(row) if m is not None}
        self.paths = nn.ModuleDict(named)

    def path(self, i: int, j: int) -> DownPath | UpPath:
        """Fuse_ij, from branch j to branch i."""
        return self.paths[path_name(i, j)]

    def forward(self, hat: Sequence[Tensor]) -> list[Tensor]:
        return [reference.fusion(self, i, hat) for i in range(self.n)]

    def matrix(self, leaf: Leaf | None = None, train: bool = True) -> np.ndarray:
        """The n x n comparison matrix M: ‖z̃_i − z̃'_i‖ ≤ Σ_j M_ij ‖ẑ_j − ẑ'_j‖."""
        own, other = fused.shares(self.alpha)
        m = own * np.eye(self.n)
        for i, j in permutations(range(self.n), 2):
            m[i, j] = other * self.weights[i][j] * self.path(i, j).lipschitz(leaf, train)
        return m


class Parts:
    """The modules of f as a configuration wants them; branches count from 0."""

    def __init__(self, cfg: ModelConfig):
        self.cfg, self.sizes = cfg, cfg.sizes()

    def conv(self, i: int, cin: int, cout: int, k: int, stride: int = 1, weight_norm: bool = False) -> Conv:
        """A convolution on the maps of branch i."""
        return Conv(cin, cout, k, stride, self.cfg.c if self.cfg.constrain else None, self.sizes[i], weight_norm)

    def norm(self, channels: int, groups: int | None = None, affine: bool = True) -> GN | MGN:
        gamma = self.cfg.gamma if self.cfg.clip or not affine else None
        return (MGN if self.cfg.norm == "mgn" else GN)(groups or self.cfg.groups, channels, affine, gamma)

    def residual(self, i: int) -> ResidualBlock:
        cfg, c = self.cfg, self.cfg.channels[i]
        wide, wn = cfg.expansion * c, cfg.weight_norm
        convs = [self.conv(i, c, wide, 3, weight_norm=wn), self.conv(i, wide, c, 3, weight_norm=wn)]
        norms = [self.norm(wide), self.norm(c), self.norm(c)]
        return ResidualBlock(convs, norms, cfg.a, cfg.p, cfg.alpha1 if cfg.mix1 else None)

    def path(self, i: int, j: int) -> DownPath | UpPath | None:
        """Fuse_ij, from branch j to branch i; None from a branch to itself."""
        start, end = self.cfg.channels[j], self.cfg.channels[i]
        if i == j:
            return None
        if j > i:
            return UpPath(ConvNorm(self.conv(j, start, end, 1), self.norm(end)), j - i)
        widths = [start] * (i - j - 1) + [end]
        pairs = [ConvNorm(self.conv(j + s, start, w, 3, 2), self.norm(w)) for s, w in enumerate(widths)]
        return DownPath(pairs, self.cfg.a)

    def post(self, i: int) -> PostFusion:
        cfg, c = self.cfg, self.cfg.channels[i]
        norm = self.norm(c, max(1, cfg.groups // 2), cfg.post_affine)
        return PostFusion(ConvNorm(self.conv(i, c, c, 1, weight_norm=cfg.weight_norm), norm), cfg.a)


class BranchMap(nn.Module):
    """What the maps f share. Both have ``hold(u)``: what stays the same through both solves of a batch; ``inputs(u, held)``: all
    that f(z; u) depends on besides z, for :func:`lipmdeq.solvers.deq`; ``matrix(leaf, train)``: the comparison matrix N,
    ‖f(z)_i − f(z')_i‖ ≤ Σ_j N_ij‖z_j − z'_j‖; ``hidden(z, u)``: which hidden units of the residual layers are on at z, booleans
    (B, E·C_i, H_i, W_i). u is the list of injected images, u_i (B, ·, H_i, W_i), None where nothing enters.
    """

    reading = "perron"

    def lipschitz(self, leaf: Leaf | None = None, train: bool = True, reading: str | None = None) -> float:
        """L from the module tree: ``reading`` as in :func:`lipmdeq.model.read`, by default that of the map's own guarantee."""
        return read(self.matrix(leaf, train), reading or self.reading)

    def constrain(self, prove: bool = True) -> float:
        """Apply what the configuration asks for; arguments as in :meth:`lipmdeq.model.MDEQ.constrain`."""
        return 0.0


class FixedPointMap(BranchMap):
    """f_θ(z; x) = post-fusion(fusion(residual(z))) on the list of branches; u may be the injected image of branch 1 alone."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        make, branches = Parts(cfg), range(cfg.n)
        self.n = cfg.n
        self.residual = nn.ModuleList(make.residual(i) for i in branches)
        paths = [[make.path(i, j) for j in branches] for i in branches]
        self.fusion = Fusion(paths, bounds.fusion_weights(cfg.n, cfg.fusion), cfg.alpha2 if cfg.mix2 else None)
        self.post = nn.ModuleList(make.post(i) for i in branches)

    def masks(self, like: Tensor) -> Maps:
        """Dropout masks for one forward pass, to be held through both solves; None where dropout is off."""
        return [block.drop.draw(len(like), block.norm2.channels, like) for block in self.residual]

    def hold(self, u: Maps) -> Maps:
        return self.masks(u[0])

    def inputs(self, u: Maps, held: Maps) -> list[Tensor]:
        return [*(t for t in u if t is not None), *self.parameters()]

    def forward(self, z: Sequence[Tensor], u: Tensor | Maps, masks: Maps | None = None) -> list[Tensor]:
        u = [u] + [None] * (self.n - 1) if isinstance(u, Tensor) else u
        return fused.paper(self, z, u, masks or [None] * self.n)

    def hidden(self, z: Sequence[Tensor], u: Maps) -> list[Tensor]:
        return [b.norm1(b.conv1(zi)) > 0 for b, zi in zip(self.residual, z, strict=True)]

    def matrix(self, leaf: Leaf | None = None, train: bool = True) -> np.ndarray:
        """N_ij = L̄_i·M_ij·L̂_j."""
        hat = np.array([block.lipschitz(leaf, train) for block in self.residual])
        bar = np.array([post.lipschitz(leaf, train) for post in self.post])
        return bar[:, None] * self.fusion.matrix(leaf, train) * hat[None, :]

    def constrain(self, prove: bool = True) -> float:
        """‖W‖₂ ≤ c and |γ| ≤ γ̄ wherever the configuration asks for it."""
        return layers.constrain(self.modules(), prove)


def read(matrix: np.ndarray, reading: str) -> float:
    """L from a comparison matrix: the "frobenius", "spectral" or "perron" reading."""
    readings = {"frobenius": bounds.frobenius, "spectral": bounds.spectral, "perron": lambda m: bounds.perron(m)[0]}
    bounds.check_choice("reading", reading, tuple(readings))
    return readings[reading](matrix) if np.isfinite(matrix).all() else float("inf")
