"""The shell: ``python -m lipmdeq bound | train | cost | certify | depth | tables | seal``.

A subcommand is one ``add_…`` function of :mod:`lipmdeq.experiments` that declares its arguments and sets ``run``. `run` gets the
parsed arguments and returns the exit code. A ValueError becomes one sentence on stderr and exit code 1.
"""

from __future__ import annotations

import argparse
import sys

from lipmdeq.shell import Parser, guarded, say


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    # imported here, where an interrupt is one sentence already
    from lipmdeq.experiments.bound import add_bound
    from lipmdeq.experiments.commands import add_certify, add_cost, add_depth, add_seal, add_tables, add_train

    parser = Parser(prog="python -m lipmdeq", description="Lipschitz multiscale DEQ")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (add_bound, add_train, add_cost, add_certify, add_depth, add_tables, add_seal):
        add(commands)
    return parser


def _join_negatives(argv: list[str]) -> list[str]:
    """Write ``-a -1e5`` as ``-a=-1e5``, which argparse would take for two options.

    The two words after ``-p`` of ``train`` may be anything; a space before a "-" tells argparse that it is no option.
    """
    from lipmdeq.experiments.bound import parse_number

    joined: list[str] = []
    plain = 0  # words that are taken as they are
    for word in argv:
        if plain:
            plain -= 1
            joined.append(f" {word}" if word.startswith("-") else word)
            continue
        if argv[0] == "train" and (word == "-p" or len(word) > 2 and "--parameter".startswith(word)):
            plain = 2
        negative = word.startswith("-") and not isinstance(parse_number(word), str)
        if negative and joined and joined[-1].startswith("-") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; 0 if it went well, 1 with one sentence on stderr for bad input."""
    from lipmdeq.experiments.parameters import OneSentence

    args = build_parser().parse_args(_join_negatives(sys.argv[1:] if argv is None else argv))
    try:
        return args.run(args)
    except (OneSentence, ValueError) as error:
        say(f"lipmdeq {args.command}: {error}")
        return 1


if __name__ == "__main__":
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    sys.exit(guarded(f"lipmdeq {command}".strip(), main))
