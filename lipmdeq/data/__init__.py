"""Data sets: digits without a download, CIFAR-10, Tiny-ImageNet, folders of images."""

from lipmdeq.data.datasets import choose, load, open_small
from lipmdeq.data.files import DataError
from lipmdeq.data.images import Dataset, Split, area_downsample, crop_and_flip, mean_std, normalise
