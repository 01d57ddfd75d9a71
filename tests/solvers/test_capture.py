"""Capture of f as a CUDA graph, with a stand-in for torch's: there is no GPU here.

Like the real one, the stand-in runs nothing while it captures (what the operations returned is made NaN afterwards), keeps the
memory of all inputs and results, computes into the same memory at each replay, refuses what makes the host wait, and refuses the
default stream.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipmdeq.model import build
from lipmdeq.solvers import Picard, SolverWarning, capture, fixed
from lipmdeq.solvers.graph import Recorder

pytestmark = pytest.mark.filterwarnings("ignore:a solve stopped before")
WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Tape(TorchDispatchMode):
    def __init__(self, calls: list):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Graph:
    made: "list[Graph]" = []
    default_stream = False

    def __init__(self):
        self.calls, self.replays, self.given, self.tape = [], 0, None, None
        Graph.made.append(self)

    def pool(self) -> tuple[int, int]:
        return (id(self), 0)

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        if Graph.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.given, self.tape = (pool, capture_error_mode), Tape(self.calls)
        self.tape.__enter__()

    def capture_end(self) -> None:
        self.tape.__exit__(None, None, None)
        self.tape = None
        foreign, made = set(), {}
        for _, *given, out in self.calls:
            foreign |= {_memory(t) for t in tree_leaves(given) if isinstance(t, torch.Tensor)} - made.keys()
            results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            made |= {_memory(t): t for t in results if _memory(t) not in foreign}
        for t in made.values():
            t.untyped_storage().fill_(255)  # NaN in floating point

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """The graphs that are made; torch's own way to capture is there, and may not be taken, because it waits for the GPU."""
    waited = []
    monkeypatch.setattr(capture, "_refused", set())
    monkeypatch.setattr(capture, "_last", {})
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: waited.append(name))
    yield Graph.made
    assert not waited and not any(graph.tape for graph in Graph.made)


class Affine:
    """z -> z A + c, and how often it was called."""

    def __init__(self, rate: float = 0.98, d: int = 6):
        g = torch.Generator().manual_seed(0)
        a = torch.randn(d, d, generator=g)
        a = a + a.T
        self.a, self.c = rate * a / torch.linalg.matrix_norm(a, 2), torch.randn(3, d, generator=g)
        self.calls = 0

    def __call__(self, z):
        self.calls += 1
        return z @ self.a + self.c


def start() -> OnCuda:
    return torch.zeros(3, 6).as_subclass(OnCuda)


LEAST = capture.WARM_UP + 1 + capture.WORTH_CAPTURING


def test_solve_is_the_same_and_launches_the_graph(graphs):
    steps, f = 30, Affine()
    found, want = (Picard(steps=steps, tol=1e-3).solve(h, z) for h, z in ((f, start()), (Affine(), torch.zeros(3, 6))))
    assert found.nfe == want.nfe == steps and torch.equal(found.z.as_subclass(torch.Tensor), want.z)
    # One residual would be 0 and the other NaN, if z and f(z) were the memory of the graph.
    assert torch.equal(found.residuals, want.residuals) and (found.residuals > 0).all()
    (graph,) = graphs
    # The first evaluations warm up, and nothing is evaluated for the sake of the capture.
    assert graph.replays == steps - capture.WARM_UP and f.calls == capture.WARM_UP + 1
    assert graph.given == (None, "thread_local")  # threads that load data may go on


def test_last_evaluation_records_outside_the_graph(graphs):
    f = Affine()
    calls = []
    found = Picard(steps=30).solve(f, start(), final=lambda z: (calls.append(z), f(z))[1])
    assert len(calls) == 1 and found.final_used and graphs[0].replays == 29 - capture.WARM_UP


@pytest.mark.parametrize("steps, captures", [(LEAST - 1, 0), (LEAST, 1)])
def test_short_solves_are_not_captured(graphs, steps, captures):
    Picard(steps=steps).solve(Affine(), start())
    assert len(graphs) == captures


def test_host_tensors_are_not_captured(graphs):
    Picard(steps=30).solve(Affine(), torch.zeros(3, 6))
    assert not graphs


def test_several_blocks_share_one_graph(graphs, monkeypatch):
    """ "auto" looks after each block: the graph of the first one serves the others."""
    monkeypatch.setattr(fixed, "BLOCK", LEAST)
    f = Affine()
    solver = Picard(steps="auto", tol=1e-5, max_iter=500)
    found, want = solver.solve(f, start()), solver.solve(Affine(), torch.zeros(3, 6))
    assert found.nfe == want.nfe > 40 and torch.equal(found.z.as_subclass(torch.Tensor), want.z)
    assert len(graphs) == 1 and graphs[0].replays == found.nfe - capture.WARM_UP


def test_next_graph_takes_the_memory_of_the_last_one(graphs):
    """Which is kept for it: a new pool for each solve would ask the driver for memory, and make the GPU wait."""
    for _ in range(3):
        Picard(steps=30).solve(Affine(), start())
    assert [graph.given[0] for graph in graphs] == [None, graphs[0].pool(), graphs[1].pool()]
    assert list(capture._last.values()) == graphs[-1:]


def test_what_cannot_be_captured_runs_as_it_is(graphs):
    class Reads(Affine):
        def __call__(self, z):
            return super().__call__(z) * float(self.c.sum() > -1e9)

    f = Reads()
    with pytest.warns(SolverWarning, match="f was not captured as a CUDA graph .operation not permitted when stream"):
        found = Picard(steps=30).solve(f, start())
    want = Picard(steps=30).solve(Reads(), torch.zeros(3, 6))
    assert torch.equal(found.z.as_subclass(torch.Tensor), want.z)
    again = Picard(steps=30).solve(f, start())  # not tried again, so no warning
    assert torch.equal(again.z, found.z) and len(graphs) == 1
    Picard(steps=30).solve(Affine(), start())  # others are
    assert len(graphs) == 2


def test_default_stream_is_left_alone(graphs, monkeypatch):
    monkeypatch.setattr(Graph, "default_stream", True)
    with pytest.warns(SolverWarning, match="must be captured on a non-default stream"):
        found = Picard(steps=30).solve(Affine(), start())
    assert torch.equal(found.z, Picard(steps=30).solve(Affine(), torch.zeros(3, 6)).z)


@pytest.mark.parametrize("fields", [dict(a=0.4), dict(block="potential")], ids=["paper", "potential"])
def test_f_of_the_models_can_be_captured(graphs, fields):
    """Nothing in f makes the host wait, and nothing that it returns depends on the time of the capture."""
    torch.manual_seed(0)
    net = build("digits", **fields)
    with torch.no_grad():
        f, z0, _ = net.problem(torch.randn(2, 1, 8, 8))
        points = [[torch.randn_like(t) for t in z0] for _ in range(3)]
        kept = [[t.clone() for t in z] for z in points]
        fast = capture.captured(f, points[0])
        found = [fast(z) for z in points]
        for z, same, got in zip(points, kept, found, strict=True):
            assert all(map(torch.equal, got, f(z))) and all(map(torch.equal, z, same))
    assert graphs[0].replays == 3


def test_one_tensor(graphs):
    f, (one, two) = Affine(), torch.randn(2, 3, 6)
    fast = capture.captured(f, one)
    first, second = fast(one), fast(two)
    assert torch.equal(first, f(one)) and torch.equal(second, f(two))


@pytest.mark.parametrize("fields", [dict(a=0.4), dict(block="potential")], ids=["paper", "potential"])
def test_products_with_the_jacobian_can_be_captured(graphs, fields):
    """x -> x J + g, of the graph that the last evaluation of the forward solve recorded: nothing in it makes the host wait."""
    torch.manual_seed(0)
    net = build("digits", **fields)
    f, z0, _ = net.problem(torch.randn(2, 1, 8, 8))
    recorder = Recorder(f, needs_z=True)
    with torch.no_grad():
        recorder([torch.randn_like(t) for t in z0])
        points = [[torch.randn_like(t) for t in z0] for _ in range(3)]

        def product(x):
            return list(recorder.gradient(x, recorder.z_in))

        fast = capture.captured(product, points[0])
        for x, got in zip(points, [fast(x) for x in points], strict=True):
            assert all(map(torch.equal, got, product(x)))
    assert graphs[0].replays == 3
