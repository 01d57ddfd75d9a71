"""The cost of a run, against the operations of a real step."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lipmdeq.__main__ import main
from lipmdeq.data import load
from lipmdeq.experiments.cost import cost
from lipmdeq.experiments.parameters import ParameterError, RunConfig
from lipmdeq.experiments.step import Batch, jacobian_weight
from lipmdeq.experiments.training import new_model
from lipmdeq.experiments.world import World

ROOT = Path(__file__).parents[2]


class Counter(TorchDispatchMode):
    """Operations by torch's own formulas; `FlopCounterMode` itself cannot follow gradients inside a backward pass."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in flop_registry:
            self.total += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def steps_of(cfg: RunConfig, jacobian: float = 0.0):
    """(multiply-adds, Solution, model) of a real step, the second one: then a solver knows which evaluation is its last."""
    if cfg.resolution:
        data = SimpleNamespace(size=cfg.resolution, in_channels=3, classes=range(25))
        x, y = torch.randn(cfg.batch, 3, cfg.resolution, cfg.resolution), torch.arange(cfg.batch) % 25
    else:
        data = load("digits", train_images=64)
        x, y = next(iter(data.train.batches(cfg.batch)))
    model = new_model(cfg, data).train()
    batch = Batch(model, World(cfg).autocast)
    for _ in range(2):
        torch.manual_seed(0)  # the same dropout, so that the second step takes as many evaluations as the first
        with Counter() as counter:
            loss, *_, solution = batch(x, y, jacobian)
            loss.backward()
    return counter.total / 2, solution, model


def told_for(cfg: RunConfig, solution):
    return cost(cfg, forward=solution.nfe, backward=solution.backward.nfe if solution.backward else 0)


BLOCKS = {
    "paper": {"a": 0.4},
    "all": {"a": 0.4, "injection": "all"},
    "potential": {"block": "potential", "tau": 0.9, "tol": 0.1, "batch": 32},
    "table3": {"a": 0.4, "preset": "cpu-imagenet", "resolution": 64, "batch": 2},
}


@pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")
@pytest.mark.parametrize("method", ["implicit", "jfb", "phantom", "unrolled"])
@pytest.mark.parametrize("block", BLOCKS)
def test_cost_is_that_of_a_real_step(block, method):
    cfg = RunConfig(method=method, solver="picard", device="cpu", **{"batch": 8, "n": 2} | BLOCKS[block])
    counted, solution, model = steps_of(cfg)
    told = told_for(cfg, solution)
    assert told.parameters == sum(p.numel() for p in model.parameters())
    # Never less than the truth; a little more where a gradient to z is not formed (jfb).
    assert 0.98 * counted <= told.per_step <= 1.15 * counted


@pytest.mark.parametrize("block", ["paper", "potential"])
@pytest.mark.parametrize("method", ["implicit", "jfb"])
def test_jacobian_regularisation_is_counted(block, method):
    """What the two vectors cost in a step that is chosen, and how many are."""
    cfg = RunConfig(
        method=method, solver="picard", device="cpu", epochs=20, **{"tol": 0.1, "batch": 8, "n": 2} | BLOCKS[block]
    )
    with_it, solution, _ = steps_of(cfg, jacobian=0.1)
    plain, before, _ = steps_of(cfg)
    assert before.nfe == solution.nfe
    evaluation = cost(cfg).evaluation
    more = (with_it - plain) / cfg.batch / evaluation
    chosen = [jacobian_weight(cfg.changed(jacobian_weight=0.1), e, s) > 0 for e in range(20) for s in range(200)]
    share = sum(chosen) / len(chosen)
    regularised = told_for(cfg.changed(jacobian_weight=0.1), solution)
    told = (regularised.per_step - told_for(cfg, solution).per_step) / cfg.batch / evaluation
    assert more == pytest.approx(7, abs=0.6)  # jfb forms the gradient to z only for it
    assert told == pytest.approx(share * more, rel=0.25)


def test_hours_follow_from_the_parts():
    cfg = RunConfig(a=0.4, preset="paper-cifar10", data="cifar10", batch=128, epochs=200)
    told = cost(cfg, "a100", 0.5)
    assert told.steps == 390 * 200
    assert told.hours == pytest.approx(2 * told.per_step * told.steps / (19.5e12 * 0.5) / 3600)
    assert cost(cfg, "a100", 0.25).hours == pytest.approx(2 * told.hours)
    assert 10e6 < told.parameters < 12e6
    assert torch.get_default_device().type == "cpu"


def test_shell_and_bad_input(capsys):
    path = "configs/paper/table1/lip-a0.4.yaml"
    assert main(["cost", "-f", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == "a100"
    assert main(["cost", "-f", path]) == 0
    assert "hours on a100 at 30% of its peak" in capsys.readouterr().out
    assert main(["cost", "-f", path, "--machine", "abacus"]) == 1
    assert "machine = 'abacus': must be one of cpu, t4" in capsys.readouterr().err
    assert main(["cost", "-f", path, "--utilisation", "2"]) == 1
    assert "utilisation = 2: must be in (0, 1]" in capsys.readouterr().err
    with pytest.raises(ParameterError, match="train_images = None: must be given"):
        cost(RunConfig(data="flowers"))


def test_hours_of_the_paper_protocol_are_those_of_its_page():
    """configs/paper/README.md: every row of the table, from the counted multiply-adds and the paper's own evaluations."""
    printed = yaml.safe_load((ROOT / "results" / "paper.yaml").read_text("utf8"))
    page = (ROOT / "configs" / "paper" / "README.md").read_text("utf8")
    rows = re.findall(r"^\| (\w+/[\w.-]+) \| (\S+) \| (\S+) \|$", page, re.M)
    there = {f"{p.parent.name}/{p.stem}" for p in (ROOT / "configs" / "paper").glob("*/*.yaml")}
    assert len(rows) == len(there) and {row for row, *_ in rows} == there
    for row, most, seen in rows:
        cfg = RunConfig.from_yaml(ROOT / "configs" / "paper" / f"{row}.yaml")
        assert most == f"{cost(cfg).hours:.3g}", row
        table, name = row.split("/")
        paper = printed.get(table, {"rows": {}})["rows"].get(name, {})
        if forward := paper.get("nfe_train_forward"):
            backward = math.ceil(paper["nfe_train_backward"]) if cfg.method == "implicit" else 0
            assert seen == f"{cost(cfg, forward=math.ceil(forward), backward=backward).hours:.3g}", row
        else:
            assert seen == "–", row
