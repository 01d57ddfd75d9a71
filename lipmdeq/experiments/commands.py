"""The commands of ``python -m lipmdeq``. All but ``bound`` need torch and import it when they run, so that parsers are light.

A command is one ``add_…`` function, which declares its arguments and sets ``run``; that one gets the parsed arguments and
returns the exit code.
"""

from __future__ import annotations

import argparse
import sys
import warnings

from lipmdeq.bounds.operations import check_whole
from lipmdeq.experiments.bound import add_bound, parse_number
from lipmdeq.experiments.parameters import OneSentence, RunConfig, RunError, bounded
from lipmdeq.experiments.record import json_text, seal_file
from lipmdeq.experiments.shell import INTERRUPTED, Parser, say

LARGEST_IMAGE = 1024  # norms of larger maps would take hours


def parse_value(text: str) -> object:
    """A value from the shell: number, True, False, None, a list such as [1,3], else text."""
    words = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if text[:1] == "[" and text[-1:] == "]":
        return [parse_value(t.strip()) for t in text[1:-1].split(",") if t.strip()]
    return parse_number(text)


def add_train(commands) -> None:
    """``train``: the training loop, with the parameters of notebooks/train.ipynb."""
    parser = commands.add_parser(
        "train",
        help="train a model, or go on training it; all parameters as in notebooks/train.ipynb",
        description="Train a model, or go on where it was stopped. Under torchrun the batch is shared by the processes.",
        epilog="parameters: " + ", ".join(RunConfig.model_fields),
    )
    parser.add_argument("-f", "--file", metavar="config.yaml", help="parameters from a file, e.g. of configs/")
    parser.add_argument(
        "-p", "--parameter", nargs=2, action="append", default=[], metavar=("name", "value"), help="one parameter"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no line for each epoch")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Train; the last line says what came out."""
    changes = {name.strip(): parse_value(value.removeprefix(" ")) for name, value in args.parameter}
    cfg = RunConfig.from_yaml(args.file, **changes) if args.file else RunConfig.from_mapping(changes)
    from lipmdeq.experiments.training import train

    try:
        record = train(cfg, log=None if args.quiet else lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        kept = f"{cfg.out} keeps the last checkpoint, the same command goes on there" if cfg.out else "nothing is kept"
        say(f"lipmdeq train: interrupted; {kept}")
        return INTERRUPTED
    except RuntimeError as e:
        if isinstance(e, OneSentence) or "by peer" not in str(e):
            raise
        raise RunError("another process of this run ended before this one") from None
    r = record["result"]
    print(f"{r['split']} accuracy {r['accuracy']:.2%}; {record['guarantee']}")
    return 0


def add_cost(commands) -> None:
    """``cost``: what a run will cost, before it is paid for."""
    parser = commands.add_parser("cost", help="weights, multiply-adds, memory and hours of a run, without running it")
    parser.add_argument("-f", "--file", required=True, metavar="config.yaml", help="parameters, e.g. of configs/")
    parser.add_argument("--machine", default="a100", help="cpu, or a GPU: t4, v100, a100 (default), rtx3090, h100")
    parser.add_argument(
        "--utilisation", type=parse_value, default=0.3, metavar="X", help="share of its peak, in (0, 1]"
    )
    parser.add_argument(
        "--forward", type=parse_value, metavar="K", help="evaluations of f in a step (default: max_forward)"
    )
    parser.add_argument("--backward", type=parse_value, metavar="K", help="products backward (default: max_backward)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run_cost)


def run_cost(args: argparse.Namespace) -> int:
    """Print the cost on the machine asked for and, in the table, on the CPU beside it."""
    from lipmdeq.experiments.cost import cost

    counts = {}
    for name in ("forward", "backward"):
        if getattr(args, name) is not None:
            counts[name] = check_whole(name, getattr(args, name), 1, 10_000)
    if isinstance(args.utilisation, bool) or not isinstance(args.utilisation, int | float):
        raise ValueError(f"utilisation = {args.utilisation!r}: must be a number in (0, 1]")
    cfg = RunConfig.from_yaml(args.file)
    found = cost(cfg, args.machine, args.utilisation, **counts)
    if args.json:
        print(json_text(found.to_dict()))
        return 0
    print(found)
    if args.machine != "cpu":
        print(f"hours on {cfg.threads} cores of a CPU: {cost(cfg, 'cpu', args.utilisation, **counts).hours:.3g}")
    return 0


def add_certify(commands) -> None:
    """``certify``: what is proved about a trained model."""
    parser = commands.add_parser("certify", help="prove the Lipschitz constant of a trained model")
    parser.add_argument("checkpoint", help="checkpoint.ckpt of a run, or a .ckpt file of results/")
    parser.add_argument("--image-size", type=parse_value, metavar="S", help="side of the images (default: as trained)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run_certify)


def run_certify(args: argparse.Namespace) -> int:
    """Print the certificate of a checkpoint."""
    from lipmdeq.certificate import certify
    from lipmdeq.experiments.checkpoints import load_checkpoint, load_model
    from lipmdeq.experiments.training import test_images

    size, x = args.image_size, None
    if size is not None:
        size = check_whole("image_size", size, 1, LARGEST_IMAGE)
    model = load_model(args.checkpoint)
    if size is None:
        try:  # measured on test images where the data set is here, else on noise, and the table says which
            x, _ = test_images(RunConfig.from_mapping(load_checkpoint(args.checkpoint)["parameters"]), 8)
        except OneSentence:
            x = None
    certificate = certify(model, size, x=x, progress=not args.json)
    print(json_text(certificate.to_dict()) if args.json else certificate)
    return 0


def add_seal(commands) -> None:
    """``seal``: the checksum of records that have none."""
    parser = commands.add_parser("seal", help="add the checksum to records that were made before there was one")
    parser.add_argument("files", nargs="+", metavar="record.json", help="JSON files without a field sha256")
    parser.set_defaults(run=run_seal)


def run_seal(args: argparse.Namespace) -> int:
    """Seal each file; one that has a seal is checked."""
    for path in args.files:
        seal_file(path)
    print(f"{len(args.files)} sealed")
    return 0


def add_depth(commands) -> None:
    """``depth``: what the iteration of a trained model is worth."""
    parser = commands.add_parser("depth", help="measure on test images whether a trained model uses its equilibrium")
    parser.add_argument("checkpoint", help="checkpoint.ckpt of a run, or a .ckpt file of results/")
    parser.add_argument(
        "--images", type=parse_value, default=2000, metavar="N", help="number of test images (default: 2000)"
    )
    parser.add_argument("--data-root", default="data", metavar="folder", help="folder of the data sets")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run_depth)


def run_depth(args: argparse.Namespace) -> int:
    """Print the depth report of a checkpoint on the test images of its data set."""
    from lipmdeq.experiments.checkpoints import load_checkpoint, load_model
    from lipmdeq.experiments.depth_report import depth
    from lipmdeq.experiments.training import test_images

    images = check_whole("images", args.images, 1, 10**9)
    model = load_model(args.checkpoint)
    cfg = RunConfig.from_mapping(load_checkpoint(args.checkpoint)["parameters"])
    report = depth(model, *test_images(cfg.changed(data_root=args.data_root), images))
    print(json_text(report.to_dict()) if args.json else report)
    return 0


def add_tables(commands) -> None:
    """``tables``: the paper's tables and figures from the records."""
    parser = commands.add_parser("tables", help="write the paper's tables and figures from the records of runs")
    parser.add_argument("--protocol", default="cpu", help="folder of configs/ and results/ (default: cpu)")
    parser.add_argument("--tables", metavar="a,b", help="only these of table1,table2,table3,figure4")
    parser.add_argument("--only", metavar="a,b", help="only these files, e.g. table1.md,figure3.svg")
    parser.add_argument("--out", metavar="folder", help="where to write (default: results/<protocol>/tables)")
    parser.set_defaults(run=run_tables)


def run_tables(args: argparse.Namespace) -> int:
    """Write them; the records are those of the current folder."""
    from lipmdeq.experiments.figures import products, write

    files = args.only.split(",") if args.only else products(args.tables.split(",")) if args.tables else None
    written = write(args.protocol, out=args.out, files=files)
    print(f"{len(written)} files in {written[0].parent}")
    return 0


def add_data(commands) -> None:
    """``data``: the larger data sets (``make data``)."""
    parser = commands.add_parser("data", help="fetch the data sets", description="Fetch, check and convert data sets.")
    names = "digits, cifar10, tiny-imagenet-25, or all (the default)"
    parser.add_argument("names", nargs="*", metavar="name", help=names)
    parser.add_argument("--root", default="data", help="folder of the data sets (default: data)")
    tiny = "where tiny-imagenet-25.tar.xz is (default: $LIPMDEQ_TINY, data)"
    parser.add_argument("--tiny", metavar="FILE", help=tiny)
    parser.set_defaults(run=run_data)


def run_data(args: argparse.Namespace) -> int:
    """Fetch one set after the other; ``all`` asks for what can be had, only a set asked for by name fails without a source."""
    from lipmdeq.data.fetch import SMALL, NoSource, fetch
    from lipmdeq.data.files import DataError

    everything, code = not args.names or "all" in args.names, 0
    for name in SMALL if everything else args.names:
        try:
            fetch(name, args.root, args.tiny)
        except (DataError, ValueError) as e:
            skipped = everything and isinstance(e, NoSource)
            print(f"{name}: {'skipped: ' if skipped else ''}{e}", file=sys.stderr)
            code = code if skipped else 1
    return code


COMMANDS = (add_bound, add_train, add_cost, add_certify, add_depth, add_tables, add_seal, add_data)


def _join_negatives(argv: list[str]) -> list[str]:
    """Write ``-a -1e5`` as ``-a=-1e5``, which argparse would take for two options.

    The two words after ``-p`` of ``train`` may be anything; a space before a "-" tells argparse that it is no option.
    """
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


def run(argv: list[str]) -> int:
    """Run the command that ``argv`` names and return its exit code; bad input becomes one sentence on stderr and 1."""
    parser = Parser(prog="python -m lipmdeq", description="Lipschitz multiscale DEQ")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(_join_negatives(argv))
    try:
        for name, value in vars(args).items():
            for one in value if isinstance(value, list) else [value]:
                bounded(name, one)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a solve stopped before")  # a SolverWarning; what converged is printed
            return args.run(args)
    except (OneSentence, ValueError) as error:
        say(f"lipmdeq {args.command}: {error}")
        return 1
