"""What can be measured of the Jacobian J = ∂f/∂z at a point: ‖J‖₂ from below, the spectral radius as an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lipmdeq.solvers import Anderson, Picard


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
            v = _scaled(v, 1 / norms(v).clamp_min(1e-30))
            w = self.jvp(v)
            best = torch.maximum(norms(w), torch.as_tensor(best))
            v = self.vjp(w)
        return best

    def spectral_radius(self, steps: int = 25, generator: torch.Generator | None = None) -> Tensor:
        """max |λ(J)| for each sample by Arnoldi iteration: an estimate."""
        v = _random_like(self.z, generator)
        basis = [_scaled(v, 1 / norms(v))]
        h = torch.zeros(len(v[0]), steps + 1, steps, dtype=torch.double, device=v[0].device)
        for k in range(steps):
            w = self.jvp(basis[k])
            for i, b in enumerate(basis):
                coef = _dots(w, b)
                h[:, i, k] = coef.double()
                w = [x - coef[:, None, None, None] * y for x, y in zip(w, b, strict=True)]
            size = norms(w)
            h[:, k + 1, k] = size.double()
            basis.append(_scaled(w, 1 / size.clamp_min(1e-30)))
        return torch.linalg.eigvals(h[:, :steps].cpu()).abs().amax(1)


def norms(z: Sequence[Tensor]) -> Tensor:
    """‖z‖ of each sample over all branches, (B,)."""
    return _dots(z, z).sqrt()


def _dots(x: Sequence[Tensor], y: Sequence[Tensor]) -> Tensor:
    return sum((a * b).flatten(1).sum(1) for a, b in zip(x, y, strict=True))


def _random_like(z: list[Tensor], generator) -> list[Tensor]:
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device) for t in z]


def _scaled(x: list[Tensor], s: Tensor) -> list[Tensor]:
    return [t * s[:, None, None, None] for t in x]


@dataclass(frozen=True)
class Measurement:
    """How to measure: at z* and at ``random_points`` others, with ``power_steps`` on JᵀJ, from random vectors of ``seed``."""

    random_points: int = 2
    power_steps: int = 30
    seed: int = 0

    def run(
        self, model: nn.Module, x: Tensor | int, d: list[float], tol: float, progress: bool
    ) -> tuple[list[dict], int | None]:
        """(a row for each point, evaluations of f that Picard needed to ``tol``), in test mode.

        Args:
            model: an :class:`lipmdeq.model.MDEQ`. x: images (B, C, H, W), over which the largest values are taken, or the side
            of two images of noise. d: weights of the norm of the proof. tol: relative residual. progress: show a bar.
        """
        was_training, random = model.training, torch.Generator().manual_seed(self.seed)
        model.eval()
        if not isinstance(x, Tensor):
            x = torch.randn(2, model.cfg.in_channels, x, x, generator=random)
        like = next(model.f.parameters())
        try:
            with torch.no_grad():
                f, z0, _ = model.problem(x.to(like.device, like.dtype))
                picard = Picard(tol=tol, max_iter=200).solve(f, z0)
                star = Anderson(tol=1e-5, max_iter=100).solve(f, z0).z
            places = self._places(star, random)
            bar = tqdm(places, desc="measuring", unit="point", disable=None if progress else True, leave=False)
            rows = [{"at": at, **self._row(f, z, d, random)} for at, z in bar]
            return rows, picard.nfe if bool(picard.converged.all()) else None
        finally:
            model.train(was_training)

    def _places(self, star: list[Tensor], random: torch.Generator) -> list[tuple[str, list[Tensor]]]:
        """z*, and points whose entries are as large as those of z*."""
        scale = [float(t.std()) + 1e-12 for t in star]
        points = (
            [s * r for s, r in zip(scale, _random_like(star, random), strict=True)] for _ in range(self.random_points)
        )
        return [("z*", star), *((f"random {k}", z) for k, z in enumerate(points, 1))]

    def _row(self, f, z: list[Tensor], d: list[float], random: torch.Generator) -> dict[str, float]:
        plain, weighted = JacobianProbe(f, z), JacobianProbe(f, z, d)
        return dict(
            norm=float(plain.norm(self.power_steps, random).max()),
            norm_D=float(weighted.norm(self.power_steps, random).max()),
            spectral_radius=float(plain.spectral_radius(generator=random).max()),
        )
