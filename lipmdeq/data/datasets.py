"""Data sets by name: digits, CIFAR-10, Tiny-ImageNet and any ``{train,val}/<class>/`` folder.

Small sets live in memory; folders are streamed by workers behind the same interface.

    >>> data = load("digits")
    >>> for x, y in data.train.batches(64, train=True, seed=0, epoch=0):  # x: (64, 1, 8, 8) float32
    ...     ...

``python -m lipmdeq data`` fetches and checks the files.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from lipmdeq.bounds.operations import check_whole
from lipmdeq.data.fetch import SMALL, TINY, digits_arrays
from lipmdeq.data.files import check_images, load_npz
from lipmdeq.data.images import Dataset, Split, area_downsample, mean_std
from lipmdeq.data.sampling import stratified_permutation
from lipmdeq.data.streaming import open_folder

DIGITS_TEST = 360  # test images of the digits, a fifth


def open_small(name: str, root: Path) -> tuple[Split, Split, tuple[str, ...], str]:
    """Official training and test images of a small set, class names and sha256, from a checked file."""
    if name == "digits":
        images, labels, sha = digits_arrays()
        order = stratified_permutation(torch.from_numpy(labels), seed=0)
        whole_set = Split(torch.from_numpy(images), torch.from_numpy(labels), (), ())
        parts = whole_set.take(order[:-DIGITS_TEST]), whole_set.take(order[-DIGITS_TEST:])
        return *parts, tuple("0123456789"), sha
    arrays, sha = load_npz(root / f"{name}.npz")
    check_images(root / f"{name}.npz", arrays)
    parts = []
    for part in ("train", "test"):
        images, labels = (torch.from_numpy(arrays[f"{part}_{what}"]) for what in ("images", "labels"))
        parts.append(Split(images, labels, (), ()))
    return *parts, tuple(arrays["classes"].tolist()), sha


@dataclass(frozen=True)
class Choice:
    """Which of the official images are used, by a stratified permutation of each of the two sets.

    Training takes the first ones, validation the last ones of the official training set: larger training sets contain smaller
    ones, and validation takes nothing from a training set that leaves room for it.

    Attributes:
        train_images: number of training images; None for all that validation leaves.
        val_images: number of validation images carved out of the training set.
        test_images: number of test images; None for all.
        seed: of the choice of images, not of their order; leave it alone to compare runs on equal images.
    """

    train_images: int | None = None
    val_images: int = 0
    test_images: int | None = None
    seed: int = 0


def choose(train: Split, test: Split, choice: Choice) -> tuple[Split, Split | None, Split]:
    """Training, validation and test parts of the official splits."""
    order = stratified_permutation(train.labels, choice.seed)
    rest = len(order) - check_whole("val_images", choice.val_images, 0, len(order) - 1)
    count = rest if choice.train_images is None else check_whole("train_images", choice.train_images, 1, rest)
    val = train.take(order[rest:]) if choice.val_images else None
    if choice.test_images is not None:
        first = check_whole("test_images", choice.test_images, 1, len(test))
        test = test.take(stratified_permutation(test.labels, choice.seed)[:first])
    return train.take(order[:count]), val, test


def _streamed(name: str, root: Path, stream: bool | None) -> bool:
    """Whether a data set is read image by image; ValueError for a name or a wish that cannot be."""
    if not name or (name not in (*SMALL, "imagenet") and not (root / str(name)).is_dir()):
        raise ValueError(
            f"data = {name!r}: must be {', '.join(SMALL)}, imagenet, or a folder of {root} "
            "that holds train/<class>/ and val/<class>/"
        )
    large = name not in SMALL
    if stream not in (None, large) and name != TINY:
        raise ValueError(f"stream = {stream!r}: must be {large} or None for {name}")
    return large if stream is None else stream


def load(
    name: str = "digits",
    root: str | Path = "data",
    *,
    resolution: int | None = None,
    augment: bool | None = None,
    stream: bool | None = None,
    workers: int = 2,
    **chosen: int | None,
) -> Dataset:
    """Open a data set, after checking its files. Mean and deviation are those of the chosen training images.

    Args:
        name: ``digits``, ``cifar10``, ``tiny-imagenet-25``, ``imagenet``, or any folder of ``root`` with
            ``{train,val}/<class>/`` images, whose ``val`` is the test set.
        root: folder of the data sets.
        resolution: image size. Small sets are averaged down over blocks, once, so it must divide their own
            size, the default; folders are cropped and resized to it, by default 224.
        augment: random crop (padding an eighth of the size: 4 at 32) and flip in training batches. Default:
            all but the digits.
        stream: read a folder image by image through workers. Default: all but the three small sets.
        workers: processes that decode streamed images; 0 decodes in this one.
        **chosen: ``train_images``, ``val_images``, ``test_images`` and ``seed`` of :class:`Choice`.

    Raises:
        ValueError: an option is out of range; the message names it, its value and what is allowed.
        DataError: a file is missing, truncated or changed; the message says what to run.
    """
    root, choice = Path(root), Choice(**chosen)
    for field, value in (("augment", augment), ("stream", stream)):
        if value not in (None, True, False):
            raise ValueError(f"{field} = {value!r}: must be True, False or None")
    if not _streamed(name, root, stream):
        return _in_memory(name, root, choice, resolution, name != "digits" if augment is None else augment)
    train, test, classes, sha = open_folder(root / name, resolution, augment is not False, workers)
    return Dataset(name, *choose(train, test, choice), classes, train.size, sha)


def _in_memory(name: str, root: Path, choice: Choice, resolution: int | None, crop: bool) -> Dataset:
    """A small set at a resolution, normalised by its training images."""
    train, test, classes, sha = open_small(name, root)
    splits = choose(train, test, choice)
    size = train.images.shape[-1] if resolution is None else resolution
    images = [None if s is None else area_downsample(s.images, size) for s in splits]
    mean, std = mean_std(images[0])
    look = {"mean": mean, "std": std, "padding": size // 8 if crop else None}
    splits = [s and dataclasses.replace(s, images=x, **look) for s, x in zip(splits, images, strict=True)]
    return Dataset(name, *splits, classes, size, sha)
