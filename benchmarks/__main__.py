"""Speed and memory as ratios, everything interleaved in one process, medians of rounds.

    python -m benchmarks                           # preset cpu
    python -m benchmarks --preset paper-cifar10    # the 10M-parameter model

Rows are timed at the same weights for all methods: MDEQ at its initial weights with its evaluations forced to the caps 18/20 (in
the paper its solves do not converge: 17.9 and 20), the Lipschitz models with every convolution brought to norm c, which is
the hardest case that the constraint allows for random weights. Writes results/bench/<preset>.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from lipmdeq.experiments.record import write_json
from lipmdeq.experiments.shell import Parser, guarded, whole
from lipmdeq.experiments.step import JACOBIAN_RATE, Batch
from lipmdeq.experiments.world import git_commit, machine, versions
from lipmdeq.model import build
from lipmdeq.model.layers import Conv
from lipmdeq.solvers import Anderson, Picard, SolverWarning
from lipmdeq.solvers.gradients import JFB, Implicit, Phantom, Unrolled, deq

ROOT = Path(__file__).resolve().parent.parent
TOL, FORWARD, BACKWARD = 1e-3, 18, 20
THREADS = whole(1, 4 * (os.cpu_count() or 1))  # more stop the machine
BATCH = {"cpu": 64, "paper-cifar10": 32}
PAPER = {  # Table 1: speed-up, NFE forward, NFE backward
    "mdeq": (1.0, 17.9, 20.0), "mdeq-jr": (2.22, 7.0, 8.0), "mdeq-pg": (1.41, 15.6, None), "mdeq-jfb": (2.84, 12.3, None),
    "lip-a1.0": (1.28, 16.0, 19.9), "lip-a0.4": (3.33, 5.4, 2.9), "lip-a0.1": (4.75, 2.0, 2.0),
    "lip-a1.0-jfb": (3.66, 7.6, None), "lip-a0.4-jfb": (4.98, 4.2, None), "lip-a0.1-jfb": (6.43, 2.0, None),
}  # fmt: skip


def clock(fn) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def interleave(jobs: dict, rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of every job in every round; one of each per round, so that all see the same machine."""
    times = {name: [] for name in jobs}
    for r in range(warmup + rounds):
        for name, fn in jobs.items():
            t = clock(fn)
            if r >= warmup:
                times[name].append(t)
        print(f"  round {r + 1}/{warmup + rounds}", end="\r", file=sys.stderr)
    return times


def ratio(times: dict, top: str, bottom: str) -> float:
    """Median over rounds of top/bottom."""
    return statistics.median(a / b for a, b in zip(times[top], times[bottom], strict=True))


def at_the_limit(net: nn.Module) -> nn.Module:
    """Random kernels, every constrained convolution at its largest norm."""
    gen = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for m in net.f.modules():
            if isinstance(m, Conv) and m.c is not None:
                m.weight.copy_(0.3 * torch.randn(m.weight.shape, generator=gen))
    net.constrain()
    return net


def models(preset: str) -> dict[str, nn.Module]:
    """The networks that the rows share (parameters only; solver and adjoint are set for each row)."""
    torch.manual_seed(0)
    nets = {"mdeq": build(preset, "mdeq")}
    nets |= {f"lip-a{a}": at_the_limit(build(preset, a=a)) for a in (1.0, 0.4, 0.1)}
    return nets


def rows(nets: dict[str, nn.Module]) -> dict[str, tuple]:
    """name → (network, solver, adjoint, weight of the Jacobian regularisation)."""
    forced, free = Anderson(tol=0.0, max_iter=FORWARD), Anderson(tol=TOL, max_iter=FORWARD)
    mdeq = nets["mdeq"]
    table = {
        "mdeq": (mdeq, forced, Implicit(Anderson(tol=0.0, max_iter=BACKWARD)), 0.0),
        "mdeq-jr": (mdeq, Anderson(tol=0.0, max_iter=7), Implicit(Anderson(tol=0.0, max_iter=8)), 0.5),
        "mdeq-pg": (mdeq, forced, Phantom(5, 0.5), 0.0),
        "mdeq-jfb": (mdeq, forced, JFB(), 0.0),
    }
    for a in (1.0, 0.4, 0.1):
        net = nets[f"lip-a{a}"]
        table[f"lip-a{a}"] = (net, free, Implicit(Anderson(tol=TOL, max_iter=BACKWARD)), 0.0)
        table[f"lip-a{a}-jfb"] = (net, free, JFB(), 0.0)
    return table


class Step:
    """One training step of a row, with the times of its parts."""

    def __init__(self, net, solver, adjoint, jacobian, x, y):
        self.net, self.solver, self.adjoint, self.jacobian, self.x, self.y = (net, solver, adjoint, jacobian, x, y)
        self.batch = Batch(net)
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.0)  # the weights stay; the work is done
        self.parts: dict[str, list[float]] = {"forward": [], "backward": [], "constrain": [], "step": []}
        self.nfe = (0, 0)

    def __call__(self):
        self.net.train()
        self.net.solver, self.net.adjoint = self.solver, self.adjoint
        t = [time.perf_counter()]
        loss, _, _, solution = self.batch(self.x, self.y)
        t.append(time.perf_counter())
        loss.backward()
        t.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        t.append(time.perf_counter())
        self.net.constrain(prove=False)  # as in training between two proofs; benchmarks.constraint measures both
        t.append(time.perf_counter())
        extra = 0.0
        if self.jacobian:  # on 5 % of the steps: measured apart, weighted
            extra = JACOBIAN_RATE * clock(lambda: self.batch(self.x, self.y, self.jacobian)[0].backward())
            self.optimizer.zero_grad()
        for key, value in zip(self.parts, (t[1] - t[0], t[2] - t[1], t[4] - t[3], t[4] - t[0] + extra), strict=True):
            self.parts[key].append(value)
        self.nfe = (solution.nfe_total, solution.backward.nfe if solution.backward else 0)


def child(*options: str, **env: str) -> list[str]:
    """The lines that a fresh process of this file prints."""
    command = [sys.executable, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **env})
    return done.stdout.strip().splitlines()


def evaluations(preset: str, threads: int, rounds: int, compiled: bool) -> dict:
    """1. f against its convolutions alone, eager and compiled: medians over five processes.

    Where tensors happen to lie in memory moves the ratio of one process by several per cent; `f_over_convs_range` tells.
    """
    options = ["--preset", preset, "--threads", str(threads), "--rounds", str(rounds), "--evaluation-child"]
    found = []
    for i in range(5):
        print(f"  process {i + 1}/5", end="\r", file=sys.stderr)
        found.append(json.loads(child(*options, *([] if compiled else ["--no-compile"]))[-1]))
    keys = [k for k, v in found[0].items() if v is not None]
    out = {k: statistics.median(f[k] for f in found) for k in keys}
    for key in ("f_over_convs", "f_over_convs_compiled"):
        values = [f[key] for f in found if f[key] is not None]
        out[f"{key}_range"] = [min(values), max(values)] if values else None
    return {"f_over_convs_compiled": None, **out}


def evaluation_child(preset: str, rounds: int, compiled: bool) -> None:
    torch.manual_seed(0)
    net = at_the_limit(build(preset, a=0.4))
    size = net.cfg.image_size
    print(json.dumps(one_evaluation(net, torch.randn(BATCH[preset], 3, size, size), rounds, compiled)))


def one_evaluation(net: nn.Module, x: torch.Tensor, rounds: int, compiled: bool) -> dict:
    """The ratios of this process."""
    net = net.eval()
    with torch.no_grad():
        u = net.stem(x.contiguous(memory_format=torch.channels_last))
        z = [torch.randn_like(t) for t in net.z0(u)]
        seen, forward = [], Conv.forward

        def spy(self, t):
            seen.append(
                (t.clone(memory_format=torch.preserve_format), self.kernel().detach(), self.stride, self.padding)
            )
            return forward(self, t)

        Conv.forward = spy
        net.f(z, u)
        Conv.forward = forward
        # Where its inputs happen to lie changes the time of a convolution: the rounds go through five places.
        places = itertools.cycle([[(t.clone(), *rest) for t, *rest in seen] for _ in range(5)])

        def convs():
            for t, w, s, p in next(places):
                F.conv2d(t, w, stride=s, padding=p)

        jobs = {"convs": convs, "eager": lambda: net.f(z, u)}
        if compiled:
            fast = torch.compile(net.f)
            jobs["compiled"] = lambda: fast(z, u)
        times = interleave(jobs, rounds, warmup=3)
    out = {"f_over_convs": ratio(times, "eager", "convs"), "f_milliseconds": 1e3 * statistics.median(times["eager"])}
    out["f_over_convs_compiled"] = ratio(times, "compiled", "convs") if compiled else None
    return out


def peer_deq():
    """torchdeq's ``get_deq``, imported late: on Python 3.12 and later its first import prints warnings."""
    from torchdeq import get_deq

    return get_deq


def overhead(nets: dict, x: torch.Tensor, rounds: int) -> dict:
    """2. Share of a solve that is spent outside f.

    ``overhead_picard``: the number of steps comes from the constant L of the hyperparameters (a = 0.4), residuals are formed
    at the end; ``overhead_picard_residuals`` and ``overhead_anderson`` measure those of every image in every step. These are
    solves of 18 evaluations, with a full history; ``overhead_<row>`` are Anderson's solves as the rows of Table 1 run them.
    For comparison ``overhead_torchdeq``, the Anderson of torchdeq for 18 evaluations, and ``overhead_memory``, the limit:
    a plain read of Anderson's history, six pairs of states, after each evaluation.
    """
    out = {}
    proved = nets["lip-a0.4"].cfg.spec().L("perron", train=False)
    peer = peer_deq()(f_solver="anderson", f_max_iter=FORWARD, f_tol=0.0, f_stop_mode="rel")
    forced, free = Anderson(tol=0.0, max_iter=FORWARD), Anderson(tol=TOL, max_iter=FORWARD)
    with torch.no_grad():
        for name, key, solver in (
            ("picard", "lip-a0.4", Picard(tol=TOL, max_iter=FORWARD, L=proved)),
            ("picard_residuals", "lip-a1.0", Picard(tol=0.0, max_iter=FORWARD)),
            ("anderson", "lip-a1.0", forced),
            ("torchdeq", "lip-a1.0", lambda f, z: peer(lambda *z: tuple(f(list(z))), tuple(z))),
            ("memory", "lip-a1.0", read_history),
            ("mdeq", "mdeq", forced),
            *((key, key, free) for key in nets if key != "mdeq"),
        ):
            net, shares = nets[key].eval(), []
            u = net.stem(x.contiguous(memory_format=torch.channels_last))
            for _ in range(rounds):
                inside = [0.0]

                def f(z, inside=inside, net=net, u=u):
                    start = time.perf_counter()
                    value = net.f(z, u)
                    inside[0] += time.perf_counter() - start
                    return value

                z0 = net.z0(u)
                solve = getattr(solver, "solve", solver)
                total = clock(lambda f=f, solve=solve, z0=z0: solve(f, z0))
                shares.append(1 - inside[0] / total)
            out[f"overhead_{name}"] = statistics.median(shares)
    return out


def read_history(f, z: list[torch.Tensor]) -> None:
    """18 evaluations, after each a sum over as many numbers as Anderson's history holds."""
    history = torch.ones(2 * Anderson().m, sum(t.numel() for t in z))
    for _ in range(FORWARD):
        f(z)
        history.sum()


def table_one(nets: dict, x, y, rounds: int) -> dict:
    """3. The columns of Table 1 as ratios to MDEQ; the constraint's share of a step."""
    steps = {name: Step(*row, x, y) for name, row in rows(nets).items()}
    interleave(steps, rounds, warmup=1)
    for s in steps.values():
        s.parts = {k: v[1:] for k, v in s.parts.items()}
    base = steps["mdeq"].parts
    result = {key: {} for key in ("speedup", "speedup_forward", "speedup_backward", "speedup_paper")}
    result |= {key: {} for key in ("nfe", "nfe_paper", "times_ms", "constrain_share")}
    for name, s in steps.items():
        for key, part in (("speedup", "step"), ("speedup_forward", "forward"), ("speedup_backward", "backward")):
            result[key][name] = statistics.median(m / t for m, t in zip(base[part], s.parts[part], strict=True))
        result["speedup_paper"][name], *paper = PAPER[name]
        result["nfe"][name] = {"forward": s.nfe[0], "backward": s.nfe[1]}
        result["nfe_paper"][name] = {"forward": paper[0], "backward": paper[1]}
        result["times_ms"][name] = {k: 1e3 * statistics.median(v) for k, v in s.parts.items()}
        shares = zip(s.parts["constrain"], s.parts["step"], strict=True)
        result["constrain_share"][name] = statistics.median(c / t for c, t in shares)
    return result


def against_torchdeq(nets: dict, x, rounds: int) -> dict:
    """4. torchdeq 0.1.0 on the same f: Anderson, implicit backward, same tolerance and caps; > 1: ours is faster."""
    result = {}
    for name, net in nets.items():
        net.eval()
        with torch.no_grad():
            u = net.stem(x.contiguous(memory_format=torch.channels_last))
        forced = name == "mdeq"
        tol = 0.0 if forced else TOL
        peer = peer_deq()(
            f_solver="anderson",
            b_solver="anderson",
            f_max_iter=FORWARD,
            b_max_iter=BACKWARD,
            f_tol=tol,
            b_tol=tol,
            f_stop_mode="rel",
            b_stop_mode="rel",
            ift=True,
        )

        probe = [torch.randn_like(t) for t in net.z0(u)]  # not ones: the last norm makes sums vanish

        def loss_of(z, probe=probe):
            return sum((t * w).sum() for t, w in zip(z, probe, strict=True))

        def theirs(net=net, u=u, peer=peer):
            z, _ = peer(lambda *z: tuple(net.f(list(z), u)), tuple(net.z0(u)))
            loss_of(z[-1]).backward()

        solver, adjoint = Anderson(tol=tol, max_iter=FORWARD), Implicit(Anderson(tol=tol, max_iter=BACKWARD))

        def ours(net=net, u=u, solver=solver, adjoint=adjoint):
            z, _ = deq(lambda z: net.f(z, u), net.z0(u), solver=solver, adjoint=adjoint, inputs=[*net.f.parameters()])
            loss_of(z).backward()

        times = interleave({"theirs": theirs, "ours": ours}, rounds, warmup=1)
        result[name] = ratio(times, "theirs", "ours")
        net.zero_grad()
    return {"vs_torchdeq": result}


def explicit_net(preset: str, parameters: int) -> nn.Module:
    """A ResNet-like network with about as many parameters: what a user would pick instead."""
    from torchvision.models.resnet import BasicBlock, ResNet

    def make(width):
        net = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=10)
        net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()

        def scaled(c):
            return max(8, round(c * width / 8) * 8)

        blocks, cin = (
            [nn.Conv2d(3, scaled(64), 3, 1, 1, bias=False), nn.BatchNorm2d(scaled(64)), nn.ReLU()],
            scaled(64),
        )
        for c, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            for s in (stride, 1):
                cut = (
                    None
                    if s == 1 and cin == scaled(c)
                    else nn.Sequential(nn.Conv2d(cin, scaled(c), 1, s, bias=False), nn.BatchNorm2d(scaled(c)))
                )
                blocks.append(BasicBlock(cin, scaled(c), s, cut))
                cin = scaled(c)
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 10))

    widths = [w / 16 for w in range(1, 24)]
    net = min((make(w) for w in widths), key=lambda m: abs(sum(p.numel() for p in m.parameters()) - parameters))
    return net.to(memory_format=torch.channels_last)


def against_explicit(preset: str, nets: dict, x, y, rounds: int) -> dict:
    """6. A training step of an explicit network of the same size, as a ratio to the Lipschitz rows."""
    count = sum(p.numel() for p in nets["lip-a0.4"].parameters())
    net = explicit_net(preset, count)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0)

    def step():
        F.cross_entropy(net(x.contiguous(memory_format=torch.channels_last)), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    table = rows(nets)
    jobs = {"explicit": step} | {name: Step(*table[name], x, y) for name in ("mdeq", "lip-a0.4", "lip-a0.1")}
    times = interleave(jobs, rounds, warmup=1)
    return {
        "explicit": {
            "parameters": sum(p.numel() for p in net.parameters()),
            "ours_parameters": count,
            "step_over_explicit": {name: ratio(times, name, "explicit") for name in jobs if name != "explicit"},
        }
    }


def peak_memory(preset: str, iterations: int, unrolled: bool) -> float:
    """Peak megabytes of a process that makes two training steps, above what it held before.

    The C library gives freed tensors back at once (a fixed threshold) and writes on new ones once, so that what is allocated
    is measured, as on a GPU. Pages alone would flatter few iterations: a history that is not full yet is not resident.
    """
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env["MALLOC_PERTURB_"] = "90"
    options = ["--preset", preset, "--memory-child", str(iterations), *["--unrolled"] * unrolled]
    return float(child(*options, **env)[-1])


def memory_child(preset: str, iterations: int, unrolled: bool) -> None:
    warnings.simplefilter("ignore", SolverWarning)
    torch.manual_seed(0)
    net = build(preset, "mdeq").train()
    b = min(BATCH[preset], 64 if preset == "cpu" else 4)
    x, y = torch.randn(b, 3, net.cfg.image_size, net.cfg.image_size), torch.randint(10, (b,))
    warm = Anderson(tol=0.0, max_iter=20)  # so that code is in memory: two images go through all its branches
    Step(net, warm, Implicit(warm), 0.0, x[:2], y[:2])()
    solver = Anderson(tol=0.0, max_iter=iterations)
    adjoint = Unrolled(iterations) if unrolled else Implicit(Anderson(tol=0.0, max_iter=iterations))
    step = Step(net, solver, adjoint, 0.0, x, y)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def memory(preset: str) -> dict:
    """5. Peak memory of a training step against the number of iterations, and against unrolling."""
    counts = (5, 10, 20, 40)
    ours = {k: peak_memory(preset, k, False) for k in counts}
    unrolled = {k: peak_memory(preset, k, True) for k in counts[:3]}
    return {"memory_mb": {"implicit": ours, "unrolled": unrolled}, "memory_40_over_5": ours[40] / ours[5]}


def show(result: dict) -> None:
    """One printed table."""
    print(f"\n{result['preset']}, batch {result['batch']}, {result['threads']} threads")
    for key in (
        "f_over_convs",
        "f_over_convs_compiled",
        "overhead_anderson",
        "overhead_torchdeq",
        "overhead_memory",
        "overhead_picard",
        "overhead_picard_residuals",
        *(f"overhead_{key}" for key in result["vs_torchdeq"]),
        "memory_40_over_5",
    ):
        if result.get(key) is not None:
            print(f"  {key:<24} {result[key]:.3f}")
    print(
        f"  {'row':<14} {'step':>7} {'forward':>8} {'backward':>8} {'paper':>6}   {'NFE':>7} {'paper':>10}  constrain"
    )
    for name, step in result["speedup"].items():
        n, paper = result["nfe"][name], result["nfe_paper"][name]
        print(
            f"  {name:<14} {step:>6.2f}x {result['speedup_forward'][name]:>7.2f}x {result['speedup_backward'][name]:>7.2f}x "
            f"{result['speedup_paper'][name]:>5.2f}x   {n['forward']:>3}/{n['backward']:<3} "
            f"{paper['forward']}/{paper['backward'] or '-':<6}  {100 * result['constrain_share'][name]:>6.2f} %"
        )
    print("  torchdeq time / ours:  " + "  ".join(f"{k} {v:.2f}" for k, v in result["vs_torchdeq"].items()))
    if "explicit" in result:
        print(
            "  step / explicit net:   "
            + "  ".join(f"{k} {v:.2f}" for k, v in result["explicit"]["step_over_explicit"].items())
        )
    if "memory_mb" in result:
        print(f"  peak MB, implicit {result['memory_mb']['implicit']}  unrolled {result['memory_mb']['unrolled']}")


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(BATCH), default="cpu")
    parser.add_argument("--rounds", type=whole(1, 1000), default=None)
    parser.add_argument("--threads", type=THREADS, help="default: 1 for cpu (as its runs), all cores for paper-cifar10")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile (it needs a C++ compiler)")
    parser.add_argument("--out", default=None)
    parser.add_argument("--memory-child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--evaluation-child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--unrolled", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_child:
        return memory_child(args.preset, args.memory_child, args.unrolled)
    warnings.simplefilter("ignore", SolverWarning)
    small = args.preset != "paper-cifar10"
    args.threads = args.threads or (1 if small else os.cpu_count())
    torch.set_num_threads(args.threads)
    rounds = args.rounds or (11 if small else 4)
    if args.evaluation_child:
        return evaluation_child(args.preset, rounds, not args.no_compile)
    b = BATCH[args.preset]
    result = {
        "preset": args.preset,
        "batch": b,
        "threads": args.threads,
        "rounds": rounds,
        "command": f"python -m benchmarks --preset {args.preset}",
    }
    print("memory", file=sys.stderr)
    result |= memory(args.preset)
    print("one evaluation", file=sys.stderr)
    result |= evaluations(args.preset, args.threads, 2 * rounds, not args.no_compile)
    nets = models(args.preset)
    torch.manual_seed(1)
    size = nets["mdeq"].cfg.image_size
    x, y = torch.randn(b, 3, size, size), torch.randint(10, (b,))
    for title, part in {
        "overhead": lambda: overhead(nets, x, rounds),
        "Table 1": lambda: table_one(nets, x, y, rounds),
        "torchdeq": lambda: against_torchdeq(nets, x, max(3, rounds // 2)),
        "explicit": lambda: against_explicit(args.preset, nets, x, y, max(3, rounds // 2)),
    }.items():
        print(title, file=sys.stderr)
        result |= part()
    result |= {"versions": versions(), "machine": machine(torch.device("cpu")), "git_commit": git_commit()}
    show(result)
    out = Path(args.out or ROOT / "results" / "bench" / f"{args.preset}.json")
    write_json(out, result)
    print(f"written to {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")


if __name__ == "__main__":
    sys.exit(guarded("benchmarks", main))
