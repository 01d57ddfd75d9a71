"""Data sets: digits without a download, CIFAR-10, Tiny-ImageNet, folders of images.

Light: torch is imported only when a name that needs it is used for the first time.
"""

from lipmdeq import attach

_HOMES = {
    "datasets": "Choice choose load open_small",
    "files": "DataError",
    "images": "Dataset Split area_downsample crop_and_flip mean_std normalise",
}
__getattr__, __dir__, __all__ = attach(__name__, _HOMES)
