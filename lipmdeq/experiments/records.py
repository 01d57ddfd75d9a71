"""What a run leaves behind: one JSON record, and checkpoints that are whole or refused.

A checkpoint is one file: a line with the sha256 of what follows, then plain tensors, numbers, lists and dicts as
``torch.save`` writes them. It is read with ``weights_only=True``: nothing in a file is ever executed. Files are
written beside their place, synced and renamed, so that a kill or a full disk leaves the old file or the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from lipmdeq.certificate import Certificate, fingerprint
from lipmdeq.checks import jsonable
from lipmdeq.data.files import atomic, check_stored, sweep
from lipmdeq.experiments.parameters import BOOKKEEPING, RunConfig, RunError
from lipmdeq.experiments.seal import FORMAT as FORMAT
from lipmdeq.experiments.seal import content_sha256, read_json, read_sealed
from lipmdeq.experiments.seal import read_record as read_record

MAGIC = "lipmdeq-checkpoint-1"
RECORD, CHECKPOINT = "record.json", "checkpoint.ckpt"
UNFIT = (LookupError, TypeError, AttributeError, RuntimeError, ValueError, ArithmeticError, MemoryError)
LOCK_WAIT = 15.0  # seconds; the kernel of a killed notebook lives on for a moment
INFINITE = ("frobenius", "spectral", "perron", "norm")  # null in JSON stands for infinity in these


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes ``path`` when the block ends; trouble is one sentence and leaves the old file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as part:
            yield part
    except OSError as e:
        kept = "; the last complete file is kept" if path.exists() else ""
        raise RunError(f"{path} cannot be written ({e.strerror or e}){kept}") from e


def sealed(value: dict) -> dict:
    """The same as JSON reads it (infinities and NaN as null), with the ``sha256`` of its content."""
    plain = json.loads(json.dumps(jsonable(value), allow_nan=False))
    return {**plain, "sha256": content_sha256(plain)}


def write_json(path: str | Path, value: dict) -> None:
    """Sealed JSON (:mod:`lipmdeq.experiments`), atomically."""
    text = json.dumps(sealed(value), indent=1, ensure_ascii=False, allow_nan=False)
    with writing(Path(path)) as part:
        part.write_text(text + "\n", encoding="utf-8")


def save_checkpoint(path: str | Path, state: dict) -> None:
    """Write plain tensors, numbers, lists and dicts with their sha256, atomically."""
    buffer = io.BytesIO()
    torch.save(_on_cpu(state), buffer)
    content = buffer.getbuffer()
    with writing(Path(path)) as part, open(part, "wb") as f:
        f.write(f"{MAGIC} {hashlib.sha256(content).hexdigest()}\n".encode())
        f.write(content)


def _on_cpu(value):
    """The same with all tensors on the CPU, where every machine can read them; what is there already is left as it is."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict) and (moved := {k: _on_cpu(v) for k, v in value.items()}):
        return value if all(moved[k] is value[k] for k in moved) else moved
    if isinstance(value, list) and (moved := [_on_cpu(v) for v in value]):
        return value if all(a is b for a, b in zip(moved, value, strict=True)) else moved
    return value


def load_checkpoint(path: str | Path) -> dict:
    """Read a checkpoint on the CPU; :class:`RunError` in one sentence if it is missing, damaged or something else."""
    try:
        raw = Path(path).read_bytes()
    except OSError as e:
        raise RunError(f"checkpoint {path} cannot be read ({e.strerror})") from None
    head, _, content = raw.partition(b"\n")
    words = head[:200].split()
    if len(words) != 2 or words[0] != MAGIC.encode():
        raise RunError(f"{path} is not a checkpoint: its first line must be '{MAGIC} <sha256>'")
    if hashlib.sha256(content).hexdigest().encode() != words[1]:
        raise RunError(
            f"checkpoint {path} is damaged: its content does not have the sha256 of its first line; "
            "delete it to start the run again"
        )
    try:
        if content[:2] == b"PK":
            check_stored(io.BytesIO(content))
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as e:  # the unpickler raises whatever it likes at foreign content
        raise RunError(f"checkpoint {path} holds more than plain tensors ({type(e).__name__})") from None
    for name in ("parameters", "model_config", "model"):
        if not isinstance(state, dict) or not isinstance(state.get(name), dict):
            raise RunError(f"checkpoint {path} does not hold the state of a run ({name} is missing)")
    return state


def seal_file(path: str | Path) -> None:
    """Write a JSON file that has no seal again with one; a seal that does not fit is an error, not a reason to make a new one."""
    value = read_json(path, "a JSON file")
    if "sha256" in value:
        read_sealed(path, "a JSON file")
        return
    write_json(path, value)


def load_model(path: str | Path, record: dict | None = None) -> nn.Module:
    """The trained model of a checkpoint, in test mode, with the solver and gradient rule of its run.

    Args:
        path: a checkpoint of a run, or weights that :func:`export_weights` wrote.
        record: if given, the weights must be those that it describes, else :class:`RunError`.
    """
    from lipmdeq.experiments.step import make_adjoint, make_solver

    state = load_checkpoint(path)
    try:
        if record is not None and not describes(record, state["model"]):
            raise RunError(f"checkpoint {path} holds other weights than its record describes (by their sha256)")
        cfg = RunConfig.from_mapping(state["parameters"])
        model = build_model(state["model_config"], make_solver(cfg, cfg.max_forward), make_adjoint(cfg))
        model.load_state_dict(state["model"])
        if any(v.dtype == torch.float16 for v in state["model"].values()):
            model.constrain()  # rounding may have lifted a norm above its bound
    except UNFIT as e:
        raise unfit(path, e) from None
    return model.eval()


def unfit(path: str | Path, error: Exception) -> RunError:
    """The sentence for a checkpoint whose content cannot be used, whatever stumbled over it."""
    if isinstance(error, RunError):
        return error
    why = (str(error).splitlines() or [""])[0] or "no reason given"
    return RunError(f"checkpoint {path} does not fit this version ({type(error).__name__}: {why})")


def build_model(model_config: dict, solver, adjoint) -> nn.Module:
    """A fresh model from the model part of a checkpoint or a run."""
    from lipmdeq.model import MDEQ, ModelConfig

    model = MDEQ(ModelConfig.from_dict(model_config), solver, adjoint)
    return model.to(memory_format=torch.channels_last)


def export_weights(checkpoint: str | Path, path: str | Path) -> None:
    """A small checkpoint for lessons on trained models: no optimizer, convolutions and matrices in half precision.

    Vectors stay in single precision: variances of BatchNorm may be too small for a half.
    """
    state = load_checkpoint(checkpoint)
    kept = {"format": FORMAT, "parameters": state["parameters"], "model_config": state["model_config"]}
    save_checkpoint(path, {**kept, "model": halved(state["model"])})


@contextmanager
def locked(folder: Path, writes: bool = True) -> Iterator[None]:
    """Hold a run's folder: a second run there would mix with the first. The lock dies with its process."""
    if not writes:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / ".lock", "w")
    except OSError as e:
        raise RunError(f"out = {str(folder)!r}: cannot be written ({e.strerror})") from None
    with handle:
        end = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= end:
                    raise RunError(f"out = {str(folder)!r}: another process is running there") from None
                time.sleep(0.2)
        sweep(folder)  # nobody else is here: these are of runs that were killed
        yield


def same_run(cfg: RunConfig, parameters: dict, where: Path) -> None:
    """Refuse to go on in a folder that holds a run with other parameters."""
    old = {k: v for k, v in parameters.items() if k not in BOOKKEEPING}
    for name, value in cfg.identity().items():
        if name not in old or old[name] != value:
            was = repr(old[name]) if name in old else "missing"
            raise RunError(
                f"out = {str(where)!r}: holds a run with {name} = {was}, not {value!r}; nothing was changed, "
                "choose another folder or delete this one"
            )


def certificate_of(record: dict) -> Certificate:
    """The certificate of a record as an object that prints itself."""

    def restore(value):
        if isinstance(value, dict):
            return {k: math.inf if v is None and k in INFINITE else restore(v) for k, v in value.items()}
        return [restore(v) for v in value] if isinstance(value, list) else value

    names = Certificate.__dataclass_fields__
    try:
        return Certificate(**restore({k: v for k, v in record["certificate"].items() if k in names}))
    except (KeyError, TypeError, AttributeError) as e:
        raise RunError(f"the record holds no certificate of this version ({e})") from None


def matches_config(record: dict, cfg: RunConfig) -> bool:
    """Whether a record was made with these parameters (but for where it was kept)."""
    return RunConfig.from_mapping(record["parameters"]).identity() == cfg.identity()


# ------------------------------------------------------------------ where and with what it ran


def now() -> str:
    """UTC time to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """Commit of the package's source tree, with "+" when tracked files of the package were changed; None outside git."""
    here = Path(__file__).resolve().parents[1]  # the package

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    return commit and commit + ("+" if git("status", "--porcelain", "--", ".") else "")


def versions() -> dict:
    """Versions that may change the numbers."""
    found = {"python": platform.python_version()}
    for name in ("lipmdeq", "torch", "torchvision", "numpy", "scikit-learn"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine(device: torch.device) -> dict:
    """Processor, cores, memory, accelerator; no host name."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), cpu)
    except OSError:
        pass
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu, "system": f"{platform.system()} {platform.machine()}"}


def peak_memory(device: torch.device) -> dict:
    """Largest memory of the process, and of the GPU, in MB."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    found = {"process_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)}
    if device.type == "cuda":
        found["gpu_mb"] = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return found


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
