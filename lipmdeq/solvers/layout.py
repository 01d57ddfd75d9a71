"""A batch of states as one tensor (B, D): packing, products and norms per sample.

What is proportional to D stays on its device; the algebra per sample is small numpy arrays on the host, in double precision.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

State = Tensor | list[Tensor]
Map = Callable[[State], State]


def branches(z: State) -> list[Tensor]:
    """A state as a list of its branches."""
    return [z] if isinstance(z, Tensor) else list(z)


def like(z: Sequence[Tensor], model: State) -> State:
    """Branches as a state of the same kind as `model`: a tensor or a list."""
    return z[0] if isinstance(model, Tensor) else list(z)


class Layout:
    """Branches (B, ...) <-> one tensor (B, D), in the memory order of the branches (no permuting copies).

    The work dtype is float32 at least: residuals of bfloat16 states are formed and measured in float32; `dtype` sets it.
    """

    def __init__(self, branches: list[Tensor], dtype: torch.dtype | None = None):
        self.b, self.device, self.dtypes = len(branches[0]), branches[0].device, [t.dtype for t in branches]
        self.shapes, self.sizes = [t.shape for t in branches], [t[0].numel() for t in branches]
        last = [t.dim() == 4 and not t.is_contiguous() for t in branches]
        self.formats = [torch.channels_last if x else torch.contiguous_format for x in last]
        self.strides = [t.contiguous(memory_format=m).stride() for t, m in zip(branches, self.formats, strict=True)]
        self.dtype = dtype or reduce(torch.promote_types, self.dtypes, torch.float32)
        self.rounds = any(d != self.dtype for d in self.dtypes)  # branches hold less than the work dtype

    def empty(self, *lead: int) -> Tensor:
        return torch.empty((*lead, self.b, sum(self.sizes)), dtype=self.dtype, device=self.device)

    def pack(self, branches: list[Tensor], out: Tensor) -> Tensor:
        """Copies the branches into out (B, D); twice only where a branch has another memory order."""
        ordered = [t.contiguous(memory_format=m) for t, m in zip(branches, self.formats, strict=True)]
        rows = [t.as_strided((self.b, size), (size, 1)) for t, size in zip(ordered, self.sizes, strict=True)]
        return torch.cat(rows, 1, out=out)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        """Branches, each dense in memory; a view of flat if there is only one."""
        parts = [flat] if len(self.sizes) == 1 else torch.split_with_sizes_copy(flat, self.sizes, 1)
        named = zip(parts, self.shapes, self.strides, self.dtypes, strict=True)
        return [t.as_strided(shape, stride).to(dtype) for t, shape, stride, dtype in named]


def dots(stack: Tensor, x: Tensor) -> Tensor:
    """(n, B, D), (B, D) -> (B, n): inner products per sample."""
    return _row_times(x, stack.permute(1, 2, 0))


def combine(coef: Tensor, stack: Tensor) -> Tensor:
    """(B, n), (n, B, D) -> (B, D): linear combinations per sample."""
    return _row_times(coef, stack.transpose(0, 1))


def _row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """Row vector times matrix is the orientation that is memory-bound on a CPU; matrix times column vector is 5 to 10 times
    slower. In the work dtype: autocast is for f."""
    with torch.autocast(row.device.type, enabled=False):
        return torch.bmm(row.unsqueeze(1), matrix).squeeze(1)


def to_host(t: Tensor) -> np.ndarray:
    return t.cpu().numpy().astype(np.float64)


def to_device(a: np.ndarray, like: Tensor) -> Tensor:
    """A small array next to `like`, in its dtype, without a wait."""
    return torch.from_numpy(a).to(like, non_blocking=True)


def norms(x: Tensor, found: np.ndarray | None = None) -> np.ndarray:
    """Norms over the last dimension, in double precision on the host (`found`, if they are there already), also where squares
    leave the range of the dtype, unless beside the others of the sample they are nothing: those of x over its largest entry."""
    found = to_host(torch.linalg.vector_norm(x, dim=-1)) if found is None else found
    small, large = (1e-15, 1e15) if x.dtype == torch.float32 else (1e-150, 1e150)
    doubt = ~(found < large) | (found < small) & (found.max(0) < 1e6 * small)
    if not doubt.any() or not x.shape[-1]:
        return found
    top = x.abs().amax(-1).clamp_min(torch.finfo(x.dtype).tiny)
    sizes = top.double() * torch.linalg.vector_norm(x / top[..., None], dim=-1).double()
    return np.where(doubt, to_host(sizes), found)


def select(mask: np.ndarray, chosen: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """States with the samples of mask (B,) from `chosen`, the rest from `others`."""
    if not mask.any():
        return others
    mask = torch.from_numpy(mask).to(others[0].device, non_blocking=True)
    shaped = [mask.view(-1, *[1] * (t.dim() - 1)) for t in others]
    return [torch.where(m, c.to(t.dtype), t) for m, c, t in zip(shaped, chosen, others, strict=True)]
