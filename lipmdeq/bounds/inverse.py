"""The way back: from a bound that L shall keep to one of the hyperparameters a, c, γ̄, α1, α2, p."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from lipmdeq.bounds.operations import check_choice, check_range
from lipmdeq.bounds.spec import LipschitzSpec

_BELOW_1 = math.nextafter(1, 0)
# Smallest and largest float tried for each field; open ends of a range are approached, not touched.
_DOMAIN = {"a": (1e-300, 1.0), "p": (0.0, _BELOW_1)} | dict.fromkeys(("c", "gamma"), (1e-300, 1e300))
_DOMAIN |= dict.fromkeys(("alpha1", "alpha2"), (1e-300, _BELOW_1))


def _bisect(good: float, bad: float, holds: Callable[[float], bool]) -> float:
    """The last float towards `bad` at which `holds` (true at `good`, false at `bad`, one change between)."""
    while True:
        low, high = min(good, bad), max(good, bad)
        # far apart: halve the exponent, else a range of 600 decades would take a thousand halvings
        middle = math.sqrt(low) * math.sqrt(high) if low > 0 and high > 2 * low else (low + high) / 2
        if not low < middle < high:
            return good
        good, bad = (middle, bad) if holds(middle) else (good, middle)


def _minimiser(f: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section search for the minimum of a convex f on [low, high]."""
    g = (math.sqrt(5) - 1) / 2
    for _ in range(80):
        left, right = high - g * (high - low), low + g * (high - low)
        low, high = (low, right) if f(left) < f(right) else (left, high)
    return (low + high) / 2


def feasible(
    spec: LipschitzSpec, field: str, target: float = 1.0, reading: str = "perron", train: bool = True
) -> tuple[float, float] | None:
    """The values of one field, the others fixed, with L < target: (smallest, largest), or None.

    They form an interval because L is quasi-convex in each single field: it increases with a, c, γ̄ and p; it is affine in α1
    (rising iff γ̄²c²a > 1−p in train mode); it is convex in α2, since M = (1−α2)I + α2B is affine and a norm is convex. In the
    Perron reading it is even affine in α2, ρ(M) = 1−α2+α2ρ(B); Frobenius has its minimum inside (0, 1), spectral can have. At
    both ends L < target has been evaluated; an end at the limit of the field's range is the last float tried before it.
    """
    check_choice("field", field, tuple(_DOMAIN))
    target = check_range("target", target)
    low, high = _DOMAIN[field]

    def L(x: float) -> float:
        return replace(spec, **{field: x}).L(reading, train)

    def holds(x: float) -> bool:
        return L(x) < target

    start = next((x for x in (getattr(spec, field), low, high) if holds(x)), None)
    if start is None and (field != "alpha2" or not holds(start := _minimiser(L, low, high))):
        return None
    return tuple(end if holds(end) else _bisect(start, end, holds) for end in (low, high))


def largest(
    spec: LipschitzSpec, field: str = "a", target: float = 1.0, reading: str = "perron", train: bool = True
) -> float | None:
    """The largest value of `field` with L < target, the others fixed; None if none does (`feasible`)."""
    interval = feasible(spec, field, target, reading, train)
    return None if interval is None else interval[1]
