"""``python -m lipmdeq bound | train | cost | certify | depth | tables | seal | data``, each with ``--help``."""

import sys

from lipmdeq.experiments.shell import end, guarded


def main(argv: list[str] | None = None) -> int:
    """Run one command; 0 if it went well, 1 with one sentence on stderr for bad input."""
    from lipmdeq.experiments.commands import run  # here, where an interrupt is one sentence already

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    end(guarded(f"lipmdeq {command}".strip(), main))
