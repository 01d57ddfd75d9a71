"""Images in memory as uint8, and how a batch is made of them: cropped, flipped and normalised on its device.

Batch b of epoch e is a function of (seed, e, b) alone (``Plan``): a run resumes at any batch.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lipmdeq.bounds.operations import check_whole
from lipmdeq.data.sampling import Plan, stratified_permutation

Floats = tuple[float, ...]
Batch = tuple[Tensor, Tensor]  # images (B, C, H, W) float32, labels (B,) int64


def area_downsample(images: Tensor, size: int) -> Tensor:
    """Means over square blocks, rounded half up: (N, C, H, H) uint8 -> (N, C, size, size) uint8."""
    n, c, h, w = images.shape
    if h != w or h % check_whole("resolution", size, 1, h):
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
        index = stratified_permutation(self.labels.cpu(), seed)[: check_whole("count", count, 1, len(self))]
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
