"""What can be measured of the Jacobian J = ∂f/∂z at a point: ‖J‖₂ from below, the spectral radius as an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lipmdeq.solvers import Anderson, Picard


class JacobianProbe:
    """D J D⁻¹ at a list of branches z, as products with vectors; per sample, since samples do not mix. Without weights D = I."""

    def __init__(self, f, z: Sequence[Tensor], weights: Sequence[float] | None = None):
        weights = weights or [1.0] * len(z)
        self.y = [torch.zeros_like(t).requires_grad_() for t in z]
        with torch.enable_grad():  # y ↦ D f(z + D⁻¹y), at y = 0
            moved = [t.detach() + y / d for t, y, d in zip(z, self.y, weights, strict=True)]
            self.fz = [d * t for t, d in zip(f(moved), weights, strict=True)]
            self.dummy = [torch.zeros_like(t).requires_grad_() for t in self.fz]
            self.back = torch.autograd.grad(self.fz, self.y, self.dummy, create_graph=True)

    def jvp(self, v: Sequence[Tensor]) -> Sequence[Tensor]:
        """D J D⁻¹ v (two vector–Jacobian products make a Jacobian–vector product)."""
        return torch.autograd.grad(self.back, self.dummy, v, retain_graph=True)

    def vjp(self, v: Sequence[Tensor]) -> Sequence[Tensor]:
        """(D J D⁻¹)ᵀ v."""
        return torch.autograd.grad(self.fz, self.y, v, retain_graph=True)

    def norm(self, steps: int = 30, generator: torch.Generator | None = None) -> Tensor:
        """‖D J D⁻¹‖₂ for each sample by power iteration on JᵀJ: a lower bound at every step."""
        v, best = _random_like(self.y, generator), torch.zeros(())
        for _ in range(steps):
            w = self.jvp(_scaled(v, 1 / norms(v).clamp_min(1e-30)))
            best = torch.maximum(norms(w), best)
            v = self.vjp(w)
        return best

    def spectral_radius(self, steps: int = 25, generator: torch.Generator | None = None) -> Tensor:
        """max |λ(J)| for each sample by Arnoldi iteration: an estimate."""
        v = _random_like(self.y, generator)
        basis = [_scaled(v, 1 / norms(v))]
        h = torch.zeros(len(v[0]), steps + 1, steps, dtype=torch.double, device=v[0].device)
        for k in range(steps):
            w = self.jvp(basis[k])
            for i, b in enumerate(basis):
                h[:, i, k] = coef = _dots(w, b)
                w = [x - y for x, y in zip(w, _scaled(b, coef), strict=True)]
            h[:, k + 1, k] = size = norms(w)
            basis.append(_scaled(w, 1 / size.clamp_min(1e-30)))
        return torch.linalg.eigvals(h[:, :steps].cpu()).abs().amax(1)


def norms(z: Sequence[Tensor]) -> Tensor:
    """‖z‖ of each sample over all branches, (B,)."""
    return _dots(z, z).sqrt()


def _dots(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    return sum((a.double() * b.double()).flatten(1).sum(1) for a, b in zip(x, y, strict=True))


def _random_like(z: Sequence[Tensor], generator: torch.Generator | None) -> list[Tensor]:
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in z]


def _scaled(x: Sequence[Tensor], s: Tensor) -> list[Tensor]:
    return [(t * s[:, None, None, None]).to(t.dtype) for t in x]


@dataclass(frozen=True)
class Measurement:
    """How to measure: at z* and at ``random_points`` others, with ``power_steps`` on JᵀJ, from random vectors of ``seed``."""

    random_points: int = 2
    power_steps: int = 30
    seed: int = 0

    def run(
        self, model: nn.Module, x: Tensor | int, d: list[float], tol: float, progress: bool
    ) -> tuple[list[dict], int | None]:
        """(a row for each point, evaluations of f that Picard needed to the relative residual ``tol``), in test mode.

        x: images (B, C, H, W), over which the largest values are taken, or the side of two images of noise. d: weights of the
        norm of the proof. progress: show a bar.
        """
        modes, random = {m: m.training for m in model.modules()}, torch.Generator().manual_seed(self.seed)
        if not isinstance(x, Tensor):
            x = torch.randn(2, model.cfg.in_channels, x, x, generator=random)
        like = next(model.f.parameters())
        try:
            model.eval()
            with torch.no_grad():
                f, z0, _ = model.problem(x.to(like.device, like.dtype))
                picard = Picard(tol=tol, max_iter=200).solve(f, z0)
                star = Anderson(tol=1e-5, max_iter=100).solve(f, z0).z
            places = {"z*": star}
            for k in range(1, self.random_points + 1):  # entries as large as those of z*
                noise = zip(star, _random_like(star, random), strict=True)
                places[f"random {k}"] = [(float(t.std()) + 1e-12) * r for t, r in noise]
            rows = []
            bar = tqdm(places.items(), "measuring", unit="point", disable=None if progress else True, leave=False)
            for at, z in bar:
                plain, weighted = JacobianProbe(f, z), JacobianProbe(f, z, d)
                found = [p.norm(self.power_steps, random) for p in (plain, weighted)]
                found.append(plain.spectral_radius(generator=random))
                values = (float(value.max()) for value in found)
                rows.append({"at": at} | dict(zip(("norm", "norm_D", "spectral_radius"), values, strict=True)))
            return rows, picard.nfe if bool(picard.converged.all()) else None
        finally:
            for module, mode in modes.items():
                module.training = mode
