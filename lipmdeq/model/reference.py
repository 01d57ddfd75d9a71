"""f as the paper prints it, line by line: (M1)–(M3) of MDEQ, (L1)–(L3) of Lipschitz MDEQ, (P1)–(P2) of the certified family.

Both models of the paper are one module tree: its norms are GN or MGN, its activations have the slope a (1 for ReLU), and a mix
without α is a plain sum. Every line calls a layer of :mod:`lipmdeq.model.layers`, and nothing is merged. The model itself runs
:mod:`lipmdeq.model.fused`, which computes the same numbers in fewer passes; ``tests/model/test_reference.py`` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from lipmdeq.model.layers import per_channel

if TYPE_CHECKING:
    from lipmdeq.model.blocks import FixedPointMap, Fusion, PostFusion, ResidualBlock
    from lipmdeq.model.potential import Potential, PotentialMap


def mix(alpha: float | None, z: Tensor, g: Tensor) -> Tensor:
    """(1 − α)·z + α·g, or the plain sum z + g without α."""
    return z + g if alpha is None else (1 - alpha) * z + alpha * g


def residual(block: ResidualBlock, z: Tensor, u: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """(M1), (L1): ẑ_i = norm(act(mix(z_i, g_i))), g_i = norm(drop(conv(act(norm(conv(z_i))))) + u_i); u_i None: zero."""
    y = block.act(block.norm1(block.conv1(z)))
    y = block.drop(block.conv2(y), mask)
    g = block.norm2(y if u is None else y + u)
    return block.norm3(block.act(mix(block.alpha, z, g)))


def fusion(layer: Fusion, i: int, hat: Sequence[Tensor]) -> Tensor:
    """(M2), (L2): z̃_i = mix(ẑ_i, Σ_j w_ij·Fuse_ij(ẑ_j)), the sum over all j ≠ i."""
    others = [j for j in range(layer.n) if j != i]
    return mix(layer.alpha, hat[i], sum(layer.weights[i][j] * layer.path(i, j)(hat[j]) for j in others))


def post_fusion(layer: PostFusion, tilde: Tensor) -> Tensor:
    """(M3), (L3): z̄_i = norm(conv(act(z̃_i)))."""
    return layer.pair.norm(layer.pair.conv(layer.act(tilde)))


def paper(f: FixedPointMap, z: Sequence[Tensor], u: Sequence[Tensor | None], masks: Sequence) -> list[Tensor]:
    """f(z; u) = [z̄_1, …, z̄_n], each (B, C_i, H_i, W_i); u_i is None where nothing enters, a mask where dropout is off."""
    hat = [residual(f.residual[i], z[i], u[i], masks[i]) for i in range(f.n)]
    tilde = [fusion(f.fusion, i, hat) for i in range(f.n)]
    return [post_fusion(f.post[i], tilde[i]) for i in range(f.n)]


def potential(block: Potential, z: Tensor, u: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """(P1): ẑ_i = z_i − (2/T_i)·K_iᵀσ(K_i z_i + b_i + u_i), σ the ReLU; dropout keeps a hidden unit, or 1 − p of it in a test."""
    y = F.relu(F.conv2d(z, block.weight, padding=1) + per_channel(block.bias) + (0 if u is None else u))
    y = block.drop(y, mask) if block.training else (1 - block.drop.p) * y
    return z - 2 / block.T() * F.conv_transpose2d(y, block.weight, padding=1)


def path(f: PotentialMap, i: int, j: int, z: Tensor) -> Tensor:
    """P_ij of (P2): 2x2 convolutions with stride 2, ReLU between them, or a 1x1 convolution and up-sampling over its norm."""
    *first, last = f.path(i, j)
    for conv in first:
        z = F.relu(conv(z))
    scale = 2 ** max(0, j - i)
    return F.interpolate(last(z), scale_factor=scale) / scale


def certified(f: PotentialMap, z: Sequence[Tensor], u: Sequence[Tensor | None], masks: Sequence) -> list[Tensor]:
    """(P2): f_i(z; u) = Σ_j M_ij·P_ij(ẑ_j), P_ii the identity."""
    n, m = range(f.n), f.mixing()
    hat = [potential(f.residual[i], z[i], u[i], masks[i]) for i in n]
    return [sum(m[i, j] * (hat[j] if i == j else path(f, i, j, hat[j])) for j in n) for i in n]
