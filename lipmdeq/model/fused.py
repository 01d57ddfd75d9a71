"""The fast f: the maps of :mod:`lipmdeq.model.reference` in fewer passes over memory, with the same values.

- MGN is affine once its means are known: s·y + b with one b for each sample and channel, a single pass.
- A plain factor (the slope a of an activation, the weights of a mix) is not multiplied into a map: it joins γ and β of the norm
  before it, since max(0, a·norm(y)) is ReLU behind a norm with the scale aγ and the shift aβ.
- The up paths are summed from the lowest resolution upwards, so that each map is up-sampled by 2 once.
- In a solve, where nothing is recorded, results are written over tensors that this file made (``over``), never over arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lipmdeq.model.layers import GN, MGN, per_channel

if TYPE_CHECKING:
    from lipmdeq.model.blocks import FixedPointMap, Fusion, PostFusion, ResidualBlock
    from lipmdeq.model.layers import DownPath
    from lipmdeq.model.potential import Held


def over(y: Tensor) -> Tensor | None:
    """Where an element-wise result may go: over y, which is ours, in a solve; None, a new tensor, when autograd records, and
    under autocast, where y may be narrower than the result."""
    casts = torch.is_autocast_enabled(y.device.type.replace("meta", "cpu"))  # meta: where `lipmdeq cost` counts
    return None if torch.is_grad_enabled() or torch.compiler.is_compiling() or casts else y


def normed(norm: GN | MGN, y: Tensor, k: float = 1.0) -> Tensor:
    """k·norm(y), in a solve over y."""
    weight, bias = norm.scale(), norm.bias
    if k != 1.0:
        weight, bias = k * weight, None if bias is None else k * bias
    if isinstance(norm, MGN):
        return mean_normed(y, norm.groups, weight, bias)
    if bias is not None:
        return F.group_norm(y, norm.groups, weight, bias, norm.eps)
    y = F.group_norm(y, norm.groups, eps=norm.eps)
    return y if weight == 1.0 else torch.mul(y, weight, out=over(y))


def mean_normed(y: Tensor, groups: int, weight: Tensor | float, bias: Tensor | None) -> Tensor:
    """weight·(y − μ) + bias, in a solve over y; weight and bias (C,), or a number and None."""
    b, c, h, w = y.shape
    total = y.sum((2, 3)).view(b, groups, -1).sum(2, keepdim=True)  # (B, G, 1)
    part = -1.0 / (h * w * (c // groups))  # total·part = −μ
    if torch.compiler.is_compiling() and not torch.is_autocast_enabled(y.device.type):
        # A product of matrices gets a kernel of its own; the compiler would find the rest again for every pixel.
        member = torch.eye(groups, dtype=y.dtype, device=y.device).repeat_interleave(c // groups, 1)
        shift = total.squeeze(2) @ (part * weight * member)
        shift = shift if bias is None else shift + bias
    elif bias is None:
        shift = (part * weight * total).expand(-1, -1, c // groups).reshape(b, c)
    else:
        shift = torch.addcmul(bias.view(groups, -1), total, weight.view(groups, -1), value=part).view(b, c)
    if bias is None:
        return torch.add(per_channel(shift), y, alpha=weight, out=over(y))
    return torch.addcmul(per_channel(shift), y, per_channel(weight), out=over(y))


def shares(alpha: float | None) -> tuple[float, float]:
    """The weights of a mix: (1 − α, α), or (1, 1) for a plain sum."""
    return (1.0, 1.0) if alpha is None else (1 - alpha, alpha)


def residual(block: ResidualBlock, z: Tensor, u: Tensor | None, mask: Tensor | None) -> Tensor:
    """(M1), (L1)."""
    a, (keep, take) = block.act.a, shares(block.alpha)
    y = normed(block.norm1, block.conv1(z), a).relu_()
    y = block.conv2(y)
    if mask is not None and u is not None:
        y = torch.addcmul(u, y, per_channel(mask), out=over(y))
    elif mask is not None:
        y = torch.mul(y, per_channel(mask), out=over(y))
    elif u is not None:
        y = torch.add(y, u, out=over(y))
    g = normed(block.norm2, y, a * take)
    return normed(block.norm3, torch.add(g, z, alpha=a * keep, out=over(g)).relu_())


def fusion(layer: Fusion, i: int, hat: Sequence[Tensor], a: float) -> Tensor:
    """(M2), (L2): a·z̃_i."""
    keep, take = shares(layer.alpha)
    factors = [a * take * w for w in layer.weights[i]]
    messages = [down(layer.path(i, j), hat[j], factors[j]) for j in range(i)]
    low = None
    for j in range(layer.n - 1, i, -1):
        pair = layer.path(i, j).pair
        y = normed(pair.norm, pair.conv(hat[j]), factors[j])
        low = y if low is None else add_up(y, low)
    if low is not None:
        messages.append(up(low))
    if not messages:
        return a * keep * hat[i]
    total = torch.add(messages[0], hat[i], alpha=a * keep, out=over(messages[0]))
    for y in messages[1:]:
        total = torch.add(total, y, out=over(total))
    return total


def down(path: DownPath, z: Tensor, k: float) -> Tensor:
    """k·D_ij(z)."""
    for pair in path.pairs[:-1]:
        z = normed(pair.norm, pair.conv(z), path.act.a).relu_()
    last = path.pairs[-1]
    return normed(last.norm, last.conv(z), k)


def up(y: Tensor) -> Tensor:
    """Up-sampling by 2."""
    return F.interpolate(y, scale_factor=2, mode="nearest")


def add_up(y: Tensor, low: Tensor) -> Tensor:
    """y + Up_2(low), in a solve over y."""
    return torch.add(y, up(low), out=over(y))


def post_fusion(layer: PostFusion, t: Tensor) -> Tensor:
    """(M3), (L3) of t = a·z̃_i."""
    return normed(layer.pair.norm, layer.pair.conv(t.relu_()))


def paper(f: FixedPointMap, z: Sequence[Tensor], u: Sequence[Tensor | None], masks: Sequence) -> list[Tensor]:
    """f(z; u) of the paper's block, as :func:`lipmdeq.model.reference.paper`."""
    hat = [residual(f.residual[i], z[i], u[i], masks[i]) for i in range(f.n)]
    return [post_fusion(post, fusion(f.fusion, i, hat, post.act.a)) for i, post in enumerate(f.post)]


def potential(z: Tensor, kernel: Tensor, back: Tensor, shift: Tensor, mask: Tensor | None) -> Tensor:
    """(P1): z − back ∗ (mask·relu(kernel ∗ z + shift)); mask (B, E·C) of zeros and ones."""
    y = F.conv2d(z, kernel, padding=1)
    y = torch.add(y, shift, out=over(y)).relu_()
    if mask is not None:
        y = torch.mul(y, per_channel(mask), out=over(y))
    y = F.conv2d(y, back, padding=1)
    return torch.sub(z, y, out=over(y))


def certified(z: Sequence[Tensor], held: Held) -> list[Tensor]:
    """f(z; u) of the certified family, as :func:`lipmdeq.model.reference.certified`."""
    n = len(z)
    hat = [potential(zi, *block, mask) for zi, block, mask in zip(z, held.blocks, held.masks, strict=True)]
    out = []
    for i in range(n):
        total = hat[i] * held.own[i]
        for j in range(i):
            x = hat[j]
            *first, (kernel, bias) = held.paths[i, j]
            for k, b in first:
                x = F.conv2d(x, k, b, stride=2).relu_()
            total = torch.add(total, F.conv2d(x, kernel, bias, stride=2), out=over(total))
        low = None
        for j in range(n - 1, i, -1):
            ((kernel, bias),) = held.paths[i, j]
            y = F.conv2d(hat[j], kernel, bias)
            low = y if low is None else add_up(y, low)
        out.append(total if low is None else add_up(total, low))
    return out
