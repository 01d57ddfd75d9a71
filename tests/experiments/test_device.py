"""Ready for an accelerator, tested without one: whole runs on a pretended device end bit-equal to the CPU (:mod:`pretend`)."""

import dataclasses
import importlib
import warnings
from pathlib import Path

import pytest
import torch
from pretend import DEVICE, Factory, Pretend, Watch
from torch.utils._pytree import tree_map

from lipmdeq import data, experiments, model, solvers
from lipmdeq.certificate import certify
from lipmdeq.experiments import checkpoints, training
from lipmdeq.experiments.depth_report import depth
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.training import Run
from lipmdeq.experiments.world import World
from lipmdeq.jacobian import Measurement
from lipmdeq.model.layers import Conv
from lipmdeq.norms.covers import Kernel

SMALL = dict(n=2, train_images=32, test_images=16, batch=16, epochs=1, lr=5e-3, p=0.2, device="cpu", prove_every=2)
# Every gradient rule, solver and block at least once; c is small, so that the constraint acts.
RUNS = {
    "implicit, anderson": dict(a=0.4),
    "jfb, picard": dict(a=0.4, method="jfb", solver="picard"),
    "phantom, broyden, mdeq": dict(model="mdeq", method="phantom", phantom_steps=2, solver="broyden", max_forward=4),
    "unrolled, potential": dict(block="potential", method="unrolled", steps=2),
    "implicit, broyden, potential": dict(block="potential", solver="broyden", label_smoothing=0.1),
    "implicit, fixed steps": dict(a=0.4, solver="picard", fixed_steps=3),
    "implicit, picard, mdeq": dict(model="mdeq", solver="picard", max_forward=4, max_backward=4),
}


@pytest.fixture(autouse=True)
def alike(monkeypatch):
    """Certificates of the runs are proved only; a test of its own measures. Images are cropped and flipped, as CIFAR-10's are."""
    opened = training.open_data

    def augmented(cfg, device):
        found = opened(cfg, device)
        return dataclasses.replace(found, train=dataclasses.replace(found.train, padding=1))

    monkeypatch.setattr(training, "open_data", augmented)
    monkeypatch.setattr(training, "certify", lambda model, **kw: certify(model, **{**kw, "measure": False}))
    monkeypatch.setattr("lipmdeq.experiments.step.JACOBIAN_RATE", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def settings(**changes) -> RunConfig:
    small = {} if changes.get("block") == "potential" else {"c": 0.2}
    return RunConfig(**{**SMALL, **small, **changes})


def there(cfg: RunConfig, out: Path) -> Run:
    """A run on the pretended device, to be used inside Factory()."""
    return Run(cfg, out, World(cfg, device=DEVICE))


def numbers(value) -> object:
    """A tensor on the CPU, or a dict or list of such, wherever it was."""
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(v) for v in value]
    return value.kept if isinstance(value, Pretend) else value


def weights(run: Run) -> dict:
    return {k: numbers(v.detach()) for k, v in run.model.state_dict().items()}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    unlike = [k for k in one if not torch.equal(one[k], other[k])]
    assert not unlike, f"other bits in {unlike[:5]}"


def assert_close(one, other, rel: float) -> None:
    """Equal but for the last digits of floats: products of doubles depend on where in memory they lie, J v on torch's way."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for k in one:
            assert_close(one[k], other[k], rel)
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_close(a, b, rel)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=rel, abs=1e-12)
    else:
        assert one == other or isinstance(one, str)  # texts say the same numbers


def evaluated(run: Run) -> dict:
    row = training.evaluate(run.model, run.data.test, run.cfg.batch, run.world)
    return {k: v for k, v in dataclasses.asdict(row).items() if k != "seconds"}


def one_epoch(run: Run) -> Run:
    """The steps of an epoch, with proofs and without (prove_every = 2)."""
    run._end_of_epoch = lambda: None
    run._one_epoch()
    return run


@pytest.mark.parametrize("name", RUNS)
def test_training_steps_are_bit_equal(name, tmp_path):
    cfg = settings(**RUNS[name])
    here = one_epoch(Run(cfg, tmp_path / "cpu", World.open(cfg)))
    with Factory():
        away = one_epoch(there(cfg, tmp_path / "there"))
        assert all(p.device == DEVICE for p in away.model.parameters())
        assert_equal(weights(here), weights(away))
        assert evaluated(here) == evaluated(away)


def test_jacobian_regularisation_runs_there(tmp_path):
    """Second derivatives of group normalisation take another path in torch off the CPU: equal up to rounding."""
    cfg = settings(model="mdeq", jacobian_weight=0.1, solver="picard", max_forward=3, max_backward=3)
    here = one_epoch(Run(cfg, tmp_path / "cpu", World.open(cfg)))
    with Factory():
        away = one_epoch(there(cfg, tmp_path / "there"))
    assert here.sums.settle().loss == pytest.approx(away.sums.settle().loss, rel=1e-4)


def test_run_is_equal_through_checkpoint_and_resume(tmp_path):
    """Killed after the first of two epochs and resumed, on the device; the record is that of an undisturbed run on the CPU."""
    cfg = settings(a=0.4, epochs=2, trace_epochs=[1])
    whole = Run(cfg, tmp_path / "cpu", World.open(cfg)).finish()
    with Factory():
        there(cfg, tmp_path / "there")._one_epoch()
        again = there(cfg, tmp_path / "there")
        assert again.epoch == 1
        record = again.finish()
    for name in ("weights_sha256", "half_sha256", "traces"):
        assert record[name] == whole[name], name
    assert_close(record["depth"], whole["depth"], 1e-3)
    for one, other in zip(whole["history"], record["history"], strict=True):
        assert_close(one["lipschitz"], other["lipschitz"], 1e-9)
        assert [one[k] for k in ("epoch", "train", "test")] == [other[k] for k in ("epoch", "train", "test")]
    # A checkpoint of the device is read where there is none.
    state = checkpoints.load_checkpoint(tmp_path / "there" / checkpoints.CHECKPOINT)["model"]
    assert {type(v) for v in state.values()} == {torch.Tensor}


@pytest.mark.parametrize("fields", [dict(a=0.4), dict(block="potential")], ids=["paper", "potential"])
def test_certificate_and_depth_are_equal(fields, tmp_path):
    cfg = settings(**fields)
    run = Run(cfg, tmp_path, World.open(cfg))
    model, (x, y) = run.model.eval(), run._images(4)

    def reports(model, x, y):
        proof = certify(model, x=x, measure=Measurement(random_points=1, power_steps=2), progress=False)
        return proof.to_dict(), depth(model, x, y, certificate=proof).to_dict()

    (proof, report) = reports(model, x, y)
    with Factory():
        (proof_there, report_there) = reports(model.to(DEVICE), x.to(DEVICE), y.to(DEVICE))
    for name in ("fingerprint", "constants", "observed_steps", "certified"):
        assert proof[name] == proof_there[name], name
    for name in ("test", "train", "layers"):
        assert_close(proof[name], proof_there[name], 1e-9)
    for name in ("accuracy", "accuracy_star", "same_label", "switching", "evaluations", "converged"):
        assert report[name] == report_there[name], name
    for name in ("measured_norm", "measured_norm_D", "spectral_radius"):
        assert_close(proof[name], proof_there[name], 1e-3)
    assert_close(report, report_there, 1e-3)


# ---------------------------------------------------------------- would these tests see it?

# What is changed, and a run that uses it: f of both blocks, stem and head, dropout, solvers, constraint, loss, counts, images.
PLACES = {
    "fused.normed": dict(a=0.4),
    "fused.residual": dict(a=0.4),
    "fused.fusion": dict(a=0.4),
    "fused.down": dict(a=0.4),
    "fused.add_up": dict(block="potential"),
    "fused.paper": dict(a=0.4),
    "fused.potential": dict(block="potential"),
    "fused.certified": dict(block="potential"),
    "layers.Conv.forward": dict(a=0.4),
    "layers.Conv._power": dict(a=0.4),
    "layers.MGN.scale": dict(a=0.4),
    "layers.VariationalDropout.draw": dict(a=0.4),
    "potential.PotentialMap.mixing": dict(block="potential"),
    "network.Bottleneck.forward": dict(a=0.4),
    "network.Head.forward": dict(a=0.4),
    "network.MDEQ.injected": dict(a=0.4),
    "network.MDEQ.z0": dict(a=0.4),
    "layout.Layout.unpack": dict(block="potential"),  # slow enough for accelerated steps
    "layout.Layout.empty": dict(a=0.4, solver="broyden"),
    "fixed._step": dict(a=0.4, solver="picard", fixed_steps=3),
    "network.MDEQ.problem": dict(block="potential", method="unrolled", steps=2),
    "step.Batch.forward": dict(a=0.4),
    "images.normalise": dict(a=0.4),
    "images.crop_and_flip": dict(a=0.4),
    "potential.UnitConv.kernel": dict(block="potential"),
    "steps.dots": dict(a=0.4),
    "steps.AndersonStep.step": dict(block="potential"),
    "steps.BroydenStep.step": dict(a=0.4, solver="broyden"),
}
ROOMS = {"layout": solvers, "fixed": solvers, "steps": solvers, "step": experiments, "images": data}


def place(name: str) -> tuple[object, str]:
    """The module or class that holds a name of PLACES, and the name there."""
    first, *inner, last = name.split(".")
    holder = importlib.import_module(f"{ROOMS.get(first, model).__name__}.{first}")
    for part in inner:
        holder = getattr(holder, part)
    return holder, last


def change(monkeypatch, name: str, sneak) -> None:
    """Every tensor of floats, or of images, that comes out of a function goes through ``sneak`` first."""
    holder, last = place(name)
    original = getattr(holder, last)

    def on(t):
        kind = isinstance(t, torch.Tensor) and (t.is_floating_point() or t.dtype == torch.uint8)
        return sneak(t) if kind and t.dim() else t

    def changed(*args, **kwargs):
        return tree_map(on, original(*args, **kwargs))

    monkeypatch.setattr(holder, last, changed)


@pytest.mark.parametrize("name", PLACES)
def test_cpu_tensor_anywhere_is_seen(name, tmp_path, monkeypatch):
    """Test of the tests: a tensor of the CPU in the wrong place, harmless on the CPU, stops the step on the device."""
    change(monkeypatch, name, lambda t: t + torch.zeros(1))
    with Factory(), pytest.raises(RuntimeError, match="tensors on pretend and cpu meet"):
        one_epoch(there(settings(**PLACES[name]), tmp_path))


def test_cpu_tensor_in_a_proof_is_seen(tmp_path, monkeypatch):
    """The second step ends with one (prove_every = 2)."""
    original = Kernel.products
    monkeypatch.setattr(Kernel, "products", lambda self, side: original(self, side) + torch.zeros(1))
    with Factory():
        run = there(settings(a=0.4), tmp_path)
        with pytest.raises(RuntimeError, match="tensors on pretend and cpu meet"):
            one_epoch(run)
        assert run.step == 1


# ---------------------------------------------------------------- what would make an accelerator wait


def watched_step(run: Run) -> tuple[Watch, int]:
    """The second step of an epoch, without a proof: what the host waited for, its images included, and the evaluations of both
    solves."""
    before, batches = [], run.data.train.batches(run.cfg.batch, train=True, seed=0, drop_last=True)
    for _ in range(2):
        with Watch() as seen:
            run._one_step(*next(batches), 0.0)
        sums = run.sums
        before.append((sums.nfe_forward + sums.nfe_backward) // run.cfg.batch)
    return seen, before[-1] - before[-2]


WAITING = {
    "picard": dict(a=0.4, solver="picard"),
    "anderson": dict(a=0.4),
    "broyden": dict(a=0.4, solver="broyden"),
    "potential": dict(block="potential"),
    "mdeq": dict(model="mdeq", max_forward=4, max_backward=4),
    "jfb": dict(a=0.4, method="jfb"),
    "phantom": dict(a=0.4, method="phantom"),
    "unrolled": dict(block="potential", method="unrolled", steps=2),
    "jacobian": dict(model="mdeq", jacobian_weight=0.1, max_forward=3, max_backward=3),
    "all branches": dict(a=0.4, injection="all", label_smoothing=0.1),
}


@pytest.mark.parametrize("name", WAITING)
def test_waits_of_a_step_are_bounded(name, tmp_path):
    """One for each evaluation, and one for the loss: no room for another one."""
    with Factory():
        run = there(settings(**WAITING[name], prove_every=10**6), tmp_path)
        run.model.train()
        seen, nfe = watched_step(run)
    assert nfe >= 2 and seen.total == nfe + 1, seen.places


def test_waits_of_an_evaluation_are_bounded(tmp_path):
    """One for each evaluation of f, and one for all losses and labels."""
    with Factory():
        run = there(settings(a=0.4), tmp_path)
        training.evaluate(run.model, run.data.test, 8, run.world)  # numbers of the host come once: means and deviations
        with Watch() as seen:
            row = training.evaluate(run.model, run.data.test, 8, run.world)
    assert seen.total == row.nfe_forward // 8 + 1 > 2, seen.places


@pytest.mark.parametrize("steps", [4, "auto"])
def test_fixed_steps_wait_three_times(steps, tmp_path):
    """For the residuals of each solve and for the loss, however many evaluations there are; "auto" waits after each block."""
    with Factory():
        run = there(settings(a=0.4, c=2.0, solver="picard", fixed_steps=steps, prove_every=10**6), tmp_path)
        run.model.train()
        seen, nfe = watched_step(run)
    assert nfe >= 4 and 0 < seen.total <= (3 if steps == 4 else nfe), seen.places


def test_constraint_without_proof_waits_for_nothing(tmp_path):
    with Factory():
        run = there(settings(a=0.4), tmp_path)
        run.model.constrain(prove=False)  # the first call brings a random vector from the host
        with Watch() as seen:
            run.model.constrain(prove=False)
            next(iter(run.data.train.batches(16, train=True)))
        assert seen.total == 0, seen.places


def test_proof_of_all_layers_waits_once(tmp_path):
    """Every layer is proved, and one answer for all of them is read; two more where layers have to be changed, however many:
    there torch itself waits for each call of eigvalsh, to see whether it found eigenvalues."""
    with Factory():
        run = there(settings(a=0.4), tmp_path)
        run.model.constrain()
        with Watch() as seen:
            assert run.model.constrain() <= 1
        assert seen.total == 1, seen.places
        held = [m for m in run.model.modules() if isinstance(m, Conv) and m.c is not None]
        assert len(held) > 5
        for some in held[:1], held:
            with torch.no_grad():
                for m in some:
                    m.forget()  # else the estimates, which wait for nothing, bring it back before the proof
                    m.weight.mul_(100 * m.c)
            with Watch() as again:
                assert run.model.constrain() > 1
            inner = sum(count for where, count in again.places.items() if where.endswith(" check"))
            assert again.total - inner == 3 and inner <= 8 * len(some), again.places


ITEMS = [
    name for name in PLACES if name not in ("layout.Layout.empty", "fixed._step", "layers.VariationalDropout.draw")
]


@pytest.mark.parametrize("name", [*ITEMS, "layers.VariationalDropout.draw"])
def test_added_item_is_seen(name, tmp_path, monkeypatch):
    """Test of the tests: a value that is read, in any of these places, is one wait too many."""
    change(monkeypatch, name, lambda t: t * float(t.detach().sum() > -1e30))
    with Factory():
        run = there(settings(**PLACES[name], prove_every=10**6), tmp_path)
        run.model.train()
        seen, nfe = watched_step(run)
    assert seen.total > nfe + 1, seen.places


def test_added_item_with_fixed_steps_is_seen(tmp_path, monkeypatch):
    change(monkeypatch, "fixed._step", lambda t: t * float(t.detach().sum() > -1e30))
    with Factory():
        run = there(settings(a=0.4, c=2.0, solver="picard", fixed_steps=4, prove_every=10**6), tmp_path)
        run.model.train()
        seen, _ = watched_step(run)
    assert seen.total > 3, seen.places


def test_added_item_in_the_constraint_is_seen(tmp_path, monkeypatch):
    """`test_constraint_without_proof_waits_for_nothing` has no room for it."""
    original = Conv.estimate
    monkeypatch.setattr(Conv, "estimate", lambda self, *args: (float(self.weight.sum()), original(self, *args))[1])
    with Factory():
        run = there(settings(a=0.4), tmp_path)
        run.model.constrain(prove=False)
        with Watch() as seen:
            run.model.constrain(prove=False)
    assert seen.total > 0


def test_added_item_in_a_proof_is_seen(tmp_path, monkeypatch):
    """`test_proof_of_all_layers_waits_once` has no room for it."""
    original = Kernel.products
    monkeypatch.setattr(Kernel, "products", lambda self, side: (float(self.square), original(self, side))[1])
    with Factory():
        run = there(settings(a=0.4), tmp_path)
        run.model.constrain()
        with Watch() as seen:
            run.model.constrain()
    assert seen.total > 1


# ---------------------------------------------------------------- would the pretended device see it?

HIDDEN = {  # ways to wait that are not called `.item()`
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "copy that is not waited for": lambda x: x.to("cpu", non_blocking=True),
    "copy into a tensor of the host": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "mask": lambda x: x[x > 0],
    "mask of bytes": lambda x: x[(x > 0).to(torch.uint8)],
    "repeat_interleave": lambda x: x.repeat_interleave((x > -9).long()),
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).long()),
    "where": lambda x: torch.where(x > 0),
    "slice": lambda x: x[: (x > -9).sum()],
    "solve": lambda x: torch.linalg.solve(torch.diag(x.exp()), x),
}
STRANGE = {  # numbers of the CPU where torch does not take them on a GPU
    "stack": lambda x: torch.stack([x.sum(), torch.zeros(())]),
    "written to": lambda x: torch.zeros(()).add_(x.sum()),
    "out": lambda x: torch.add(x.sum(), 1.0, out=torch.zeros(())),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_waits_are_counted(name):
    with warnings.catch_warnings(), Factory():
        warnings.simplefilter("ignore")
        x = torch.randn(3, device=DEVICE)
        with Watch() as seen:
            HIDDEN[name](x)
    assert seen.total == 1


@pytest.mark.parametrize("name", STRANGE)
def test_numbers_of_the_cpu_enter_only_where_torch_takes_them(name):
    with Factory():
        x = torch.randn(3, device=DEVICE)
        x.mul_(torch.tensor(2.0)).clamp_(max=torch.tensor(1.0)).fill_(torch.tensor(1.0))
        with Watch() as seen:
            x.repeat_interleave(torch.ones_like(x).long(), output_size=3).to(DEVICE)
        assert seen.total == 0
        with pytest.raises(RuntimeError, match="tensors on pretend and cpu meet"):
            STRANGE[name](x)


# ---------------------------------------------------------------- timers


@pytest.mark.parametrize("asked", [False, True])
def test_timers_wait_only_if_asked(asked, tmp_path, monkeypatch):
    """On a GPU a clock that waits shows the work and not the queue, and slows it: only LIPMDEQ_CLOCKS=exact does it."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.delenv("LIPMDEQ_CLOCKS", raising=False)
    if asked:
        monkeypatch.setenv("LIPMDEQ_CLOCKS", "exact")
    cfg = settings(a=0.4)
    run = Run(cfg, tmp_path, World.open(cfg))
    run.world.device = torch.device("cuda", 0)  # for the clocks alone: the data and the model are where they were
    x, y = next(iter(run.data.train.batches(cfg.batch, train=True, seed=0, drop_last=True)))
    run.model.train()
    run._one_step(x, y, 0.0)
    assert waited == [torch.device("cuda", 0)] * (4 if asked else 0)
