"""The certificate: a proof that a live model's f is L-Lipschitz, and what was measured, side by side.

``certify`` proves a norm for every convolution of the weights in use, takes the live γ of every norm, and composes them into the
comparison matrix N, ‖f(z)_i − f(z')_i‖ ≤ Σ_j N_ij‖z_j − z'_j‖. From N come ``frobenius`` ≥ ``spectral`` ≥ ‖J‖₂ in the plain norm,
and ``perron`` ≥ ‖D J D⁻¹‖₂ in the weighted norm ‖z‖_D² = Σ d_i²‖z_i‖², in which Banach's theorem holds too.
Everything measured is a lower bound or an estimate and is called so.
"""

from __future__ import annotations

import hashlib
import html
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from numbers import Real

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lipmdeq import bounds
from lipmdeq.jacobian import Measurement
from lipmdeq.model.blocks import FixedPointMap, Fusion, PostFusion, ResidualBlock
from lipmdeq.model.layers import GN, MGN, Chain, Conv, ConvNorm, DownPath, SReLU, Up, UpPath, VariationalDropout
from lipmdeq.model.potential import Potential, PotentialMap, UnitConv
from lipmdeq.norms import Norm, conv_norm

TOLERANCE = 1e-3  # relative residual to which steps are counted, as in the paper's experiments
TF32 = 2.0**-10  # a number of which eleven binary digits are read changes by less than this part, rounded or cut off
KNOWN = (
    FixedPointMap, ResidualBlock, Fusion, PostFusion, DownPath, UpPath, Chain, ConvNorm, Conv, GN, MGN, SReLU, Up,
    VariationalDropout, PotentialMap, Potential, UnitConv, nn.ModuleList, nn.ModuleDict,
)  # fmt: skip


def fingerprint(module: nn.Module) -> str:
    """sha256 over names and values of all parameters and buffers: the certificate holds for these and no others."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def constants_hash(f: nn.Module) -> str:
    """sha256 over kind and plain attributes of all modules (slopes, strides, map sizes, …): what enters L beside the weights."""
    digest = hashlib.sha256()
    for name, module in f.named_modules():
        kept = [(k, v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"]
        plain = {k: float(v) if isinstance(v, Real) else v for k, v in (*kept, ("eps", getattr(module, "eps", None)))}
        digest.update(repr((name, type(module).__name__, sorted(plain.items()))).encode())
    return digest.hexdigest()


def refuse_unknown(f: nn.Module) -> None:
    """ValueError with the layer's name for anything whose constant cannot be proved."""
    for name, module in f.named_modules():
        where = f"layer f.{name}" if name else "f"
        if type(module) not in KNOWN:
            known = ", ".join(k.__name__ for k in KNOWN)
            raise ValueError(f"{where} = {type(module).__name__}: cannot be bounded; known layers are {known}")
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(f"{where} has a forward hook: cannot be bounded; remove it first")
        for pname, p in module.named_parameters(recurse=False):
            if not torch.isfinite(p).all():
                raise ValueError(f"{where}.{pname} = nan or inf: weights must be finite")
        if isinstance(module, SReLU | VariationalDropout):
            module.lipschitz()  # refuses a slope or a rate outside its range


def mixed_1x1_norm(conv: Conv, norm: MGN, dtype: torch.dtype | str | None = None) -> Norm:
    """Exact norm of MGN ∘ conv1x1, tighter than max|γ|·‖W‖.

    Split the map into spatial frequencies. At those other than zero the mean is zero, so MGN only scales: diag(γ)W. At zero
    MGN also removes the mean over the channels of a group, Q = I − (1/m)11ᵀ: diag(γ)QW. The norm is the larger of the two.
    (diag(γ)W alone would not do: γ acts after the mean is removed, and Q mixes channels.) On a map of one pixel there is
    frequency zero alone, and the value is an upper bound.
    """
    w = rounded(conv.kernel(), dtype).double().flatten(1)
    gamma = w.new_ones(norm.channels) * torch.as_tensor(norm.scale()).detach().double()
    groups = w.view(norm.groups, -1, w.shape[1])
    centred = (groups - groups.mean(1, keepdim=True)).reshape(w.shape)
    both = gamma[:, None] * torch.stack([w, centred])
    change = TF32 * gamma.abs().max() * torch.linalg.matrix_norm(w.abs(), 2) if dtype == "tf32" else 0.0
    value = float(torch.linalg.matrix_norm(both, 2).max() + change) * (1 + 1e-12)
    return Norm(value, "upper" if dtype == "tf32" else "exact", "1x1 with norm")


def rounded(kernel: Tensor, dtype: torch.dtype | str | None) -> Tensor:
    """The kernel as autocast to ``dtype`` hands it to a convolution, in the kernel's own type; None or "tf32": as it is."""
    kernel = kernel.detach()
    return kernel.to(dtype).to(kernel.dtype) if isinstance(dtype, torch.dtype) else kernel


@dataclass(frozen=True)
class Prover:
    """Proves the constant of one layer of f at a time, for the maps in ``sizes`` and kernels rounded to ``dtype``."""

    f: nn.Module
    sizes: dict[nn.Module, tuple[int, int]]
    dtype: torch.dtype | str | None = None

    def conv(self, m: nn.Module, kernel: Tensor) -> Norm:
        """Norm of the convolution ``m`` with another kernel. TF32 changes it by |E| ≤ 2⁻¹⁰|W|, so ‖E‖ ≤ ‖2⁻¹⁰|W|‖ is added."""
        kernels = (kernel, TF32 * kernel.abs()) if self.dtype == "tf32" else (kernel,)
        norm, *more = (conv_norm(k, self.sizes[m], stride=m.stride, padding=m.padding) for k in kernels)
        return Norm(norm.value + more[0].value, "upper", norm.method) if more else norm

    def unit_conv(self, m: UnitConv) -> Norm:
        """The last kernel of a path is multiplied by M_ij, and by 2^(i−j) of the up-sampling, before it is rounded."""
        w, paths = 1.0, self.f.paths if self.dtype is not None and isinstance(self.f, PotentialMap) else {}
        for name in [name for name, path in paths.items() if path[-1] is m]:
            j, i = (int(k) - 1 for k in name.split("to"))
            w = (self.f.mixing().detach()[i, j] * 2.0 ** min(0, i - j)).clamp_min(1e-30)
        return self.conv(m, rounded(w * m.kernel(), self.dtype) / w)

    def potential(self, m: Potential) -> Norm:
        """‖A‖² ≤ s gives ‖J‖₂ ≤ max(1, 2s − 1), whoever made A.

        Rounding turns h into z − 2k·B σ(Az + …), k = 1 or 1 − p, with Bᵀ = A + E, because K and 2kKᵀ/T are rounded apart.
        Then J = I − 2kAᵀSA − 2kEᵀSA with 0 ≼ S ≼ I, hence ‖J‖₂ ≤ max(1, 2s − 1) + 2√s‖E‖, the larger one of both modes.
        """
        root = m.T().detach().sqrt()
        a = rounded(m.weight, self.dtype) / root
        norm = self.conv(m, a)
        value = max(1.0, 2 * norm.value**2 - 1)
        if self.dtype is not None:
            backs = (2 * k / root**2 for k in (1.0, 1 - m.drop.p))
            apart = [rounded(b * m.weight, self.dtype) / (b * root) - a for b in backs]
            apart = [2 * TF32 * a.abs()] if self.dtype == "tf32" else apart
            value += 2 * norm.value * max(self.conv(m, e).value for e in apart)
        return Norm(value, norm.kind, f"‖A‖ ≤ {norm.value:.4f}: {norm.method}")

    def __call__(self, m: nn.Module) -> tuple[Norm, float | None] | None:
        """The proved constant of a layer and what limits it by construction; None where its parts have to do."""
        if isinstance(m, Conv):
            return self.conv(m, rounded(m.kernel(), self.dtype)), m.c
        if isinstance(m, UnitConv):
            return self.unit_conv(m), 1.0
        if isinstance(m, Potential):
            return self.potential(m), 1.0
        if isinstance(m, GN | MGN):
            how, limit = "max|γ|/√ε" if isinstance(m, GN) else "max|γ|", None if m.weight is None else m.gamma
            return Norm(m.bound(m.max_scale()), "exact", how), limit
        if isinstance(m, ConvNorm) and m.conv.weight.shape[-1] == 1 and isinstance(m.norm, MGN):
            with suppress(ValueError):  # overflow: the product of both constants stands
                return mixed_1x1_norm(m.conv, m.norm, self.dtype), None
        return None


def live_constants(prove: Prover, progress: bool) -> tuple[dict[nn.Module, float], list[dict]]:
    """Proved constants of the live modules, and one row for each for the report."""
    constants, rows, work = {}, [], list(prove.f.named_modules())
    for name, m in tqdm(work, desc="certificate", unit="layer", disable=None if progress else True, leave=False):
        try:
            found = prove(m)
        except ValueError as e:
            raise ValueError(f"layer f.{name}: cannot be bounded; {e}") from None
        if found is not None:
            (norm, limit), layer = found, type(m).__name__
            constants[m] = norm.value
            rows.append(dict(name=name, layer=layer, norm=norm.value, kind=norm.kind, method=norm.method, limit=limit))
    return constants, rows


def conv_sizes(f: nn.Module, image_size: int, configured: int) -> dict[nn.Module, tuple[int, int]]:
    """Input map of every convolution for images of another size than that of the configuration, in whole numbers."""
    convs = {m: name for name, m in f.named_modules() if isinstance(m, Conv | UnitConv | Potential)}
    for m, name in convs.items():
        if any(s * image_size % configured for s in m.size):
            raise ValueError(f"image_size = {image_size}: layer f.{name}, {m.size} at {configured}, has no whole size")
    return {m: tuple(s * image_size // configured for s in m.size) for m in convs}


def readings(matrix: np.ndarray, tol: float) -> dict:
    """What follows from a comparison matrix: three constants, weights, guaranteed steps."""
    rho, d = bounds.perron(matrix)
    constants = {"frobenius": bounds.frobenius(matrix), "spectral": bounds.spectral(matrix), "perron": rho}
    weights = {"D": [float(v) for v in d], "cond_D": float(max(d) / min(d))}
    rest = {"steps": bounds.steps(rho, tol), "matrix": np.asarray(matrix).tolist()}
    return {k: float(v) for k, v in constants.items()} | {"certified": bool(rho < 1)} | weights | rest


@dataclass(frozen=True)
class Certificate:
    """What was proved, in ``test`` and ``train`` mode and for each of ``layers``, and what was measured."""

    image_size: int
    tolerance: float
    test: dict
    train: dict
    measured_norm: float | None
    measured_norm_D: float | None
    spectral_radius: float | None
    points: list[dict]
    observed_steps: int | None
    layers: list[dict]
    fingerprint: str
    seconds: float
    constants: str | None = None  # None in records that were written without it
    measured_on: str = "noise"  # or "images": what the measured rows were measured on
    dtype: str | None = None  # the type that kernels were rounded to before the proof

    @property
    def certified(self) -> bool:
        """True when f is proved to be a contraction in test mode."""
        return self.test["certified"]

    @property
    def slack(self) -> float | None:
        """Proved spectral bound over the measured ‖J‖₂ (≥ 1): how much the proof gives away at most."""
        return self.test["spectral"] / self.measured_norm if self.measured_norm else None

    def matches(self, model: nn.Module) -> bool:
        """False as soon as a weight of f, or a constant beside the weights (a, p, α1, …), is not the one that was certified."""
        same = self.constants is None or self.constants == constants_hash(model.f)
        return same and fingerprint(model.f) == self.fingerprint

    def to_dict(self) -> dict:
        return {**asdict(self), "certified": self.certified, "slack": self.slack}

    def summary_rows(self) -> list[tuple[str, str, str]]:
        """(what, value, kind) of the summary, for print and HTML."""
        rows, to = [], f"to {self.tolerance:g}"
        for mode, r in (("test", self.test), ("train", self.train)):
            for key in ("frobenius", "spectral", "perron"):
                rows.append((f"L, {mode} mode, {key}", f"{r[key]:.4g}", "proved upper bound"))
            steps = "none" if r["steps"] is None else r["steps"]
            rows.append((f"steps {to}, {mode} mode", f"{steps}", "proved (from z = 0, weighted norm)"))
        if self.measured_norm is not None:
            rows += [
                (f"‖J‖₂ measured ({self.measured_on})", f"{self.measured_norm:.4g}", "lower bound"),
                ("‖D J D⁻¹‖₂ measured", f"{self.measured_norm_D:.4g}", "lower bound"),
                ("spectral radius at z*", f"{self.spectral_radius:.4g}", "estimate"),
                (f"evaluations of f {to}", str(self.observed_steps), "observed"),
                ("slack (spectral / measured)", "–" if self.slack is None else f"{self.slack:.3g}", ""),
            ]
        return rows

    def layer_rows(self) -> list[tuple[str, ...]]:
        """(name, norm, limit, kind, method) of each layer."""
        shown = ({**r, "limit": "–" if r["limit"] is None else f"{r['limit']:g}"} for r in self.layers)
        return [(r["name"], f"{r['norm']:.5f}", r["limit"], r["kind"], r["method"]) for r in shown]

    def __str__(self) -> str:
        verdict = "contraction PROVED (test mode)" if self.certified else "NOT proved to be a contraction (test mode)"
        kernels = f", kernels in {self.dtype}" if self.dtype else ""
        lines = [f"Certificate, images {self.image_size}x{self.image_size}{kernels}: {verdict}"]
        lines += [f"  {a:<34} {b:>10}  {c}" for a, b, c in self.summary_rows()]
        lines += ["", f"  {'layer':<34} {'norm':>10}  {'limit':>7}  kind"]
        lines += [f"  {a:<34} {b:>10}  {c.replace('–', '-'):>7}  {d} ({e})" for a, b, c, d, e in self.layer_rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def table(head: str, rows: list[tuple[str, ...]]) -> str:
            body = "".join(f"<tr>{''.join(f'<td>{html.escape(v)}</td>' for v in row)}</tr>" for row in rows)
            return f"<table><tr>{''.join(f'<th>{word}</th>' for word in head.split())}</tr>{body}</table>"

        verdict = f"f is {'' if self.certified else 'not '}proved to be a contraction"
        head = f"<p><b>{verdict}</b> (test mode, images {self.image_size}x{self.image_size})</p>"
        layers = table("layer norm limit kind method", self.layer_rows())
        summary = table("quantity value kind", self.summary_rows())
        return f"{head}{summary}<details><summary>layers</summary>{layers}</details>"


def certify(
    model: nn.Module,
    image_size: int | None = None,
    *,
    x: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    measure: bool | Measurement = True,
    progress: bool = True,
) -> Certificate:
    """Prove L for the live weights of ``model.f``, or name the layer that cannot be bounded; measure what the proof gives away.

    Args:
        model: an :class:`lipmdeq.model.MDEQ`. image_size: side of the images (default: that of the configuration); the norms
        are those of the maps it gives. x: images (B, C, H, W) for the measurement; give real ones, the default is two of
        standard normal noise. dtype: prove it for kernels as autocast to this type rounds them, e.g. ``torch.bfloat16``,
        or as "tf32" reads them (what is measured has the kernels as they are). measure: also ‖J‖₂, at z* and at random points.
    """
    start, cfg, f = time.perf_counter(), model.cfg, model.f
    image_size = cfg.image_size if image_size is None else image_size
    if bounds.check_whole("image_size", image_size) % cfg.step:
        raise ValueError(f"image_size = {image_size}: must be a multiple of {cfg.step}")
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32, "tf32"):
        raise ValueError(f"dtype = {dtype}: must be torch.bfloat16, torch.float16, torch.float32, 'tf32' or None")
    if x is not None and (x.dim() != 4 or max(x.shape[2:]) > image_size):
        raise ValueError(f"x = {tuple(x.shape)}: must be (B, C, H, W), at most {image_size} high and wide")
    refuse_unknown(f)
    constants, layers = live_constants(Prover(f, conv_sizes(f, image_size, cfg.image_size), dtype), progress)
    drops = [m for m in f.modules() if isinstance(m, VariationalDropout) and isinstance(dtype, torch.dtype)]
    masks = {m: float(torch.tensor(m.lipschitz()).to(dtype)) * (1 + 1e-7) for m in drops}  # 1/(1 − p) is rounded too
    leaves = {"test": constants.get, "train": {**constants, **masks}.get}
    proved = {mode: readings(f.matrix(leaf, train=mode == "train"), TOLERANCE) for mode, leaf in leaves.items()}
    points, observed = [], None
    if measure:
        how = measure if isinstance(measure, Measurement) else Measurement()
        points, observed = how.run(model, image_size if x is None else x, proved["test"]["D"], TOLERANCE, progress)
    return Certificate(
        image_size, TOLERANCE, **proved,
        measured_norm=max((p["norm"] for p in points), default=None),
        measured_norm_D=max((p["norm_D"] for p in points), default=None),
        spectral_radius=points[0]["spectral_radius"] if points else None,
        points=points, observed_steps=observed, layers=layers, fingerprint=fingerprint(f),
        seconds=time.perf_counter() - start, constants=constants_hash(f), measured_on="noise" if x is None else "images",
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )  # fmt: skip
