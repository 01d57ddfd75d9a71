"""Records of runs grouped by row: mean and range over seeds, what is proved, what the paper prints beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, ValidationError, WrapValidator

from lipmdeq.experiments.parameters import RunConfig, RunError
from lipmdeq.experiments.record import Part, read_record, read_sealed, wrong

TABLES = ("table1", "table2", "table3", "figure4")
# Rows that stand in two tables are run once.
SHARED = {
    "table2/mdeq": "table1/mdeq",
    "table2/lipschitz": "table1/lip-a0.4",
    "figure4/a0.1": "table1/lip-a0.1",
    "figure4/a0.4": "table1/lip-a0.4",
    "figure4/a1.0": "table1/lip-a1.0",
}
HEADS = {  # what is shown: heading, digits after the point
    "accuracy": ("accuracy, %", 1),
    "top5": ("top 5, %", 1),
    "nfe_train_forward": ("NFE train forward", 1),
    "ms_train_forward": ("ms train forward", 0),
    "nfe_train_backward": ("NFE train backward", 1),
    "ms_train_backward": ("ms train backward", 0),
    "nfe_test_forward": ("NFE test forward", 1),
    "ms_test_forward": ("ms test forward", 0),
    "speedup": ("speed-up", 2),
}
PROVED = {  # what the certificate proves: mode, reading
    "perron_test": ("test", "perron"),
    "perron_train": ("train", "perron"),
    "frobenius_test": ("test", "frobenius"),
    "frobenius_train": ("train", "frobenius"),
}
# Milliseconds and speed-ups are measured on an idle machine, all rows in turn: columns and fields of benchmarks/trained.py.
MEASURED = {
    "speedup": "speedup",
    "ms_train_forward": "forward_ms",
    "ms_train_backward": "backward_ms",
    "ms_test_forward": "test_ms",
}
MISSING, UNMEASURED, UNPROVED = "not run yet", "not measured yet", "no guarantee"


@dataclass(frozen=True)
class Value:
    """Mean over seeds with the lowest and the highest."""

    mean: float
    low: float
    high: float
    seeds: int

    def show(self, digits: int) -> str:
        """The mean, and the range if there is one at this precision: ``45.6 (45.1–46.0)``."""
        mean, low, high = (f"{x:.{digits}f}" for x in (self.mean, self.low, self.high))
        return mean if low == high else f"{mean} ({low}–{high})"


def over_seeds(numbers: Iterable[float]) -> Value | None:
    """The Value of some numbers; None if there are none."""
    found = list(numbers)
    return Value(sum(found) / len(found), min(found), max(found), len(found)) if found else None


def _number(record: dict, key: str) -> float | None:
    """One number of a record, in the units of the tables; null in a certificate stands for infinity."""
    if key in PROVED:
        mode, reading = PROVED[key]
        value = record["certificate"][mode][reading]
        return math.inf if value is None else value
    value = record["result"][key]
    return 100 * value if value is not None and key in ("accuracy", "top5") else value


@dataclass
class Row:
    """One row of a table: its configuration, its records by seed, what the paper prints, and its measured times."""

    name: str
    title: str
    config: RunConfig
    records: list[dict]
    paper: dict
    bench: dict

    def value(self, key: str) -> Value | None:
        """Ours, over seeds: a key of the paper's tables or of ``PROVED``; None if not run, or if there is no such solve."""
        if key in MEASURED:
            return over_seeds([self.bench[MEASURED[key]]] if MEASURED[key] in self.bench else [])
        found = [_number(record, key) for record in self.records]
        return over_seeds(x for x in found if x is not None)

    @property
    def certified(self) -> bool:
        """Whether L < 1 is proved (Perron) in both modes for every seed."""
        proved = [_number(r, key) < 1 for r in self.records for key in ("perron_test", "perron_train")]
        return bool(proved) and all(proved)

    def ours(self, key: str) -> str:
        """One of our cells."""
        if not self.records:
            return MISSING if key == "accuracy" else "–"
        value = self.value(key)
        if key in PROVED:
            return f"{value.show(3)}" if value.high < 1 else UNPROVED
        if value is None:
            return UNMEASURED if key == "speedup" else "–"
        return value.show(HEADS[key][1])


def spread(one: Row, other: Row) -> float:
    """How large the difference of the accuracies of two rows must be to be called one, in points; both have records.

    The larger one of their two ranges over seeds, and at least two standard deviations of the difference that two equally
    good models show on a test set of this size. It depends on these two rows alone.
    """
    values = [row.value("accuracy") for row in (one, other)]
    images = min(r["result"]["images"] for row in (one, other) for r in row.records)
    return max(max(v.high - v.low, 2 * math.sqrt(2 * v.mean * (100 - v.mean) / images)) for v in values)


SCALE = {
    "images": lambda r: r["data"]["train"],
    "data": lambda r: r["data"]["name"],
    "size": lambda r: r["data"]["size"],
    "epochs": lambda r: r["history"][-1]["epoch"],
    "weights": lambda r: f"{r['model']['parameters'] / 1e6:.2f}",
    "threads": lambda r: r["machine"]["threads"],
    "seeds": lambda r: r["seed"],
}


def promised(config: RunConfig) -> float:
    """L from the hyperparameters alone, train mode, as the paper computes it; infinite where there is no bound (MDEQ, S1, S3)."""
    from lipmdeq.bounds import LipschitzSpec

    if config.model == "mdeq":
        return math.inf
    spec = LipschitzSpec(config.a, config.c, config.gamma, config.alpha1, config.alpha2, config.n, config.p)
    ops = spec.operations() if config.ablation is None else spec.ablation(config.ablation)
    return ops.L("reported")


# ------------------------------------------------------------------ reading


def _seed(path: Path) -> int:
    k = path.stem[4:]
    if not k.isdecimal() or str(int(k)) != k:  # of seed0 and seed00 one would count, and hide the other
        raise RunError(f"{path}: a record is called seed<k>.json, k a whole number")
    return int(k)


def read_run(path: Path, config: RunConfig) -> dict:
    """A record that is whole and was made with this configuration; else one sentence that names the file."""
    record = read_record(path)
    if record["seed"] != config.seed:
        raise RunError(f"{path} is the record of seed {record['seed']!r}: rename it or delete it")
    made = RunConfig.from_mapping(record["parameters"]).identity()
    for name, value in config.identity().items():
        if made[name] != value:
            raise RunError(
                f"{path} was made with {name} = {made[name]!r}, but its configuration says {value!r}: "
                "delete it, and the folder of the run under runs/, to run it again"
            )
    return record


def _times(path: Path) -> dict:
    """The benchmark of trained models: rows of Table 1 under "rows", of other tables under their names."""
    found = read_sealed(path, "a benchmark of trained models")
    try:
        for group in ("rows", *TABLES):
            for row in found.get(group, {}).values():
                float(row["speedup"])
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{path} is not a benchmark of trained models ({type(e).__name__}: {e})") from None
    return found


AsPrinted = Annotated[float, WrapValidator(lambda value, check: (check(value), value)[1])]  # 20 stays 20, not 20.0


class PrintedRow(Part):
    """A row of results/paper.yaml: its name, and the numbers that the paper prints."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, AsPrinted]

    name: str


class Printed(Part):
    """A table of results/paper.yaml."""

    title: str
    setting: str  # at which the paper's numbers were computed
    rows: dict[str, PrintedRow]


def read_paper(path: Path, table: str) -> dict:
    """One table of results/paper.yaml; else one sentence that names the file."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text("utf8"))
        return Printed.model_validate(found[table] if isinstance(found, dict) and table in found else None).model_dump()
    except OSError as e:
        raise RunError(f"{path} cannot be read ({e.strerror})") from None
    except ValidationError as e:
        raise RunError(f"{path} does not hold title, setting and rows of {table} ({wrong(e, table)})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        why = " ".join(str(e).split()) or type(e).__name__
        raise RunError(f"{path} is not YAML ({why})") from None


def times_file(protocol: str, root: Path) -> Path:
    """Where `python -m benchmarks.trained` writes the times of a protocol."""
    return root / "results" / "bench" / ("trained.json" if protocol == "cpu" else f"trained-{protocol}.json")


def read_rows(table: str, protocol: str, root: Path, printed: dict[str, dict]) -> list[Row]:
    """The rows that the paper prints with our records."""
    times = times_file(protocol, root)
    bench = _times(times) if times.is_file() else {}
    rows = []
    for name, numbers in printed.items():
        where = f"{table}/{name}"
        shared = SHARED.get(where, where)
        path = root / "configs" / protocol / f"{where}.yaml"
        if not path.is_file():  # a protocol may do without a row; tests say which
            continue
        paths = {_seed(p): p for p in (root / "results" / protocol / shared).glob("seed*.json")}
        records = [read_run(p, RunConfig.from_yaml(path, seed=seed)) for seed, p in sorted(paths.items())]
        home, _, row = shared.partition("/")
        own = bench.get("rows" if home == "table1" else home, {})
        rows.append(Row(name, numbers["name"], RunConfig.from_yaml(path), records, numbers, own.get(row, {})))
    return rows
