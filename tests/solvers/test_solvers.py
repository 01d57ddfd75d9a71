"""Fixed-point solvers: known solutions, the safeguard, stopping, failures, layouts."""

import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from lipmdeq import bounds
from lipmdeq.solvers import Anderson, Broyden, ConvergenceError, Picard, SolverWarning
from lipmdeq.solvers import steps as acceleration
from lipmdeq.solvers.layout import Layout
from lipmdeq.solvers.steps import anderson_weights

ALL = [Picard, Anderson, Broyden]
FAST = [Anderson, Broyden]
DOUBLE = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")


def with_norm(weight, norm):
    return weight * (norm / torch.linalg.matrix_norm(weight, 2, keepdim=True))


def affine(d, rate, *, b=4, seed=0, dtype=DOUBLE):
    """f(z) = A z + c per sample, ||A||_2 = rate, and its fixed point (b, d)."""
    g = torch.Generator().manual_seed(seed)
    a = with_norm(torch.randn(d, d, generator=g, dtype=DOUBLE), rate)
    c = torch.randn(b, d, generator=g, dtype=DOUBLE)
    star = torch.linalg.solve(torch.eye(d, dtype=DOUBLE) - a, c[..., None])[..., 0]
    a, c = a.to(dtype), c.to(dtype)
    return (lambda z: z @ a.T + c), torch.zeros(b, d, dtype=dtype), star


def counted(f):
    def call(z):
        call.n += 1
        return f(z)

    call.n = 0
    return call


# ---- problems with a known solution ------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ALL)
def test_dottie_number(solver):
    s = solver(tol=1e-12, max_iter=200).solve(torch.cos, torch.zeros(2, 1, dtype=DOUBLE))
    assert s.reason == "converged" and s.converged.all()
    torch.testing.assert_close(s.z, torch.full((2, 1), 0.7390851332151607, dtype=DOUBLE), atol=1e-11, rtol=0)


@pytest.mark.parametrize("solver", ALL)
def test_affine_with_200_unknowns(solver):
    f, z0, star = affine(200, 0.9)
    s = solver(tol=1e-10, max_iter=400).solve(f, z0)
    assert s.reason == "converged"
    # a posteriori: ||z - z*|| <= L ||f(z_in) - z_in|| / (1 - L) for z = f(z_in)
    bound = 1e-10 * s.z.norm(dim=1) * 0.9 / 0.1
    assert ((s.z - star).norm(dim=1) <= bound).all()


def test_rotation_by_90_degrees_needs_few_evaluations():
    turn = 0.99 * torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=DOUBLE)
    c = torch.tensor([[1.0, 2.0]], dtype=DOUBLE)
    f, z0 = (lambda z: z @ turn.T + c), torch.zeros(1, 2, dtype=DOUBLE)
    star = torch.linalg.solve(torch.eye(2, dtype=DOUBLE) - turn, c[0])
    picard = Picard(tol=1e-6, max_iter=3000).solve(f, z0)
    assert picard.nfe > 1000
    for solver in FAST:
        s = solver(tol=1e-6, max_iter=3000).solve(f, z0)
        assert s.nfe <= 12 and (s.z[0] - star).norm() <= 1e-6 * star.norm() / (1 - 0.99)


def test_geometric_decay_is_seen_exactly():
    c = torch.ones(1, 5, dtype=DOUBLE)
    s = Picard(tol=0, max_iter=10, relative=False).solve(lambda z: 0.5 * z + c, torch.zeros(1, 5, dtype=DOUBLE))
    expected = 5**0.5 * 0.5 ** torch.arange(10, dtype=DOUBLE)
    torch.testing.assert_close(s.residuals[:, 0], expected)
    assert Anderson(tol=1e-3).solve(lambda z: 0.5 * z + c, torch.zeros_like(c)).nfe == 3  # one mode: exact at once


@pytest.mark.parametrize("solver", ALL)
def test_stiff_and_badly_scaled(solver):
    rate = torch.linspace(0.01, 0.97, 40, dtype=DOUBLE)
    size = torch.logspace(-4, 4, 40, dtype=DOUBLE)
    f = lambda z: rate * z + size  # noqa: E731
    s = solver(tol=1e-8, max_iter=2000).solve(f, torch.zeros(3, 40, dtype=DOUBLE))
    star = size / (1 - rate)
    assert s.reason == "converged" and (s.z - star).norm() / star.norm() < 1e-5


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_result_does_not_depend_on_the_scale(solver, dtype):
    f, z0, _ = affine(30, 0.9, dtype=dtype)
    base = solver(tol=1e-4, max_iter=300).solve(f, z0)
    for scale in (1e-6, 1e-3, 2.0**-20, 2.0**20, 1e3, 1e6):
        s = solver(tol=1e-4, max_iter=300).solve(lambda z, t=scale: f(z / t) * t, z0 * scale)
        assert s.nfe == base.nfe and s.steps.equal(base.steps), scale
        torch.testing.assert_close(s.z / scale, base.z, rtol=1e-3, atol=1e-3)


# ---- Banach's theorem and the safeguard --------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0297, 0.3, 0.6814, 0.8611, 0.9255])
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_picard_needs_no_more_steps_than_the_bound(rate, tol):
    f, z0, _ = affine(20, rate)
    s = Picard(tol=tol, max_iter=400).solve(f, z0)
    assert s.reason == "converged" and s.nfe - 1 <= bounds.steps(rate, tol)


def contraction(rng, d, rate, kind):
    """A random rate-contraction of R^d in l2, as a function on (1, d) tensors."""
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape))  # noqa: E731
    w, v, c = with_norm(draw(d, d), rate), with_norm(draw(d, d), 1.0), draw(1, d) * 10 ** rng.uniform(-1, 1)
    if kind == "affine":
        return lambda z: z @ w.T + c
    if kind == "symmetric":
        s = with_norm(draw(d, d) + 0, 1)
        s = with_norm(s + s.T, rate)
        return lambda z: z @ s.T + c
    if kind == "rotation":
        q = rate * torch.linalg.qr(draw(d, d))[0]
        return lambda z: z @ q.T + c
    if kind == "scaled":
        diag, size = (rate * torch.from_numpy(rng.uniform(-1, 1, d)), 10 ** torch.from_numpy(rng.uniform(-3, 3, d)))
        return lambda z: diag * z + c * size
    if kind == "relu":
        return lambda z: (torch.relu(z @ v.T + c) @ w.T) + c
    if kind == "tanh":
        return lambda z: torch.tanh(z @ w.T + c)
    if kind == "clip":
        return lambda z: (z @ w.T + c).clamp(-1, 1)
    if kind == "sort":
        return lambda z: (z @ w.T + c).sort(dim=1).values
    omega = 10 ** rng.uniform(0, 1.5)
    return lambda z: torch.sin(omega * (z @ w.T) + c) / omega + c  # "sine": slope changes all the time


def cases(kinds, dims, number, seed):
    rng = np.random.default_rng(seed)
    for i in range(number):
        d, rate = int(rng.choice(dims)), float(rng.choice([0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99]))
        kind = kinds[i % len(kinds)]
        far = rng.random() < 0.3
        z0 = torch.from_numpy(rng.standard_normal((1, d)) * 10 ** rng.uniform(-1, 1) * far)
        yield f"{kind} d={d} rate={rate} #{i}", contraction(rng, d, rate, kind), z0, rate


SMOOTH = ["affine", "symmetric", "rotation", "scaled", "relu", "tanh"]
HOSTILE = [*SMOOTH, "clip", "sort", "sine"]


@pytest.mark.parametrize(("solver", "more"), [(Anderson, 1.0), (Broyden, 1.05)])
def test_never_more_than_one_evaluation_behind_picard(solver, more):
    """On affine maps and networks, against what Picard really needed; and much faster where Picard is slow."""
    ratios = []
    for i, (name, f, z0, _) in enumerate(cases(SMOOTH, [1, 2, 5, 10, 30, 60], 480, seed=1)):
        tol = (1e-3, 1e-6)[i % 5 == 0]
        p = Picard(tol=tol, max_iter=1500).solve(f, z0)
        s = solver(tol=tol, max_iter=1500).solve(f, z0)
        assert p.reason == "converged" and s.reason == "converged", name
        assert s.nfe <= more * p.nfe + 1, f"{name}: {s.nfe} against {p.nfe}"
        if p.nfe > 30:
            ratios.append(s.nfe / p.nfe)
    assert len(ratios) > 50 and np.mean(ratios) < 0.5


@pytest.mark.parametrize("solver", FAST)
def test_never_more_than_one_evaluation_behind_banach(solver):
    """The proved statement, on maps made to deceive: best residual after k + 1 evaluations <= L^(k-1) r_0."""
    for name, f, z0, rate in cases(HOSTILE, [1, 2, 3, 8, 20], 360, seed=2):
        r = solver(tol=0, max_iter=25, relative=False).solve(f, z0).residuals[:, 0]
        k = torch.arange(1, len(r))
        best = r.cummin(0).values[1:]
        floor = 1e-13 * (r[0] + z0.norm() + f(z0).norm())  # rounding
        assert (best <= rate ** (k - 1).double() * r[0] * (1 + 1e-9) + floor).all(), name


@pytest.mark.parametrize("solver", FAST)
def test_hostile_maps_converge_and_seldom_cost_more(solver):
    """Where f is flat near the next Picard point no rule can foresee it: rare and small, and still convergent."""
    late = 0
    for name, f, z0, _ in cases(HOSTILE, [1, 2, 3, 8], 270, seed=3):
        p = Picard(max_iter=800).solve(f, z0)
        s = solver(max_iter=1600).solve(f, z0)
        assert p.reason != "converged" or s.reason == "converged", name
        late += s.nfe > p.nfe + 1
    assert late <= 5


@pytest.mark.parametrize("solver", FAST)
def test_strong_contraction_costs_no_more_than_picard(solver):
    for name, f, z0, rate in cases(["affine", "relu", "tanh", "sine"], [10, 50], 200, seed=4):
        if rate <= 0.1:
            assert solver().solve(f, 0 * z0).nfe <= Picard().solve(f, 0 * z0).nfe <= 4, name


@pytest.mark.parametrize("solver", FAST)
def test_contraction_in_another_norm_converges(solver):
    """A = D B D^-1 with ||B|| = .9: in l2 the residual grows at first, so the safeguard's hypothesis fails."""
    for seed in range(20):
        f, z0, star = affine(12, 0.9, b=1, seed=seed)
        d = torch.logspace(-2, 2, 12, dtype=DOUBLE)
        g = lambda z, f=f, d=d: f(z / d) * d  # noqa: E731
        s = solver(tol=1e-9, max_iter=1000).solve(g, z0)
        assert s.reason == "converged" and (s.z / d - star).abs().max() < 1e-3


def test_a_map_that_grows_before_it_contracts_costs_little_more_than_picard():
    """A shift by one place, times 1.5: 20 steps of Picard end it, whose residuals grow a thousandfold before. A run of Picard
    steps goes on from the last point, though it is worse than the best one."""
    shift = torch.diag(torch.full((19,), 1.5, dtype=DOUBLE), -1)
    c = torch.eye(20, dtype=DOUBLE)[:1] + 0.1 * torch.randn(
        1, 20, generator=torch.Generator().manual_seed(0), dtype=DOUBLE
    )
    for f in (lambda z: z @ shift.T + c, lambda z: torch.relu(z @ shift.T) + c):
        picard, anderson = (s.solve(f, torch.zeros_like(c)) for s in (Picard(tol=1e-8), Anderson(tol=1e-8, m=2)))
        assert picard.reason == anderson.reason == "converged" and picard.residuals.max() > 0.1
        assert picard.nfe == 21 and anderson.nfe <= 1.5 * picard.nfe


def test_anderson_weights_minimise_and_respect_the_anchor():
    g = torch.randn(3, 4, 9, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).numpy()
    gram, anchor = g @ g.transpose(0, 2, 1), np.array([3, 1, 0])
    alpha, predicted = anderson_weights(gram, anchor, 1e-12, 1e-16)
    np.testing.assert_allclose(alpha.sum(1), 1)
    mixed = np.einsum("bi,bid->bd", alpha, g)
    np.testing.assert_allclose(np.linalg.norm(mixed, axis=1), predicted, rtol=1e-6)
    differences = g - g[:, :1]
    assert abs(np.einsum("bd,bid->bi", mixed, differences)).max() < 1e-6  # optimal on the affine hull
    alpha, predicted = anderson_weights(gram, anchor, 0.1, 1e-16)
    np.testing.assert_allclose(np.linalg.norm(np.einsum("bi,bid->bd", alpha, g), axis=1), predicted, rtol=1e-6)
    strong, _ = anderson_weights(gram, anchor, 1e9, 1e-16)
    np.testing.assert_allclose(strong, np.eye(4)[anchor], atol=1e-6)


# ---- Picard with a known constant --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.0297, 0.5, 0.8611])
@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_known_constant_gives_the_number_of_steps(rate, tol):
    f, z0, _ = affine(20, max(rate, 1e-9))
    f = counted(f)
    s = Picard(tol=tol, max_iter=300, L=rate).solve(f, z0)
    assert s.nfe == f.n == bounds.steps(rate, tol) + 1 and s.reason == "converged"  # one more, to see the residual
    assert s.residuals.shape == (1, 4) and (s.residuals <= tol).all()
    assert ((f(s.z) - s.z).norm(dim=1) <= (1 - rate) / max(rate, 1e-9) * s.error + 1e-9).all()


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("damping", [1.0, 0.6])
def test_known_constant_warm_start(relative, damping):
    f, z0, star = affine(20, 0.7)
    for start in (star + 1e-2, z0 + 5, z0):
        s = Picard(tol=1e-5, max_iter=300, L=0.7, relative=relative, damping=damping).solve(f, start)
        res = (f(s.z) - s.z).norm(dim=1) / (f(s.z).norm(dim=1) if relative else 1)
        assert s.reason == "converged" and (res <= 1e-5).all()


def test_known_constant_reports_cap_and_nan():
    f, z0, _ = affine(20, 0.9)
    s = Picard(tol=1e-6, max_iter=5, L=0.9).solve(f, z0)
    assert s.reason == "max_iter" and s.nfe == 5 and not s.converged.any()
    bad = lambda z: torch.where(torch.arange(4)[:, None] == 1, float("nan"), f(z))  # noqa: E731
    s = Picard(tol=1e-3, max_iter=300, L=0.9).solve(bad, z0)
    assert s.reason == "nan" and s.converged.tolist() == [True, False, True, True]


def test_damping():
    f, z0, star = affine(10, 0.5)
    s = Picard(tol=1e-8, damping=0.5, max_iter=200).solve(f, z0)
    assert s.reason == "converged" and torch.allclose(s.z, star, atol=1e-6)
    turn = lambda z: -1.5 * z + 1.0  # noqa: E731  no contraction, but the damped map is one
    s = Picard(tol=1e-8, damping=0.4, max_iter=200).solve(turn, torch.zeros(1, 1, dtype=DOUBLE))
    assert s.reason == "converged" and abs(s.z.item() - 0.4) < 1e-7


# ---- stopping and book-keeping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ALL)
def test_returns_the_converging_evaluation_and_counts_every_call(solver):
    f, z0, _ = affine(15, 0.8)
    seen = []

    def spy(z):
        seen.append((z.clone(), f(z)))
        return seen[-1][1]

    s = solver(tol=1e-4).solve(spy, z0)
    assert s.nfe == s.nfe_total == len(seen) == len(s.residuals) == s.steps.max()
    for i in range(4):
        k = int(s.steps[i]) - 1
        z, fz = seen[k][0][i], seen[k][1][i]
        assert s.z[i].equal(fz)
        assert abs(s.residuals[k, i] - (fz - z).norm() / fz.norm()) < 1e-12
        assert (s.residuals[:k, i] >= 1e-4).all() and (s.residuals[k:, i] == s.residuals[k, i]).all()


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("tol", [0, 0.0])
def test_zero_tolerance_runs_to_the_end(solver, tol):
    f, z0, _ = affine(6, 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s = solver(tol=tol, max_iter=40).solve(f, z0)  # exact long before
    assert s.nfe == 40 and s.residuals.shape == (40, 4) and s.reason == "max_iter"
    assert solver(tol=0, max_iter=7).solve(lambda z: 3 * z + 1, z0).nfe == 7


@pytest.mark.parametrize("solver", ALL)
def test_samples_do_not_see_each_other(solver):
    rates = torch.tensor([0.01, 0.3, 0.9, 0.98], dtype=DOUBLE)[:, None]
    slope = torch.rand(1, 25, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    c = torch.randn(4, 25, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))

    def problem(i):
        return lambda z: torch.relu(rates[i] * slope * z + c[i]) - 0.3 * rates[i] * z.flip(1)

    every = solver(tol=1e-5, max_iter=400).solve(problem(slice(None)), torch.zeros(4, 25, dtype=DOUBLE))
    assert every.reason == "converged" and len(set(every.steps.tolist())) > 2
    for i in range(4):
        one = solver(tol=1e-5, max_iter=400).solve(problem(slice(i, i + 1)), torch.zeros(1, 25, dtype=DOUBLE))
        assert one.nfe == every.steps[i]
        more = 100 if solver is Broyden else 1  # dozens of updates amplify the rounding of batched products
        torch.testing.assert_close(one.z[0], every.z[i], rtol=more * 1e-9, atol=1e-12)
        torch.testing.assert_close(one.residuals[:, 0], every.residuals[: one.nfe, i], rtol=more * 1e-6, atol=1e-12)


@pytest.mark.parametrize("solver", ALL)
def test_many_different_samples_are_each_alone(solver):
    """Sixty random problems in one batch, among them maps that do not contract: equal to sixty solves of one."""
    g = torch.Generator().manual_seed(5)
    rate = torch.linspace(0.02, 1.4, 60, dtype=DOUBLE)[:, None, None]
    w = rate * with_norm(torch.randn(60, 7, 7, generator=g, dtype=DOUBLE), 1.0)
    c = torch.randn(60, 7, generator=g, dtype=DOUBLE)

    def problem(i):
        return lambda z: torch.relu(torch.einsum("bij,bj->bi", w[i], z) + c[i]) - 0.1 * z

    options = solver(tol=1e-6, max_iter=40)
    every = options.solve(problem(slice(None)), torch.zeros(60, 7, dtype=DOUBLE))
    for i in range(60):
        one = options.solve(problem(slice(i, i + 1)), torch.zeros(1, 7, dtype=DOUBLE))
        assert one.nfe == every.steps[i] and one.reasons[0] == every.reasons[i]
        torch.testing.assert_close(one.z[0], every.z[i], rtol=1e-5, atol=1e-6)
    assert len(set(every.steps.tolist())) > 5


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("when", [0, 2])
def test_a_broken_sample_spoils_nothing(solver, value, when):
    f, z0, _ = affine(10, 0.6)
    clean = solver(tol=1e-6, max_iter=500).solve(f, z0)
    calls = [0]

    def broken(z):
        out = f(z)
        assert torch.isfinite(z[[0, 2, 3]]).all()
        if calls[0] >= when:
            out[1] = value
        calls[0] += 1
        return out

    s = solver(tol=1e-6, max_iter=500).solve(broken, z0)
    good = [0, 2, 3]
    assert s.nfe == clean.steps[good].max() < 100  # the broken sample does not run to the cap
    assert s.reason == "nan" and s.reasons[1] == "nan" and s.converged.tolist() == [True, False, True, True]
    torch.testing.assert_close(s.z[good], clean.z[good], rtol=1e-12, atol=1e-12)
    assert torch.isfinite(s.z[1]).all() and s.steps[1] == when + 1
    assert s.z[1].equal(z0[1]) if when == 0 else not s.z[1].equal(z0[1])


@pytest.mark.parametrize("solver", ALL)
def test_all_samples_broken_ends_at_once(solver):
    s = solver(max_iter=100).solve(lambda z: z * float("nan"), torch.ones(3, 2))
    assert s.nfe == 1 and s.reason == "nan" and s.z.equal(torch.ones(3, 2))


def test_divergence_is_reported_and_the_best_iterate_kept():
    slope = torch.tensor([[0.5], [4.0]], dtype=DOUBLE)
    s = Picard(tol=1e-8, max_iter=500).solve(lambda z: slope * z + 1, torch.zeros(2, 1, dtype=DOUBLE))
    assert s.reasons == ["converged", "diverged"] and s.reason == "diverged" and s.nfe < 40
    assert torch.isfinite(s.z).all()


def test_best_iterate_is_kept_when_the_residual_grows_again():
    shift = iter([1.0, 0.2, 0.01, 0.5, 2.0, 3.0])
    out = []

    def wander(z):
        out.append(z + next(shift))
        return out[-1]

    s = Picard(tol=1e-9, max_iter=6, relative=False).solve(wander, torch.zeros(2, 3, dtype=DOUBLE))
    assert s.reason == "max_iter" and s.z.equal(out[2]) and s.steps.tolist() == [6, 6]
    shift, out = iter([1.0, 0.2, 0.01, 0.5, 2.0, 3.0]), []
    s = Picard(tol=1e-9, max_iter=6, relative=False).solve(
        wander, torch.zeros(2, 3, dtype=DOUBLE), final=wander, expect=6
    )
    assert s.z.equal(out[2]) and not s.final_used  # the sixth, which recorded a graph, is not the result


def test_worst_and_mean_stop():
    rate = torch.tensor([[0.1], [0.1], [0.1], [0.9]], dtype=DOUBLE)
    f, z0 = (lambda z: rate * z + 1), torch.zeros(4, 1, dtype=DOUBLE)
    worst, mean = (Picard(tol=1e-3, max_iter=200, stop=stop).solve(f, z0) for stop in ("worst", "mean"))
    assert worst.converged.all() and worst.residuals[-1].max() < 1e-3
    assert mean.nfe < worst.nfe and mean.residuals[-1].mean() < 1e-3 < mean.residuals[-1].max()
    assert mean.reason == "converged" and mean.converged.tolist() == [True, True, True, False]
    late = Picard(tol=1e-3, max_iter=200, stop="mean", min_iter=mean.nfe + 3).solve(f, z0)
    assert late.nfe == mean.nfe + 3 and late.reason == "converged"


def test_absolute_residual():
    f, z0, _ = affine(10, 0.7)
    s = Anderson(tol=1e-6, relative=False).solve(f, z0)
    torch.testing.assert_close(s.residuals[0], (f(z0) - z0).norm(dim=1))
    assert (s.residuals[-1] < 1e-6).all()


def test_zero_is_a_fixed_point():
    for solver in ALL:
        s = solver(tol=1e-6).solve(lambda z: 0.5 * z, torch.zeros(2, 3))
        assert s.nfe == 1 and s.converged.all() and (s.residuals == 0).all()


def test_not_converged_warns_or_raises():
    f, z0, _ = affine(10, 0.99)
    with pytest.warns(SolverWarning, match="max_iter"):
        s = Anderson(tol=1e-9, max_iter=3).solve(f, z0)
    assert s.nfe == 3 and not s.converged.any() and s.reason == "max_iter"
    with pytest.raises(ConvergenceError, match="0 of 4 samples") as e:
        Anderson(tol=1e-9, max_iter=3).solve(f, z0, throw=True)
    assert e.value.solution.nfe == 3


def test_warns_once_per_process():
    code = "import torch\nfrom lipmdeq import Picard\nfor _ in range(5): Picard(max_iter=2).solve(torch.cos, torch.zeros(1, 1))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("SolverWarning: a solve") == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Picard(tol=-1), r"tol = -1: must be in \[0, inf\)"),
        (lambda: Anderson(max_iter=0), r"max_iter = 0: must be a whole number >= 1"),
        (lambda: Anderson(m=1), r"m = 1: must be a whole number >= 2"),
        (lambda: Anderson(ridge=0), r"ridge = 0: must be in \(0, inf\)"),
        (lambda: Anderson(beta=2), r"beta = 2: must be in \(0, 1\]"),
        (lambda: Picard(damping=0), r"damping = 0: must be in \(0, 1\]"),
        (lambda: Picard(L=1), r"L = 1: must be in \[0, 1\)"),
        (lambda: Picard(L="a"), r"L = 'a': must be in \[0, 1\)"),
        (lambda: Picard(damping="1"), r"damping = '1': must be in \(0, 1\]"),
        (lambda: Anderson(tol=True), r"tol = True: must be in \[0, inf\)"),
        (lambda: Anderson(tol=float("inf")), r"tol = inf: must be in \[0, inf\)"),
        (lambda: Anderson(relative="no"), r"relative = 'no': must be True or False"),
        (lambda: Picard().solve(torch.cos, torch.zeros(2, 3, dtype=torch.long)), r"dtype of z0 = torch.int64"),
        (lambda: Broyden(m=0.5), r"m = 0.5: must be a whole number >= 1"),
        (lambda: Broyden(stop="best"), r"stop = 'best': must be one of worst, mean"),
        (lambda: Picard().solve(lambda z: z[:, :1], torch.zeros(2, 3)), r"shapes of f\(z\) = "),
        (lambda: Picard().solve(torch.cos, torch.tensor(0.0)), r"batch sizes of z0 = "),
        (lambda: Picard().solve(torch.cos, [torch.zeros(2, 1), torch.zeros(3, 1)]), r"batch sizes of z0 = \[2, 3\]"),
    ],
)
def test_bad_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_unknown_keywords_raise():
    for solver in ALL:
        with pytest.raises(TypeError):
            solver(tolerance=1e-3)


# ---- structures, memory order, precision -------------------------------------------------------------------------


def conv_map(channels_last):
    g = torch.Generator().manual_seed(0)
    fmt = torch.channels_last if channels_last else torch.contiguous_format
    w = torch.randn(8, 8, 3, 3, generator=g) * 0.06
    c = torch.randn(2, 8, 6, 6, generator=g).to(memory_format=fmt)
    w = w.to(memory_format=fmt)
    return lambda z: torch.relu(torch.conv2d(z, w, padding=1) + c), torch.zeros(2, 8, 6, 6).to(memory_format=fmt)


@pytest.mark.parametrize("solver", ALL)
def test_channels_last_in_channels_last_out(solver):
    results = []
    for last in (False, True):
        f, z0 = conv_map(last)
        layouts = []

        def spy(z, f=f, layouts=layouts):
            layouts.append(z.is_contiguous(memory_format=torch.channels_last))
            return f(z)

        results.append(solver(tol=1e-5).solve(spy, z0))
        assert set(layouts) == {last} and len(layouts) >= 4
    assert results[0].nfe == results[1].nfe
    torch.testing.assert_close(results[0].z, results[1].z, rtol=1e-4, atol=1e-5)


def test_layout_round_trip_and_single_branch_is_a_view():
    branches = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 2),
        torch.randn(2, 7),
        torch.randn(2),
    ]
    layout = Layout(branches)
    flat = layout.pack(branches, layout.empty())
    assert flat.shape == (2, 60 + 12 + 7 + 1)
    for a, b in zip(branches, layout.unpack(flat), strict=True):
        assert a.equal(b) and a.stride() == b.stride()
    one = Layout(branches[:1])
    flat = one.pack(branches[:1], one.empty())
    assert one.unpack(flat)[0].data_ptr() == flat.data_ptr()


@pytest.mark.parametrize("solver", ALL)
def test_list_of_branches_is_the_flat_problem(solver):
    f, z0, _ = affine(30, 0.8, b=3)
    flat = solver(tol=1e-6).solve(f, z0)

    def split(t):
        return [t[:, :12].reshape(3, 3, 2, 2), t[:, 12:]]

    def branches(z):
        assert isinstance(z, list) and z[0].shape == (3, 3, 2, 2)
        return split(f(torch.cat([z[0].flatten(1), z[1]], 1)))

    s = solver(tol=1e-6).solve(branches, split(z0))
    assert isinstance(s.z, list) and s.nfe == flat.nfe
    for a, b in zip(s.z, split(flat.z), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("solver", ALL)
def test_bfloat16_states_with_float32_residuals(solver):
    f, z0, star = affine(40, 0.5, dtype=torch.bfloat16)
    s = solver(tol=2e-2).solve(f, z0)
    assert s.z.dtype == torch.bfloat16 and s.reason == "converged"
    assert (s.z.double() - star).norm() / star.norm() < 0.05


def watched(f):
    """f that keeps the true relative residual (B,) of every point that it was given, at any scale."""

    def call(z):
        fz = f(z)
        wide = torch.stack([z.double(), fz.double()])
        wide = wide / wide.abs().amax((0, 2), keepdim=True).clamp_min(1e-320)[..., :1]
        call.last = float(fz.abs().max())
        call.seen.append(((wide[1] - wide[0]).norm(dim=1) / wide[1].norm(dim=1)).nan_to_num(0.0))  # f(0) = 0
        return fz

    call.seen = []
    return call


def reported_truly(solution, seen):
    """What was reported while a sample ran is what it really was."""
    for k, true in enumerate(seen):
        running = solution.steps > k
        reported = solution.residuals[k][running].clamp_max(1e6)
        torch.testing.assert_close(reported, true[running].clamp_max(1e6), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", [*ALL, partial(Picard, damping=0.7)])
def test_residuals_are_those_of_the_rounded_point(solver, dtype):
    """f sees points in its own dtype: what is reported is ||f(z)-z|| / ||f(z)|| at the point that f was given."""
    g = torch.Generator().manual_seed(5)
    for _ in range(5):
        a = torch.randn(8, 30, 30, generator=g)
        a *= torch.rand(8, 1, 1, generator=g) / torch.linalg.matrix_norm(a, 2)[:, None, None]
        b = torch.randn(8, 30, generator=g)
        f = watched(lambda z, a=a, b=b: ((a @ z.float()[..., None])[..., 0] + b).to(dtype))
        solution = solver(tol=2e-3, max_iter=40).solve(f, torch.zeros(8, 30, dtype=dtype))
        assert solution.converged.any()
        reported_truly(solution, f.seen)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("solver", ALL)
def test_states_that_vanish_have_not_converged(solver, dtype):
    """f(z) = Az: the relative residual is the same at all scales, also where squares of the state are no numbers."""
    g = torch.Generator().manual_seed(6)
    a = 0.7 * torch.linalg.qr(torch.randn(20, 20, generator=g, dtype=DOUBLE)).Q
    small, tiny = (1e-145, 1e-162) if dtype == DOUBLE else (1e-8, 1e-22)
    z0 = (small * torch.randn(3, 20, generator=g, dtype=DOUBLE)).to(dtype)
    f = watched(lambda z: z @ a.T.to(dtype))
    solution = solver(tol=1e-3, max_iter=120).solve(f, z0)
    reported_truly(solution, f.seen)
    if solver is Picard:
        assert not solution.converged.any() and 0 < f.last < tiny


@pytest.mark.parametrize("beta", [1.0, 0.7])
@pytest.mark.parametrize("m", [2, 3, 8])
def test_anderson_options(m, beta):
    f, z0, star = affine(30, 0.9)
    s = Anderson(tol=1e-8, m=m, beta=beta, max_iter=400).solve(f, z0)
    assert s.reason == "converged" and torch.allclose(s.z, star, atol=1e-5)


def test_mixing_is_of_accelerated_samples_alone():
    """Beside samples that are accelerated others take Picard steps, which a mixing would spoil: each goes as it does alone."""
    rate, c = torch.linspace(0.05, 0.99, 8, dtype=DOUBLE)[:, None], torch.linspace(-1, 2, 72, dtype=DOUBLE).view(8, 9)
    solver, f = (
        Anderson(tol=1e-8, beta=0.4, max_iter=300),
        lambda z, rate, c: rate * torch.sin(3 * z).roll(1, 1) / 3 + c,
    )
    whole = solver.solve(lambda z: f(z, rate, c), torch.zeros_like(c))
    for i in range(8):
        alone = solver.solve(lambda z, i=i: f(z, rate[i : i + 1], c[i : i + 1]), torch.zeros(1, 9, dtype=DOUBLE))
        assert alone.reason == "converged" and alone.nfe == whole.steps[i]
        torch.testing.assert_close(whole.z[i], alone.z[0], rtol=1e-9, atol=1e-12)


def test_broyden_memory_may_be_short():
    f, z0, star = affine(30, 0.9)
    for m in (1, 3, 30):
        s = Broyden(tol=1e-8, m=m, max_iter=400).solve(f, z0)
        assert s.reason == "converged" and torch.allclose(s.z, star, atol=1e-5)


@pytest.mark.parametrize("solver", ALL)
def test_final_evaluation_reproduces_the_result(solver):
    """`final` sees every sample at the input of its own best evaluation, also those that stopped earlier."""
    rate = torch.tensor([[0.05], [0.4], [0.8]], dtype=DOUBLE)
    c = torch.randn(3, 9, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    f, z0 = (lambda z: rate * torch.tanh(z).roll(1, 1) + c), torch.zeros(3, 9, dtype=DOUBLE)
    for cap in (200, 4):
        last = []
        s = solver(tol=1e-6, max_iter=cap).solve(f, z0, final=lambda z, last=last: last.append(f(z)) or last[-1])
        plain = solver(tol=1e-6, max_iter=cap).solve(f, z0)
        assert s.nfe == plain.nfe and s.z.equal(plain.z) and f(s.z_in).equal(s.z)
        assert last[-1].equal(s.z) if s.final_used else True
    assert cap == 4 and solver(tol=1e-3).solve(f, z0, final=f).final_used


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_known_constant_a_broken_sample_spoils_no_other(relative, start):
    f, z0, _ = affine(20, 0.5)
    bad = lambda z: torch.where(torch.arange(4)[:, None] == 2, float("nan"), f(z))  # noqa: E731
    solver = Picard(tol=1e-6, L=0.5, relative=relative, max_iter=80)
    good, broken = solver.solve(f, z0 + start), solver.solve(bad, z0 + start)
    others = [0, 1, 3]
    assert broken.converged.tolist() == [True, True, False, True] and broken.reasons[2] == "nan"
    assert torch.equal(broken.z[others], good.z[others]) and torch.equal(broken.steps[others], good.steps[others])
    assert torch.isfinite(broken.z).all()  # the broken one returns to a point that is known


@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-15, 1e15, 1e22, 1e30])
def test_scale_of_single_precision_states(solver, scale):
    """Squares of such numbers leave the range of float32; residuals must not."""
    torch.manual_seed(0)
    A = torch.randn(3, 6, 6)
    A = 0.5 * A / torch.linalg.matrix_norm(A, 2)[:, None, None]
    b = scale * torch.randn(3, 6)
    f = lambda z: torch.einsum("bij,bj->bi", A, z) + b  # noqa: E731
    s = solver(tol=1e-5, max_iter=60).solve(f, torch.zeros(3, 6))
    assert s.reason == "converged"
    z = s.z.double()
    true = (torch.einsum("bij,bj->bi", A.double(), z) + b.double() - z).norm(dim=1) / z.norm(dim=1)
    assert (true < 2e-5).all()


def test_solvers_remember_nothing():
    """What was learnt comes out as `expect`, and goes into the next solve; it decides which evaluation is `final`."""
    solver = Anderson(tol=1e-6)
    f, z0, _ = affine(5, 0.5)
    first = solver.solve(f, z0, final=f)
    assert first.expect == first.nfe and solver == Anderson(tol=1e-6) and vars(solver) == vars(Anderson(tol=1e-6))
    for k in range(1, first.nfe + 1):
        calls = []
        s = solver.solve(f, z0, final=lambda z, calls=calls: calls.append(1) or f(z), expect=k)
        assert calls and s.z.equal(first.z) and (s.final_used or k < first.nfe)
    assert Anderson(tol=1e-9, max_iter=2).solve(f, z0).expect is None


def test_known_constant_at_the_fixed_point_and_with_an_empty_branch():
    """A sample that starts at its fixed point 0 is done (a zero cotangent is one); a branch may have no elements."""
    b = torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    start = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    s = Picard(L=0.5).solve(lambda z: 0.5 * z + b, start)
    assert s.converged.all() and s.residuals[-1][0] == 0 and s.nfe < 13
    s = Picard(L=0.5).solve(lambda z: [0.5 * z[0] + 1, z[1]], [torch.zeros(2, 3), torch.zeros(2, 0)])
    assert s.converged.all() and s.nfe == 12


def test_inner_products_are_those_of_the_history(monkeypatch):
    """Those that an accelerated step uses, also of several Picard steps before, in any slot."""
    steps, pending = [], []
    weights, made = acceleration.anderson_weights, acceleration.AndersonStep.__init__

    def spy(gram, anchor, ridge, eps):
        step = steps[-1]
        n = gram.shape[1]
        gs = step.history[:n, 1].to(torch.float64).transpose(0, 1)
        np.testing.assert_allclose(gram, (gs @ gs.mT).numpy(), rtol=1e-6, atol=1e-12)
        pending.append(step.k)
        return weights(gram, anchor, ridge, eps)

    def init(self, *args):
        made(self, *args)
        steps.append(self)

    monkeypatch.setattr(acceleration, "anderson_weights", spy)
    monkeypatch.setattr(acceleration.AndersonStep, "__init__", init)
    torch.manual_seed(0)
    A = torch.randn(8, 8, dtype=torch.float64)
    A *= 0.95 / torch.linalg.matrix_norm(A, 2)
    b = torch.randn(1, 8, dtype=torch.float64)
    s = Anderson(tol=1e-12, max_iter=60, m=3).solve(lambda z: torch.sin(z @ A.T) + b, torch.zeros_like(b))
    assert s.reason == "converged"
    waits = np.diff([-1, *pending])
    assert len(pending) > 3 and waits.max() > 1, "no Picard step before an accelerated one: the test tests nothing"


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_broyden_needs_no_more_evaluations_than_torchdeq(tol):
    """Mean over seeded maps, all evaluations counted on both sides; without the safeguard's guarantee theirs may also fail."""
    peer = pytest.importorskip("torchdeq.solver").broyden_solver
    z0 = torch.zeros(8, 100, dtype=DOUBLE)
    for rate in (0.5, 0.9, 0.95, 0.99):
        ours, theirs = [], []
        for kind in ("affine", "symmetric", "tanh", "relu"):
            for seed in range(3):
                f = contraction(np.random.default_rng(seed), 100, rate, kind)
                g = counted(lambda z, f=f: f(z) * torch.linspace(0.5, 1, 8, dtype=DOUBLE)[:, None])
                peer(g, z0, max_iter=200, tol=tol, stop_mode="rel")
                theirs.append(g.n)
                ours.append(Broyden(tol=tol, max_iter=200).solve(g, z0).nfe)
        assert np.mean(ours) <= np.mean(theirs), (rate, ours, theirs)
