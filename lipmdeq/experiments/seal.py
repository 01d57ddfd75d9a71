"""The seal of a JSON file: its field ``sha256`` is the hash of everything else in it. Plain Python, nothing here imports torch.

Hashed is the canonical JSON of the object without that field: keys sorted, no spaces, ASCII, numbers as Python writes them.
Spaces and the order of keys do not matter, a changed digit does. A seal shows accidents and careless edits; it is no signature.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lipmdeq.experiments.parameters import OneSentence, RunConfig, RunError

FORMAT = 1
# What readers of a record use: name -> names inside it.
NEEDED: dict[str, tuple[str, ...]] = {
    "seed": (),
    "scale": (),
    "guarantee": (),
    "parameters": (),
    "model": ("parameters",),
    "data": ("name", "train", "size"),
    "result": ("split", "accuracy", "top5", "images", "nfe_train_forward", "nfe_train_backward", "nfe_test_forward"),
    "history": (),
    "traces": (),
    "certificate": ("test", "train", "measured_norm"),
    "weights_sha256": (),
    "machine": ("threads",),
}  # fmt: skip


def content_sha256(value: dict) -> str:
    """The hash of a JSON object without its field ``sha256``, in hexadecimal digits."""
    rest = {k: v for k, v in value.items() if k != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _object(pairs: list[tuple[str, object]]) -> dict:
    """An object whose names are all different: of two equal ones a reader sees the first, Python the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def read_json(path: str | Path, what: str) -> dict:
    """A JSON object, sealed or not; :class:`RunError` in one sentence if there is none. ``what`` it should be: "a record"."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number)
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


def read_record(path: str | Path) -> dict:
    """The record of a run, unchanged and with all fields that readers use; else :class:`RunError` in one sentence."""
    record = read_sealed(path, "a record of a run")
    if record.get("format") != FORMAT:
        raise RunError(f"{path} has format {record.get('format')!r}: must be {FORMAT}")
    for name, inner in NEEDED.items():
        if name not in record:
            raise RunError(f"{path} is not a record of a finished run ({name} is missing)")
        for key in inner:
            if not isinstance(record[name], dict) or key not in record[name]:
                raise RunError(f"{path} is not a record of a finished run ({name}.{key} is missing)")
    for name in ("history", "traces"):
        if not isinstance(record[name], list) or not (record[name] or name == "traces"):
            raise RunError(f"{path} is not a record of a finished run ({name} must be a list of epochs)")
    if not isinstance(record["parameters"], dict):
        raise RunError(f"{path} is not a record of a finished run (parameters must be an object)")
    try:
        RunConfig.from_mapping(record["parameters"])
    except OneSentence as e:
        raise RunError(f"{path} is not a record of a run ({e})") from None
    return record
