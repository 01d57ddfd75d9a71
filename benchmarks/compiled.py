"""What ``compile: true`` gains in training: steps of the same model with f eager and compiled, in turn, in one process.

    python -m benchmarks.compiled                                  # preset cpu
    python -m benchmarks.compiled --presets cpu cpu32 --print      # only print

Weights as in the other benchmarks: random, every convolution at its largest norm; they stay (a learning rate of 0), the work
of a step is done. To compile takes a while, once for each run: ``steps_to_earn`` says after how many steps it has paid.
Writes results/bench/compiled.json.
"""

from __future__ import annotations

import copy
import statistics
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.utils import counters

from benchmarks.__main__ import THREADS, at_the_limit, clock, interleave, ratio
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.record import write_json
from lipmdeq.experiments.shell import Parser, guarded, whole
from lipmdeq.experiments.step import Batch
from lipmdeq.experiments.world import World, git_commit, machine, now, versions
from lipmdeq.model import build

ROOT = Path(__file__).resolve().parent.parent
BATCH = {"digits": 32, "cpu": 64, "cpu32": 64, "paper-cifar10": 32}
ROWS = {"lip-a0.4": dict(a=0.4), "potential": dict(block="potential")}


class Step:
    """A training step of a network, without the constraint, which is the same for both."""

    def __init__(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor):
        self.batch, self.x, self.y = Batch(net.train()), x, y
        self.adam = torch.optim.Adam(net.parameters(), lr=0.0, fused=True)

    def __call__(self) -> None:
        torch.manual_seed(0)  # the same dropout masks
        loss, *_ = self.batch(self.x, self.y)
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        self.adam.step()


def measure(preset: str, changes: dict, rounds: int, threads: int) -> dict:
    """Ratio of a step, eager over compiled, and what it costs to get there."""
    torch.manual_seed(0)
    eager = at_the_limit(build(preset, **changes))
    cfg = RunConfig(preset=preset, compile=True, device="cpu", threads=threads, batch=BATCH[preset])
    fast = World.open(cfg).prepare(copy.deepcopy(eager))
    size, channels = eager.cfg.image_size, eager.cfg.in_channels
    x, y = torch.randn(cfg.batch, channels, size, size), torch.randint(10, (cfg.batch,))
    steps = {"eager": Step(eager, x, y), "compiled": Step(fast, x, y)}
    counters.clear()
    steps["eager"]()
    first = clock(steps["compiled"])
    graphs = counters["stats"]["unique_graphs"]
    times = interleave(steps, rounds)
    ms = {name: 1000 * statistics.median(found) for name, found in times.items()}
    gain = ms["eager"] - ms["compiled"]
    return {
        "batch": cfg.batch,
        "rounds": rounds,
        "speedup": ratio(times, "eager", "compiled"),
        "step_ms": ms,
        "compile_seconds": first,
        "steps_to_earn": 1000 * first / gain if gain > 0 else None,
        "graphs": graphs,
        "graphs_later": counters["stats"]["unique_graphs"] - graphs,
    }


def main() -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["cpu"], choices=list(BATCH))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=whole(1, 1000), default=15, help="steps of each kind (default: 15)")
    parser.add_argument("--threads", type=THREADS, default=1)
    parser.add_argument("--print", action="store_true", help="write no record: for a machine that is not quiet")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, dict] = {}
    for preset in args.presets:
        for name in args.rows:
            row = measure(preset, ROWS[name], args.rounds, args.threads)
            found.setdefault(preset, {})[name] = row
            print(
                f"{preset:>14} {name:<10} eager over compiled {row['speedup']:.2f}, {row['graphs']} graphs in "
                f"{row['compile_seconds']:.0f} s, {row['graphs_later']} later",
                flush=True,
            )
    if not args.print:
        about = {"threads": args.threads, "commit": git_commit(), "versions": versions()}
        about |= {"machine": machine(torch.device("cpu")), "finished": now()}
        write_json(ROOT / "results" / "bench" / "compiled.json", {**about, "presets": found})
    return 0


if __name__ == "__main__":
    sys.exit(guarded("benchmarks.compiled", main))
