"""What a residual means when convolutions round: the smallest tolerance of each precision is right from both sides."""

import copy
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lipmdeq.certificate import TF32, Prover, certify, mixed_1x1_norm
from lipmdeq.experiments import training
from lipmdeq.experiments.parameters import UNIT_ROUNDOFF, ParameterError, RunConfig
from lipmdeq.experiments.training import Run
from lipmdeq.experiments.world import World
from lipmdeq.model import build
from lipmdeq.model.layers import MGN, Conv
from lipmdeq.model.potential import UnitConv
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


def tf32(t: torch.Tensor, half: int = 0x1000) -> torch.Tensor:
    """Single-precision numbers with the eleven binary digits that a tensor core reads: rounded, or cut off (half = 0)."""
    return ((t.contiguous().view(torch.int32) + half) & ~0x1FFF).view(torch.float32).view_as(t)


@pytest.mark.parametrize("half", [0x1000, 0], ids=["rounded", "cut off"])
@pytest.mark.parametrize("name", MODELS)
def test_tf32_has_a_proof_of_its_own(name, half):
    """Every layer with the kernels that a tensor core reads stays below what is proved for tf32, and the proof is near."""
    torch.manual_seed(0)
    net = build("digits", **MODELS[name]).eval()
    with torch.no_grad():
        for m in net.f.modules():
            if isinstance(m, Conv):
                low = tf32(torch.randn_like(m.weight) * 0.05, 0)  # next to a number that is read differently
                m.weight.copy_(low * (1 + 0.999 * TF32) if half == 0 else low * (1 + 0.501 * TF32))
    proved = certify(net, dtype="tf32", measure=False, progress=False)
    used = copy.deepcopy(net)
    with torch.no_grad():
        for m in used.f.modules():
            if isinstance(m, Conv | UnitConv):
                m.weight.copy_(tf32(m.kernel(), half))
                if isinstance(m, UnitConv):
                    m.kernel = lambda *bound, w=m.weight: w.detach()
    plain, read = (certify(m, measure=False, progress=False) for m in (net, used))
    assert proved.dtype == "tf32" and "kernels in tf32" in str(proved)
    for row, other, before in zip(proved.layers, read.layers, plain.layers, strict=True):
        assert max(other["norm"], before["norm"]) <= row["norm"] < 1.01 * before["norm"] + 1e-9, row["name"]
    for mode in ("test", "train"):
        assert (np.array(getattr(proved, mode)["matrix"]) >= np.array(getattr(read, mode)["matrix"]) * (1 - 1e-7)).all()
    assert plain.test["perron"] < proved.test["perron"] < 1.06 * plain.test["perron"]


@pytest.mark.parametrize("halves", [(0x1000, 0), (0, 0x1000), (0, 0)])
def test_tf32_potential_layers(halves):
    """J = I − BSA of a residual layer whose two kernels are read each for itself, near the largest norm that A can have."""
    torch.manual_seed(1)
    net = build("cpu", block="potential", n=1, channels=(8,), head_channels=(4,), image_size=8, expansion=1).eval()
    layer = net.f.residual[0]
    with torch.no_grad():
        layer.weight.copy_(0.7 * torch.eye(8)[:, :, None, None].expand(8, 8, 3, 3))
        eye = torch.eye(8 * layer.size[0] * layer.size[1]).view(-1, 8, *layer.size)
        kernels = [tf32(k, h) for k, h in zip(layer.held(layer.bound(), None)[:2], halves, strict=True)]
        a, b = (F.conv2d(eye.double(), k.double(), padding=1).flatten(1).T for k in kernels)
        proved = certify(net, dtype="tf32", measure=False, progress=False)
        limit = next(row["norm"] for row in proved.layers if row["name"] == "residual.0")
        found = []
        for share in (0.3, 1.0):
            slopes = (torch.rand(len(a)) < share).double()
            found.append(torch.linalg.matrix_norm(torch.eye(len(a)).double() - b @ (slopes[:, None] * a), 2).item())
    assert max(found) <= limit < 1.02 * max(found)


def test_tf32_where_every_entry_is_rounded_to_the_same_side():
    """The attack: signs that cancel in the kernel, of norm 4, and not in its rounding error, like 16 ones, of norm 16."""
    block = torch.ones(4, 4) - 2 * torch.eye(4)
    signs = torch.kron(block, block)  # orthogonal rows, and 4 in each row more ones than minus ones
    kernel = torch.where(signs > 0, 1 + 0.501 * TF32, -1 - 0.499 * TF32)[:, :, None, None]
    read = tf32(kernel)
    assert torch.linalg.matrix_norm(read[:, :, 0, 0].double(), 2) >= 4 + 9.9 * TF32
    for gamma in (1.0, 3.0):
        conv, norm = Conv(16, 16, 1, size=(2, 2)), MGN(16, 16)
        with torch.no_grad():
            conv.weight.copy_(kernel)
            norm.weight.fill_(gamma)
        true = gamma * float(torch.linalg.matrix_norm(read[:, :, 0, 0].double(), 2))
        assert true <= mixed_1x1_norm(conv, norm, "tf32").value < true * (1 + 10 * TF32)
        if gamma == 1:
            assert true <= Prover(conv, {conv: (2, 2)}, "tf32")(conv)[0].value < true * (1 + 10 * TF32)


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
