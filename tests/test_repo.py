"""The repository agrees with itself: table of contents, notebooks, versions, light import."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml

from lipmdeq.experiments import tables
from lipmdeq.experiments.record import read_record, read_sealed
from lipmdeq.experiments.rows import over_seeds, read_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from check_book import pages  # noqa: E402
from pictures import difference  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LESSONS = [path for path in NOTEBOOKS if path.stem not in ("train", "22_paper_code_book")]  # those with exercises
TOC = pages(yaml.safe_load((ROOT / "_toc.yml").read_text("utf8")))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))


def name_of(path: Path) -> str:
    return path.stem


def load(path: Path) -> dict:
    return json.loads(path.read_text("utf8"))


def code_cells(path: Path) -> list[dict]:
    return [c for c in load(path)["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]


# ---- table of contents


def test_every_page_is_in_the_table_of_contents():
    sources = [*NOTEBOOKS, *(ROOT / "book").rglob("*.md"), *(ROOT / "book").rglob("*.ipynb")]
    missing = {str(path.relative_to(ROOT).with_suffix("")) for path in sources} - set(TOC)
    assert not missing, f"not in _toc.yml, so never built: {sorted(missing)}"


def test_every_entry_of_the_table_of_contents_exists_once():
    absent = [page for page in TOC if not any((ROOT / f"{page}{end}").is_file() for end in (".md", ".ipynb"))]
    assert not absent, f"in _toc.yml without a file: {absent}"
    assert len(TOC) == len(set(TOC)), "a page is listed twice"


def test_lessons_are_numbered_in_the_order_of_reading():
    lessons = [page.removeprefix("notebooks/") for page in TOC if re.match(r"notebooks/\d", page)]
    assert [lesson.split("_")[0] for lesson in lessons] == [f"{i:02d}" for i in range(1, len(lessons) + 1)]


# ---- notebooks


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_format(path):
    notebook = load(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids)), "cell ids must be unique"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_outputs_are_stored(path):
    """A cell without stored outputs passes nbval whatever it prints, so every cell must have run, in order."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run: make outputs"
    for cell in cells:
        assert all(output["output_type"] != "error" for output in cell["outputs"])
    for cell in cells:
        text = json.dumps(cell["outputs"])
        assert not re.search(r"/(home|root|Users|tmp|work)/", text), f"a machine's path in the output of {cell['id']}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_outputs_hold_no_raw_formulas(path):
    """Dollar signs are formulas in the text of a page, not in what a cell prints."""
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", []):
            for kind in ("text/markdown", "text/html"):
                assert "$" not in "".join(output.get("data", {}).get(kind, "")), cell["id"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_cells_are_short(path):
    cells = [c for c in code_cells(path) if "parameters" not in c["metadata"].get("tags", [])]  # a list, not a program
    lengths = [len("".join(cell["source"]).splitlines()) for cell in cells]
    assert max(lengths) <= 40
    assert statistics.median(lengths) <= 8


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_figures_have_alt_text(path):
    for cell in code_cells(path):
        images = [o for o in cell["outputs"] if any(kind.startswith("image/") for kind in o.get("data", {}))]
        alt = cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "")
        assert not images or len(alt) > 20, f"cell {cell['id']}: alt text in metadata mystnb.image.alt"


@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_lesson_anatomy(path):
    cells = load(path)["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert re.search(r"^(\([\w-]+\)=\n)?# ", text), "begins with its title"
    assert ":class: lesson" in text, "the box: what you will be able to do, what you need, how long it takes"
    first = next(c for c in cells if c["cell_type"] == "code" and "colab" not in c["metadata"].get("tags", []))
    assert "hide-input" in first["metadata"].get("tags", []), "the set-up cell is tagged hide-input"
    exercises = re.findall(r"\{exercise(?:-start)?\}[^\n]*\n:label: (\S+)", text)
    solutions = re.findall(r"\{solution(?:-start)?\} (\S+)", text)
    assert 3 <= len(exercises) <= 5
    assert sorted(exercises) == sorted(solutions), "each exercise has one solution"
    assert text.count(":class: dropdown") >= len(solutions), "solutions fold out"
    assert re.search(r"^## Summary", text, re.M)


# ---- versions


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 and re.fullmatch(r"[\w.+!-]+", pin[1]) for pin in pins), "only name==version"
    return {normal(name): pinned for name, pinned in pins}


def requirements() -> set[str]:
    project = PYPROJECT["project"]
    listed = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    return {normal(re.match(r"[\w.-]+", requirement)[0]) for requirement in listed}


def test_one_version_number():
    import lipmdeq

    stated = PYPROJECT["project"]["version"]
    assert lipmdeq.__version__ == stated
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text("utf8"))["version"] == stated
    assert f"## {stated}" in (ROOT / "CHANGELOG.md").read_text("utf8")


def test_constraints_pin_every_requirement():
    assert not requirements() - set(constraints())


def test_these_tests_run_with_the_pinned_versions():
    pins = constraints()
    different = {}
    for name in requirements():
        try:
            installed = version(name).split("+")[0]  # torch adds its build, as in 2.14.1+cpu
        except PackageNotFoundError:
            installed = "absent"
        if installed != pins[name]:
            different[name] = (installed, pins[name])
    assert not different, f"installed, pinned: {different}; run: make setup"


def test_conda_uses_the_same_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf8"))
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == ["-c constraints.txt", "-e .[book,test,workflow]"]
    assert "python=3.11" in environment["dependencies"]


# ---- the package


def test_import_is_light():
    """`import lipmdeq` and the closed forms must not cost the seconds that torch takes."""
    for statement in ("import lipmdeq", "import lipmdeq.bounds", "import lipmdeq.checks"):
        probe = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", probe], cwd=ROOT).returncode == 0, statement


def test_public_names():
    import lipmdeq

    for name in lipmdeq.__all__:
        assert getattr(lipmdeq, name) is not None
        assert name in dir(lipmdeq)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = lipmdeq.nonsense


@pytest.mark.parametrize("name", ["readings", "depth"])
def test_the_pictures_are_current(tmp_path, name):
    """The pictures of README and start page are what lipmdeq.bounds and the records give now."""
    drawn = tmp_path / f"{name}.svg"
    subprocess.run([sys.executable, ROOT / "tools" / "picture.py", name, drawn], check=True)
    stored = (ROOT / "book" / "_static" / f"{name}.svg").read_text("utf8")
    assert difference(stored, drawn.read_text("utf8")) == "", "run: make picture"


# ---- commands


def commands(name: str) -> tuple[list[str], list[str]]:
    """What a page tells to type: lines of its code blocks, without comments, and `make …` in its text."""
    text = (ROOT / name).read_text("utf8")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return lines, inline


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_targets_that_exist(name):
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text("utf8"), re.M)
    lines, inline = commands(name)
    told = [words.split()[1:] for words in lines + inline if words.startswith("make ")]
    assert told
    assert not {word for words in told for word in words if "=" not in word} - set(targets)


def test_readme_works_in_a_fresh_shell():
    """Nothing is activated after `make book`: programs of .venv are typed after its activation only, and exist there."""
    lines, inline = commands("README.md")
    assert not [words for words in inline if re.match(r"(python|papermill|snakemake) ", words)]
    assert lines[0] == "source .venv/bin/activate" and len(lines) > 2
    for line in lines[1:]:
        program, *words = line.split()
        assert (Path(sys.executable).parent / program).exists(), line
        assert all((ROOT / word).exists() for word in words if "/" in word), line
    bound = next(line for line in lines if line.startswith("python -m lipmdeq"))
    assert subprocess.run([sys.executable, *bound.split()[1:]], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


def test_make_train_passes_the_slope():
    done = subprocess.run(["make", "-n", "train", "A=0.3"], cwd=ROOT, capture_output=True, text=True)
    assert "python -m lipmdeq train -p a 0.3" in done.stdout, done.stderr


PYTHON = """#!/bin/sh
# plays python: a version, `-m venv --clear .venv`, `-m pip …`
case "$*" in
  *"-m venv"*)
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    echo "command = $0 -m venv --clear $(pwd -P)/.venv" >.venv/pyvenv.cfg
    echo "#!$(pwd -P)/.venv/bin/python" >.venv/bin/papermill ;;
  *-c*) echo 3.11 ;;
  *--version*) echo Python 3.11 ;;
esac
"""


def test_a_moved_folder_is_noticed(tmp_path):
    """Programs in .venv/bin begin with the path of the folder: after a move they are made again, otherwise never."""
    old, new, programs = tmp_path / "old", tmp_path / "new place", tmp_path / "bin"
    (old / "tools").mkdir(parents=True)
    programs.mkdir()
    for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, old / name)
    for name, text in (("python", PYTHON), ("df", "#!/bin/sh\nprintf 'x\\nx 0 0 99999999\\n'\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"

    def set_up(folder: Path) -> str:
        command, environment = ["tools/setup.sh"], {"PATH": path, "PYTHON": str(programs / "python")}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        first = (folder / ".venv/bin/papermill").read_text().splitlines()[0]
        assert first == f"#!{folder.resolve()}/.venv/bin/python"
        return done.stdout

    assert "virtual environment" in set_up(old)
    assert set_up(old) == "", "nothing to do"
    with (old / "constraints.txt").open("a") as pins:
        pins.write("# another version\n")
    assert "installing" in (said := set_up(old)) and "virtual environment" not in said
    old.rename(new)
    assert "this folder was moved" in set_up(new)
    assert set_up(new) == ""


def test_results_in_the_readme_are_those_of_the_records():
    """The README's table, ours and the paper's, made from the records of eight epochs; paste what this prints."""
    ours = read_rows("beyond", "cpu", ROOT, {"potential-t0.9": {"name": "certified family, τ = 0.9"}})
    table = tables.load("table1", root=ROOT)
    rows, expected = [*ours, *(table[name] for name in ("lip-a1.0", "lip-a0.4", "lip-a0.1", "mdeq"))], []
    for row in rows:
        both = [f"nfe_train_{way}" for way in ("forward", "backward")]
        depth, L = [record["depth"] for record in row.records], row.value("perron_train").high
        cells = [row.title, row.ours("accuracy"), f"{row.paper.get('accuracy', '–')}"]
        cells += [over_seeds(100 * d["accuracy"][0] for d in depth).show(1)]
        cells += [over_seeds(math.floor(1000 * d["same_label"][0]) / 10 for d in depth).show(1)]
        cells += [f"{L:.2g}" if L < 1 else "none", " / ".join(row.ours(key) for key in both)]
        cells += [" / ".join(f"{row.paper[key]}" for key in both) if row.paper.get(both[0]) else "–"]
        cells += [row.ours("speedup"), f"{row.paper.get('speedup', '–')}"]
        expected.append(f"| {' | '.join(cells)} |")
    text = " ".join((ROOT / "README.md").read_text("utf8").split())
    assert " ".join(expected) in text, "\n".join(["README.md should say:", *expected])
    assert all(row.records[0]["seed"] == 0 and row.config.epochs == 8 for row in rows), "the README says: eight epochs"
    weights = [f"{row.records[0]['model']['parameters'] / 1e6:.2f}M" for row in rows]
    assert set(weights[1:]) == {weights[1]} and f"{weights[0]} weights instead of {weights[1]}" in text


def test_opponents_in_the_readme_are_those_of_the_records():
    """Explicit networks, a ResNet, and each block with the other's input, eight epochs each."""
    text = " ".join((ROOT / "README.md").read_text("utf8").split())
    names = ("potential-k1", "potential-k3", "mdeq-all", "lip-a0.4-all", "potential-first")
    found = read_rows("beyond", "cpu", ROOT, {name: {"name": name} for name in names})
    one, three, free, paper, first = (f"{row.value('accuracy').mean:.1f} %" for row in found)
    resnet = read_sealed(ROOT / "results" / "cpu" / "resnet" / "test-lr0.004.json", "a ResNet")
    plain = f"an ordinary ResNet of the same size {100 * resnet['history'][-1]['accuracy']:.1f} %"
    assert f"trained by backpropagation, reach {one} and {three}, {plain}." in text
    assert f"and the same stem MDEQ reaches {free} and the paper's block at a = 0.4 {paper};" in text
    assert f"as theirs above, the certified family has {first}:" in text


def test_rates_in_the_recipe_are_those_of_the_records():
    """configs/cpu/README.md: validation accuracies of the recipe runs, the chosen one bold and used by the family's rows."""
    text = (ROOT / "configs" / "cpu" / "README.md").read_text("utf8")
    homes = {"mdeq": "table1/mdeq", "lip-a0.4": "table1/lip-a0.4", "potential": "beyond/potential-t0.9"}
    for row, config in homes.items():
        found = {}
        for path in sorted((ROOT / "results" / "cpu" / "recipe").glob(f"{row}-lr*/seed0.json")):
            record = read_record(path)
            assert record["result"]["split"] == "val" and path.parent.name == f"{row}-lr{record['parameters']['lr']:g}"
            found[record["parameters"]["lr"]] = 100 * record["result"]["accuracy"]
        best, rates = 0.004, sorted(found)
        while True:  # a step up or down, as long as it gains more than the binomial error of 5,000 images
            near = [r for r in rates if abs(rates.index(r) - rates.index(best)) == 1]
            next_ = max(near, key=found.get)
            if found[next_] <= found[best] + 0.7:
                break
            best = next_
        assert rates[0] < best < rates[-1], "a rate at the end of what was tried"
        shown = [
            "–" if rate not in found else f"**{found[rate]:.1f}**" if rate == best else f"{found[rate]:.1f}"
            for rate in (0.001, 0.002, 0.004, 0.008, 0.016)
        ]
        assert f"| {' | '.join(shown)} |" in text, (row, shown)
        assert yaml.safe_load((ROOT / "configs" / "cpu" / f"{config}.yaml").read_text("utf8"))["lr"] == best
