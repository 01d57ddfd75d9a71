"""The parameters of one run: names, defaults, meanings, limits. Plain Python, nothing here imports torch.

The same flat names are used by ``notebooks/train.ipynb`` (papermill ``-p a 0.4`` or ``-f config.yaml``), by
``python -m lipmdeq train`` and by the files under ``configs/``. Everything that can be said to be wrong without
opening the data is refused here, in one sentence that names the parameter, its value and what is allowed.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from lipmdeq import bounds
from lipmdeq.experiments.shell import OneSentence

PRESETS = ("digits", "cpu", "cpu32", "cpu-imagenet", "paper-cifar10", "paper-imagenet", "mdeq-tiny")
ABLATIONS = tuple(row for row in bounds.ABLATIONS if row != "MDEQ")  # MDEQ is another model
BOOKKEEPING = ("out", "data_root")  # do not change any number of a run
TEXT, NAME = 1000, 255  # longest text, in characters, and longest name in a path, in bytes
FAMILIES = {  # what parameters are where nothing is said
    "paper": {"a": 0.4, "alpha2": 0.3, "p": 0.3, "injection": "first"},
    "potential": {"alpha2": 0.5, "p": 0.0, "injection": "all"},
}
UNIT_ROUNDOFF = {"tf32": 2.0**-11, "bfloat16": 2.0**-8}  # of what convolutions read: 11 and 8 binary digits
LIPSCHITZ = ("a", "c", "gamma", "alpha1", "alpha2")  # have no meaning for the baseline MDEQ
PAPER = ("a", "c", "gamma", "alpha1", "ablation", "model")  # have no meaning for block = "potential"


BRIEF = Repr()  # a few short lines of YAML can name each other and stand for 10⁹ entries
BRIEF.maxlevel, BRIEF.maxlist, BRIEF.maxtuple, BRIEF.maxdict, BRIEF.maxset = 3, 50, 50, 50, 50
BRIEF.maxstring = BRIEF.maxother = BRIEF.maxlong = 1000


class ParameterError(OneSentence, ValueError):
    """A parameter is unknown or out of range."""


class RunError(OneSentence, RuntimeError):
    """A run cannot start, go on or be read: the message says why and what is left."""


# ------------------------------------------------------------------ kinds of values, and what is said about wrong ones


def _plain(value: object) -> object:
    """Numbers of numpy and whole numbers written as 4.0 as Python's own; the rest as it is."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value or abs(value) == float("inf"):
        return value
    return int(value) if value == int(value) else float(value)


def _path(value: object) -> str:
    if not isinstance(value, str | Path):
        raise ValueError("must be text")
    text = str(value)
    try:
        longest = max(len(part.encode("utf-8")) for part in text.split("/"))
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8") from None
    if "\0" in text:
        raise ValueError("must be text without a NUL character")
    if longest > NAME:
        raise ValueError(f"must be at most {NAME} bytes long between two slashes")
    return text


def _device(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch("auto|cpu|cuda(:(0|[1-9][0-9]{0,2}))?", value):
        raise ValueError("must be one of auto, cpu, cuda, cuda:0, cuda:1, …")
    return value


def _list(value: object) -> object:
    """A list of whole numbers, also as papermill gives it: -p trace_epochs 1,3."""
    if isinstance(value, str):
        parts = (x.strip() for x in value.strip("[] ").split(",") if x)
        return [int(x) if x.isascii() and x.isdecimal() else x for x in parts]
    return value if isinstance(value, list | tuple) else [value]


def _epochs(value: object) -> tuple:
    found = [_plain(x) for x in _list(value)]
    if not all(type(x) is int and x >= 0 for x in found):
        raise ValueError("must be a list of whole numbers from 0 to epochs")
    return tuple(sorted(set(found)))


def _strides(value: object) -> tuple | None:
    found = [1, 1] if value is None else [_plain(x) for x in _list(value)]
    if len(found) != 2 or not all(type(x) is int and x in (1, 2) for x in found):
        raise ValueError("must be two numbers, each 1 or 2, or None")
    return None if value is None else tuple(found)


def _fixed(value: object) -> object:
    found = _plain(value)
    if found not in (None, "auto") and not (type(found) is int and 1 <= found <= 1000):
        raise ValueError("must be a whole number in [1, 1000], 'auto' or None")
    return found


Number = Annotated[float, BeforeValidator(_plain)]
Whole = Annotated[int, BeforeValidator(_plain)]
Text = Annotated[str, BeforeValidator(_path)]
Device = Annotated[str, BeforeValidator(_device)]
Epochs = Annotated[tuple[int, ...], BeforeValidator(_epochs)]
FixedSteps = Annotated[int | str | None, BeforeValidator(_fixed)]
Strides = Annotated[tuple[int, int] | None, BeforeValidator(_strides)]


def short(value: object) -> str:
    """A value as it is written in Python, shortened where it would fill the screen."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to print the largest
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, list | tuple | dict | set):
        text, size = BRIEF.repr(value), f"{len(value)} entries"
    else:
        text = str(value) if isinstance(value, Real) else repr(value)
        size = f"{len(text)} characters"
    return text if len(text) <= 200 else f"{text[:100]}… ({size})"


def bounded(name: str, value: object) -> None:
    """Refuse what no parameter and no option can be, before anybody looks at all of it."""
    if isinstance(value, str | Path) and len(str(value)) > TEXT:
        raise ParameterError(f"{name} = {short(str(value))}: must be at most {TEXT} characters long")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise ParameterError(f"{name} = {short(value)}: is too large for any parameter")
    if isinstance(value, list | tuple | set | dict) and len(value) > TEXT:
        raise ParameterError(f"{name} = {type(value).__name__} of {len(value)} entries: must be at most {TEXT} long")


def _kind(annotation: object) -> object:
    """The type of a field, or the list of names to choose from, without "or None"."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return annotation if not parts else parts if isinstance(parts[0], str) else _kind(parts[0])


def _allowed(field: FieldInfo, number: bool) -> str:
    """What a field may be, in words, from its declaration: "must be in (0, 1]"; ``number``: the value is one."""
    kind, ends = _kind(field.annotation), {}
    for limit in field.metadata:
        ends |= {name: getattr(limit, name) for name in ("gt", "ge", "lt", "le") if hasattr(limit, name)}
    if kind is float:
        low, high = ends.get("gt", ends.get("ge")), ends.get("lt", ends.get("le", float("inf")))
        interval = f"{'(['['ge' in ends]}{low:g}, {high:g}{')]'['le' in ends]}"
        return f"must be {'' if number else 'a number '}in {interval}"
    if kind is int:
        text = f"must be a whole number >= {ends['ge']}" + (f" and <= {ends['le']}" if "le" in ends else "")
    else:
        text = "must be True or False" if kind is bool else f"must be one of {', '.join(kind)}"
    return text + (", or None" if type(None) in get_args(field.annotation) else "")


def _unknown(name: object, value: object) -> str:
    near = difflib.get_close_matches(str(name), RunConfig.model_fields, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    shown = short(name).strip("'\"")
    return f"{shown} = {short(value)}: not a parameter{hint}; must be one of {', '.join(RunConfig.model_fields)}"


def _sentence(error: ValidationError, values: Mapping[str, object]) -> str:
    """The first thing that is wrong with some values, as "field = value: must be …"."""
    first = error.errors(include_url=False)[0]
    why = str(first["ctx"]["error"]) if first["type"] == "value_error" else ""
    if not first["loc"]:
        return why  # of several parameters together, a sentence already
    name = first["loc"][0]
    if name not in RunConfig.model_fields:
        return _unknown(name, values[name])
    number = first["type"] != "float_type"
    return f"{name} = {short(values[name])}: {why or _allowed(RunConfig.model_fields[name], number)}"


# ------------------------------------------------------------------ the parameters


def par(default: object, text: str, **limits: float) -> Any:
    """A parameter: its default, what ``--help-notebook`` says about it, and its range."""
    return Field(default, description=text, **limits)


class RunConfig(BaseModel):
    """Everything that decides what a run computes; bad values raise :class:`ParameterError`.

    Each field declares its type, default, range and help text, once; the comments of the parameters cell in
    ``notebooks/train.ipynb`` are the help texts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    # what is trained
    model: Literal["lipschitz", "mdeq"] = par("lipschitz", "lipschitz or mdeq (the baseline)")
    preset: Literal[PRESETS] = par("digits", f"sizes: {', '.join(PRESETS)}")
    ablation: Literal[ABLATIONS] | None = par(None, "undo one modification: S1, …, S7 (Table 2)")
    block: Literal["paper", "potential"] | None = par(
        None, "paper or potential (the certified family); None: paper if a is given"
    )
    tau: Number = par(0.9, "Lipschitz constant of f with the block potential, in (0, 1)", gt=0, lt=1)
    a: Number | None = par(None, "slope of SReLU, in (0, 1]: the paper's block", gt=0, le=1)
    c: Number = par(2.0, "bound on the norm of every convolution of f, > 0", gt=0, le=1e6)
    gamma: Number = par(1.0, "bound on |γ| of the norms of f, > 0", gt=0, le=1e6)
    alpha1: Number = par(0.5, "convex mix in the residual block, in (0, 1)", gt=0, lt=1)
    alpha2: Number | None = par(None, "convex mix in the fusion, in (0, 1)", gt=0, lt=1)
    n: Whole | None = par(None, "number of resolutions; None: those of the preset", ge=1, le=64)
    p: Number | None = par(None, "dropout rate, in [0, 1)", ge=0, lt=1)
    expansion: Whole | None = par(None, "hidden channels over channels in a residual layer", ge=1, le=64)
    injection: Literal["first", "all"] | None = par(None, "branches that the image enters: first (the paper) or all")
    stem_strides: Strides = par(None, "strides of the stem's two convolutions; None: the preset's")
    stem_channels: Whole | None = par(None, "channels of the stem", ge=1, le=4096)
    # how the equilibrium and its gradient are found
    method: Literal["implicit", "jfb", "phantom", "unrolled"] = par(
        "implicit", "gradient: implicit, jfb, phantom or unrolled"
    )
    steps: Whole = par(3, "applications of f in an explicit network, method unrolled", ge=1, le=1000)
    jacobian_weight: Number = par(0.0, "weight of Jacobian regularisation, 0: off", ge=0)
    solver: Literal["anderson", "picard", "broyden"] = par("anderson", "anderson, picard or broyden, both ways")
    fixed_steps: FixedSteps = par(
        None, "evaluations of every picard solve, read once at its end; auto: from the last solve; None: off"
    )
    tol: Number = par(1e-3, "relative residual at which a solve stops, > 0", gt=0)
    max_forward: Whole = par(18, "largest number of evaluations of f in a forward solve", ge=1, le=10_000)
    max_backward: Whole = par(20, "largest number of evaluations in a backward solve", ge=1, le=10_000)
    phantom_steps: Whole = par(5, "steps of the phantom gradient", ge=1, le=1000)
    phantom_damping: Number = par(0.5, "damping of the phantom gradient, in (0, 1]", gt=0, le=1)
    train_stem: bool = par(True, "False: the stem keeps its random weights")
    # data
    data: Text = par("digits", "digits, cifar10, tiny-imagenet-25, imagenet or a folder of data_root")
    data_root: Text = par("data", "folder of the data sets")
    train_images: Whole | None = par(None, "number of training images; None: all", ge=1, le=10**9)
    val_images: Whole = par(0, "number of training images set aside for validation", ge=0, le=10**9)
    test_images: Whole | None = par(None, "number of test images; None: all", ge=1, le=10**9)
    resolution: Whole | None = par(None, "image size; None: that of the data set", ge=1, le=4096)
    eval_split: Literal["test", "val"] = par("test", "what is evaluated: test or val")
    eval_every: Whole = par(1, "epochs between evaluations; the last epoch always has one", ge=1, le=10**6)
    # optimisation
    epochs: Whole = par(4, "passes over the training images", ge=1, le=10**6)
    batch: Whole = par(32, "images per step, over all processes", ge=2, le=10**6)
    lr: Number = par(4e-3, "largest learning rate of Adam; cosine to 1e-6", gt=0)
    warmup: Number = par(0.0, "share of the steps in which the rate rises to lr", ge=0, lt=1)
    label_smoothing: Number = par(0.0, "share of the target spread over all classes", ge=0, lt=1)
    prove_every: Whole = par(50, "steps between proofs that all norms are at most c; 1: each step", ge=1, le=10**9)
    seed: Whole = par(0, "decides everything random; same seed, same numbers", ge=0, le=2**32 - 1)
    # the machine
    device: Device = par("auto", "auto (a GPU if there is one), cpu, cuda or cuda:<number>")
    threads: Whole = par(1, "threads of one process on the CPU", ge=1, le=1024)
    precision: Literal["float32", "tf32", "bfloat16"] = par(
        "float32", "float32, tf32 (tol from 2^-11) or bfloat16 (tol from 2^-8, 0.01 is usual)"
    )
    compile: bool = par(False, "True: compile f with torch.compile; on a CPU it needs a C++ compiler")
    # what is kept
    out: Text = par("", "folder of the run; empty: nothing is kept")
    checkpoint_every: Whole = par(100, "steps between checkpoints", ge=1, le=10**9)
    trace_epochs: Epochs = par((), "epochs after which residual traces are recorded")

    def __init__(self, **values: object):
        for name, value in values.items():
            bounded(name, value)
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ParameterError(_sentence(error, values)) from None

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, values: dict) -> dict:
        """What None stands for, so a record leaves nothing open: the paper's block if a, an ablation or MDEQ is asked for."""
        block = values.get("block")
        if block is None:
            paper = values.get("model") == "mdeq" or any(values.get(name) is not None for name in ("a", "ablation"))
            block = "paper" if paper else "potential"
        family = FAMILIES[block] if block in tuple(FAMILIES) else {}
        return {**values, "block": block, **{k: v for k, v in family.items() if values.get(k) is None}}

    @model_validator(mode="after")
    def _fit_each_other(self) -> RunConfig:
        """ValueError, a whole sentence, for parameters that contradict each other."""
        for name in PAPER if self.block == "potential" else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value!r}: belongs to block = 'paper'; must be left out for block = 'potential'"
                )
        if self.ablation is not None and self.model == "mdeq":
            raise ValueError(f"ablation = {self.ablation!r}: must be None for model = 'mdeq'")
        if self.fixed_steps is not None and self.solver != "picard":
            raise ValueError(f"fixed_steps = {self.fixed_steps!r}: must be None for solver = {self.solver!r}")
        if self.fixed_steps == 1 and self.method == "implicit":
            raise ValueError("fixed_steps = 1: must be at least 2 for method = 'implicit'; one step backward is 'jfb'")
        if self.tol < (least := UNIT_ROUNDOFF.get(self.precision, 0.0)):
            raise ValueError(
                f"tol = {self.tol:g}: must be >= {least:g} for precision = {self.precision!r}: below, a residual says how "
                "numbers are rounded and nothing about f"
            )
        if self.compile and self.jacobian_weight:
            raise ValueError("compile = True: must be False with jacobian_weight > 0 (second derivatives)")
        if self.eval_split == "val" and not self.val_images:
            raise ValueError("val_images = 0: must be >= 1 for eval_split = 'val'")
        if any(epoch > self.epochs for epoch in self.trace_epochs):
            raise ValueError(
                f"trace_epochs = {list(self.trace_epochs)}: must be whole numbers from 0 to epochs = {self.epochs}"
            )
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> RunConfig:
        """From names and values; an unknown name raises :class:`ParameterError`."""
        for name, value in values.items():
            if name not in cls.model_fields:
                raise ParameterError(_unknown(name, value))
        return cls(**values)

    @classmethod
    def from_namespace(cls, namespace: Mapping[str, object]) -> RunConfig:
        """From the variables of a notebook: every plain value among them must be a parameter.

        papermill only warns about names that the notebook does not have, and passes them on as variables. What the cells
        before the first call assigned counts in any case: a later import may have taken the name, IPython may hide it.
        """
        names, plain = set(cls.model_fields), (str, int, float, bool, list, tuple, type(None))
        found = {
            k: v for k, v in namespace.items() if k in names or (k[:1] != "_" and k != "In" and isinstance(v, plain))
        }
        return cls.from_mapping({**_assigned(namespace.get("In", []), names), **found})

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: object) -> RunConfig:
        """From a file under ``configs/``, with changes."""
        import yaml

        try:
            loader = yaml.SafeLoader(Path(path).read_text("utf8"))
            node = loader.get_single_node()
            values = node and loader.construct_document(node)
        except OSError as e:
            raise ParameterError(f"config = {short(str(path))}: cannot be read ({e.strerror})") from None
        except (yaml.YAMLError, ValueError, RecursionError) as e:
            why = (str(e).splitlines() or [type(e).__name__])[0]
            raise ParameterError(f"config = {short(str(path))}: is not YAML ({why})") from None
        if not isinstance(values, dict):
            raise ParameterError(f"config = {str(path)!r}: must be lines of the form name: value")
        names = [key.value for key, _ in node.value]  # YAML itself takes the last of two
        if twice := [str(name) for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ParameterError(f"config = {short(str(path))}: {', '.join(map(short, twice))} must be given once")
        try:
            return cls.from_mapping({**values, **changes})
        except ParameterError as e:
            if str(e).partition(" = ")[0] in changes:
                raise
            raise ParameterError(f"config = {short(str(path))}: {e}") from None

    def changed(self, **changes: object) -> RunConfig:
        """The same with some parameters replaced."""
        return type(self)(**{**dict(self), **changes})

    def to_dict(self) -> dict:
        """Names and plain values, as JSON and YAML can hold them."""
        return self.model_dump(mode="json")

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
