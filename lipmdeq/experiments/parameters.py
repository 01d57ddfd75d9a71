"""The parameters of one run: names, defaults, meanings, limits. Plain Python, nothing here imports torch.

The same flat names are used by ``notebooks/train.ipynb`` (papermill ``-p a 0.4`` or ``-f config.yaml``), by
``python -m lipmdeq train`` and by the files under ``configs/``. Everything that can be said to be wrong without
opening the data is refused here, in one sentence that names the parameter, its value and what is allowed.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from pathlib import Path

from lipmdeq.bounds.operations import check_choice, check_range, check_whole

PRESETS = ("digits", "cpu", "cpu32", "cpu-imagenet", "paper-cifar10", "paper-imagenet", "mdeq-tiny")
ABLATIONS = ("S1", "S2", "S3", "S4", "S4-sum", "S5", "S6", "S6-sum", "S7", "S7-sum")
BOOKKEEPING = ("out", "data_root")  # do not change any number of a run
TEXT, NAME = 1000, 255  # longest text, in characters, and longest name in a path, in bytes
FAMILIES = {  # what parameters are where nothing is said
    "paper": {"a": 0.4, "alpha2": 0.3, "p": 0.3, "injection": "first"},
    "potential": {"alpha2": 0.5, "p": 0.0, "injection": "all"},
}
LIPSCHITZ = ("a", "c", "gamma", "alpha1", "alpha2")  # have no meaning for the baseline MDEQ


class OneSentence(Exception):
    """An error whose message says it all: Jupyter and papermill show the sentence, not a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class ParameterError(OneSentence, ValueError):
    """A parameter is unknown or out of range."""


class RunError(OneSentence, RuntimeError):
    """A run cannot start, go on or be read: the message says why and what is left."""


Check = Callable[[str, object], object]


def number(low: float = 0.0, high: float = float("inf"), ends: str = "()", none: bool = False) -> Check:
    def check(name: str, value: object) -> float | None:
        if none and value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            allowed = f"{ends[0]}{low:g}, {high:g}{ends[1]}"
            raise ValueError(f"{name} = {value!r}: must be a number in {allowed}")
        return check_range(name, value, low, high, ends)

    return check


def whole(low: int = 1, high: int | None = None, none: bool = False) -> Check:
    def check(name: str, value: object) -> int | None:
        if none and value is None:
            return None
        try:
            return check_whole(name, value, low, high)
        except ValueError as e:
            raise ValueError(f"{e}{', or None' if none else ''}") from None

    return check


def choice(*allowed: str, none: bool = False) -> Check:
    def check(name: str, value: object) -> object:
        if not (none and value is None):
            try:
                check_choice(name, value, allowed)
            except ValueError as e:
                raise ValueError(f"{e}{', or None' if none else ''}") from None
        return value

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: must be True or False")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str | Path):
        raise ValueError(f"{name} = {_short(value)}: must be text")
    text = str(value)
    try:
        parts = [len(part.encode("utf-8")) for part in text.split("/")]
    except UnicodeEncodeError:
        raise ValueError(f"{name} = {text!r}: must be text in UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{name} = {text!r}: must be text without a NUL character")
    if max(parts) > NAME:
        raise ValueError(f"{name} = {_short(text)}: must be at most {NAME} bytes long between two slashes")
    return text


def _short(value: object) -> str:
    """A value as it is written in Python, shortened where it would fill the screen."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print the largest
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text)} characters)"


def _bounded(name: str, value: object) -> None:
    """Refuse what no parameter can be, before a check would print all of it."""
    if isinstance(value, str | Path) and len(str(value)) > TEXT:
        raise ValueError(f"{name} = {_short(str(value))}: must be at most {TEXT} characters long")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise ValueError(f"{name} = {_short(value)}: is too large for any parameter")
    if isinstance(value, list | tuple | set | dict) and len(value) > TEXT:
        raise ValueError(f"{name} = {type(value).__name__} of {len(value)} entries: must be at most {TEXT} long")


def _device(name: str, value: object) -> str:
    plain = isinstance(value, str) and value in ("auto", "cpu", "cuda")
    if not plain and not (isinstance(value, str) and re.fullmatch("cuda:(0|[1-9][0-9]{0,2})", value)):
        raise ValueError(f"{name} = {value!r}: must be one of auto, cpu, cuda, cuda:0, cuda:1, …")
    return value


def _epochs(name: str, value: object) -> tuple[int, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    try:
        if isinstance(value, str):  # papermill -p trace_epochs 1,3
            items = [int(v) for v in value.strip("[] ").split(",") if v]
        return tuple(sorted({check_whole(name, v, 0) for v in items}))
    except ValueError:
        raise ValueError(f"{name} = {value!r}: must be a list of whole numbers from 0 to epochs") from None


def _strides(name: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    items = value
    try:
        if isinstance(value, str):  # papermill -p stem_strides 1,2
            items = [int(v) for v in value.strip("[] ").split(",")]
        if not isinstance(items, list | tuple) or len(items) != 2:
            raise ValueError
        return tuple(check_whole(name, v, 1, 2) for v in items)
    except ValueError:
        raise ValueError(f"{name} = {_short(value)}: must be two numbers, each 1 or 2, or None") from None


def _fixed_steps(name: str, value: object) -> int | str | None:
    try:
        return value if value in (None, "auto") else check_whole(name, value, 1, 1000)
    except ValueError:
        raise ValueError(f"{name} = {_short(value)}: must be a whole number in [1, 1000], 'auto' or None") from None


def _par(default: object, check: Check, text: str) -> object:
    return field(default=default, metadata={"check": check, "help": text})


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes; bad values raise :class:`ParameterError`.

    The comments of the parameters cell in ``notebooks/train.ipynb`` are the help texts below.
    """

    # what is trained
    model: str = _par("lipschitz", choice("lipschitz", "mdeq"), "lipschitz or mdeq (the baseline)")
    preset: str = _par("digits", choice(*PRESETS), f"sizes: {', '.join(PRESETS)}")
    ablation: str | None = _par(None, choice(*ABLATIONS, none=True), "undo one modification: S1, …, S7 (Table 2)")
    block: str | None = _par(
        None,
        choice("paper", "potential", none=True),
        "paper or potential (the certified family); None: paper if a is given",
    )
    tau: float = _par(0.9, number(0, 1), "Lipschitz constant of f with the block potential, in (0, 1)")
    a: float | None = _par(None, number(0, 1, "(]", none=True), "slope of SReLU, in (0, 1]: the paper's block")
    c: float = _par(2.0, number(0, 1e6, "(]"), "bound on the norm of every convolution of f, > 0")
    gamma: float = _par(1.0, number(0, 1e6, "(]"), "bound on |γ| of the norms of f, > 0")
    alpha1: float = _par(0.5, number(0, 1), "convex mix in the residual block, in (0, 1)")
    alpha2: float | None = _par(None, number(0, 1, none=True), "convex mix in the fusion, in (0, 1)")
    n: int | None = _par(None, whole(1, 64, none=True), "number of resolutions; None: those of the preset")
    p: float | None = _par(None, number(0, 1, "[)", none=True), "dropout rate, in [0, 1)")
    expansion: int | None = _par(None, whole(none=True, high=64), "hidden channels over channels in a residual layer")
    injection: str | None = _par(
        None, choice("first", "all", none=True), "branches that the image enters: first (the paper) or all"
    )
    stem_strides: tuple[int, int] | None = _par(
        None, _strides, "strides of the stem's two convolutions; None: the preset's"
    )
    stem_channels: int | None = _par(None, whole(none=True, high=4096), "channels of the stem")
    # how the equilibrium and its gradient are found
    method: str = _par(
        "implicit", choice("implicit", "jfb", "phantom", "unrolled"), "gradient: implicit, jfb, phantom or unrolled"
    )
    steps: int = _par(3, whole(high=1000), "applications of f in an explicit network, method unrolled")
    jacobian_weight: float = _par(0.0, number(0, ends="[)"), "weight of Jacobian regularisation, 0: off")
    solver: str = _par("anderson", choice("anderson", "picard", "broyden"), "anderson, picard or broyden, both ways")
    fixed_steps: int | str | None = _par(
        None,
        _fixed_steps,
        "evaluations of every picard solve, read once at its end; auto: from the last solve; None: off",
    )
    tol: float = _par(1e-3, number(), "relative residual at which a solve stops, > 0")
    max_forward: int = _par(18, whole(1, 10_000), "largest number of evaluations of f in a forward solve")
    max_backward: int = _par(20, whole(1, 10_000), "largest number of evaluations in a backward solve")
    phantom_steps: int = _par(5, whole(1, 1000), "steps of the phantom gradient")
    phantom_damping: float = _par(0.5, number(0, 1, "(]"), "damping of the phantom gradient, in (0, 1]")
    train_stem: bool = _par(True, _flag, "False: the stem keeps its random weights")
    # data
    data: str = _par("digits", _text, "digits, cifar10, tiny-imagenet-25, imagenet or a folder of data_root")
    data_root: str = _par("data", _text, "folder of the data sets")
    train_images: int | None = _par(None, whole(1, 10**9, none=True), "number of training images; None: all")
    val_images: int = _par(0, whole(0, 10**9), "number of training images set aside for validation")
    test_images: int | None = _par(None, whole(1, 10**9, none=True), "number of test images; None: all")
    resolution: int | None = _par(None, whole(1, 4096, none=True), "image size; None: that of the data set")
    eval_split: str = _par("test", choice("test", "val"), "what is evaluated: test or val")
    eval_every: int = _par(1, whole(1, 10**6), "epochs between evaluations; the last epoch always has one")
    # optimisation
    epochs: int = _par(4, whole(1, 10**6), "passes over the training images")
    batch: int = _par(32, whole(2, 10**6), "images per step, over all processes")
    lr: float = _par(4e-3, number(), "largest learning rate of Adam; cosine to 1e-6")
    warmup: float = _par(0.0, number(0, 1, "[)"), "share of the steps in which the rate rises to lr")
    label_smoothing: float = _par(0.0, number(0, 1, "[)"), "share of the target spread over all classes")
    prove_every: int = _par(50, whole(1, 10**9), "steps between proofs that all norms are at most c; 1: each step")
    seed: int = _par(0, whole(0, 2**32 - 1), "decides everything random; same seed, same numbers")
    # the machine
    device: str = _par("auto", _device, "auto (a GPU if there is one), cpu, cuda or cuda:<number>")
    threads: int = _par(1, whole(1, 1024), "threads of one process on the CPU")
    precision: str = _par("float32", choice("float32", "tf32", "bfloat16"), "float32, tf32 or bfloat16")
    compile: bool = _par(False, _flag, "True: compile f with torch.compile")
    # what is kept
    out: str = _par("", _text, "folder of the run; empty: nothing is kept")
    checkpoint_every: int = _par(100, whole(1, 10**9), "steps between checkpoints")
    trace_epochs: tuple[int, ...] = _par((), _epochs, "epochs after which residual traces are recorded")

    def __post_init__(self) -> None:
        try:
            for f in fields(self):
                _bounded(f.name, getattr(self, f.name))
                object.__setattr__(self, f.name, f.metadata["check"](f.name, getattr(self, f.name)))
        except ValueError as e:
            raise ParameterError(str(e)) from None
        self._settle()
        if self.ablation is not None and self.model == "mdeq":
            raise ParameterError(f"ablation = {self.ablation!r}: must be None for model = 'mdeq'")
        if self.fixed_steps is not None and self.solver != "picard":
            raise ParameterError(f"fixed_steps = {self.fixed_steps!r}: must be None for solver = {self.solver!r}")
        if self.compile and self.jacobian_weight:
            raise ParameterError("compile = True: must be False with jacobian_weight > 0 (second derivatives)")
        if self.eval_split == "val" and not self.val_images:
            raise ParameterError("val_images = 0: must be >= 1 for eval_split = 'val'")
        if any(e > self.epochs for e in self.trace_epochs):
            raise ParameterError(
                f"trace_epochs = {list(self.trace_epochs)}: must be whole numbers from 0 to epochs = {self.epochs}"
            )

    def _settle(self) -> None:
        """What None stands for, so a record leaves nothing open: the paper's block if a, an ablation or MDEQ is asked for."""
        paper = self.model == "mdeq" or self.a is not None or self.ablation is not None
        block = self.block or ("paper" if paper else "potential")
        if block == "potential" and paper:
            what = next(n for n in ("a", "ablation", "model") if getattr(self, n) not in (None, "lipschitz"))
            raise ParameterError(
                f"{what} = {getattr(self, what)!r}: belongs to block = 'paper'; must be left out for block = 'potential'"
            )
        object.__setattr__(self, "block", block)
        for name, value in FAMILIES[block].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> RunConfig:
        """From names and values; an unknown name raises :class:`ParameterError`."""
        names = [f.name for f in fields(cls)]
        for name, value in values.items():
            if name not in names:
                near = difflib.get_close_matches(str(name), names, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                shown = _short(name)[1:-1] if isinstance(name, str) else name
                raise ParameterError(
                    f"{shown} = {_short(value)}: not a parameter{hint}; must be one of {', '.join(names)}"
                )
        return cls(**values)

    @classmethod
    def from_namespace(cls, namespace: Mapping[str, object]) -> RunConfig:
        """From the variables of a notebook: every plain value among them must be a parameter.

        papermill only warns about names that the notebook does not have, and passes them on as variables. What the cells
        before the first call assigned counts in any case: a later import may have taken the name, IPython may hide it.
        """
        names = {f.name for f in fields(cls)}
        plain = (str, int, float, bool, list, tuple, type(None))
        found = {
            k: v for k, v in namespace.items() if k in names or (k[:1] != "_" and k != "In" and isinstance(v, plain))
        }
        return cls.from_mapping({**_assigned(namespace.get("In", []), names), **found})

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: object) -> RunConfig:
        """From a file under ``configs/``, with changes."""
        import yaml

        try:
            values = yaml.safe_load(Path(path).read_text("utf8"))
        except OSError as e:
            raise ParameterError(f"config = {_short(str(path))}: cannot be read ({e.strerror})") from None
        except (yaml.YAMLError, ValueError, RecursionError) as e:
            why = (str(e).splitlines() or [type(e).__name__])[0]
            raise ParameterError(f"config = {_short(str(path))}: is not YAML ({why})") from None
        if not isinstance(values, dict):
            raise ParameterError(f"config = {str(path)!r}: must be lines of the form name: value")
        return cls.from_mapping({**values, **changes})

    def changed(self, **changes: object) -> RunConfig:
        """The same with some parameters replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict:
        """Names and plain values, as JSON and YAML can hold them."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def identity(self) -> dict:
        """The parameters that decide the numbers: two runs with equal ones are the same run."""
        return {k: v for k, v in self.to_dict().items() if k not in BOOKKEEPING}

    def unlike_default(self) -> dict:
        """The parameters that differ from their defaults."""
        default = RunConfig().to_dict()
        return {k: v for k, v in self.to_dict().items() if v != default[k]}

    def command(self) -> str:
        """A shell command that repeats the run."""
        changes = {k: v for k, v in self.unlike_default().items() if k not in BOOKKEEPING}
        return " ".join(["python -m lipmdeq train", *(f"-p {k} {_shell(v)}" for k, v in changes.items())])

    def model_changes(self) -> dict:
        """Keyword arguments for :func:`lipmdeq.model.configure`."""
        names = ["p", "n", "injection", "block"]
        names += [k for k in ("expansion", "stem_strides", "stem_channels") if getattr(self, k) is not None]
        if self.model == "lipschitz":
            names += LIPSCHITZ if self.block == "paper" else ("tau", "alpha2")
        return {k: getattr(self, k) for k in names}


def _assigned(cells: object, known: set[str]) -> dict[str, object]:
    """Names that are no parameter, and their values, from the sources of the cells before the first `from_namespace`."""
    if not isinstance(cells, list) or not all(isinstance(source, str) for source in cells):
        return {"In": cells}
    found = {}
    for source in cells:
        if "from_namespace" in source:
            break
        try:
            lines = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError):
            continue  # a cell that failed, so nothing came of it
        for line in (x for x in lines if isinstance(x, ast.Assign | ast.AnnAssign) and x.value is not None):
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            for name in (t.id for t in targets if isinstance(t, ast.Name) and t.id not in known):
                try:
                    found[name] = ast.literal_eval(line.value)
                except ValueError:
                    found[name] = ast.unparse(line.value)
    return found


def _shell(value: object) -> str:
    """A value as one word of a shell command."""
    import shlex

    return shlex.quote(str(value).replace(" ", "") if isinstance(value, list) else str(value))
