"""The building blocks of f, each of which knows its own Lipschitz constant.

Every module has ``lipschitz(leaf, train)``. A leaf (convolution, norm, activation, dropout, up-sampling)
answers with its constant; a container composes the answers of its children by Lemma 3.1 (sum and composition)
and nothing else. So the constant of the whole map comes from the module tree. ``leaf(module)`` may answer
first: the certificate uses this to put the proved norm of the live weight in the place of the worst case that
the specification allows. ``None`` means "no answer".

Evaluation is arranged for speed, without a second code path: mean-only normalisation is affine once the means
are known (``MGN.affine``), so its scale and shift, the slope of the scaled ReLU and the weights of the mixes
are merged into single passes over the feature map. Plain numbers (slopes, weights of mixes) are never multiplied
into a tensor: ReLU and convolutions let a factor k > 0 through, so it travels beside its tensor until a pass takes it
along (``k`` below). Tensors are (B, C, H, W), best in ``channels_last``.

No module writes into its input. In a solve (no graph) the passes above go over tensors that f made itself: the functions
``normed``, ``norm_act``, ``add_scaled`` and ``add_up2`` then overwrite their tensor unless told that it is not theirs (``own``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.norms.guard import NormGuard

MARGIN = 0.04  # what estimated norms stay below c: a warm power step lags behind weights that move
GROWTH, FADE, MOST = (
    0.5,
    0.9,
    0.3,
)  # and this share of what a step added to the norm, fading with this factor, at most that
COLD_STEPS = 20  # power steps from random vectors
SMALL = 1e-6  # entries of a vector that starts anew: shorter than a unit vector, so estimates stay below the norm
Leaf = Callable[[nn.Module], float | None]


def no_answer(module: nn.Module) -> float | None:
    return None


def into(y: Tensor, own: bool = True) -> Tensor | None:
    """Where an element-wise result may go: over y itself in a solve if it is ours, a new tensor when autograd records."""
    return None if not own or torch.is_grad_enabled() or torch.compiler.is_compiling() else y


def per_channel(v: Tensor) -> Tensor:
    return v.view(*v.shape, 1, 1)


def _lengths(v: Tensor) -> Tensor:
    """Norm of each sample, (B, 1, 1, 1)."""
    return torch.linalg.vector_norm(v, dim=(1, 2, 3), keepdim=True)


class Conv(nn.Module):
    """Bias-free convolution, ‖W‖₂ ≤ c when c is given (Conv*, Lemma ``lem:conv``).

    The constraint acts on the operator (real map size, zero padding, stride) and on the weight that the
    forward pass uses: with weight normalisation W = g·v/‖v‖ the projection shrinks g, so the next forward
    pass cannot undo it.

    Args:
        cin, cout, k, stride: the usual sizes; padding is (k − 1)/2.
        c: bound on the operator norm, or None for a free convolution.
        size: (H, W) of the input map, on which the norm is meant.
        weight_norm: parametrise W by length and direction for each output channel.
    """

    def __init__(
        self,
        cin: int,
        cout: int,
        k: int = 3,
        stride: int = 1,
        c: float | None = None,
        size: tuple[int, int] = (8, 8),
        weight_norm: bool = False,
    ):
        super().__init__()
        self.stride, self.padding, self.c, self.size = stride, (k - 1) // 2, c, tuple(size)
        self.weight = nn.Parameter(torch.empty(cout, cin, k, k).normal_(0.0, 0.01))
        self.g = nn.Parameter(self.weight.detach().flatten(1).norm(dim=1)) if weight_norm else None
        self.forget()

    def kernel(self) -> Tensor:
        """The weight in use, (C_out, C_in, k, k)."""
        if self.g is None:
            return self.weight
        return self.weight * (self.g / self.weight.flatten(1).norm(dim=1).clamp_min(1e-12))[:, None, None, None]

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), stride=self.stride, padding=self.padding)

    def geometry(self) -> dict:
        """Keyword arguments that describe the operator to :mod:`lipmdeq.norms`."""
        return {"size": self.size, "stride": self.stride, "padding": self.padding}

    @torch.no_grad()
    def constrain(self, prove: bool = True) -> float:
        """Bring the operator norm of the weight in use to at most c, changing as little as possible.

        Without ``prove`` a weight whose *estimated* norm exceeds (1 − MARGIN − growth)·c is scaled to that, and 0 is returned:
        the estimate is always too small, but by less than the margin, which widens where steps make the norm grow fast. It costs
        what two images cost, and nothing waits for the result on a GPU. With ``prove`` the norm is also proved to be at most c;
        returns the bound that was found before over c (at most 1 when the proof changed nothing).
        """
        if self.c is None:
            return 0.0
        if not prove or self._seen is not None:  # a layer that is held by estimates shows the proof what they do
            self._hold()
        if not prove:
            return 0.0
        if self._guard is None or self._guard.key != (self.size, self.stride, self.padding):
            self._guard = NormGuard(self.size, stride=self.stride, padding=self.padding)
        if self.g is None:
            self._guard.enforce(self.weight, self.c)
        else:
            kernel = self.kernel().clone()
            self.g.mul_(self._guard.enforce(kernel, self.c))
        return self._guard.found / self.c

    def _hold(self) -> None:
        """Scale the weight by what its estimated norm is too large; nothing is decided on the host."""
        norm = self.estimate().nan_to_num(0.0, 0.0)  # squares overflow: left to the next proof
        self._room = torch.maximum(FADE * self._room, GROWTH * (norm / self._level - 1)).clamp(max=MOST)
        factor = ((1 - MARGIN - self._room) * self.c / norm).clamp(max=1.0)
        self._level = norm * factor
        (self.weight if self.g is None else self.g).mul_(factor)
        self._seen = self.kernel().detach().clone()

    def _normal(self, kernel: Tensor, v: Tensor) -> Tensor:
        """TᵀTv for the convolution T with this kernel."""
        if kernel.shape[-1] == 1:
            matrix = kernel.flatten(1)
            return (v.flatten(1) @ matrix.mT @ matrix).view_as(v)
        left = [(s + 2 * self.padding - kernel.shape[-1]) % self.stride for s in v.shape[2:]]
        y = F.conv2d(v, kernel, stride=self.stride, padding=self.padding)
        return F.conv_transpose2d(y, kernel, stride=self.stride, padding=self.padding, output_padding=left)

    @torch.no_grad()
    def estimate(self) -> Tensor:
        """A lower estimate of the operator norm: the larger √‖TᵀTv‖ of two unit vectors v, (C_in, H, W).

        One is the longer TᵀTv of the last call. A step of Adam can raise the norm by a third in a direction that this vector
        does not know; so the other one follows the direction in which the last change of the kernel is largest, by a power step
        too: changes resemble one another. At first both are random and take COLD_STEPS steps. The norm of a 1x1 convolution is
        that on one pixel.
        """
        kernel = self.kernel().detach()
        if self._seen is None or (self._seen.device, self._seen.dtype) != (kernel.device, kernel.dtype):
            size = self.size if kernel.shape[-1] > 1 else (1, 1)
            start = torch.randn(2, kernel.shape[1], *size, generator=torch.Generator().manual_seed(0)).to(kernel)
            self._top, self._change = (self._powers(kernel, v, COLD_STEPS)[0] for v in start.split(1))
            self._seen, self._room, self._level = kernel, kernel.new_zeros(()), kernel.new_full((), math.inf)
        else:
            self._change, _ = self._powers(kernel - self._seen, self._change)
        # One vector at a time: torch is slower for two small images together.
        (top, length), (other, second) = (self._powers(kernel, v) for v in (self._top, self._change))
        self._top = torch.where(length >= second, top, other)
        return torch.maximum(length, second).sqrt()

    def _powers(self, kernel: Tensor, v: Tensor, steps: int = 1) -> tuple[Tensor, Tensor]:
        """(TᵀTv/‖TᵀTv‖, ‖TᵀTv‖) of the last of some power steps; a small constant vector where that is 0/0, or overflows."""
        for _ in range(steps):
            image = self._normal(kernel, v)
            length = torch.linalg.vector_norm(image)
            v = (image / length).nan_to_num(SMALL, SMALL, SMALL)
        return v, length

    def forget(self) -> None:
        """Drop what the constraint remembers of earlier weights; the next call starts afresh."""
        self._guard = self._seen = None

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return answer if answer is not None else (math.inf if self.c is None else bounds.lip_conv(self.c))

    def extra_repr(self) -> str:
        cout, cin, k, _ = self.weight.shape
        return f"{cin}→{cout}, {k}x{k}, stride={self.stride}, c={self.c}, size={self.size}"


class _Norm(nn.Module):
    """What GN and MGN share: groups of channels, optional per-channel γ and β, the clip |γ| ≤ γ̄."""

    def __init__(self, groups: int, channels: int, affine: bool = True, gamma: float | None = None):
        super().__init__()
        if groups < 1 or channels % groups:
            raise ValueError(f"channels = {channels}: must be divisible by groups = {groups}")
        self.groups, self.channels, self.gamma = groups, channels, gamma
        fixed = 1.0 if gamma is None else min(1.0, gamma)
        start = torch.full((channels,), fixed)
        self.weight = nn.Parameter(start) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        self.fixed = fixed

    @torch.no_grad()
    def constrain(self) -> None:
        """Clip |γ| to γ̄ (when there is a γ̄)."""
        if self.weight is not None and self.gamma is not None:
            self.weight.clamp_(-self.gamma, self.gamma)

    def scale(self) -> Tensor | float:
        weight = self.weight
        return self.fixed if weight is None else weight

    def max_scale(self) -> float:
        """max_c |γ_c| of the live weight: γ acts per channel, so the largest one counts."""
        return self.fixed if self.weight is None else float(self.weight.detach().abs().max())

    def extra_repr(self) -> str:
        return f"{self.groups} groups, {self.channels} channels, affine={self.weight is not None}, gamma={self.gamma}"


class GN(_Norm):
    """Group normalisation (Lemma ``lem:gn``): constant max|γ_c|/√ε, reached where a group is constant.

    Without affine parameters the scale is min(1, γ̄), as in :class:`MGN`.
    """

    eps = 1e-5

    def forward(self, y: Tensor) -> Tensor:
        out = F.group_norm(y, self.groups, self.weight, self.bias, self.eps)
        return out if self.weight is not None or self.fixed == 1.0 else self.fixed * out

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        if answer is not None:
            return answer
        if self.weight is None:
            return bounds.lip_gn(self.fixed, self.eps)
        return math.inf if self.gamma is None else bounds.lip_gn(self.gamma, self.eps)


class MGN(_Norm):
    """Mean-only group normalisation γ(z − μ) + β (Lemma ``lem:mgn``): constant max|γ_c|.

    Without affine parameters the scale is min(1, γ̄), so that L_MGN ≤ γ̄ holds for every norm of the model.
    """

    def affine(self, total: Tensor, pixels: float) -> tuple[Tensor | float, Tensor]:
        """(s, b) with MGN(y) = s·y + b, from the sums of the channels over the map of H·W pixels, (B, C)."""
        s, groups, shape = self.scale(), self.groups, total.shape
        # mu is a sum over the group: the division joins the product
        part = -1.0 / (pixels * (self.channels // groups))
        mu = total.view(shape[0], groups, -1).sum(2, keepdim=True)
        if torch.compiler.is_compiling():
            return s, self._spread(mu.squeeze(2), s * part)
        if not isinstance(s, Tensor):
            return s, (s * part * mu).expand(-1, -1, self.channels // groups).reshape(shape)
        return s, torch.addcmul(self.bias.view(groups, -1), mu, s.view(groups, -1), value=part).view(shape)

    def _spread(self, mu: Tensor, s: Tensor | float) -> Tensor:
        """bias + s·mu for every channel, as a product of matrices: (B, G), (C,) → (B, C).

        The compiler gives a product a kernel of its own. What it fuses instead into the loop over the map it computes again
        for every pixel, and there the index of the group keeps it from vector instructions.
        """
        out = mu.dtype if self.weight is None else torch.promote_types(mu.dtype, self.weight.dtype)
        # Autocast leaves doubles alone, also in the gradient.
        work = torch.float64 if torch.is_autocast_enabled(mu.device.type) else out
        member = torch.eye(self.groups, dtype=out, device=mu.device)
        member = (member.repeat_interleave(self.channels // self.groups, 1) * s).to(work)
        if self.weight is None:
            return (mu.to(work) @ member).to(out)
        return torch.addmm(self.bias.to(work), mu.to(work), member).to(out)

    def forward(self, y: Tensor) -> Tensor:
        return normed(self, y, own=False)

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        if answer is not None:
            return answer
        if self.weight is None:
            return bounds.lip_mgn(self.fixed)
        return math.inf if self.gamma is None else bounds.lip_mgn(self.gamma)


def spatial_sum(y: Tensor) -> tuple[Tensor, int]:
    """Sum over the map, (B, C, H, W) → (B, C), and its number of pixels.

    In a solve, pooling reads a wide map once in the order of memory; `sum` takes it in strips of channels.
    """
    b, c, h, w = y.shape
    wide = c >= 128 and y.dtype == torch.float32 and y.device.type == "cpu" and into(y) is not None
    if wide and y.is_contiguous(memory_format=torch.channels_last):
        return F.avg_pool2d(y, (h, w), divisor_override=1).view(b, c), h * w
    return y.sum((2, 3)), h * w


def add_scaled(acc: Tensor, y: Tensor, s: Tensor | float, k: float = 1.0, own: bool = True) -> Tensor:
    """acc + k·s·y in one pass, in a solve over y if it is ours; s per channel (C,) or a number."""
    if isinstance(s, Tensor):
        return torch.addcmul(acc, y, per_channel(s), value=k, out=into(y, own))
    return torch.add(acc, y, alpha=k * s, out=into(y, own))


def normed(norm: _Norm, y: Tensor, k: float = 1.0, own: bool = True) -> Tensor:
    """norm(k·y), in a solve over y if it is ours."""
    if isinstance(norm, MGN):
        total, pixels = spatial_sum(y)
        s, b = norm.affine(total, pixels / k)
        return add_scaled(per_channel(b), y, s, k, own)
    return norm(y if k == 1.0 else y * k)


def norm_act(norm: _Norm, y: Tensor, a: float, k: float = 1.0) -> tuple[Tensor, float]:
    """SReLU(norm(k·y)) as (tensor, factor): max(0, a·t) = a·max(0, t)."""
    return normed(norm, y, k).relu_(), a


class SReLU(nn.Module):
    """max(0, a·z) (Lemma ``lem:srelu``; a = 1 is ReLU, Lemma ``lem:relu``): constant a."""

    def __init__(self, a: float = 1.0):
        super().__init__()
        bounds.lip_srelu(a)  # refuses a slope outside (0, 1]
        self.a = a

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(z) if self.a == 1.0 else F.relu(self.a * z)

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return answer if answer is not None else bounds.lip_srelu(self.a)


class VariationalDropout(nn.Module):
    """One mask for each sample and channel, drawn once and held through all iterations (Lemma ``lem:drop``).

    The mask is a value that the caller keeps (``draw``), not state of the module: both solves see the same
    one, and several forward passes may wait for one backward pass.
    """

    def __init__(self, p: float = 0.0):
        super().__init__()
        bounds.lip_dropout(p)  # refuses a p outside [0, 1)
        self.p = p

    def draw(self, batch: int, channels: int, like: Tensor) -> Tensor | None:
        """Mask m/(1−p), (B, C), m ~ Bernoulli(1−p); None when dropout is off."""
        if not self.training or self.p == 0.0:
            return None
        return torch.empty(batch, channels, device=like.device, dtype=like.dtype).bernoulli_(1 - self.p) / (1 - self.p)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        return z if mask is None else z * per_channel(mask)

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return answer if answer is not None else (bounds.lip_dropout(self.p) if train else 1.0)


class Up(nn.Module):
    """Nearest-neighbour up-sampling by s in both directions (Lemma ``lem:up``): constant √(s·s) = s, attained
    everywhere.
    """

    def __init__(self, scale: int):
        super().__init__()
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:
        return F.interpolate(z, scale_factor=self.scale, mode="nearest")

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return answer if answer is not None else bounds.lip_up(self.scale, self.scale)


def add_up2(z: Tensor, low: Tensor, weight: float = 1.0, own: bool = True) -> Tensor:
    """z + weight·Up_2(low) without storing the up-sampled map; (B, C, H, W) and (B, C, H/2, W/2). In a solve over z if
    it is ours.

    In ``channels_last`` with few channels the columns of low are doubled by a concatenation of channels; two rows of z then
    lie behind each row of it, and the addition runs over whole rows (its inner loops are long, also in the gradient).
    """
    b, c, h, w = z.shape
    rows = z.permute(0, 2, 3, 1)
    if not rows.is_contiguous() or (c >= 32 and into(z) is not None):
        blocks = z.view(b, c, h // 2, 2, w // 2, 2)
        low = low[:, :, :, None, :, None]
        return torch.add(blocks, low, alpha=weight, out=into(blocks, own)).view(b, c, h, w)
    rows = rows.view(b, h // 2, 2, w * c)
    low = torch.cat((low, low), 1).permute(0, 2, 3, 1).reshape(b, h // 2, 1, w * c)
    return torch.add(rows, low, alpha=weight, out=into(rows, own)).view(b, h, w, c).permute(0, 3, 1, 2)


class Chain(nn.Sequential):
    """Composition: the constants multiply (Lemma 3.1)."""

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return answer if answer is not None else bounds.lip_compose(*(m.lipschitz(leaf, train) for m in self))


class ConvNorm(Chain):
    """norm ∘ conv, the pair from which all paths between branches are made."""

    def __init__(self, conv: Conv, norm: _Norm):
        super().__init__(conv, norm)

    @property
    def conv(self) -> Conv:
        return self[0]

    @property
    def norm(self) -> _Norm:
        return self[1]

    def add_to(
        self, acc: Tensor, floor: Tensor | None, x: Tensor, w: float, k: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """(acc, floor) with w·norm(conv(k·x)) added to acc − floor; the shifts per channel are carried apart in floor, (B, C),
        to save a pass (None: zero).
        """
        y = self.conv(x)
        if not isinstance(self.norm, MGN):
            return torch.add(acc, normed(self.norm, y, k), alpha=w), floor
        total, pixels = spatial_sum(y)
        s, b = self.norm.affine(total, pixels / k)
        floor = -w * b if floor is None else torch.sub(floor, b, alpha=w)
        return add_scaled(acc, y, s, w * k), floor


class DownPath(nn.Module):
    """D_ij: i−j times conv3x3 stride 2 · norm, an activation after each but the last."""

    def __init__(self, pairs: Sequence[ConvNorm], a: float):
        super().__init__()
        self.pairs, self.act = nn.ModuleList(pairs), SReLU(a)

    def head(self, x: Tensor) -> tuple[Tensor, float]:
        """All but the last pair, as (tensor, factor)."""
        k = 1.0
        for pair in self.pairs[:-1]:
            x, k = norm_act(pair.norm, pair.conv(x), self.act.a, k)
        return x, k

    def forward(self, x: Tensor) -> Tensor:
        x, k = self.head(x)
        return normed(self.pairs[-1].norm, self.pairs[-1].conv(x), k)

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        if answer is not None:
            return answer
        act = self.act.lipschitz(leaf, train) ** (len(self.pairs) - 1)
        return bounds.lip_compose(act, *(pair.lipschitz(leaf, train) for pair in self.pairs))


class UpPath(nn.Module):
    """U_ij: conv1x1 · norm · nearest up-sampling by 2^(j−i). The text counts the up-sampling only; all three
    count here.
    """

    def __init__(self, pair: ConvNorm, level_diff: int):
        super().__init__()
        self.pair, self.up = pair, Up(2**level_diff)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.pair(x))

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True) -> float:
        answer = leaf(self)
        return (
            answer
            if answer is not None
            else bounds.lip_compose(self.pair.lipschitz(leaf, train), self.up.lipschitz(leaf, train))
        )
