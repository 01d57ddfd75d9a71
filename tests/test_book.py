"""The book's own code: API pages against what lessons use, buttons against the one address."""

import inspect
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import api  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIRST_FILES = "bounds norms layers model solvers implicit certificate data training checks plotting".split()


def look_up(name: str) -> object:
    _, module, *path = name.split(".")
    found = import_module(f"lipmdeq.{module}")
    for part in path:
        found = getattr(found, part)
    return found


# ---- API pages


@pytest.mark.parametrize("name", api.documented())
def test_described_names_exist_and_have_doc_strings(name):
    assert inspect.getdoc(look_up(name))


def test_no_name_is_described_twice():
    assert len(api.documented()) == len(set(api.documented()))


@pytest.mark.parametrize("file", FIRST_FILES)
def test_what_a_first_file_offers_is_described(file):
    """The names in ``__all__``, else the classes that the file defines."""
    module = import_module(f"lipmdeq.{file}")
    own = [n for n, o in vars(module).items() if getattr(o, "__module__", "") == module.__name__]
    offered = getattr(module, "__all__", [n for n in own if inspect.isclass(vars(module)[n]) and n[0] != "_"])
    assert not [name for name in offered if f"lipmdeq.{file}.{name}" not in api.documented()]


def test_every_public_name_of_the_package_is_described():
    import lipmdeq

    names = [f"lipmdeq.{lipmdeq._HOME[name]}.{name}" for name in lipmdeq.__all__ if name != "__version__"]
    assert not [name for name in names if api.full_name(name) is None]


def test_the_coverage_table_links_to_descriptions():
    for entry in yaml.safe_load((ROOT / "book" / "coverage.yml").read_text("utf8")):
        for name in entry["code"]:
            full = api.full_name(name)
            assert full and look_up(full) is not None, name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lessons_end_with_links_to_what_they_import(path):
    assert api.imported(path)
