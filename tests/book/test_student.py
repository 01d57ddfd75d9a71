"""The student edition (tools/student.py): complete, without solutions, runnable; and the graders of the lessons."""

import ast
import builtins
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from portable import Book, blocks, expand  # noqa: E402
from student import ANSWER, strip, write  # noqa: E402

BOOK = Book()


@pytest.fixture(scope="module")
def edition(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("student") / "edition"
    write(folder, BOOK)
    return folder


def source(name: str) -> list[dict]:
    return BOOK.notebooks[name]["cells"]


def solutions(name: str) -> list[str]:
    """Every line that belongs to a solution, text and code, long enough to be recognised."""
    lines, inside = [], False
    for cell in source(name):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            lines += text.splitlines() if inside else []
            continue
        for block in blocks(text):
            if block.name in ("solution-start", "solution-end"):
                inside = block.name == "solution-start"
            elif block.name == "solution" or inside:
                lines += BOOK.plain(name, block.body).splitlines()
    return [line.strip() for line in lines if len(line.strip()) > 25]


@pytest.mark.parametrize("name", BOOK.names)
def test_exercises_stay_and_solutions_go(edition, name):
    notebook = nbformat.read(edition / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")
    text = "\n".join(cell.source for cell in notebook.cells)
    asked = [b for c in source(name) if c["cell_type"] == "markdown" for b in blocks("".join(c["source"]))]
    asked = [block for block in asked if block.name == "exercise"]
    for block in asked:
        assert BOOK.plain_block(name, block) in text, f"{block.label} is missing"
    outside = "\n".join(cell.source for cell in notebook.cells if not cell.source.startswith("### Exercise"))
    kept = "\n".join("".join(c["source"]) for c in source(name) if c["cell_type"] == "code")
    leaked = [line for line in solutions(name) if line in outside and kept.count(line) < 2]
    assert not leaked
    answers = sum(cell.source == ANSWER for cell in notebook.cells)
    graded = sum("@grader" in cell.source for cell in notebook.cells)
    assert answers + graded == len(asked), "each exercise has room for an answer, or a grader"
    words = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert not re.search(r"\{[\w:-]+\}`|^`{3,}\{|^:{3,}\{|\\norm\b|\\bm\b", words, re.M), "MyST left"


def test_every_lesson_with_exercises_has_a_grader():
    for name in BOOK.names:
        text = "\n".join("".join(cell["source"]) for cell in source(name))
        assert ("**In code.**" in text) == ("@grader" in text), name


def test_solutions_are_recognised():
    """The test above would be worth nothing if it looked for nothing."""
    found = {name: solutions(name) for name in BOOK.names}
    assert any("np.ceil(np.log(target)" in line for line in found["01_banach"])
    assert sum(map(len, found.values())) > 120


@pytest.mark.parametrize("name", BOOK.names)
def test_no_cell_needs_a_name_of_a_solution(edition, name):
    """Cheaper than running all lessons: every name that a cell reads is bound by some cell that is still there."""
    notebook = nbformat.read(edition / "notebooks" / f"{name}.ipynb", as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.split(".")[0])
    assert not read - bound


def test_one_lesson_runs_and_its_attempts_are_answered(edition):
    """With the first attempts as they are: the graders say ✗, nothing is raised."""
    from nbclient import NotebookClient

    notebook = nbformat.read(edition / "notebooks" / "01_banach.ipynb", as_version=4)
    where = {"metadata": {"path": str(edition / "notebooks")}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    attempt = next(cell for cell in notebook.cells if cell.id == "banach-attempt")
    assert "✗ large enough" in attempt.outputs[0].text


def test_folder_is_complete(edition):
    """What the notebooks read is there, beside them; the package imports from the folder itself."""
    text = "".join(path.read_text("utf8") for path in (edition / "notebooks").glob("*.ipynb"))
    for path in set(re.findall(r"\.\./((?:results|configs)/[\w./-]+)", text)):
        assert (edition / path).exists(), path
    for table, protocol in set(re.findall(r'load\(\\"(\w+)\\", \\"(\w+)\\"', text)):
        assert (edition / "configs" / protocol / table).is_dir(), (protocol, table)
    probe = "import lipmdeq, pathlib; print(pathlib.Path(lipmdeq.__file__).parent.parent)"
    run = subprocess.run([sys.executable, "-B", "-c", probe], cwd=edition, capture_output=True, text=True)
    assert Path(run.stdout.strip()).resolve() == edition.resolve()
    assert (edition / "README.md").is_file() and not list(edition.rglob("__pycache__"))
    tasks = (edition / "notebooks" / "lab.md").read_text("utf8")
    assert "### Task 5: mend it" in tasks and "instructor" not in tasks and "{doc}" not in tasks
    assert all((edition / "notebooks" / name).is_file() for name in re.findall(r"\]\((\w+\.ipynb)\)", tasks))


def test_a_solution_that_never_ends_is_refused():
    class Broken:
        notebooks = {"x": {"cells": [{"cell_type": "markdown", "id": "a", "source": "````{solution-start} b\n````"}]}}

    with pytest.raises(ValueError, match="without {solution-end}"):
        strip(Broken, "x")


@pytest.mark.parametrize(
    ("tex", "plain"),
    [
        (r"\norm{a_{i}} + \R^d", r"|a_{i}| + \mathbb{R}^d"),
        (r"\norm{\norm{x}}", "||x||"),
        (r"\bm z, \bm\theta, \bmod", r"*z*, *\theta *, \bmod"),
    ],
)
def test_macros(tex, plain):
    macros = {"norm": ["|#1|", 1], "bm": ["*#1*", 1], "R": r"\mathbb{R}"}
    assert expand(tex, macros) == plain


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("{ref}`explorer <lipschitz-explorer>`", "explorer"),  # of book/explorer.md, which is no notebook
        ("{ref}`its lesson <lesson-bound>`", "[its lesson](12_bound.ipynb)"),
        ("{ref}`two\nlines <lesson-bound>`", "[two\nlines](12_bound.ipynb)"),
        ("{doc}`the lesson </notebooks/12_bound>`", "[the lesson](12_bound.ipynb)"),
        ("{doc}`the page </book/notation>`", "the page"),
        ("{numref}`its figure <fig:a-priori>`", "its figure"),  # of no notebook
        ("{py:obj}`L <lipmdeq.bounds.LipschitzSpec.L>`", "L"),
    ],
)
def test_roles_with_a_title(text, plain):
    assert BOOK.plain("01_banach", text) == plain
    assert BOOK.plain("12_bound", "{ref}`its lesson <lesson-bound>`") == "its lesson", "no link to itself"


def test_figures_of_a_page_without_a_number():
    """notebooks/train.ipynb stands between lessons; its figures are counted by themselves."""
    book = Book()
    figure = {"mystnb": {"figure": {"name": "fig:of-train", "caption": "x"}}}
    book.notebooks["train"]["cells"].append({"cell_type": "code", "metadata": figure, "source": ""})
    home, called = book.labels["fig:of-train"]
    assert home == "train" and re.fullmatch(r"Figure \d+", called)
    assert book.labels["fig:banach-cobweb"] == ("01_banach", "Figure 1.1")
    assert book.role("01_banach", "numref", "words <fig:of-train>") == "[words](train.ipynb)"


# ---- graders: the right answer of the book, and wrong ones that students give


def nearly(L, first_step, tol):
    """The number of steps of claim 3, before it is rounded up."""
    target = tol * (1 - L) / first_step
    return 0 if target >= 1 else 1 if L == 0 else math.log(target) / math.log(L)


GRADERS = {  # lesson: cells to run first, the name in the solution, wrong answers
    "01_banach": (
        ["banach-setup", "banach-grader", "banach-solution-code"],
        "budget_solution",
        [lambda *x: int(nearly(*x)), lambda *x: math.ceil(nearly(*x)) + 1, nearly, lambda *x: None],
    ),
    "06_backward": (
        ["backward-setup", "backward-grader", "backward-solution-code"],
        "terms_solution",
        [lambda L, degrees: 1, lambda L, degrees: 1000, lambda L, degrees: math.sin(degrees)],
    ),
    "10_up_down": (
        ["setup", "pool-grader", "pool-solution"],
        "lip_pool",
        [lambda s, t: math.sqrt(s * t), lambda s, t: 1 / (s * t), lambda s, t: "1"],
    ),
    "11_composition": (
        ["setup", "two-by-two", "weights-grader", "weights-solution"],
        "weights",
        [lambda M: M.sum(axis=0), lambda M: -M[0], lambda M: []],
    ),
    "15_landscape": (
        ["landscape-setup", "landscape-grader", "landscape-solution"],
        "best_step_solution",
        [lambda W: 0.1, lambda W: 0.0, lambda W: 2 / max(1.0, W.norm().item() ** 2), lambda W: "1"],
    ),
    "16_certified": (
        ["certified-setup", "certified-grader", "certified-solution"],
        "largest_tau_solution",
        [lambda k, tol: tol ** (1 / k), lambda k, tol: 0.1, lambda k, tol: 1.0, lambda k, tol: "1"],
    ),
    "14_depth": (
        ["depth-setup", "depth-grader", "depth-solution"],
        "undecided_solution",
        [
            lambda L: ([[L, 0.0], [0.0, L]], [1.0, 2.0]),  # tight, the same label
            lambda L: ([[0.0, -0.5 * L], [0.5 * L, 0.0]], [1 + L / 2 + L * L / 2, 1.0]),  # half of what is allowed
            lambda L: ([[0.0, -2.0], [2.0, 0.0]], [2.0, 1.0]),  # too large a norm
            lambda L: L,
        ],
    ),
    "13_certificate": (
        ["certificate-setup", "certificate-grader", "certificate-solution"],
        "one_direction",
        [lambda z: 0.5 * z, lambda z: 2 * z, lambda z: None],
    ),
    "03_build": (
        ["build-setup", "build-repair-grader", "build-repair-solution"],
        "tame_frobenius",
        [
            lambda V: V.clamp(-0.9, 0.9),
            lambda V: 0.9 * V / V.square().sum().sqrt(),  # small ones do not stay
            lambda V: V * (0.9 / V.square().sum().sqrt()).clamp(max=1).detach() * 0.5,
            lambda V: V * (0.9 / torch.linalg.matrix_norm(V, 2)).clamp(max=1),
            lambda V: 0 * V,
        ],
    ),
}


@pytest.mark.parametrize("name", GRADERS)
def test_graders_tell_right_from_wrong(name, capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(ROOT / "notebooks")
    cells, right, wrong = GRADERS[name]
    code = {cell["id"]: "".join(cell["source"]) for cell in source(name)}
    space: dict = {}
    default = torch.get_default_dtype()
    try:
        for cell in cells[:-1]:
            exec(code[cell], space)
        exec(code[cells[-1]].split("\n\n\n")[0], space)  # the function, without the call of the grader
        capsys.readouterr()
        space["grade"](space[right])
        said = capsys.readouterr().out
        assert "✓" in said and "✗" not in said
        solution = json.dumps(code[cells[-1]])
        for answer in [*wrong, None, ...]:
            space["grade"](answer)
            said = capsys.readouterr().out
            assert "✗" in said and "Traceback" not in said
            assert not [line for line in said.splitlines() if len(line) > 20 and line in solution]
    finally:
        torch.set_default_dtype(default)
