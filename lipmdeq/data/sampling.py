"""Which image comes when: a pure function of seed, epoch and batch number.

No state is carried from one batch to the next. So a run resumes at any batch without replaying others,
and a run over several processes sees the images, and the augmentation, that a single process would see.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lipmdeq.bounds.operations import check_whole

ORDER, AUGMENT, SUBSET = 1, 2, 3  # purposes of random numbers: no two share a stream
LAST = 2**32 - 1  # largest seed and epoch: one word each of the key


def generator(purpose: int, seed: int, epoch: int = 0, batch: int = 0) -> torch.Generator:
    """A CPU generator for this purpose, seed, epoch and batch; distinct arguments give unrelated streams."""
    key = np.random.SeedSequence([purpose, check_whole("seed", seed, 0, LAST), epoch, batch])
    return torch.Generator().manual_seed(int(key.generate_state(1, np.uint64)[0]))


def stratified_permutation(labels: Tensor, seed: int) -> Tensor:
    """A permutation of ``range(N)`` whose every prefix and suffix holds the classes in proportion."""
    random = torch.randperm(len(labels), generator=generator(SUBSET, seed))
    shuffled = labels[random]
    place = torch.empty(len(labels), dtype=torch.float64)  # within the class, as a fraction of its size
    for c in shuffled.unique():
        where = (shuffled == c).nonzero().squeeze(1)
        place[where] = (torch.arange(len(where), dtype=torch.float64) + 0.5) / len(where)
    return random[place.argsort(stable=True)]  # ties fall in random order


@dataclass(frozen=True)
class Plan:
    """Which images the batches of one epoch hold: a function of its fields alone.

    Of ``world`` processes, number ``rank`` takes images ``rank, rank + world, ...`` of every batch, with the
    augmentation that a single process would give them.
    """

    count: int
    batch_size: int
    train: bool = False
    seed: int = 0
    epoch: int = 0
    start: int = 0
    drop_last: bool = False
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, 1)
        check_whole("seed", self.seed, 0, LAST)
        check_whole("epoch", self.epoch, 0, LAST)
        check_whole("world", self.world, 1)
        check_whole("rank", self.rank, 0, self.world - 1)
        check_whole("start", self.start, 0, self.steps)
        if self.batch_size % self.world:
            raise ValueError(f"batch_size = {self.batch_size}: must be a multiple of world = {self.world}")
        if self.train and self.world > 1 and not self.drop_last:  # unequal shares would be averaged as equals
            raise ValueError("drop_last = False: must be True to train on several processes")

    @property
    def steps(self) -> int:
        """Number of batches in the epoch, before ``start`` too."""
        return self.count // self.batch_size if self.drop_last else -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Indices (B,) and, in training, uniform numbers (B, 5) to augment with, of each batch."""
        order = torch.arange(self.count)
        if self.train:
            order = torch.randperm(self.count, generator=generator(ORDER, self.seed, self.epoch))
        mine = slice(self.rank, None, self.world)
        for b in range(self.start, self.steps):
            index = order[b * self.batch_size : (b + 1) * self.batch_size]
            u = None
            if self.train:
                u = torch.rand(len(index), 5, generator=generator(AUGMENT, self.seed, self.epoch, b))[mine]
            if len(index) > self.rank:
                yield index[mine], u
