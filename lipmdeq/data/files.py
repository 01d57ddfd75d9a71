"""Checked files: atomic writes, a sha256 beside every array file, images read from verified bytes.

Everything that is wrong with a file is one :class:`DataError`, whose sentence names the file and the command
that mends it. Arrays are stored without pickled objects, so that reading a file never runs code from it.
"""

import contextlib
import glob
import hashlib
import io
import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout
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
        raise DataError(f"{path} has sha256 {got[:12]}… instead of {wanted[:12]}… (truncated or changed): {mend}")


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; it becomes ``path`` if the block ends well, else it goes."""
    sweep(path.parent, f".{glob.escape(path.name)}.*.part")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with FileLock(part):  # others see that somebody writes it; the lock dies with its process
        try:
            yield part
            with open(part, "rb") as f:
                os.fsync(f.fileno())  # a power cut after the rename must not leave an empty file
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def sweep(folder: Path, pattern: str = ".*.part") -> None:
    """Remove the unfinished files of processes that were killed; those that somebody still writes are locked, and stay."""
    for part in folder.glob(pattern):
        with contextlib.suppress(Timeout, OSError), FileLock(part, timeout=0):  # locked, or not ours to remove
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
        check_stored(path)
        with np.load(path, allow_pickle=False) as z:
            for name in z.files:
                check_header(z.zip, name)
            return {k: z[k] for k in z.files}, sha
    except (OSError, ValueError, KeyError, TypeError, EOFError, NotImplementedError, MemoryError) as e:
        raise DataError(f"{path} cannot be read ({e}): {MEND}") from e
    except (AttributeError, zipfile.BadZipFile) as e:  # no archive at all: a single array
        raise DataError(f"{path} is not an archive of arrays ({e}): {MEND}") from e


def check_stored(file: Path | BinaryIO) -> None:
    """ValueError unless a zip archive is as long as what it holds: nothing packed, nothing twice, so nothing to blow up."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    size = os.path.getsize(file) if isinstance(file, Path) else file.seek(0, io.SEEK_END)
    if any(e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size for e in entries):
        raise ValueError("its entries are compressed")
    if sum(e.file_size for e in entries) > size:
        raise ValueError("its entries claim more bytes than the file has")


def check_header(archive: zipfile.ZipFile, name: str) -> None:
    """ValueError unless an array has as many bytes as its shape and type say, before memory is asked for."""
    entry = archive.getinfo(name if name in archive.namelist() else f"{name}.npy")
    with archive.open(entry) as f:
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        major, _ = np.lib.format.read_magic(f)
        if major not in read:
            raise ValueError(f"{name} has an unknown format")
        shape, _, dtype = read[major](f)
        claimed = math.prod(shape) * dtype.itemsize
        if claimed != entry.file_size - f.tell():
            raise ValueError(f"{name} claims {claimed} bytes and has {entry.file_size - f.tell()}")


def check_images(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """:class:`DataError` unless there are images, labels and classes of the right types that fit each other."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise DataError(f"{path}: {what}: {MEND}")

    for name in ("train_images", "train_labels", "test_images", "test_labels", "classes"):
        need(name in arrays, f"{name} is missing")
    classes = arrays["classes"]
    need(
        classes.ndim == 1 and classes.dtype.kind == "U" and len(classes) >= 2,
        "classes must be a list of two names or more",
    )
    shape = arrays["train_images"].shape[1:]
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        need(images.dtype == np.uint8, f"{part}_images has type {images.dtype}, must be uint8")
        right = images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[2] == images.shape[3] > 0 < len(images)
        need(right, f"{part}_images has shape {images.shape}, must be (N, 1 or 3, H, H)")
        need(images.shape[1:] == shape, f"{part}_images has other sizes than train_images")
        need(labels.dtype == np.int64, f"{part}_labels has type {labels.dtype}, must be int64")
        need(labels.shape == images.shape[:1], f"{part}_labels has shape {labels.shape}, must be {images.shape[:1]}")
        inside = 0 <= labels.min() and labels.max() < len(classes)
        need(inside, f"{part}_labels must be from 0 to {len(classes) - 1}, the number of classes minus 1")


def read_image(path: Path, sha: str | None, mend: str) -> Image.Image:
    """One image file as RGB (grey ones are repeated), its bytes checked first where ``sha`` is known."""
    try:
        raw = path.read_bytes()
        if sha is not None and hashlib.sha256(raw).hexdigest() != sha:
            raise DataError(f"{path} does not match its line in {MANIFEST} (truncated or changed): {mend}")
        return Image.open(io.BytesIO(raw)).convert("RGB")
    except FileNotFoundError as e:
        raise DataError(f"{path} is missing: {mend}") from e
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:  # Pillow's answers to bad files
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
    return bool(sums) and all((folder / f).is_file() and file_sha256(folder / f) == s for f, s in sums.items())
