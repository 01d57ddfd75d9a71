"""A pretended accelerator: tensors that say they are on "pretend:0", keep their numbers on the CPU, refuse to meet CPU tensors.

What runs on it without an error has every tensor on its own device, and ends bit-equal to the CPU; only numbers (0-dim tensors)
of the CPU may enter, and only where torch lets them: element by element, never as what is written to. `Watch` counts what would
make the host of a real one wait: values that are read (`.item()`, `bool`, `torch.equal`), copies to the host, also those that
return before they are done (who reads them has to wait), copies to the device that block, results whose shape depends on data,
decompositions whose success the host checks.

    with Factory():                                  # tensors made with device=DEVICE are pretended
        x = torch.randn(2, 3, device=DEVICE)
        with Watch() as seen:
            float(x.sum())
        assert seen.total == 1
"""

import traceback
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("pretend")
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # gradient checkpointing asks every backend
DEVICE, CPU = torch.device("pretend", 0), torch.device("cpu")
_aten = torch.ops.aten
COPIES = {_aten._to_copy.default, _aten.copy_.default}
VALUES = ("_local_scalar_dense", "equal", "allclose")
SCALARS = (
    "fill_",
    "masked_fill",
    "masked_fill_",
    "index_put_",
    "_index_put_impl_",
)  # take a number, beside pointwise ones
CHECKED = (
    "_linalg_check_errors",
    "_linalg_eigh",
    "linalg_eig",
    "_linalg_eigvals",
    "_linalg_svd",
)  # the host sees `info`


class Watch:
    """Counts synchronisations between its beginning and its end: `counts` by kind, `places` by line of the package."""

    active: "list[Watch]" = []

    def __enter__(self) -> "Watch":
        self.counts, self.places = Counter(), Counter()
        Watch.active.append(self)
        return self

    def __exit__(self, *error) -> None:
        Watch.active.remove(self)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @staticmethod
    def saw(kind: str) -> None:
        if Watch.active:
            stack = [f for f in traceback.extract_stack() if "/lipmdeq/" in f.filename]
            where = f"{stack[-1].filename.rsplit('/', 1)[1]}:{stack[-1].lineno}" if stack else "elsewhere"
            for watch in Watch.active:
                watch.counts[kind] += 1
                watch.places[f"{where} {kind}"] += 1


class Pretend(torch.Tensor):
    """A tensor on the pretended device; `kept` holds its numbers."""

    @staticmethod
    def __new__(cls, data):
        layout = dict(strides=data.stride(), storage_offset=data.storage_offset(), dtype=data.dtype)
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, device=DEVICE, requires_grad=False, **layout)

    def __init__(self, data):
        self.kept = data

    def __repr__(self):
        return f"Pretend({self.kept})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def _inner(t):
    return t.kept if isinstance(t, Pretend) else t


def _kind(func, args, kwargs, tensors, answer_there: bool) -> str | None:
    """What the host would wait for in this call, if anything."""
    name = func.overloadpacket.__name__
    there = [isinstance(t, Pretend) for t in tensors]
    if func in COPIES:
        returns = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        target = answer_there if name == "_to_copy" else there[0]
        if target == there[-1] or (target and returns):
            return None
        return "to device" if target else "to host"
    if not any(there):
        return None
    if name in VALUES:
        return "value"
    places = name in ("index", "index_put_", "_index_put_impl_")
    masks = places and any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if t is not None)
    told = places or kwargs.get("output_size") is not None  # the host knows the shape
    if masks or (torch.Tag.dynamic_output_shape in func.tags and not told):
        return "shape"
    return "check" if name in CHECKED else None


def run(func, args, kwargs):
    """Compute on the CPU; answer on the pretended device if an operand, or the device asked for, is there."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    there = any(isinstance(t, Pretend) for t in tensors)
    if there and func not in COPIES:
        numbers = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in SCALARS
        if func._schema.is_mutable and not isinstance(kwargs.get("out", tensors[0]), Pretend):
            numbers = False
        strangers = [tuple(t.shape) for t in tensors if not (isinstance(t, Pretend) or (numbers and t.dim() == 0))]
        if strangers:
            raise RuntimeError(f"{func}: tensors on pretend and cpu meet: {strangers}")
    device = kwargs.get("device")
    answer_there = there if device is None else torch.device(device).type == DEVICE.type
    if kind := _kind(func, args, kwargs, tensors, answer_there):
        Watch.saw(kind)
    known = {id(t.kept): t for t in tensors if isinstance(t, Pretend)}  # in-place operations return their operand
    args, kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
    if device is not None:
        kwargs = {**kwargs, "device": CPU}

    def wrap(t):
        if not isinstance(t, torch.Tensor) or isinstance(t, Pretend):
            return t
        return known[id(t)] if id(t) in known else Pretend(t) if answer_there else t

    return tree_map(wrap, func(*args, **kwargs))


_tensor = torch.tensor


def _tensor_there(data, *, device=None, **options):
    """`torch.tensor`, which hides its own copy to the device from all modes."""
    made = _tensor(data, device=CPU if device is not None else None, **options)
    return made if device is None else made.to(device)


class Factory(TorchDispatchMode):
    """While it is on, tensors that are asked for on DEVICE are made there."""

    def __enter__(self):
        torch.tensor = _tensor_there
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor = _tensor
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})
