"""Checked files: atomic writes, a sha256 beside every array file, images read from verified bytes.

Everything that is wrong with a file is one :class:`DataError`, whose sentence names the file and the command
that mends it. Arrays are stored without pickled objects, so that reading a file never runs code from it.
"""

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

MANIFEST = "SHA256SUMS"
MEND = "run `make data`"


class DataError(RuntimeError):
    """A data file is missing, truncated or changed; the message says what to run."""


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file, read in pieces."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def check_sha256(path: Path, wanted: str, mend: str) -> None:
    """Raise :class:`DataError` unless the file has this sha256."""
    got = file_sha256(path)
    if got != wanted:
        raise DataError(
            f"{path} has sha256 {got[:12]}… instead of {wanted[:12]}… (truncated or changed): {mend}"
        )


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; it becomes ``path`` if the block ends well, else it goes."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        with open(part, "rb") as f:
            os.fsync(f.fileno())  # a power cut after the rename must not leave an empty file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def checksum_file(path: Path) -> Path:
    """The file beside ``path`` that records its sha256, in the format of ``sha256sum``."""
    return path.with_name(path.name + ".sha256")


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write arrays and their checksum file; returns the sha256."""
    with atomic(path) as part:
        with open(part, "wb") as f:
            np.savez(f, allow_pickle=False, **arrays)
        sha = file_sha256(part)
    # Killed between the two renames, the pair disagrees: it is refused, and the next `make data` rebuilds it.
    with atomic(checksum_file(path)) as part:
        part.write_text(f"{sha}  {path.name}\n")
    return sha


def verified_sha256(path: Path) -> str:
    """The recorded sha256 of a file, after checking the file against it.

    Raises:
        DataError: if either file is missing, or they disagree.
    """
    note = checksum_file(path)
    for p in (path, note):
        if not p.is_file():
            raise DataError(f"{p} is missing: {MEND}")
    sha = (note.read_text(errors="replace").split() or ["nothing"])[0]
    check_sha256(path, sha, MEND)
    return sha


def load_npz(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Arrays and sha256 of a file written by :func:`save_npz`; :class:`DataError` unless it is whole."""
    sha = verified_sha256(path)
    try:
        with np.load(path, allow_pickle=False) as z:
            return {k: z[k] for k in z.files}, sha
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise DataError(f"{path} cannot be read ({e}): {MEND}") from e


def read_image(path: Path, sha: str | None, mend: str) -> Image.Image:
    """One image file as RGB (grey ones are repeated), its bytes checked first where ``sha`` is known."""
    try:
        raw = path.read_bytes()
        if sha is not None and hashlib.sha256(raw).hexdigest() != sha:
            raise DataError(f"{path} does not match its line in {MANIFEST} (truncated or changed): {mend}")
        return Image.open(io.BytesIO(raw)).convert("RGB")
    except FileNotFoundError as e:
        raise DataError(f"{path} is missing: {mend}") from e
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as e:  # Pillow's answers to bad files
        raise DataError(f"{path} cannot be decoded ({e}): {mend}") from e


def write_manifest(folder: Path) -> None:
    """Record the sha256 of every file of a folder in its SHA256SUMS."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    lines = [f"{file_sha256(p)}  {p.relative_to(folder).as_posix()}\n" for p in files]
    with atomic(folder / MANIFEST) as part:
        part.write_text("".join(lines))


def read_manifest(folder: Path) -> dict[str, str] | None:
    """``{relative path: sha256}`` from the folder's SHA256SUMS, or None where there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    lines = (line.split(maxsplit=1) for line in path.read_text(errors="replace").splitlines())
    return {line[1].removeprefix("*").removeprefix("./"): line[0] for line in lines if len(line) == 2}


def folder_is_whole(folder: Path) -> bool:
    """Whether every file of the folder's SHA256SUMS is there, unchanged."""
    sums = read_manifest(folder)
    return bool(sums) and all(
        (folder / f).is_file() and file_sha256(folder / f) == s for f, s in sums.items()
    )
