"""The house: rooms whose arrows point one way, no cycles, no lazy import that hides one, no private name across files."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lipmdeq"
# Each room, and each file at the top, with the rooms and files that it may import.
MAY = {
    "lipmdeq": set(),
    "checks": set(),
    "plotting": set(),
    "bounds": set(),
    "norms": {"bounds"},
    "solvers": {"bounds"},
    "model": {"bounds", "norms", "solvers"},
    "jacobian": {"solvers"},
    "certificate": {"bounds", "norms", "model", "jacobian", "checks"},
    "data": {"bounds"},
}
HEAVY = {"experiments": "light commands", "__main__": "light commands"}  # may import anything, late if that saves torch
CORE_LINES, FUNCTION_LINES, PARAMETERS = 4500, 40, 6
LONG = {  # longer functions, and why
    "lipmdeq.certificate.certify": "checks its arguments, then fills the certificate field by field",
    "lipmdeq.data.datasets.load": "one branch for each data set",
    "lipmdeq.experiments.bound._table": "a page of output, line by line",
    "lipmdeq.experiments.report.make_record": "all fields of a record in one place",
}
MANY = {  # functions with more parameters, and why
    "lipmdeq.norms.geometry.geometry_of": "the arguments of torch.nn.Conv2d",
    "lipmdeq.model.layers.__init__": "a convolution: sizes, bound, map, weight normalisation",
    "lipmdeq.data.datasets.load": "the parameters of a run that choose its images",
    "lipmdeq.solvers.gradients.deq": "the one entry to all gradient rules",
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path) for path in FILES}


def room(name: str) -> str:
    """The room, or the file at the top, that a module belongs to."""
    return name.split(".")[1] if "." in name else name


def imports(path: Path) -> list[tuple[str, str | None, bool]]:
    """(module, name or None, whether it is inside a function) for every import from the package; not those for types only."""
    found = []

    def visit(node: ast.AST, late: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((a.name, None, late) for a in node.names if a.name.split(".")[0] == "lipmdeq")
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            for a in node.names if (node.module or "").split(".")[0] == "lipmdeq" else ():
                inner = f"{node.module}.{a.name}"
                found.append((inner, None, late) if inner in MODULES else (node.module, a.name, late))
        for child in ast.iter_child_nodes(node):
            visit(child, late or isinstance(node, ast.FunctionDef))

    visit(ast.parse(path.read_text("utf8")), False)
    return found


GRAPH = {module(path): imports(path) for path in FILES}


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_arrows_point_one_way(name):
    here = room(name)
    for other, _, _ in GRAPH[name]:
        there = room(other)
        if here in HEAVY or there in (here, "lipmdeq"):
            continue
        assert there in MAY[here], f"{name} imports {other}: {here} may import {sorted(MAY[here])}"


def test_no_cycle_between_files():
    """Late imports count too; a room's front door counts as the files behind it only for those outside."""
    TopologicalSorter({a: {b for b, _, _ in bs if b != a} for a, bs in GRAPH.items()}).prepare()


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_no_late_import_in_the_core(name):
    assert room(name) in HEAVY or not [other for other, _, late in GRAPH[name] if late]


@pytest.mark.parametrize("name", sorted(GRAPH))
def test_no_private_name_crosses_files(name):
    assert not [(other, what) for other, what, _ in GRAPH[name] if what and what.startswith("_") and what[1] != "_"]


def functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.FunctionDef):
                yield f"{module(path)}.{node.name}", node


def test_functions_are_short():
    long = {name: size for name, f in functions() if (size := f.end_lineno - f.lineno + 1) > FUNCTION_LINES}
    assert set(long) <= set(LONG), long


def test_functions_have_few_parameters():
    def count(f: ast.FunctionDef) -> int:
        args = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        return len([a for a in args if a.arg not in ("self", "cls")])

    many = {name: n for name, f in functions() if (n := count(f)) > PARAMETERS}
    assert set(many) <= set(MANY), many


def test_the_core_is_small():
    core = [path for path in FILES if room(module(path)) not in ("experiments", "data")]
    assert sum(path.read_text("utf8").count("\n") for path in core) <= CORE_LINES
