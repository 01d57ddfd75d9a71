"""What a run says about itself: lines and sentences for people, the record, its table and curves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lipmdeq.experiments.checkpoints import half_sha256, weights_sha256
from lipmdeq.experiments.parameters import RunConfig
from lipmdeq.experiments.record import FORMAT, sealed
from lipmdeq.experiments.step import CLOCKS
from lipmdeq.experiments.world import machine, now, peak_memory, versions

if TYPE_CHECKING:
    from lipmdeq.certificate import Certificate
    from lipmdeq.data import Dataset
    from lipmdeq.experiments.depth_report import Depth
    from lipmdeq.experiments.training import Run
    from lipmdeq.experiments.world import World


def epoch_line(row: dict, cfg: RunConfig) -> str:
    """One line for people."""
    t, e = row["train"], row[cfg.eval_split]
    nfe = [t["nfe_forward"], t.get("nfe_backward"), e and e["nfe_forward"]]
    shown = "/".join("–" if v is None else f"{v:.1f}" for v in nfe)
    score = f"  {cfg.eval_split} {e['accuracy']:6.2%}" if e else ""
    return (
        f"epoch {row['epoch']:>3}/{cfg.epochs}  loss {t['loss']:.4f}  train {t['accuracy']:6.2%}{score}"
        f"  evaluations {shown}  {row['seconds']['train']:.1f} s"
    )


def scale_text(cfg: RunConfig, data: Dataset, weights: int, world: World) -> str:
    """What was computed, in words, so that nobody takes a small run for a large one."""
    where = (
        f"{world.size} GPU"
        if world.device.type == "cuda"
        else f"CPU, {world.size} process(es), {cfg.threads} thread(s) each"
    )
    return (
        f"{len(data.train)} training images of {data.name} at {data.size}x{data.size}, {cfg.epochs} epochs, batch {cfg.batch}, "
        f"{cfg.model} model with {weights / 1e6:.2f}M weights ({cfg.preset}), {cfg.precision}, {where}"
    )


def guarantee(proof: Certificate, claimed: float | None) -> str:
    """What the certificate says about convergence, in words."""
    out = []
    for mode in ("test", "train"):
        r = getattr(proof, mode)
        verdict = "proved to be a contraction" if r["certified"] else "NOT proved to be a contraction"
        out.append(f"{mode} mode: {verdict}, L <= {r['perron']:.4g} (Perron), {r['frobenius']:.4g} (Frobenius)")
    if claimed is not None:
        out.append(f"by the configuration alone, for all weights, train mode: L <= {claimed:.4g}")
    return "; ".join(out)


def _result(run: Run) -> dict:
    """Accuracy and evaluations of the last epoch, times of all."""
    cfg, last = run.cfg, run.history[-1]
    found, steps = last[cfg.eval_split], run.steps * cfg.epochs
    seconds = {c: sum(h["seconds"][c] for h in run.history) for c in (*CLOCKS, "train")}
    seconds["evaluation"] = sum(h["seconds"].get("evaluation", 0.0) for h in run.history)
    seconds["run"] = run.past["seconds"] + time.perf_counter() - run.clock
    return {
        "split": cfg.eval_split,
        **{k: found[k] for k in ("accuracy", "top5", "loss", "images")},
        "nfe_train_forward": last["train"]["nfe_forward"],
        "calls_train_forward": last["train"]["nfe_forward"] + last["train"]["attached_forward"],
        "nfe_train_backward": last["train"].get("nfe_backward"),
        "nfe_test_forward": found["nfe_forward"],
        "milliseconds_per_step": {c: 1000 * seconds[c] / steps for c in (*CLOCKS, "train")},
        "seconds": seconds,
        "memory": peak_memory(run.world.device),
    }


def make_record(run: Run, proof: Certificate, depth: Depth) -> dict:
    """The sealed record of a finished run, as :class:`lipmdeq.experiments.Record` describes it."""
    cfg, model, data, result = run.cfg, run.model, run.data, _result(run)
    weights = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    record = {
        "format": FORMAT,
        "scale": scale_text(cfg, data, weights, run.world),
        "command": cfg.command(),
        "seed": cfg.seed,
        "parameters": cfg.to_dict(),
        "model": {"config": model.cfg.to_dict(), "parameters": weights, "trained": trained},
        "data": {
            "name": data.name, "train": len(data.train), "evaluated": result["images"], "classes": len(data.classes),
            "size": data.size, "sha256": data.sha256,
        },
        "result": result,
        "guarantee": guarantee(proof, model.cfg.claimed),
        "history": run.history,
        "traces": run.traces,
        "certificate": proof.to_dict(),
        "depth": depth.to_dict(),
        "weights_sha256": weights_sha256(model),
        "half_sha256": half_sha256(model),
        "code": {"commit": run.past["commits"][-1], "commits": run.past["commits"]},
        "versions": versions(),
        "machine": {**machine(run.world.device), "processes": run.world.size, "threads": cfg.threads},
        "started": run.past["started"],
        "finished": now(),
    }  # fmt: skip
    return sealed(record)


class Summary:
    """Accuracy, evaluations of f and time of one record, as text or as an HTML table."""

    def __init__(self, record: dict):
        r, p = record["result"], record["parameters"]
        ms, last = r["milliseconds_per_step"], record["history"][-1]["train"]
        rows = [(f"{r['split']} accuracy, last epoch", f"{r['accuracy']:.2%} of {r['images']} images")]
        if r["top5"] is not None:
            rows.append(("among the best five", f"{r['top5']:.2%}"))
        rows.append(("training accuracy, last epoch", f"{last['accuracy']:.2%}"))
        for name, key in (("training, forward", "train_forward"), ("training, backward", "train_backward"),
                          (f"{r['split']}, forward", "test_forward")):  # fmt: skip
            value = r[f"nfe_{key}"]
            rows.append((f"evaluations of f, {name}", "none: " + p["method"] if value is None else f"{value:.2f}"))
        missed = [last["not_converged_forward"], last.get("not_converged_backward")]
        shown = " and ".join(str(m) for m in missed if m is not None)
        rows.append((f"images that did not converge in the last epoch, of {last['images']}", shown))
        parts = ", ".join(f"{c} {ms[c]:.1f}" for c in ms if c != "train")
        rows.append(("milliseconds per step", f"{ms['train']:.1f} ({parts})"))
        rows.append(("seconds, training and whole run", f"{r['seconds']['train']:.1f} and {r['seconds']['run']:.1f}"))
        rows.append(("scale", record["scale"]))
        self.rows = rows

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in self.rows)
        return f"<table><tr><th>quantity</th><th>value</th></tr>{cells}</table>"


def curves(record: dict):
    """Loss, accuracy and evaluations of f over the epochs, as a matplotlib figure."""
    import matplotlib.pyplot as plt

    history, split = record["history"], record["result"]["split"]
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(9.6, 3.0))
    epochs = [h["epoch"] for h in history]
    seen = [h for h in history if h[split] is not None]
    at = [h["epoch"] for h in seen]
    left.plot(epochs, [h["train"]["loss"] for h in history], label="training")
    left.plot(at, [h[split]["loss"] for h in seen], marker="o", markersize=3, label=split)
    left.set(title="Cross-entropy", xlabel="epoch", yscale="log")
    middle.plot(epochs, [100 * h["train"]["accuracy"] for h in history], label="training")
    middle.plot(at, [100 * h[split]["accuracy"] for h in seen], marker="o", markersize=3, label=split)
    middle.set(title="Accuracy, %", xlabel="epoch")
    right.plot(epochs, [h["train"]["nfe_forward"] for h in history], label="training, forward")
    right.plot(at, [h[split]["nfe_forward"] for h in seen], marker="o", markersize=3, label=f"{split}, forward")
    if "nfe_backward" in history[0]["train"]:
        right.plot(epochs, [h["train"]["nfe_backward"] for h in history], label="training, backward")
    right.set(title="Evaluations of f per solve", xlabel="epoch", ylim=(0, None))
    for ax in (left, middle, right):
        ax.legend(fontsize="small")
    return fig
