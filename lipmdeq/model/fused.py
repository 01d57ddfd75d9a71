"""The fast f: the maps of :mod:`lipmdeq.model.reference` in fewer passes over memory, with the same values.

- MGN is affine once its means are known: s·y + b with one b for each sample and channel, a single pass.
- A plain factor (the slope a of an activation, the weights of a mix) is not multiplied into a map: it joins γ and β of the norm
  before it, since max(0, a·norm(y)) is ReLU behind a norm with the scale aγ and the shift aβ.
- The up paths are summed from the lowest resolution upwards, so that each map is up-sampled by 2 once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lipmdeq.model.layers import GN, MGN, per_channel

if TYPE_CHECKING:
    from lipmdeq.model.blocks import FixedPointMap, Fusion, ResidualBlock
    from lipmdeq.model.layers import DownPath
    from lipmdeq.model.potential import Held


def normed(norm: GN | MGN, y: Tensor, k: float = 1.0) -> Tensor:
    """k·norm(y); of MGN as weight·(y − μ) + bias, where a weight without parameters is a number."""
    if isinstance(norm, GN):
        return norm(y) if k == 1.0 else k * norm(y)
    (b, c, h, w), groups = y.shape, norm.groups
    weight, bias = k * norm.scale(), None if norm.bias is None else k * norm.bias
    total = y.sum((2, 3)).view(b, groups, -1).sum(2, keepdim=True)  # (B, G, 1)
    part = -1.0 / (h * w * (c // groups))  # total·part = −μ
    if torch.compiler.is_compiling():
        shift = spread(total.squeeze(2), c, part * weight, bias)
    elif bias is None:
        shift = (part * weight * total).expand(-1, -1, c // groups).reshape(b, c)
    else:
        shift = torch.addcmul(bias.view(groups, -1), total, weight.view(groups, -1), value=part).view(b, c)
    if bias is None:
        return torch.add(per_channel(shift), y, alpha=weight)
    return torch.addcmul(per_channel(shift), y, per_channel(weight))


def spread(total: Tensor, channels: int, factor: Tensor | float, bias: Tensor | None) -> Tensor:
    """factor·total + bias for every channel, as a product of matrices: (B, G), (C,) → (B, C).

    The compiler gives a product a kernel of its own. What it fuses instead into the loop over the map it computes again
    for every pixel, and there the index of the group keeps it from vector instructions.
    """
    groups = total.shape[1]
    out = total.dtype if bias is None else torch.promote_types(total.dtype, bias.dtype)
    work = torch.float64 if torch.is_autocast_enabled(total.device.type) else out  # which autocast leaves alone
    member = torch.eye(groups, dtype=out, device=total.device).repeat_interleave(channels // groups, 1)
    product = total.to(work) @ (member * factor).to(work)
    return (product if bias is None else product + bias.to(work)).to(out)


def shares(alpha: float | None) -> tuple[float, float]:
    """The weights of a mix: (1 − α, α), or (1, 1) for a plain sum."""
    return (1.0, 1.0) if alpha is None else (1 - alpha, alpha)


def residual(block: ResidualBlock, z: Tensor, u: Tensor | None, mask: Tensor | None) -> Tensor:
    """(M1), (L1)."""
    a, (keep, take) = block.act.a, shares(block.alpha)
    y = block.drop(block.conv2(normed(block.norm1, block.conv1(z), a).relu_()), mask)
    g = normed(block.norm2, y if u is None else y + u, a * take)
    return normed(block.norm3, torch.add(g, z, alpha=a * keep).relu_())


def fusion(layer: Fusion, i: int, hat: Sequence[Tensor], a: float) -> Tensor:
    """(M2), (L2): a·z̃_i."""
    keep, take = shares(layer.alpha)
    factors = [a * take * w for w in layer.weights[i]]
    total = a * keep * hat[i]
    for j in range(i):
        total = total + down(layer.path(i, j), hat[j], factors[j])
    low = []
    for j in range(i + 1, layer.n):
        pair = layer.path(i, j).pair
        low.append(normed(pair.norm, pair.conv(hat[j]), factors[j]))
    return add_up([total, *low])


def down(path: DownPath, z: Tensor, k: float) -> Tensor:
    """k·D_ij(z)."""
    for pair in path.pairs[:-1]:
        z = normed(pair.norm, pair.conv(z), path.act.a).relu_()
    last = path.pairs[-1]
    return normed(last.norm, last.conv(z), k)


def add_up(maps: Sequence[Tensor]) -> Tensor:
    """y_0 + Up_2(y_1 + Up_2(y_2 + …)) of maps y_k, (B, C, H/2^k, W/2^k)."""
    *rest, total = maps
    for y in reversed(rest):
        total = y + F.interpolate(total, scale_factor=2, mode="nearest")
    return total


def paper(f: FixedPointMap, z: Sequence[Tensor], u: Sequence[Tensor | None], masks: Sequence) -> list[Tensor]:
    """f(z; u) of the paper's block, as :func:`lipmdeq.model.reference.paper`."""
    hat = [residual(f.residual[i], z[i], u[i], masks[i]) for i in range(f.n)]
    tilde = (fusion(f.fusion, i, hat, post.act.a) for i, post in enumerate(f.post))
    return [normed(post.pair.norm, post.pair.conv(t.relu_())) for post, t in zip(f.post, tilde, strict=True)]


def potential(z: Tensor, kernel: Tensor, back: Tensor, shift: Tensor, mask: Tensor | None) -> Tensor:
    """(P1): z − back ∗ (mask·relu(kernel ∗ z + shift)); mask (B, E·C) of zeros and ones."""
    y = (F.conv2d(z, kernel, padding=1) + shift).relu_()
    return z - F.conv2d(y if mask is None else y * per_channel(mask), back, padding=1)


def certified(z: Sequence[Tensor], held: Held) -> list[Tensor]:
    """f(z; u) of the certified family, as :func:`lipmdeq.model.reference.certified`."""
    hat = [potential(zi, *block, mask) for zi, block, mask in zip(z, held.blocks, held.masks, strict=True)]
    out = []
    for i in range(len(z)):
        total, low = hat[i] * held.own[i], []
        for j, x in enumerate(hat):
            if j < i:
                *first, last = held.paths[i, j]
                for kernel, bias in first:
                    x = F.conv2d(x, kernel, bias, stride=2).relu_()
                total = total + F.conv2d(x, *last, stride=2)
            elif j > i:
                low.append(F.conv2d(x, *held.paths[i, j][0]))
        out.append(add_up([total, *low]))
    return out
