"""Stored outputs are compared by what a reader sees: a changed curve is seen, a changed name or last digit is not."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import nbformat
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from compare import SVG, same_number, same_text, settle  # noqa: E402
from pictures import difference, same_outline  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAME = re.compile(r"[mpih][0-9a-f]{10}")
CURVE = re.compile(r'<path d="(M [^"]*)" clip-path="[^"]*" style="fill: none; stroke')


def pictures() -> list[str]:
    """All pictures that the notebooks store."""
    cells = [cell for path in NOTEBOOKS for cell in nbformat.read(path, 4).cells]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return [output["data"][SVG] for output in outputs if SVG in output.get("data", {})]


PICTURES = pictures()


@pytest.fixture(autouse=True)
def plain_style():
    """Another test of this process may have set a style."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def draw(tmp_path: Path, scale: float = 1.0, salt: str = "one", colour: str = "#0072b2") -> str:
    """A curve, points, a bar, a hatched bar and an image; ``scale`` stretches the curve alone."""
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        fig = Figure()
        left, right = fig.subplots(1, 2)
        x = np.linspace(0, 3, 40)
        left.plot(x, scale * np.sin(x), color=colour)
        left.plot(x, 2 * np.cos(x), "o--")
        left.bar([1, 2], [0.5, 0.7], hatch="/", alpha=0.3)
        left.set(xlim=(0, 3), ylim=(-2, 2))
        right.imshow(np.outer(x, x))
        fig.savefig(tmp_path / "drawn.svg", metadata={"Date": None})
    return (tmp_path / "drawn.svg").read_text("utf8")


def jitter(svg: str, size: float, seed: int = 0) -> str:
    """The picture as another processor may draw it: other last digits, so other names."""
    rng = random.Random(seed)
    svg = NAME.sub(lambda m: m[0][0] + m[0][:0:-1], svg)
    return re.sub(r"\d+\.\d{4,6}", lambda m: f"{float(m[0]) + rng.uniform(-size, size):.6f}", svg)


def stretched(svg: str, curve: re.Match) -> str:
    """One curve of the picture, 2 % away from where it is."""
    moved = re.sub(r"([ML]) (\S+) (\S+)", lambda m: f"{m[1]} {m[2]} {1.02 * float(m[3]):.6f}", curve[1])
    return svg[: curve.start(1)] + moved + svg[curve.end(1) :]


# ---- pictures


def test_there_are_pictures_to_compare():
    assert len(PICTURES) >= 40


@pytest.mark.parametrize("number", range(len(PICTURES)))
def test_every_stored_picture(number):
    svg = PICTURES[number]
    assert difference(svg, jitter(svg, 1e-5)) == ""
    curves = [curve for curve in CURVE.finditer(svg) if curve[1].count("L") > 2]
    for curve in curves:
        assert difference(svg, stretched(svg, curve)), "a curve moved by 2 % is not seen"
    colour = re.search(r"stroke: (#(?!000000|dddddd)[0-9a-f]{6})", svg)
    assert not colour or difference(svg, svg.replace(colour[1], "#7f0000"))


def test_a_curve_changed_by_two_percent_is_seen(tmp_path):
    assert "line2d" in difference(draw(tmp_path), draw(tmp_path, scale=1.02))


def test_names_count_nowhere(tmp_path):
    one, other = draw(tmp_path), draw(tmp_path, salt="another")
    assert NAME.findall(one) != NAME.findall(other)
    assert difference(one, other) == ""


def test_the_last_digits_count_nowhere(tmp_path):
    svg = draw(tmp_path)
    assert difference(svg, draw(tmp_path, scale=1 + 1e-7)) == ""
    x = re.search(r'<use xlink:href="#m\w+" x="([\d.]+)"', svg)
    here = float(x[1])
    for shift, seen in ((0.04, False), (-0.09, False), (0.12, True), (3, True)):
        moved = svg[: x.start(1)] + f"{here + shift:.6f}" + svg[x.end(1) :]
        assert bool(difference(svg, moved)) == seen, shift


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stroke: #0072b2", "stroke: #d55e00"),
        ("opacity: 0.3", "opacity: 0.4"),
        ("stroke-dasharray: ", "stroke-dasharray: 9,"),
        ("scale(0.1 -0.1)", "scale(0.15 -0.15)"),
        ("stroke-linejoin: round", "stroke-linejoin: bevel"),
        ('<g id="line2d_3">', '<g><path d="M 0 0 L 9 9"/></g><g id="line2d_3">'),
        ("#DejaVuSans-14", "#DejaVuSans-13"),
    ],
)
def test_what_a_reader_sees_is_seen(tmp_path, old, new):
    svg = draw(tmp_path)
    assert old in svg
    assert difference(svg, svg.replace(old, new, 1))


def test_pixels_are_seen(tmp_path):
    import base64
    import io

    from PIL import Image

    svg = draw(tmp_path)
    data = re.search(r"base64,\s*([^\"]+)", svg)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(data[1]))))
    for change, seen in ((1, False), (20, True)):
        other, stream = image.copy(), io.BytesIO()
        other[5:9, 5:9, 0] = np.where(image[5:9, 5:9, 0] < 128, image[5:9, 5:9, 0] + change, 0)
        Image.fromarray(other).save(stream, "png")
        text = base64.b64encode(stream.getvalue()).decode()
        assert bool(difference(svg, svg[: data.start(1)] + text + svg[data.end(1) :])) == seen


def test_a_point_that_lies_on_the_line_may_be_dropped():
    assert same_outline("M 0 0 L 5 5 L 10 10", "M 0 0 L 10 10")
    assert not same_outline("M 0 0 L 5 5.3 L 10 10", "M 0 0 L 10 10")
    assert not same_outline("M 0 0 L 9 0 L 9 9 L 0 9 z", "M 0 0 L 9 9 L 9 0 L 0 9 z"), "the same corners only"
    assert not same_outline("M 0 0 L 10 10", "M 0 0 M 10 10")
    assert not same_outline("M 0 0 Q 5 0 10 10", "M 0 0 L 10 10")


# ---- numbers


@pytest.mark.parametrize(
    ("stored", "new", "same"),
    [
        ("0.4312", "0.4313", True),
        ("0.4312", "0.4314", False),
        ("9.99", "10.00", True),
        ("1.23e-04", "1.24e-04", True),
        ("1.23e-04", "1.23e-05", False),
        ("0.4", "0.5", False),
        ("-1.234", "1.234", False),
    ],
)
def test_measured_numbers(stored, new, same):
    assert same_number(stored, new) == same


def test_counts_and_words_are_compared_as_text():
    assert same_text("12 steps, error 1.234", "12 steps, error 1.235")
    assert not same_text("12 steps, error 1.234", "13 steps, error 1.234")
    assert not same_text("bound 1.234", "found 1.234")


def test_only_measured_cells_may_differ():
    stored, new = ([{"output_type": "stream", "name": "stdout", "text": t}] for t in ("1.234", "1.235"))
    assert settle(stored, new, measured=True) == stored
    assert settle(stored, new) == new != stored
    assert settle(stored, [], measured=True) == []


# ---- the command


CODE = """import matplotlib.pyplot as plt
from lipmdeq.plotting import use_style
use_style()
plt.plot([0, 1, 2], [0, 1, {height}])
plt.ylim(0, 2)
plt.show()"""


def run_notebook(folder: Path, notebook) -> subprocess.CompletedProcess:
    """What users type, `pytest --nbval notebooks/`, in a copy of the project with this one notebook."""
    (folder / "notebooks").mkdir(exist_ok=True)
    (folder / "tools").mkdir(exist_ok=True)
    for name in ("notebooks/conftest.py", "tools/compare.py", "tools/pictures.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    nbformat.write(notebook, folder / "notebooks" / "one.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", "notebooks/"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, env=environment)


@pytest.mark.slow
def test_the_command_compares_what_a_reader_sees(tmp_path):
    from nbclient import NotebookClient

    def cell(height: float):
        return nbformat.v4.new_code_cell(CODE.format(height=height))

    notebook = nbformat.v4.new_notebook(cells=[cell(1.5)])
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    NotebookClient(notebook, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    svg = output["data"][SVG]
    output["data"][SVG] = jitter(svg, 1e-5)
    done = run_notebook(tmp_path, notebook)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    (curve,) = [curve for curve in CURVE.finditer(svg) if curve[1].count("L") == 2]
    output["data"][SVG] = stretched(svg, curve)
    done = run_notebook(tmp_path, notebook)
    assert done.returncode == 1 and "the stored picture" in done.stdout and "line2d" in done.stdout, done.stdout
