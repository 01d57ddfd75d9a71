"""Lipschitz multiscale deep equilibrium models: constants that are proved, a model that keeps them, solvers.

``import lipmdeq`` is light: torch is imported only when a name that needs it is used for the first time.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the file that holds it, in the order in which an image flows through the files.
_HOME = {
    "LipschitzSpec": "bounds",
    "conv_norm": "norms",
    "MDEQ": "model",
    "ModelConfig": "model",
    "Picard": "solvers",
    "Anderson": "solvers",
    "Broyden": "solvers",
    "Solution": "solvers",
    "deq": "implicit",
    "Implicit": "implicit",
    "JFB": "implicit",
    "Phantom": "implicit",
    "Neumann": "implicit",
    "Unrolled": "implicit",
    "certify": "certificate",
    "check": "checks",
    "use_style": "plotting",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    """Import ``lipmdeq.<file>`` when one of its names is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'lipmdeq' has no attribute {name!r}")
    return getattr(import_module(f"lipmdeq.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
