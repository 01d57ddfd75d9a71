"""``python -m lipmdeq bound``: the table, the JSON object, one sentence for bad input, and no torch."""

import json
import math
import subprocess
import sys

import pytest

from lipmdeq.__main__ import main
from lipmdeq.bounds import ABLATIONS, READINGS, LipschitzSpec, relative_residual_bound, steps


def run_json(capsys, *options):
    assert main(["bound", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_json_golden(capsys):
    found = run_json(capsys, "-a", "0.4")
    assert [round(found[r], 4) for r in READINGS] == [0.8543, 1.0035, 0.9255, 0.8611]
    assert [round(found["test"][r], 4) for r in READINGS] == [0.6760, 0.7940, 0.7323, 0.6814]
    assert found["certified"] is True
    assert found["steps"] == 51
    assert found["steps_l2"] == steps(found["perron"], 1e-3, found["cond_D"]) > 51
    assert found["steps_to"]["train"]["spectral"] == [98, 187]
    assert found["steps_to"]["train"]["reported"] == [None, None]
    assert [round(found["largest_a"]["train"][r], 4) for r in READINGS[1:]] == [0.3995, 0.4114, 0.4216]
    assert round(found["cond_D"], 2) == 1.73 and min(found["D"]) == 1
    assert found["matrix"] == LipschitzSpec(a=0.4).fusion_matrix().tolist()
    assert found["advice"] == []


def test_json_all_options(capsys):
    options = {"-a": 0.3, "-c": 1.5, "--gamma": 0.9, "--alpha1": 0.4, "--alpha2": 0.2, "-n": 3, "-p": 0.1}
    found = run_json(capsys, *[str(x) for pair in options.items() for x in pair], "--no-post-affine")
    spec = LipschitzSpec(0.3, 1.5, 0.9, 0.4, 0.2, 3, 0.1, post_affine=False)
    assert all(found[r] == spec.L(r) for r in READINGS)
    assert {flag.lstrip("-"): found["parameters"][flag.lstrip("-")] for flag in options} == {
        flag.lstrip("-"): value for flag, value in options.items()
    }


def test_json_not_certified(capsys):
    found = run_json(capsys, "-a", "1")
    assert found["certified"] is False and found["steps"] is None and found["steps_l2"] is None
    for change in found["advice"]:
        assert LipschitzSpec(**{"a": 1, change["field"]: change["to"]}).L() < 1
    assert {"a", "c", "gamma"} <= {change["field"] for change in found["advice"]}


@pytest.mark.parametrize("row", ABLATIONS)
def test_ablation(capsys, row):
    found = run_json(capsys, "-a", "0.3", "--ablation", row)
    for mode in ("train", "test"):
        ops = LipschitzSpec(a=0.3).ablation(row, train=mode == "train")
        for reading in READINGS:
            L = ops.L(reading)
            assert found[mode][reading] == (L if math.isfinite(L) else None), (mode, reading)
            assert found["steps_to"][mode][reading][0] == steps(L, 1e-3)
    assert found["ablation"] == row and found["certified"] is (found["perron"] is not None and found["perron"] < 1)
    assert main(["bound", "-a", "0.3", "--ablation", row]) == 0
    text = capsys.readouterr().out
    assert f"ablation = {row}\n" in text and "No single change helps" not in text


def test_unknown_ablation_is_one_sentence(capsys):
    assert main(["bound", "--ablation", "S8"]) == 1
    assert "ablation = 'S8': must be one of S1" in capsys.readouterr().err


def test_json_without_a_bound_is_still_json(capsys):
    found = run_json(capsys, "-c", "1e200", "--gamma", "1e200")
    assert found["perron"] is None and found["certified"] is False


def test_table(capsys):
    assert main(["bound", "-a", "0.4"]) == 0
    text = capsys.readouterr().out
    for number in ("0.8543", "1.0035", "0.9255", "0.8611", "0.6814", "51", "97", "0.6571", "1.73", "certified: L"):
        assert number in text
    assert main(["bound", "-a", "0.45"]) == 0
    text = capsys.readouterr().out
    assert "not certified" in text and "lower a from 0.45 to 0.4216" in text
    assert main(["bound", "-n", "1"]) == 0
    assert main(["bound", "--gamma", "0.5"]) == 0
    assert "--no-post-affine" in capsys.readouterr().out
    assert main(["bound", "-c", "1e308", "--gamma", "1e308"]) == 0
    assert "No single change" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-a", "7"], "a = 7: must be in (0, 1]"),
        (["-a", "-1e5"], "a = -100000.0: must be in (0, 1]"),
        (["-a", "-inf"], "a = -inf: must be in (0, 1]"),
        (["-a", "foo"], "a = 'foo': must be in (0, 1]"),
        (["-c", "0"], "c = 0: must be in (0, inf)"),
        (["--gamma", "nan"], "gamma = nan: must be in (0, inf)"),
        (["--alpha1", "1"], "alpha1 = 1: must be in (0, 1)"),
        (["--alpha2=0"], "alpha2 = 0: must be in (0, 1)"),
        (["-n", "2.5"], "n = 2.5: must be a whole number >= 1 and <= 64"),
        (["-n", "-1"], "n = -1: must be a whole number >= 1 and <= 64"),
        (["-p", "1"], "p = 1: must be in [0, 1)"),
        (["--block", "resnet"], "block = 'resnet': must be one of paper, potential"),
        (["--block", "potential", "--tau", "1"], "tau = 1: must be in (0, 1)"),
        (["--block", "potential", "--tau", "-1"], "tau = -1: must be in (0, 1)"),
        (["--block", "potential", "--tau", "nan"], "tau = nan: must be in (0, 1)"),
        (["--block", "potential", "--tau", "x"], "tau = 'x': must be in (0, 1)"),
        (["--tau", "0.9"], "tau = 0.9: does not enter block = 'paper', whose L has no tau; must be left out"),
        *(
            (
                ["--block", "potential", *words],
                f"{said}: does not enter block = 'potential', whose L is tau alone; must be left out",
            )
            for words, said in (
                (["-a", "0.4"], "a = 0.4"),
                (["-c", "2"], "c = 2"),
                (["-n", "4", "--tau", "0.9"], "n = 4"),
                (["--no-post-affine"], "post_affine = False"),
                (["--ablation", "S1"], "ablation = 'S1'"),
            )
        ),
    ],
)
def test_bad_input_is_one_sentence(capsys, options, sentence):
    for extra in ([], ["--json"]):
        assert main(["bound", *options, *extra]) == 1
        out = capsys.readouterr()
        assert out.out == ""
        assert out.err == f"lipmdeq bound: {sentence}\n"


@pytest.mark.parametrize("tau", [0.05, 0.5, 0.9, 0.99])
def test_potential(capsys, tau):
    """The certified family: L is tau, and the step counts are the first that keep the bound."""
    found = run_json(capsys, "--block", "potential", "--tau", str(tau))
    assert found["block"] == "potential" and found["parameters"] == {"tau": tau}
    assert found["L"] == found["train"] == found["test"] == tau and found["certified"] is True
    for tol, k in zip(found["tolerances"], found["steps_to"], strict=True):
        assert relative_residual_bound(tau, k) <= tol < relative_residual_bound(tau, k - 1)
    assert found["tolerances"] == [1e-3, 1e-6] and found["steps"] == found["steps_to"][0]
    assert found["error_factor"] == pytest.approx(1 / (1 - tau), rel=1e-12)
    assert main(["bound", "--block", "potential", "--tau", str(tau)]) == 0
    text = capsys.readouterr().out
    assert f"L = tau = {tau:g} in the plain l2 norm, in train and in test mode, for all weights" in text
    assert "1e-3: {}, 1e-6: {}\n".format(*found["steps_to"]) in text and "certified: L" in text


def test_potential_golden(capsys):
    found = run_json(capsys, "--block", "potential")
    assert found["parameters"] == {"tau": 0.9} and found["steps_to"] == [72, 138]
    assert found["error_factor"] == pytest.approx(10)


def test_the_papers_block_is_the_default(capsys):
    assert run_json(capsys, "-a", "0.3") == run_json(capsys, "--block", "paper", "-a", "0.3")
    assert run_json(capsys)["block"] == "paper"


def test_as_a_process_without_torch():
    for options in ([], ["--block", "potential"]):
        code = (
            f"import sys; from lipmdeq.__main__ import main; main(['bound', *{options}]); print('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"
    done = subprocess.run([sys.executable, "-m", "lipmdeq", "bound", "-a", "7"], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
