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
from itertools import permutations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.model import fused, reference
from lipmdeq.model.blocks import BranchMap
from lipmdeq.model.config import ModelConfig
from lipmdeq.model.layers import Layer, Leaf, Maps, Size, VariationalDropout, path_name, per_channel

SQUARINGS = 8  # of Gram's matrix: the bound on an n x n norm is at most n^(1/1024) too large, 0.6 % for n = 512
ROUNDING = 1e-4  # what rounding in single precision may take from a bound, generously


def norm_bounds(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Upper bounds on the spectral norms of matrices of any scale, those with equal smaller sides n in one batch.

    With G = W Wᵀ and q = 2^8, λ_max(G)^q = λ_max(G^q) ≤ ‖G^q‖_F ≤ √n·λ_max(G)^q, and G^q takes 8 squarings. Every third one is
    divided by its Frobenius norm, so that nothing overflows; the logarithms of these are summed. The bound is b = ‖G^q‖_F^(1/2q).

    For its derivative no graph goes through the squarings: d‖G^q‖_F² = 2q·tr(G^(2q−1)dG) gives db = b·tr(H dG)/2 with
    H = G^(2q−1)/tr(G^(2q−1)G), and G^(q−1) is the product of the powers on the way. (A second derivative would miss dH.)
    """
    matrices = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in matrices]
    tiny = torch.finfo(matrices[0].dtype).tiny
    scales = [w.detach().abs().amax().clamp_min(tiny) for w in matrices]  # so that no square over- or underflows
    wide = [(w if len(w) <= w.shape[1] else w.mT) / s for w, s in zip(matrices, scales, strict=True)]
    found, kind = list(scales), wide[0].device.type.replace("meta", "cpu")  # meta: where `lipmdeq cost` counts
    for side in {len(w) for w in wide}:
        where = [i for i, w in enumerate(wide) if len(w) == side]
        with torch.autocast(kind, enabled=False):  # products in half precision would break the bound
            gram = torch.stack([wide[i] @ wide[i].mT for i in where])
            power, log = gram.detach(), 0.0
            before = torch.eye(side, dtype=gram.dtype, device=gram.device)  # the product of all smaller powers
            for k in range(SQUARINGS + 1):
                if k % 3 == 0 or k == SQUARINGS:  # after three squarings λ_max is still at least n^(−4)
                    size = torch.linalg.vector_norm(power, dim=(1, 2), keepdim=True).clamp_min(tiny)
                    power, log = power / size, log + size.log() / 2**k
                if k < SQUARINGS:
                    before, power = before @ power, power @ power
            trace = (before @ power * gram).sum((1, 2))
        change = trace / trace.detach().clamp_min(tiny) / 2  # tr(HG)/2
        bound = (log / 2).exp().flatten() * (1 + change - change.detach())
        for i, b in zip(where, bound, strict=True):
            found[i] = (scales[i] * b).clamp_min(tiny)
    return found


def matrix_norm_bound(w: Tensor) -> Tensor:
    """An upper bound on the spectral norm of a matrix (m, k) that can be differentiated; tight to n^(1/1024), n = min(m, k)."""
    return norm_bounds([w])[0]


class UnitLayer(Layer):
    """A layer with a kernel and a bias that is 1-Lipschitz for all weights and image sizes."""

    def __init__(self, cin: int, cout: int, k: int, stride: int, size: Size):
        super().__init__()
        self.stride, self.padding, self.size = stride, (k - stride) // 2, tuple(size)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(cout, cin * k * k)).view(cout, cin, k, k))
        self.bias = nn.Parameter(torch.zeros(cout))

    def matrix(self) -> Tensor:
        """A matrix whose norm bounds that of the operator, from the weight."""
        return self.weight.flatten(1)

    def bound(self) -> Tensor:
        return matrix_norm_bound(self.matrix())

    def constant(self, leaf: Leaf | None, train: bool) -> float:
        return 1.0


class UnitConv(UnitLayer):
    """A convolution divided by a bound on its norm, with a bias.

    Kernel and stride are equal (1x1, or 2x2 with stride 2), so windows do not overlap and the norm of the operator is that of
    the kernel as a C_out × C_in·k² matrix.
    """

    def __init__(self, cin: int, cout: int, k: int, size: Size):
        super().__init__(cin, cout, k, k, size)

    def kernel(self, bound: Tensor | None = None) -> Tensor:
        """The weight in use, (C_out, C_in, k, k): of norm at most 1."""
        return self.weight * (1 / (1 + ROUNDING) / (self.bound() if bound is None else bound))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel(), self.bias, stride=self.stride)


class Potential(UnitLayer):
    """(P1): h(z) = z − (2/T)·Kᵀσ(Kz + b + u), K a 3x3 convolution to E·C channels, σ = ReLU, T ≥ ‖K‖². 1-Lipschitz in z.

    T = 9‖R‖², R the kernel of Kᵀ as a C × 9·E·C matrix: a pixel lies in at most nine windows, so ‖Kᵀy‖² ≤ ‖R‖²·Σ‖window‖²
    ≤ 9‖R‖²‖y‖², on maps of any size. Constant kernels on large maps reach it.

    Proof of the constant. With A = K/√T, the derivative (almost everywhere) is J = I − 2AᵀSA with a diagonal 0 ≤ S ≤ I: slopes
    of the ReLU, and zeros where dropout removes a unit. ‖A‖ ≤ 1 gives 0 ≼ AᵀSA ≼ AᵀA ≼ I, hence −I ≼ J ≼ I. J is symmetric
    (h is the gradient of a potential), so ‖J‖₂ ≤ 1. If all that is known is ‖A‖² ≤ s, then ‖J‖₂ ≤ max(1, 2s − 1).
    """

    def __init__(self, channels: int, expansion: int, p: float, size: Size):
        super().__init__(channels, expansion * channels, 3, 1, size)
        self.drop = VariationalDropout(p)

    def matrix(self) -> Tensor:
        """R, but for the order of its columns."""
        return self.weight.transpose(0, 1).flatten(1)

    def T(self, bound: Tensor | None = None) -> Tensor:
        """T ≥ ‖K‖², a number."""
        return (9 * ((self.bound() if bound is None else bound) * (1 + ROUNDING)).square()).clamp_min(1e-12)

    def kernel(self) -> Tensor:
        """A = K/√T, of norm at most 1: what the certificate proves anew."""
        return self.weight / self.T().sqrt()

    def forward(self, z: Tensor, u: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return reference.potential(self, z, u, mask)

    def shift(self, u: Tensor | None) -> Tensor:
        """b + u, (B, E·C, H, W) or (E·C, 1, 1) without an injection."""
        return per_channel(self.bias) if u is None else u + per_channel(self.bias)

    def held(self, bound: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """K and 2Kᵀ/T as kernels of convolutions with padding 1, and b + u; in test mode dropout scales the second by 1 − p.

        K as a view: :func:`lipmdeq.solvers.deq` wants inputs that do not depend on one another, as the second does on the weight.
        """
        keep = 1.0 if self.training else 1 - self.drop.p
        back = (2 * keep / self.T(bound) * self.weight).transpose(0, 1).flip(2, 3)
        return self.weight.view_as(self.weight), back, self.shift(u)


@dataclass(frozen=True)
class Held:
    """What stays the same through both solves of one batch: normalised kernels, injected images, masks."""

    blocks: list[tuple[Tensor, Tensor, Tensor]]  # K, 2Kᵀ/T, b + u of each branch
    masks: Maps
    own: list[Tensor]  # M_ii
    paths: dict[tuple[int, int], list[tuple[Tensor, Tensor]]]  # kernels and biases; M_ij is in the last ones


class PotentialMap(BranchMap):
    """f of the certified family, (P1)–(P2): L ≤ τ in the plain norm, for all weights.

    Down paths are i − j times a 2x2 convolution with stride 2, ReLU between them; up paths a 1x1 convolution and nearest
    up-sampling divided by its norm 2^(j−i). M = τ·M'/‖M'‖₂ with M' = (1−α2)I + α2·softmax(weights off the diagonal).
    """

    reading = "spectral"  # the plain norm

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.n, self.tau, self.alpha = cfg.n, cfg.tau, cfg.alpha2
        ch, sizes = cfg.channels, cfg.sizes()
        self.residual = nn.ModuleList(Potential(c, cfg.expansion, cfg.p, s) for c, s in zip(ch, sizes, strict=True))
        self.paths = nn.ModuleDict()
        for i, j in permutations(range(self.n), 2):
            if j > i:
                convs = [UnitConv(ch[j], ch[i], 1, sizes[j])]
            else:
                convs = [UnitConv(ch[j], ch[i] if s == i - 1 else ch[j], 2, sizes[s]) for s in range(j, i)]
            self.paths[path_name(i, j)] = nn.ModuleList(convs)
        self.weights = nn.Parameter(torch.zeros(self.n, self.n))

    def path(self, i: int, j: int) -> nn.ModuleList:
        """The convolutions of P_ij, from branch j to branch i."""
        return self.paths[path_name(i, j)]

    def mixing(self) -> Tensor:
        """M, (n, n): nonnegative, of spectral norm τ."""
        if self.n == 1:
            return self.weights * 0 + self.tau / (1 + ROUNDING)
        eye = torch.eye(self.n, dtype=self.weights.dtype, device=self.weights.device)
        share = torch.softmax(self.weights.masked_fill(eye.bool(), -torch.inf), 1)
        mix = (1 - self.alpha) * eye + self.alpha * share
        return self.tau / (matrix_norm_bound(mix) * (1 + ROUNDING)) * mix

    def hold(self, u: Maps) -> Held:
        """Everything that is computed once for a batch: u_i (B, E·C_i, H_i, W_i), or None for a branch without injection."""
        m = self.mixing()
        layers = [*self.residual, *(conv for path in self.paths.values() for conv in path)]
        bound = dict(zip(layers, norm_bounds([layer.matrix() for layer in layers]), strict=True))
        paths = {}
        for i, j in permutations(range(self.n), 2):
            *first, last = [(c.kernel(bound[c]), c.bias) for c in self.path(i, j)]
            w = m[i, j] * 2.0 ** min(0, i - j)
            paths[i, j] = [*first, tuple(w * t for t in last)]
        return Held(
            blocks=[b.held(bound[b], ui) for b, ui in zip(self.residual, u, strict=True)],
            masks=self.masks(next(t for t in u if t is not None)),
            own=[m[i, i] for i in range(self.n)],
            paths=paths,
        )

    def masks(self, like: Tensor) -> Maps:
        """Dropout masks of zeros and ones, (B, E·C_i); None where dropout is off."""
        drawn = [b.drop.draw(len(like), len(b.bias), like) for b in self.residual]
        return [None if m is None else (m > 0).to(m.dtype) for m in drawn]

    def inputs(self, u: Maps, held: Held) -> list[Tensor]:
        pairs = [pair for path in held.paths.values() for pair in path]
        return [t for group in (*held.blocks, *pairs, held.own) for t in group]

    def forward(self, z: Sequence[Tensor], u: Maps, held: Held | None = None) -> list[Tensor]:
        return fused.certified(z, held or self.hold(u))

    def hidden(self, z: Sequence[Tensor], u: Maps) -> list[Tensor]:
        rows = zip(self.residual, z, u, strict=True)
        return [F.conv2d(zi, b.weight, padding=1) + b.shift(ui) > 0 for b, zi, ui in rows]

    def matrix(self, leaf: Leaf | None = None, train: bool = True) -> np.ndarray:
        """N_ij = M_ij·‖P_ij‖·L_j."""
        hat = np.array([block.lipschitz(leaf, train) for block in self.residual])
        path = np.eye(self.n)
        for i, j in permutations(range(self.n), 2):
            path[i, j] = bounds.lip_compose(*(c.lipschitz(leaf, train) for c in self.path(i, j)))
        return self.mixing().detach().double().cpu().numpy() * path * hat[None, :]
