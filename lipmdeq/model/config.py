"""What defines a model: every size and constant with its default, presets by name, the ablations of Table 2."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from lipmdeq import bounds


@dataclass(frozen=True)
class ModelConfig:
    """Everything that defines a model; :func:`configure` makes the usual ones.

    a, c, gamma, alpha1, alpha2, p are the paper's; n is the number of ``channels``. The switches undo one modification each: norm
    "mgn" or "gn"; clip: |γ| ≤ γ̄; constrain: ‖W‖₂ ≤ c; fusion "softmax", "mean" or "sum"; mix1, mix2: convex mixes in the residual
    block and in the fusion (else plain sums); weight_norm on the residual-block and post-fusion convolutions.

    block "paper" is the residual block of the paper, "potential" the certified family of :mod:`lipmdeq.model`, whose
    f is tau-Lipschitz whatever the weights. injection "first" is the paper's: the image enters branch 1 only; with "all" a
    pyramid of stride-2 convolutions feeds every branch. stem_strides and stem_channels are those of the two convolutions
    of the stem (None: as many channels as branch 1); injection_conv: a 1x1 convolution behind it.
    """

    channels: tuple[int, ...] = (32, 64, 128, 256)
    image_size: int = 32
    in_channels: int = 3
    classes: int = 10
    expansion: int = 5
    groups: int = 8
    stem_strides: tuple[int, int] = (1, 1)
    stem_channels: int | None = None
    injection: str = "first"
    injection_conv: bool = True
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
    block: str = "paper"
    tau: float = 0.9

    def __post_init__(self):
        for field in ("channels", "head_channels", "stem_strides"):
            if not isinstance(getattr(self, field), list | tuple):
                raise ValueError(f"{field} = {getattr(self, field)!r}: must be a list of whole numbers")
            object.__setattr__(self, field, tuple(bounds.check_whole(field, v) for v in getattr(self, field)))
        self.spec()  # validates a, c, gamma, alpha1, alpha2, n, p
        bounds.check_range("tau", self.tau, 0, 1)
        for field, allowed in CHOICES.items():
            bounds.check_choice(field, getattr(self, field), allowed)
        if len(self.stem_strides) != 2 or any(s not in (1, 2) for s in self.stem_strides):
            raise ValueError(f"stem_strides = {self.stem_strides}: must be two numbers, each 1 or 2")
        if len(self.head_channels) != self.n:
            raise ValueError(f"head_channels = {self.head_channels}: must have one entry for each of {self.n} branches")
        for field in ("expansion", "groups", "in_channels", "classes", "head_features", "image_size", "stem_channels"):
            if field != "stem_channels" or self.stem_channels is not None:
                object.__setattr__(self, field, bounds.check_whole(field, getattr(self, field)))
        for field in ("injection_conv", "post_affine", "clip", "constrain", "mix1", "mix2", "weight_norm"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} = {getattr(self, field)!r}: must be True or False")
        for ch in self.channels:
            if ch % self.groups or ch % max(1, self.groups // 2):
                raise ValueError(f"channels = {ch}: must be divisible by groups = {self.groups}, and by half of it")
        if self.image_size % self.step:
            raise ValueError(f"image_size = {self.image_size}: must be a multiple of {self.step} for {self.n} branches")

    @classmethod
    def from_dict(cls, fields: dict) -> ModelConfig:
        """From the model part of a record or checkpoint, older ones too."""
        fields = dict(fields)
        if "stem_stride" in fields:  # one number for both convolutions, and a flag for the 1x1 convolution behind them
            fields["stem_strides"] = (fields.pop("stem_stride"),) * 2
            fields["injection_conv"], fields["injection"] = fields["injection"], "first"
        return cls(**fields)

    @property
    def step(self) -> int:
        """Image sizes must be multiples of this."""
        return math.prod(self.stem_strides) * 2 ** (self.n - 1)

    @property
    def n(self) -> int:
        return len(self.channels)

    @property
    def claimed(self) -> float | None:
        """L in train mode by the configuration alone; None when f has no useful constant by construction."""
        if self.block == "potential":
            return self.tau
        if not (self.norm == "mgn" and self.clip and self.constrain):
            return None
        plain = {mix: (1.0, 1.0) for mix in ("mix1", "mix2") if not getattr(self, mix)}
        weights = bounds.fusion_weights(self.n, self.fusion)
        return replace(self.spec().operations(), weights=weights, **plain).L("reported")

    def spec(self) -> bounds.LipschitzSpec:
        """The hyperparameters that enter L."""
        return bounds.LipschitzSpec(self.a, self.c, self.gamma, self.alpha1, self.alpha2, self.n, self.p)

    def sizes(self, image_size: int | None = None) -> list[tuple[int, int]]:
        """(H, W) of every branch."""
        h = (image_size or self.image_size) // math.prod(self.stem_strides)
        return [(h // 2**i, h // 2**i) for i in range(self.n)]

    def to_dict(self) -> dict:
        return asdict(self)


CHOICES = {
    "norm": ("mgn", "gn"), "fusion": ("softmax", "mean", "sum"), "block": ("paper", "potential"), "injection": ("first", "all")
}  # fmt: skip
UNDONE = {  # what each row of lipmdeq.bounds.ABLATIONS changes in a configuration
    "S1": {"clip": False},
    "S2": {"norm": "gn"},
    "S3": {"constrain": False},
    "S4": {"fusion": "mean"},
    "S4-sum": {"fusion": "sum"},
    "S5": {"mix1": False},
    "S6": {"mix2": False},
    "S6-sum": {"mix2": False, "fusion": "sum"},
    "S7": {"mix1": False, "mix2": False},
    "S7-sum": {"mix1": False, "mix2": False, "fusion": "sum"},
    "MDEQ": dict(a=1.0, norm="gn", clip=False, constrain=False, fusion="sum", mix1=False, mix2=False, weight_norm=True),
}
POTENTIAL = {"expansion": 3, "injection": "all", "p": 0.0, "alpha2": 0.5}  # where block = "potential" says nothing
_SMALL = dict(channels=(8, 16, 32, 64), head_channels=(4, 8, 16, 32), head_features=256)
PRESETS = {
    "digits": dict(channels=(16, 32, 64), image_size=8, in_channels=1, expansion=2,
                   head_channels=(8, 16, 32), head_features=128),
    "cpu": dict(_SMALL, image_size=16),
    "cpu32": dict(_SMALL, stem_strides=(1, 2)),
    "cpu-imagenet": dict(_SMALL, image_size=64, classes=25, stem_strides=(2, 2), post_affine=True, p=0.0),
    "paper-cifar10": dict(),
    "paper-imagenet": dict(image_size=224, classes=1000, stem_strides=(2, 2), post_affine=True, p=0.0,
                           head_channels=(24, 48, 96, 192), head_features=2048),
    "mdeq-tiny": dict(channels=(24, 24), head_channels=(8, 16), head_features=200, injection_conv=False),
}  # fmt: skip


def configure(
    preset: str = "paper-cifar10", model: str = "lipschitz", ablation: str | None = None, **changes
) -> ModelConfig:
    """A configuration by name.

    Args:
        preset: one of ``PRESETS`` (the sizes). model: "lipschitz" or "mdeq". ablation: None or one of S1–S7 of Table 2. S4
        fuses with the uniform mean, S6 and S7 with the softmax weights, S4-sum, S6-sum and S7-sum with plain sums. The
        authors' code ran S4, S6-sum and S7-sum; the paper's text describes S4-sum, S6 and S7.
        changes: fields of :class:`ModelConfig`; n=… keeps the first n branches; block="potential" brings its own
        defaults (``POTENTIAL``, and a stem twice as wide as branch 1 of the preset).
    """
    bounds.check_choice("preset", preset, tuple(PRESETS))
    bounds.check_choice("model", model, ("lipschitz", "mdeq"))
    potential = changes.get("block") == "potential"
    if ablation is not None:
        bounds.check_choice("ablation", ablation, tuple(row for row in bounds.ABLATIONS if row != "MDEQ"))
        if model == "mdeq":
            raise ValueError(f"ablation = {ablation!r}: only for model = 'lipschitz'")
    if potential and (ablation is not None or model == "mdeq"):
        raise ValueError("block = 'potential': must be 'paper' for an ablation or for model = 'mdeq'")
    fields = {"channels": ModelConfig.channels, "head_channels": ModelConfig.head_channels, **PRESETS[preset]}
    fields |= UNDONE.get("MDEQ" if model == "mdeq" else ablation, {})
    if potential:
        fields |= {**POTENTIAL, "stem_channels": 2 * fields["channels"][0]}
    most, n = len(fields["channels"]), changes.pop("n", None)
    if n is not None:
        n = bounds.check_whole("n", n)
        if n > most:
            raise ValueError(f"n = {n}: must be a whole number from 1 to {most} for the preset {preset}")
        fields |= {field: fields[field][:n] for field in ("channels", "head_channels")}
    if unknown := sorted(set(changes) - set(ModelConfig.__dataclass_fields__)):
        raise ValueError(f"{unknown[0]}: not a field of ModelConfig ({', '.join(ModelConfig.__dataclass_fields__)})")
    return replace(ModelConfig(**fields), **changes)
