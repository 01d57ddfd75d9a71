"""Folders too large for memory: ``{train,val}/<class>/`` images, decoded by workers.

Training images are cropped as usual for ImageNet (a random 8 to 100 % of the area, aspect 3/4 to 4/3, random
flip); test images are the centre square, 7/8 of the shorter side. All random numbers come with the plan
of the epoch, so the workers have no state (torchvision's transforms draw their own, so they are not used). If the
folder holds a ``SHA256SUMS`` (as ``sha256sum`` writes it), the bytes of every image are checked before they are decoded.
"""

import dataclasses
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import pil_to_tensor

from lipmdeq.bounds.operations import check_whole
from lipmdeq.data.fetch import TINY
from lipmdeq.data.files import MANIFEST, MEND, DataError, file_sha256, read_image, read_manifest
from lipmdeq.data.images import Batch, Floats, Split, normalise
from lipmdeq.data.sampling import Plan

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def random_box(width: int, height: int, u: list[float]) -> tuple[float, ...]:
    """Left, top, right, bottom of a random part; ``u`` uniform in [0, 1): area, aspect, left, top, (flip)."""
    area = (0.08 + 0.92 * u[0]) * width * height
    aspect = math.exp((2 * u[1] - 1) * math.log(4 / 3))
    w, h = min(width, math.sqrt(area * aspect)), min(height, math.sqrt(area / aspect))
    left, top = u[2] * (width - w), u[3] * (height - h)
    return left, top, left + w, top + h


def centre_box(width: int, height: int) -> tuple[float, ...]:
    """The centre square with 7/8 of the shorter side: 224 of 256."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def mend_for(folder: Path) -> str:
    """What to do about a damaged image."""
    return MEND if folder.name == TINY else "restore it from your copy of the data set"


@dataclass(frozen=True, eq=False)
class FolderSplit(Split):
    """A :class:`Split` whose images stay on disk: ``images`` (N,) are indices into ``paths``."""

    folder: Path = Path()
    paths: tuple[str, ...] = ()
    sums: dict[str, str] | None = None
    size: int = 224
    workers: int = 2
    device: str | torch.device = "cpu"

    def to(self, device: str | torch.device) -> "FolderSplit":
        """The same split, its batches yielded on a device."""
        return dataclasses.replace(self, device=device)

    def __getitem__(self, key: tuple[int, list[float] | None]) -> tuple[Tensor, int] | DataError:
        """One decoded image (3, H, W) uint8 and its label, or what is wrong with it."""
        index, u = key
        try:
            image = self.read(self.paths[int(self.images[index])])
        except DataError as e:
            return e  # as a value: raised in a worker it would arrive wrapped in that worker's traceback
        box = centre_box(*image.size) if u is None else random_box(*image.size, u)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        if u is not None and u[4] < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return pil_to_tensor(image), int(self.labels[index])

    def read(self, path: str) -> Image.Image:
        """The image at a path relative to the folder, checked against SHA256SUMS where there is one."""
        mend = mend_for(self.folder)
        if self.sums is not None and path not in self.sums:
            raise DataError(f"{self.folder / path} has no line in {MANIFEST}: {mend}")
        return read_image(self.folder / path, self.sums and self.sums[path], mend)

    def _batches(self, plan: Plan) -> Iterator[Batch]:
        def keys() -> Iterator[list[tuple[int, list[float] | None]]]:
            for index, u in plan:
                numbers = [None] * len(index) if u is None or self.padding is None else u.tolist()
                yield list(zip(index.tolist(), numbers, strict=True))

        loader = DataLoader(
            self,
            batch_sampler=keys(),
            num_workers=self.workers,
            collate_fn=collate,
            generator=torch.Generator(),  # else the loader draws from, and so disturbs, the global one
            pin_memory=torch.device(self.device).type == "cuda",
        )
        with interrupt_later():
            batches = iter(loader)  # forks the workers
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            x, y = (t.to(self.device, non_blocking=True) for t in batch)
            yield normalise(x, self.mean, self.std), y


@contextmanager
def interrupt_later() -> Iterator[None]:
    """Hold back Ctrl-C until the block ends: Python drops an interrupt that falls into its own part of a fork."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen:
        signal.raise_signal(signal.SIGINT)


def collate(items: list) -> Batch | DataError:
    """Stack images and labels; the first error, if there is one, takes the place of the batch."""
    for item in items:
        if isinstance(item, DataError):
            return item
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def open_folder(folder: Path, size: int | None, augment: bool, workers: int):
    """Training and test split of a folder, class names, and the sha256 of its SHA256SUMS (or None)."""
    size = 224 if size is None else check_whole("resolution", size, 1)
    check_whole("workers", workers, 0)
    listings = []
    for part in ("train", "val"):
        try:
            listings.append(ImageFolder(str(folder / part)))
        except FileNotFoundError as e:  # torchvision says so of a class without images too
            mend = MEND if folder.name == TINY else f"link your copy there, `ln -s <your copy> {folder}`"
            raise DataError(f"{folder / part} does not hold <class>/ folders of images: {mend}") from e
    if listings[0].classes != listings[1].classes:
        odd = sorted(set(listings[0].classes) ^ set(listings[1].classes))
        raise DataError(f"{folder}: classes differ between train and val ({', '.join(odd[:3])}): complete the folder")
    sums = read_manifest(folder)
    if sums is None and folder.name == TINY:
        raise DataError(f"{folder / MANIFEST} is missing: {MEND}")
    sha = file_sha256(folder / MANIFEST) if sums is not None else None
    splits = []
    for listing in listings:
        paths = tuple(Path(p).relative_to(folder).as_posix() for p, _ in listing.samples)
        index, labels = torch.arange(len(paths)), torch.tensor(listing.targets)
        look: tuple[Floats, Floats, int | None] = (IMAGENET_MEAN, IMAGENET_STD, 0 if augment else None)
        gone = {p for p in sums or () if p.startswith(f"{Path(listing.root).name}/")}.difference(paths)
        if gone:
            raise DataError(f"{folder / min(gone)} is missing: {mend_for(folder)}")
        splits.append(FolderSplit(index, labels, *look, folder, paths, sums, size, workers))
    return *splits, tuple(listings[0].classes), sha
