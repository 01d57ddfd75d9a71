"""Data sets as seeded batches: digits, CIFAR-10, Tiny-ImageNet and any ``{train,val}/<class>/`` folder.

Small sets live in memory as uint8 and are cropped, flipped and normalised a batch at a time on their device;
folders are streamed by workers (:mod:`lipmdeq.streaming`) behind the same interface. Batch b of epoch e is a
function of (seed, e, b) alone (:mod:`lipmdeq.sampling`): a run resumes at any batch.

    >>> data = load("digits")
    >>> for x, y in data.train.batches(64, train=True, seed=0, epoch=0):  # x: (64, 1, 8, 8) float32
    ...     ...

``python -m lipmdeq.data`` fetches and checks the files (:mod:`lipmdeq.fetch`).
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from lipmdeq.fetch import TINY, digits_arrays
from lipmdeq.files import DataError, check_images, load_npz
from lipmdeq.sampling import Plan, stratified_permutation, whole

__all__ = ["DataError", "Dataset", "Split", "load"]

SMALL = ("digits", "cifar10", TINY)  # kept in memory
DIGITS_TEST = 360  # test images of the digits, a fifth
Floats = tuple[float, ...]
Batch = tuple[Tensor, Tensor]  # images (B, C, H, W) float32, labels (B,) int64


def area_downsample(images: Tensor, size: int) -> Tensor:
    """Means over square blocks, rounded half up: (N, C, H, H) uint8 -> (N, C, size, size) uint8."""
    n, c, h, w = images.shape
    if h != w or h % whole("resolution", size, 1, h):
        raise ValueError(f"resolution = {size}: must divide the image size {h} x {w}")
    s = h // size
    if s == 1:
        return images
    sums = torch.zeros(n, c, size, size, dtype=torch.int32)
    for i in range(s):
        for j in range(s):
            sums += images[:, :, i::s, j::s]
    return ((2 * sums + s * s) // (2 * s * s)).to(torch.uint8)


def mean_std(images: Tensor) -> tuple[Floats, Floats]:
    """Channel means and deviations of (N, C, H, W) uint8 images on the scale [0, 1], from exact counts."""
    mean, std = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).tolist()  # pixels of each grey level
        count, first, second = (sum(k * v**e for v, k in enumerate(counts)) for e in range(3))  # no rounding
        mean.append(first / count / 255)
        deviation = math.sqrt(count * second - first**2) / count / 255
        std.append(max(deviation, 1e-3))  # blank images: no division by zero
    return tuple(mean), tuple(std)


def normalise(images: Tensor, mean: Floats, std: Floats) -> Tensor:
    """uint8 (B, C, H, W) to float32 with the channel means and deviations (on the scale [0, 1]) removed."""
    shift, scale = (_levels(v, images.device) for v in (mean, std))
    return (images.to(torch.float32) - shift) / scale


@lru_cache(maxsize=16)  # on a GPU each copy from the host would make it wait, at every batch
def _levels(values: Floats, device: torch.device) -> Tensor:
    """Numbers on the scale [0, 1] as grey levels for every channel, (1, C, 1, 1)."""
    return torch.tensor(values, device=device, dtype=torch.float32).reshape(1, -1, 1, 1) * 255


def crop_and_flip(images: Tensor, padding: int, u: Tensor) -> Tensor:
    """Random crop after black padding, random mirror image; ``u`` (B, 3) uniform in [0, 1) decides.

    One gather for the whole batch (B, C, H, W) on its device; same result on every device.
    """
    b, c, h, w = images.shape
    u = u.to(images.device, non_blocking=True)
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top, left = (u[:, :2] * (2 * padding + 1)).long().unbind(1)
    rows = top[:, None] + torch.arange(h, device=images.device)
    columns = torch.arange(w, device=images.device).expand(b, w)
    columns = left[:, None] + torch.where(u[:, 2:] < 0.5, columns, w - 1 - columns)
    samples = torch.arange(b, device=images.device)[:, None, None, None]
    channels = torch.arange(c, device=images.device)[None, :, None, None]
    return padded[samples, channels, rows[:, None, :, None], columns[:, None, None, :]]


@dataclass(frozen=True, eq=False)
class Split:
    """Images in memory with their labels; the training, validation or test part of a data set.

    Attributes:
        images: (N, C, H, W) uint8.
        labels: (N,) int64.
        mean, std: C numbers each, on the scale [0, 1].
        padding: of the random crop in training batches (and a random flip); None leaves images as they are.
    """

    images: Tensor
    labels: Tensor
    mean: Floats
    std: Floats
    padding: int | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch_size: int, drop_last: bool = False) -> int:
        """Number of batches in one epoch."""
        return Plan(len(self), batch_size, drop_last=drop_last).steps

    def take(self, index: Tensor) -> "Split":
        """The part with these indices, in their order."""
        return dataclasses.replace(self, images=self.images[index], labels=self.labels[index])

    def sample(self, count: int, seed: int = 0) -> Batch:
        """One fixed batch, not augmented, with the classes in proportion: for traces, figures and probes."""
        index = stratified_permutation(self.labels.cpu(), seed)[: whole("count", count, 1, len(self))]
        return next(self.take(index.to(self.labels.device)).batches(count))

    def to(self, device: str | torch.device) -> "Split":
        """The same split on a device: batches are made, and yielded, there."""
        return dataclasses.replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def batches(self, batch_size: int, **plan: object) -> Iterator[Batch]:
        """Batches of one epoch, normalised.

        Args:
            batch_size: images per batch, over all processes together.
            **plan: ``train=True`` shuffles and augments (default False: in order, as they are); ``seed``,
                ``epoch`` and ``start`` (first batch, to resume); ``drop_last``; ``rank`` and ``world``.

        Yields:
            images (B, C, H, W) float32 and labels (B,) int64, on the device of the split.
        """
        return self._batches(Plan(len(self), batch_size, **plan))  # bad ones raise here already

    def _batches(self, plan: Plan) -> Iterator[Batch]:
        for index, u in plan:
            index = index.to(self.labels.device, non_blocking=True)
            x = self.images[index]
            if u is not None and self.padding is not None:
                x = crop_and_flip(x, self.padding, u[:, :3])
            yield normalise(x, self.mean, self.std), self.labels[index]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: ``train``, ``val`` (None unless asked for) and ``test``.

    Attributes:
        classes: names, in the order of the labels.
        size: height and width of the images.
        sha256: of the file that the images come from, for the record of a run.
    """

    name: str
    train: Split
    val: Split | None
    test: Split
    classes: tuple[str, ...]
    size: int
    sha256: str | None

    @property
    def in_channels(self) -> int:
        """Channels of the images: 1 for the digits, else 3."""
        return len(self.train.mean)

    def to(self, device: str | torch.device) -> "Dataset":
        """The same data set with all splits on a device."""
        parts = {k: s.to(device) for k in ("train", "val", "test") if (s := getattr(self, k)) is not None}
        return dataclasses.replace(self, **parts)

    def __str__(self) -> str:
        val = f"{len(self.val)} val, " if self.val is not None else ""
        shape = f"{self.in_channels} x {self.size} x {self.size}"
        counts = f"{len(self.train)} train, {val}{len(self.test)} test"
        return f"{self.name}: {counts} images of {shape}, {len(self.classes)} classes"


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


def choose(
    train: Split, test: Split, train_images: int | None, val_images: int, test_images: int | None, seed: int
) -> tuple[Split, Split | None, Split]:
    """Training, validation and test parts of the official splits, as :func:`load` describes them."""
    order = stratified_permutation(train.labels, seed)
    rest = len(order) - whole("val_images", val_images, 0, len(order) - 1)
    count = rest if train_images is None else whole("train_images", train_images, 1, rest)
    val = train.take(order[rest:]) if val_images else None
    if test_images is not None:
        index = stratified_permutation(test.labels, seed)[: whole("test_images", test_images, 1, len(test))]
        test = test.take(index)
    return train.take(order[:count]), val, test


def load(
    name: str = "digits",
    root: str | Path = "data",
    *,
    train_images: int | None = None,
    val_images: int = 0,
    test_images: int | None = None,
    resolution: int | None = None,
    augment: bool | None = None,
    seed: int = 0,
    stream: bool | None = None,
    workers: int = 2,
) -> Dataset:
    """Open a data set, after checking its files.

    ``train`` holds the first ``train_images``, ``val`` the last ``val_images`` of a stratified permutation of the
    official training set: larger training sets contain smaller ones, and validation takes nothing from a
    training set that leaves room for it. Mean and deviation are those of the chosen training images.

    Args:
        name: ``digits``, ``cifar10``, ``tiny-imagenet-25``, ``imagenet``, or any folder of ``root`` with
            ``{train,val}/<class>/`` images, whose ``val`` is the test set.
        root: folder of the data sets.
        train_images: number of training images; None for all that validation leaves.
        val_images: number of validation images carved out of the training set.
        test_images: number of test images (stratified); None for all.
        resolution: image size. Small sets are averaged down over blocks, once, so it must divide their own
            size, the default; folders are cropped and resized to it, by default 224.
        augment: random crop (padding an eighth of the size: 4 at 32) and flip in training batches. Default:
            all but the digits.
        seed: of the choice of images, not of their order; leave it alone to compare runs on equal images.
        stream: read a folder image by image through workers. Default: all but the three small sets.
        workers: processes that decode streamed images; 0 decodes in this one.

    Raises:
        ValueError: an option is out of range; the message names it, its value and what is allowed.
        DataError: a file is missing, truncated or changed; the message says what to run.
    """
    root, given = Path(root), (train_images, val_images, test_images)
    for field, value in (("augment", augment), ("stream", stream)):
        if value not in (None, True, False):
            raise ValueError(f"{field} = {value!r}: must be True, False or None")
    if not name or (name not in (*SMALL, "imagenet") and not (root / str(name)).is_dir()):
        raise ValueError(
            f"data = {name!r}: must be {', '.join(SMALL)}, imagenet, or a folder of {root} "
            "that holds train/<class>/ and val/<class>/"
        )
    streamed = name not in SMALL if stream is None else stream
    if streamed != (name not in SMALL) and name != TINY:
        raise ValueError(f"stream = {stream!r}: must be {not streamed} or None for {name}")
    if streamed:
        from lipmdeq.streaming import open_folder

        train, test, classes, sha = open_folder(root / name, resolution, augment is not False, workers)
        return Dataset(name, *choose(train, test, *given, seed), classes, train.size, sha)
    train, test, classes, sha = open_small(name, root)
    splits = choose(train, test, *given, seed)
    size = train.images.shape[-1] if resolution is None else resolution
    images = [None if s is None else area_downsample(s.images, size) for s in splits]
    crop = name != "digits" if augment is None else augment
    mean, std = mean_std(images[0])
    look = {"mean": mean, "std": std, "padding": size // 8 if crop else None}
    splits = [s and dataclasses.replace(s, images=x, **look) for s, x in zip(splits, images, strict=True)]
    return Dataset(name, *splits, classes, size, sha)


if __name__ == "__main__":
    from lipmdeq.fetch import main
    from lipmdeq.shell import guarded

    raise SystemExit(guarded("lipmdeq.data", main))
