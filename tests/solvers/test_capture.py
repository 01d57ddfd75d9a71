"""Capture of f as a CUDA graph, with a stand-in for torch's: there is no GPU here.

Like the real one, the stand-in runs nothing while it captures (what the operations returned is made NaN afterwards), keeps the
memory of all inputs and results, computes into the same memory at each replay, and refuses what makes the host wait.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipmdeq.model import build
from lipmdeq.solvers import Picard, SolverWarning, capture, fixed

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
    def __init__(self):
        self.calls, self.replays = [], 0

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    def __init__(self, device=None):
        self.device, self.waited = device, []

    def wait_stream(self, other) -> None:
        self.waited.append(other)


class Cuda:
    """What `captured` uses of torch.cuda, and what it was asked."""

    def __init__(self, patch):
        self.default = self.now = Stream()
        self.graphs, self.streams = [], []
        for name in ("CUDAGraph", "Stream", "current_stream", "stream", "graph"):
            patch.setattr(torch.cuda, name, getattr(self, name))

    def CUDAGraph(self) -> Graph:
        self.graphs.append(Graph())
        return self.graphs[-1]

    def Stream(self, device=None) -> Stream:
        self.streams.append(Stream(device))
        return self.streams[-1]

    def current_stream(self, device=None) -> Stream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def graph(self, graph: Graph, stream: Stream):
        before, self.now = self.now, stream
        with Tape(graph.calls):
            yield
        self.now = before  # not after an error: torch's own leaves the stream as it is then
        foreign, made = set(), {}
        for _, *given, out in graph.calls:
            foreign |= {_memory(t) for t in tree_leaves(given) if isinstance(t, torch.Tensor)} - made.keys()
            made |= {
                _memory(t): t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and _memory(t) not in foreign
            }
        for t in made.values():
            t.untyped_storage().fill_(255)  # NaN in floating point


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


class OnCuda(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    monkeypatch.setattr(capture, "_refused", set())
    capture._side_stream.cache_clear()
    yield Cuda(monkeypatch)
    capture._side_stream.cache_clear()


class Affine:
    """z -> z A + c, and on which stream it was called."""

    def __init__(self, cuda: Cuda | None = None, rate: float = 0.98, d: int = 6):
        g = torch.Generator().manual_seed(0)
        a = torch.randn(d, d, generator=g)
        a = a + a.T
        self.a, self.c = rate * a / torch.linalg.matrix_norm(a, 2), torch.randn(3, d, generator=g)
        self.cuda, self.on = cuda, []

    def __call__(self, z):
        self.on.append(self.cuda.now if self.cuda else None)
        return z @ self.a + self.c


def start() -> OnCuda:
    return torch.zeros(3, 6).as_subclass(OnCuda)


def test_solve_is_the_same_and_launches_the_graph(cuda):
    steps = 30
    f = Affine(cuda)
    found, want = (Picard(steps=steps, tol=1e-3).solve(h, z) for h, z in ((f, start()), (Affine(), torch.zeros(3, 6))))
    assert found.nfe == want.nfe == steps and torch.equal(found.z.as_subclass(torch.Tensor), want.z)
    # One residual would be 0 and the other NaN, if z and f(z) were the memory of the graph.
    assert torch.equal(found.residuals, want.residuals) and (found.residuals > 0).all()
    (graph,), (side,) = cuda.graphs, cuda.streams
    assert graph.replays == steps - 1
    # The first evaluation on the stream of the solve, then warm-up and capture, on the same other one.
    assert f.on == [cuda.default] + [side] * (capture.WARM_UP + 1)
    assert side.waited == [cuda.default] and cuda.default.waited == [side]


def test_last_evaluation_records_outside_the_graph(cuda):
    f = Affine(cuda)
    calls = []
    found = Picard(steps=30).solve(f, start(), final=lambda z: (calls.append(z), f(z))[1])
    assert len(calls) == 1 and found.final_used and cuda.graphs[0].replays == 28
    assert f.on[-1] is cuda.default


@pytest.mark.parametrize("steps, captures", [(capture.WORTH_CAPTURING + 1, 0), (capture.WORTH_CAPTURING + 2, 1)])
def test_short_solves_are_not_captured(cuda, steps, captures):
    Picard(steps=steps).solve(Affine(cuda), start())
    assert len(cuda.graphs) == captures


def test_host_tensors_are_not_captured(cuda):
    Picard(steps=30).solve(Affine(cuda), torch.zeros(3, 6))
    assert not cuda.graphs


def test_several_blocks_share_one_graph(cuda, monkeypatch):
    """ "auto" looks after each block: the graph of the first one serves the others."""
    monkeypatch.setattr(fixed, "BLOCK", 20)
    f = Affine(cuda)
    solver = Picard(steps="auto", tol=1e-5, max_iter=500)
    found, want = solver.solve(f, start()), solver.solve(Affine(), torch.zeros(3, 6))
    assert found.nfe == want.nfe > 40 and torch.equal(found.z.as_subclass(torch.Tensor), want.z)
    assert len(cuda.graphs) == 1 and cuda.graphs[0].replays == found.nfe - 1


def test_what_cannot_be_captured_runs_as_it_is(cuda):
    class Reads(Affine):
        def __call__(self, z):
            return super().__call__(z) * float(self.c.sum() > -1e9)

    f = Reads(cuda)
    with pytest.warns(SolverWarning, match="f was not captured as a CUDA graph .operation not permitted when stream"):
        found = Picard(steps=30).solve(f, start())
    want = Picard(steps=30).solve(Reads(), torch.zeros(3, 6))
    assert torch.equal(found.z.as_subclass(torch.Tensor), want.z) and cuda.now is cuda.default
    again = Picard(steps=30).solve(f, start())  # not tried again, so no warning
    assert torch.equal(again.z, found.z) and len(cuda.graphs) == 1
    Picard(steps=30).solve(Affine(cuda), start())  # others are
    assert len(cuda.graphs) == 2


@pytest.mark.parametrize("fields", [dict(a=0.4), dict(block="potential")], ids=["paper", "potential"])
def test_f_of_the_models_can_be_captured(cuda, fields):
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
    assert cuda.graphs[0].replays == 3


def test_one_tensor(cuda):
    f, (one, two) = Affine(), torch.randn(2, 3, 6)
    fast = capture.captured(f, one)
    first, second = fast(one), fast(two)
    assert torch.equal(first, f(one)) and torch.equal(second, f(two))
