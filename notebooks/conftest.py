"""`pytest --nbval notebooks/` compares what a reader sees, not the bytes: see tools/compare.py."""

import copy
import sys
from pathlib import Path

from nbval.plugin import IPyNbCell

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from compare import SVG, settle  # noqa: E402
from pictures import difference  # noqa: E402


class Cell(IPyNbCell):
    """A cell of nbval whose new outputs are first compared as a reader would."""

    def compare_outputs(self, test, ref, skip_compare=None):
        stored = copy.deepcopy(ref)
        new = settle(stored, test, measured="measured" in self.cell.metadata.get("tags", []))
        name_differences(stored, new)
        return super().compare_outputs(new, stored, skip_compare)


def name_differences(stored: list, new: list) -> None:
    """Put one sentence in the place of two pictures that differ: nobody finds a curve in 3000 lines of SVG."""
    for old, output in zip(stored, new, strict=False):
        before, after = (o.get("data", {}).get(SVG) for o in (old, output))
        if before and after and before != after:
            old["data"][SVG], output["data"][SVG] = "the stored picture", difference(before, after)


def pytest_itemcollected(item):
    if type(item) is IPyNbCell:
        item.__class__ = Cell
        item.output_timeout = 120  # seconds; five are too few on a busy machine
