"""The training loop: the same for the notebook, the shell and torchrun; killed anywhere, it goes on where it was.

Everything random is a function of (seed, epoch, step, process), seeded anew at each step, and a checkpoint holds the
rest: weights, Adam's moments, position, sums of the epoch so far, history. What a constraint remembers between steps
(``Conv._guard``) is dropped at each checkpoint. So a run that was killed and started again ends with the same bits as
one that was not, on a CPU with the same number of threads.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import TypeAdapter
from torch import nn

from lipmdeq.certificate import certify
from lipmdeq.data import DataError, Dataset, load
from lipmdeq.experiments import checkpoints
from lipmdeq.experiments.depth_report import PROBED, depth
from lipmdeq.experiments.parameters import ParameterError, RunConfig, RunError
from lipmdeq.experiments.record import FORMAT, RECORD, Epoch, Part, read_record, same_run, write_json
from lipmdeq.experiments.report import epoch_line, make_record
from lipmdeq.experiments.step import (
    CLOCKS,
    INIT,
    STEP,
    TRACE_IMAGES,
    Batch,
    Sums,
    evaluate,
    jacobian_weight,
    learning_rate,
    make_adjoint,
    make_solver,
    residual_traces,
    stream,
)
from lipmdeq.experiments.world import World, git_commit, now, progress_bar
from lipmdeq.jacobian import Measurement
from lipmdeq.model import build
from lipmdeq.model.layers import Conv
from lipmdeq.solvers import Memory, SolverWarning

DIVERGED = 1000  # times the loss of guessing, ln(classes), beyond which a run is stopped
ROUNDED = {"bfloat16": torch.bfloat16, "tf32": "tf32"}  # precision -> how f reads its kernels, for which L is proved
DEPTH_IMAGES = 2000  # evaluated images on which the depth report is made
Log = Callable[[str], None]


def train(cfg: RunConfig, log: Log | None = print) -> dict:
    """Train, or go on training, and return the record of the run (see :mod:`lipmdeq.experiments`).

    The folder ``cfg.out`` holds ``record.json`` and ``checkpoint.ckpt``: a finished run is returned at once, an
    unfinished one goes on from its last checkpoint, a run with other parameters is refused. Without a folder,
    everything happens in a temporary one.

    Args:
        cfg: the parameters.
        log: gets one line for each epoch; None for silence.

    Raises:
        ParameterError: a parameter does not fit the data, the model or the machine.
        RunError: damaged or unreadable files, a full disk, divergence, a process that is gone.
    """
    world = World.open(cfg)
    try:
        if not cfg.out and world.size > 1:
            raise ParameterError("out = '': must be a folder when several processes share a run")
        place = nullcontext(cfg.out) if cfg.out else TemporaryDirectory(prefix="lipmdeq-")
        with torch.cuda.stream(world.stream), place as folder:
            return _train_in(Path(folder), cfg, world, log)
    except RuntimeError as e:
        if world.lost(e):
            raise RunError(
                f"process {world.rank} of {world.size} stops: another one has ended or does not answer; "
                f"{cfg.out} keeps the last checkpoint, the same command goes on there"
            ) from None
        raise
    finally:
        world.close()


def _train_in(out: Path, cfg: RunConfig, world: World, log: Log | None) -> dict:
    with checkpoints.locked(out, world.writes):
        world.wait()
        if (out / RECORD).exists():
            record = read_record(out / RECORD)
            same_run(cfg, record["parameters"], out)
            return record
        return Run(cfg, out, world, log).finish()


def open_data(cfg: RunConfig, device: torch.device) -> Dataset:
    """The data set of a run on its device; what is wrong with it in one sentence."""
    root = Path(cfg.data_root)
    if not root.exists() and not root.is_absolute() and (Path("..") / root).exists():
        root = Path("..") / root  # a notebook runs in notebooks/
    try:
        chosen = {name: getattr(cfg, name) for name in ("train_images", "val_images", "test_images", "resolution")}
        data = load(cfg.data, root, **chosen)
    except DataError as e:
        raise RunError(str(e)) from None
    except ValueError as e:
        raise ParameterError(str(e)) from None
    if cfg.batch > len(data.train):
        raise ParameterError(f"batch = {cfg.batch}: must be at most the number of training images, {len(data.train)}")
    return data.to(device)


def test_images(cfg: RunConfig, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first test images of a run's data set, (count, C, H, W) and their labels, on the CPU."""
    if count < 1:
        raise ParameterError(f"images = {count}: must be a whole number >= 1")
    data = open_data(cfg.changed(val_images=0, eval_split="test"), torch.device("cpu"))
    return next(iter(data.test.batches(min(count, len(data.test)))))


def new_model(cfg: RunConfig, data: Dataset) -> nn.Module:
    """A model with random weights for the images of a data set."""
    torch.manual_seed(stream(INIT, cfg.seed))
    changes = dict(image_size=data.size, in_channels=data.in_channels, classes=len(data.classes))
    try:
        how = dict(solver=make_solver(cfg, cfg.max_forward), adjoint=make_adjoint(cfg))
        model = build(cfg.preset, cfg.model, cfg.ablation, **how, **changes, **cfg.model_changes())
    except ValueError as e:
        raise ParameterError(str(e)) from None
    model.stem.requires_grad_(cfg.train_stem)
    return model


class Past(Part):
    """What a run brings along from its earlier sessions."""

    started: str
    commits: list[str | None]
    seconds: float


class Run:
    """One run, from its first step or its last checkpoint to its record."""

    def __init__(self, cfg: RunConfig, out: Path, world: World, log: Log | None = None):
        self.cfg, self.out, self.world = cfg, out, world
        self.log = log if log is not None and world.writes else (lambda line: None)
        self.data = open_data(cfg, world.device)
        self.model = world.prepare(new_model(cfg, self.data))
        self.memory = Memory()
        self.batch = world.wrap(Batch(self.model, world.autocast, cfg.label_smoothing, self.memory))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.Adam(trained, lr=cfg.lr, fused=True)
        self.steps = self.data.train.steps(cfg.batch, drop_last=True)
        self.epoch, self.step, self.sums = 0, 0, Sums()
        self.history: list[dict] = []
        self.traces: list[dict] = []
        self.past = {"started": now(), "commits": [git_commit()], "seconds": 0.0}
        self.clock = time.perf_counter()
        self._resume()

    # -------------------------------------------------------------- checkpoints

    @property
    def file(self) -> Path:
        return self.out / checkpoints.CHECKPOINT

    def _resume(self) -> None:
        if not self.file.exists():
            self._trace(0)
            return
        state = checkpoints.load_checkpoint(self.file)
        same_run(self.cfg, state["parameters"], self.out)
        try:
            self._restore(state)
        except checkpoints.UNFIT as e:
            raise checkpoints.unfit(self.file, e) from None
        commit = git_commit()
        if commit not in self.past["commits"]:
            self.past["commits"].append(commit)
        if self.epoch < self.cfg.epochs:
            self.log(f"resumed at epoch {self.epoch + 1}, step {self.step} of {self.steps}")

    def _restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self._restore_adam(state["optimizer"])
        self._forget()
        self.epoch, self.step = state["epoch"], state["step"]
        # The sums are those of all processes: one of them goes on with them.
        sums = TypeAdapter(Sums).validate_python(state["sums"])
        sums.seconds = {c: sums.seconds[c] for c in CLOCKS}
        self.sums = sums if self.world.writes else Sums()
        self.history, self.traces = state["history"], state["traces"]
        for row in self.history:  # the record is made of them, at the end of the run
            Epoch.model_validate({**row, "seconds": {c: row["seconds"][c] for c in (*CLOCKS, "train")}})
        self.past = Past.model_validate(state["past"]).model_dump()
        whole = type(self.epoch) is int and type(self.step) is int
        if not whole or not 0 <= self.epoch <= self.cfg.epochs or not 0 <= self.step < self.steps:
            raise ValueError(f"epoch = {self.epoch}, step = {self.step}")
        if [h["epoch"] for h in self.history] != list(range(1, self.epoch + 1)):
            raise ValueError("history has other epochs than were run")
        if [t["epoch"] for t in self.traces] != [e for e in self.cfg.trace_epochs if e <= self.epoch]:
            raise ValueError("traces have other epochs than were asked for")

    def _restore_adam(self, state: dict) -> None:
        """Names in JSON are text; a file knows no layout of tensors, and Adam's moments must lie in memory as the weights do."""
        self.adam.load_state_dict({**state, "state": {int(k): v for k, v in state["state"].items()}})
        for weight, moments in self.adam.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = torch.empty_like(weight).copy_(moments[name])

    def _checkpoint(self) -> None:
        """Save, unless the weights are not finite: the last good checkpoint stays."""
        sums = self.sums.over(self.world)
        self._forget()
        if not self.world.writes:
            return
        bad = [name for name, p in self.model.named_parameters() if not torch.isfinite(p).all()]
        if bad:
            self._stop(f"{bad[0]} has entries that are not finite")
        past = {**self.past, "seconds": self.past["seconds"] + time.perf_counter() - self.clock}
        state = dict(
            format=FORMAT,
            parameters=self.cfg.to_dict(),
            model_config=self.model.cfg.to_dict(),
            model=self.model.state_dict(),
            optimizer=self.adam.state_dict(),
            epoch=self.epoch,
            step=self.step,
            sums=asdict(sums),
            history=self.history,
            traces=self.traces,
            past=past,
        )
        checkpoints.save_checkpoint(self.file, state)

    def _forget(self) -> None:
        """What constraints and solvers remember is not saved, so nobody may know it after a checkpoint."""
        self.memory.forget()
        for module in self.model.f.modules():
            if isinstance(module, Conv):
                module.forget()

    def _stop(self, why: str) -> None:
        left = f"the last good checkpoint is {self.file}" if self.file.exists() else "there is no checkpoint yet"
        raise RunError(
            f"training diverged at epoch {self.epoch + 1}, step {self.step}: {why}; {left}; "
            f"try a smaller lr than {self.cfg.lr:g}"
        )

    # -------------------------------------------------------------- the loop

    def finish(self) -> dict:
        """All that is left to do; returns and writes the record."""
        record = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SolverWarning)  # counted in the history, and said in the record
            while self.epoch < self.cfg.epochs:
                self._one_epoch()
            self.world.wait()
            if self.world.writes:
                model = self._copy().eval()
                proof = certify(model, x=self._images(PROBED)[0], dtype=ROUNDED.get(self.cfg.precision), progress=False)
                record = make_record(self, proof, depth(model, *self._images(DEPTH_IMAGES), certificate=proof))
                write_json(self.out / RECORD, record)
        self.world.wait()
        return record or read_record(self.out / RECORD)

    def _one_epoch(self) -> None:
        cfg, world = self.cfg, self.world
        place = dict(epoch=self.epoch, start=self.step, rank=world.rank, world=world.size)
        batches = self.data.train.batches(cfg.batch, train=True, seed=cfg.seed, drop_last=True, **place)
        self.model.train()
        with progress_bar(self.steps, self.step, f"epoch {self.epoch + 1}/{cfg.epochs}") as bar:
            mark = time.perf_counter()
            for x, y in batches:
                mark = self._tick("data", mark)
                self._one_step(x, y, mark)
                bar.update()
                mark = time.perf_counter()
                if self.step % cfg.checkpoint_every == 0 and self.step < self.steps:
                    self._constrain()
                    self._checkpoint()
                    mark = time.perf_counter()
        self._end_of_epoch()

    def _one_step(self, x: torch.Tensor, y: torch.Tensor, mark: float) -> None:
        cfg, world = self.cfg, self.world
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(cfg, self.epoch * self.steps + self.step, cfg.epochs * self.steps)
        torch.manual_seed(stream(STEP, cfg.seed, self.epoch, self.step, world.rank))
        loss, ce, logits, solution = self.batch(x, y, jacobian_weight(cfg, self.epoch, self.step))
        mark = self._tick("forward", mark)
        self._check(*torch.stack([ce, loss.detach()]).cpu().tolist())  # one copy to the host
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        mark = self._tick("backward", mark)
        self.adam.step()
        mark = self._tick("optimizer", mark)
        self._constrain(prove=(self.step + 1) % cfg.prove_every == 0)
        self._tick("constrain", mark)
        self.sums.add(ce, logits, y, solution)
        self.step += 1

    def _constrain(self, prove: bool = True) -> None:
        try:
            worst = self.model.constrain(prove)
        except ValueError as e:  # a norm of NaN
            self._stop(str(e))
        self.sums.worst_over_c = max(self.sums.worst_over_c, worst)

    def _tick(self, what: str, mark: float) -> float:
        self.world.synchronise()
        now = time.perf_counter()
        self.sums.seconds[what] += now - mark
        return now

    def _check(self, ce: float, loss: float) -> None:
        for value in (ce, loss):
            if not math.isfinite(value):
                self._stop(f"the loss is {value}")
        if ce > DIVERGED * math.log(len(self.data.classes)):
            self._stop(f"the loss is {ce:.3g}, {DIVERGED} times that of guessing")

    def _end_of_epoch(self) -> None:
        cfg, classes = self.cfg, len(self.data.classes)
        self._constrain()  # what is evaluated is proved
        start, sums = time.perf_counter(), self.sums.over(self.world)
        self.epoch, self.step, self.sums = self.epoch + 1, 0, Sums()
        row = {"epoch": self.epoch, "train": sums.row(classes, self.ways), cfg.eval_split: None}
        row["steps"], row["seconds"] = self.steps, {**sums.seconds, "train": sum(sums.seconds.values())}
        if self.epoch % cfg.eval_every == 0 or self.epoch == cfg.epochs:
            split = self.data.val if cfg.eval_split == "val" else self.data.test
            row[cfg.eval_split] = evaluate(self.model, split, cfg.batch, self.world).row(classes, ("forward",))
            row["seconds"]["evaluation"] = time.perf_counter() - start
        row["lipschitz"] = {**self._lipschitz(), "worst_over_c": sums.worst_over_c}
        self.history.append(row)
        self._trace(self.epoch)
        self._checkpoint()
        self.log(epoch_line(row, cfg))

    def _lipschitz(self) -> dict:
        """L as it is proved now, in both modes, and what is measured at a few evaluated images."""
        if not self.world.writes:
            return {}
        x, _ = self._images(PROBED)
        how = dict(dtype=ROUNDED.get(self.cfg.precision), measure=Measurement(random_points=0))
        proof = certify(self._copy().eval(), x=x, progress=False, **how)
        measured = {"measured": proof.measured_norm, "spectral_radius": proof.spectral_radius}
        return {"test": proof.test["perron"], "train": proof.train["perron"], **measured}

    def _images(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first images of what is evaluated, with their labels."""
        split = self.data.val if self.cfg.eval_split == "val" else self.data.test
        return next(iter(split.batches(min(count, len(split)))))

    @property
    def ways(self) -> tuple[str, ...]:
        return ("forward", "backward") if self.cfg.method == "implicit" else ("forward",)

    def _copy(self) -> nn.Module:
        """The model as it is, to be probed: not compiled, and free to be changed."""
        copy = build(self.model.cfg).to(self.world.device)
        copy.load_state_dict(self.model.state_dict())
        return copy

    def _trace(self, epoch: int) -> None:
        if epoch not in self.cfg.trace_epochs or not self.world.writes:
            return
        x, y = self.data.train.sample(min(TRACE_IMAGES, len(self.data.train)))
        self.traces.append(residual_traces(self._copy(), self.cfg, x, y, epoch))
