"""What the guarantee costs in real training, with weights that move: the share of a step that constraint or normalisation takes.

    python -m benchmarks.constraint --steps 50 --threads 1    # presets cpu32 and paper-cifar10
    python -m benchmarks.constraint --presets cpu32

Adam at the paper's learning rate and with its batch of 128, from fresh weights, on noise with random labels: what is learned does
not matter, that the weights move does. The batch does: the guarantee costs the same for any batch, so a share at a smaller one
would say nothing about the paper's training (a step of the 10M model takes seconds on a CPU, 50 of them some minutes). Every
step is timed in its parts, in one process; a proof falls on every 50th step and is shared among them. Every second step
without a proof costs more than the one before, so medians are those of means of two steps. For the certified family the
normalisation (``hold``) is timed alone, forward and backward. Writes results/bench/constraint.json; presets that were not
measured stay there as they were.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

from benchmarks.__main__ import THREADS
from lipmdeq.experiments.record import read_sealed, write_json
from lipmdeq.experiments.shell import Parser, guarded, whole
from lipmdeq.experiments.step import Batch
from lipmdeq.experiments.world import git_commit, machine, now, versions
from lipmdeq.model import MDEQ, build

ROOT = Path(__file__).resolve().parent.parent
PRESETS = ("cpu32", "paper-cifar10")
BATCH, LR, PROVE_EVERY = 128, 1e-3, 50
ROWS = {  # MDEQ with the image in every branch and the same stem, for the time of a step
    "lip-a0.4": dict(a=0.4),
    "potential": dict(block="potential"),
    "mdeq": dict(model="mdeq", injection="all", stem_channels=16),
}


def normalisation(net: MDEQ, x: torch.Tensor) -> float:
    """Seconds of the certified family's normalisation, forward and backward, for one batch."""
    with torch.no_grad():
        u = net.injected(x)
    start = time.perf_counter()
    held = net.f.hold(u)
    kernels = [t for t in net.f.inputs(u, held) if t.requires_grad and t.numel() < x.numel()]  # not the injected images
    total = sum(t.sum() for t in kernels)
    torch.autograd.grad(total, list(net.f.parameters()), allow_unused=True)
    return time.perf_counter() - start


def train(net: MDEQ, steps: int) -> dict:
    """Medians and shares over the first steps of a training."""
    size = net.cfg.image_size
    adam, one = torch.optim.Adam(net.parameters(), lr=LR, fused=True), Batch(net.train())
    parts: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": [], "constrain": [], "proof": []}
    worst, normal = 0.0, []
    for step in range(steps):
        x, y = torch.randn(BATCH, 3, size, size), torch.randint(10, (BATCH,))
        marks = [time.perf_counter()]
        loss, *_ = one(x, y)
        marks.append(time.perf_counter())
        adam.zero_grad(set_to_none=True)
        loss.backward()
        marks.append(time.perf_counter())
        adam.step()
        marks.append(time.perf_counter())
        prove = (step + 1) % PROVE_EVERY == 0
        worst = max(worst, net.constrain(prove))
        marks.append(time.perf_counter())
        names = ("forward", "backward", "optimizer", "proof" if prove else "constrain")
        for name, a, b in zip(names, marks, marks[1:], strict=False):
            parts[name].append(b - a)
        if net.cfg.block == "potential" and step % 10 == 0:
            normal.append(normalisation(net, x))
    ms = {
        k: 1000 * statistics.median(map(statistics.fmean, zip(v, v[1:] or v, strict=False)))
        for k, v in parts.items()
        if v
    }
    step_ms = sum(ms[k] for k in ("forward", "backward", "optimizer", "constrain")) + ms["proof"] / PROVE_EVERY
    guarantee = ms["constrain"] + ms["proof"] / PROVE_EVERY
    if normal:
        ms["normalisation"] = guarantee = 1000 * statistics.median(normal)
    return {
        "steps": steps,
        "batch": BATCH,
        "ms": ms,
        "step_ms": step_ms,
        "share": guarantee / step_ms,
        "worst_over_c": worst,
    }


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
    steps = whole(PROVE_EVERY, 100_000)  # so that a proof is among them
    parser.add_argument("--steps", type=steps, default=100, help="training steps for each model (default: 100)")
    parser.add_argument("--threads", type=THREADS, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    out = ROOT / "results" / "bench" / "constraint.json"
    found = read_sealed(out, "a benchmark of the constraint")["presets"] if out.is_file() else {}
    about = {"threads": args.threads, "commit": git_commit(), "finished": now()}
    for preset in args.presets:
        for name, changes in ROWS.items():
            if name == "mdeq" and preset != "cpu32":  # at its caps: hours
                continue
            torch.manual_seed(0)
            row = train(build(preset, **changes), args.steps)
            found.setdefault(preset, {})[name] = {**row, **about}
            print(f"{preset:>14} {name:<10} step {row['step_ms']:.0f} ms, guarantee {row['share']:.1%}", flush=True)
    setting = {"lr": LR, "prove_every": PROVE_EVERY, "versions": versions(), "machine": machine(torch.device("cpu"))}
    write_json(out, {**setting, "presets": found})


if __name__ == "__main__":
    sys.exit(guarded("benchmarks.constraint", main))
