"""The graph on a cluster and on several GPUs: profiles parse and plan all rows, and no two runs share a card."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def plan(profile: str, *options: str) -> str:
    """What snakemake would do for protocol paper."""
    words = ["--profile", f"profiles/{profile}", "-n", "--quiet", "rules", *options, "--config", "protocol=paper"]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["slurm", "gpus"])
def test_profile_plans_every_row_of_the_paper(profile):
    plugin = importlib.util.find_spec("snakemake_executor_plugin_slurm") is not None
    local = (
        () if profile == "gpus" or plugin else ("--executor", "local", "--cores", "1")
    )  # all but the plugin's own part
    counts = {line.split()[0]: int(line.split()[1]) for line in plan(profile, *local).splitlines() if len(line.split()) == 2
              and line.split()[1].isdecimal()}  # fmt: skip
    made = len(list((ROOT / "results" / "paper").rglob("seed*.json")))
    rows = [
        p
        for t in ("table1", "table2", "table3", "figure4", "beyond")
        for p in (ROOT / "configs/paper" / t).glob("*.yaml")
    ]
    assert counts["run"] + counts["share"] + made >= len(rows) > 40


def test_runs_on_one_machine_take_different_cards(tmp_path):
    command = ["sh", str(ROOT / "profiles/gpus/on_free_gpu"), "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read wait"]
    given = dict(cwd=tmp_path, env={**os.environ, "LIPMDEQ_GPUS": "2"}, text=True)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    one = subprocess.Popen(command, **given, **pipes)
    assert one.stdout.readline() == "0\n"
    two = subprocess.Popen(command, **given, **pipes)
    assert two.stdout.readline() == "1\n"
    third = subprocess.run(command, **given, capture_output=True)
    assert third.returncode == 1 and "LIPMDEQ_GPUS = 2: all cards are taken" in third.stderr
    one.communicate("\n")  # its card is free again
    again = subprocess.run(command, **given, capture_output=True, input="\n")
    assert again.stdout == "0\n"
    two.communicate("\n")
