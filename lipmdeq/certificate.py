"""The certificate: a proof that a live model's f is L-Lipschitz, and what was measured, side by side.

``certify`` walks the module tree of f, proves a norm for every convolution of the weight in use
(:mod:`lipmdeq.norms`), takes the live γ of every norm, and composes them into the comparison matrix N
(‖f(z)_i − f(z')_i‖ ≤ Σ_j N_ij‖z_j − z'_j‖). From N come

* ``frobenius`` ≥ ``spectral``: bounds on ‖J‖₂ in the plain norm,
* ``perron``: bound on ‖D J D⁻¹‖₂ in the weighted norm ‖z‖_D² = Σ d_i²‖z_i‖²; Banach's theorem holds in that
norm too.

Everything measured (‖J‖₂ by power iteration on JᵀJ, the spectral radius) is a lower bound or an estimate and
is called so.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import time
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lipmdeq import bounds
from lipmdeq.model.blocks import FixedPointMap, Fusion, PostFusion, ResidualBlock
from lipmdeq.model.layers import GN, MGN, Chain, Conv, ConvNorm, DownPath, SReLU, Up, UpPath, VariationalDropout
from lipmdeq.model.potential import Potential, PotentialMap, UnitConv
from lipmdeq.norms import Norm, conv_norm
from lipmdeq.solvers import Anderson, Picard

KNOWN = (
    FixedPointMap, ResidualBlock, Fusion, PostFusion, DownPath, UpPath, Chain, ConvNorm, Conv, GN, MGN, SReLU, Up,
    VariationalDropout, PotentialMap, Potential, UnitConv, nn.ModuleList, nn.ModuleDict,
)  # fmt: skip


def fingerprint(module: nn.Module) -> str:
    """sha256 over names and values of all parameters and buffers: the certificate holds for these and no
    others.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def constants_hash(f: nn.Module) -> str:
    """sha256 over kind and plain attributes of all modules: slopes, rates, weights of mixes, scales, strides, map sizes,
    limits, that is, all that enters L beside the weights.
    """
    digest = hashlib.sha256()
    for name, module in f.named_modules():
        kept = {k: v for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
        kept["eps"] = getattr(module, "eps", None)
        plain = {k: float(v) if isinstance(v, Real) else v for k, v in kept.items()}
        digest.update(repr((name, type(module).__name__, sorted(plain.items()))).encode())
    return digest.hexdigest()


def refuse_unknown(f: nn.Module) -> None:
    """ValueError with the layer's name for anything whose constant cannot be proved."""
    for name, module in f.named_modules():
        where = f"layer f.{name}" if name else "f"
        if type(module) not in KNOWN:
            raise ValueError(
                f"{where} = {type(module).__name__}: cannot be bounded; known layers are {', '.join(k.__name__ for k in KNOWN)}"
            )
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(f"{where} has a forward hook: cannot be bounded; remove it first")
        for pname, p in module.named_parameters(recurse=False):
            if not torch.isfinite(p).all():
                raise ValueError(f"{where}.{pname} = nan or inf: weights must be finite")
        if isinstance(module, SReLU | VariationalDropout):
            module.lipschitz()  # refuses a slope or a rate outside its range


def mixed_1x1_norm(conv: Conv, norm: MGN) -> Norm:
    """Exact norm of MGN ∘ conv1x1, tighter than max|γ|·‖W‖.

    Split the map into spatial frequencies. A frequency other than zero has mean zero, so MGN only scales:
    diag(γ)W. At frequency zero MGN also removes the mean over the channels of a group, Q = I − (1/m)11ᵀ:
    diag(γ)QW. The norm is the larger of the two. (diag(γ)W alone would not do: γ acts after the mean is
    removed, and Q mixes channels.)
    """
    w = conv.kernel().detach().double().flatten(1)
    gamma = w.new_ones(norm.channels) * torch.as_tensor(norm.scale()).detach().double()
    groups = w.view(norm.groups, -1, w.shape[1])
    centred = (groups - groups.mean(1, keepdim=True)).reshape(w.shape)
    both = torch.stack([gamma[:, None] * w, gamma[:, None] * centred])
    return Norm(float(torch.linalg.matrix_norm(both, 2).max()) * (1 + 1e-12), "exact", "1x1 with norm")


def live_constants(f: FixedPointMap, sizes: dict[Conv, tuple[int, int]], progress: bool) -> tuple[dict, list[dict]]:
    """Proved constants of the live modules, and one row for each for the report."""
    constants: dict[nn.Module, float] = {}
    rows: list[dict] = []
    names = {m: n for n, m in f.named_modules()}
    work = [m for m in f.modules() if isinstance(m, Conv | UnitConv | Potential | GN | MGN | ConvNorm)]
    for m in tqdm(work, desc="certificate", unit="layer", disable=None if progress else True, leave=False):
        c = None
        if isinstance(m, Conv | UnitConv | Potential):
            try:
                norm = conv_norm(m.kernel().detach(), sizes[m], stride=m.stride, padding=m.padding)
            except ValueError as e:
                raise ValueError(f"layer f.{names[m]}: cannot be bounded; {e}") from None
            c = m.c if isinstance(m, Conv) else 1.0
            if isinstance(m, Potential):  # ‖A‖² ≤ s gives max(1, 2s − 1), whoever made A
                how = f"‖A‖ ≤ {norm.value:.4f}: {norm.method}"
                norm = Norm(max(1.0, 2 * norm.value**2 - 1), norm.kind, how)
        elif isinstance(m, ConvNorm):
            if m.conv.weight.shape[-1] != 1 or not isinstance(m.norm, MGN):
                continue
            norm = mixed_1x1_norm(m.conv, m.norm)
            if not math.isfinite(norm.value):
                continue  # overflow: the product of both constants stands
        else:
            value = bounds.lip_gn(m.max_scale(), m.eps) if isinstance(m, GN) else bounds.lip_mgn(m.max_scale())
            norm = Norm(value, "exact", "max|γ|/√ε" if isinstance(m, GN) else "max|γ|")
            c = m.gamma if m.weight is not None else None
        constants[m] = norm.value
        rows.append(
            dict(name=names[m], layer=type(m).__name__, norm=norm.value, kind=norm.kind, method=norm.method, limit=c)
        )
    return constants, rows


def conv_sizes(f: FixedPointMap, image_size: int, configured: int) -> dict[Conv, tuple[int, int]]:
    """Input map of every convolution for images of another size than that of the configuration, in whole numbers."""
    sizes = {}
    for name, m in f.named_modules():
        if isinstance(m, Conv | UnitConv | Potential):
            if any(s * image_size % configured for s in m.size):
                raise ValueError(
                    f"image_size = {image_size}: layer f.{name}, {m.size} at {configured}, has no whole size"
                )
            sizes[m] = tuple(s * image_size // configured for s in m.size)
    return sizes


def readings(matrix: np.ndarray, tol: float) -> dict:
    """What follows from a comparison matrix: three constants, weights, guaranteed steps."""
    rho, d = bounds.perron(matrix)
    cond = float(max(d) / min(d))
    return dict(
        frobenius=float(bounds.frobenius(matrix)),
        spectral=float(bounds.spectral(matrix)),
        perron=float(rho),
        certified=bool(rho < 1),
        D=[float(v) for v in d],
        cond_D=cond,
        steps=bounds.steps(rho, tol),
        matrix=np.asarray(matrix).tolist(),
    )


class JacobianProbe:
    """J = ∂f/∂z at a list of branches z, as products with vectors; per sample, since samples do not mix."""

    def __init__(self, f, z: list[Tensor], weights: list[float] | None = None):
        self.d = weights or [1.0] * len(z)
        self.z = [t.detach().clone().requires_grad_() for t in z]
        with torch.enable_grad():
            self.fz = f(self.z)
            self.dummy = [torch.zeros_like(t).requires_grad_() for t in self.fz]
            self.back = torch.autograd.grad(self.fz, self.z, self.dummy, create_graph=True)

    def jvp(self, v: list[Tensor]) -> list[Tensor]:
        """D J D⁻¹ v (two vector–Jacobian products make a Jacobian–vector product)."""
        v = [t / d for t, d in zip(v, self.d, strict=True)]
        out = torch.autograd.grad(self.back, self.dummy, v, retain_graph=True)
        return [t * d for t, d in zip(out, self.d, strict=True)]

    def vjp(self, v: list[Tensor]) -> list[Tensor]:
        """(D J D⁻¹)ᵀ v."""
        v = [t * d for t, d in zip(v, self.d, strict=True)]
        out = torch.autograd.grad(self.fz, self.z, v, retain_graph=True)
        return [t / d for t, d in zip(out, self.d, strict=True)]

    def norm(self, steps: int = 30, generator: torch.Generator | None = None) -> Tensor:
        """‖D J D⁻¹‖₂ for each sample by power iteration on JᵀJ: a lower bound at every step."""
        v, best = _random_like(self.z, generator), 0.0
        for _ in range(steps):
            v = _scaled(v, 1 / _norms(v).clamp_min(1e-30))
            w = self.jvp(v)
            best = torch.maximum(_norms(w), torch.as_tensor(best))
            v = self.vjp(w)
        return best

    def spectral_radius(self, steps: int = 25, generator: torch.Generator | None = None) -> Tensor:
        """max |λ(J)| for each sample by Arnoldi iteration: an estimate."""
        v = _random_like(self.z, generator)
        basis = [_scaled(v, 1 / _norms(v))]
        h = torch.zeros(len(v[0]), steps + 1, steps, dtype=torch.double, device=v[0].device)
        for k in range(steps):
            w = self.jvp(basis[k])
            for i, b in enumerate(basis):
                coef = _dots(w, b)
                h[:, i, k] = coef.double()
                w = [x - coef[:, None, None, None] * y for x, y in zip(w, b, strict=True)]
            size = _norms(w)
            h[:, k + 1, k] = size.double()
            basis.append(_scaled(w, 1 / size.clamp_min(1e-30)))
        return torch.linalg.eigvals(h[:, :steps].cpu()).abs().amax(1)


def _random_like(z: list[Tensor], generator) -> list[Tensor]:
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in z]


def _dots(x: list[Tensor], y: list[Tensor]) -> Tensor:
    return sum((a * b).flatten(1).sum(1) for a, b in zip(x, y, strict=True))


def _norms(x: list[Tensor]) -> Tensor:
    return _dots(x, x).sqrt()


def _scaled(x: list[Tensor], s: Tensor) -> list[Tensor]:
    return [t * s[:, None, None, None] for t in x]


@dataclass(frozen=True)
class Certificate:
    """What was proved (``test``, ``train``: constants of the comparison matrix) and what was measured.
    ``layers`` has a row each. ``constants`` is None in records that were written without it.
    """

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
    constants: str | None = None
    measured_on: str = "noise"  # or "images": what the measured rows were measured on

    @property
    def certified(self) -> bool:
        """True when f is proved to be a contraction in test mode."""
        return self.test["certified"]

    @property
    def slack(self) -> float | None:
        """Proved spectral bound over the measured ‖J‖₂ (≥ 1): how much the proof gives away at most."""
        return self.test["spectral"] / self.measured_norm if self.measured_norm else None

    def matches(self, model: nn.Module) -> bool:
        """False as soon as a weight of f, or a constant beside the weights (a, p, α1, α2, a weight of the fusion, …), differs
        from those that were certified.
        """
        same = self.constants is None or self.constants == constants_hash(model.f)
        return same and fingerprint(model.f) == self.fingerprint

    def to_dict(self) -> dict:
        return {**asdict(self), "certified": self.certified, "slack": self.slack}

    def save(self, path: str | Path) -> None:
        """Write as JSON; infinite values become null, with ``certified`` false beside them."""
        Path(path).write_text(json.dumps(jsonable(self.to_dict()), indent=1) + "\n")

    def summary_rows(self) -> list[tuple[str, str, str]]:
        """(what, value, kind) of the summary, for print and HTML."""
        rows = []
        for mode in ("test", "train"):
            r = getattr(self, mode)
            for key in ("frobenius", "spectral", "perron"):
                rows.append((f"L, {mode} mode, {key}", f"{r[key]:.4g}", "proved upper bound"))
            steps = "none" if r["steps"] is None else str(r["steps"])
            rows.append((f"steps to {self.tolerance:g}, {mode} mode", steps, "proved (from z = 0, weighted norm)"))
        if self.measured_norm is not None:
            rows += [
                (f"‖J‖₂ measured ({self.measured_on})", f"{self.measured_norm:.4g}", "lower bound"),
                ("‖D J D⁻¹‖₂ measured", f"{self.measured_norm_D:.4g}", "lower bound"),
                ("spectral radius at z*", f"{self.spectral_radius:.4g}", "estimate"),
                (f"evaluations of f to {self.tolerance:g}", str(self.observed_steps), "observed"),
                ("slack (spectral / measured)", f"{self.slack:.3g}", ""),
            ]
        return rows

    def __str__(self) -> str:
        verdict = "contraction PROVED (test mode)" if self.certified else "NOT proved to be a contraction (test mode)"
        lines = [f"Certificate, images {self.image_size}x{self.image_size}: {verdict}"]
        lines += [f"  {a:<34} {b:>10}  {c}" for a, b, c in self.summary_rows()]
        lines += ["", f"  {'layer':<34} {'norm':>10}  {'limit':>7}  kind"]
        for r in self.layers:
            limit = "-" if r["limit"] is None else f"{r['limit']:g}"
            lines.append(f"  {r['name']:<34} {r['norm']:>10.5f}  {limit:>7}  {r['kind']} ({r['method']})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        def cells(row):
            return "<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row) + "</tr>"

        verdict = "proved to be a contraction" if self.certified else "not proved to be a contraction"
        head = f"<p><b>f is {verdict}</b> (test mode, images {self.image_size}x{self.image_size})</p>"
        body = "".join(cells(row) for row in self.summary_rows())
        layer_rows = "".join(
            cells(
                (
                    r["name"],
                    f"{r['norm']:.5f}",
                    "–" if r["limit"] is None else f"{r['limit']:g}",
                    r["kind"],
                    r["method"],
                )
            )
            for r in self.layers
        )
        layers = (
            "<details><summary>layers</summary><table><tr><th>layer</th><th>norm</th><th>limit</th><th>kind</th><th>method</th></tr>"
            f"{layer_rows}</table></details>"
        )
        return f"{head}<table><tr><th>quantity</th><th>value</th><th>kind</th></tr>{body}</table>{layers}"


def jsonable(value):
    """The same with infinities and NaN as None (JSON has neither)."""
    if isinstance(value, dict):
        return {k: jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def certify(
    model: nn.Module,
    image_size: int | None = None,
    *,
    x: Tensor | None = None,
    tol: float = 1e-3,
    measure: bool = True,
    random_points: int = 2,
    power_steps: int = 30,
    seed: int = 0,
    progress: bool = True,
) -> Certificate:
    """Prove L for the live weights of ``model.f`` and measure how much the proof gives away.

    Args:
        model: an :class:`lipmdeq.model.MDEQ`. image_size: side of the images (default: that of the
        configuration); the norms are those of the maps it gives. x: images (B, C, H, W) for the measurement;
        give real ones, the default is two of standard normal noise. tol: relative residual for the step counts. measure: also
        measure ‖J‖₂ at z* and at ``random_points`` other points.

    Raises:
        ValueError: with the name of the layer that cannot be bounded.
    """
    start = time.perf_counter()
    cfg, f = model.cfg, model.f
    image_size = cfg.image_size if image_size is None else image_size
    if image_size < 1 or image_size % cfg.step:
        raise ValueError(f"image_size = {image_size}: must be a multiple of {cfg.step}")
    refuse_unknown(f)
    constants, rows = live_constants(f, conv_sizes(f, image_size, cfg.image_size), progress)
    proved = {mode: readings(f.matrix(constants.get, train=mode == "train"), tol) for mode in ("test", "train")}
    points, observed = [], None
    if measure:
        points, observed = _measure(
            model, x, image_size, proved["test"]["D"], tol, random_points, power_steps, seed, progress
        )
    return Certificate(
        image_size=image_size,
        tolerance=tol,
        **proved,
        measured_norm=max((p["norm"] for p in points), default=None),
        measured_norm_D=max((p["norm_D"] for p in points), default=None),
        spectral_radius=next((p["spectral_radius"] for p in points if p["at"] == "z*"), None),
        points=points,
        observed_steps=observed,
        layers=rows,
        fingerprint=fingerprint(f),
        seconds=time.perf_counter() - start,
        constants=constants_hash(f),
        measured_on="noise" if x is None else "images",
    )


def _measure(model, x, image_size, d, tol, random_points, power_steps, seed, progress) -> tuple[list[dict], int | None]:
    """‖J‖₂ (lower bounds) at z* and at random points, in test mode; number of Picard steps that were needed."""
    was_training = model.training
    model.eval()
    gen = torch.Generator().manual_seed(seed)
    ref = next(model.f.parameters())
    if x is None:
        x = torch.randn(2, model.cfg.in_channels, image_size, image_size, generator=gen)
    x = x.to(ref.device, ref.dtype)
    try:
        with torch.no_grad():
            f, z0, _ = model.problem(x)
            picard = Picard(tol=tol, max_iter=200).solve(f, z0)
            star = Anderson(tol=1e-5, max_iter=100).solve(f, z0).z
        scale = [float(t.std()) + 1e-12 for t in star]
        places = [("z*", star)] + [
            (f"random {k + 1}", [s * r for s, r in zip(scale, _random_like(star, gen), strict=True)])
            for k in range(random_points)
        ]
        points = []
        for at, z in tqdm(places, desc="measuring", unit="point", disable=None if progress else True, leave=False):
            plain = JacobianProbe(f, z)
            row = dict(at=at, norm=float(plain.norm(power_steps, gen).max()))
            weighted = JacobianProbe(f, z, d)
            row["norm_D"] = float(weighted.norm(power_steps, gen).max())
            row["spectral_radius"] = float(plain.spectral_radius(generator=gen).max())
            points.append(row)
        return points, picard.nfe if bool(picard.converged.all()) else None
    finally:
        model.train(was_training)
