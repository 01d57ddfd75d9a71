"""Where a convolution reads: map, kernel, stride, padding and dilation of ``conv2d``, checked, as two axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = int | tuple[int, int]
Torus = tuple[int, int]  # (N, odd): frequencies π(2k + odd)/N


@dataclass(frozen=True)
class Axis:
    """One axis: input size, output size, stride, and the taps that read the map (kernel index, offset e_t)."""

    size: int
    out: int
    stride: int
    taps: tuple[int, ...]
    offsets: tuple[int, ...]
    circular: bool

    @cached_property
    def exact(self) -> bool:
        """Circular, and the outputs are every s-th position of the map, each once."""
        return self.circular and self.out * self.stride == self.size

    @cached_property
    def shifts(self) -> tuple[tuple[int, int], ...]:
        """(q_t, r_t) of every tap; a circular axis that its stride does not divide is bounded by stride 1."""
        s = 1 if self.circular and not self.exact else self.stride
        return tuple(divmod(e, s) for e in self.offsets)

    @cached_property
    def residues(self) -> tuple[int, ...]:
        return tuple(sorted({r for _, r in self.shifts}))

    @cached_property
    def disjoint(self) -> bool:
        """No two taps read the same pixel: windows do not overlap, the symbol's norm is the same at every ω."""
        return not self.circular and len(self.residues) == len(self.taps)

    @cached_property
    def interior(self) -> bool:
        """Some output reads all taps inside the map."""
        return any(all(0 <= o * self.stride + e < self.size for e in self.offsets) for o in range(self.out))

    @cached_property
    def copies(self) -> int:
        """How often a circular map may give the same output (more than once only with more padding than usual)."""
        return -(-((self.out - 1) * self.stride + 1) // self.size) if self.circular else 1

    @cached_property
    def overlap(self) -> tuple[float, float]:
        """Bounds on Σ_windows ‖window‖²/‖x‖² and on the same for Tᵀ: windows that hold an input, inputs in a window.

        The second one needs every tap to read an input at one output only; then the roles of x and y are alike.
        """
        s = self.incidence()
        alike = bool((s.sum(1) <= 1).all())
        windows, inputs = int(s.sum((0, 1)).max()), int(s.sum((0, 2)).max())
        return windows, inputs if alike else math.inf

    def reach(self, side: str) -> int:
        """How far apart two inputs of one window, or two windows that share an input, can be."""
        if self.circular:
            return (self.size if side == "in" else self.out) - 1
        span = self.offsets[-1] - self.offsets[0]
        return min(span, self.size - 1) if side == "in" else min(span // self.stride, self.out - 1)

    def tori(self) -> list[Torus]:
        """Tori that bound this axis, each one alone."""
        if self.circular:
            return [(self.size // self.stride if self.exact else self.size, 0)]
        if self.disjoint:
            return [(1, 0)]
        n = self.out
        for q, r in self.shifts:
            held = -(-(self.size - r) // self.stride)  # H_r
            n = max(n, held, self.out + q, held - q)
        return [(n, 0), (n, 1), (n + 1, 0), (n + 1, 1)]

    def incidence(self) -> Tensor:
        """S(t, o, i) = 1 when output o reads input i with tap t, (taps, out, size)."""
        s = torch.zeros(len(self.taps), self.out, self.size, dtype=torch.float64)
        for t, e in enumerate(self.offsets):
            for o in range(self.out):
                i = o * self.stride + e
                if self.circular or 0 <= i < self.size:
                    s[t, o, i % self.size] = 1.0
        return s

    def table(self, side: str, torus: Torus | None) -> tuple[Tensor, list[tuple[int, int]]]:
        """A(f, a, b, t, u) of this axis, and for each f the pair (κ, 2N) of its frequency ω = πκ/N."""
        if torus is None:
            s = self.incidence()
            a = torch.einsum("toi,uoj->ijtu" if side == "in" else "toi,upi->optu", s, s)
            return a[None].to(torch.complex128), [(0, 1)]
        n, odd = torus
        q, r = torch.tensor(self.shifts).T
        kappa = torch.arange(odd, 2 * n, 2)
        # The whole number κ(q_u − q_t) is reduced modulo 2N first, so that the phase is right to a few u.
        angle = (kappa[:, None, None] * (q[None, :] - q[:, None]) % (2 * n)).double() * (math.pi / n)
        phase = torch.polar(torch.ones_like(angle), angle)
        if side == "out":
            a = (phase.conj() * (r[:, None] == r[None, :]))[:, None, None]
        else:
            member = torch.tensor(self.residues)[:, None] == r[None, :]
            a = phase[:, None, None] * member[:, None, :, None] * member[None, :, None, :]
        return a, [(int(k), 2 * n) for k in kappa]


def make_axis(kernel: int, size: int, stride: int, dilation: int, pads: tuple[int, int], circular: bool) -> Axis:
    """Axis with the taps that read only padding left out."""
    left, right = pads
    circular = circular and pads != (0, 0)
    out = (size + left + right - dilation * (kernel - 1) - 1) // stride + 1
    offsets = [t * dilation - left for t in range(kernel)]
    kept = [
        t
        for t, e in enumerate(offsets)
        if circular or any(0 <= o * stride + e < size for o in range(max(0, -(e // stride)), out))
    ]
    return Axis(size, out, stride, tuple(kept), tuple(offsets[t] for t in kept), circular)


@dataclass(frozen=True)
class Geometry:
    """Everything about a 2-d convolution but its weights. ``pads``: (top, bottom), (left, right)."""

    kernel: tuple[int, int]
    size: tuple[int, int]
    stride: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    circular: bool
    groups: int

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        y, x = (
            make_axis(self.kernel[d], self.size[d], self.stride[d], self.dilation[d], self.pads[d], self.circular)
            for d in (0, 1)
        )
        return y, x

    def conv(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """The operator T on (B, C_in, H, W), as torch computes it."""
        (top, bottom), (left, right) = self.pads
        mode = "circular" if self.circular else "constant"

        def apply(x: Tensor) -> Tensor:
            x = F.pad(x, (left, right, top, bottom), mode=mode)
            return F.conv2d(x, weight, None, self.stride, 0, self.dilation, self.groups)

        return apply


def pair(name: str, value: Pair, least: int) -> tuple[int, int]:
    """Two whole numbers ≥ least from one or two."""
    both = tuple(value) if isinstance(value, tuple | list | torch.Size) else (value, value)
    if len(both) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in both):
        raise ValueError(f"{name} = {value!r}: must be a whole number >= {least}, or a pair of such")
    return both


def geometry_of(
    weight: Tensor,
    size: Pair,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
) -> Geometry:
    """Geometry of ``conv2d`` with this weight on this map, or a ValueError that names what is wrong."""
    if not isinstance(weight, Tensor) or weight.dim() != 4 or 0 in weight.shape:
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight = {shape}: must be a tensor of shape (C_out, C_in/groups, kh, kw), none of them 0")
    if not weight.is_floating_point():
        raise ValueError(f"weight of dtype {weight.dtype}: must be real floating point")
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"groups = {groups!r}: must be a whole number >= 1 that divides C_out = {weight.shape[0]}")
    # Checked before the cache, which does not tell 8.0 from 8.
    size, stride, dilation = pair("size", size, 1), pair("stride", stride, 1), pair("dilation", dilation, 1)
    if not isinstance(padding, str):
        padding = pair("padding", padding, 0)
    return _geometry(tuple(weight.shape[2:]), size, stride, padding, dilation, padding_mode, groups)


def check_finite(weight: Tensor) -> float:
    """Largest |entry|; NaN and infinite weights are refused."""
    top = float(weight.detach().abs().max())
    if not math.isfinite(top):
        raise ValueError(f"weight has an entry {top}: all entries must be finite")
    return top


@lru_cache(maxsize=1024)
def _geometry(kernel: tuple[int, int], size, stride, padding, dilation, padding_mode, groups) -> Geometry:
    span = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if padding == "valid":
        pads = ((0, 0), (0, 0))
    elif padding == "same":
        if stride != (1, 1):
            raise ValueError(f"padding = 'same' with stride = {stride}: must have stride 1")
        pads = ((span[0] // 2, span[0] - span[0] // 2), (span[1] // 2, span[1] - span[1] // 2))
    elif isinstance(padding, str):
        raise ValueError(f"padding = {padding!r}: must be whole numbers >= 0, 'same' or 'valid'")
    else:
        pads = tuple((p, p) for p in padding)
    if padding_mode not in ("zeros", "circular") and any(map(any, pads)):
        raise ValueError(f"padding_mode = {padding_mode!r}: cannot be bounded; must be zeros or circular")
    circular = padding_mode == "circular"
    for h, s, p in zip(size, span, pads, strict=True):
        if h + sum(p) <= s:
            raise ValueError(f"size = {size}: kernel {kernel} with dilation {dilation} is larger than the padded map")
        if circular and max(p) > h:
            raise ValueError(f"padding = {padding!r}: must be at most size = {size} when circular")
    return Geometry(kernel, size, stride, pads, dilation, circular, groups)
