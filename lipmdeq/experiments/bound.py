"""``python -m lipmdeq bound -a 0.4`` prints the closed forms, with --json as one object; ``bound --block potential --tau 0.9``
does so for the certified family. Starts without torch.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass, replace

from lipmdeq import bounds
from lipmdeq.bounds import LipschitzSpec, PotentialSpec, check_choice
from lipmdeq.experiments.record import json_text

TOLERANCES = (1e-3, 1e-6)
BLOCKS = ("paper", "potential")


def parse_number(text: str) -> float | int | str:
    """Text of an option as a number where it is one; the check of the field rejects the rest by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Advice:
    """Change `field` from `now` to `to`, and the constant becomes `L`."""

    field: str
    now: float
    to: float
    L: float

    def __str__(self) -> str:
        verb = "lower" if self.to < self.now else "raise"
        # rounded down: a value just below 1 must not read as 1
        return f"{verb} {self.field} from {self.now:g} to {self.to:g}: L = {math.floor(self.L * 1e6) / 1e6:g}"


def _rounded(edge: float, up: bool) -> float:
    """Four decimals, or four digits of a number below 0.1, rounded up or down."""
    digits = 4 - min(0, math.floor(math.log10(edge)) + 1) if edge > 0 else 4
    return round((math.ceil if up else math.floor)(edge * 10.0**digits) / 10.0**digits, digits)


def advise(spec: LipschitzSpec, target: float = 1.0, reading: str = "perron", train: bool = True) -> list[Advice]:
    """Every change of one single field that brings L below `target`; empty if L is there already.

    `to` is the nearest value that does it, rounded towards the safe side; for n, the largest smaller n.
    """
    if spec.L(reading, train) < bounds.check_range("target", target):
        return []
    changes = {}
    for field in ("a", "c", "gamma", "alpha1", "alpha2", "p"):
        if interval := bounds.feasible(spec, field, target, reading, train):
            up = getattr(spec, field) <= interval[1]
            edge = interval[0] if up else interval[1]
            to = _rounded(edge, up)
            changes[field] = to if interval[0] <= to <= interval[1] else edge
    smaller = (n for n in range(spec.n - 1, 0, -1) if replace(spec, n=n).L(reading, train) < target)
    if n := next(smaller, None):
        changes["n"] = n
    return [Advice(f, getattr(spec, f), to, replace(spec, **{f: to}).L(reading, train)) for f, to in changes.items()]


def bound_report(spec, ablation: str | None = None) -> dict:
    """Everything ``bound`` has to say about a `LipschitzSpec`, or one of its ablations, as plain numbers, lists and dicts."""
    modes = {"train": True, "test": False}
    ops = {
        mode: spec.operations(on) if ablation is None else spec.ablation(ablation, train=on)
        for mode, on in modes.items()
    }
    values = {mode: {r: ops[mode].L(r) for r in bounds.READINGS} for mode in modes}
    M = ops["train"].fusion_matrix()
    D = bounds.perron(M)[1]
    cond = float(D.max() / D.min())
    fusion = {r: ops["train"].fusion_norm(r) for r in bounds.READINGS}
    return {
        "block": "paper",
        **values["train"],
        "certified": values["train"]["perron"] < 1,
        "steps": bounds.steps(values["train"]["perron"], TOLERANCES[0]),
        "steps_l2": bounds.steps(values["train"]["perron"], TOLERANCES[0], cond),
        "parameters": asdict(spec),
        "ablation": ablation,
        **values,
        "steps_to": {
            mode: {r: [bounds.steps(L, tol) for tol in TOLERANCES] for r, L in row.items()}
            for mode, row in values.items()
        },
        "tolerances": list(TOLERANCES),
        "L_hat": {mode: ops[mode].L_hat for mode in modes},
        "L_bar": ops["train"].L_bar,
        "fusion_norm": fusion,
        "matrix": M.tolist(),
        "D": D.tolist(),
        "cond_D": cond,
        **_search(spec, ablation, modes),
    }


def _search(spec, ablation: str | None, modes: dict[str, bool]) -> dict:
    """Largest slopes and advice, found by search among the specs; an ablation is none of them, so it has neither."""
    if ablation is not None:
        return {"largest_a": {mode: dict.fromkeys(bounds.READINGS) for mode in modes}, "advice": []}
    return {
        "largest_a": {
            mode: {r: bounds.largest(spec, "a", 1.0, r, on) for r in bounds.READINGS} for mode, on in modes.items()
        },
        "advice": [{**asdict(x), "text": str(x)} for x in advise(spec)],
    }


def potential_report(spec) -> dict:
    """What ``bound --block potential`` has to say about a `PotentialSpec`."""
    counts = [spec.steps(tol) for tol in TOLERANCES]
    return {
        "block": "potential",
        "parameters": asdict(spec),
        "L": spec.L(),
        "train": spec.L(train=True),
        "test": spec.L(train=False),
        "norm": "l2",
        "certified": spec.L() < 1,
        "steps": counts[0],
        "steps_to": counts,
        "tolerances": list(TOLERANCES),
        "error_factor": spec.error_factor,
    }


def _potential_table(report: dict) -> str:
    """The report of `potential_report` for people."""
    few, many = report["steps_to"]
    return "\n".join(
        [
            f"block = potential  tau = {report['parameters']['tau']:g}",
            "",
            f"L = tau = {report['L']!r} in the plain l2 norm, in train and in test mode, for all weights",
            f"Picard steps from z = 0 until the relative residual is at most 1e-3: {few}, 1e-6: {many}",
            f"at any z: |z - z*| <= {report['error_factor']:.6g} |f(z) - z|, the factor is 1/(1 - tau)",
            "",
            f"certified: L = {report['L']!r} < 1, a contraction in both modes",
        ]
    )


NAMES = {
    "printed": "printed (Frobenius, up = 2^d)",
    "reported": "reported (Frobenius, full up path)",
    "spectral": "spectral",
    "perron": "perron (weights D)",
}


def _show(x: float | None, form: str = ".4f") -> str:
    return "-" if x is None else format(x, form if not isinstance(x, float) or x < 1e4 else ".3e")


def _readings(report: dict) -> list[str]:
    """A line for each reading: L, steps and the largest slope, in both modes."""
    head = f"{'L':>10}{'1e-3':>8}{'1e-6':>8}{'a <':>8}"
    lines = [f"{'':36}{'train mode':^34}  {'test mode':^34}", f"{'reading':36}{head}  {head}"]
    for reading, label in NAMES.items():
        cells = []
        for mode in ("train", "test"):
            few, many = report["steps_to"][mode][reading]
            # rounded down: the slope shown still keeps L < 1
            slope = report["largest_a"][mode][reading]
            cells.append(
                f"{_show(report[mode][reading]):>10}{_show(few, 'd'):>8}{_show(many, 'd'):>8}"
                f"{_show(slope and math.floor(slope * 1e4) / 1e4):>8}"
            )
        lines.append(f"{label:36}{cells[0]}  {cells[1]}")
    slopes = "is not searched for with --ablation." if report["ablation"] else (
        "largest slope with L < 1, the rest unchanged, rounded down."
    )  # fmt: skip
    legend = "L: Lipschitz constant of f. 1e-3, 1e-6: Picard steps until the relative residual is at most that."
    return [*lines, "", legend, f"a <: {slopes}"]


def _factors(report: dict) -> list[str]:
    """L = L_hat * |M| * L_bar, and the weights D of the norm in which Perron's reading holds."""
    hat, norms = report["L_hat"], report["fusion_norm"]
    plain = f", {report['steps_l2']} steps to 1e-3 in plain l2" if report["steps_l2"] is not None else ""
    return [
        f"L = L_hat * |M| * L_bar: L_hat = {_show(hat['train'])} (test mode {_show(hat['test'])}), "
        f"L_bar = {_show(report['L_bar'])},",
        "|M| = " + ", ".join(f"{_show(norms[r])} ({r})" for r in NAMES),
        "D = " + " ".join(_show(d) for d in report["D"]) + f", cond(D) = {_show(report['cond_D'], '.2f')}" + plain,
    ]


def _verdict(report: dict) -> list[str]:
    """Whether it is a contraction in train mode, and what would make it one."""
    L, q = report["perron"], report["parameters"]
    if report["certified"]:
        lines = [f"certified: L = {L:.6g} < 1, a contraction in train mode"]
    else:
        helps = "Each of these alone makes it a contraction:" if report["advice"] else "No single change helps."
        lines = [f"not certified: L = {L:.6g} >= 1 in train mode." + ("" if report["ablation"] else f" {helps}")]
        lines += [f"  {x['text']}" for x in report["advice"]]
    if q["gamma"] < 1 and q["post_affine"]:
        lines.append(
            "note: gamma < 1 is counted for the post-fusion norm too; if that has no affine part, add --no-post-affine"
        )
    return lines


def _table(report: dict) -> str:
    """The report of `bound_report` for people."""
    q = report["parameters"]
    first = "  ".join(f"{key} = {q[key]:g}" for key in ("a", "c", "gamma", "alpha1", "alpha2", "n", "p"))
    first += f"  ablation = {report['ablation']}" if report["ablation"] else ""
    return "\n".join([first, "", *_readings(report), "", *_factors(report), "", *_verdict(report)])


def add_bound(commands) -> None:
    """``bound``: the closed forms of a LipschitzSpec, or of a PotentialSpec."""
    parser = commands.add_parser("bound", help="closed-form Lipschitz constant from a, c, gamma, …, or from tau")
    # no argparse choices here: bad values get the project's own sentence
    parser.add_argument(
        "--block", default="paper", metavar="NAME", help="paper (default) or potential, the certified family"
    )
    parser.add_argument(
        "--tau",
        type=parse_number,
        metavar="X",
        help="L with --block potential, in (0, 1); the options below belong to the paper's block",
        default=argparse.SUPPRESS,
    )
    options = {
        "-a": "slope of the scaled ReLU, in (0, 1]",
        "-c": "norm of the conv operators, > 0",
        "--gamma": "bound on |gamma| of the norms, > 0",
        "--alpha1": "convex mix of the residual block, in (0, 1)",
        "--alpha2": "convex mix of the fusion, in (0, 1)",
        "-n": "number of resolutions, whole, >= 1",
        "-p": "dropout rate, in [0, 1)",
    }
    for flag, text in options.items():
        # read as text: the spec's own check then names field, value and range
        parser.add_argument(flag, type=parse_number, metavar="X", help=text, default=argparse.SUPPRESS)
    parser.add_argument("--no-post-affine", action="store_true", help="post-fusion norm without gamma: L_bar = c*a")
    parser.add_argument(
        "--ablation",
        metavar="ROW",
        help="undo a change of the paper's Table 2: S1, …, S7, S4-sum, S6-sum, S7-sum, MDEQ",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.set_defaults(run=run_bound, fields=[flag.lstrip("-") for flag in options])


def _given(args: argparse.Namespace) -> dict:
    """The parameters of `bound` that were given, of both blocks."""
    found = {name: getattr(args, name) for name in (*args.fields, "tau") if hasattr(args, name)}
    if args.no_post_affine:
        found["post_affine"] = False
    return found if args.ablation is None else {**found, "ablation": args.ablation}


def run_bound(args: argparse.Namespace) -> int:
    """Print the closed forms for the options given; the rest as in the paper."""
    check_choice("block", args.block, BLOCKS)
    given = _given(args)
    potential = args.block == "potential"
    for name, value in given.items():
        if (name == "tau") != potential:
            why = "whose L is tau alone; " if potential else "whose L has no tau; "
            raise ValueError(f"{name} = {value!r}: does not enter block = {args.block!r}, {why}must be left out")
    if potential:
        report, table = potential_report(PotentialSpec(**given)), _potential_table
    else:
        ablation = given.pop("ablation", None)
        report, table = bound_report(LipschitzSpec(**given), ablation), _table
    print(json_text(report, indent=2) if args.json else table(report))
    return 0
