"""Lipschitz multiscale deep equilibrium models: constants that are proved, a model that keeps them, solvers.

``import lipmdeq`` is light: torch is imported only when a name that needs it is used for the first time.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def attach(package: str, homes: dict[str, str]) -> tuple:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names are imported when they are asked for (PEP 562).

    Args:
        package: its name. homes: the names that each of its rooms or files holds, as words.
    """
    home = {name: place for place, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return get, lambda: sorted({*vars(import_module(package)), *home}), list(home)


_HOMES = {  # in the order in which an image flows through them
    "bounds": "LipschitzSpec",
    "norms": "conv_norm",
    "model": "MDEQ ModelConfig",
    "solvers": "Picard Anderson Broyden Solution deq Implicit JFB Phantom Neumann Unrolled",
    "certificate": "certify",
    "checks": "check",
    "plotting": "use_style",
}
__getattr__, __dir__, _names = attach(__name__, _HOMES)
__all__ = ["__version__", *_names]
