"""Times of a training step at the trained weights of a table's rows, interleaved in one process, medians of rounds.

    python -m benchmarks.trained                   # Tables 1 and 3 of protocol cpu: needs their runs/ folders (make reproduce)

Every row takes the same batches with its own method, solver and caps, in training mode with dropout; the optimizer's rate is 0,
so that the weights stay. Writes results/bench/trained.json: milliseconds, evaluations, speed-ups over MDEQ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from pathlib import Path

import torch

from benchmarks.__main__ import ROOT, Step, interleave
from lipmdeq import data
from lipmdeq.experiments.checkpoints import load_model
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.record import read_record, write_json
from lipmdeq.experiments.shell import Parser, guarded
from lipmdeq.experiments.world import git_commit, machine, versions
from lipmdeq.solvers import SolverWarning


def row(folder: Path, x: torch.Tensor, y: torch.Tensor) -> tuple[Step, RunConfig]:
    """A training step of a finished run."""
    record = read_record(folder / "record.json")
    cfg = RunConfig.from_mapping(record["parameters"])
    net = load_model(folder / "checkpoint.ckpt", record)
    net.stem.requires_grad_(cfg.train_stem)
    net.constrain()  # warm, as in the middle of a run
    return Step(net, net.solver, net.adjoint, cfg.jacobian_weight, x, y), cfg


def batch(folder: Path) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The first training images of a run's data, as many as its batch, not augmented; and its scale in words."""
    record = read_record(folder / "record.json")
    cfg = RunConfig.from_mapping(record["parameters"])
    images = data.load(
        cfg.data, root=cfg.data_root, train_images=cfg.train_images, resolution=cfg.resolution, seed=cfg.seed
    )
    x, y = next(iter(images.train.batches(cfg.batch)))
    return (x, y, f"batch {cfg.batch} of {cfg.data} at {x.shape[-1]}x{x.shape[-1]}, preset {cfg.preset}, 1 thread")


def measure(runs: Path, table: str, rounds: int) -> tuple[dict, str]:
    """name of row → times, evaluations and speed-ups over mdeq; and the scale."""
    folders = sorted(p.parent.parent for p in (runs / table).glob("*/seed0/record.json"))
    if not any(f.name == "mdeq" for f in folders):
        raise SystemExit(f"{runs / table} has no finished run mdeq/seed0: run `make reproduce` first")
    x, y, scale = batch(runs / table / "mdeq" / "seed0")
    steps = {f.name: row(f / "seed0", x, y)[0] for f in folders}
    interleave(steps, rounds, warmup=2)
    for s in steps.values():
        s.parts = {k: v[2:] for k, v in s.parts.items()}
    base = steps["mdeq"].parts
    out = {}
    for name, s in steps.items():
        ratios = {k: statistics.median(b / a for a, b in zip(s.parts[k], base[k], strict=True)) for k in s.parts}
        out[name] = {f"{k}_ms": 1e3 * statistics.median(v) for k, v in s.parts.items()}
        out[name] |= {"speedup": ratios["step"], "speedup_forward": ratios["forward"]}
        out[name] |= {"speedup_backward": ratios["backward"], "nfe_forward": s.nfe[0], "nfe_backward": s.nfe[1]}
    return out, scale


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "bench" / "trained.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore", SolverWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, scale = measure(args.runs, "table1", args.rounds)
    result = {"rows": rows, "scale": scale}
    if (args.runs / "table3" / "mdeq" / "seed0" / "record.json").exists():
        result["table3"], result["table3_scale"] = measure(args.runs, "table3", args.rounds)
    result |= {"rounds": args.rounds, "command": "python -m benchmarks.trained", "seed": 0}
    result |= {"versions": versions(), "machine": machine(torch.device("cpu")), "git_commit": git_commit()}
    for name, r in rows.items():
        print(f"{name:<14} {r['step_ms']:7.1f} ms  {r['speedup']:5.2f}x  {r['nfe_forward']}/{r['nfe_backward']}")
    write_json(args.out, result)
    print(f"written to {args.out.name}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(guarded("benchmarks.trained", main))
