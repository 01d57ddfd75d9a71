"""Configurations: every file is valid and says what the paper says; records fit their files; the graph runs what is missing."""

import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lipmdeq.experiments.figures import FIGURES, is_drawn
from lipmdeq.experiments.parameters import ABLATIONS, PRESETS, ParameterError, RunConfig, RunError
from lipmdeq.experiments.record import read_record, same_run
from lipmdeq.experiments.step import make_adjoint, make_solver
from lipmdeq.experiments.tables import SHARED, load
from lipmdeq.experiments.tables import TABLES as PRINTED

ROOT = Path(__file__).parents[2]
PROTOCOLS = ("paper", "cpu")
TABLES = {
    "table1": [
        *("mdeq", "mdeq-jr", "mdeq-pg", "mdeq-jfb"),
        *(f"lip-a{a}{end}" for end in ("", "-jfb") for a in ("1.0", "0.4", "0.1")),
    ],
    "table2": ["mdeq", "lipschitz", "s1", "s2", "s3", "s4", "s4-sum", "s5", "s6", "s6-sum", "s7", "s7-sum"],
    "table3": ["mdeq", *(f"lip-a{a}{end}" for end in ("", "-noconv") for a in ("0.4", "0.1"))],
    "figure4": [f"a{k / 10}" for k in range(1, 11)],
}
FILES = sorted((ROOT / "configs").glob("*/*/*.yaml"))


def read(protocol: str, table: str, row: str) -> RunConfig:
    return RunConfig.from_yaml(ROOT / "configs" / protocol / table / f"{row}.yaml")


def rows(protocol: str, *tables: str) -> dict[str, RunConfig]:
    folder = ROOT / "configs" / protocol
    return {f"{t}/{p.stem}": RunConfig.from_yaml(p) for t in tables for p in sorted((folder / t).glob("*.yaml"))}


def test_no_row_is_missing_or_unknown():
    for protocol in PROTOCOLS:
        for table, names in TABLES.items():
            found = {p.stem for p in (ROOT / "configs" / protocol / table).glob("*.yaml")}
            assert found == set(names), (protocol, table)
        assert (ROOT / "configs" / protocol / "beyond").is_dir()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_constants_are_the_papers(protocol):
    for name, cfg in rows(protocol, "table1", "table2", "figure4").items():
        jr = name.endswith("jr")
        assert (cfg.c, cfg.gamma, cfg.alpha1, cfg.alpha2, cfg.n) == (2.0, 1.0, 0.5, 0.3, 4), name
        assert cfg.p == (0.22 if jr else 0.3), name
        assert (cfg.solver, cfg.tol) == ("anderson", 1e-3), name
        assert (cfg.max_forward, cfg.max_backward) == ((7, 8) if jr else (18, 20)), name
        assert cfg.jacobian_weight == (0.5 if jr else 0.0), name
        assert (cfg.phantom_steps, cfg.phantom_damping) == (5, 0.5), name
        assert cfg.method == ("jfb" if "jfb" in name else "phantom" if "pg" in name else "implicit"), name
        assert cfg.train_stem == ("jfb" not in name), name  # as in the paper's runs
        assert cfg.model == ("mdeq" if "mdeq" in name else "lipschitz"), name
        assert cfg.data == "cifar10" and cfg.eval_split == "test", name
        if match := re.search(r"a(\d\.\d)", name):
            assert cfg.a == float(match[1]), name
        elif cfg.model == "lipschitz":
            assert cfg.a == 0.4, name
        wanted = re.search(r"table2/(s\d.*)", name)
        assert cfg.ablation == (wanted and wanted[1].replace("s", "S", 1)), name
    for name, cfg in rows(protocol, "table3").items():
        assert (cfg.p, cfg.max_forward, cfg.max_backward, cfg.tol) == (0.0, 14, 14, 1e-3), name
        assert (cfg.c, cfg.gamma, cfg.alpha1, cfg.alpha2, cfg.n) == (2.0, 1.0, 0.5, 0.3, 4), name
        assert cfg.ablation == ("S3" if "noconv" in name else None), name


def test_paper_protocol_is_the_papers_training():
    for name, cfg in rows("paper", "table1", "table2", "figure4").items():
        jr = name.endswith("jr")
        assert (cfg.epochs, cfg.batch, cfg.lr) == (200, 96 if jr else 128, 1e-3), name
        assert (cfg.preset, cfg.train_images, cfg.resolution) == ("paper-cifar10", None, None), name
    for cfg in rows("paper", "table3").values():
        assert (cfg.preset, cfg.data) == ("paper-imagenet", "imagenet")


def test_table3_shares_a_recipe():
    same = ("preset", "data", "train_images", "resolution", "epochs", "batch", "warmup", "device", "threads")
    table = rows("cpu", "table3")
    found = {tuple(getattr(c, k) for k in same) for c in table.values()}
    assert len(found) == 1, found
    for model in ("mdeq", "lipschitz"):  # the learning rate may differ between families, not within one
        assert len({c.lr for c in table.values() if c.model == model}) == 1, model


def test_rows_in_two_tables_are_one_run():
    from lipmdeq.experiments.tables import SHARED

    shared = {"table2/mdeq": "table1/mdeq", "table2/lipschitz": "table1/lip-a0.4"}
    shared |= {f"figure4/a{a}": f"table1/lip-a{a}" for a in ("0.1", "0.4", "1.0")}
    assert shared == SHARED
    for protocol in PROTOCOLS:
        for one, other in shared.items():
            assert read(protocol, *one.split("/")) == read(protocol, *other.split("/")), one


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_jfb_is_also_run_with_a_trained_stem(protocol):
    stems = [c for k, c in rows(protocol, "beyond").items() if k.endswith("jfb-stem")]
    assert len(stems) == 4 and all(c.train_stem and c.method == "jfb" for c in stems)


def test_certified_family_and_baselines_share_the_recipe():
    found = rows("cpu", "table1", "table2", "figure4", "beyond")
    taus = sorted(c.tau for k, c in found.items() if k.startswith("beyond/potential-t"))
    assert taus == [0.1, 0.3, 0.5, 0.7, 0.9, 0.95]
    shared = {
        (c.epochs, c.batch, c.warmup, c.label_smoothing, c.preset, c.train_images, c.data) for c in found.values()
    }
    assert shared == {(8, 128, 0.15, 0.0, "cpu32", None, "cifar10")}
    for family in ("mdeq", "lip", "potential"):  # the learning rate may differ between families, not within one
        assert len({c.lr for k, c in found.items() if k.split("/")[1].startswith(family)}) == 1, family
    explicit = {k: c.steps for k, c in found.items() if c.method == "unrolled"}
    assert sorted(explicit.values()) == [1, 1, 3, 3]


def test_names_are_those_of_the_model():
    from lipmdeq import bounds, model

    assert set(PRESETS) == set(model.PRESETS)
    assert (*ABLATIONS, "MDEQ") == tuple(model.UNDONE) == bounds.ABLATIONS


def test_every_config_builds_its_model():
    from lipmdeq.model import configure

    sizes = {"digits": 8, "cifar10": 32, "tiny-imagenet-25": 64, "imagenet": 224}
    for path in FILES:
        cfg = RunConfig.from_yaml(path)
        shape = configure(
            cfg.preset, cfg.model, cfg.ablation, image_size=cfg.resolution or sizes[cfg.data], **cfg.model_changes()
        )
        assert (shape.claimed is not None) == (cfg.model == "lipschitz" and cfg.ablation not in ("S1", "S2", "S3"))
        if shape.claimed is not None and shape.block == "paper":
            spec = shape.spec()
            L = spec.L("reported") if cfg.ablation is None else spec.ablation(cfg.ablation).L("reported")
            assert shape.claimed == pytest.approx(L, rel=1e-12), path


def test_records_were_made_with_what_their_ablation_means_now():
    """A name whose meaning changed would make a committed record lie: the model that was built is in the record."""
    from lipmdeq.model import configure

    switches = ("norm", "clip", "constrain", "fusion", "mix1", "mix2", "weight_norm")
    seen = set()
    for path in sorted((ROOT / "results").glob("*/*/*/seed*.json")):
        record = json.loads(path.read_text("utf8"))
        cfg = RunConfig.from_mapping(record["parameters"])
        now = configure(cfg.preset, cfg.model, cfg.ablation)
        built = record["model"]["config"]
        assert {k: built[k] for k in switches} == {k: getattr(now, k) for k in switches}, path
        seen.add(cfg.ablation)
    assert {"S1", "S3"} <= seen


BAD = [
    ({"a": 7}, "a = 7: must be in (0, 1]"),
    ({"a": "abc"}, "a = 'abc': must be a number in (0, 1]"),
    ({"a": True}, "a = True: must be a number in (0, 1]"),
    ({"a": float("nan")}, "a = nan: must be in (0, 1]"),
    ({"slope": 0.4}, "slope = 0.4: not a parameter"),
    ({"epoch": 3}, "epoch = 3: not a parameter (did you mean epochs?)"),
    ({"c": -1}, "c = -1: must be in (0, 1e+06]"),
    ({"p": 1}, "p = 1: must be in [0, 1)"),
    ({"n": 2.5}, "n = 2.5: must be a whole number >= 1 and <= 64, or None"),
    ({"n": 0}, "n = 0: must be"),
    ({"epochs": "ten"}, "epochs = 'ten': must be a whole number"),
    ({"epochs": 0}, "epochs = 0: must be a whole number >= 1"),
    ({"batch": 1}, "batch = 1: must be a whole number >= 2"),
    ({"lr": "1e-3"}, "lr = '1e-3': must be a number in (0, inf)"),
    ({"seed": -1}, "seed = -1: must be"),
    ({"model": "resnet"}, "model = 'resnet': must be one of lipschitz, mdeq"),
    ({"preset": "huge"}, "preset = 'huge': must be one of digits, cpu"),
    ({"ablation": "S9"}, "ablation = 'S9': must be one of S1"),
    ({"ablation": "S1", "model": "mdeq"}, "ablation = 'S1': must be None for model = 'mdeq'"),
    ({"method": "bptt"}, "method = 'bptt': must be one of implicit, jfb, phantom"),
    ({"solver": 3}, "solver = 3: must be one of anderson, picard, broyden"),
    ({"device": "tpu"}, "device = 'tpu': must be one of auto, cpu, cuda"),
    ({"train_stem": "yes"}, "train_stem = 'yes': must be True or False"),
    ({"compile": 1}, "compile = 1: must be True or False"),
    ({"compile": True, "jacobian_weight": 0.5}, "compile = True: must be False with jacobian_weight"),
    ({"data": 5}, "data = 5: must be text"),
    ({"eval_split": "val"}, "val_images = 0: must be >= 1 for eval_split = 'val'"),
    ({"trace_epochs": "all"}, "trace_epochs = 'all': must be a list of whole numbers"),
    ({"trace_epochs": [99]}, "trace_epochs = [99]: must be whole numbers from 0 to epochs = "),
    # the certified family, explicit networks and how they are trained
    ({"block": "resnet"}, "block = 'resnet': must be one of paper, potential, or None"),
    ({"block": 1}, "block = 1: must be one of paper, potential, or None"),
    ({"block": "potential", "a": 0.4}, "a = 0.4: belongs to block = 'paper'; must be left out for block"),
    ({"block": "potential", "ablation": "S1"}, "ablation = 'S1': belongs to block = 'paper'; must be left out"),
    ({"block": "potential", "model": "mdeq"}, "model = 'mdeq': belongs to block = 'paper'; must be left out"),
    ({"block": "potential", "c": 0.5}, "c = 0.5: belongs to block = 'paper'; must be left out for block = 'potential'"),
    ({"gamma": 0.5}, "gamma = 0.5: belongs to block = 'paper'; must be left out for block = 'potential'"),
    ({"alpha1": 0.4}, "alpha1 = 0.4: belongs to block = 'paper'; must be left out for block = 'potential'"),
    ({"tau": 0}, "tau = 0: must be in (0, 1)"),
    ({"tau": 1}, "tau = 1: must be in (0, 1)"),
    ({"tau": float("nan")}, "tau = nan: must be in (0, 1)"),
    ({"tau": "0.9"}, "tau = '0.9': must be a number in (0, 1)"),
    ({"tau": None}, "tau = None: must be a number in (0, 1)"),
    ({"injection": "none"}, "injection = 'none': must be one of first, all, or None"),
    ({"injection": True}, "injection = True: must be one of first, all, or None"),
    ({"expansion": 0}, "expansion = 0: must be a whole number >= 1 and <= 64, or None"),
    ({"expansion": 2.5}, "expansion = 2.5: must be a whole number >= 1 and <= 64, or None"),
    ({"expansion": 10**6}, "expansion = 1000000: must be a whole number >= 1 and <= 64, or None"),
    ({"stem_strides": [1, 3]}, "stem_strides = [1, 3]: must be two numbers, each 1 or 2, or None"),
    ({"stem_strides": [1]}, "stem_strides = [1]: must be two numbers, each 1 or 2, or None"),
    ({"stem_strides": 2}, "stem_strides = 2: must be two numbers, each 1 or 2, or None"),
    ({"stem_strides": "1,x"}, "stem_strides = '1,x': must be two numbers, each 1 or 2, or None"),
    ({"stem_strides": [True, 1]}, "stem_strides = [True, 1]: must be two numbers, each 1 or 2, or None"),
    ({"stem_strides": [[1], 2]}, "stem_strides = [[1], 2]: must be two numbers, each 1 or 2, or None"),
    ({"stem_channels": 0}, "stem_channels = 0: must be a whole number >= 1 and <= 4096, or None"),
    ({"stem_channels": 10**6}, "stem_channels = 1000000: must be a whole number >= 1 and <= 4096, or None"),
    ({"stem_channels": "wide"}, "stem_channels = 'wide': must be a whole number >= 1 and <= 4096, or None"),
    ({"steps": 0}, "steps = 0: must be a whole number >= 1 and <= 1000"),
    ({"steps": 2.5}, "steps = 2.5: must be a whole number >= 1 and <= 1000"),
    ({"steps": None}, "steps = None: must be a whole number >= 1 and <= 1000"),
    ({"warmup": 1}, "warmup = 1: must be in [0, 1)"),
    ({"warmup": -0.1}, "warmup = -0.1: must be in [0, 1)"),
    ({"warmup": "5 epochs"}, "warmup = '5 epochs': must be a number in [0, 1)"),
    ({"label_smoothing": 1}, "label_smoothing = 1: must be in [0, 1)"),
    ({"label_smoothing": -0.1}, "label_smoothing = -0.1: must be in [0, 1)"),
    ({"label_smoothing": True}, "label_smoothing = True: must be a number in [0, 1)"),
    ({"prove_every": 0}, "prove_every = 0: must be a whole number >= 1 and <= 1000000000"),
    ({"prove_every": 1.5}, "prove_every = 1.5: must be a whole number >= 1 and <= 1000000000"),
    # D4, D8: what would fail later, stop the machine or never end
    ({"threads": 100000}, "threads = 100000: must be a whole number >= 1 and <= 1024"),
    ({"c": 1e308}, "c = 1e+308: must be in (0, 1e+06]"),
    ({"gamma": 1e308}, "gamma = 1e+308: must be in (0, 1e+06]"),
    ({"gamma": 10**400}, "gamma = a whole number of 1329 bits: is too large for any parameter"),
    ({"device": "cuda:٣"}, "device = 'cuda:٣': must be one of auto, cpu, cuda, cuda:0"),
    ({"device": "cuda:²"}, "device = 'cuda:²': must be"),
    ({"device": "cuda:"}, "device = 'cuda:': must be"),
    ({"device": "cuda:007"}, "device = 'cuda:007': must be"),
    ({"device": "cuda:1\n"}, "device = 'cuda:1\\n': must be"),
    ({"device": f"cuda:{10**30}"}, "device = 'cuda:1000"),
    ({"phantom_steps": 10**30}, f"phantom_steps = {10**30}: must be a whole number >= 1 and <= 1000"),
    ({"phantom_steps": 10**5000}, "phantom_steps = a whole number of 16610 bits: is too large"),
    ({"phantom_steps": 1e300}, "phantom_steps = 1e+300: must be"),
    ({"max_forward": 10**9}, "max_forward = 1000000000: must be a whole number >= 1 and <= 10000"),
    ({"max_backward": 10**9}, "max_backward = 1000000000: must be"),
    ({"epochs": 10**30}, f"epochs = {10**30}: must be a whole number >= 1 and <= 1000000"),
    ({"n": 10**6}, "n = 1000000: must be"),
    ({"resolution": 10**6}, "resolution = 1000000: must be"),
    ({"k" * 900: 1}, f"{'k' * 99}… (902 characters) = 1: not a parameter"),
    ({"trace_epochs": list(range(2000))}, "trace_epochs = list of 2000 entries: must be at most 1000"),
    ({"out": "x" * 10000}, "out = 'xxxx"),
    ({"out": "a/" + "x" * 256}, "out = 'a/xxxx"),
    ({"out": "ü" * 128}, "out = 'üüüü"),
    ({"data": "y" * 10000}, "data = 'yyyy"),
    ({"data_root": "y/" * 600}, "data_root = 'y/y/"),
    ({"model": "z" * 10000}, "model = 'zzzz"),
    ({"w" * 10000: 1}, "wwww"),
    ({"out": "a\0b"}, "out = 'a\\x00b': must be text without a NUL character"),
    ({"data_root": "\0"}, "data_root = '\\x00': must be text without a NUL"),
    ({"out": "a\udcff"}, "out = 'a\\udcff': must be text in UTF-8"),
    ({"a": {"x": 1}}, "a = {'x': 1}: must be a number in (0, 1]"),
]


def test_a_bomb_of_references_is_not_written_out(tmp_path):
    """D15: 9⁹ entries in nine lines."""
    names = ("trace_epochs", "data", "lr", "seed", "batch", "epochs", "out", "c", "a")
    lines = [f"{name}: &x{k} [{', '.join([f'*x{k - 1}' if k else 'x'] * 9)}]" for k, name in enumerate(names)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ParameterError, match="a = .*… .9 entries.: must be a number in") as error:
        RunConfig.from_yaml(tmp_path / "bomb.yaml")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("values, message", BAD, ids=[ascii(m)[:60] for _, m in BAD])
def test_bad_parameters_are_named_in_one_sentence(values, message):
    with pytest.raises(ParameterError) as error:
        RunConfig.from_mapping(values)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1200
    assert error.value._render_traceback_() == [f"ParameterError: {error.value}"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stem_strides": 3}, "stem_strides = 3: must be a list of whole numbers"),
        ({"stem_strides": (True, 1)}, "stem_strides = True: must be a whole number >= 1"),
        ({"stem_channels": True}, "stem_channels = True: must be a whole number >= 1"),
        ({"expansion": True}, "expansion = True: must be a whole number >= 1"),
        ({"tau": "0.9"}, "tau = '0.9': must be in (0, 1)"),
        ({"stem_strides": (1, 3)}, "stem_strides = (1, 3): must be two numbers, each 1 or 2"),
        ({"channels": ("32", 64)}, "channels = '32': must be a whole number >= 1"),
        ({"head_channels": (0, 1, 2, 3)}, "head_channels = 0: must be a whole number >= 1"),
        ({"clip": "no"}, "clip = 'no': must be True or False"),
        ({"groups": 5}, "channels = 32: must be divisible by groups = 5, and by half of it"),
    ],
)
def test_bad_shapes_are_named_in_one_sentence(values, message):
    """A model that is built by hand, without the parameters of a run."""
    from lipmdeq.model import ModelConfig

    with pytest.raises(ValueError) as error:
        ModelConfig(**values)
    assert str(error.value) == message


def test_strides_from_the_shell():
    for value in ([1, 2], (1, 2), "1,2", "[1, 2]", [1.0, 2.0]):
        strides = RunConfig(stem_strides=value).stem_strides
        assert strides == (1, 2) and all(type(s) is int for s in strides)
    assert RunConfig(stem_strides=None).stem_strides is None


def test_block_follows_from_what_is_given():
    """Without a word about the block: the certified family, unless something of the paper's block is asked for."""
    assert (RunConfig().block, RunConfig().injection, RunConfig().a) == ("potential", "all", None)
    for values in ({"a": 0.4}, {"ablation": "S1"}, {"model": "mdeq"}, {"block": "paper"}):
        cfg = RunConfig(**values)
        assert (cfg.block, cfg.injection, cfg.a, cfg.alpha2, cfg.p) == ("paper", "first", 0.4, 0.3, 0.3), values
    assert RunConfig(block="potential", injection="first").injection == "first"


def test_defaults_of_the_papers_block_are_no_contradiction():
    """Records of the certified family name c, gamma and alpha1 too, at their defaults."""
    cfg = RunConfig(block="potential", c=2, gamma=1.0, alpha1=0.5)
    assert cfg == RunConfig() == RunConfig.from_mapping(cfg.to_dict())
    for name, value in {"c": 1.0, "gamma": 0.5, "alpha1": 0.4}.items():
        assert getattr(RunConfig(a=0.4, **{name: value}), name) == value


def test_old_records_are_of_the_papers_block():
    """A record from before there was a choice says nothing about block and injection: it means the paper's."""
    from lipmdeq.model import ModelConfig

    record = json.loads((ROOT / "results" / "digits" / "lipschitz" / "seed0.json").read_text("utf8"))
    assert "block" not in record["parameters"]
    cfg = RunConfig.from_mapping(record["parameters"])
    assert (cfg.block, cfg.injection) == ("paper", "first")
    built = record["model"]["config"]
    shape = ModelConfig.from_dict(built)
    assert (shape.block, shape.injection) == ("paper", "first")
    assert shape.stem_strides == (built["stem_stride"],) * 2 and shape.injection_conv is built["injection"]


def test_bad_config_files(tmp_path):
    for text, message in (
        ("a: [", "is not YAML"),
        ("a: 0.4\nbatch: 8\na: 0.1\n", "'a' must be given once"),
        ("{tau: 0.9, a: 0.4, 'a': 0.4, tau: 0.9}", "'tau', 'a' must be given once"),
        ("- 1\n", "must be lines of the form"),
        ("", "must be lines of the form"),
        ("epochs: " + "9" * 5000, "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("a: !!python/name:os.system", "is not YAML"),
        ('out: "a\\0b"', "out = 'a.x00b': must be text without a NUL"),
        ("? [1, 2]\n: 3", "is not YAML"),
        ("1: 3", "1 = 3: not a parameter"),
        ("lr: .inf", "lr = inf: must be in"),
        ("null: 3", "None = 3: not a parameter"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ParameterError, match=f"config = '?[^ ]*bad.yaml'?: .*{message}"):
            RunConfig.from_yaml(path)
    path.write_text("a: 0.4")
    with pytest.raises(ParameterError, match="^a = 7: must be in"):
        RunConfig.from_yaml(path, a=7)  # not the file is wrong
    with pytest.raises(ParameterError, match="cannot be read"):
        RunConfig.from_yaml(tmp_path / "missing.yaml")


def test_namespace_of_a_notebook():
    namespace = {"a": 0.2, "In": ["x"], "_dh": 3, "json": json, "RunConfig": RunConfig, "Out": {}}
    assert RunConfig.from_namespace(namespace) == RunConfig(a=0.2)
    with pytest.raises(ParameterError, match="slope = 0.4: not a parameter"):
        RunConfig.from_namespace({**namespace, "slope": 0.4})


def test_what_papermill_injects_is_never_ignored():
    """D7: values that are no plain ones, and names that an import, IPython or an underscore hides from the namespace."""
    first, call = (
        "a: float = 0.4",
        "from lipmdeq.experiments.parameters import RunConfig\ncfg = RunConfig.from_namespace(globals())",
    )
    later = ["record = train(cfg)", "slope = 3"]

    def run(injected: str) -> RunConfig:
        space: dict = {}
        for source in (first, injected, "from lipmdeq.experiments.parameters import RunConfig"):
            exec(source, space)
        space.setdefault("In", ["", first, injected, call, *later, call])  # run a second time: later cells do not count
        return RunConfig.from_namespace(space)

    assert run("# Parameters\na = 0.2\n").a == 0.2
    for injected, message in (
        ("record = {'x': 1}", "record = {'x': 1}: not a parameter"),
        ("RunConfig = 3", "RunConfig = 3: not a parameter"),
        ("_x = 1", "_x = 1: not a parameter"),
        ("In = 3", "In = 3: not a parameter"),
        ("In = [3]", "In = [3]: not a parameter"),
        ("Out = {}", "Out = {}: not a parameter"),
        ("x = y = {1: 2}", "x = {1: 2}: not a parameter"),
        ("thing = float('nan')", "thing = "),
        ("a = {'x': 1}", "a = {'x': 1}: must be a number"),
        ("a = b'x'", "a = b'x': must be a number"),
        ("seed = {0}", "seed = {0}: must be a whole number"),
    ):
        with pytest.raises(ParameterError, match=re.escape(message)):
            run(injected)


def test_lists_from_the_shell():
    for value in ([1, 3], (3, 1), "1,3", "[1, 3]", [1, 3.0, 1]):
        assert RunConfig(trace_epochs=value).trace_epochs == (1, 3)
    assert RunConfig(trace_epochs="[]").trace_epochs == () and RunConfig(trace_epochs=2).trace_epochs == (2,)


def test_command_repeats_the_run():
    from lipmdeq.experiments.commands import parse_value

    cfg = RunConfig(a=0.1, n=2, train_stem=False, trace_epochs=(0, 2), ablation="S3", lr=1e-3, out="x")
    words = shlex.split(cfg.command())[4:]
    assert words[0] == "-p"
    again = {words[i + 1]: parse_value(words[i + 2]) for i in range(0, len(words), 3)}
    assert RunConfig.from_mapping({**again, "out": "x"}) == cfg


def test_parameters_cell_says_what_the_package_says():
    notebook = json.loads((ROOT / "notebooks" / "train.ipynb").read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert cells[0]["metadata"]["tags"] == ["parameters"]
    lines = "".join(cells[0]["source"]).splitlines()
    assert len(lines) == len(RunConfig.model_fields)
    space: dict = {}
    exec("\n".join(lines), space)
    for line, (name, field) in zip(lines, RunConfig.model_fields.items(), strict=True):
        assert line.startswith(f"{name}: ")
        assert line.endswith(f"  # {field.description}")
        assert RunConfig(**{name: space[name]}) == RunConfig()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "results").glob("*/*/*/seed*.json")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_records_fit_their_configs(path):
    record = json.loads(path.read_text())
    config = ROOT / "configs" / path.parent.relative_to(ROOT / "results")
    seed = int(path.stem.removeprefix("seed"))
    assert RunConfig.from_mapping(record["parameters"]).identity() == (
        RunConfig.from_yaml(f"{config}.yaml", seed=seed).identity()
    )
    assert len(record["history"]) == record["parameters"]["epochs"]
    assert record["seed"] == seed


def graph(folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "snakemake", "-s", str(folder / "Snakefile"), "-d", str(folder), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)


# Tables that have all their records.
COMPLETE = ("--config", "tables=table1,table3", "seeds=1")


def planned(folder: Path) -> list[str]:
    """The rules of the jobs that `snakemake -n` plans, sorted, and for a run its configuration."""
    done = graph(folder, "-n", *COMPLETE)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert ("Nothing to be done" in text) == (not re.search(r"^(local)?rule ", text, re.M)), text
    found = re.findall(r"^(?:local)?rule (\w+):\n(?:    .*\n)*?    (?:output|input): (.*)", text, re.M)
    return sorted(f"{rule} {files}" if rule == "run" else rule for rule, files in found)


def made(folder: Path) -> list[str]:
    """The tables and figures that `snakemake -n` would make, sorted."""
    done = graph(folder, "-n", *COMPLETE)
    found = re.findall(r"^ *output: results/cpu/tables/(\w+)[.](?:md|svg)", done.stdout + done.stderr, re.M)
    return sorted(found)


@pytest.mark.slow
def test_graph_runs_what_is_missing_and_no_more(tmp_path):
    """In a fresh clone, where the times of files are arbitrary, nothing; without a record its run and what shows it."""
    for name in ("Snakefile", "profiles", "configs", "results"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    random.Random(0).shuffle(files)
    for i, path in enumerate(files):
        os.utime(path, (1.7e9 + i, 1.7e9 + i))
    assert planned(tmp_path) == []
    record = tmp_path / "results" / "cpu" / "table1" / "mdeq-pg" / "seed0.json"
    text = record.read_text()
    record.unlink()
    # Figures 3 and 5 show some rows of Table 1, this one among them
    assert "run configs/cpu/table1/mdeq-pg.yaml" in planned(tmp_path)
    assert made(tmp_path) == ["figure3", "figure5", "table1"]
    record.write_text(text)  # newer than the tables, as after a kill, but the tables are made from it already
    assert planned(tmp_path) == []
    table = tmp_path / "results" / "cpu" / "tables" / "table1.md"
    table.write_text(table.read_text().replace("MDEQ", "mdeq"))
    os.utime(table, (1.6e9, 1.6e9))
    assert planned(tmp_path) == ["all", "table"], "a table that is not what the records give"
    done = graph(tmp_path, "--cores", "1", *COMPLETE)
    assert done.returncode == 0 and planned(tmp_path) == [], done.stderr[-2000:]
    assert table.read_bytes() == (ROOT / "results" / "cpu" / "tables" / "table1.md").read_bytes()
    (table.parent / "figure3.svg").unlink()
    assert planned(tmp_path) == ["all", "figure"] and made(tmp_path) == ["figure3"]
    shutil.copy(ROOT / "results" / "cpu" / "tables" / "figure3.svg", table.parent)
    cfg = RunConfig.from_mapping(json.loads(text)["parameters"])
    config = tmp_path / "configs" / "cpu" / "table1" / "mdeq-pg.yaml"
    plain = config.read_text()
    config.write_text(re.sub(r"^lr: .*$", "lr: 0.5", plain, flags=re.M))
    done = graph(tmp_path, "-n", *COMPLETE)
    assert done.returncode != 0
    assert f"was made with lr = {cfg.lr!r}, but" in done.stdout + done.stderr
    config.write_text(plain)
    assert text.count('"accuracy": 0.') > 1
    for content, message in (  # D1, D13
        (text.replace('"accuracy": 0.', '"accuracy": 0.9', 1), "was changed after it was written"),
        (text[:100], "is not a record of a run: it is truncated or was changed"),
    ):
        record.write_text(content)
        done = graph(tmp_path, "-n", *COMPLETE)
        said = done.stdout + done.stderr
        assert done.returncode != 0 and "Traceback" not in said
        assert f"results/cpu/table1/mdeq-pg/seed0.json {message}" in said, said


def test_stored_tables_are_those_of_the_records():
    """`make reproduce` trusts them as they are in a fresh clone."""
    folder = ROOT / "results" / "cpu" / "tables"
    tables = {name: load(name, root=ROOT) for name in PRINTED}
    for name, table in tables.items():
        assert table.is_written(folder), f"{name}: run python -m lipmdeq tables"
    for name in FIGURES:
        assert is_drawn(name, tables, folder), f"{name}: run python -m lipmdeq tables"
    for copy in SHARED:
        assert not (ROOT / "results" / "cpu" / copy).exists(), f"{copy}: its records belong to {SHARED[copy]}"


def test_fixed_steps_belong_to_picard():
    for value in (4, "auto", None):
        cfg = RunConfig(solver="picard", fixed_steps=value)
        assert make_solver(cfg, 18).steps == value and make_adjoint(cfg).solver.steps == value
    with pytest.raises(ParameterError, match=r"fixed_steps = 4: must be None for solver = 'anderson'"):
        RunConfig(fixed_steps=4)
    with pytest.raises(ParameterError, match=r"fixed_steps = 1: must be at least 2 for method = 'implicit'"):
        RunConfig(solver="picard", fixed_steps=1)
    assert RunConfig(solver="picard", fixed_steps=1, method="jfb").fixed_steps == 1
    for bad in (0, 1.5, True, "all", 10**6):
        with pytest.raises(
            ParameterError, match=r"fixed_steps = .*must be a whole number in \[1, 1000\], 'auto' or None"
        ):
            RunConfig(solver="picard", fixed_steps=bad)


def test_a_run_that_is_older_than_a_parameter_goes_on(tmp_path):
    """It had the default; a run with another value is refused as before."""
    old = {k: v for k, v in RunConfig(solver="picard").to_dict().items() if k != "fixed_steps"}
    same_run(RunConfig(solver="picard"), old, tmp_path)
    with pytest.raises(RunError, match=r"holds a run with fixed_steps = None, not 4"):
        same_run(RunConfig(solver="picard", fixed_steps=4), old, tmp_path)


def test_the_readme_of_the_protocol_tells_its_records():
    """configs/cpu/README.md: the chosen rates and the ablation, digit by digit."""
    page = (ROOT / "configs" / "cpu" / "README.md").read_text("utf8")
    names = {"recipe/potential-lr0.002": "as it is", "ablation/alpha0.3": "α2 = .3", "ablation/alpha0.7": "α2 = .7"}
    names |= {
        "ablation/e5": "expansion 5",
        "ablation/p0.3": "dropout .3",
        "ablation/first": "image in the first branch",
    }
    for name, words in names.items():
        record = read_record(ROOT / "results" / "cpu" / name / "seed0.json")
        depth, result = record["depth"], record["result"]
        assert (result["split"], result["images"], record["parameters"]["epochs"]) == ("val", 5000, 2)
        shown = [f"{100 * v:.1f}" for v in (result["accuracy"], depth["accuracy"][0], depth["same_label"][0])]
        line = next(line for line in page.splitlines() if line.startswith(f"| {words}"))
        assert line.endswith(f"| {' | '.join(shown)} | {depth['tightness']:.2f} |"), (line, shown)
    for path in (ROOT / "results" / "cpu" / "recipe").glob("*/seed0.json"):
        assert f"{100 * read_record(path)['result']['accuracy']:.1f}" in page, path.parent.name
