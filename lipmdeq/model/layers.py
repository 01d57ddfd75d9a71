"""The layers of f: each ``forward`` is the plain formula, and each layer knows its own Lipschitz constant.

Every module has ``lipschitz(leaf, train)``. A leaf (convolution, norm, activation, dropout, up-sampling) answers with its
constant; a container composes the answers of its children by Lemma 3.1 and nothing else, so the constant of the whole map comes
from the module tree. ``leaf(module)`` may answer first: the certificate uses this to put the proved norm of the live weight in
the place of the worst case that the specification allows. ``None`` means "no answer".

Tensors are (B, C, H, W), best in ``channels_last``. No layer writes into its input, in any mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.norms.guard import NormGuard, factors

MARGIN = 0.04  # what estimated norms stay below c: a warm power step lags behind weights that move
COLD_STEPS = 20  # power steps from random vectors
SMALL = 1e-6  # entries of a vector that starts anew: shorter than a unit vector, so estimates stay below the norm
Leaf = Callable[[nn.Module], float | None]
Size = tuple[int, int]
Maps = Sequence[Tensor | None]  # one for each branch


def path_name(i: int, j: int) -> str:
    """Name of the path from branch j to branch i, counted from 1 as in the paper."""
    return f"{j + 1}to{i + 1}"


def per_channel(v: Tensor) -> Tensor:
    """(…, C) → (…, C, 1, 1): a number for each channel, to meet a map."""
    return v.view(*v.shape, 1, 1)


class Layer(nn.Module):
    """A module with a Lipschitz constant; ``constant`` says what holds when ``leaf`` does not answer: for a composition of
    the children their product (Lemma 3.1)."""

    def lipschitz(self, leaf: Leaf | None = None, train: bool = True) -> float:
        answer = None if leaf is None else leaf(self)
        return self.constant(leaf, train) if answer is None else answer

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        return bounds.lip_compose(*(m.lipschitz(leaf, train) for m in self._modules.values()))


class Conv(Layer):
    """Bias-free convolution, ‖W‖₂ ≤ c when c is given (Conv*, Lemma ``lem:conv``).

    The constraint acts on the operator (real map size, zero padding, stride) and on the weight that the forward pass uses: with
    weight normalisation W = g·v/‖v‖ the projection shrinks g, so the next forward pass cannot undo it.

    Args:
        cin, cout, k, stride: the usual sizes; padding is (k − 1)/2. c: bound on the operator norm, None for a free one.
        size: (H, W) of the input map, on which the norm is meant. weight_norm: W by length and direction of each output channel.
    """

    def __init__(
        self, cin: int, cout: int, k=3, stride=1, c: float | None = None, size: Size = (8, 8), weight_norm=False
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
        v = self.weight if self.weight.dtype.itemsize > 2 else self.weight.float()  # g/‖v‖ may be too small for a half
        return (v * (self.g / v.flatten(1).norm(dim=1).clamp_min(1e-12))[:, None, None, None]).to(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), stride=self.stride, padding=self.padding)

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        return math.inf if self.c is None else bounds.lip_conv(self.c)

    def forget(self) -> None:
        """Drop what the constraint remembers of earlier weights; the next call starts afresh."""
        self._guard = NormGuard(self.size, stride=self.stride, padding=self.padding)  # who proves ‖W‖ ≤ c
        self._seen, self._due = None, False

    def constrain(self, prove: bool = True) -> float:
        """Bring the operator norm of the weight in use to at most c, as :func:`constrain` does for many layers."""
        return constrain([self], prove)

    def scale(self, factor: Tensor | float) -> None:
        (self.weight if self.g is None else self.g).mul_(factor)

    def hold(self, prove: bool) -> None:
        """Scale the weight if its estimated norm exceeds (1 − MARGIN)·c; before a proof only what is held so already."""
        if self._guard.size != self.size:  # the norm is meant on other maps now
            self.forget()
        if not prove or self._seen is not None:  # a layer that is held by estimates shows the proof what they do,
            self._due = self._due and not prove  # and the weaker ones at that
            norm = self.estimate().nan_to_num(0.0, 0.0).clamp_min(1e-30)  # squares overflow: left to the next proof
            self.scale(((1 - MARGIN) * self.c / norm).clamp(max=1.0))
            self._seen = self.kernel().detach().clone()

    def estimate(self) -> Tensor:
        """A lower estimate of the operator norm: √‖TᵀTv‖ of a unit vector v, (C_in, H, W), that this power step improves.

        A step of Adam can raise the norm by a third in a direction that v does not know. So another vector follows the direction
        in which the last change of the kernel is largest, by a power step at every second call (changes resemble one another); it
        takes the place of v where T makes it longer. At first both are random and take COLD_STEPS steps. The norm of a 1x1
        convolution is that on one pixel.
        """
        kernel = self.kernel().detach()
        cold = self._seen is None or (self._seen.device, self._seen.dtype) != (kernel.device, kernel.dtype)
        if cold:
            size = self.size if kernel.shape[-1] > 1 else (1, 1)
            start = torch.randn(2, kernel.shape[1], *size, generator=torch.Generator().manual_seed(0)).to(kernel)
            self._top, self._change = start.split(1)
            for _ in range(COLD_STEPS):
                (self._top, _), (self._change, _) = (self._power(kernel, v) for v in (self._top, self._change))
            self._seen = kernel
        elif self._due:
            self._change, _ = self._power(kernel - self._seen, self._change)
        self._top, length = self._power(kernel, self._top, self._change)
        self._due = cold or not self._due
        return length.sqrt()

    def _power(self, kernel: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        """(TᵀTv/‖TᵀTv‖, ‖TᵀTv‖) of the vector v that T makes longest; a small constant one where that is 0/0, or overflows."""
        y, *others = (F.conv2d(v, kernel, stride=self.stride, padding=self.padding) for v in vectors)
        for other in others:
            y = torch.where(torch.linalg.vector_norm(other) > torch.linalg.vector_norm(y), other, y)
        left = [(s + 2 * self.padding - kernel.shape[-1]) % self.stride for s in vectors[0].shape[2:]]
        image = F.conv_transpose2d(y, kernel, stride=self.stride, padding=self.padding, output_padding=left)
        length = torch.linalg.vector_norm(image)
        return (image / length).nan_to_num(SMALL, SMALL, SMALL), length


@torch.no_grad()
def constrain(modules: Iterable[nn.Module], prove: bool = True) -> float:
    """|γ| ≤ γ̄ and ‖W‖ ≤ c for the weights in use, changing as little as possible.

    Without ``prove`` a weight whose *estimated* norm exceeds (1 − MARGIN)·c is scaled to that, and 0 is returned: the estimate is
    always too small, but rarely by more than the margin. It costs what two images cost, and a GPU is not waited for. With
    ``prove`` norms are also proved to be at most c; a GPU is waited for once, at most three times where layers are in doubt.
    Returns the largest bound that was found before, over c (at most 1: nothing was changed).
    """
    held = []
    for m in modules:
        if isinstance(m, _Norm):
            m.constrain()
        elif isinstance(m, Conv) and m.c is not None:
            held.append(m)
            m.hold(prove)
    if not prove or not held:
        return 0.0
    for layer, factor in zip(held, factors((m._guard, m.kernel(), m.c) for m in held), strict=True):
        if factor < 1.0:
            layer.scale(factor)
    return max(layer._guard.found / layer.c for layer in held)


class _Norm(Layer):
    """What GN and MGN share: groups of channels, optional γ and β for each channel, the clip |γ| ≤ γ̄, and ``bound(gamma)``, the
    constant for |γ_c| ≤ gamma. Without γ and β the scale is min(1, γ̄), so that max|γ| ≤ γ̄ holds for every norm of the model.
    """

    def __init__(self, groups: int, channels: int, affine: bool = True, gamma: float | None = None):
        super().__init__()
        if groups < 1 or channels % groups:
            raise ValueError(f"channels = {channels}: must be divisible by groups = {groups}")
        self.groups, self.channels, self.gamma = groups, channels, gamma
        self.fixed = 1.0 if gamma is None else min(1.0, gamma)
        self.weight = nn.Parameter(torch.full((channels,), self.fixed)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    @torch.no_grad()
    def constrain(self) -> None:
        """Clip |γ| to γ̄ (when there is a γ̄)."""
        if self.weight is not None and self.gamma is not None:
            self.weight.clamp_(-self.gamma, self.gamma)

    def scale(self) -> Tensor | float:
        """γ, (C,), or the fixed number in its place."""
        return self.fixed if self.weight is None else self.weight

    def max_scale(self) -> float:
        """max_c |γ_c| of the live weight: γ acts per channel, so the largest one counts."""
        return self.fixed if self.weight is None else float(self.weight.detach().abs().max())

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        limit = self.fixed if self.weight is None else self.gamma  # the largest |γ_c| that the specification allows
        return math.inf if limit is None else self.bound(limit)


class GN(_Norm):
    """Group normalisation γ(y − μ)/√(σ² + ε) + β (Lemma ``lem:gn``): constant max|γ_c|/√ε, reached where a group is constant."""

    eps = 1e-5

    def forward(self, y: Tensor) -> Tensor:
        out = F.group_norm(y, self.groups, self.weight, self.bias, self.eps)
        return out if self.weight is not None or self.fixed == 1.0 else self.fixed * out

    def bound(self, gamma: float) -> float:
        return bounds.lip_gn(gamma, self.eps)


class MGN(_Norm):
    """Mean-only group normalisation γ(y − μ) + β (Lemma ``lem:mgn``): constant max|γ_c|."""

    def forward(self, y: Tensor) -> Tensor:
        groups = y.unflatten(1, (self.groups, -1))  # (B, G, C/G, H, W)
        centred = (groups - groups.mean((2, 3, 4), keepdim=True)).flatten(1, 2)
        if self.weight is None:
            return self.fixed * centred
        return per_channel(self.weight) * centred + per_channel(self.bias)

    def bound(self, gamma: float) -> float:
        return bounds.lip_mgn(gamma)


class SReLU(Layer):
    """max(0, a·z) (Lemma ``lem:srelu``; a = 1 is ReLU, Lemma ``lem:relu``): constant a."""

    def __init__(self, a: float = 1.0):
        super().__init__()
        bounds.lip_srelu(a)  # refuses a slope outside (0, 1]
        self.a = a

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(self.a * z)

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        return bounds.lip_srelu(self.a)


class VariationalDropout(Layer):
    """One mask for each sample and channel, drawn once and held through all iterations (Lemma ``lem:drop``).

    The mask is a value that the caller keeps (``draw``), not state of the module: both solves see the same one, and several
    forward passes may wait for one backward pass.
    """

    def __init__(self, p: float = 0.0):
        super().__init__()
        bounds.lip_dropout(p)  # refuses a p outside [0, 1)
        self.p = p

    def draw(self, batch: int, channels: int, like: Tensor) -> Tensor | None:
        """Mask m/(1−p), (B, C), m ~ Bernoulli(1−p); None when dropout is off."""
        if not self.training or self.p == 0.0:
            return None
        return like.new_empty(batch, channels).bernoulli_(1 - self.p) / (1 - self.p)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        return z if mask is None else per_channel(mask) * z

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        return bounds.lip_dropout(self.p) if train else 1.0


class Up(Layer):
    """Nearest-neighbour up-sampling by s in both directions (Lemma ``lem:up``): constant √(s·s) = s, attained everywhere."""

    def __init__(self, scale: int):
        super().__init__()
        self.scale = scale

    def forward(self, z: Tensor) -> Tensor:
        return F.interpolate(z, scale_factor=self.scale, mode="nearest")

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        return bounds.lip_up(self.scale, self.scale)


class Chain(Layer, nn.Sequential):
    """Composition: the constants multiply (Lemma 3.1)."""


class ConvNorm(Chain):
    """norm ∘ conv, the pair from which all paths between branches are made."""

    conv = property(lambda self: self[0])
    norm = property(lambda self: self[1])


class DownPath(Layer):
    """D_ij: i−j times conv3x3 stride 2 · norm, an activation after each but the last."""

    def __init__(self, pairs: Sequence[ConvNorm], a: float):
        super().__init__()
        self.pairs, self.act = nn.ModuleList(pairs), SReLU(a)

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs[:-1]:
            x = self.act(pair(x))
        return self.pairs[-1](x)

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        act = self.act.lipschitz(leaf, train) ** (len(self.pairs) - 1)
        return bounds.lip_compose(act, *(pair.lipschitz(leaf, train) for pair in self.pairs))


class UpPath(Layer):
    """U_ij: conv1x1 · norm · nearest up-sampling by 2^(j−i). The text counts the up-sampling only; all three count here."""

    def __init__(self, pair: ConvNorm, level_diff: int):
        super().__init__()
        self.pair, self.up = pair, Up(2**level_diff)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.pair(x))
