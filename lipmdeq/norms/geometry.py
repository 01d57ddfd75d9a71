"""Where a convolution reads: map, kernel, stride, padding and dilation of ``conv2d``, checked, as two axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

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

    def length(self, side: str, torus: Torus | None = None) -> int:
        """Number of positions on the input or the output side; on a torus, of samples x_r or y that one frequency mixes."""
        if torus:
            return len(self.residues) if side == "in" else 1
        return self.size if side == "in" else self.out

    def reach(self, side: str) -> int:
        """How far apart two inputs of one window, or two windows that share an input, can be."""
        span = self.offsets[-1] - self.offsets[0]
        most = self.length(side) - 1
        return most if self.circular else min(span if side == "in" else span // self.stride, most)

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
        read = torch.tensor(self.offsets)[:, None] + self.stride * torch.arange(self.out)
        read = read % self.size if self.circular else read
        return (read[..., None] == torch.arange(self.size)).double()

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
    circular = circular and pads != (0, 0)
    out = (size + sum(pads) - dilation * (kernel - 1) - 1) // stride + 1
    offsets = [t * dilation - pads[0] for t in range(kernel)]
    kept = [t for t, e in enumerate(offsets) if circular or any(0 <= o * stride + e < size for o in range(out))]
    return Axis(size, out, stride, tuple(kept), tuple(offsets[t] for t in kept), circular)


@dataclass(frozen=True)
class Geometry:
    """Everything about a 2-d convolution but its weights. ``pads``: (top, bottom), (left, right)."""

    axes: tuple[Axis, Axis]
    size: tuple[int, int]
    stride: tuple[int, int]
    pads: tuple[tuple[int, int], tuple[int, int]]
    dilation: tuple[int, int]
    circular: bool
    groups: int

    def conv(self, weight: Tensor, x: Tensor) -> Tensor:
        """The operator T on x, (B, C_in, H, W), as torch computes it."""
        around = F.pad(x, (*self.pads[1], *self.pads[0]), mode="circular" if self.circular else "constant")
        return F.conv2d(around, weight, None, self.stride, 0, self.dilation, self.groups)


def _pair(name: str, value: Pair, least: int) -> tuple[int, int]:
    """Two whole numbers ≥ least from one or two."""
    both = tuple(value) if isinstance(value, tuple | list | torch.Size) else (value, value)
    if len(both) != 2 or any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in both):
        raise ValueError(f"{name} = {value!r}: must be a whole number >= {least}, or a pair of such")
    return both


def _pads(padding: tuple[int, int] | str, stride: tuple[int, int], span: list[int]) -> tuple[tuple[int, int], ...]:
    """Padding before and after the map on each axis; ``span``: what a window reaches beyond its first pixel."""
    if not isinstance(padding, str):
        return tuple((p, p) for p in padding)
    if padding not in ("same", "valid"):
        raise ValueError(f"padding = {padding!r}: must be whole numbers >= 0, 'same' or 'valid'")
    if padding == "valid":
        return (0, 0), (0, 0)
    if stride != (1, 1):
        raise ValueError(f"padding = 'same' with stride = {stride}: must have stride 1")
    return tuple((s // 2, s - s // 2) for s in span)


def check_finite(weight: Tensor) -> float:
    """Largest |entry|; NaN and infinite weights are refused."""
    top = float(weight.detach().abs().max())
    if not math.isfinite(top):
        raise ValueError(f"weight has an entry {top}: all entries must be finite")
    return top


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
    size, stride, dilation = _pair("size", size, 1), _pair("stride", stride, 1), _pair("dilation", dilation, 1)
    padding = padding if isinstance(padding, str) else _pair("padding", padding, 0)
    kernel = tuple(weight.shape[2:])
    span = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads, circular = _pads(padding, stride, span), padding_mode == "circular"
    if padding_mode not in ("zeros", "circular") and any(map(any, pads)):
        raise ValueError(f"padding_mode = {padding_mode!r}: cannot be bounded; must be zeros or circular")
    for h, s, p in zip(size, span, pads, strict=True):
        if h + sum(p) <= s:
            raise ValueError(f"size = {size}: kernel {kernel} with dilation {dilation} is larger than the padded map")
        if circular and max(p) > h:
            raise ValueError(f"padding = {padding!r}: must be at most size = {size} when circular")
    y, x = (make_axis(*one, circular) for one in zip(kernel, size, stride, dilation, pads, strict=True))
    return Geometry((y, x), size, stride, pads, dilation, circular, groups)
