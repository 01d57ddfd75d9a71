"""The cost of a run, against the operations of a real step."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lipmdeq.__main__ import main
from lipmdeq.data import load
from lipmdeq.experiments.cost import cost
from lipmdeq.experiments.parameters import ParameterError, RunConfig
from lipmdeq.experiments.step import Batch
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


@pytest.mark.parametrize("method", ["implicit", "jfb", "phantom", "unrolled"])
def test_cost_is_that_of_a_real_step(method):
    cfg = RunConfig(a=0.4, n=2, method=method, solver="picard", batch=8, device="cpu")
    data = load("digits", train_images=64)
    model = new_model(cfg, data).train()
    batch = Batch(model, World(cfg).autocast)
    x, y = next(iter(data.train.batches(cfg.batch)))
    for _ in range(2):  # from the second step on a solver knows which evaluation will be its last
        with Counter() as counter:
            loss, *_, solution = batch(x, y)
            loss.backward()
    backward = solution.backward.nfe if solution.backward else 0
    told = cost(cfg, forward=solution.nfe, backward=backward)
    assert told.parameters == sum(p.numel() for p in model.parameters())
    # Never less than the truth; a little more where a gradient to z is not formed (jfb).
    assert 0.98 * counter.total / 2 <= told.per_step <= 1.15 * counter.total / 2


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
    assert len(rows) > 12
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
