"""The record of a run: what it holds, how it is sealed, written and read. Plain Python, nothing here imports torch.

A record is one JSON object, declared by `Record`: what has no default is needed by its readers, what has one may be missing in
records of earlier versions. Its field ``sha256`` is the seal: the hash of the canonical JSON of everything else (keys sorted, no
spaces, ASCII, numbers as Python writes them). Spaces and the order of keys do not matter, a changed digit does. A seal shows
accidents and careless edits; it is no signature. Infinity is written as null, which JSON has instead.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from lipmdeq.data.files import atomic
from lipmdeq.experiments.parameters import OneSentence, RunConfig, RunError, short

if TYPE_CHECKING:
    from lipmdeq.certificate import Certificate

FORMAT, RECORD = 1, "record.json"  # RECORD: its name in the folder of a run
SIGNS = {"ge": ">=", "le": "<=", "lt": "<"}
INFINITE = ("frobenius", "spectral", "perron", "norm")  # null stands for infinity in these
Numbers = dict[str, float]
Found = dict[str, float | None]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Several = Annotated[int, Field(ge=1, lt=2**63)]
Residual = Annotated[list[Amount | None], Field(min_length=1)]


# ------------------------------------------------------------------ what a record holds


class Part(BaseModel):
    """An object inside a record."""

    model_config = ConfigDict(strict=True, protected_namespaces=())


class Model(Part):
    config: dict = {}  # lipmdeq.model.ModelConfig
    parameters: Count  # number of weights
    trained: Count = 0  # those that were not held fixed


class Data(Part):
    name: str
    train: Several  # images
    evaluated: Count = 0  # images
    classes: Count = 0
    size: Several  # height and width of the images
    sha256: str | None = None  # of the file of images


class Counts(Part):
    """Means over the images of one epoch, in training or evaluated; ``…_backward`` with method = implicit, in training only."""

    images: Several
    loss: float  # cross-entropy
    accuracy: Share
    top5: Share | None  # None with fewer than ten classes
    nfe_forward: Amount  # calls of f for the whole batch
    nfe_backward: Amount = 0.0
    steps_forward: Amount = 0.0  # calls after which an image had converged by itself
    steps_backward: Amount = 0.0
    attached_forward: Amount = 0.0  # calls that only attached the graph
    attached_backward: Amount = 0.0
    not_converged_forward: Count  # images
    not_converged_backward: Count = 0
    worst_residual_forward: float | None  # largest relative residual at the end of a solve
    worst_residual_backward: float | None = None


class Epoch(Part):
    epoch: Several  # from 1
    train: Counts | None = None
    test: Counts | None = None  # or val, whichever is evaluated; None between evaluations
    val: Counts | None = None
    steps: Count = 0
    seconds: Numbers = {}  # data, forward, backward, optimizer, constrain, their sum train, evaluation
    lipschitz: Found = {}  # proved: test, train; at a few images: measured ‖J‖, spectral_radius; worst_over_c: largest bound / c


class Residuals(Part):
    """Over the images of a batch, after each evaluation; null where it was not finite."""

    mean: Residual
    median: Residual
    worst: Residual


class Trace(Part):
    """Relative residual after each of a forced number of evaluations, over the images of a fixed batch."""

    epoch: Count  # after how many epochs
    images: Count = 0
    train_forward: Residuals
    train_backward: Residuals
    test_forward: Residuals


class Result(Part):
    """Of the last epoch."""

    split: Literal["test", "val"]  # what was evaluated
    accuracy: Share
    top5: Share | None
    loss: float | None = None
    images: Several
    nfe_train_forward: Amount | None  # evaluations of f in a solve
    calls_train_forward: Amount | None = None  # with those that only attach the graph
    nfe_train_backward: Amount | None  # None where the method has no backward solve
    nfe_test_forward: Amount | None
    milliseconds_per_step: Numbers = {}
    seconds: Numbers = {}  # of the whole run
    memory: Numbers = {}  # process_mb, gpu_mb


class Reading(Part):
    """L of the trained weights in one mode; the rest is described in lipmdeq.certificate."""

    model_config = ConfigDict(extra="allow")

    perron: Amount | None
    frobenius: Amount | None


class Proof(Part):
    """lipmdeq.certificate.Certificate, all of it."""

    model_config = ConfigDict(extra="allow")

    test: Reading
    train: Reading
    measured_norm: Amount | None  # of the Jacobian


class Machine(Part):
    cpu: str = ""
    cores: Count | None = None
    gpu: str | None = None
    system: str = ""
    processes: Count = 1
    threads: Several  # of each process


class Record(Part):
    """The record of a finished run."""

    format: int = FORMAT
    scale: str  # what was computed, in words
    command: str = ""  # that repeats the run
    seed: int
    parameters: dict  # RunConfig
    model: Model
    data: Data
    result: Result
    guarantee: str  # what is proved, in words
    history: Annotated[list[Epoch], Field(min_length=1)]
    traces: list[Trace]
    certificate: Proof
    depth: dict = {}  # lipmdeq.experiments.Depth
    weights_sha256: str  # of all parameters and buffers
    half_sha256: str | None = None  # of the same in half precision, as lessons keep them
    code: dict = {}  # commit at the end, commits of all sessions
    versions: dict = {}  # of Python and packages
    machine: Machine
    started: str = ""  # UTC
    finished: str = ""
    sha256: str = ""  # the seal


# ------------------------------------------------------------------ sealed JSON


def content_sha256(value: dict) -> str:
    """The hash of a JSON object without its field ``sha256``, in hexadecimal digits."""
    rest = {k: v for k, v in value.items() if k != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def json_text(value: object, indent: int = 1) -> str:
    """JSON for people and files; infinities and NaN become null."""
    return to_json(value, indent=indent, inf_nan_mode="null").decode()


def sealed(value: dict) -> dict:
    """The same as JSON reads it, with the ``sha256`` of its content."""
    plain = json.loads(json_text(value))
    return {**plain, "sha256": content_sha256(plain)}


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


def write_json(path: str | Path, value: dict) -> None:
    """Sealed JSON, atomically."""
    text = json.dumps(sealed(value), indent=1, ensure_ascii=False, allow_nan=False)
    with writing(Path(path)) as part:
        part.write_text(text + "\n", encoding="utf-8")


def _object(pairs: list[tuple[str, object]]) -> dict:
    """An object whose names are all different: of two equal ones a reader sees the first, Python the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _no_number(short(text))


def read_json(path: str | Path, what: str) -> dict:
    """A JSON object, sealed or not; :class:`RunError` in one sentence if there is none. ``what`` it should be: "a record"."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_number)
    except OSError as e:
        raise RunError(f"{path} cannot be read ({e.strerror or e})") from None
    except (ValueError, RecursionError) as e:
        why = "nested too deeply" if isinstance(e, RecursionError) else e
        raise RunError(f"{path} is not {what}: it is truncated or was changed ({why})") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is not {what} (a JSON {type(value).__name__}, must be an object)")
    return value


def read_sealed(path: str | Path, what: str) -> dict:
    """A JSON object that is as it was written; :class:`RunError` in one sentence if it was changed or has no seal."""
    value = read_json(path, what)
    if not isinstance(value.get("sha256"), str):
        raise RunError(
            f"{path} has no sha256 of its content, so nobody can tell whether it was changed: restore it, make it again, "
            f"or seal it as it is with `python -m lipmdeq seal {path}`"
        )
    if value["sha256"] != content_sha256(value):
        raise RunError(
            f"{path} was changed after it was written: its content does not have the sha256 that stands in it; "
            "restore it or delete it and make it again"
        )
    return value


def seal_file(path: str | Path) -> None:
    """Write a JSON file that has no seal again with one; a seal that does not fit is an error, not a reason to make a new one."""
    value = read_json(path, "a JSON file")
    if "sha256" in value:
        read_sealed(path, "a JSON file")
        return
    write_json(path, value)


# ------------------------------------------------------------------ records


def wrong(error: ValidationError, whole: str = "it") -> str:
    """The first thing that is wrong, by its place: "result.accuracy = 'x': must be a number"; ``whole``: what all of it is."""
    first = error.errors(include_url=False)[0]
    where, kind = ".".join(map(str, first["loc"])) or whole, first["type"]
    if kind == "missing":
        return f"{where} is missing"
    kinds = {
        "model_type": "an object",
        "dict_type": "an object",
        "list_type": "a list",
        "too_short": "a list that is not empty",
    }
    if kind in kinds:
        return f"{where} must be {kinds[kind]}"
    if ends := [f"{SIGNS[k]} {v:g}" for k, v in first.get("ctx", {}).items() if k in SIGNS]:
        return f"{where} = {short(first['input'])}: must be {ends[0]}"
    kinds = {"float_type": "a number", "finite_number": "a number", "int_type": "a whole number", "string_type": "text"}
    return f"{where} = {short(first['input'])}: must be {kinds.get(kind, 'of another kind')}"


def read_record(path: str | Path) -> dict:
    """The record of a run, unchanged and as `Record` declares it; else :class:`RunError` in one sentence."""
    record = read_sealed(path, "a record of a run")
    if record.get("format") != FORMAT:
        raise RunError(f"{path} has format {record.get('format')!r}: must be {FORMAT}")
    try:
        RunConfig.from_mapping(Record.model_validate(record).parameters)
    except ValidationError as e:
        raise RunError(f"{path} is not a record of a finished run ({wrong(e)})") from None
    except OneSentence as e:
        raise RunError(f"{path} is not a record of a run ({e})") from None
    return record


def same_run(cfg: RunConfig, parameters: dict, where: Path) -> None:
    """Refuse to go on in a folder that holds a run with other parameters; one that is younger than the run had its default."""
    for name, value in cfg.identity().items():
        was = parameters.get(name, RunConfig.model_fields[name].default)
        if was != value:
            raise RunError(
                f"out = {str(where)!r}: holds a run with {name} = {was!r}, not {value!r}; nothing was changed, "
                "choose another folder or delete this one"
            )


def matches_config(record: dict, cfg: RunConfig) -> bool:
    """Whether a record was made with these parameters (but for where it was kept)."""
    return RunConfig.from_mapping(record["parameters"]).identity() == cfg.identity()


def certificate_of(record: dict) -> Certificate:
    """The certificate of a record as an object that prints itself."""
    from lipmdeq.certificate import Certificate

    def restore(value):
        if isinstance(value, dict):
            return {k: math.inf if v is None and k in INFINITE else restore(v) for k, v in value.items()}
        return [restore(v) for v in value] if isinstance(value, list) else value

    names = Certificate.__dataclass_fields__
    try:
        return Certificate(**restore({k: v for k, v in record["certificate"].items() if k in names}))
    except (KeyError, TypeError, AttributeError) as e:
        raise RunError(f"the record holds no certificate of this version ({e})") from None
