"""MDEQ and Lipschitz MDEQ: stem → equilibrium of f → head, one class with one switch for each ablation.

f = post-fusion ∘ fusion ∘ residual blocks (equations M1–M3 and L1–L3 of the paper) acts on the list of
branches z = [z_1, …, z_n], z_i of shape (B, C_i, H/2^(i−1), W/2^(i−1)). Sizes and details follow the paper's
experiments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipmdeq import bounds
from lipmdeq.blocks import FixedPointMap
from lipmdeq.implicit import Implicit, deq
from lipmdeq.solvers import Anderson


@dataclass(frozen=True)
class ModelConfig:
    """Everything that defines a model. ``preset`` and ``configure`` build the usual ones.

    a, c, gamma, alpha1, alpha2, p are the paper's; n is the number of ``channels``. The switches undo one
    modification each: norm "mgn" or "gn"; clip: |γ| ≤ γ̄; constrain: ‖W‖₂ ≤ c; fusion "softmax", "mean" or
    "sum"; mix1, mix2: convex mixes in the residual block and in the fusion (else plain sums); weight_norm on
    the residual-block and post-fusion convolutions.
    """

    channels: tuple[int, ...] = (32, 64, 128, 256)
    image_size: int = 32
    in_channels: int = 3
    classes: int = 10
    expansion: int = 5
    groups: int = 8
    stem_stride: int = 1
    injection: bool = True
    post_affine: bool = False
    head_channels: tuple[int, ...] = (14, 28, 56, 112)
    head_features: int = 1680
    a: float = 0.4
    c: float = 2.0
    gamma: float = 1.0
    alpha1: float = 0.5
    alpha2: float = 0.3
    p: float = 0.3
    norm: str = "mgn"
    clip: bool = True
    constrain: bool = True
    fusion: str = "softmax"
    mix1: bool = True
    mix2: bool = True
    weight_norm: bool = False

    def __post_init__(self):
        object.__setattr__(self, "channels", tuple(self.channels))
        object.__setattr__(self, "head_channels", tuple(self.head_channels))
        self.spec()  # validates a, c, gamma, alpha1, alpha2, n, p
        for field, allowed in {"norm": ("mgn", "gn"), "fusion": ("softmax", "mean", "sum")}.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} = {getattr(self, field)!r}: must be one of {', '.join(allowed)}")
        if len(self.head_channels) != self.n:
            raise ValueError(
                f"head_channels = {self.head_channels}: must have one entry for each of the {self.n} branches"
            )
        for field in (
            "expansion",
            "groups",
            "stem_stride",
            "in_channels",
            "classes",
            "head_features",
            "image_size",
        ):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)!r}: must be a whole number >= 1")
        for ch in self.channels:
            if ch < 1 or ch % self.groups:
                raise ValueError(f"channels = {ch}: must be divisible by groups = {self.groups}")
        step = self.stem_stride**2 * 2 ** (self.n - 1)
        if self.image_size % step:
            raise ValueError(
                f"image_size = {self.image_size}: must be a multiple of {step} for {self.n} branches"
            )

    @property
    def n(self) -> int:
        return len(self.channels)

    @property
    def is_lipschitz(self) -> bool:
        """True when f has a finite constant by construction."""
        return self.norm == "mgn" and self.clip and self.constrain

    def spec(self) -> bounds.LipschitzSpec:
        """The hyperparameters that enter L."""
        return bounds.LipschitzSpec(self.a, self.c, self.gamma, self.alpha1, self.alpha2, self.n, self.p)

    def sizes(self, image_size: int | None = None) -> list[tuple[int, int]]:
        """(H, W) of every branch."""
        h = (image_size or self.image_size) // self.stem_stride**2
        return [(h // 2**i, h // 2**i) for i in range(self.n)]

    def to_dict(self) -> dict:
        return asdict(self)


_MDEQ = {
    "a": 1.0, "norm": "gn", "clip": False, "constrain": False, "fusion": "sum", "mix1": False, "mix2": False, "weight_norm": True
}  # fmt: skip
ABLATIONS = {
    "S1": {"clip": False},
    "S2": {"norm": "gn"},
    "S3": {"constrain": False},
    "S4": {"fusion": "mean"},
    "S4-sum": {"fusion": "sum"},
    "S5": {"mix1": False},
    "S6": {"mix2": False},
    "S7": {"mix1": False, "mix2": False},
}
PRESETS = {
    "digits": dict(
        channels=(16, 32, 64),
        image_size=8,
        in_channels=1,
        expansion=2,
        head_channels=(8, 16, 32),
        head_features=128,
    ),
    "cpu": dict(channels=(8, 16, 32, 64), image_size=16, head_channels=(4, 8, 16, 32), head_features=256),
    "cpu-imagenet": dict(
        channels=(8, 16, 32, 64),
        image_size=64,
        classes=25,
        stem_stride=2,
        post_affine=True,
        head_channels=(4, 8, 16, 32),
        head_features=256,
        p=0.0,
    ),
    "paper-cifar10": dict(),
    "paper-imagenet": dict(
        image_size=224,
        classes=1000,
        stem_stride=2,
        post_affine=True,
        head_channels=(24, 48, 96, 192),
        head_features=2048,
        p=0.0,
    ),
    "mdeq-tiny": dict(channels=(24, 24), head_channels=(8, 16), head_features=200, injection=False),
}


def configure(
    preset: str = "paper-cifar10", model: str = "lipschitz", ablation: str | None = None, **changes
) -> ModelConfig:
    """A configuration by name.

    Args:
        preset: one of ``PRESETS`` (the sizes). model: "lipschitz" or "mdeq". ablation: None or one of
        ``ABLATIONS`` (S1–S7 of Table 2; "S4" is the uniform mean that was run, "S4-sum" the printed sum).
        changes: fields of :class:`ModelConfig`; n=… keeps the first n branches.
    """
    for field, value, allowed in (("preset", preset, PRESETS), ("model", model, ("lipschitz", "mdeq"))):
        if value not in allowed:
            raise ValueError(f"{field} = {value!r}: must be one of {', '.join(allowed)}")
    if ablation is not None and ablation not in ABLATIONS:
        raise ValueError(f"ablation = {ablation!r}: must be one of {', '.join(ABLATIONS)} or None")
    if ablation is not None and model == "mdeq":
        raise ValueError(f"ablation = {ablation!r}: only for model = 'lipschitz'")
    fields = {**PRESETS[preset], **(_MDEQ if model == "mdeq" else ABLATIONS.get(ablation, {}))}
    n = changes.pop("n", None)
    if n is not None:
        full = fields.get("channels", ModelConfig.channels)
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= len(full):
            raise ValueError(
                f"n = {n!r}: must be a whole number from 1 to {len(full)} for the preset {preset}"
            )
        fields["channels"] = full[:n]
        fields["head_channels"] = fields.get("head_channels", ModelConfig.head_channels)[:n]
    unknown = set(changes) - set(ModelConfig.__dataclass_fields__)
    if unknown:
        raise ValueError(
            f"{sorted(unknown)[0]}: not a field of ModelConfig ({', '.join(ModelConfig.__dataclass_fields__)})"
        )
    return replace(ModelConfig(**fields), **changes)


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
    """Bottleneck for each branch, summed from high to low resolution, 1x1 to F features, average pool,
    linear.
    """

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
        cfg: what to build.
        solver: forward solver (any of :mod:`lipmdeq.solvers`).
        adjoint: gradient rule (any of :mod:`lipmdeq.implicit`).

    Attributes:
        largest_image: largest side of images that are taken, that of the configuration: ‖W‖₂ ≤ c is enforced for its maps, and
            holds on smaller ones (their operator is a part of the larger one). ``certify(model, image_size)`` proves a bound
            for larger images; set this to use it. A model without the constraint takes all sizes.
    """

    def __init__(self, cfg: ModelConfig, solver=None, adjoint=None):
        super().__init__()
        self.cfg, self.largest_image = cfg, cfg.image_size
        self.solver = solver or Anderson(tol=1e-3, max_iter=18)
        self.adjoint = adjoint or Implicit(Anderson(tol=1e-3, max_iter=20))
        c1, s = cfg.channels[0], cfg.stem_stride
        self.stem = nn.Sequential(_conv_bn(cfg.in_channels, c1, 3, s), _conv_bn(c1, c1, 3, s))
        if cfg.injection:
            self.stem.append(_conv_bn(c1, c1, 1))
        self.f = FixedPointMap(cfg)
        self.head = Head(cfg)
        self.constrain()

    def z0(self, u: Tensor) -> list[Tensor]:
        """Zeros for every branch, in the memory format of the injection u (B, C_1, H, W)."""
        b, _, h, w = u.shape
        fmt = torch.channels_last
        return [
            torch.zeros(b, ci, h >> i, w >> i, device=u.device, dtype=u.dtype).to(memory_format=fmt)
            for i, ci in enumerate(self.cfg.channels)
        ]

    def inject(self, x: Tensor) -> Tensor:
        """u = stem(x) for images x (B, C, H, W), H and W at most ``largest_image``."""
        height, width = x.shape[2:]
        step = self.cfg.stem_stride**2 * 2 ** (self.cfg.n - 1)
        if height % step or width % step:
            raise ValueError(
                f"image size = {height}x{width}: must be multiples of {step} for {self.cfg.n} branches"
            )
        if self.cfg.constrain and max(height, width) > self.largest_image:
            raise ValueError(
                f"image size = {height}x{width}: must be at most {self.largest_image}x{self.largest_image}, for which f is "
                f"constrained; certify(model, {max(height, width)}) proves a bound there, model.largest_image takes such images"
            )
        return self.stem(x.contiguous(memory_format=torch.channels_last))

    def equilibrium(self, x: Tensor, solver=None, adjoint=None):
        """(z*, Solution) for images x (B, C, H, W)."""
        u = self.inject(x)
        masks = self.f.masks(u)
        return deq(
            lambda z: self.f(z, u, masks),
            self.z0(u),
            solver=solver or self.solver,
            adjoint=adjoint or self.adjoint,
            inputs=[u, *self.f.parameters()],
        )

    def forward(self, x: Tensor, details: bool = False):
        """Logits (B, classes); with details also the Solution of the solve."""
        z, solution = self.equilibrium(x)
        logits = self.head(z)
        return (logits, solution) if details else logits

    def constrain(self) -> None:
        """Apply the constraints of the configuration to f; call it after every optimizer step."""
        self.f.constrain()


def build(
    preset: str = "paper-cifar10",
    model: str = "lipschitz",
    ablation: str | None = None,
    *,
    solver=None,
    adjoint=None,
    **changes,
):
    """An :class:`MDEQ` by name, in ``channels_last``; arguments as in :func:`configure`."""
    return MDEQ(configure(preset, model, ablation, **changes), solver, adjoint).to(
        memory_format=torch.channels_last
    )
