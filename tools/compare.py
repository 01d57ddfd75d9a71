"""Whether the outputs of a cell are those that are stored, as far as a reader can tell.

Pictures are compared by what they show (tools/pictures.py). Numbers printed by a cell with the tag ``measured`` are
compared as numbers, since single precision and training give other last digits on another processor. The rest is text.
"""

import copy
import re

from pictures import difference

SVG = "image/svg+xml"
DECIMAL = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?")
SHARE = 0.01  # a measured number may move by its last digit, if this is at most one per cent of it


def settle(stored: list, new: list, measured: bool = False) -> list:
    """The new outputs of a cell, in which each that a reader takes for the stored one is the stored one.

    Args:
        stored: the outputs in the notebook (dictionaries of nbformat).
        new: the outputs of the cell now.
        measured: whether its numbers are measured.

    Returns:
        a copy of ``new``: equal to ``stored`` exactly if nothing that counts has changed.
    """
    settled = copy.deepcopy(new)
    if [kind(output) for output in stored] != [kind(output) for output in new]:
        return settled
    for old, output in zip(stored, settled, strict=True):
        if measured and "text" in output and same_text(old["text"], output["text"]):
            output["text"] = old["text"]
        for mime, value in output.get("data", {}).items():
            before = old["data"].get(mime)
            if not isinstance(value, str) or not isinstance(before, str):
                continue
            if not difference(before, value) if mime == SVG else measured and same_text(before, value):
                output["data"][mime] = before
    return settled


def kind(output: dict) -> tuple:
    return output["output_type"], output.get("name"), sorted(output.get("data", {}))


def same_text(stored: str, new: str) -> bool:
    """Whether two texts differ only in decimal numbers, and these by what rounding can do to them.

    Whole numbers are counts: they must be the same.
    """
    if DECIMAL.sub("0.0", stored) != DECIMAL.sub("0.0", new):
        return False
    return all(map(same_number, DECIMAL.findall(stored), DECIMAL.findall(new)))


def same_number(stored: str, new: str) -> bool:
    """Whether two printed numbers differ by at most one in the last digit, and by at most one per cent."""
    gap = abs(float(stored) - float(new))
    last = max(unit(stored), unit(new)) * (1 + 1e-6)  # the gap of two decimals is itself rounded
    return gap <= min(last, SHARE * max(abs(float(stored)), abs(float(new))))


def unit(number: str) -> float:
    """The worth of one in the last printed digit: 0.01 for 3.14, 1e-5 for 1.2e-4."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
