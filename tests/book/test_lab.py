"""The two-hour lab: what its code prints stands below it, its commands are valid, its tables are those of the lesson."""

import contextlib
import io
import json
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch

from lipmdeq.experiments.parameters import RunConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "book" / "teaching" / "lab.md").read_text("utf8")
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def alike(printed: str, said: str) -> bool:
    """The same words; a constant may differ by 0.02, a count of images by 15: another processor rounds differently."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", said):
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(said), strict=True)
    return all(abs(float(a) - float(b)) <= (0.02 if "." in a else 15) for a, b in pairs)


@pytest.mark.slow
def test_the_code_prints_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", TEXT, re.M | re.S)
    assert [kind for kind, _ in blocks] == ["python", "text"] * 2
    threads, space = torch.get_num_threads(), {}
    try:
        torch.set_num_threads(1)
        for (_, code), (_, said) in zip(blocks[::2], blocks[1::2], strict=True):
            with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as out:
                warnings.simplefilter("ignore")  # solves that do not converge, on purpose
                exec(code, space)
            assert len(out.getvalue().splitlines()) == len(said.splitlines())
            for printed, line in zip(out.getvalue().splitlines(), said.splitlines(), strict=True):
                assert alike(printed, line), f"{printed!r} is not {line!r}"
    finally:
        torch.set_num_threads(threads)


def test_the_comparison_can_fail():
    assert alike("L 0.11; 355 right", "L 0.12; 352 right")
    assert not alike("L 0.11; 355 right", "L 0.14; 355 right") and not alike("L 0.11; 355 right", "L 0.11; 300 right")
    assert not alike("L 0.11", "l 0.11")


def test_the_commands_are_valid():
    """Each setting is one that papermill and the parameters accept; the other commands exist."""
    commands = [shlex.split(line) for line in re.findall(r"`(papermill [^`]+)`", TEXT)]
    assert len(commands) == 6 and len({tuple(words) for words in commands}) == 6
    for program, notebook, out, *words in commands:
        assert program == "papermill" and (ROOT / notebook).is_file() and out == "mine.ipynb"
        given = {words[i + 1]: words[i + 2] for i in range(0, len(words), 3)}
        assert words[::3] == ["-p"] * len(given) and given.pop("out") == "runs/mine"
        RunConfig.from_mapping({name: float(v) if re.match(r"[\d.]+$", v) else v for name, v in given.items()})
    source = "".join(path.read_text("utf8") for path in (ROOT / "lipmdeq").rglob("*.py"))
    for command in re.findall(r"^python -m lipmdeq (\w+) runs/mine/checkpoint\.ckpt$", TEXT, re.M):
        assert f'"{command}"' in source


def test_points_add_up():
    table = TEXT.split("| points | for |")[1].split("\n\n")[0]
    assert sum(map(int, re.findall(r"^\| (\d+) \|", table, re.M))) == 20 and "| **20** |" in table


def test_what_to_expect_is_the_table_of_the_lesson():
    cells = json.loads((ROOT / "notebooks" / "14_depth.ipynb").read_text("utf8"))["cells"]
    cell = next(c for c in cells if c["id"] == "depth-report-table")
    lines = "".join("".join(output["text"]) for output in cell["outputs"]).splitlines()
    rows = ["accuracy at f(0)", "accuracy at z*", "f(0) has the label of z*", "evaluations of f", "proved L"]
    lesson = [next(line[26:].split() for line in lines if line.startswith(row)) for row in rows]
    table = TEXT.split("## For the instructor")[1]
    ours = [re.findall(r"[^|]+", line) for line in re.findall(r"^\| (?:paper|MDEQ|certified).*$", table, re.M)]
    assert [[cell.strip() for cell in row[1:]] for row in ours] == [
        list(column) for column in zip(*lesson, strict=True)
    ]
