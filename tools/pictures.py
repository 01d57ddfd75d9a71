"""Whether two pictures, SVG as matplotlib writes it, show a reader the same.

Compared are the things drawn, in their order: what they are, their style, their place. Names inside the file, hashes
in them, and digits beyond a tenth of a point count nowhere: another processor rounds the last digits differently.
"""

import base64
import io
import re
import xml.etree.ElementTree as ET

import numpy as np

POINT = 0.1  # coordinates: a tenth of a point cannot be seen
SHADE = 4  # colours, of 255: one step of a colour map cannot be seen either
FINE = 1e-3  # everything else that is a number: opacity, line widths, angles, font sizes

COORDINATES = {"d", "x", "y", "width", "height", "viewBox"}
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
REFERENCE = re.compile(r"url\(#([^)]+)\)")
FUNCTION = re.compile(r"(\w+)\(([^)]*)\)")


def difference(stored: str, new: str) -> str:
    """The first thing that a reader sees differ between two SVG texts, in a few words; empty if there is none."""
    return "" if stored == new else Comparison(stored, new).between_roots()


class Comparison:
    """Two parsed pictures; what a name refers to is compared once for each pair of names."""

    def __init__(self, stored: str, new: str) -> None:
        self.roots = [ET.fromstring(text.encode()) for text in (stored, new)]
        self.named = [{e.get("id"): e for e in root.iter() if e.get("id")} for root in self.roots]
        self.known: dict[tuple[str, str], str] = {}

    def between_roots(self) -> str:
        sheets = [[e.text for e in root.iter() if local(e.tag) == "style"] for root in self.roots]
        return "another style sheet" if sheets[0] != sheets[1] else self.between(*self.roots)

    def between(self, a: ET.Element, b: ET.Element) -> str:
        """The first difference between two elements and what is in them."""
        if a.tag != b.tag:
            return f"{local(b.tag)} instead of {local(a.tag)}"
        keys = {key for e in (a, b) for key in e.attrib if key != "id"}
        for key in sorted(keys):
            if found := self.between_values(local(key), a.get(key, ""), b.get(key, "")):
                return f"{a.get('id') or local(a.tag)}: {found}"
        if (a.text or "").strip() != (b.text or "").strip():
            return f"text {b.text!r} instead of {a.text!r}"
        inside = [[e for e in parent if local(e.tag) not in ("defs", "metadata")] for parent in (a, b)]
        if len(inside[0]) != len(inside[1]):
            return f"{a.get('id') or local(a.tag)}: {len(inside[1])} things instead of {len(inside[0])}"
        for one, other in zip(*inside, strict=True):
            if found := self.between(one, other):
                return f"{a.get('id')}, {found}" if a.get("id") else found
        return ""

    def between_values(self, key: str, a: str, b: str) -> str:
        """The difference between two values of the attribute ``key``."""
        if a == b and "#" not in a:
            return ""
        wrong = f"{key} {b[:60]!r} instead of {a[:60]!r}"
        if key == "href" and a.startswith("data:image/png") and b.startswith("data:image/png"):
            return "" if same_pixels(a, b) else "other pixels"
        if key == "href" and a.startswith("#") and b.startswith("#"):
            return self.between_named(a[1:], b[1:])
        if key == "d":
            return "" if same_numbers(a, b, POINT) or same_outline(a, b) else wrong
        if key == "transform":
            return "" if same_transform(a, b) else wrong
        targets = REFERENCE.findall(a), REFERENCE.findall(b)
        if len(targets[0]) != len(targets[1]):
            return wrong
        for one, other in zip(*targets, strict=True):
            if found := self.between_named(one, other):
                return f"{key}: {found}"
        a, b = REFERENCE.sub("url", a), REFERENCE.sub("url", b)
        if not same_colours(COLOUR.findall(a), COLOUR.findall(b)):
            return wrong
        a, b = COLOUR.sub("colour", a), COLOUR.sub("colour", b)
        return "" if same_numbers(a, b, POINT if key in COORDINATES else FINE) else wrong

    def between_named(self, a: str, b: str) -> str:
        """The difference between the things of these names."""
        if (a, b) not in self.known:
            one, other = self.named[0].get(a), self.named[1].get(b)
            if one is None or other is None:
                self.known[a, b] = "" if one is other else "a name that stands for nothing"
            else:
                self.known[a, b] = self.between(one, other)
        return self.known[a, b]


def local(name: str) -> str:
    """The name of an element or attribute without its name space."""
    return name.rsplit("}", 1)[-1]


def same_numbers(a: str, b: str, tolerance: float) -> bool:
    """Whether two texts differ in their numbers only, and these by at most ``tolerance``."""
    if NUMBER.sub("0", a).split() != NUMBER.sub("0", b).split():
        return False
    # 1e-9: the tolerance itself is not decided by rounding
    return all(
        abs(float(x) - float(y)) <= tolerance + 1e-9 for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True)
    )


def same_colours(a: list[str], b: list[str]) -> bool:
    """Whether colours such as #0072b2 are the same to the eye."""
    channels = [[int(c[i : i + 2], 16) for c in colours for i in (1, 3, 5)] for colours in (a, b)]
    return len(a) == len(b) and all(abs(x - y) <= SHADE for x, y in zip(*channels, strict=True))


def same_transform(a: str, b: str) -> bool:
    """Shifts to a tenth of a point; scales and angles to the third digit, because they act on whole things."""
    functions = FUNCTION.findall(a), FUNCTION.findall(b)
    return len(functions[0]) == len(functions[1]) and all(
        name == other and same_numbers(x, y, POINT if name == "translate" else FINE)
        for (name, x), (other, y) in zip(*functions, strict=True)
    )


def same_pixels(a: str, b: str) -> bool:
    """Whether two PNG images, as data addresses, have one size and the same colours to the eye."""
    from PIL import Image

    pixels = []
    for address in (a, b):
        data = base64.b64decode(address.split(",", 1)[1])
        pixels.append(np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"), dtype=int))
    return pixels[0].shape == pixels[1].shape and bool((abs(pixels[0] - pixels[1]) <= SHADE).all())


def same_outline(a: str, b: str) -> bool:
    """Whether two paths of straight pieces run along each other.

    Matplotlib drops points that lie on a line with their neighbours; which, may hang on the last digit.
    """
    lines = segments(a), segments(b)
    if lines[0] is None or lines[1] is None:
        return False
    steps = np.linspace(0, 1, 5)[:, None, None]
    for one, other in (lines, lines[::-1]):
        points = (one[:, 0] + steps * (one[:, 1] - one[:, 0])).reshape(-1, 2)
        if max(distance(point, other) for point in points) > POINT:
            return False
    return True


def segments(path: str) -> np.ndarray | None:
    """Start and end of each piece of a path, shape (pieces, 2, 2); None if it has curves or no points."""
    found: list = []
    start = here = None
    for command, rest in re.findall(r"([A-Za-z])([^A-Za-z]*)", path):
        if command in "zZ" and here is not None:
            found.append((here, start))
            here = start
            continue
        numbers = [float(x) for x in NUMBER.findall(rest)]
        if command not in "ML" or len(numbers) != 2 or (command == "L" and here is None):
            return None
        found.append((here if command == "L" else numbers, numbers))
        start, here = (numbers if command == "M" else start), numbers
    return np.array(found) if found else None


def distance(point: np.ndarray, lines: np.ndarray) -> float:
    """Distance of a point from the nearest of the pieces ``lines``."""
    along = lines[:, 1] - lines[:, 0]
    length = (along**2).sum(1)
    share = ((point - lines[:, 0]) * along).sum(1) / np.where(length > 0, length, 1)
    nearest = lines[:, 0] + share.clip(0, 1)[:, None] * along
    return float(np.hypot(*(point - nearest).T).min())
