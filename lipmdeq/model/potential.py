"""A fixed-point map that is τ-Lipschitz for all weights, with τ the one knob: ``block: potential``.

On the branches z = [z_1, …, z_n], with the injected images u = [u_1, …, u_n]:

    ẑ_i = z_i − (2/T_i)·K_iᵀσ(K_i z_i + b_i + u_i)          residual layer, 1-Lipschitz   (P1)
    f_i = Σ_j M_ij P_ij(ẑ_j),  P_ij 1-Lipschitz              fusion, M ≥ 0, ‖M‖₂ = τ       (P2)

with P_ii the identity. So ‖f(z) − f(z')‖ ≤ ‖M‖₂‖z − z'‖ = τ‖z − z'‖ in the plain norm, in training and in test. Nothing is
projected and nothing is remembered between steps: every layer divides by a bound on its own norm that holds for any
weights and any image size. The bound is on ∂f/∂z only, so the image may enter every branch through any network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.model import fused, reference
from lipmdeq.model.blocks import read
from lipmdeq.model.layers import Layer, Leaf, VariationalDropout, no_answer, path_name, per_channel

if TYPE_CHECKING:
    from lipmdeq.model.config import ModelConfig

SQUARINGS = 8  # of Gram's matrix: the bound on an n x n norm is at most n^(1/1024) too large, 0.6 % for n = 512
ROUNDING = 1e-4  # what rounding in single precision may take from a bound, generously


def matrix_norm_bound(w: Tensor) -> Tensor:
    """An upper bound on the spectral norm of a matrix (m, k) that can be differentiated; tight to n^(1/1024), n = min(m, k)."""
    return norm_bounds([w])[0]


def norm_bounds(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The bounds of :func:`matrix_norm_bound` for several matrices, those with equal smaller sides in one batch.

    With G = W Wᵀ and p = 2^8, λ_max(G)^p = λ_max(G^p) ≤ ‖G^p‖_F ≤ √n·λ_max(G)^p, and G^p takes 8 squarings. Every
    third one is divided by its Frobenius norm, so that nothing overflows; the logarithms of these are summed.
    """
    grams = [w @ w.mT if w.shape[0] <= w.shape[1] else w.mT @ w for w in matrices]
    places: dict[int, list[int]] = {}
    for i, gram in enumerate(grams):
        places.setdefault(len(gram), []).append(i)
    found: list[Tensor] = [None] * len(grams)
    for where in places.values():
        gram, log = torch.stack([grams[i] for i in where]), 0.0
        for k in range(SQUARINGS + 1):
            if k % 3 == 0 or k == SQUARINGS:  # after three squarings λ_max is still at least n^(−4)
                size = torch.linalg.vector_norm(gram, dim=(1, 2)).clamp_min(torch.finfo(gram.dtype).tiny)
                gram, log = gram / size[:, None, None], log + size.log() / 2**k
            if k < SQUARINGS:
                gram = gram @ gram
        for i, bound in zip(where, (log / 2).exp(), strict=True):
            found[i] = bound
    return found


def scaled_bounds(weights: Sequence[Tensor]) -> list[Tensor]:
    """Bounds on the norms of kernels (C_out, C_in, k, k) as C_out × C_in·k² matrices, of any scale, with room for rounding."""
    tiny = torch.finfo(weights[0].dtype).tiny
    sizes = [w.detach().abs().amax().clamp_min(tiny) for w in weights]  # so that no square over- or underflows
    found = norm_bounds([(w / s).flatten(1) for w, s in zip(weights, sizes, strict=True)])
    return [(s * (1 + ROUNDING) * b).clamp_min(tiny) for s, b in zip(sizes, found, strict=True)]


class UnitConv(Layer):
    """A convolution divided by a bound on its norm, with a bias: 1-Lipschitz for all weights and image sizes.

    Kernel and stride are equal (1x1, or 2x2 with stride 2), so windows do not overlap and the norm of the operator is that of
    the kernel as a C_out × C_in·k² matrix.
    """

    def __init__(self, cin: int, cout: int, k: int, size: tuple[int, int]):
        super().__init__()
        self.stride, self.padding, self.size = k, 0, tuple(size)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(cout, cin * k * k)).view(cout, cin, k, k))
        self.bias = nn.Parameter(torch.zeros(cout))

    def matrix(self) -> Tensor:
        """The weight whose norm as a matrix bounds that of the operator."""
        return self.weight

    def kernel(self, bound: Tensor | None = None) -> Tensor:
        """The weight in use, (C_out, C_in, k, k): of norm at most 1."""
        return self.weight / (scaled_bounds([self.matrix()])[0] if bound is None else bound)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), self.bias, stride=self.stride)

    def constant(self, leaf: Leaf, train: bool) -> float:
        return 1.0

    def extra_repr(self) -> str:
        cout, cin, k, _ = self.weight.shape
        return f"{cin}→{cout}, {k}x{k}, stride={self.stride}, size={self.size}"


class Potential(Layer):
    """(P1): h(z) = z − (2/T)·Kᵀσ(Kz + b + u), K a 3x3 convolution to E·C channels, σ = ReLU, T ≥ ‖K‖². 1-Lipschitz in z.

    T = 9‖R‖², R the kernel of Kᵀ as a C × 9·E·C matrix: a pixel lies in at most nine windows, so ‖Kᵀy‖² ≤ ‖R‖²·Σ‖window‖²
    ≤ 9‖R‖²‖y‖², on maps of any size. Constant kernels on large maps reach it.

    Proof of the constant. With A = K/√T, the derivative (almost everywhere) is J = I − 2AᵀSA with a diagonal 0 ≤ S ≤ I: slopes
    of the ReLU, and zeros where dropout removes a unit. ‖A‖ ≤ 1 gives 0 ≼ AᵀSA ≼ AᵀA ≼ I, hence −I ≼ J ≼ I. J is symmetric
    (h is the gradient of a potential), so ‖J‖₂ ≤ 1. If all that is known is ‖A‖² ≤ s, then ‖J‖₂ ≤ max(1, 2s − 1).
    """

    def __init__(self, channels: int, expansion: int, p: float, size: tuple[int, int]):
        super().__init__()
        wide = expansion * channels
        self.stride, self.padding, self.size = 1, 1, tuple(size)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(wide, channels * 9)).view(wide, channels, 3, 3))
        self.bias = nn.Parameter(torch.zeros(wide))
        self.drop = VariationalDropout(p)

    def matrix(self) -> Tensor:
        """The kernel of Kᵀ, (C, E·C, 3, 3), but for the order of its taps: R as a matrix."""
        return self.weight.transpose(0, 1)

    def T(self, bound: Tensor | None = None) -> Tensor:
        """T ≥ ‖K‖², a number."""
        bound = scaled_bounds([self.matrix()])[0] if bound is None else bound
        return (9 * bound.square()).clamp_min(1e-12)

    def kernel(self) -> Tensor:
        """A = K/√T, of norm at most 1: what the certificate proves anew."""
        return self.weight / self.T().sqrt()

    def forward(self, z: Tensor, u: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return reference.potential(self, z, u, mask)

    def pair(self, T: Tensor) -> tuple[Tensor, Tensor]:
        """K and 2Kᵀ/T as kernels of convolutions with padding 1; in test mode dropout scales the second one by 1 − p.

        K as a view: :func:`lipmdeq.solvers.deq` wants inputs that do not depend on one another, and the second kernel
        depends on the weight.
        """
        keep = 1.0 if self.training else 1 - self.drop.p
        return self.weight.view_as(self.weight), (2 * keep / T * self.weight).transpose(0, 1).flip(2, 3)

    def shift(self, u: Tensor | None) -> Tensor:
        """b + u, (B, E·C, H, W) or (E·C, 1, 1) without an injection."""
        return per_channel(self.bias) if u is None else u + per_channel(self.bias)

    def constant(self, leaf: Leaf, train: bool) -> float:
        return 1.0


@dataclass(frozen=True)
class Held:
    """What stays the same through both solves of one batch: normalised kernels, injected images, masks."""

    blocks: list[tuple[Tensor, Tensor, Tensor]]  # K, 2Kᵀ/T, b + u of each branch
    masks: list[Tensor | None]
    own: list[Tensor]  # M_ii
    paths: dict[tuple[int, int], list[tuple[Tensor, Tensor]]]  # kernels and biases; M_ij is in the last ones

    def tensors(self) -> list[Tensor]:
        """All that f depends on besides z, for :func:`lipmdeq.solvers.deq`."""
        pairs = [pair for path in self.paths.values() for pair in path]
        return [t for group in (*self.blocks, *pairs, self.own) for t in group]


class PotentialMap(nn.Module):
    """f of the certified family, (P1)–(P2): ``lipschitz`` is τ, for all weights.

    Down paths are i − j times a 2x2 convolution with stride 2, ReLU between them; up paths a 1x1 convolution and nearest
    up-sampling divided by 2^(j−i), the norm of up-sampling. M = τ·M'/‖M'‖₂ with M' = (1−α2)I + α2·softmax(weights), rows
    without their diagonal.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n, self.tau, self.alpha = cfg.n, cfg.tau, cfg.alpha2
        ch, sizes = cfg.channels, cfg.sizes()
        self.residual = nn.ModuleList(Potential(c, cfg.expansion, cfg.p, s) for c, s in zip(ch, sizes, strict=True))
        self.paths = nn.ModuleDict()
        for i, j in self.pairs():
            if j > i:
                convs = [UnitConv(ch[j], ch[i], 1, sizes[j])]
            else:
                convs = [UnitConv(ch[j], ch[i] if s == i - 1 else ch[j], 2, sizes[s]) for s in range(j, i)]
            self.paths[path_name(i, j)] = nn.ModuleList(convs)
        self.weights = nn.Parameter(torch.zeros(self.n, self.n))

    def pairs(self) -> list[tuple[int, int]]:
        """All (i, j) with a path from branch j to another branch i."""
        return [(i, j) for i in range(self.n) for j in range(self.n) if i != j]

    def path(self, i: int, j: int) -> nn.ModuleList:
        """The convolutions of P_ij, from branch j to branch i."""
        return self.paths[path_name(i, j)]

    def mixing(self) -> Tensor:
        """M, (n, n): nonnegative, of spectral norm τ."""
        if self.n == 1:
            return self.weights * 0 + self.tau
        eye = torch.eye(self.n, dtype=self.weights.dtype, device=self.weights.device)
        share = torch.softmax(self.weights.masked_fill(eye.bool(), -torch.inf), 1)
        mix = (1 - self.alpha) * eye + self.alpha * share
        return self.tau / (matrix_norm_bound(mix) * (1 + ROUNDING)) * mix

    def hold(self, u: Sequence[Tensor | None]) -> Held:
        """Everything that is computed once for a batch: u_i (B, E·C_i, H_i, W_i), or None for a branch without injection."""
        m = self.mixing()
        convs = [c for path in self.paths.values() for c in path]
        found = scaled_bounds([layer.matrix() for layer in (*self.residual, *convs)])
        bound = dict(zip((*self.residual, *convs), found, strict=True))
        paths = {}
        for i, j in self.pairs():
            *first, last = [(c.kernel(bound[c]), c.bias) for c in self.path(i, j)]
            w = m[i, j] * 2.0 ** min(0, i - j)
            paths[i, j] = [*first, tuple(w * t for t in last)]
        return Held(
            blocks=[(*b.pair(b.T(bound[b])), b.shift(ui)) for b, ui in zip(self.residual, u, strict=True)],
            masks=self.masks(next(t for t in u if t is not None)),
            own=[m[i, i] for i in range(self.n)],
            paths=paths,
        )

    def masks(self, like: Tensor) -> list[Tensor | None]:
        """Dropout masks of zeros and ones, (B, E·C_i), for one forward pass; None where dropout is off."""
        drawn = [b.drop.draw(like.shape[0], len(b.bias), like) for b in self.residual]
        return [None if m is None else (m > 0).to(m.dtype) for m in drawn]

    def inputs(self, u: Sequence[Tensor | None], held: Held) -> list[Tensor]:
        """All that f depends on besides z, for :func:`lipmdeq.solvers.deq`."""
        return held.tensors()

    def forward(self, z: Sequence[Tensor], u: Sequence[Tensor | None], held: Held | None = None) -> list[Tensor]:
        return fused.certified(z, held or self.hold(u))

    def hidden(self, z: Sequence[Tensor], u: Sequence[Tensor | None]) -> list[Tensor]:
        """Which hidden units of the residual layers are on at z: booleans (B, E·C_i, H_i, W_i)."""
        rows = zip(self.residual, z, u, strict=True)
        return [F.conv2d(zi, b.weight, padding=1) + b.shift(ui) > 0 for b, zi, ui in rows]

    def matrix(self, leaf: Leaf = no_answer, train: bool = True) -> np.ndarray:
        """Comparison matrix N_ij = M_ij·‖P_ij‖·L_j: ‖f(z)_i − f(z')_i‖ ≤ Σ_j N_ij‖z_j − z'_j‖."""
        hat = np.array([block.lipschitz(leaf, train) for block in self.residual])
        m = self.mixing().detach().double().cpu().numpy()
        path = np.eye(self.n)
        for i, j in self.pairs():
            path[i, j] = bounds.lip_compose(*(c.lipschitz(leaf, train) for c in self.path(i, j)))
        return m * path * hat[None, :]

    def lipschitz(self, leaf: Leaf = no_answer, train: bool = True, reading: str = "spectral") -> float:
        """L from the module tree: ``reading`` as in :func:`lipmdeq.model.read`."""
        return read(self.matrix(leaf, train), reading)

    def constrain(self, prove: bool = True) -> float:
        """Nothing to do: the bound holds for all weights."""
        return 0.0
