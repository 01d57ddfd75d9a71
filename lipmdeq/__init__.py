"""Lipschitz multiscale deep equilibrium models: constants that are proved, a model that keeps them, solvers.

``import lipmdeq`` is light: torch is imported only when a name that needs it is used for the first time.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the room or file that holds it, in the order in which an image flows through them.
_HOME = {
    "LipschitzSpec": "bounds",
    "conv_norm": "norms",
    "MDEQ": "model",
    "ModelConfig": "model",
    "Picard": "solvers",
    "Anderson": "solvers",
    "Broyden": "solvers",
    "Solution": "solvers",
    "deq": "solvers",
    "Implicit": "solvers",
    "JFB": "solvers",
    "Phantom": "solvers",
    "Neumann": "solvers",
    "Unrolled": "solvers",
    "certify": "certificate",
    "check": "checks",
    "use_style": "plotting",
}

__all__ = ["__version__", *_HOME]


def attach(package: str, homes: dict[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that imports a name's home when it is asked for (PEP 562)."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get, lambda: sorted({*vars(import_module(package)), *homes})


__getattr__, __dir__ = attach(__name__, _HOME)
