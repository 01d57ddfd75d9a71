"""Numbers in the instructor guide: each one stands in a cell of a lesson or follows from a closed form."""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

from lipmdeq import bounds

ROOT = Path(__file__).resolve().parents[2]
TEACHING = ROOT / "book" / "teaching"
GUIDES = ["index", "foundations", "lemmas", "model", "experiments"]
# What is a number here: with a decimal point, a power of ten, or 10 and more. Smaller ones count claims, branches, steps.
NUMBER = re.compile(
    r"10\^\{?-?\d+\}?|(?<![\w.^])\d{1,3}(?: \d{3})+(?!\d)|(?<![\w.^])\d*\.\d+|(?<![\w.^])\d{2,}(?![\w-])"
)
NOT_PROSE = [
    r"\{[\w:]+\}`[^`]*`",  # roles
    r"`[^`]*`",
    r"CIFAR-10|CC BY 4\.0",
    r"^## [^\n]*$",
    r"(?<=\|) (?:\*\*)?\d+(?:\*\*)? \|(?: \d+ \|$)?",  # the columns of minutes
    r"\b\d+(?:-minute| min\b| minutes?\b)|for 50 and (?:for )?80",
]
# Every number of a section and where it comes from: a code cell of the section's lesson (or of another one: "lesson#cell"),
# whose code or output holds it; "= …", an expression in lipmdeq.bounds; or "says …", words of the lesson that the guide repeats.
SOURCES = {
    "index": {
        "One lecture, 90 minutes": {
            "316": "07_normalisation#gn-witness",
            ".4": "12_bound#reported-check",
            "1.0": "12_bound#reported-check",
        },
        "A reading group, six meetings of 90 minutes": {
            ".999": "01_banach#banach-aposteriori-witness",
            "10 000": "07_normalisation#gn-random",
            "1.0": "12_bound#reported-check",
            ".86": "12_bound#text-example",
        },
    },
    "foundations": {
        "Fixed points and Banach's theorem": {
            "2000": "banach-pairs-check",
            ".55": "banach-pairs-check",
            ".80": "banach-witness",
            ".999": "banach-aposteriori-witness",
            ".001": "banach-aposteriori-witness",
            "10^{-3}": "banach-steps-check",
            "19": "= (1 + 0.9) / (1 - 0.9)",
            ".9": "banach-steps-check",
        },
        "Deep equilibrium models": {
            "6": "deq-depth-own-run",
            "8": "deq-depth-own-run",
            "35": "deq-transpose-check",
            "61 440": "= 32 * 32**2 + 64 * 16**2 + 128 * 8**2 + 256 * 4**2",
            "3.77": "deq-linear-check",
        },
        "Build it yourself": {"127": "= 128 - 1", "95": "build-contractive"},
        "Figure 1: the architecture": {
            "2.52": "architecture-reading-check",
            ".70": "= 1 - LipschitzSpec(a=0.4).alpha2",
            ".80": "architecture-reading-check",
            ".7": "= 1 - LipschitzSpec(a=0.4).alpha2",
            "1.638": "architecture-open-code",
            ".938": "architecture-open-code",
        },
        "Solvers: Picard, Anderson, Broyden": {
            ".9": "solvers-cycle",
            ".03": "solvers-sweep",
            "2.0": "solvers-nfe-check",
        },
        "The backward pass, exact and approximate": {
            ".8": "backward-not-covered-check",
            ".03": "backward-cost-check",
            ".95": "backward-cost-check",
            "90": "backward-cost-check",
            "1.2": "says eigenvalue $-1.2$",
        },
    },
    "lemmas": {
        "Normalisation: GN against MGN": {"316": "gn-witness", "10 000": "gn-random", "1.9": "gn-random"},
        "Activations and dropout": {
            ".584": "= (1 / 2 - 1 / (2 * math.pi)) ** 0.5",
            "42": "= 100 * (1 - (1 / 2 - 1 / (2 * math.pi)) ** 0.5)",
            "1.129": "gelu-solution",
            "1.0035": "train-test",
            ".794": "train-test",
        },
        "Convolution: the norm that matters": {
            "8.946": "reshaped-check",
            "3.414": "unsound-check",
            "5.9": "weight-norm-trap",
            "2.0": "weight-norm-trap",
            "2.98": "spectral-norm",
            ".4": "reshaped-L-check",
            "1.0035": "reshaped-L-check",
            "8.78": "reshaped-L-check",
            ".861": "reshaped-L-check",
            "8.08": "reshaped-L-check",
        },
        "Between resolutions: up and down": {
            ".8543": "effect-on-L-check",
            "1.0035": "effect-on-L-check",
            ".4": "threshold-check",
            ".8": "threshold-check",
        },
        "Putting constants together": {"1.73": "price-check", ".4": "price-check"},
        "The whole bound": {
            "1.0": "reported-check",
            ".4": "reported-check",
            ".6571": "= LipschitzSpec(a=0.4).L_hat()",
            ".8": "= LipschitzSpec(a=0.4).L_bar",
            ".86": "text-example",
            "10^{19}": "ablation-table",
            ".794": "= LipschitzSpec(a=0.4).L('reported', train=False)",
            "1.0035": "= LipschitzSpec(a=0.4).L('reported')",
            "13.3": "22_paper_code_book#differences-nfe-check",
            "5.4": "22_paper_code_book#differences-nfe-check",
            ".90": "= LipschitzSpec(a=0.4).ablation('S4').L('perron')",
            "3.45": "elasticity",
            "2.57": "elasticity",
            "2.45": "elasticity",
            ".38": "elasticity",
        },
    },
    "model": {
        "The certificate of a trained model": {
            "4.3": "certificate-read",
            ".5": "certificate-pair-broken",
            "19": "certificate-steps-table",
            "4": "certificate-steps-table",
            "2": "certificate-steps-table",
            "1.1": "certificate-attack-run",
            "360": "certificate-picard-check",
        },
        "How deep is it really?": {"360": "depth-crime-check"},
        "The landscape of equilibrium models": {"0.8": "landscape-rev-rebuilt"},
        "A tighter guarantee: one knob": {"0.9": "certified-depth", "0.1": "certified-loose-slack"},
    },
    "experiments": {
        "Convergence of trained models": {"10^{-7}": "= 2**-23"},
        "Speed and accuracy": {"200": "says 200 epochs each on a GPU"},
        "Ablation: what each change does": {".90": "= LipschitzSpec(a=0.4).ablation('S4').L('perron')"},
        "ImageNet, and free convolutions": {
            "25": "says 25 classes of Tiny-ImageNet",
            "1000": "says 1000 classes",
            ".794": "imagenet-p0-check",
            "1250": "imagenet-resolution",
            "1.96": "imagenet-attempt",
        },
        "What a guarantee costs": {},
        "Paper, code, book": {
            "10": "says ### 10. The border of a convolution",
            "11": "says ### 11. $L$ does not predict the number of evaluations",
            "1.0": 'says ### "$L = 1.0$"',
            ".86": "says gives $L = 0.86$",
        },
    },
}


def sections(name: str) -> dict[str, str]:
    text = (TEACHING / f"{name}.md").read_text("utf8")
    return {part.split("\n", 1)[0]: part for part in re.split(r"^## ", text, flags=re.M)[1:]}


def found(section: str) -> set[str]:
    for pattern in NOT_PROSE:
        section = re.sub(pattern, " ", section, flags=re.M)
    return set(NUMBER.findall(section))


@cache
def cells(lesson: str) -> dict[str, dict]:
    return {cell["id"]: cell for cell in json.loads((ROOT / f"notebooks/{lesson}.ipynb").read_text("utf8"))["cells"]}


def shown(cell: dict) -> list[float]:
    """All numbers in the code of a cell and in what it prints."""
    texts = ["".join(cell["source"]), *("".join(o.get("text", "")) for o in cell["outputs"])]
    text = re.sub(r"(?<=\d)[ _,](?=\d{3}\b)", "", " ".join(texts))
    return [float(x) for x in re.findall(r"\d*\.?\d+(?:e[+-]?\d+)?", text)]


def is_rounded(printed: str, value: float) -> bool:
    """Whether the guide prints this value, perhaps rounded, perhaps as a percentage or as a power of ten."""
    if power := re.fullmatch(r"10\^\{?(-?\d+)\}?", printed):
        return value > 0 and int(power[1]) in (round(math.log10(value)), int(value))
    plain = printed.replace(" ", "")
    unit = 10.0 ** -len(plain.partition(".")[2])
    values = (value,) if "." in plain else (value, 100 * value)
    return any(abs(x - float(plain)) <= unit / 2 * (1 + 1e-9) for x in values)


@pytest.mark.parametrize("name", GUIDES)
def test_every_number_of_the_guide_has_a_source(name):
    missing = {}
    for title, section in sections(name).items():
        listed = SOURCES[name].get(title, {})
        missing |= {title: found(section) - set(listed)} if found(section) - set(listed) else {}
        stale = [n for n in listed if n not in found(section) and not re.search(rf"(?<![\w.]){n}(?![\w.])", section)]
        assert not stale, f"{title}: no longer in the guide: {stale}"
    assert not missing, f"numbers without a source: {missing}"
    assert not set(SOURCES[name]) - set(sections(name))


CASES = [(g, t, n, s) for g, titles in SOURCES.items() for t, listed in titles.items() for n, s in listed.items()]


@pytest.mark.parametrize(("guide", "title", "number", "source"), CASES)
def test_the_source_says_the_same(guide, title, number, source):
    lesson = re.search(r"\{doc\}`/notebooks/(\w+)`", sections(guide)[title])[1]
    if source.startswith("= "):
        names = {name: getattr(bounds, name) for name in dir(bounds) if name[0] != "_"} | {"math": math}
        assert is_rounded(number, eval(source[2:], names))  # our own expressions, in this file
    elif source.startswith("says "):
        words = "\n".join("".join(c["source"]) for c in cells(lesson).values() if c["cell_type"] == "markdown")
        assert source[5:] in words and number in source
    else:
        *other, cell = source.split("#")
        values = shown(cells(other[0] if other else lesson)[cell])
        assert any(is_rounded(number, value) for value in values), f"{number} is not in {source}: {values}"


def test_the_check_notices_other_numbers():
    assert is_rounded(".55", 0.5459) and not is_rounded(".55", 0.556)
    assert is_rounded("35", 0.3451) and not is_rounded("35", 0.3551)
    assert is_rounded("61 440", 61440) and is_rounded("10^{19}", 19.46) and not is_rounded("10^{19}", 20.1)
    text = (
        "| Run 2000 pairs | 10 | 12 |\n| **together** | 50 | 80 |\n.55 at $10^{-3}$ in `x = 77` on CIFAR-10, 50 minutes"
    )
    assert found(text) == {"2000", ".55", "10^{-3}"}


PROSE = [*ROOT.glob("*.md"), *(ROOT / "book").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_lessons_are_named_by_links(path):
    """A link follows when lessons move; a number does not."""
    text = path.read_text("utf8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    assert not re.findall(r"[Ll]essons?\s+\d[^\n]*", text)
