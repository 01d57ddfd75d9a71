"""The graph on a cluster and on several GPUs: profiles parse and plan all rows, a run submitted to (a stand-in for) Slurm ends
with its record, and no two runs share a card."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lipmdeq.experiments import read_record
from lipmdeq.experiments.rows import SHARED

ROOT = Path(__file__).parents[2]
PLUGIN = importlib.util.find_spec("snakemake_executor_plugin_slurm") is not None


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
    local = (
        () if profile == "gpus" or PLUGIN else ("--executor", "local", "--cores", "1")
    )  # all but the plugin's own part
    counts = {line.split()[0]: int(line.split()[1]) for line in plan(profile, *local).splitlines() if len(line.split()) == 2
              and line.split()[1].isdecimal()}  # fmt: skip
    made = len(list((ROOT / "results" / "paper").rglob("seed*.json")))
    tables = ("table1", "table2", "table3", "figure4", "beyond")
    rows = {f"{t}/{p.stem}" for t in tables for p in (ROOT / "configs/paper" / t).glob("*.yaml")} - set(SHARED)
    assert counts["run"] + made >= len(rows) > 40


@pytest.mark.slow
@pytest.mark.skipif(not PLUGIN, reason="the extra slurm is not installed")
def test_a_job_of_the_cluster_ends_with_its_record(tmp_path):
    """profiles/slurm as it is: the plugin submits with sbatch, the job runs the smoke protocol and leaves a sealed record."""
    project, bin_, jobs = tmp_path / "project", tmp_path / "bin", tmp_path / "jobs"
    for folder in (project, bin_, jobs):
        folder.mkdir()
    for name in ("Snakefile", "lipmdeq", "notebooks", "profiles"):
        (project / name).symlink_to(ROOT / name)
    (project / "configs/smoke/runs").mkdir(parents=True)
    shutil.copy(ROOT / "configs/smoke/runs/potential.yaml", project / "configs/smoke/runs")
    for name in ("sbatch", "sacct", "srun", "sacctmgr", "sinfo", "scontrol"):
        shutil.copy(ROOT / "tests/experiments/slurm.py", bin_ / name)
        (bin_ / name).chmod(0o755)
    path = os.pathsep.join([str(bin_), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "FAKE_SLURM": str(jobs), "PYTHONPATH": str(ROOT)}
    words = ["--profile", "profiles/slurm", "--config", "protocol=smoke", "tables=runs"]
    quick = [
        "--seconds-between-status-checks",
        "1",
        "--slurm-init-seconds-before-status-checks",
        "1",
        "--latency-wait",
        "5",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *words, *quick],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = read_record(project / "results/smoke/runs/potential/seed0.json")
    assert record["parameters"]["block"] == "potential" and record["result"]["images"] == 360
    (asked,) = [" ".join(json.loads(p.read_text())) for p in jobs.glob("*.json")]
    for option in ("-A default", "-p gpu", "-t 300", "--mem 3000"):
        assert option in asked
    assert not list(jobs.glob("*.part"))


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
