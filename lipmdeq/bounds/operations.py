"""Lipschitz constants of single operations, and how they combine (Definition 3.1, Lemma 3.1, Appendix).

Every function returns a number that is an upper bound in the Euclidean norm; those of single layers are
reached by some input, those of combinations need not be. Pure floats and numpy: nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real

import numpy as np


def check_range(field: str, value: object, low: float = 0.0, high: float = math.inf, ends: str = "()") -> float:
    """`value` as a float if it lies in the interval with these `ends`, else a ValueError: ``a = 7: must be in (0, 1]``."""
    allowed = f"must be in {ends[0]}{low:g}, {high:g}{ends[1]}"
    # bool is a subclass of int: True would silently mean 1.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{field} = {value!r}: {allowed}")
    try:
        x = float(value)
    except OverflowError:
        x = math.nan
    if not ((x >= low if ends[0] == "[" else x > low) and (x <= high if ends[1] == "]" else x < high)):
        raise ValueError(f"{field} = {value}: {allowed}")
    return x


def check_whole(field: str, value: object, low: int = 1, high: int | None = None) -> int:
    """Return `value` as an int if it is whole, >= `low` and <= `high`; 4.0 counts as whole, True does not."""
    allowed = f"must be a whole number >= {low}" + (f" and <= {high}" if high is not None else "")
    whole = isinstance(value, Integral) or (isinstance(value, Real) and math.isfinite(value) and value == int(value))
    if isinstance(value, bool) or not whole or value < low or (high is not None and value > high):
        raise ValueError(f"{field} = {value if isinstance(value, Real) else repr(value)}: {allowed}")
    return int(value)


def check_constant(field: str, value: object) -> float:
    """Return a Lipschitz constant as a float: any number >= 0; infinity is allowed and means "no bound"."""
    return check_range(field, value, 0, math.inf, "[]")


def check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError unless `value` is one of the names in `allowed`."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{field} = {value!r}: must be one of {', '.join(allowed)}")


def empirical_ratio(f: Callable[[np.ndarray], np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """‖f(x) − f(y)‖ / ‖x − y‖ for one pair (Definition 3.1): a *lower* bound of f's Lipschitz constant."""
    distance = float(np.linalg.norm(np.subtract(x, y)))
    if not distance > 0:
        raise ValueError(f"‖x - y‖ = {distance:g}: must be > 0 (two different points)")
    return float(np.linalg.norm(np.subtract(f(x), f(y)))) / distance


def lip_sum(*L: float) -> float:
    """Lemma 3.1, f + g: the constants add up (an upper bound; f − f shows that it need not be reached)."""
    return math.fsum(check_constant("L", x) for x in L)


def lip_compose(*L: float) -> float:
    """Lemma 3.1, f ∘ g: the constants multiply; 0 (a constant map) times infinity (no bound) is 0."""
    values = [check_constant("L", x) for x in L]
    product = 0.0 if 0.0 in values else math.prod(values)
    underflow = not product > 0 and 0.0 not in values  # on the way: small factors before large ones
    return math.exp(math.fsum(map(math.log, values))) if underflow else product


def lip_residual(L_g: float) -> float:
    """x + g(x): at most 1 + L_g (MDEQ's residual connection)."""
    return 1.0 + check_constant("L_g", L_g)


def lip_convex(alpha: float, L_g: float) -> float:
    """(1−α)x + αg(x): at most (1−α) + αL_g (the mix of Lipschitz MDEQ), α in (0, 1)."""
    alpha = check_range("alpha", alpha, 0, 1)
    return (1 - alpha) + alpha * check_constant("L_g", L_g)


def lip_mgn(gamma: float | np.ndarray = 1.0) -> float:
    """Mean-only group normalisation, z ↦ γ(z − mean) + β: max|γ_c|; γ is one number, or one for each channel."""
    values = np.atleast_1d(np.asarray(gamma, dtype=object)).ravel()
    return max(check_range("gamma", abs(g) if isinstance(g, Real) else g, 0, math.inf, "[)") for g in values)


def lip_gn(gamma: float | np.ndarray = 1.0, eps: float = 1e-5) -> float:
    """Group normalisation: max|γ_c| / √ε, reached at a constant input (zero variance)."""
    return lip_mgn(gamma) / math.sqrt(check_range("eps", eps, 0))


def lip_relu() -> float:
    """max(0, z): 1."""
    return 1.0


def lip_srelu(a: float) -> float:
    """max(0, a·z), a in (0, 1]: a."""
    return check_range("a", a, 0, 1, "(]")


def lip_dropout(p: float, train: bool = True) -> float:
    """Variational dropout, fixed mask: 1/(1−p) in train mode (p in [0, 1)), 1 in test mode (it is off)."""
    p = check_range("p", p, 0, 1, "[)")
    return 1 / (1 - p) if train else 1.0


def lip_conv(norm: float) -> float:
    """z ↦ Wz + b: ‖W‖₂ of the *operator* on the real map, padding and stride included."""
    return check_constant("norm", norm)


def lip_conv_reshaped(norm: float, kernel: int, stride: int = 1) -> float:
    """What is provable when only the kernel reshaped to C_out × C_in·k² has norm `norm`: ⌈k/s⌉ · norm.

    The conv is that matrix after im2col, which copies an input pixel into at most ⌈k/s⌉² windows, so ‖im2col‖₂ ≤ ⌈k/s⌉.
    """
    k, s = check_whole("kernel", kernel), check_whole("stride", stride)
    return -(-k // s) * check_constant("norm", norm)


def lip_up(s: int, t: int | None = None) -> float:
    """Nearest-neighbour up-sampling by s × t (t = s if left out): √(st), for every input."""
    s = check_whole("s", s)
    return math.sqrt(s * (s if t is None else check_whole("t", t)))


def lip_down(level_diff: int, c: float, gamma: float, a: float) -> float:
    """Down path over d = `level_diff` levels: norm∘conv after d−1 times act∘norm∘conv, with constants >= 0: γc·(aγc)^(d−1)."""
    d = check_whole("level_diff", level_diff)
    step = lip_compose(check_constant("gamma", gamma), check_constant("c", c))
    return lip_compose(step, *[lip_compose(check_constant("a", a), step)] * (d - 1))


def fusion_weights(n: int, kind: str = "softmax") -> np.ndarray:
    """Weights w_ij of the fusion layer (n × n, diagonal 0), which depend on n alone.

    "softmax", the paper's: w_ij ∝ exp(−p_ij) over j ≠ i with p_ij = j − i for an up path (j > i) and 0 for a down path, each
    row with the sum 1 if n > 1. "mean": 1/(n − 1), the ablation S4. "sum": ones, plain sums.
    """
    n = check_whole("n", n)
    check_choice("fusion", kind, ("softmax", "mean", "sum"))
    i, j = np.indices((n, n))
    w = np.where(i == j, 0.0, np.exp(-np.maximum(j - i, 0.0)) if kind == "softmax" else 1.0)
    return w if kind == "sum" else w / np.maximum(w.sum(axis=1, keepdims=True), np.finfo(float).tiny)
