"""One-line verdicts that lessons print: each compares a number with a claim and raises when the claim fails.

Unrounded values are compared; printed ones are rounded, because the stored outputs of the notebooks are compared too.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

ALLOWANCE = 1e-6  # relative room for rounding: a bound that is reached exactly may be passed by an ulp


def _plain(value: Any) -> Any:
    """A tensor without its graph, on the CPU and in double precision; anything else as it is."""
    return value.detach().cpu().double() if hasattr(value, "detach") else value


def _number(name: str, field: str, value: Any) -> float:
    """A finite float, or a ValueError that names the check, the field and the value."""
    number = float(_plain(value))
    if not math.isfinite(number):
        raise ValueError(f"{name}: {field} = {number}: must be finite")
    return number


def _show(value: float, digits: int) -> str:
    return f"{value + 0.0:.{digits}g}"  # + 0.0 turns -0.0 into 0.0


def check(name: str, bound: Any, observed: Any, at_least: float | None = None, digits: int = 4) -> None:
    """Assert ``observed <= bound`` and print ``✓ name: bound … observed … slack …``; NaN, infinity and negative values fail.

    Args:
        name: what is compared, in words. bound: the proved upper bound; one that is not positive and finite is a ValueError,
        since the check would say nothing. observed: the measured value. at_least: if given, ``at_least * bound`` must be
        reached too: the bound is tight. digits: significant digits printed.
    """
    bound = _number(name, "bound", bound)
    if bound <= 0:
        raise ValueError(f"{name}: bound = {bound}: must be positive")
    if at_least is not None and not 0 < at_least <= 1:
        raise ValueError(f"{name}: at_least = {at_least}: must be in (0, 1]")
    observed = float(_plain(observed))
    line = f"{name}: bound {_show(bound, digits)} observed {_show(observed, digits)}"
    if not observed <= bound * (1 + ALLOWANCE):  # written so that NaN fails
        raise AssertionError(f"✗ {line}: the bound is broken")
    if observed < 0:
        raise AssertionError(f"✗ {line}: a norm or a ratio cannot be negative")
    if at_least is not None and observed < at_least * bound * (1 - ALLOWANCE):
        raise AssertionError(f"✗ {line}: less than {at_least:g} of the bound is reached")
    print(f"✓ {line} slack {max(0.0, 100 * (1 - observed / bound)):.1f} %")


def check_equal(name: str, expected: Any, observed: Any, tol: float = 1e-9, digits: int = 4) -> None:
    """Assert that two numbers or arrays of one shape agree to ``tol``, absolute plus relative to the largest entry.

    A number is printed; of an array only the size is, since rounding errors are not reproducible. NaN fails.
    """
    if not 0 < tol <= 0.1:
        raise ValueError(f"{name}: tol = {tol}: must be in (0, 0.1]")
    want, got = (np.asarray(_plain(v), dtype=float) for v in (expected, observed))
    if want.shape != got.shape:
        raise ValueError(f"{name}: shapes {want.shape} and {got.shape}: must be equal")
    if want.size == 0 or not np.isfinite(want).all():
        raise ValueError(f"{name}: expected = {want}: must have at least one entry, all of them finite")
    worst = float(np.max(np.abs(want - got)))
    if not worst <= tol * (1 + float(np.max(np.abs(want)))):
        raise AssertionError(f"✗ {name}: largest difference {worst:.3g}, allowed {tol:g}")
    if want.ndim == 0:
        print(f"✓ {name}: expected {_show(float(want), digits)} observed {_show(float(got), digits)}")
    else:
        print(f"✓ {name}: all {want.size} entries agree to {tol:g}")


def check_broken(name: str, claimed: Any, observed: Any, digits: int = 4) -> None:
    """Assert that a counter-example breaks a claimed bound: ``observed > claimed`` by more than rounding."""
    claimed, observed = _number(name, "claimed", claimed), _number(name, "observed", observed)
    line = f"{name}: claimed {_show(claimed, digits)} observed {_show(observed, digits)}"
    if not observed > claimed * (1 + ALLOWANCE) + 1e-12:
        raise AssertionError(f"✗ {line}: not a counter-example")
    print(f"✓ {line}: the claim is broken")


def grader(grade: Callable[..., None]) -> Callable[..., None]:
    """Decorator for the graders of exercises, which print ✓ or ✗ for each property that is asked for.

    A missing answer, and one that raises, is told "not yet" in one line, without the traceback of code that is not the reader's.
    """

    @functools.wraps(grade)
    def graded(*answer: Any, **named: Any) -> None:
        if any(value is None or value is ... for value in (*answer, *named.values())):
            print("✗ not yet: there is no answer to check")
            return
        try:
            grade(*answer, **named)
        except Exception as error:  # whatever a reader's function may raise
            reason = (str(error).splitlines() or [""])[0]
            print(f"✗ not yet: the check ended with {type(error).__name__}{f': {reason}' if reason else ''}")

    return graded
