"""What a residual means when convolutions round: the smallest tolerance of each precision is right from both sides."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipmdeq.experiments import training
from lipmdeq.experiments.parameters import UNIT_ROUNDOFF, ParameterError, RunConfig
from lipmdeq.experiments.training import Run
from lipmdeq.experiments.world import World
from lipmdeq.model import build
from lipmdeq.model.layers import Conv
from lipmdeq.solvers import Anderson, Picard

CAP = 40
MODELS = {
    "a = .4": dict(a=0.4),
    "a = 1": dict(a=1.0),
    "potential, tau = .5": dict(block="potential", tau=0.5),
    "potential, tau = .9": dict(block="potential", tau=0.9),
}
pytestmark = pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")


@pytest.mark.parametrize("precision", UNIT_ROUNDOFF)
def test_tolerance_below_the_rounding_is_refused(precision):
    least = UNIT_ROUNDOFF[precision]
    assert RunConfig(precision=precision, tol=least).tol == least
    with pytest.raises(ParameterError, match=f"^tol = .*: must be >= {least:g} for precision = '{precision}'"):
        RunConfig(precision=precision, tol=float(np.nextafter(least, 0)))
    assert RunConfig(tol=1e-9).precision == "float32"


def test_default_tolerance_fits_all_but_bfloat16():
    assert RunConfig(precision="tf32").tol == 1e-3
    with pytest.raises(ParameterError, match="^tol = 0.001: must be >= 0.00390625 for precision = 'bfloat16'"):
        RunConfig(precision="bfloat16")


def test_unit_roundoff_is_that_of_the_types():
    assert UNIT_ROUNDOFF["bfloat16"] == torch.finfo(torch.bfloat16).eps / 2
    one = torch.tensor([1.0, 1 + 0.99 * UNIT_ROUNDOFF["tf32"], 1 + 1.01 * UNIT_ROUNDOFF["tf32"]])
    assert tf32(one).tolist() == [1.0, 1.0, 1 + 2 * UNIT_ROUNDOFF["tf32"]]


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_tf32_is_for_convolutions_only(precision, monkeypatch):
    """Inner products of the solvers and the bounds on norms, which are products of matrices, stay in single precision; and a
    run on a GPU has a stream of its own, since nothing on the default one can be captured."""
    stream = object()
    for name, answer in dict(is_available=True, device_count=1, set_device=None, Stream=stream).items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "tf32")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        world = World.open(RunConfig(precision=precision, device="cuda"))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.backends.cudnn.allow_tf32 == (precision == "tf32") and world.stream is stream
    assert World.open(RunConfig(device="cpu")).stream is None


# ---------------------------------------------------------------- what can be reached, and what it is worth


def tf32(t: torch.Tensor) -> torch.Tensor:
    """Single-precision numbers rounded to the eleven binary digits that a tensor core reads."""
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).view_as(t)


class PlayedTf32:
    """Convolutions of f as on a GPU with TF32: inputs and kernels are rounded, sums are in single precision."""

    def __enter__(self):
        self.conv2d, F.conv2d = F.conv2d, lambda x, w, *rest, **how: self.conv2d(tf32(x), tf32(w), *rest, **how)

    def __exit__(self, *error):
        F.conv2d = self.conv2d


CASTS: dict[str, Callable] = {"bfloat16": functools.partial(torch.autocast, "cpu", torch.bfloat16), "tf32": PlayedTf32}


def far(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest ‖a − b‖/‖b‖ over the batch."""
    apart, size = (
        sum(t.double().square().flatten(1).sum(1) for t in ts)
        for ts in ([x.double() - y.double() for x, y in zip(a, b, strict=True)], b)
    )
    return (apart / size).sqrt().max().item()


@pytest.fixture(params=[(p, m) for p in CASTS for m in MODELS], ids=lambda case: ", ".join(case))
def problem(request):
    """(unit roundoff, f in single precision, f as it is rounded, z0) with random weights at the limit of the constraint."""
    precision, name = request.param
    torch.manual_seed(0)
    net = build("digits", **MODELS[name]).eval()
    with torch.no_grad():
        for m in net.f.modules():
            if isinstance(m, Conv):
                m.weight.normal_(0, 0.3)
        net.constrain()
        x = torch.randn(8, 1, 8, 8)
        f, z0, _ = net.problem(x)
        rounded, _, _ = net.problem(x, CASTS[precision])
        yield UNIT_ROUNDOFF[precision], f, rounded, z0


@pytest.mark.parametrize("solver", [Anderson, Picard])
def test_smallest_tolerance_is_right_from_both_sides(problem, solver):
    """With u the unit roundoff: one evaluation errs by about u, so no solve brings the residual of f itself below that.

    Twice u is reached at once. Far below u a solve runs to its cap, or finds a point that the rounded f repeats, and for f
    itself that point is no better.
    """
    u, f, rounded, z0 = problem
    star = Anderson(tol=1e-6, max_iter=200).solve(f, z0).z
    assert u / 2 < far(rounded(star), f(star)) < 4 * u
    good, least, vain = (solver(tol=k * u, max_iter=CAP).solve(rounded, z0) for k in (2, 1, 1 / 16))
    assert good.converged.all() and good.nfe <= 20
    assert far(f(good.z), good.z) < 5 * u  # what is reported, 2u, and the rounding of f
    assert vain.nfe > least.nfe or least.nfe == CAP
    assert far(f(vain.z), vain.z) > max(u / 2, 0.8 * far(f(least.z), least.z))


@pytest.mark.parametrize("fields", [dict(a=0.4), dict(block="potential")], ids=["paper", "potential"])
def test_bfloat16_trains_with_converged_solves(fields, tmp_path, monkeypatch):
    """At the tolerance that the help names, forward and backward."""
    small = dict(n=2, train_images=64, test_images=16, batch=16, epochs=1, device="cpu")
    cfg = RunConfig(**small, **fields, precision="bfloat16", tol=0.01)
    run = Run(cfg, tmp_path, World.open(cfg))
    run._end_of_epoch = lambda: None
    run._one_epoch()
    sums = run.sums.settle()
    assert sums.images == 64 and sums.not_converged_forward == sums.not_converged_backward == 0
    assert 0 < sums.worst_residual_forward < 0.01 and sums.nfe_forward <= 12 * 64
    assert training.ROUNDED[cfg.precision] == torch.bfloat16  # what the record proves
