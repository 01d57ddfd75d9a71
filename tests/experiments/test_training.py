"""The training loop: same seed same bits, killed anywhere, damaged files, divergence, several processes, records."""

import fcntl
import hashlib
import io
import json
import math
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from lipmdeq.__main__ import main
from lipmdeq.certificate import certify
from lipmdeq.data import files
from lipmdeq.experiments import checkpoints, training
from lipmdeq.experiments import step as one_batch
from lipmdeq.experiments.depth_report import depth
from lipmdeq.experiments.parameters import ParameterError, RunConfig, RunError
from lipmdeq.experiments.record import RECORD, Record, certificate_of, matches_config, read_record, same_run, write_json
from lipmdeq.experiments.report import Summary, curves, make_record
from lipmdeq.experiments.rows import promised
from lipmdeq.experiments.step import Sums, jacobian_weight, learning_rate, make_adjoint, make_solver, stream
from lipmdeq.experiments.training import Run, new_model, train
from lipmdeq.experiments.world import World
from lipmdeq.solvers import Anderson, Broyden, Picard, SolverWarning
from lipmdeq.solvers.gradients import JFB, Implicit, Phantom, Unrolled, jacobian_regularisation


def jsonable(value):
    """The same with infinities and NaN as None, which JSON does not have, and tuples as lists."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


ROOT = Path(__file__).parents[2]
# c is small, so that the constraint acts at most steps.
TINY = dict(
    a=0.4,
    c=0.2,
    n=2,
    train_images=64,
    test_images=40,
    batch=16,
    epochs=2,
    lr=5e-3,
    checkpoint_every=3,
    p=0.2,
    device="cpu",
)


def tiny(**changes) -> RunConfig:
    return RunConfig(**{**TINY, **changes})


def tiny_potential(**changes) -> RunConfig:
    """The same with the certified family, which has no a and no c."""
    return RunConfig(
        **{**{k: v for k, v in TINY.items() if k not in "ac"}, "block": "potential", "tau": 0.8, **changes}
    )


@pytest.fixture(autouse=True)
def quick_certificate(monkeypatch):
    """Only what is proved: measuring takes longer than these trainings."""
    monkeypatch.setattr(training, "certify", lambda model, **kw: certify(model, **{**kw, "measure": False}))


def open_run(cfg: RunConfig, out: Path) -> Run:
    return Run(cfg, out, World.open(cfg))


def numbers(value):
    """A record without what may differ between two runs with equal numbers: times, places, what is only measured."""
    drop = ["seconds", "milliseconds_per_step", "memory", "started", "finished", "code", "out"]
    drop += ["measured", "measured_norm", "measured_norm_D", "spectral_radius", "points", "observed_steps", "slack"]
    if isinstance(value, dict):
        own = ["sha256"] if "format" in value else []  # of times too
        return {k: numbers(v) for k, v in value.items() if k not in drop + own}
    return [numbers(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> SimpleNamespace:
    out = tmp_path_factory.mktemp("undisturbed")
    record = train(tiny(out=str(out), trace_epochs=[0, 2]), log=None)
    return SimpleNamespace(out=out, returned=record, record=json.loads((out / RECORD).read_text()))


def final_weights(out: Path) -> dict:
    return checkpoints.load_checkpoint(out / checkpoints.CHECKPOINT)["model"]


# ---------------------------------------------------------------- the record


def test_record_says_what_was_run(undisturbed):
    r, cfg = undisturbed.record, tiny(out=str(undisturbed.out), trace_epochs=[0, 2])
    assert RunConfig.from_mapping(r["parameters"]) == cfg
    assert matches_config(r, cfg) and not matches_config(r, tiny(a=0.1))
    assert [h["epoch"] for h in r["history"]] == [1, 2]
    for h in r["history"]:
        assert set(h["seconds"]) == {*one_batch.CLOCKS, "train", "evaluation"}
        assert all(math.isfinite(v) for v in (h["train"]["loss"], h["test"]["loss"], h["train"]["nfe_backward"]))
        assert h["train"]["images"] == 64 and h["test"]["images"] == 40 and h["steps"] == 4
    last = r["history"][-1]
    assert r["result"]["accuracy"] == last["test"]["accuracy"]  # of the last epoch, not of the best
    assert r["result"]["top5"] >= r["result"]["accuracy"]
    assert r["result"]["nfe_test_forward"] == last["test"]["nfe_forward"]
    assert r["result"]["nfe_train_backward"] == last["train"]["nfe_backward"]
    spent = sum(h["seconds"]["train"] for h in r["history"])
    assert r["result"]["milliseconds_per_step"]["train"] == pytest.approx(1000 * spent / 8)  # 2 epochs of 4 steps
    proved = {mode: r["certificate"][mode]["perron"] for mode in ("test", "train")}
    assert {mode: last["lipschitz"][mode] for mode in proved} == proved and proved["test"] < proved["train"]
    assert f"for all weights, train mode: L <= {promised(cfg):.4g}" in r["guarantee"]
    assert r["data"]["sha256"] and r["versions"]["torch"] and r["machine"]["cores"]
    assert r["command"].startswith("python -m lipmdeq train -p ")
    assert "64 training images of digits at 8x8" in r["scale"]
    assert str(ROOT) not in json.dumps(numbers(r))
    model = checkpoints.load_model(undisturbed.out / checkpoints.CHECKPOINT)
    assert checkpoints.weights_sha256(model) == r["weights_sha256"]
    certificate = certificate_of(r)
    assert certificate.matches(model)
    assert str(certificate) and certificate._repr_html_()
    for layer in certificate.layers:
        assert layer["limit"] is None or layer["norm"] <= layer["limit"] * (1 + 1e-6), layer
    unproved = {**r["certificate"], "test": {**r["certificate"]["test"], "perron": None}, "measured_norm": None}
    unproved = certificate_of({**r, "certificate": unproved})  # null is infinity in a proof, and nothing elsewhere
    assert unproved.test["perron"] == math.inf and unproved.measured_norm is None
    for mode in ("test", "train"):
        assert f"{mode} mode: proved to be a contraction" in r["guarantee"]
    assert json.loads(json.dumps(jsonable(undisturbed.returned))) == r
    assert set(r) == set(Record.model_fields), "Record declares what a record holds"


def test_record_says_when_nothing_is_proved():
    r = train(tiny(model="mdeq", epochs=1), log=None)
    assert not r["certificate"]["test"]["certified"]
    assert r["guarantee"].count("NOT proved to be a contraction") == 2
    assert r["model"]["config"]["a"] == 1.0


def test_traces_have_the_forced_number_of_iterations_and_change_nothing(undisturbed):
    traces = undisturbed.record["traces"]
    assert [t["epoch"] for t in traces] == [0, 2]
    for t in traces:
        for name, k in (("train_forward", 18), ("train_backward", 20), ("test_forward", 18)):
            for kind in ("mean", "median", "worst"):
                assert len(t[name][kind]) == k
            assert all(m <= w * (1 + 1e-4) for m, w in zip(t[name]["mean"], t[name]["worst"], strict=True))
            assert t[name]["worst"][-1] < 1e-4  # a contraction
    model = checkpoints.load_model(undisturbed.out / checkpoints.CHECKPOINT)
    model.solver = Anderson(tol=0, max_iter=18)
    x, _ = training.open_data(tiny(), torch.device("cpu")).train.sample(64)
    with torch.no_grad():
        seen = model(x, details=True)[1].residuals.double()
    again = {"mean": seen.mean(1), "median": seen.median(1).values, "worst": seen.amax(1)}
    for kind, values in again.items():  # later ones are rounding
        assert traces[-1]["test_forward"][kind][:2] == pytest.approx(values[:2].tolist(), rel=1e-3)
    of_three = one_batch._trace(SimpleNamespace(residuals=torch.tensor([[1.0, 2.0, 9.0]])))
    assert of_three == {"mean": [4.0], "median": [2.0], "worst": [9.0]}
    first, other = (traces[-1][name]["mean"][1] for name in ("train_forward", "test_forward"))
    assert abs(first - other) > 1e-3 * other  # dropout, and the statistics of the batch
    without = train(tiny(), log=None)
    assert without["weights_sha256"] == undisturbed.record["weights_sha256"]
    assert numbers(without["history"]) == numbers(undisturbed.record["history"])


def test_seed_decides(undisturbed):
    assert train(tiny(seed=1), log=None)["weights_sha256"] != undisturbed.record["weights_sha256"]


def test_seed_decides_start_order_and_dropout(tmp_path):
    """Each one by itself: two runs of different seeds share neither weights, nor batches, nor masks."""
    found = []

    def look(x, y, jacobian):
        found.append((checkpoints.weights_sha256(run.model), y.tolist(), torch.initial_seed()))
        raise Killed

    for seed in (0, 0, 1):
        run = open_run(tiny(seed=seed), tmp_path)
        run.batch = look
        with pytest.raises(Killed):
            run._one_epoch()
    first, same, other = found
    assert first == same and all(a != b for a, b in zip(first, other, strict=True))


def test_every_call_of_f_is_counted(tmp_path):
    run = open_run(tiny(epochs=1, test_images=32), tmp_path)
    calls, forward = [0], run.model.f.forward
    run.model.f.forward = lambda *a: (calls.__setitem__(0, calls[0] + 1), forward(*a))[1]
    run._one_epoch()
    row = run.history[0]
    assert (
        calls[0]
        == (row["train"]["nfe_forward"] + row["train"]["attached_forward"]) * 4 + row["test"]["nfe_forward"] * 2
    )
    assert 1 <= row["train"]["steps_forward"] <= row["train"]["nfe_forward"]


def test_sums_find_the_worst_image():
    solution = SimpleNamespace()
    solution.nfe, solution.nfe_total, solution.steps = 5, 6, torch.tensor([3, 5])
    solution.converged = torch.tensor([True, False])
    solution.residuals = torch.tensor([[1.0, 1.0], [1e-4, 0.2]])
    solution.backward = None
    sums = Sums()
    sums.add(torch.tensor(2.0), torch.eye(12)[:2], torch.tensor([0, 11]), solution)
    row = sums.row(12, ("forward",))
    assert (row["nfe_forward"], row["steps_forward"], row["attached_forward"]) == (5, 4, 1)
    assert (row["not_converged_forward"], row["loss"], row["accuracy"]) == (1, 2.0, 0.5)
    assert row["worst_residual_forward"] == pytest.approx(0.2)
    solution.backward = SimpleNamespace(
        nfe=9, nfe_total=9, steps=torch.tensor([7, 9, 9, 9]), converged=torch.tensor([True] * 4), backward=None,
        residuals=torch.tensor([[0.3, 0.4, 0.1, 0.1]]),
    )  # fmt: skip
    sums = Sums()
    sums.add(torch.tensor(1.0), torch.arange(12.0).repeat(4, 1), torch.tensor([11, 8, 7, 6]), solution)
    row = sums.row(12, ("backward",))
    assert (row["accuracy"], row["top5"]) == (0.25, 0.75)  # the five largest are 11, 10, 9, 8, 7
    assert (row["nfe_backward"], row["steps_backward"], row["attached_backward"]) == (9, 8.5, 0)
    assert (row["not_converged_backward"], row["worst_residual_backward"]) == (0, pytest.approx(0.4))


# ---------------------------------------------------------------- killed and resumed


class Killed(BaseException):
    """What a signal does to a process, inside one process."""


@pytest.mark.parametrize("after", [1, 3, 5, 8])
def test_stopped_after_any_step_ends_with_the_same_bits(after, undisturbed, tmp_path, monkeypatch):
    cfg, step, done = tiny(out=str(tmp_path), trace_epochs=[0, 2]), Run._one_step, [0]

    def one_step(self, *args):
        if done[0] == after:
            raise Killed
        done[0] += 1
        step(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if after == 8:  # all steps are done, the record is not yet there
            patch.setattr(training, "make_record", lambda *args: one_step(None))
        patch.setattr(Run, "_one_step", one_step)
        train(cfg, log=None)
    record = train(cfg, log=None)
    assert record["weights_sha256"] == undisturbed.record["weights_sha256"]
    assert numbers(read_record(tmp_path / RECORD)) == numbers(undisturbed.record)


@pytest.mark.parametrize("after", [2, 5])
def test_certified_family_stopped_after_any_step_ends_with_the_same_bits(after, tmp_path, monkeypatch):
    """With warm-up and label smoothing: the rate and the loss are functions of the place alone."""
    cfg, step, done = tiny_potential(expansion=2, warmup=0.4, label_smoothing=0.1), Run._one_step, [0]

    def one_step(self, *args):
        if done[0] == after:
            raise Killed
        done[0] += 1
        step(self, *args)

    plain = train(cfg, log=None)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "_one_step", one_step)
        train(cfg.changed(out=str(tmp_path)), log=None)
    assert (tmp_path / checkpoints.CHECKPOINT).exists() == (after >= cfg.checkpoint_every)
    resumed = train(cfg.changed(out=str(tmp_path)), log=None)
    assert resumed["weights_sha256"] == plain["weights_sha256"]
    assert numbers(jsonable(resumed)) == numbers(jsonable(plain))
    assert (
        resumed["certificate"]["train"]["spectral"] <= 0.8 * (1 + 1e-9)
        and resumed["model"]["config"]["block"] == "potential"
    )


def test_stopped_while_writing_keeps_the_old_checkpoint(tmp_path, monkeypatch, undisturbed):
    cfg, replace, calls = tiny(out=str(tmp_path), trace_epochs=[0, 2]), os.replace, [0]

    def interrupted(*args):
        calls[0] += 1
        if calls[0] == 2:
            raise Killed
        replace(*args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", interrupted)
        train(cfg, log=None)
    assert checkpoints.load_checkpoint(tmp_path / checkpoints.CHECKPOINT)["step"] == 3
    assert train(cfg, log=None)["weights_sha256"] == undisturbed.record["weights_sha256"]


def test_resumed_where_the_number_of_evaluations_changes(tmp_path, monkeypatch):
    """What the solver learnt from its last solve must not reach over a checkpoint: it decides where rounding happens."""
    cfg = tiny(a=1.0, c=2.0, n=3, lr=2e-2, tol=1e-4, epochs=1, train_images=128, checkpoint_every=1)
    step, taken = Run._one_step, []

    def one_step(self, *args):
        assert (self.memory.forward, self.memory.backward) == (None, None)  # a checkpoint came before
        step(self, *args)
        taken.append(self.memory.forward)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_one_step", one_step)
        plain = train(cfg, log=None)
    rise = next(k for k in range(1, len(taken)) if taken[k] != taken[k - 1])  # else the case is not hard
    cfg, done = cfg.changed(out=str(tmp_path)), [0]

    def stopped(self, *args):
        if done[0] == rise:
            raise Killed
        done[0] += 1
        step(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Run, "_one_step", stopped)
        train(cfg, log=None)
    assert train(cfg, log=None)["weights_sha256"] == plain["weights_sha256"]


def test_kill_9_at_random_moments(tmp_path):
    cfg = tiny(epochs=6, out=str(tmp_path / "killed"), checkpoint_every=1)
    words = [w for k, v in cfg.unlike_default().items() for w in ("-p", k, str(v))]
    command = [sys.executable, "-m", "lipmdeq", "train", *words]
    moments = random.Random(0)
    for k in range(2):
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        seen = stamp(cfg)
        while stamp(cfg) == seen and process.poll() is None:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"the run ended before it was killed, time {k}"
    assert not (tmp_path / "killed" / RECORD).exists()
    (tmp_path / "killed" / f".{checkpoints.CHECKPOINT}.1.part").touch()  # as if it was killed while writing
    resumed, plain = train(cfg, log=None), train(cfg.changed(out=""), log=None)
    assert resumed["weights_sha256"] == plain["weights_sha256"]
    assert numbers(resumed["history"]) == numbers(plain["history"])
    assert not list((tmp_path / "killed").glob(".*.part"))


def stamp(cfg: RunConfig) -> int:
    file = Path(cfg.out) / checkpoints.CHECKPOINT
    return file.stat().st_mtime_ns if file.exists() else 0


def test_finished_run_is_returned_at_once(undisturbed, monkeypatch):
    monkeypatch.setattr(training, "Run", None)
    cfg = tiny(out=str(undisturbed.out), trace_epochs=[0, 2])
    assert train(cfg)["weights_sha256"] == undisturbed.record["weights_sha256"]


def test_other_parameters_in_the_same_folder_are_refused(undisturbed, tmp_path):
    out = undisturbed.out
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(RunError, match="holds a run with a = 0.4, not 0.1; nothing was changed"):
        train(tiny(out=str(out), trace_epochs=[0, 2], a=0.1))
    run = open_run(tiny(), tmp_path)
    run._checkpoint()
    with pytest.raises(RunError, match="holds a run with seed = 0, not 5"):
        train(tiny(out=str(tmp_path), seed=5))
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_a_parameter_that_is_younger_than_a_run_had_its_default(tmp_path):
    older = {k: v for k, v in tiny().identity().items() if k != "label_smoothing"}
    same_run(tiny(), older, tmp_path)
    with pytest.raises(RunError, match=r"holds a run with label_smoothing = 0.0, not 0.1"):
        same_run(tiny(label_smoothing=0.1), older, tmp_path)


def test_two_runs_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LOCK_WAIT", 0.3)
    with open(tmp_path / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is running there"):
            train(tiny(out=str(tmp_path)))


# ---------------------------------------------------------------- damage


def test_one_changed_byte_is_reported(undisturbed, tmp_path, capsys):
    raw = (undisturbed.out / checkpoints.CHECKPOINT).read_bytes()
    path = tmp_path / checkpoints.CHECKPOINT
    for place in (30, 100, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        with pytest.raises(RunError, match="is damaged: its content does not have the sha256"):
            train(tiny(out=str(tmp_path), trace_epochs=[0, 2]))
    for content, message in ((raw[:-1], "is damaged"), (b"", "is not a checkpoint"), (raw[5:], "is not a checkpoint")):
        path.write_bytes(content)
        with pytest.raises(RunError, match=message):
            checkpoints.load_checkpoint(path)
        assert main(["certify", str(path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("lipmdeq certify: ") and said.count("\n") == 1


def with_checksum(path: Path, content: bytes, magic: str = checkpoints.OLD) -> Path:
    """A checkpoint of any content with the right first line."""
    path.write_bytes(f"{magic} {hashlib.sha256(content).hexdigest()}\n".encode() + content)
    return path


@pytest.mark.parametrize("magic", [checkpoints.OLD, checkpoints.MAGIC])
def test_pickled_code_is_not_executed(magic, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    torch.save(Evil(), tmp_path / "zip")  # inside torch's own container
    for content in (pickle.dumps(Evil()), (tmp_path / "zip").read_bytes(), b"{}\n" + pickle.dumps(Evil())):
        with pytest.raises(RunError, match="holds more than plain tensors"):
            checkpoints.load_checkpoint(with_checksum(tmp_path / "evil.ckpt", content, magic))
    assert not (tmp_path / "executed").exists()


def test_checkpoints_hold_no_pickle(undisturbed):
    """Two lines of text, then safetensors; nobody imports pickle to read it."""
    raw = (undisturbed.out / checkpoints.CHECKPOINT).read_bytes()
    head, text, tensors = raw.split(b"\n", 2)
    assert head.startswith(checkpoints.MAGIC.encode()) and json.loads(text)["epoch"] == 2
    found = safetensors.torch.load(tensors)
    assert {name.split("/")[1] for name in found} == {"model", "optimizer"}
    state = checkpoints.load_checkpoint(undisturbed.out / checkpoints.CHECKPOINT)
    assert all(torch.equal(found[f"/model/{name}"], value) for name, value in state["model"].items())


def test_run_goes_on_from_a_checkpoint_of_the_old_format(undisturbed, tmp_path, monkeypatch):
    """Also bit by bit: the file is what earlier versions wrote with torch.save, moments laid out as the weights."""
    cfg, save = tiny(out=str(tmp_path), trace_epochs=[0, 2]), checkpoints.save_checkpoint

    def old(path, state):
        buffer = io.BytesIO()
        torch.save(state, buffer)
        with_checksum(Path(path), buffer.getvalue())
        if state["step"] == 3:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoints, "save_checkpoint", old)
        train(cfg, log=None)
    assert (tmp_path / checkpoints.CHECKPOINT).read_bytes().startswith(checkpoints.OLD.encode())
    assert checkpoints.save_checkpoint is save
    assert train(cfg, log=None)["weights_sha256"] == undisturbed.record["weights_sha256"]
    assert (tmp_path / checkpoints.CHECKPOINT).read_bytes().startswith(checkpoints.MAGIC.encode())


def test_checkpoint_with_other_content_is_one_sentence(undisturbed, tmp_path, capsys):
    """D15: the right checksum over a state that is not that of a run."""
    whole = checkpoints.load_checkpoint(undisturbed.out / checkpoints.CHECKPOINT)
    cfg = tiny(out=str(tmp_path), trace_epochs=[0, 2])
    path = tmp_path / checkpoints.CHECKPOINT
    name, weight = next(iter(whole["model"].items()))
    fewer = {k: v for k, v in whole["model"].items() if k != name}
    cases = [{k: v for k, v in whole.items() if k != gone} for gone in whole if gone != "format"]
    cases += [{**whole, k: None} for k in whole if k != "format"]
    cases += [[], {}, {**whole, "model": fewer}, {**whole, "model": {**whole["model"], name: weight[..., None]}}]
    cases += [{**whole, "epoch": 99}, {**whole, "step": -1}, {**whole, "step": "1"}, {**whole, "history": []}]
    past, row = whole["past"], whole["history"][0]
    cases += [{**whole, "sums": {**whole["sums"], k: v}} for k, v in (("loss", "x"), ("images", None), ("seconds", {}))]
    cases += [{**whole, "history": [bad, *whole["history"][1:]]} for bad in ({"epoch": 1}, {**row, "train": {}}, 1)]
    cases += [{**whole, "past": {**past, k: v}} for k, v in (("seconds", "x"), ("commits", 3), ("started", 3))]
    cases += [{**whole, "epoch": True}]
    cases += [{**whole, "model_config": {**whole["model_config"], "channels": "x"}}, {**whole, "past": {"seconds": 1}}]
    for state in cases:
        checkpoints.save_checkpoint(path, state)
        before = path.read_bytes()
        changed = (
            state["model_config"] != whole["model_config"] if isinstance(state, dict) and "model_config" in state else 0
        )
        if not changed:  # a run makes its model from its parameters
            with pytest.raises(RunError) as error:
                train(cfg, log=None)
            assert str(path) in str(error.value) or "holds a run with" in str(error.value)
            assert "\n" not in str(error.value) and path.read_bytes() == before
        if (
            not isinstance(state, dict)
            or any(state.get(k) != whole[k] for k in ("parameters", "model_config"))
            or len(state.get("model") or ()) != len(whole["model"])
        ):
            assert main(["certify", str(path)]) == 1
            said = capsys.readouterr().err
            assert said.startswith("lipmdeq certify: checkpoint ") and said.count("\n") == 1, said


@pytest.mark.parametrize("change", [lambda w: w * float("nan"), lambda w: w + 1e300, lambda w: w.cfloat()])
def test_weights_that_are_no_numbers_are_not_certified(change, tmp_path, capsys, recwarn):
    """D15: also in the stem, of which the proof knows nothing."""
    state = checkpoints.load_checkpoint(ROOT / "results" / "digits" / "lipschitz" / "seed0.ckpt")
    state["model"]["stem.0.0.weight"] = change(state["model"]["stem.0.0.weight"].double())
    checkpoints.save_checkpoint(tmp_path / "x.ckpt", state)
    assert main(["certify", str(tmp_path / "x.ckpt")]) == 1
    said = capsys.readouterr().err
    assert (
        said.startswith("lipmdeq certify: checkpoint ")
        and "does not fit this version" in said
        and said.count("\n") == 1
    )
    assert "stem.0.0.weight has entries that are not finite numbers" in said or "loading state_dict" in said
    assert not recwarn


def test_a_run_that_does_not_converge_ends_in_silence(recwarn, monkeypatch):
    """D4: its record says so; and a bound of zero, as of a = 1e-300, divides nothing."""

    def far(model, *images, **how):
        Picard(tol=1e-9, max_iter=1).solve(torch.cos, torch.zeros(2, 3))
        return depth(model, *images, **how)

    monkeypatch.setattr(training, "depth", far)
    small = dict(epochs=1, train_images=16, batch=8, test_images=4, n=1)
    record = train(tiny(**small, max_forward=1, a=5e-324), log=None)
    assert record["certificate"]["test"]["perron"] == record["depth"]["tightness"] == 0
    assert not [w for w in recwarn if issubclass(w.category, SolverWarning)]


def test_packed_checkpoint_is_not_unpacked(tmp_path):
    """D15: a compressed archive could be a thousand times as large in memory."""
    raw = (ROOT / "results" / "digits" / "lipschitz" / "seed0.ckpt").read_bytes().partition(b"\n")[2]
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    with_checksum(tmp_path / "packed.ckpt", packed.getvalue())
    with pytest.raises(RunError, match="packed.ckpt holds more than plain tensors"):
        checkpoints.load_checkpoint(tmp_path / "packed.ckpt")


def test_record_without_a_field_of_its_certificate(undisturbed):
    record = read_record(undisturbed.out / RECORD)
    for certificate in ({}, None, {k: v for k, v in record["certificate"].items() if k != "layers"}):
        with pytest.raises(RunError, match="holds no certificate of this version"):
            certificate_of({**record, "certificate": certificate})


def test_unfinished_files_of_killed_runs_go(tmp_path):
    """D19: at the next start those of the dead; those that a living process writes stay."""
    left = [tmp_path / f".{name}.{pid}.part" for name in (checkpoints.CHECKPOINT, RECORD) for pid in (1, 99999999)]
    for path in left:
        path.write_text("half")
    other = files.atomic(tmp_path / "other.json")
    part = other.__enter__()
    part.write_text("of somebody who lives")
    train(tiny(epochs=1, out=str(tmp_path)), log=None)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.endswith(".part")) == [part.name]
    other.__exit__(None, None, None)
    assert (tmp_path / "other.json").read_text() == "of somebody who lives"
    assert not list(tmp_path.glob(".*.part"))


def test_divergence_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    cfg = tiny(lr=1e25, out=str(tmp_path), checkpoint_every=1)
    with pytest.raises(RunError, match="training diverged at epoch 1, step .*last good checkpoint is .*smaller lr"):
        train(cfg, log=None)
    with pytest.raises(RunError, match="training diverged"):
        train(cfg, log=None)
    state = checkpoints.load_checkpoint(tmp_path / checkpoints.CHECKPOINT)["model"]
    assert all(torch.isfinite(v).all() for v in state.values())
    assert not (tmp_path / RECORD).exists()


def test_nan_in_the_data_stops(tmp_path):
    run = open_run(tiny(), tmp_path)
    x, y = next(run.data.train.batches(16))
    with pytest.raises(RunError, match="the loss is nan; there is no checkpoint yet"):
        run._one_step(x * float("nan"), y, 0.0)
    run._check(999 * math.log(10), 1.0)
    with pytest.raises(RunError, match="the loss is 2.3e.03, 1000 times that of guessing"):
        run._check(1001 * math.log(10), 1.0)
    with pytest.raises(RunError, match="the loss is inf"):
        run._check(1.0, math.inf)  # of smoothing or regularisation


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    run = open_run(tiny(), tmp_path)
    run._checkpoint()
    before = run.file.read_bytes()
    with torch.no_grad():
        run.model.head.classifier.bias[0] = math.inf
    with pytest.raises(
        RunError, match="head.classifier.bias has entries that are not finite; the last good checkpoint is"
    ):
        run._checkpoint()
    assert run.file.read_bytes() == before


def test_full_disk_and_unwritable_folder(tmp_path):
    run = open_run(tiny(), tmp_path)
    run._checkpoint()
    before = run.file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RunError, match=r"cannot be written \(File too large\); the last complete file is kept"):
            run._checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [checkpoints.CHECKPOINT]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        train(tiny(out=str(tmp_path / "file" / "run")))


def test_what_does_not_fit_the_data_or_the_machine():
    for changes, message in (
        (dict(n=9), "n = 9: must be a whole number from 1 to 3"),
        (dict(data="nothing"), "data = 'nothing': must be"),
        (dict(train_images=10**6), "train_images = 1000000"),
        (dict(batch=65), "batch = 65: must be at most the number of training images, 64"),
        (dict(precision="tf32"), "precision = 'tf32'"),
        (dict(threads=1000), "threads = 1000: must be at most [0-9]+, four times the number of cores"),
        (dict(preset="cpu", n=None), "image_size|8"),
    ):
        if "preset" in changes:
            changes["resolution"] = 4
        with pytest.raises(ParameterError, match=message):
            train(tiny(**changes))
    if not torch.cuda.is_available():
        with pytest.raises(ParameterError, match="device = 'cuda': must be auto or cpu"):
            train(tiny(device="cuda"))


# ---------------------------------------------------------------- what is computed


def test_learning_rate_is_a_cosine():
    cfg = tiny(lr=0.1)
    assert learning_rate(cfg, 0, 100) == pytest.approx(0.1)
    assert learning_rate(cfg, 50, 100) == pytest.approx(0.05, rel=1e-3)
    assert 1e-6 < learning_rate(cfg, 99, 100) < 1e-4
    assert learning_rate(cfg, 100, 100) == pytest.approx(1e-6)


def test_learning_rate_rises_in_a_line_then_falls_as_a_cosine():
    cfg = tiny(lr=0.1, warmup=0.2)
    rates = [learning_rate(cfg, step, 100) for step in range(101)]
    assert rates[:20] == pytest.approx([0.1 * k / 20 for k in range(1, 21)])
    assert rates[20:] == pytest.approx([1e-6 + (0.1 - 1e-6) * (1 + math.cos(math.pi * k / 80)) / 2 for k in range(81)])
    assert max(rates) == pytest.approx(0.1) and rates[-1] == pytest.approx(1e-6)
    assert learning_rate(tiny(lr=0.1, warmup=0.009), 0, 100) == pytest.approx(0.1)  # less than a step: no rise


def test_steps_are_taken_at_that_rate(tmp_path, monkeypatch):
    run, step, used = open_run(tiny(warmup=0.5, epochs=1, lr=0.01), tmp_path), Run._one_step, []

    def one_step(self, *args):
        step(self, *args)
        used.append(self.adam.param_groups[0]["lr"])

    monkeypatch.setattr(Run, "_one_step", one_step)
    run._one_epoch()
    assert used == pytest.approx([0.005, 0.01, 0.01, (0.01 + 1e-6) / 2])


def test_label_smoothing_changes_what_is_minimised_not_what_is_recorded(tmp_path):
    """The gradient of the last bias in closed form: softmax minus the smoothed target."""
    share, losses = 0.25, []
    for smoothing in (0.0, share):
        run = open_run(tiny(p=0.0, label_smoothing=smoothing), tmp_path)
        x, y = next(run.data.train.batches(16))
        run.model.train()
        loss, ce, logits, _ = run.batch(x, y)
        target = torch.nn.functional.one_hot(y, 10) * (1 - smoothing) + smoothing / 10
        plain = torch.nn.functional.cross_entropy(logits, y)
        torch.testing.assert_close(ce, plain)
        torch.testing.assert_close(loss.detach(), -(target * logits.log_softmax(1)).sum(1).mean())
        run._one_step(x, y, 0.0)
        assert run.sums.settle().loss == pytest.approx(float(plain) * len(y), rel=1e-5)
        torch.testing.assert_close(
            run.model.head.classifier.bias.grad, (logits.softmax(1) - target).mean(0), rtol=1e-4, atol=1e-6
        )
        losses.append(float(loss.detach()) - float(plain))
    assert losses[0] == 0 and abs(losses[1]) > 1e-4
    tests = one_batch.evaluate(run.model, run.data.test, 16, run.world)
    with torch.no_grad():
        x, y = next(run.data.test.batches(40))
        plain = torch.nn.functional.cross_entropy(run.model.eval()(x), y)
    assert tests.loss / tests.images == pytest.approx(float(plain), rel=1e-4)


@pytest.mark.parametrize("make", [tiny, tiny_potential])
@pytest.mark.parametrize("k", [1, 4])
def test_unrolled_is_k_plain_applications(make, k, tmp_path):
    """An explicit network: f is evaluated k times in training and in test, and the gradient is that of plain backpropagation."""
    run = open_run(make(method="unrolled", steps=k, p=0.0), tmp_path)
    model, calls, forward = run.model.train(), [0], run.model.f.forward
    model.f.forward = lambda *a: (calls.__setitem__(0, calls[0] + 1), forward(*a))[1]
    x, y = next(run.data.train.batches(16))
    loss, _, _, solution = run.batch(x, y)
    loss.backward()
    assert calls[0] == k == solution.nfe == solution.nfe_total
    found = {name: w.grad.clone() for name, w in model.named_parameters()}
    model.zero_grad()
    f, z, _ = model.problem(x)
    for _ in range(k):
        z = f(z)
    torch.nn.functional.cross_entropy(model.head(z), y).backward()
    for name, w in model.named_parameters():
        torch.testing.assert_close(found[name], w.grad, rtol=1e-5, atol=1e-8, msg=name)
    calls[0] = 0
    row = one_batch.evaluate(model, run.data.test, 40, run.world).row(10, ("forward",))
    assert calls[0] == k == row["nfe_forward"]


@pytest.mark.parametrize(("every", "proofs"), [(1, [1, 1, 1, 1, 1]), (3, [0, 0, 1, 0, 1]), (50, [0, 0, 0, 0, 1])])
def test_norms_are_proved_at_the_end_however_often_before(every, proofs, tmp_path):
    """Between proofs norms are estimated; what is evaluated and kept is proved, and the record says what a proof found."""
    run = open_run(tiny(epochs=1, prove_every=every, checkpoint_every=100, lr=2e-2), tmp_path)
    asked, told, constrain = [], [], run.model.constrain
    run.model.constrain = lambda prove=True: (asked.append(int(prove)), told.append(constrain(prove)))[1] or told[-1]
    run._one_epoch()
    assert asked == proofs
    layers = [layer for layer in certify(run.model, measure=False).layers if layer["limit"] is not None]
    assert layers and all(layer["norm"] <= layer["limit"] * (1 + 1e-6) for layer in layers)
    worst = run.history[0]["lipschitz"]["worst_over_c"]
    assert math.isfinite(worst) and worst == max(told) > 0.5
    state = checkpoints.load_checkpoint(run.file)["model"]
    assert all(torch.equal(v, run.model.state_dict()[k]) for k, v in state.items())


def test_old_checkpoints_are_of_the_papers_block():
    path = ROOT / "results" / "digits" / "lipschitz" / "seed0.ckpt"
    model = checkpoints.load_model(path, read_record(path.with_suffix(".json")))
    assert "block" not in checkpoints.load_checkpoint(path)["model_config"], "no old one any more"
    assert (model.cfg.block, model.cfg.injection) == ("paper", "first")


def test_jacobian_regularisation_is_on_for_few_early_steps():
    cfg = RunConfig(jacobian_weight=0.5, epochs=200)
    early = [jacobian_weight(cfg, e, s) for e in range(90) for s in range(20)]
    assert set(early) == {0.0, 0.5}
    assert 0.03 < sum(w > 0 for w in early) / len(early) < 0.07
    assert not any(jacobian_weight(cfg, e, s) for e in range(90, 200) for s in range(20))


@pytest.mark.parametrize(
    "changes",
    [
        dict(method="jfb", train_stem=False),
        dict(method="jfb", train_stem=True),
        dict(method="phantom", solver="picard"),
        dict(jacobian_weight=0.5, solver="broyden", model="mdeq"),
        dict(precision="bfloat16", tol=0.01, ablation="S3"),
    ],
    ids=str,
)
def test_methods(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(one_batch, "JACOBIAN_RATE", 1.0)
    cfg = tiny(epochs=1, **changes)
    run = open_run(cfg, tmp_path)
    start = {k: v.clone() for k, v in run.model.state_dict().items()}
    run._one_epoch()
    for name, p in run.model.named_parameters():
        frozen = name.startswith("stem") and not cfg.train_stem
        assert torch.equal(p, start[name]) == frozen, name
    assert ("nfe_backward" in run.history[0]["train"]) == (cfg.method == "implicit")
    proof = certify(run.model, measure=False)
    better = {**run.history[0], "test": {**run.history[0]["test"], "accuracy": 1.0, "loss": 0.0}}
    if cfg.method == "implicit":
        run.history[0]["train"]["steps_backward"] = 0.25  # of an image; a solve of the batch takes more
    run.history.insert(0, better)  # an earlier epoch; the result is that of the last one
    report = depth(run.model, *run._images(10), certificate=proof)
    write_json(tmp_path / "record.json", make_record(run, proof, report))
    record = read_record(tmp_path / "record.json")
    last, counts = run.history[-1], record["model"]
    assert record["result"]["accuracy"] == last["test"]["accuracy"] < 1
    spent = last["train"]["nfe_forward"], last["train"]["attached_forward"]
    assert record["result"]["calls_train_forward"] == pytest.approx(sum(spent)) and sum(spent) >= spent[0] >= 1
    assert record["result"]["nfe_train_backward"] == last["train"].get("nfe_backward")
    assert counts["parameters"] - counts["trained"] == (
        0 if cfg.train_stem else sum(p.numel() for p in run.model.stem.parameters())
    )
    assert "test accuracy, last epoch" in str(Summary(record)) and "<table>" in Summary(record)._repr_html_()
    assert len(curves(record).axes) == 3


def test_validation_split():
    r = train(tiny(epochs=3, eval_every=2, eval_split="val", val_images=50), log=None)
    assert [h["val"] is None for h in r["history"]] == [True, False, False]
    assert (
        r["result"]["split"] == "val" and r["result"]["images"] == 50 == r["data"]["evaluated"] == r["depth"]["images"]
    )
    assert all("test" not in h for h in r["history"])


def test_solvers_are_those_of_the_parameters():
    cfg = tiny(tol=1e-2, max_forward=7, max_backward=9)
    assert make_solver(cfg, cfg.max_forward) == Anderson(tol=1e-2, max_iter=7)
    assert make_adjoint(cfg) == Implicit(Anderson(tol=1e-2, max_iter=9))
    assert make_solver(cfg.changed(solver="broyden"), 3, tol=0.0) == Broyden(tol=0.0, max_iter=3)
    assert make_solver(cfg.changed(solver="picard"), 3) == Picard(tol=1e-2, max_iter=3)
    assert make_adjoint(cfg.changed(method="jfb")) == JFB()
    assert make_adjoint(cfg.changed(method="unrolled", steps=3)) == Unrolled(3)
    assert make_adjoint(cfg.changed(method="phantom", phantom_steps=3, phantom_damping=0.7)) == Phantom(3, 0.7)
    model = new_model(cfg, training.open_data(cfg, torch.device("cpu")))
    assert (model.solver, model.adjoint) == (make_solver(cfg, 7), make_adjoint(cfg))


def test_jacobian_regularisation_is_added_to_the_loss(tmp_path):
    """The same estimate, from the same random vectors, taken by hand; cross-entropy is recorded without it."""
    run = open_run(tiny(p=0.0), tmp_path)
    x, y = next(run.data.train.batches(16))
    run.model.train()
    _, solution = run.model.equilibrium(x, pair=True)
    torch.manual_seed(5)
    estimate = float(jacobian_regularisation(*solution.pair, samples=2).detach())
    torch.manual_seed(5)
    loss, ce, logits, _ = run.batch(x, y, 1e5)
    torch.testing.assert_close(ce, torch.nn.functional.cross_entropy(logits, y))
    assert float(loss.detach() - ce) == pytest.approx(1e5 * estimate, rel=1e-3)
    assert 1e5 * estimate > 1e-2 * float(ce), "the fresh Jacobian is small: a small weight would drown in rounding"


def test_bfloat16_is_evaluated_and_proved_as_it_runs(tmp_path):
    """Evaluation is under autocast as training is; both certificates are for kernels that are rounded."""
    cfg = tiny(precision="bfloat16", tol=0.01, epochs=1)
    run, casts = open_run(cfg, tmp_path), []
    forward = run.model.f.forward
    run.model.f.forward = lambda *a: (casts.append(torch.is_autocast_enabled("cpu")), forward(*a))[1]
    one_batch.evaluate(run.model, run.data.test, 40, run.world)
    assert casts and all(casts)
    record = train(cfg, log=None)
    assert record["certificate"]["dtype"] == "bfloat16"
    for mode in ("test", "train"):
        assert record["history"][-1]["lipschitz"][mode] == record["certificate"][mode]["perron"]


def test_bar_only_where_somebody_looks(capsys, monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    lines = []
    train(tiny(epochs=1), log=lines.append)
    said = capsys.readouterr()
    assert len(lines) == 1 and lines[0].startswith("epoch   1/1  loss ") and not said.out and not said.err


def test_streams_are_unrelated():
    seeds = {
        stream(purpose, seed, epoch, step)
        for purpose in (11, 12)
        for seed in (0, 1)
        for epoch in (0, 1)
        for step in (0, 1)
    }
    assert len(seeds) == 16 and all(0 <= s < 2**63 for s in seeds)


# ---------------------------------------------------------------- shell


def test_commands(undisturbed, tmp_path, capsys):
    for words, message in (
        (["-p", "a", "7"], "lipmdeq train: a = 7: must be in (0, 1]"),
        (["-p", "slope", "0.4"], "lipmdeq train: slope = 0.4: not a parameter"),
        (["-f", str(tmp_path / "no.yaml")], "lipmdeq train: config = "),
        (["-p", "data", "nothing"], "lipmdeq train: data = 'nothing': must be"),
    ):
        assert main(["train", *words]) == 1
        said = capsys.readouterr().err
        assert said.startswith(message) and said.count("\n") == 1
    (tmp_path / "run.yaml").write_text("epochs: 1\nn: 2\ntrain_images: 32\ntest_images: 20\nbatch: 16\n")
    assert main(["train", "-f", str(tmp_path / "run.yaml"), "-p", "out", str(tmp_path / "run")]) == 0
    assert "test accuracy" in capsys.readouterr().out
    checkpoint = str(undisturbed.out / checkpoints.CHECKPOINT)
    assert main(["certify", checkpoint, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fingerprint"] == undisturbed.record["certificate"]["fingerprint"]
    assert found["test"] == undisturbed.record["certificate"]["test"]
    assert main(["certify", checkpoint, "--image-size", "16"]) == 0
    assert "images 16x16: contraction PROVED" in capsys.readouterr().out
    for words, message in (
        ([str(tmp_path / "none.ckpt")], "cannot be read (No such file or directory)"),
        ([checkpoint, "--image-size", "3"], "image_size = 3: must be a multiple of 2"),
    ):
        assert main(["certify", *words]) == 1
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_exported_weights_are_small_and_keep_their_bounds(undisturbed, tmp_path):
    source, path = undisturbed.out / checkpoints.CHECKPOINT, tmp_path / "seed0.ckpt"
    checkpoints.export_weights(source, path)
    assert path.stat().st_size < 0.3 * source.stat().st_size
    full, small = checkpoints.load_model(source), checkpoints.load_model(path)
    kept = checkpoints.load_checkpoint(path)["model"]
    assert {v.dtype for v in kept.values() if v.ndim == 1} == {torch.float32}  # variances may be too small for a half
    x, _ = next(training.open_data(tiny(), torch.device("cpu")).test.batches(40))
    with torch.no_grad():
        assert (full(x) - small(x)).norm() <= 1e-2 * full(x).norm()
    for layer in certify(small, measure=False).layers:
        assert layer["limit"] is None or layer["norm"] <= layer["limit"] * (1 + 1e-6), layer


def test_exported_weights_that_round_above_their_bound_are_scaled(undisturbed, tmp_path):
    """Two entries of c/√2 in a row: their neighbours in half precision lie above, and ‖W‖ above c."""
    state = checkpoints.load_checkpoint(undisturbed.out / checkpoints.CHECKPOINT)
    name, c = "f.post.0.pair.0.weight", TINY["c"]
    state["model"][name].zero_()[0, :2, 0, 0] = c / math.sqrt(2) * (1 - 1e-6)
    assert state["model"][name].half().double().norm() > 1.0003 * c > c >= state["model"][name].double().norm()
    checkpoints.save_checkpoint(tmp_path / "full.ckpt", state)
    checkpoints.export_weights(tmp_path / "full.ckpt", tmp_path / "half.ckpt")
    conv = checkpoints.load_model(tmp_path / "half.ckpt").f.post[0].pair.conv
    assert 0.99 * c < conv.kernel().detach().double().norm() <= c


def test_weights_are_those_that_the_record_describes(undisturbed, tmp_path):
    """Full and in half precision; one weight that differs in its last bit is refused in one sentence."""
    source, small = undisturbed.out / checkpoints.CHECKPOINT, tmp_path / "seed0.ckpt"
    record = read_record(undisturbed.out / RECORD)
    checkpoints.export_weights(source, small)
    for path in (source, small):
        checkpoints.load_model(path, record)
        state = checkpoints.load_checkpoint(path)
        first = next(v for v in state["model"].values() if v.ndim == 4)
        first.view(torch.int16 if first.dtype == torch.float16 else torch.int32)[0, 0, 0, 0] ^= 1
        checkpoints.save_checkpoint(tmp_path / "other.ckpt", state)
        with pytest.raises(RunError, match="holds other weights than its record describes"):
            checkpoints.load_model(tmp_path / "other.ckpt", record)
    old = {k: v for k, v in record.items() if k != "half_sha256"}
    checkpoints.load_model(source, old)
    with pytest.raises(RunError, match="holds other weights"):
        checkpoints.load_model(small, {**old, "weights_sha256": None})


def test_sealing_a_file(undisturbed, tmp_path, capsys):
    """A file without a seal gets one; a seal that does not fit stays an error."""
    record = read_record(undisturbed.out / RECORD)
    path = tmp_path / "record.json"
    path.write_text(json.dumps({k: v for k, v in record.items() if k != "sha256"}))
    with pytest.raises(RunError, match="python -m lipmdeq seal"):
        read_record(path)
    for _ in range(2):
        assert main(["seal", str(path)]) == 0
        assert read_record(path) == record
    path.write_text(json.dumps({**record, "scale": "larger"}))
    before, said = path.read_bytes(), capsys.readouterr()
    assert main(["seal", str(path), str(tmp_path / "none.json")]) == 1
    said = capsys.readouterr().err
    assert "was changed after it was written" in said and said.count("\n") == 1
    assert path.read_bytes() == before


# ---------------------------------------------------------------- several processes

BOTH = """
import sys, torch
from lipmdeq.experiments.world import World
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.training import Batch, new_model, open_data, train
cfg = RunConfig(p=0.0, batch=16, tol=1e-9, max_forward=60, max_backward=60, device="cpu", out="x")
world = World.open(cfg)
data = open_data(cfg, world.device)
model = new_model(cfg, data).double()
for m in model.modules():
    m.eval() if isinstance(m, torch.nn.BatchNorm2d) else None
with torch.no_grad():  # far from the start, where most gradients vanish
    for q in model.parameters():
        q.add_(torch.randn(q.shape, generator=torch.Generator().manual_seed(q.numel())), alpha=0.1)
model.constrain()
x, y = next(data.train.batches(16, train=True, drop_last=True, rank=world.rank, world=world.size))
shared = world.wrap(Batch(model))
loss, *_ = shared(x.double(), y)
loss.backward()
torch.save([p.grad for p in model.parameters()], f"{sys.argv[1]}-{world.rank}.pt")
if world.size > 1:
    record = train(RunConfig(**eval(sys.argv[2])))
    torch.save(record["weights_sha256"], f"sha-{world.rank}.pt")
world.close()
"""


@pytest.mark.slow
def test_two_processes(tmp_path, monkeypatch):
    """The gradients of one process with the whole batch, with BatchNorm in test mode: on CPUs batch statistics are
    those of each process. Then a whole run: one process writes, both end with the same record."""
    (tmp_path / "both.py").write_text(BOTH)
    cfg = tiny(out="run")
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "both.py",
        "two",
        repr(cfg.to_dict()),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    two = subprocess.Popen(
        [sys.executable, *launch], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["both.py", "one"])
    exec(BOTH, {})
    try:
        out, err = two.communicate(timeout=200)
    finally:
        two.terminate()
    assert two.returncode == 0, err[-2000:]
    one, *both = (torch.load(f"{k}.pt", weights_only=True) for k in ("one-0", "two-0", "two-1"))
    for grads in both:
        assert len(grads) == len(one)
        for a, b in zip(one, grads, strict=True):
            assert a.norm() > 1e-6 and (a - b).norm() <= 1e-6 * a.norm()
    assert out.count("epoch   1/2") == 1  # one process talks
    record = read_record("run/record.json")
    assert record["machine"]["processes"] == 2
    assert [h["train"]["images"] for h in record["history"]] == [64, 64]
    assert record["result"]["images"] == 40
    assert certificate_of(record).matches(checkpoints.load_model("run/checkpoint.ckpt"))
    assert torch.load("sha-0.pt") == torch.load("sha-1.pt") == record["weights_sha256"]


LISTENS = """
import os, sys
from lipmdeq.experiments.world import World
from lipmdeq.experiments.parameters import RunConfig
world = World.open(RunConfig(device="cpu"))
assert world.total([1.0]) == [2.0]
links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
mine = {os.readlink(link) for link in links if os.path.lexists(link)}
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for words in (line.split() for line in open(table).read().splitlines()[1:]):
        if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
            print(words[1].split(":")[0])
world.wait()
world.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net/tcp on this system")
@pytest.mark.parametrize("address", [None, "localhost", "::1"])
def test_processes_listen_on_loopback_only(address, tmp_path):
    """D21: two processes that were started by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    env |= {"MASTER_ADDR": address} if address else {}
    both = [
        subprocess.Popen([sys.executable, "-c", LISTENS], env=env | {"RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    found = [process.communicate(timeout=200)[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    inside = {"0100007F", "0" * 24 + "01000000"}
    assert found[0] and {where for where in found[0] + found[1]} <= inside, found


def test_a_killed_process_ends_the_others(tmp_path):
    """One of two processes is killed in the middle of a run: the other one ends within a minute, in one sentence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    words = ["train", "-p", "out", str(tmp_path), "-p", "epochs", "500", "-p", "train_images", "64"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "lipmdeq", *words], env=env | {"RANK": rank}, stderr=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    try:
        assert both[0].stdout.readline().startswith("epoch")
        both[1].kill()
        _, said = both[0].communicate(timeout=60)
    finally:
        both[0].kill()
        both[1].communicate()
    assert both[0].returncode == 1
    assert "process 0 of 2 stops: another one has ended or does not answer" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0': must be a whole number"),
        ({"WORLD_SIZE": "2"}, "RANK = '': must be a whole number from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = '2': must be a whole number from 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT = 'x': must be a whole number"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT = '70000': must be"),
    ],
)
def test_bad_environment_of_a_launcher(changes, message, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ParameterError, match=message):
        World.open(tiny())


def test_port_that_is_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": "2",
            "RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("TORCHELASTIC_RUN_ID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "lo")  # restored afterwards
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        with pytest.raises(RunError, match=f"MASTER_PORT = {port}: cannot be used"):
            World.open(tiny())
