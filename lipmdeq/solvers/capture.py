"""f as a CUDA graph, for solves with a fixed number of steps on a GPU."""

from __future__ import annotations

import warnings

import torch

from lipmdeq.solvers.solution import Map, SolverWarning, State, branches, like

WARM_UP = 3  # evaluations of a solve before a capture: torch asks for a few, on the stream that will capture
WORTH_CAPTURING = 16  # evaluations still to come: to capture f, the host does the work of one, and builds the graph
_refused: set[object] = set()  # the code of maps that could not be captured: they are not tried again
_last: dict[torch.device, torch.cuda.CUDAGraph] = {}  # kept, so that the next graph finds memory and asks for none


def captured(f: Map, z: State) -> Map:
    """f as a CUDA graph, for the evaluations without gradient of one solve that are still to come: launched as a whole.

    Written after the documentation of torch and tested with a stand-in; it has not been run on a GPU. torch captures on any
    stream but the default one, and runs products with the Jacobian on the stream on which f was recorded: where all happens on
    one other stream (as in a run), both can be captured, and the evaluations before have warmed it up. `torch.cuda.graph` would
    wait for the GPU and give back all cached memory, so its two calls are made here. Where f cannot be captured, f itself is
    returned, with a warning, and such an f is not tried again.
    """
    code = getattr(f, "__code__", type(f))
    if code in _refused:
        return f
    here, graph = [t.clone() for t in branches(z)], torch.cuda.CUDAGraph()
    device = here[0].device
    pool = _last[device].pool() if device in _last else None
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads load data and watch processes
        try:
            out = f(like(here, z))
        finally:
            graph.capture_end()
    except RuntimeError as e:
        _refused.add(code)
        warnings.warn(f"f was not captured as a CUDA graph ({e})", SolverWarning, stacklevel=2)
        return f
    _last[device] = graph

    def replay(z: State) -> State:
        for a, b in zip(here, branches(z), strict=True):
            a.copy_(b)
        graph.replay()
        return like([t.clone() for t in branches(out)], z)  # the next replay writes over out

    return replay
