"""Picard with a fixed number of steps, or one that is foreseen: counts, error bounds, gradients, what the host reads."""

import numpy as np
import pytest
import torch
from test_solvers import DOUBLE, affine, counted

from lipmdeq import bounds
from lipmdeq.solvers import Implicit, Memory, Picard, SolverWarning, deq, fixed
from lipmdeq.solvers.layout import norms

pytestmark = pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_fixed_steps_are_picard_steps(k, damping):
    f, z0, _ = affine(20, 0.7)
    g = counted(f)
    plain = Picard(tol=0, max_iter=k, damping=damping).solve(f, z0)
    s = Picard(tol=1e-3, max_iter=3, damping=damping, steps=k).solve(g, z0)
    assert g.n == s.nfe == k and s.steps.tolist() == [k] * 4 and s.z.equal(plain.z) and f(s.z_in).equal(s.z)
    torch.testing.assert_close(s.residuals, plain.residuals[-1:])
    assert s.converged.equal(s.residuals[0] < 1e-3) and s.error is None


@pytest.mark.parametrize("k", [1, 4, 30])
def test_the_error_is_proved_by_a_known_constant(k):
    f, z0, star = affine(20, 0.8)
    s = Picard(steps=k, L=0.8).solve(f, z0)
    true = (s.z - star).norm(dim=1)
    assert (true <= s.error * (1 + 1e-9)).all()
    r = float((f(s.z_in) - s.z_in)[0].norm())
    assert float(s.error[0]) == pytest.approx(0.8 * bounds.a_posteriori_error(0.8, r))


def test_the_error_bound_is_reached():
    """f(z) = 0.8 z + 1 contracts by 0.8 everywhere, so every inequality of the proof is an equation."""
    s = Picard(steps=5, L=0.8).solve(lambda z: 0.8 * z + 1, torch.zeros(2, 1, dtype=DOUBLE))
    torch.testing.assert_close((5 - s.z[:, 0]).abs(), s.error)


def test_auto_reads_seldom_and_learns(monkeypatch):
    f, z0, star = affine(30, 0.85)
    looks = []
    monkeypatch.setattr(fixed, "norms", lambda x: looks.append(1) or norms(x))
    monkeypatch.setattr(fixed, "BLOCK", 20)
    solver = Picard(tol=1e-6, max_iter=200, steps="auto")
    plain = Picard(tol=1e-6, max_iter=200).solve(f, z0)
    s = solver.solve(f, z0)
    assert s.converged.all() and (s.z - star).norm() < 1e-4 * star.norm()
    assert len(looks) <= 1 + -(-s.nfe // 5) and plain.nfe <= s.nfe <= plain.nfe + 20
    looks.clear()
    again = solver.solve(f, z0, expect=s.expect)
    assert again.converged.all() and len(looks) <= 2 and plain.nfe <= again.nfe <= plain.nfe + 2
    assert solver.solve(f, z0, expect=1).converged.all()  # a wrong guess costs looks, not accuracy


def test_auto_goes_on_until_every_sample_has_converged():
    """Wherever the residuals stand when the host looks: also a little above the tolerance."""
    f, z0, _ = affine(10, 0.85)
    for tol in np.logspace(-1, -8, 40):
        s = Picard(tol=float(tol), max_iter=300, steps="auto").solve(f, z0)
        assert s.converged.all() and float(s.residuals[-1].max()) < tol


def test_auto_takes_the_count_from_a_known_constant():
    f, z0, _ = affine(30, 0.7)
    s = Picard(tol=1e-4, steps="auto", L=0.7).solve(f, z0)
    assert s.nfe == bounds.steps(0.7, 1e-4) + 1 and s.converged.all() and s.expect <= s.nfe


def test_auto_ends_at_the_cap_and_warns():
    f, z0, _ = affine(10, 0.99)
    with pytest.warns(SolverWarning, match="max_iter"):
        s = Picard(tol=1e-9, max_iter=17, steps="auto").solve(f, z0)
    assert s.nfe == 17 and s.reason == "max_iter" and s.expect is None


@pytest.mark.parametrize("steps", [6, "auto"])
def test_a_broken_sample_spoils_no_other(steps):
    f, z0, _ = affine(10, 0.3)
    bad = lambda z: torch.where(torch.arange(4)[:, None] == 2, float("nan"), f(z))  # noqa: E731
    good, broken = (Picard(steps=steps, L=0.3).solve(h, z0) for h in (f, bad))
    others = [0, 1, 3]
    assert broken.reasons[2] == "nan" and broken.z[others].equal(good.z[others]) and broken.z[2].equal(z0[2])
    assert broken.error[others].equal(good.error[others]) and broken.error[2].isnan()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_and_precisions(scale, dtype):
    f, z0, _ = affine(10, 0.3, dtype=torch.float32)
    s = Picard(steps=9, tol=1e-2).solve(lambda z: (f(z.float() / scale) * scale).to(dtype), z0.to(dtype))
    assert s.converged.all() and s.z.dtype == dtype and (s.residuals > 0).all() or dtype == torch.bfloat16


@pytest.mark.parametrize("steps", [25, "auto"])
@pytest.mark.parametrize("told", [True, False])
def test_gradients(steps, told):
    """The graph is recorded by the last evaluation, so that no call is lost; the gradient is the exact one."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(6, 6, generator=g, dtype=DOUBLE)
    w = (0.4 * w / torch.linalg.matrix_norm(w, 2)).requires_grad_()
    x = torch.randn(3, 6, generator=g, dtype=DOUBLE)
    solver, memory = Picard(tol=1e-9, steps=steps), Memory()
    for _ in range(3):
        f = counted(lambda z: z @ w.T + x)
        z, s = deq(
            f, torch.zeros_like(x), solver=solver, adjoint=Implicit(solver), inputs=[w] if told else (), memory=memory
        )
        (got,) = torch.autograd.grad(z.sum(), w)
    assert f.n == s.nfe == s.nfe_total and s.final_used and s.backward.final_used is told
    exact = torch.linalg.solve(torch.eye(6, dtype=DOUBLE) - w, x.T).T
    (want,) = torch.autograd.grad(exact.sum(), w)
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(steps=0), "steps = 0: must be a whole number >= 1"),
        (dict(steps="all"), "steps = 'all': must be a whole number >= 1, 'auto' or None"),
        (dict(steps="auto", tol=0), "tol = 0: must be > 0"),
    ],
)
def test_bad_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        Picard(**options)


def test_samples_of_a_batch_share_the_count_only():
    """With a number, a sample does not see its neighbours."""
    f, z0, _ = affine(10, 0.5)
    every = Picard(steps=8).solve(f, z0)
    c = f(z0)
    a = np.stack([(f(torch.eye(10, dtype=DOUBLE)[[j] * 4]) - c)[0].numpy() for j in range(10)])
    one = Picard(steps=8).solve(lambda z: z @ torch.from_numpy(a) + c[1:2], z0[1:2])
    torch.testing.assert_close(one.z[0], every.z[1])
