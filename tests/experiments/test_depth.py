"""The depth report: says of a feed-forward model that it is one, and of a model that iterates what its iteration is worth."""

import json
import math
from pathlib import Path

import pytest
import torch

from lipmdeq.__main__ import main
from lipmdeq.certificate import certify
from lipmdeq.experiments import depth_report
from lipmdeq.experiments.checkpoints import load_model
from lipmdeq.experiments.depth_report import FEED_FORWARD, STEPS, Depth, depth
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.training import test_images as images_of
from lipmdeq.jacobian import JacobianProbe
from lipmdeq.model import build
from lipmdeq.solvers import Anderson, SolverWarning

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "results/digits/lipschitz/seed0.ckpt"


@pytest.fixture(scope="module")
def digits():
    return images_of(RunConfig(), 120)


def spread(net, scale=1.0):
    """Weights large enough that z* matters: at the start all states are tiny."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(scale * torch.randn_like(p))
        net.constrain()
    return net.double().eval()


def test_old_weights_are_feed_forward(digits):
    report = depth(load_model(DIGITS), *digits)
    assert report.feed_forward and report.verdict.startswith("is feed-forward: f(0) gives")
    assert report.same_label[0] > 0.99 and report.accuracy_star > 0.9
    assert report.proved < 0.3 and report.norm_D_worst <= report.proved


def test_numbers_are_those_of_the_plain_definitions(digits):
    """Every number against a few lines that only use problem, head and a dense Jacobian."""
    torch.manual_seed(0)
    net = spread(build("digits", block="potential", n=2, stem_channels=4), 0.3)
    x, y = digits[0][:9].double(), digits[1][:9]
    report = depth(net, x, y, batch=4)
    f, z0, _ = net.problem(x)
    with torch.no_grad():
        star = z0
        for _ in range(400):
            star = f(star)
        z, label = z0, net.head(star).argmax(1)
        for k in range(1, STEPS[-1] + 1):
            z = f(z)
            if k in STEPS:
                i, at = STEPS.index(k), net.head(z).argmax(1)
                assert report.accuracy[i] == pytest.approx(float((at == y).double().mean()))
                assert report.same_label[i] == pytest.approx(float((at == label).double().mean()))
                gap = torch.cat([(a - b).flatten(1) for a, b in zip(z, star, strict=True)], 1).norm(dim=1)
                size = torch.cat([t.flatten(1) for t in star], 1).norm(dim=1)
                assert report.distance[i] == pytest.approx(float((gap / size).median()), rel=1e-2, abs=1e-4)
        on = [h for h in net.f.hidden(star, net.injected(x))]
        switching = [(h.any(0) & ~h.all(0)).flatten() for h in on]
        assert report.switching == pytest.approx(float(torch.cat(switching).double().mean()), abs=1e-3)
    assert report.accuracy_star == pytest.approx(float((label == y).double().mean()))
    one = [t[:1] for t in star]
    f1, _, _ = net.problem(x[:1])
    flat = torch.cat([t.flatten() for t in one])
    shapes = [t.shape for t in one]

    def as_vector(v):
        parts = torch.split(v, [math.prod(s) for s in shapes])
        return torch.cat([t.flatten() for t in f1([p.view(s) for p, s in zip(parts, shapes, strict=True)])])

    jac = torch.autograd.functional.jacobian(as_vector, flat)
    nfe = [net.solver.solve(*net.problem(part)[:2]).nfe for part in x.split(4)]  # of 4, 4 and 1 images
    assert report.evaluations == pytest.approx((4 * nfe[0] + 4 * nfe[1] + nfe[2]) / 9) and report.converged == 1.0
    alone = depth(net, x[:1], y[:1])
    norm = float(torch.linalg.matrix_norm(jac, 2))
    assert 0.97 * norm <= alone.norm_worst <= norm * (1 + 1e-9)  # a lower bound
    radius = float(torch.linalg.eigvals(jac).abs().max())  # an estimate: a pair of equal size may still hide a part
    assert alone.radius_worst == pytest.approx(radius, rel=5e-2)
    probe = JacobianProbe(f1, one)  # with steps enough both are exact
    assert float(probe.norm(1000)) == pytest.approx(norm, rel=1e-4)
    assert float(probe.spectral_radius(150)) == pytest.approx(radius, rel=1e-4)
    assert alone.proved == pytest.approx(certify(net, measure=False, progress=False).test["perron"])


def test_distance_obeys_the_bound(digits):
    """‖z* − f(0)‖ ≤ L‖z*‖ in the norm of the proof; here D is close to the identity."""
    net = spread(build("digits", block="potential", n=2, tau=0.3))
    report = depth(net, digits[0][:20].double(), digits[1][:20])
    assert 0 < report.distance[0] <= 0.3 * 1.01
    assert report.tightness <= 1


def test_a_report_says_what_its_own_solve_missed(digits):
    """``converged`` is of z* in this report, ``evaluations`` of the model's solver, the proof of test mode."""
    net = load_model(DIGITS)
    x, y = digits[0][:8], digits[1][:8]
    with pytest.warns(SolverWarning):
        capped = depth(net, x, y, solver=Anderson(tol=1e-12, max_iter=2))
    report, proof = depth(net, x, y), certify(net, measure=False, progress=False)
    assert capped.converged == 0.0 < report.converged == 1.0 and capped.evaluations == report.evaluations > 2
    assert report.proved == proof.test["perron"] < proof.train["perron"]
    assert depth(net, x, y, certificate=proof).proved == report.proved


def test_worst_and_median_are_over_images_and_the_weighted_norm_is_that_of_the_proof(digits, monkeypatch):
    net, given = load_model(DIGITS), []

    class Probe:
        def __init__(self, f, z, weights=None):
            given.append(weights)
            self.more = 0.0 if weights is None else 100.0

        def norm(self, *how):
            return torch.tensor([1.0, 9.0, 2.0]) + self.more

        def spectral_radius(self, **how):
            return torch.tensor([0.5, 0.1, 0.2])

    monkeypatch.setattr(depth_report, "JacobianProbe", Probe)
    proof = certify(net, measure=False, progress=False)
    report = depth(net, digits[0][:3], digits[1][:3], certificate=proof)
    assert (report.norm_median, report.norm_worst, report.norm_D_worst) == (2.0, 9.0, 109.0)
    assert (report.radius_median, report.radius_worst) == (pytest.approx(0.2), 0.5)
    assert given == [None, proof.test["D"]]


def test_what_differs_between_images(digits):
    """‖z* − mean‖/‖z*‖: nothing for equal images; little where a constant is most of the state, as a large bias makes it."""
    x, y = digits
    net = load_model(DIGITS)
    plain = depth(net, x, y).variation
    assert depth(net, x[:1].expand(8, -1, -1, -1), y[:1].expand(8)).variation < 1e-5 < 0.1 < plain < 1
    with torch.no_grad():
        star = [t.flatten(1).double() for t in net.eval().equilibrium(x)[0]]
    far = sum(((t - t.mean(0)) ** 2).sum(1) for t in star) / sum((t**2).sum(1) for t in star)
    assert plain == pytest.approx(float(far.sqrt().median()), rel=1e-3)
    with torch.no_grad():
        for block in net.f.residual:  # the states grow by a constant; the images are what they were
            block.norm3.bias.add_(5.0)
    assert depth(net, x, y).variation < 0.2 * plain


def test_verdicts():
    base = dict(
        images=10, steps=[1, 2, 3, 5, 10], accuracy=[0.5] * 5, accuracy_star=0.7, distance=[0.1] * 5, switching=0.3,
        norm_median=0.4, norm_worst=0.5, radius_median=0.3, radius_worst=0.3, norm_D_worst=0.5, proved=0.9, probed=8,
        evaluations=6.0, converged=1.0,
    )  # fmt: skip
    alive = Depth(same_label=[0.6, 0.8, 0.9, 1.0, 1.0], **base)
    assert "uses its equilibrium" in alive.verdict and "gains 20.0 points" in alive.verdict
    assert str(alive).startswith(f"The model {alive.verdict} (10 images).\n")
    explicit = Depth(same_label=[0.6, 0.8, 0.9, 1.0, 1.0], **{**base, "accuracy_star": 0.4})
    assert "not made for its equilibrium" in explicit.verdict and "loses 10.0 points" in explicit.verdict
    assert alive.tightness == pytest.approx(0.5 / 0.9)
    asleep = Depth(same_label=[FEED_FORWARD + 0.001] + [1.0] * 4, **base)
    assert asleep.feed_forward and "is feed-forward" in asleep.verdict
    assert Depth.from_dict(json.loads(json.dumps(alive.to_dict()))) == alive
    older = {k: v for k, v in alive.to_dict().items() if k != "variation"}
    assert Depth.from_dict(older) == alive and "differs between" not in str(alive)
    with pytest.raises(KeyError, match="probed"):
        Depth.from_dict({k: v for k, v in older.items() if k != "probed"})
    free = Depth(same_label=[0.6] * 5, **{**base, "proved": math.inf})
    assert free.tightness == 0 and "proved L (test mode): none" in str(free)
    zero = Depth(same_label=[0.6] * 5, **{**base, "norm_D_worst": 0.0, "proved": 0.0})  # a = 1e-300
    assert zero.tightness == 0 and "tightness 0.00" in str(zero)
    assert len(alive.plot().lines) == 2


def test_command(capsys):
    assert main(["depth", str(DIGITS), "--images", "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["images"] == 60 and found["verdict"].startswith("is feed-forward")
    assert main(["depth", str(DIGITS), "--images", "60"]) == 0
    assert "label of z*" in capsys.readouterr().out
    assert main(["depth", str(DIGITS), "--images", "0"]) == 1
    assert "images = 0: must be a whole number >= 1" in capsys.readouterr().err


def test_wrong_labels_are_refused(digits):
    with pytest.raises(ValueError, match="labels = 3: must be as many as images, 2"):
        depth(build("digits"), digits[0][:2], digits[1][:3])
