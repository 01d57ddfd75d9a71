"""``compile: true`` in training: f is one graph, nothing is compiled after the first epoch, numbers are those of eager."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lipmdeq.certificate import certify
from lipmdeq.experiments import training
from lipmdeq.experiments.parameters import ParameterError, RunConfig
from lipmdeq.experiments.training import Run
from lipmdeq.experiments.world import World, has_cpp_compiler

# 20 test images in batches of 16: the last one is smaller, which is compiled once more, for any size.
SMALL = dict(train_images=32, test_images=20, batch=16, epochs=2, lr=5e-3, p=0.2, device="cpu", prove_every=2)
BLOCKS = {
    "paper": dict(a=0.4, n=2),
    "potential": dict(block="potential", n=2),
    "mdeq, fixed steps": dict(model="mdeq", n=1, solver="picard", fixed_steps=3),
    "potential, bfloat16": dict(block="potential", n=2, precision="bfloat16", tol=0.01),
}


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Nothing compiled before or after; certificates are proved only, which is quick."""
    monkeypatch.setattr(training, "certify", lambda model, **kw: certify(model, **{**kw, "measure": False}))
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.compiler.reset()


@pytest.fixture
def traced(monkeypatch) -> list[dict]:
    """f goes through all of the compiler but the part that writes C++ (seconds instead of a minute); what it was asked."""
    asked, compile_ = [], nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **kw: (asked.append(kw), compile_(self, **kw, backend="aot_eager"))
    )
    return asked


def epochs(out: Path, between=lambda run: None, **changes) -> tuple[Run, list[int]]:
    """A run of two epochs with their evaluations, and the number of graphs that were compiled until the end of each."""
    counters.clear()
    cfg, graphs = RunConfig(**{**SMALL, **changes}), []
    run = Run(cfg, out, World.open(cfg))
    for _ in range(cfg.epochs):
        run._one_epoch()
        graphs.append(counters["stats"]["unique_graphs"])
        between(run)
    assert not counters["graph_break"] and not counters["unimplemented"]
    return run, graphs


def assert_close(one: Run, other: Run, rel: float = 1e-3, counts: bool = True) -> None:
    """Histories, and with ``counts`` evaluations and weights, but for rounding."""
    for a, b in zip(one.history, other.history, strict=True):
        for part in ("train", "test"):
            assert a[part]["loss"] == pytest.approx(b[part]["loss"], rel=rel)
            for name in ("accuracy", "nfe_forward", "not_converged_forward") if counts else ():
                assert a[part][name] == b[part][name], name
        assert a["train"]["nfe_backward"] == b["train"]["nfe_backward"] or not counts
    for (name, a), b in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        if counts and a.is_floating_point():
            torch.testing.assert_close(b, a, rtol=0, atol=rel * a.abs().max().item(), msg=name)


@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_is_compiled_after_the_first_epoch(name, tmp_path, traced):
    """Four graphs: steps of the solver and its last step, which records, in training; evaluation, and its smaller batch."""
    compiled, graphs = epochs(tmp_path / "compiled", compile=True, **BLOCKS[name])
    assert traced == [{"fullgraph": True}]
    assert 0 < graphs[0] == graphs[1] <= 4, graphs
    eager, none = epochs(tmp_path / "eager", **BLOCKS[name])
    assert none == [0, 0]
    if compiled.cfg.precision == "bfloat16":  # another order of sums moves digits at 2^-8
        assert_close(eager, compiled, 0.05, counts=False)
    else:
        assert_close(eager, compiled)


def test_recompilation_is_seen(tmp_path, traced):
    """Test of the tests: something of f that changes between epochs."""

    def change(run: Run) -> None:
        run.model.f.residual[0].alpha = None

    _, graphs = epochs(tmp_path, change, compile=True, a=0.4, n=1)
    assert graphs[1] > graphs[0]


def test_graph_break_stops_the_run(tmp_path, traced, monkeypatch):
    """Test of the tests: what the compiler cannot take is an error, not a part of f that silently stays as it was."""
    from lipmdeq.model import fused

    add_up = fused.add_up
    monkeypatch.setattr(fused, "add_up", lambda y, low: (torch._dynamo.graph_break(), add_up(y, low))[1])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        epochs(tmp_path, compile=True, **BLOCKS["potential"])


@pytest.mark.slow
@pytest.mark.skipif(
    not has_cpp_compiler(), reason="no C++ compiler here (g++), so torch.compile cannot build for the CPU"
)
def test_built_by_the_compiler_it_trains_the_same(tmp_path):
    """The real kernels, on one resolution, because building them takes the compiler half a minute."""
    model = dict(a=0.4, n=1)
    compiled, graphs = epochs(tmp_path / "compiled", compile=True, **model)
    assert 0 < graphs[0] == graphs[1] <= 4, graphs
    assert counters["inductor"]["extern_calls"] > 0
    assert_close(epochs(tmp_path / "eager", **model)[0], compiled)


def test_without_a_compiler_it_is_refused(tmp_path, monkeypatch):
    cfg = RunConfig(**{**SMALL, "compile": True})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ParameterError, match="^compile = True: must be False on a CPU without a C\\+\\+ compiler"):
        World.open(cfg)
    World.open(cfg.changed(compile=False))
    own = tmp_path / "own-compiler"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("CXX", str(own))
    World.open(cfg)
