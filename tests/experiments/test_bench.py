"""The benchmarks run and say what they promise to say (numbers, never times, are asserted)."""

import functools
import json
import math
from pathlib import Path

import pytest

from benchmarks import trained
from lipmdeq.certificate import certify
from lipmdeq.experiments import training
from lipmdeq.experiments.parameters import RunConfig

BENCH = Path(__file__).parents[2] / "results" / "bench"
KEYS = ["f_over_convs", "f_over_convs_compiled", "overhead_anderson", "overhead_picard", "speedup", "nfe"]
KEYS += ["vs_torchdeq", "memory_40_over_5", "versions", "machine", "git_commit", "command"]


@pytest.mark.parametrize("preset", ["cpu", "paper-cifar10"])
def test_committed_records_are_whole(preset):
    found = json.loads((BENCH / f"{preset}.json").read_text("utf8"))
    assert not [key for key in KEYS if found.get(key) in (None, {})]
    assert set(found["speedup"]) == set(found["nfe"]) and found["speedup"]["mdeq"] == 1.0


def test_the_gain_of_compile_is_told_as_it_was_measured():
    found = json.loads((BENCH / "compiled.json").read_text("utf8"))["presets"]
    slower = [[1 / found[preset][row]["speedup"] for preset in ("cpu", "cpu32")] for row in ("lip-a0.4", "potential")]
    block, certified = (" and ".join(f"{x:.2f}" for x in sorted(pair)) for pair in slower)
    text = " ".join((BENCH.parents[1] / "book/api/training.md").read_text("utf8").split())
    assert f"took {block} times as long as an eager one for the paper's block and {certified} times" in text
    assert all(row["graphs_later"] == 0 for preset in found.values() for row in preset.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two finished runs in the layout of the graph; their certificates are proved, not measured, which is quick."""
    quick = functools.partial(certify, measure=False)
    root = tmp_path_factory.mktemp("runs")
    for name, model in ("mdeq", "mdeq"), ("lip-a0.4", "lipschitz"):
        out = root / "table1" / name / "seed0"
        cfg = dict(model=model, n=2, train_images=32, test_images=10, batch=16, epochs=1, device="cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "certify", quick)
            training.train(RunConfig(**cfg, max_forward=4, max_backward=4, out=str(out)))
    return root


@pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")
def test_trained_models_are_compared_with_mdeq(runs):
    rows, scale = trained.measure(runs, runs, "table1", rounds=1)
    assert sorted(rows) == ["lip-a0.4", "mdeq"] and "batch 16 of digits" in scale
    assert rows["mdeq"]["speedup"] == 1.0
    for row in rows.values():
        assert all(math.isfinite(v) and v >= 0 for v in row.values())
    assert rows["lip-a0.4"]["nfe_forward"] <= rows["mdeq"]["nfe_forward"] == 4 + 1  # the cap, and the graph


@pytest.mark.filterwarnings("ignore::lipmdeq.solvers.SolverWarning")
def test_rows_without_weights_are_played(runs, tmp_path):
    """Fresh weights make as many evaluations as the run needed; what was measured of trained weights is not replaced."""
    results, none = tmp_path / "results", tmp_path / "runs"
    for name in "mdeq", "lip-a0.4":
        kept = results / "table1" / name
        kept.mkdir(parents=True)
        (kept / "seed0.json").write_bytes((runs / "table1" / name / "seed0" / "record.json").read_bytes())
    rows, _ = trained.measure(none, results, "table1", rounds=1)
    for name, row in rows.items():
        result = trained.finished(none, results, f"table1/{name}")[0]["result"]
        used = round(result["calls_train_forward"]), max(2, round(result["nfe_train_backward"]))
        assert row["weights"] == "fresh" and (row["nfe_forward"], row["nfe_backward"]) == used
    before, _ = trained.measure(runs, runs, "table1", rounds=1)
    assert all("weights" not in row and row["played_over_trained"] > 0 for row in before.values())
    again, _ = trained.measure(none, results, "table1", rounds=1, known=before)
    assert "lip-a0.4" not in again


def test_missing_runs_are_named(tmp_path):
    with pytest.raises(SystemExit, match="no finished run of MDEQ for table1"):
        trained.measure(tmp_path, tmp_path, "table1", 1)
