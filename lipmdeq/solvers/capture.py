"""f as a CUDA graph, for solves with a fixed number of steps on a GPU."""

from __future__ import annotations

import functools
import warnings

import torch

from lipmdeq.solvers.solution import Map, SolverWarning, State, branches, like

WARM_UP = 3  # evaluations before a capture: torch asks for a few, on the stream that will capture
WORTH_CAPTURING = 16  # evaluations in a row: to capture one costs three, one to record, and a wait of the host
_refused: set[object] = set()  # the code of maps that could not be captured: they are not tried again


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device on which maps are warmed up and captured: libraries keep a handle for each stream."""
    return torch.cuda.Stream(device)


def captured(f: Map, z: State) -> Map:
    """f as a CUDA graph, for the evaluations without gradient of one solve: they are launched as a whole.

    Written after the documentation of torch and tested with a stand-in; it has not been run on a GPU. Where f cannot be
    captured, f itself is returned, with a warning, and such an f is not tried again. Products with the Jacobian are
    expected to be among these: torch runs them on the stream on which f was recorded, which does not capture.
    """
    code = getattr(f, "__code__", type(f))
    if code in _refused:
        return f
    here, graph = [t.clone() for t in branches(z)], torch.cuda.CUDAGraph()
    side, current = _side_stream(here[0].device), torch.cuda.current_stream(here[0].device)
    try:
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                f(like(here, z))
        current.wait_stream(side)
        # The outer `with`: where a capture fails, torch.cuda.graph does not go back to the current stream.
        with torch.cuda.stream(current), torch.cuda.graph(graph, stream=side):
            out = f(like(here, z))
    except RuntimeError as e:
        _refused.add(code)
        warnings.warn(f"f was not captured as a CUDA graph ({e})", SolverWarning, stacklevel=2)
        return f

    def replay(z: State) -> State:
        for a, b in zip(here, branches(z), strict=True):
            a.copy_(b)
        graph.replay()
        return like([t.clone() for t in branches(out)], z)  # the next replay writes over out

    return replay
