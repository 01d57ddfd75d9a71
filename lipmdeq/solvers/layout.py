"""A batch of states as one tensor (B, D): packing, products and norms per sample, memory for histories.

What is proportional to D stays on its device and costs a few passes over memory; the algebra per sample is a few small numpy
arrays on the host, in double precision.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LARGE = 2**25  # bytes


class Layout:
    """Branches (B, ...) <-> one tensor (B, D), in the memory order of the branches (no permuting copies).

    The work dtype is float32 at least, so that residuals of bfloat16 states are formed and measured in float32;
    `dtype` sets it.
    """

    def __init__(self, branches: list[Tensor], dtype: torch.dtype | None = None):
        self.b, self.shapes, self.dtypes = (len(branches[0]), [t.shape for t in branches], [t.dtype for t in branches])
        last = [t.dim() == 4 and not t.is_contiguous() for t in branches]
        self.formats = [torch.channels_last if x else torch.contiguous_format for x in last]
        self.strides = [t.contiguous(memory_format=m).stride() for t, m in zip(branches, self.formats, strict=True)]
        self.sizes = [t[0].numel() for t in branches]
        self.dtype, self.device = dtype or work_dtype(*self.dtypes), branches[0].device
        self.rounds = any(d != self.dtype for d in self.dtypes)  # branches hold less than the work dtype

    def empty(self, *lead: int) -> Tensor:
        return torch.empty((*lead, self.b, sum(self.sizes)), dtype=self.dtype, device=self.device)

    def rows(self, branches: list[Tensor]) -> list[Tensor]:
        """(B, D_i) views of the memory of each branch; a copy only where a branch has another memory order."""
        out = []
        for t, stride, form, size in zip(branches, self.strides, self.formats, self.sizes, strict=True):
            t = t if t.stride() == stride else t.contiguous(memory_format=form)
            out.append(t.as_strided((self.b, size), (size, 1)))
        return out

    def copy(self, branches: list[Tensor]) -> list[Tensor]:
        """Copies in the memory order of the layout."""
        return [t.new_empty_strided(t.shape, s).copy_(t) for t, s in zip(branches, self.strides, strict=True)]

    def pack(self, branches: list[Tensor], out: Tensor) -> Tensor:
        """Copies the branches into out (B, D)."""
        return torch.cat(self.rows(branches), 1, out=out)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """Branches, each dense in memory; a view of flat if there is only one."""
        parts = [flat] if len(self.sizes) == 1 else torch.split_with_sizes_copy(flat, self.sizes, 1)
        named = zip(parts, self.shapes, self.strides, self.dtypes, strict=True)
        return [t.as_strided(shape, stride).to(dtype) for t, shape, stride, dtype in named]


class Room:
    """Memory for the history of a solve, kept by the caller for its next one.

    The C library gives blocks above 32 MB back to the system as soon as they are free, and to get them again page by page
    costs about as much as all else that a solver does. On a GPU torch keeps them.
    """

    def __init__(self):
        self.block: Tensor | None = None

    def take(self, layout: Layout, *lead: int) -> Tensor:
        """As `layout.empty(*lead)`, in the memory that was last given back if it fits; a solve inside a solve has its own."""
        block, self.block = self.block, None
        if block is None or block.shape != (*lead, layout.b, sum(layout.sizes)) or block.dtype != layout.dtype:
            return layout.empty(*lead)
        usable = layout.device.type == "cpu" and (torch.is_inference_mode_enabled() or not block.is_inference())
        return block if usable else layout.empty(*lead)

    def give_back(self, block: Tensor) -> None:
        """Nobody may use the block any more."""
        if type(block) is Tensor and block.device.type == "cpu" and block.nbytes > LARGE:
            self.block = block


def work_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def dots(stack: Tensor, x: Tensor) -> Tensor:
    """(n, B, D), (B, D) -> (B, n): inner products per sample. Row vector times matrix is the orientation that is
    memory-bound on a CPU; matrix times column vector is 5 to 10 times slower."""
    return torch.bmm(x.unsqueeze(1), stack.permute(1, 2, 0)).squeeze(1)


def combine(coef: Tensor, stack: Tensor) -> Tensor:
    """(B, n), (n, B, D) -> (B, D): linear combinations per sample."""
    return torch.bmm(coef.unsqueeze(1), stack.transpose(0, 1)).squeeze(1)


def to_host(t: Tensor) -> np.ndarray:
    return t.cpu().numpy().astype(np.float64)


def to_device(a: np.ndarray, like: Tensor) -> Tensor:
    """A small array next to `like`, in its dtype, without a wait."""
    return torch.from_numpy(a).to(like, non_blocking=True)


def mask_of(a: np.ndarray, like: Tensor) -> Tensor:
    """(B,) bool on the host -> beside `like`, shaped to select its samples."""
    return torch.from_numpy(a).to(like.device, non_blocking=True).view(-1, *[1] * (like.dim() - 1))


def norms(x: Tensor, found: np.ndarray | None = None) -> np.ndarray:
    """Norms over the last dimension, in double precision on the host (`found`, if they are there); also where squares vanish."""
    found = to_host(torch.linalg.vector_norm(x, dim=-1)) if found is None else found
    low = found < (1e-15 if x.dtype == torch.float32 else 1e-150)
    if not low.any() or not x.shape[-1]:
        return found
    top = x.abs().amax(-1).clamp_min(torch.finfo(x.dtype).tiny)
    return np.where(low, to_host(top) * to_host(torch.linalg.vector_norm(x / top[..., None], dim=-1)), found)


def select(mask: np.ndarray, chosen: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """States with the samples of mask from `chosen`, the rest from `others`."""
    return [torch.where(mask_of(mask, t), c.to(t.dtype), t) for c, t in zip(chosen, others, strict=True)]
