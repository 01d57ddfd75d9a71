"""How every command ends: with one sentence and the right exit code, whatever happens to it, its terminal or its disk.

| what happens | exit code |
|---|---|
| all went well | 0 |
| bad input, damaged files, a full disk | 1 |
| options that the parser does not know | 2 |
| Ctrl-C | 130 |
| whoever read the output is gone (``… \\| head``) | 141 |

Light: nothing here imports torch, unless torchrun started several processes and one has something to say.
"""

from __future__ import annotations

import argparse
import codecs
import os
import signal
import sys
from collections.abc import Callable

FAILED, INTERRUPTED, CLOSED = 1, 130, 141
# What a terminal without Unicode shows instead; anything else becomes a question mark.
PLAIN = {
    "…": "...", "–": "-", "—": "-", "−": "-", "≤": "<=", "≥": ">=", "×": "x", "·": "*", "‖": "||", "∞": "inf", "→": "->",
    "γ": "gamma", "α": "alpha", "₁": "1", "₂": "2", "²": "^2", "✓": "ok", "✗": "no", "’": "'", "“": '"', "”": '"',
}  # fmt: skip


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error("lipmdeq-plain", _plain)


class OneSentence(Exception):
    """An error whose message says it all: shells, Jupyter and papermill show the sentence, not a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class Parser(argparse.ArgumentParser):
    """argparse's, whose help is not lost in silence when it cannot be written."""

    def print_help(self, file=None) -> None:
        print(self.format_help(), end="", file=file)


def whole(low: int, high: int) -> Callable[[str], int]:
    """For argparse: an option that takes a whole number in [low, high]."""

    def read(text: str) -> int:
        if text.isascii() and text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"{text[:100]!r}: must be a whole number >= {low} and <= {high}")

    return read


def guarded(command: str, main: Callable[[], int | None]) -> int:
    """Run ``main`` and return the exit code of the process; trouble becomes one sentence on stderr, begun by ``command``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="lipmdeq-plain")
    try:
        try:
            code = main() or 0
        except SystemExit as e:  # of argparse: what it printed has to get out too
            code = e.code or 0
        if isinstance(code, str):
            say(code)
            code = FAILED
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        say(f"{command}: interrupted")
        code = INTERRUPTED
    except OneSentence as e:
        say(f"{command}: {e}")
        code = FAILED
    except BrokenPipeError:
        say(f"{command}: nobody reads the output any more")
        code = CLOSED
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        say(f"{command}: {where}{e.strerror or e}")
        code = FAILED
    except MemoryError as e:
        say(f"{command}: not enough memory{f' ({e})' if str(e) else ''}")
        code = FAILED
    _leave(quietly=code in (INTERRUPTED, CLOSED))
    return code


def end(code: int) -> None:
    """End the process with this code. After Ctrl-C at once: where it fell into code that Python had as text (``exec`` of a
    dataclass, while a module was imported), Python would end by the signal, although the interrupt was caught.
    """
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)


def _leave(quietly: bool) -> None:
    """What can still go wrong on the way out: a second Ctrl-C, and text that waits for a stream that takes no more."""
    if quietly:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def say(sentence: str) -> None:
    """Print to stderr; of several processes with the same sentence the first one does."""
    if sys.stderr is None or not _turn(sentence):
        return
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody is left to be told


def _turn(sentence: str) -> bool:
    """Whether this process is the first of those that torchrun started to say this; without an answer process 0 is."""
    try:
        if int(os.environ.get("WORLD_SIZE", 1)) <= 1:
            return True
        from datetime import timedelta

        from torch.distributed import TCPStore

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
        return store.add(f"lipmdeq/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{sentence}", 1) == 1
    except (KeyError, ValueError, RuntimeError):
        return os.environ.get("RANK", "0") == "0"
