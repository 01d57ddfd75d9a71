"""Times of a training step at the trained weights of a protocol's rows, interleaved in one process, medians of rounds.

    python -m benchmarks.trained                     # the rows of protocol cpu that have a record
    python -m benchmarks.trained --tables table2     # only those of one table
    python -m benchmarks.trained --protocol paper    # the same of another protocol

Every row takes the same batches with its own method, solver and caps, in training mode with dropout; the optimizer's rate is 0,
so that the weights stay. Each is compared with MDEQ, step by step. What is measured replaces what the file in results/bench
says about these rows; other rows stay, so that runs may be timed as they end. A row: milliseconds of both passes, of the
constraint, of a step and of a forward pass in test mode; evaluations; speed-ups over MDEQ.

A row whose weights were not kept is played: what a step costs does not depend on the values of the weights but on the number
of evaluations, so fresh weights make as many as the run needed in its training (``"weights": "fresh"``). Of a row whose weights
are there, ``played_over_trained`` is how much longer such a step takes: it tells how well the play stands for the row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.__main__ import ROOT, Step, clock, interleave
from lipmdeq import data
from lipmdeq.experiments.checkpoints import load_model
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.record import read_record, read_sealed, write_json
from lipmdeq.experiments.rows import times_file
from lipmdeq.experiments.shell import Parser, guarded, whole
from lipmdeq.experiments.step import FORCED, make_adjoint, make_solver
from lipmdeq.experiments.world import git_commit, machine, now, versions
from lipmdeq.model import MDEQ, ModelConfig, build
from lipmdeq.solvers import Implicit, SolverWarning

BASE = {"table3": "table3/mdeq"}  # whose MDEQ a table is compared with; all others: that of Table 1
TABLES = ("table1", "table2", "figure4", "beyond", "table3")


class Timed(Step):
    """A training step of a finished run, and a forward pass in test mode."""

    def __init__(self, record: dict, weights: Path | None, x: torch.Tensor, y: torch.Tensor):
        cfg = RunConfig.from_mapping(record["parameters"])
        net = load_model(weights, record) if weights else played(record, cfg)
        net.stem.requires_grad_(cfg.train_stem)
        net.constrain()  # warm, as in the middle of a run
        super().__init__(net, net.solver, net.adjoint, cfg.jacobian_weight, x, y)
        self.test: list[float] = []
        foreseen = record["result"]["calls_train_forward"] < record["result"]["nfe_train_forward"] + 0.5
        self.expect = counts(record) if weights is None and foreseen else None  # else one call more attaches the graph

    def __call__(self) -> None:
        if self.expect is not None:  # which evaluation is the last one, as a run knows it from its last step
            self.batch.memory.forward, self.batch.memory.backward = self.expect
        super().__call__()
        self.net.eval()
        with torch.no_grad():
            self.test.append(clock(lambda: self.net(self.x)))


def counts(record: dict) -> tuple[int, int]:
    """Evaluations of a training step, forward and backward, as the run needed them in the mean."""
    return tuple(round(record["result"][f"nfe_train_{way}"] or 0) for way in ("forward", "backward"))


class Foreseen(Implicit):
    """An adjoint solve whose last product is known to be the last, as that of a run whose solves converge."""

    def adjoint(self, T, g, **how):
        found = super().adjoint(T, g, **how)
        found.reason = "converged"
        return found


def played(record: dict, cfg: RunConfig) -> MDEQ:
    """The model of a run with fresh weights, whose solves take as many evaluations as those of the run took."""
    forward, backward = (max(1, n) for n in counts(record))
    cfg = cfg.model_copy(update={"max_backward": max(2, backward)})
    solver, adjoint = make_solver(cfg, forward, FORCED), make_adjoint(cfg, FORCED)
    if isinstance(adjoint, Implicit) and not record["history"][-1]["train"]["not_converged_backward"]:
        adjoint = Foreseen(adjoint.solver)
    return build(ModelConfig.from_dict(record["model"]["config"]), solver=solver, adjoint=adjoint)


def finished(runs: Path, results: Path, row: str) -> tuple[dict, Path | None] | None:
    """(record, weights or None) of the first seed of a row, from its run or what was kept of it; None if there is none."""
    run, kept = runs / row / "seed0", results / row / "seed0"
    for record, weights in (
        (run / "record.json", run / "checkpoint.ckpt"),
        (kept.with_suffix(".json"), kept.with_suffix(".ckpt")),
    ):
        if record.is_file() and weights.is_file():
            return read_record(record), weights
    return (read_record(kept.with_suffix(".json")), None) if kept.with_suffix(".json").is_file() else None


def rows(runs: Path, results: Path, table: str) -> set[str]:
    """The rows of a table that are finished."""
    found = {*(runs / table).glob("*/seed0"), *(results / table).glob("*/seed0.json")}
    names = {path.parent.name for path in found}
    return {name for name in names if finished(runs, results, f"{table}/{name}")}


def batch(record: dict) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The first training images of a run's data, as many as its batch, not augmented; and its scale in words."""
    cfg = RunConfig.from_mapping(record["parameters"])
    images = data.load(
        cfg.data, root=cfg.data_root, train_images=cfg.train_images, resolution=cfg.resolution, seed=cfg.seed
    )
    x, y = next(iter(images.train.batches(cfg.batch)))
    return (x, y, f"batch {cfg.batch} of {cfg.data} at {x.shape[-1]}x{x.shape[-1]}, preset {cfg.preset}, 1 thread")


def measure(runs: Path, results: Path, table: str, rounds: int, known: dict | None = None) -> tuple[dict, str]:
    """name of row → times, evaluations and speed-ups over MDEQ, for all rows that are finished; and the scale. Rows that
    would only be played, and whose trained weights were measured before (``known``), are left out."""
    where = BASE.get(table, "table1/mdeq")
    base, own = finished(runs, results, where), where.startswith(table)
    if base is None:
        raise SystemExit(f"{runs} has no finished run of MDEQ for {table}: run `make reproduce` first")
    x, y, scale = batch(base[0])
    steps = {"mdeq" if own else "": Timed(*base, x, y)}
    plays = {}
    for name in sorted(rows(runs, results, table)):
        record, weights = finished(runs, results, f"{table}/{name}")
        if weights is None and "weights" not in (known or {}).get(name, {"weights": "fresh"}):
            continue
        if name not in steps:
            steps[name] = Timed(record, weights, x, y)
        if weights is not None:
            plays[name] = Timed(record, None, x, y)
    interleave(steps | {f"{name}, played": s for name, s in plays.items()}, rounds, warmup=2)
    for s in steps.values():
        s.parts = {k: v[2:] for k, v in (s.parts | {"test": s.test}).items()}
    against = steps["mdeq"].parts if own else steps.pop("").parts
    out = {}
    for name, s in steps.items():
        ratios = {k: statistics.median(b / a for a, b in zip(s.parts[k], against[k], strict=True)) for k in s.parts}
        out[name] = {f"{k}_ms": 1e3 * statistics.median(v) for k, v in s.parts.items()}
        out[name] |= {"speedup": ratios["step"], "speedup_forward": ratios["forward"]}
        out[name] |= {"speedup_backward": ratios["backward"], "nfe_forward": s.nfe[0], "nfe_backward": s.nfe[1]}
        if name in plays:
            pairs = zip(plays[name].parts["step"][2:], s.parts["step"], strict=True)
            out[name]["played_over_trained"] = statistics.median(a / b for a, b in pairs)
        else:
            out[name]["weights"] = "fresh"
    return out, scale


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    protocols = sorted(path.name for path in (ROOT / "configs").iterdir())
    parser.add_argument("--protocol", default="cpu", choices=protocols)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, metavar="table", help=", ".join(TABLES))
    parser.add_argument("--runs", type=Path, help="default: runs/<protocol>")
    parser.add_argument("--rounds", type=whole(1, 1000), default=9)
    args = parser.parse_args()
    warnings.simplefilter("ignore", SolverWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs, results = args.runs or ROOT / "runs" / args.protocol, ROOT / "results" / args.protocol
    out = times_file(args.protocol, ROOT)
    result = read_sealed(out, "a benchmark of trained models") if out.is_file() else {}
    about = {"commit": git_commit(), "finished": now()}
    for table in args.tables:
        if not rows(runs, results, table):
            continue
        key = "rows" if table == "table1" else table
        found, scale = measure(runs, results, table, args.rounds, result.get(key))
        result[key] = {**result.get(key, {}), **{name: {**r, **about} for name, r in found.items()}}
        result["scale" if table == "table1" else f"{table}_scale"] = scale
        for name, r in found.items():
            print(f"{name:<16} {r['step_ms']:7.1f} ms  {r['speedup']:5.2f}x  {r['nfe_forward']}/{r['nfe_backward']}")
    command = "python -m benchmarks.trained" + ("" if args.protocol == "cpu" else f" --protocol {args.protocol}")
    result |= {"rounds": args.rounds, "command": command, "seed": 0}
    result |= {"versions": versions(), "machine": machine(torch.device("cpu")), "git_commit": git_commit()}
    result.pop("sha256", None)
    write_json(out, result)
    print(f"written to {out.name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(guarded("benchmarks.trained", main))
