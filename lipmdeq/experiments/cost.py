"""What a run will cost, before it is paid for: weights, multiply-adds, memory, hours. Nothing is trained, no data is opened.

Multiply-adds are those of convolutions and products of matrices, counted on tensors that have shapes and no numbers. What a step
costs follows from how often f is evaluated, which nobody knows before: by default as often as the run allows. A solve whose end
was not foreseen costs one evaluation more. This is not counted, nor are the constraint, the norms by which the certified
block divides its kernels (once in a step, whatever the batch), the optimizer and the evaluation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lipmdeq.experiments.parameters import ParameterError, RunConfig
from lipmdeq.experiments.step import JACOBIAN_RATE, JACOBIAN_UNTIL, JACOBIAN_VECTORS
from lipmdeq.model import MDEQ, ModelConfig, configure

GPUS = {
    "t4": 8.1,
    "v100": 15.7,
    "a100": 19.5,
    "rtx3090": 35.6,
    "h100": 67.0,
}  # float32, 10^12 operations a second, as sold
CPU_CORE = 0.05  # the same for one core of a CPU with vectors of 256 bits, roughly
UTILISATION = 0.3  # share of that which convolutions of this size reach, to be replaced by what was measured
TRAINING = {"digits": 1437, "cifar10": 50_000, "tiny-imagenet-25": 12_500, "imagenet": 1_281_167}
HISTORY = {"anderson": 12, "picard": 4, "broyden": 28}  # states that a solver holds


@dataclass(frozen=True)
class Cost:
    """Multiply-adds are for one image. ``hours`` are training alone, at ``utilisation`` of what the machine could do."""

    parameters: int
    stem: int
    evaluation: int  # of f
    head: int
    forward: int  # evaluations of f in the forward solve
    backward: int  # products with the Jacobian in the backward solve
    per_step: int  # multiply-adds of one training step, whole batch
    steps: int  # of the run
    memory_mb: int  # an estimate
    machine: str
    utilisation: float
    hours: float

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("weights", f"{self.parameters / 1e6:.2f} million"),
            ("multiply-adds of stem, f, head, one image", f"{self.stem:.3g}, {self.evaluation:.3g}, {self.head:.3g}"),
            ("evaluations of f, products backward", f"{self.forward} and {self.backward}"),
            ("multiply-adds of a step", f"{self.per_step:.3g}"),
            ("steps", str(self.steps)),
            ("memory, estimated", f"{self.memory_mb} MB"),
            (f"hours on {self.machine} at {self.utilisation:.0%} of its peak", f"{self.hours:.3g}"),
        ]
        return "\n".join(f"{a:<{max(len(r[0]) for r in rows)}}  {b}" for a, b in rows)


def counted(module: nn.Module, *args) -> tuple[int, object]:
    """Multiply-adds of one call, and its result."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        out = module(*args)
    return counter.get_total_flops() // 2, out


@lru_cache(8)  # cost is asked for one model with several counts of evaluations
def parts(shape: ModelConfig) -> tuple[MDEQ, dict[str, int], int]:
    """The model without numbers, multiply-adds of its parts for one image, and the size of a state."""
    with torch.device("meta"):
        model = MDEQ(replace(shape, constrain=False)).eval()  # a constraint needs numbers, and adds no weights
        x = torch.empty(1, shape.in_channels, shape.image_size, shape.image_size)
        stem, u = counted(model.injected, x)
        z, held = model.z0(u[0]), model.f.hold(u)
        f, _ = counted(model.f, z, u, held)
        head, _ = counted(model.head, z)
    return model, {"stem": stem, "evaluation": f, "head": head}, sum(t.numel() for t in z)


def step_evaluations(cfg: RunConfig, forward: int, backward: int) -> float:
    """How many evaluations of f a step costs, in the mean over the run.

    A product with a Jacobian costs one, a gradient to the weights another one. In a step with Jacobian regularisation each random
    vector costs 3.5: its product with J, and the gradient of that product.
    """
    if cfg.method == "unrolled":
        return 3 * cfg.steps
    if cfg.method == "phantom":
        return forward + 3 * cfg.phantom_steps
    regularised = JACOBIAN_RATE * JACOBIAN_UNTIL if cfg.jacobian_weight else 0.0
    return forward + (2 if cfg.method == "jfb" else backward + 1) + regularised * 3.5 * JACOBIAN_VECTORS


def cost(cfg: RunConfig, machine: str = "a100", utilisation: float = UTILISATION,
         forward: int | None = None, backward: int | None = None) -> Cost:  # fmt: skip
    """The cost of a run on a GPU of ``GPUS`` or on "cpu" (``cfg.threads`` cores).

    Args:
        forward, backward: evaluations of f and products backward in a step; by default max_forward and max_backward.
    """
    if machine not in (*GPUS, "cpu"):
        raise ParameterError(f"machine = {machine!r}: must be one of cpu, {', '.join(GPUS)}")
    if not 0 < utilisation <= 1:
        raise ParameterError(f"utilisation = {utilisation}: must be in (0, 1]")
    images = cfg.train_images or TRAINING.get(cfg.data)
    if images is None:
        raise ParameterError(
            f"train_images = None: must be given for data = {cfg.data!r}, whose size is not known here"
        )
    if cfg.train_images is None:
        images -= cfg.val_images
    size = {} if cfg.resolution is None else {"image_size": cfg.resolution}
    model, part, state = parts(configure(cfg.preset, cfg.model, cfg.ablation, **size, **cfg.model_changes()))
    forward = cfg.max_forward if forward is None else forward
    backward = (cfg.max_backward if cfg.method == "implicit" else 0) if backward is None else backward
    both = 3 * (part["stem"] + part["head"])  # forward, gradient to the input, gradient to the weights
    per_step = round(cfg.batch * (both + step_evaluations(cfg, forward, backward) * part["evaluation"]))
    weights, steps = sum(p.numel() for p in model.parameters()), images // cfg.batch * cfg.epochs
    graph = 12 * state * cfg.batch * max(1, model.cfg.expansion)  # what one evaluation keeps for its gradient
    memory = 4 * (4 * weights + HISTORY[cfg.solver] * state * cfg.batch + graph)
    peak = 1e12 * (CPU_CORE * cfg.threads if machine == "cpu" else GPUS[machine])
    hours = 2 * per_step * steps / (peak * utilisation) / 3600
    return Cost(weights, **part, forward=forward, backward=backward, per_step=per_step, steps=steps,
                memory_mb=round(memory / 2**20), machine=machine, utilisation=utilisation, hours=hours)  # fmt: skip
