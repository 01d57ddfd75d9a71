"""MDEQ and Lipschitz MDEQ: stem → equilibrium of f → head, one class for all variants.

f acts on the list of branches z = [z_1, …, z_n], z_i (B, C_i, H/2^(i−1), W/2^(i−1)). Sizes follow the paper's experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq.model.blocks import FixedPointMap
from lipmdeq.model.config import ModelConfig, configure
from lipmdeq.model.potential import PotentialMap
from lipmdeq.solvers import Anderson
from lipmdeq.solvers.gradients import Implicit, deq
from lipmdeq.solvers.solution import Map

Autocast = Callable[[], AbstractContextManager]


def _conv_bn(cin: int, cout: int, k: int = 3, stride: int = 1, relu: bool = True) -> nn.Sequential:
    layers = [nn.Conv2d(cin, cout, k, stride, (k - 1) // 2, bias=False), nn.BatchNorm2d(cout)]
    nn.init.normal_(layers[0].weight, 0.0, 0.01)
    return nn.Sequential(*layers, nn.ReLU(inplace=True)) if relu else nn.Sequential(*layers)


class Bottleneck(nn.Module):
    """1x1 · 3x3 · 1x1 with expansion 4, BatchNorm and a projection shortcut: (B, C, H, W) → (B, 4h, H, W)."""

    def __init__(self, cin: int, h: int):
        super().__init__()
        self.body = nn.Sequential(_conv_bn(cin, h, 1), _conv_bn(h, h, 3), _conv_bn(h, 4 * h, 1, relu=False))
        self.shortcut = _conv_bn(cin, 4 * h, 1, relu=False)

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(self.body(z) + self.shortcut(z))


class Head(nn.Module):
    """Bottleneck for each branch, summed from high to low resolution, 1x1 to F features, average pool, linear."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        h = cfg.head_channels
        self.branches = nn.ModuleList(Bottleneck(ci, hi) for ci, hi in zip(cfg.channels, h, strict=True))
        self.downs = nn.ModuleList(_conv_bn(4 * h[i], 4 * h[i + 1], 3, 2) for i in range(cfg.n - 1))
        self.features = _conv_bn(4 * h[-1], cfg.head_features, 1)
        self.classifier = nn.Linear(cfg.head_features, cfg.classes)

    def forward(self, z: Sequence[Tensor]) -> Tensor:
        y = self.branches[0](z[0])
        for branch, down, zi in zip(self.branches[1:], self.downs, z[1:], strict=True):
            y = branch(zi) + down(y)
        return self.classifier(self.features(y).mean((2, 3)))


class MDEQ(nn.Module):
    """The whole classifier: logits = head(z*), z* = f(z*; stem(x)).

    Args:
        cfg: what to build. solver: forward solver; adjoint: gradient rule (any of :mod:`lipmdeq.solvers`).

    Attributes:
        largest_image: largest side of images that are taken, that of the configuration: ‖W‖₂ ≤ c is enforced for its maps, and
            holds on smaller ones (their operator is a part of the larger one). ``certify(model, image_size)`` proves a bound
            for larger images; set this to use it. Models without the constraint, and ``potential`` ones, take all sizes.
    """

    def __init__(self, cfg: ModelConfig, solver=None, adjoint=None):
        super().__init__()
        self.cfg, self.largest_image = cfg, cfg.image_size
        self.solver = solver or Anderson(tol=1e-3, max_iter=18)
        self.adjoint = adjoint or Implicit(Anderson(tol=1e-3, max_iter=20))
        potential = cfg.block == "potential"
        wide = [cfg.expansion * c if potential else c for c in cfg.channels]  # where u is added
        width = cfg.stem_channels or cfg.channels[0]
        one, two = cfg.stem_strides
        self.stem = nn.Sequential(_conv_bn(cfg.in_channels, width, 3, one), _conv_bn(width, width, 3, two))
        if cfg.injection == "all":
            widths = [width * 2**i for i in range(cfg.n)]
            self.down = nn.ModuleList(_conv_bn(w, 2 * w, 3, 2) for w in widths[:-1])
            pairs = zip(widths, wide, strict=True)
            self.inject = nn.ModuleList(_conv_bn(w, c, 1, relu=not potential) for w, c in pairs)
        elif cfg.injection_conv or potential or width != wide[0]:
            self.stem.append(_conv_bn(width, wide[0], 1, relu=not potential))
        self.f = PotentialMap(cfg) if potential else FixedPointMap(cfg)
        self.head = Head(cfg)
        self.constrain()

    def z0(self, u: Tensor) -> list[Tensor]:
        """Zeros for every branch, for an injection u (B, C, H, W) into the first one."""
        b, _, h, w = u.shape
        zeros = [u.new_zeros(b, ci, h >> i, w >> i) for i, ci in enumerate(self.cfg.channels)]
        return [z.to(memory_format=torch.channels_last) for z in zeros]

    def check_images(self, x: Tensor) -> None:
        """ValueError for images x (B, C, H, W) whose maps do not fit, or whose f has no bound (see ``largest_image``)."""
        if x.dim() != 4 or x.shape[1] != self.cfg.in_channels:
            raise ValueError(f"shape of x = {tuple(x.shape)}: must be (B, {self.cfg.in_channels}, H, W)")
        (height, width), step, most = x.shape[2:], self.cfg.step, self.largest_image
        if height % step or width % step:
            raise ValueError(f"image size = {height}x{width}: must be multiples of {step} for {self.cfg.n} branches")
        if self.cfg.constrain and self.cfg.block == "paper" and max(height, width) > most:
            raise ValueError(
                f"image size = {height}x{width}: must be at most {most}x{most}, for which f is constrained; "
                f"certify(model, {max(height, width)}) proves a bound there, model.largest_image takes such images"
            )

    def injected(self, x: Tensor) -> list[Tensor | None]:
        """u_i for every branch, from images x (B, C, H, W); None where nothing enters."""
        t = self.stem(x.contiguous(memory_format=torch.channels_last))
        if self.cfg.injection == "first":
            return [t] + [None] * (self.cfg.n - 1)
        u = [self.inject[0](t)]
        for down, inject in zip(self.down, self.inject[1:], strict=True):
            t = down(t)
            u.append(inject(t))
        return u

    def problem(self, x: Tensor, autocast: Autocast = nullcontext) -> tuple[Map, list[Tensor], list[Tensor]]:
        """The fixed-point problem of images x: (f, z0, all that f closes over). Stem and f run under ``autocast``; states
        stay in single precision. In train mode dropout masks are drawn here and held.
        """
        with autocast():
            u = self.injected(x)
        held = self.f.hold(u)
        wide = torch.promote_types(u[0].dtype, torch.float32)

        def f(z: list[Tensor]) -> list[Tensor]:
            with autocast():
                return [t.to(wide) for t in self.f(z, u, held)]

        return f, self.z0(u[0].to(wide)), self.f.inputs(u, held)

    def equilibrium(self, x: Tensor, solver=None, adjoint=None, autocast: Autocast = nullcontext, **options):
        """(z*, Solution) for images x (B, C, H, W); ``pair`` and ``memory`` as in :func:`lipmdeq.solvers.deq`."""
        self.check_images(x)
        f, z0, inputs = self.problem(x, autocast)
        return deq(f, z0, solver=solver or self.solver, adjoint=adjoint or self.adjoint, inputs=inputs, **options)

    def forward(self, x: Tensor, details: bool = False):
        """Logits (B, classes); with details also the Solution of the solve."""
        z, solution = self.equilibrium(x)
        logits = self.head(z)
        return (logits, solution) if details else logits

    def constrain(self, prove: bool = True) -> float:
        """Apply the constraints of the configuration to f; call it after every optimizer step. With ``prove`` all norms are at
        most c, proved, when it returns the largest bound over c that it found before; without, see :meth:`Conv.constrain`.
        """
        return self.f.constrain(prove)


def build(preset="paper-cifar10", model="lipschitz", ablation=None, *, solver=None, adjoint=None, **changes) -> MDEQ:
    """An :class:`MDEQ` by name, in ``channels_last``; arguments as in :func:`configure`, or a whole configuration."""
    shape = preset if isinstance(preset, ModelConfig) else configure(preset, model, ablation, **changes)
    return MDEQ(shape, solver, adjoint).to(memory_format=torch.channels_last)
