"""notebooks/train.ipynb with real papermill calls: good parameters leave a record, bad ones one sentence and exit code 1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lipmdeq.experiments.parameters import RunConfig

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "train.ipynb"
SMALL = "-p epochs 1 -p n 2 -p train_images 64 -p test_images 40 -p batch 16 -p a 0.3 -p out run".split()
CALLS = {
    "good": (SMALL, None),
    "range": (["-p", "a", "7"], "a = 7: must be in (0, 1]"),
    "text": (["-p", "a", "abc"], "a = 'abc': must be a number in (0, 1]"),
    "object": (["-y", "{record: {x: 1}}"], "record = {'x': 1}: not a parameter; must be one of model, "),
    "import": (["-p", "RunConfig", "3"], "RunConfig = 3: not a parameter; must be one of model, "),
    "unknown": (["-p", "slope", "0.4"], "slope = 0.4: not a parameter; must be one of model, preset, "),
}


def papermill(folder: Path, name: str, words: list[str]) -> subprocess.Popen:
    """Start one call, with the environment of this Python and nothing of the user's."""
    command = [sys.executable, "-m", "papermill", str(NOTEBOOK), f"{name}.ipynb", *words, "--no-progress-bar"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """All calls, two at a time; once more where the kernel did not even start (another one may have taken its port)."""
    folder, waiting, done, again = tmp_path_factory.mktemp("papermill"), dict(CALLS), {}, set()
    running: dict[str, subprocess.Popen] = {}
    while waiting or running:
        while waiting and len(running) < 2:
            name = next(iter(waiting))
            running[name] = papermill(folder, name, waiting.pop(name)[0])
        name = next(iter(running))
        process = running.pop(name)
        said, _ = process.communicate(timeout=300)
        if "Kernel didn't respond" in said and name not in again:
            again.add(name)
            waiting[name] = CALLS[name]
            continue
        done[name] = (process.returncode, said)
    return folder, done


@pytest.mark.slow
def test_good_parameters_leave_a_record(calls):
    folder, done = calls
    code, said = done["good"]
    assert code == 0, said[-3000:]
    record = json.loads((folder / "run" / "record.json").read_text())
    cfg = RunConfig.from_mapping(record["parameters"])
    assert (cfg.a, cfg.n, cfg.epochs, cfg.out) == (0.3, 2, 1, "run")
    assert (folder / "run" / "checkpoint.ckpt").exists()
    notebook = json.loads((folder / "good.ipynb").read_text())
    text = json.dumps(notebook["cells"])
    assert "test accuracy, last epoch" in text and "proved to be a contraction" in text and "image/svg+xml" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", [k for k, v in CALLS.items() if v[1]])
def test_bad_parameters_end_with_one_sentence(calls, name):
    code, said = calls[1][name]
    assert code == 1
    last = [line for line in said.splitlines() if line.strip()][-1]
    assert last.startswith(f"ParameterError: {CALLS[name][1]}"), said[-2000:]


@pytest.mark.slow
def test_help_lists_every_parameter():
    command = [sys.executable, "-m", "papermill", "--help-notebook", str(NOTEBOOK)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    for name in RunConfig.model_fields:
        assert f"\n  {name}:" in said, name
    assert "tau: float (default 0.9)" in said and "slope of SReLU, in (0, 1]" in said


def test_notebook_is_thin_and_leaves_nothing_behind():
    notebook = json.loads(NOTEBOOK.read_text())
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert sum(len(c["source"]) for c in code[1:]) <= 45  # the loop is in the package
    assert RunConfig().out == ""  # nothing is kept, so nothing stale can be shown
    assert any(c["outputs"] for c in code)
