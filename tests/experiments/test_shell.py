"""How commands end: Ctrl-C, closed pipes, full disks, ASCII terminals, odd values, several processes; D6, D11, D12, D16-D18."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lipmdeq.__main__ import main
from lipmdeq.experiments import shell
from lipmdeq.experiments.parameters import RunError

ROOT = Path(__file__).parents[2]
WEIGHTS = str(ROOT / "results" / "digits" / "lipschitz" / "seed0.ckpt")
SMALL = "-p n 2 -p train_images 64 -p test_images 40 -p batch 16 -p device cpu".split()
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8"))}
ENV |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
COMMANDS = {
    "bound": ["lipmdeq", "bound"],
    "help": ["lipmdeq", "-h"],
    "help of train": ["lipmdeq", "train", "-h"],
    "help of bound": ["lipmdeq", "bound", "-h"],
    "certify": ["lipmdeq", "certify", WEIGHTS],
    "data": ["lipmdeq", "data", "digits"],
    "help of trained": ["benchmarks.trained", "-h"],
}


def run(words: list[str], **changes) -> subprocess.CompletedProcess:
    options = {"cwd": ROOT, "env": ENV, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | changes
    return subprocess.run([sys.executable, "-m", *words], timeout=300, **options)


def one_sentence(said: str, begin: str) -> None:
    assert said.startswith(begin) and said.count("\n") == 1 and "Traceback" not in said, said


LIGHT = ["bound", "help", "data"]
CASES = [(name, unbuffered) for name in LIGHT for unbuffered in ("", "1")]


@pytest.mark.parametrize(("name", "unbuffered"), [*CASES, ("certify", ""), ("help of trained", "")])
def test_nobody_reads(name, unbuffered):
    """D12: the reader of the pipe is gone before the first line."""
    read, write = os.pipe()
    os.close(read)
    done = run(COMMANDS[name], stdout=write, env=ENV | {"PYTHONUNBUFFERED": unbuffered})
    os.close(write)
    one_sentence(done.stderr, COMMANDS[name][0].split(" ")[0])
    assert "nobody reads the output any more" in done.stderr
    assert done.returncode == shell.CLOSED


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize(("name", "unbuffered"), CASES)
def test_full_disk(name, unbuffered):
    """D12: text that waits in a buffer must not become a traceback on the way out."""
    with open("/dev/full", "w") as full:
        done = run(COMMANDS[name], stdout=full, env=ENV | {"PYTHONUNBUFFERED": unbuffered})
        one_sentence(done.stderr, COMMANDS[name][0])
        assert "No space left on device" in done.stderr and done.returncode == 1
        if name == "bound":  # and nobody can be told
            assert run(["lipmdeq", "bound", "-a", "7"], stderr=full).returncode == 1
            assert run(["lipmdeq", "bound"], stdout=full, stderr=full).returncode == 1


def test_closed_from_the_start():
    """``>&-``: there is no stream at all."""
    for closed in ((1,), (2,), (1, 2)):
        lines = "; ".join(f"os.close({k})" for k in closed)
        code = f"import os, sys; {lines}; os.execv(sys.executable, [sys.executable, '-m', 'lipmdeq', 'bound', '-a', '{{}}'])"
        for a, want in (("0.4", 0), ("7", 1)):
            done = subprocess.run(
                [sys.executable, "-c", code.format(a)], cwd=ROOT, env=ENV, capture_output=True, text=True
            )
            assert done.returncode == want and "Traceback" not in done.stderr, (closed, done.stderr)


@pytest.mark.parametrize("name", [*LIGHT, "help of train", "help of bound"])
def test_ascii_terminals(name):
    """D16: no sign of ours stops a command; those that have a plain form get it."""
    done = run(COMMANDS[name], env=ENV | ASCII)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.isascii() and done.stdout
    if name == "help of train":
        assert "config.yaml" in done.stdout
    if name == "help":
        assert "gamma, ..." in done.stdout


def test_ascii_terminal_in_training_and_in_errors(tmp_path):
    words = ["lipmdeq", "train", *SMALL, "-p", "epochs", "1", "-p", "method", "jfb"]
    done = run(words, env=ENV | ASCII, cwd=tmp_path)  # no evaluations backward: "–"
    assert done.returncode == 0 and "/-/" in done.stdout, done.stderr
    done = run(["lipmdeq", "train", "-p", "a", "½"], env=ENV | ASCII)
    one_sentence(done.stderr, "lipmdeq train: a = '")
    assert done.returncode == 1
    (tmp_path / "c.yaml").write_text("# Zürich, ½\nmodel: mdeq\nablation: 'S½'\n", "utf8")
    done = run(["lipmdeq", "train", "-f", str(tmp_path / "c.yaml")], env=ENV | ASCII)
    one_sentence(done.stderr, "lipmdeq train: config = '")
    assert "c.yaml': ablation = 'S?': must be one of S1" in done.stderr


def start(words: list[str], folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", *words]
    return subprocess.Popen(command, cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("out", [None, "run"])
def test_interrupted_training(out, tmp_path):
    """D11: one sentence, 130, and the same command goes on where it was."""
    words = ["lipmdeq", "train", *SMALL, "-p", "epochs", "1000", "-p", "checkpoint_every", "1"]
    words += ["-p", "out", out] if out else []
    process = start(words, tmp_path)
    assert process.stdout.readline().startswith("epoch ")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    one_sentence(said, "lipmdeq train: interrupted; ")
    assert process.returncode == shell.INTERRUPTED
    assert ("run keeps the last checkpoint" in said) if out else ("nothing is kept" in said)
    if out:
        process = start(words, tmp_path)
        assert process.stdout.readline().startswith("resumed at epoch ")
        process.send_signal(signal.SIGINT)
        assert process.wait(200) == shell.INTERRUPTED
        process.communicate()


@pytest.mark.parametrize("wait", [0.1, 1.5])
def test_interrupted_early(wait, tmp_path):
    """While torch is imported, the data are opened, or the model is built."""
    process = start(["lipmdeq", "train", *SMALL, "-p", "epochs", "1000"], tmp_path)
    wait_for_main(process, wait)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    one_sentence(said, "lipmdeq train: interrupted")
    assert process.returncode == shell.INTERRUPTED


def test_interrupt_in_code_that_was_text(tmp_path):
    """With ``python -m`` an interrupt inside ``exec`` of text, as a dataclass runs it, is remembered: without ``end`` the process
    would end by the signal although it was caught.
    """
    program = """
import sys
from lipmdeq.experiments import shell

def main():
    exec("import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**6): pass")

{}(shell.guarded("it", main))
"""
    codes = []
    for name, way in ("ends", "shell.end"), ("exits", "sys.exit"):
        (tmp_path / f"{name}.py").write_text(program.format(way))
        done = subprocess.run([sys.executable, "-m", name], capture_output=True, text=True, cwd=tmp_path)
        assert done.stderr == "it: interrupted\n"
        codes.append(done.returncode)
    assert codes[0] == shell.INTERRUPTED and codes[1] in (shell.INTERRUPTED, -signal.SIGINT)


def wait_for_main(process: subprocess.Popen, more: float) -> None:
    """Until numpy is loaded: Python itself is up, and the command has begun."""
    maps = Path(f"/proc/{process.pid}/maps")
    if maps.exists():
        while "numpy" not in maps.read_text() and process.poll() is None:
            time.sleep(0.01)
    time.sleep(more)


def test_reader_that_leaves_in_the_middle(tmp_path):
    """``train | head -1``: the run ends at the next line, its checkpoint is kept."""
    words = ["lipmdeq", "train", *SMALL, "-p", "epochs", "1000", "-p", "out", "run"]
    process = start(words, tmp_path)
    assert process.stdout.readline().startswith("epoch ")
    process.stdout.close()
    assert process.wait(200) == shell.CLOSED
    one_sentence(process.stderr.read(), "lipmdeq train: nobody reads")
    process.stderr.close()
    assert (tmp_path / "run" / "checkpoint.ckpt").exists()


def test_processes_that_lose_each_other(monkeypatch, capsys):
    """D18: what gloo says in the process that was left alone is no traceback."""
    from lipmdeq.experiments import training

    def lost(cfg, log):
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:2345")

    monkeypatch.setattr(training, "train", lost)
    assert main(["train"]) == 1
    one_sentence(capsys.readouterr().err, "lipmdeq train: another process of this run ended")


def test_what_else_becomes_a_sentence(capsys):
    def fails(error):
        def main():
            raise error

        return main

    before = signal.getsignal(signal.SIGINT)
    for error, code, said in (
        (KeyboardInterrupt(), 130, "x: interrupted\n"),
        (PermissionError(13, "Permission denied", "a/b"), 1, "x: a/b: Permission denied\n"),
        (MemoryError(), 1, "x: not enough memory\n"),
        (RunError("seed0.json is damaged"), 1, "x: seed0.json is damaged\n"),
        (SystemExit("no runs"), 1, "no runs\n"),
        (SystemExit(2), 2, ""),
        (SystemExit(), 0, ""),
    ):
        assert shell.guarded("x", fails(error)) == code
        assert capsys.readouterr().err == said
    signal.signal(signal.SIGINT, before)
    with pytest.raises(ZeroDivisionError):  # a defect of ours stays visible
        shell.guarded("x", lambda: 1 / 0)


def test_solves_that_do_not_converge_are_no_noise(monkeypatch, capsys, recwarn):
    """What did not converge stands in the table: MDEQ's certificate is no warning."""
    from lipmdeq import certificate
    from lipmdeq.solvers import Picard

    def measured(model, *args, **how):
        solution = Picard(tol=1e-9, max_iter=1).solve(torch.cos, torch.zeros(2, 3))
        raise RunError(f"{solution.reason} after one evaluation")

    monkeypatch.setattr(certificate, "certify", measured)
    assert main(["certify", WEIGHTS, "--image-size", "8"]) == 1
    assert capsys.readouterr().err == "lipmdeq certify: max_iter after one evaluation\n" and not recwarn


@pytest.mark.parametrize(
    "words",
    [
        ["bound", "-a", "x" * 5000], ["bound", "--ablation", "x" * 5000], ["bound", "-n", "9" * 4000],
        ["certify", "x" * 5000], ["cost", "-f", "x", "--utilisation", "x" * 5000], ["tables", "--protocol", "x" * 5000],
        ["seal", "x" * 5000], ["data", "x" * 5000],
    ],
)  # fmt: skip
def test_long_words_do_not_fill_the_screen(words, capsys):
    """D4: of any command, by the name of the option."""
    assert main(words) == 1
    said = capsys.readouterr().err
    one_sentence(said, f"lipmdeq {words[0]}: ")
    assert len(said) < 250 and ("must be at most 1000 characters long" in said or "is too large for any" in said)


@pytest.mark.parametrize("text", ["0", "-1", "9", "1.5", "", "9" * 5000, "1e1", "٣", "+2"])
def test_whole_numbers_of_benchmarks(text, capsys):
    """D4: --threads 100000 is a segmentation fault, --rounds 0 has no median."""
    parser = shell.Parser()
    parser.add_argument("--threads", type=shell.whole(1, 8))
    assert parser.parse_args(["--threads", "8"]).threads == 8
    with pytest.raises(SystemExit):
        parser.parse_args([f"--threads={text}"])
    said = capsys.readouterr().err
    assert f"--threads: '{text[:100]}': must be a whole number >= 1 and <= 8" in said


@pytest.mark.parametrize("size", ["0", "-8", "1.5", "abc", "1025", "1e30", "inf", "", "None", "True"])
def test_image_size(size, capsys):
    """D6: zero is no wish for the default."""
    code = main(["certify", WEIGHTS, "--image-size", size])
    said = capsys.readouterr()
    if size == "None":
        assert code == 0
        return
    assert code == 1 and said.out == ""
    one_sentence(said.err, "lipmdeq certify: image_size = ")
    assert "must be a whole number >= 1 and <= 1024" in said.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-p", "a", "-inf"], "a = -inf: must be in (0, 1]"),
        (["-p", "a", "-1e5"], "a = -100000.0: must be in (0, 1]"),
        (["-p", "a", "-x"], "a = '-x': must be a number in (0, 1]"),
        (["--parameter", "c", "-nan"], "c = nan: must be in (0, "),
        (["--par", "lr", "-1"], "lr = -1: must be in (0, "),
        (["-p", "-a", "3"], "-a = 3: not a parameter"),
        (["-p", "--json", "-q"], "--json = '-q': not a parameter"),
        (["-q", "-p", "model", "--"], "model = '--': must be one of lipschitz, mdeq"),
        (["-p", "seed", "-p", "-p", "a", "0.4"], "seed = '-p': must be"),
    ],
)
def test_any_value_is_answered_by_name(words, sentence, capsys):
    """D17: not argparse's words."""
    assert main(["train", *words]) == 1
    one_sentence(capsys.readouterr().err, f"lipmdeq train: {sentence}")


@pytest.mark.slow
def test_one_of_several_processes_speaks(tmp_path):
    """D18: the same sentence once; what only process 1 has to say is heard too."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run([*launch, "-m", "lipmdeq", "train", "-p", "a", "7"], cwd=tmp_path)
    assert done.returncode != 0 and done.stderr.count("lipmdeq train: a = 7: must be in (0, 1]") == 1, done.stderr
    (tmp_path / "odd.py").write_text(
        "import os\nfrom lipmdeq.experiments.shell import say\nsay(f'process {os.environ[\"RANK\"]}: trouble')\nsay('both')\n"
    )
    done = run([*launch, "odd.py"], cwd=tmp_path)
    assert [done.stderr.count(t) for t in ("process 0: trouble", "process 1: trouble", "both")] == [1, 1, 1], (
        done.stderr
    )
