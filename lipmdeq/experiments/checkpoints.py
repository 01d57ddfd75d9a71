"""Checkpoints: weights, optimizer and position of a run in one file that is whole or refused; a run's folder is held by one.

A checkpoint is a line with the sha256 of what follows, a line of JSON, and the tensors as safetensors writes them; where the
JSON has {"tensor": name}, the tensor of that name belongs. Nothing in it is ever executed. Files are written beside their
place, synced and renamed, so that a kill or a full disk leaves the old file or the new one.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from filelock import FileLock, Timeout
from pydantic import ValidationError
from torch import nn

from lipmdeq.certificate import fingerprint
from lipmdeq.data.files import check_stored, sweep
from lipmdeq.experiments.parameters import RunConfig, RunError
from lipmdeq.experiments.record import FORMAT, writing, wrong
from lipmdeq.experiments.step import make_adjoint, make_solver
from lipmdeq.model import ModelConfig, build

MAGIC, OLD = "lipmdeq-checkpoint-2", "lipmdeq-checkpoint-1"  # OLD: a pickle that holds plain tensors only; still read
CHECKPOINT = "checkpoint.ckpt"  # its name in the folder of a run
UNFIT = (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError, MemoryError)
LOCK_WAIT = 15.0  # seconds; the kernel of a killed notebook lives on for a moment


def _take_out(value: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """The same with {"tensor": name} in the place of each tensor, which goes to ``tensors``, on the CPU."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {str(k): _take_out(v, f"{name}/{k}", tensors) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_take_out(v, f"{name}/{k}", tensors) for k, v in enumerate(value)]
    return value


def _put_back(value: object, tensors: dict[str, torch.Tensor]) -> object:
    """The inverse of `_take_out`, but for names that were numbers, which are text now."""
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return tensors[value["tensor"]]
        return {k: _put_back(v, tensors) for k, v in value.items()}
    return [_put_back(v, tensors) for v in value] if isinstance(value, list) else value


def save_checkpoint(path: str | Path, state: dict) -> None:
    """Write tensors, numbers, text, lists and dicts with their sha256, atomically."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_take_out(state, "", tensors))
    content = text.encode("ascii") + b"\n" + safetensors.torch.save(tensors)
    with writing(Path(path)) as part, open(part, "wb") as f:
        f.write(f"{MAGIC} {hashlib.sha256(content).hexdigest()}\n".encode())
        f.write(content)


def _parse(content: bytes) -> dict:
    text, _, tensors = content.partition(b"\n")
    return _put_back(json.loads(text), safetensors.torch.load(tensors))


def _parse_old(content: bytes) -> dict:
    """Plain tensors, numbers, lists and dicts as ``torch.save`` writes them; anything else is refused, not executed."""
    if content[:2] == b"PK":
        check_stored(io.BytesIO(content))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is refused in a moment
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load_checkpoint(path: str | Path) -> dict:
    """Read a checkpoint on the CPU; :class:`RunError` in one sentence if it is missing, damaged or something else."""
    try:
        raw = Path(path).read_bytes()
    except OSError as e:
        raise RunError(f"checkpoint {path} cannot be read ({e.strerror})") from None
    head, _, content = raw.partition(b"\n")
    magic, _, sha = head[:200].decode("ascii", "replace").partition(" ")
    if magic not in (MAGIC, OLD) or not sha:
        raise RunError(f"{path} is not a checkpoint: its first line must be '{MAGIC} <sha256>'")
    if hashlib.sha256(content).hexdigest() != sha:
        raise RunError(
            f"checkpoint {path} is damaged: its content does not have the sha256 of its first line; "
            "delete it to start the run again"
        )
    try:
        state = _parse(content) if magic == MAGIC else _parse_old(content)
    except Exception as e:  # a parser raises whatever it likes at foreign content
        raise RunError(f"checkpoint {path} holds more than plain tensors ({type(e).__name__})") from None
    for name in ("parameters", "model_config", "model"):
        if not isinstance(state, dict) or not isinstance(state.get(name), dict):
            raise RunError(f"checkpoint {path} does not hold the state of a run ({name} is missing)")
    return state


def unfit(path: str | Path, error: Exception) -> RunError:
    """The sentence for a checkpoint whose content cannot be used, whatever stumbled over it."""
    if isinstance(error, RunError):
        return error
    why = (
        wrong(error)
        if isinstance(error, ValidationError)
        else (str(error).splitlines() or [""])[0] or "no reason given"
    )
    return RunError(f"checkpoint {path} does not fit this version ({type(error).__name__}: {why})")


@contextmanager
def locked(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold a run's folder: a second run there would mix with the first. The lock dies with its process."""
    if not writes:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / ".lock", timeout=LOCK_WAIT).acquire()
    except Timeout:
        raise RunError(f"out = {str(folder)!r}: another process is running there") from None
    except OSError as e:
        raise RunError(f"out = {str(folder)!r}: cannot be written ({e.strerror})") from None
    with held:
        sweep(folder)  # nobody else is here: these are of runs that were killed
        yield


# ------------------------------------------------------------------ trained models


def load_model(path: str | Path, record: dict | None = None) -> nn.Module:
    """The trained model of a checkpoint, in test mode, with the solver and gradient rule of its run.

    Args:
        path: a checkpoint of a run, or weights that :func:`export_weights` wrote.
        record: if given, the weights must be those that it describes, else :class:`RunError`.
    """
    state = load_checkpoint(path)
    try:
        if record is not None and not describes(record, state["model"]):
            raise RunError(f"checkpoint {path} holds other weights than its record describes (by their sha256)")
        cfg = RunConfig.from_mapping(state["parameters"])
        shape = ModelConfig.from_dict(state["model_config"])
        model = build(shape, solver=make_solver(cfg, cfg.max_forward), adjoint=make_adjoint(cfg))
        numbers = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in state["model"].items()}
        model.load_state_dict(numbers)
        for name, value in model.state_dict().items():
            if not torch.isfinite(value).all():
                raise ValueError(f"{name} has entries that are not finite numbers")
        if any(v.dtype == torch.float16 for v in state["model"].values()):
            model.constrain()  # rounding may have lifted a norm above its bound
    except UNFIT as e:
        raise unfit(path, e) from None
    return model.eval()


def export_weights(checkpoint: str | Path, path: str | Path) -> None:
    """A small checkpoint for lessons on trained models: no optimizer, convolutions and matrices in half precision.

    Vectors stay in single precision: variances of BatchNorm may be too small for a half.
    """
    state = load_checkpoint(checkpoint)
    kept = {"format": FORMAT, "parameters": state["parameters"], "model_config": state["model_config"]}
    save_checkpoint(path, {**kept, "model": halved(state["model"])})


def halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as :func:`export_weights` keeps them."""
    return {k: v.half() if v.ndim > 1 else v for k, v in state.items()}


def weights_sha256(model: nn.Module) -> str:
    """One hash over all parameters and buffers: equal hashes, equal models, bit by bit.

    Hashed are, in the order of their names in the ``state_dict``, the name and the bytes of each tensor, on the CPU, row by row.
    """
    return fingerprint(model)


def half_sha256(model: nn.Module) -> str:
    """The same hash of the weights as :func:`export_weights` keeps them, in half precision."""
    return fingerprint(_Weights(halved(model.state_dict())))


class _Weights:
    """Tensors by name, for :func:`lipmdeq.certificate.fingerprint`."""

    def __init__(self, state: dict[str, torch.Tensor]):
        self.state_dict = lambda: state


def describes(record: dict, state: dict[str, torch.Tensor]) -> bool:
    """Whether these weights, full or in half precision, are those of the record."""
    known = {record.get("weights_sha256"), record.get("half_sha256")} - {None}
    return fingerprint(_Weights(state)) in known
