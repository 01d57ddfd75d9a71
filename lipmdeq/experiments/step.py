"""What happens to one batch: solver and gradient rule, loss, counts; evaluation; residual traces on a fixed batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.world import World
from lipmdeq.solvers import Anderson, Broyden, Memory, Picard, Solution
from lipmdeq.solvers.gradients import JFB, Implicit, Phantom, Unrolled, jacobian_regularisation

LAST_LR = 1e-6
JACOBIAN_RATE, JACOBIAN_UNTIL, JACOBIAN_VECTORS = (0.05, 0.45, 2)  # share of steps, of epochs; Hutchinson vectors
TRACE_IMAGES, TRACE_FORWARD, TRACE_BACKWARD = (64, 18, 20)  # Figures 3 and 5 show as many iterations for every row
FORCED = 0.0  # a tolerance that no solve reaches
INIT, STEP, JACOBIAN, TRACE = 11, 12, 13, 14  # purposes of random numbers
Autocast = Callable[[], AbstractContextManager]
CLOCKS = ("data", "forward", "backward", "optimizer", "constrain")


def make_solver(cfg: RunConfig, max_iter: int, tol: float | None = None):
    """The solver of a run, forward or backward."""
    options = dict(tol=cfg.tol if tol is None else tol, max_iter=max_iter)
    if cfg.solver == "picard":
        return Picard(**options, steps=cfg.fixed_steps)
    return {"anderson": Anderson, "broyden": Broyden}[cfg.solver](**options)


def make_adjoint(cfg: RunConfig, tol: float | None = None):
    """The gradient rule of a run."""
    if cfg.method == "implicit":
        return Implicit(make_solver(cfg, cfg.max_backward, tol))
    if cfg.method == "unrolled":
        return Unrolled(cfg.steps)
    return JFB() if cfg.method == "jfb" else Phantom(cfg.phantom_steps, cfg.phantom_damping)


def stream(purpose: int, seed: int, *place: int) -> int:
    """A seed for one purpose at one place; different arguments give unrelated ones."""
    return int(np.random.SeedSequence([purpose, seed, *place]).generate_state(1, np.uint64)[0]) >> 1


def learning_rate(cfg: RunConfig, step: int, total: int) -> float:
    """A straight line up to lr over the share ``warmup`` of the steps, then a cosine from lr to 1e-6 at the end."""
    warm = int(cfg.warmup * total)
    if step < warm:
        return cfg.lr * (step + 1) / warm
    return LAST_LR + (cfg.lr - LAST_LR) * (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2


def jacobian_weight(cfg: RunConfig, epoch: int, step: int) -> float:
    """Weight of the Jacobian regularisation in this step: that of the run on a random 5 % of the early steps, else 0."""
    if not cfg.jacobian_weight or epoch >= JACOBIAN_UNTIL * cfg.epochs:
        return 0.0
    chosen = np.random.default_rng(stream(JACOBIAN, cfg.seed, epoch, step)).random() < JACOBIAN_RATE
    return cfg.jacobian_weight if chosen else 0.0


class Batch(nn.Module):
    """Loss of one batch: what DistributedDataParallel wraps, so that its gradients are averaged.

    ``memory`` is what the solves of one batch leave for those of the next.
    """

    def __init__(
        self, model: nn.Module, autocast: Autocast = nullcontext, smoothing: float = 0.0, memory: Memory | None = None
    ):
        super().__init__()
        self.model, self.autocast, self.smoothing, self.memory = model, autocast, smoothing, memory or Memory()

    def forward(self, x: Tensor, y: Tensor, jacobian: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Solution]:
        """(loss, cross-entropy, logits, Solution) for images x (B, C, H, W) and labels y (B,)."""
        z, solution = self.model.equilibrium(x, autocast=self.autocast, pair=jacobian > 0, memory=self.memory)
        with self.autocast():
            logits = self.model.head(z)
            ce = loss = F.cross_entropy(logits, y)
            if self.smoothing:
                loss = F.cross_entropy(logits, y, label_smoothing=self.smoothing)
        if jacobian:
            loss = loss + jacobian * jacobian_regularisation(*solution.pair, samples=JACOBIAN_VECTORS)
            solution.pair = None  # frees the graph with the loss
        return loss, ce.detach(), logits.detach(), solution


@dataclass
class Sums:
    """Running sums of an epoch: plain numbers, so that they go into a checkpoint.

    Of each solve: ``nfe`` is the number of calls of f for the whole batch, ``steps`` that after which an image had
    converged by itself, both weighted by images. A call that only attaches the graph, where the solver did not foresee
    that a call would be its last, is counted in ``attached``.
    """

    images: int = 0
    loss: float = 0.0
    correct: int = 0
    top5: int = 0
    nfe_forward: int = 0
    nfe_backward: int = 0
    steps_forward: int = 0
    steps_backward: int = 0
    attached_forward: int = 0
    attached_backward: int = 0
    not_converged_forward: int = 0
    not_converged_backward: int = 0
    worst_residual_forward: float = 0.0
    worst_residual_backward: float = 0.0
    worst_over_c: float = 0.0  # the largest bound on a norm over c that a proof found
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLOCKS, 0.0))

    def __post_init__(self):
        self._waiting: list[Tensor] = []  # loss times images, right ones, right among five, of each batch

    def add(self, loss: Tensor, logits: Tensor, y: Tensor, solution: Solution) -> None:
        """Count one batch, after its backward pass if it has one.

        Loss and labels stay on their device until :meth:`settle`: reading them at each step would make a GPU wait.
        """
        self.images += len(y)
        right = (logits.argmax(1) == y).sum()
        ranked = (
            logits.topk(5, 1).indices if logits.shape[1] >= 10 else logits[:, :0]
        )  # of fewer than ten classes: none
        five = (ranked == y[:, None]).any(1).sum()
        self._waiting.append(torch.stack([loss.double() * len(y), right.double(), five.double()]))
        self._count("forward", solution)
        self._count("backward", solution.backward)

    def _count(self, way: str, solution: Solution | None) -> None:
        if solution is None:
            return
        b = len(solution.converged)
        counts = {
            "nfe": solution.nfe * b,
            "steps": int(solution.steps.sum()),
            "attached": (solution.nfe_total - solution.nfe) * b,
            "not_converged": int((~solution.converged).sum()),
        }
        for name, value in counts.items():
            setattr(self, f"{name}_{way}", getattr(self, f"{name}_{way}") + value)
        worst = f"worst_residual_{way}"
        setattr(self, worst, max(getattr(self, worst), float(solution.residuals[-1].max())))

    def settle(self) -> Sums:
        """Read what waits on the device, once; returns itself."""
        for loss, right, five in torch.stack(self._waiting).cpu().tolist() if self._waiting else []:
            self.loss, self.correct, self.top5 = (self.loss + loss, self.correct + int(right), self.top5 + int(five))
        self._waiting = []
        return self

    def over(self, world: World) -> Sums:
        """The sums of all processes; the clocks of the slowest."""
        self.settle()
        names = [f.name for f in fields(self) if f.name != "seconds"]
        peaks = [n for n in names if n.startswith("worst")]
        rest = [n for n in names if n not in peaks]
        total = dict(zip(rest, world.total([getattr(self, n) for n in rest]), strict=True))
        total |= dict(zip(peaks, world.total([getattr(self, n) for n in peaks], largest=True), strict=True))
        clocks = world.total([self.seconds[c] for c in CLOCKS], largest=True)
        whole = {n: total[n] if isinstance(getattr(self, n), float) else int(total[n]) for n in names}
        return Sums(**whole, seconds=dict(zip(CLOCKS, clocks, strict=True)))

    def row(self, classes: int, ways: tuple[str, ...]) -> dict:
        """Means and counts for the history."""
        self.settle()
        n = max(1, self.images)
        row = {"images": self.images, "loss": self.loss / n, "accuracy": self.correct / n}
        row["top5"] = self.top5 / n if classes >= 10 else None
        for way in ways:
            for name in ("nfe", "steps", "attached"):
                row[f"{name}_{way}"] = getattr(self, f"{name}_{way}") / n
            for name in ("not_converged", "worst_residual"):
                row[f"{name}_{way}"] = getattr(self, f"{name}_{way}")
        return row


@torch.no_grad()
def evaluate(model: nn.Module, split, batch: int, world: World) -> Sums:
    """Loss, accuracy and solver counts in test mode, over all processes."""
    was, sums = model.training, Sums()
    world.share_buffers(model)
    test = Batch(model.eval(), world.autocast)
    for x, y in split.batches(batch, rank=world.rank, world=world.size):
        _, ce, logits, solution = test(x, y)
        sums.add(ce, logits, y, solution)
    model.train(was)
    return sums.over(world)


def residual_traces(model: nn.Module, cfg: RunConfig, x: Tensor, y: Tensor, epoch: int) -> dict:
    """Relative residuals of each iteration on a fixed batch, with a forced number of iterations.

    Train mode (one dropout mask, batch statistics) forward and backward, test mode forward; ``model`` is changed by it (running
    statistics of BatchNorm), so give it a copy.
    """
    cfg = cfg.changed(fixed_steps=None)  # every residual is wanted
    model.solver = make_solver(cfg, TRACE_FORWARD, tol=FORCED)
    model.adjoint = Implicit(make_solver(cfg, TRACE_BACKWARD, tol=FORCED))
    torch.manual_seed(stream(TRACE, cfg.seed))
    loss, _, _, solution = Batch(model.train())(x, y)
    loss.backward()
    with torch.no_grad():
        _, test = model.eval()(x, details=True)
    found = {"train_forward": solution, "train_backward": solution.backward, "test_forward": test}
    return {"epoch": epoch, "images": len(y), **{k: _trace(s) for k, s in found.items()}}


def _trace(solution: Solution) -> dict:
    """Mean, median and worst residual over the batch for each iteration, to five digits."""
    r = solution.residuals.double().cpu()
    rows = {"mean": r.mean(1), "median": r.median(1).values, "worst": r.amax(1)}
    return {k: [float(f"{v:.5g}") for v in values.tolist()] for k, values in rows.items()}
