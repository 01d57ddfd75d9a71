"""Figures 3, 4 and 5 of the paper from the records, and all tables and figures as files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt

from lipmdeq.experiments.record import content_sha256, writing
from lipmdeq.experiments.tables import TABLES, Table, load, promised, spread
from lipmdeq.plotting import COLOURS, LINES, MARKERS, ours, paper, save, shade_contraction, use_style

# The lines of Figures 3 and 5: MDEQ and what was done to it in one colour, Lipschitz MDEQ in another.
CURVES = {
    **{name: ("vermilion", k) for k, name in enumerate(("mdeq", "mdeq-jr", "mdeq-pg", "mdeq-jfb"))},
    **{name: ("blue", k) for k, name in enumerate(("lip-a1.0", "lip-a0.4", "lip-a0.1"))},
}
ROUNDING = 2.0**-24  # what single precision cannot tell from zero; smaller residuals are drawn there
PARTS = {"train_forward": "training, forward", "train_backward": "training, backward", "test_forward": "test, forward"}


def trace(record: dict, part: str, epoch: int | None = None, over: str = "median") -> list[float]:
    """Relative residual of each evaluation on the fixed batch.

    Args:
        record: of one run.
        part: one of ``PARTS``.
        epoch: after how many epochs; None for the trained model.
        over: "mean", "median" or "worst" of the images.
    """
    if not record["traces"]:
        raise ValueError("traces = []: the run must have trace_epochs")
    found = record["traces"][-1]
    if epoch is not None:
        known = {t["epoch"]: t for t in record["traces"]}
        if epoch not in known:
            raise ValueError(f"epoch = {epoch}: must be one of {', '.join(map(str, known))}")
        found = known[epoch]
    return [math.nan if value is None else value for value in found[part][over]]


def _style(name: str) -> dict:
    colour, k = CURVES[name]
    return {"color": COLOURS[colour], "linestyle": LINES[k], "marker": MARKERS[k], "markersize": 3.5}


def _seeds(table: Table):
    """(record, how it is drawn) for every seed of the rows of ``CURVES``: the first with its name, the others paler."""
    for row in table.done:
        for k, record in enumerate(row.records if row.name in CURVES else ()):
            yield record, {**_style(row.name), **({"alpha": 0.4, "marker": ""} if k else {"label": row.title})}


def by_iteration(ax, table: Table, part: str) -> None:
    """Residual against the evaluation, trained model, median of the images."""
    for record, style in _seeds(table):
        values = [max(v, ROUNDING) for v in trace(record, part)]
        ax.semilogy(range(1, len(values) + 1), values, markevery=3, **style)
    ax.axhline(ROUNDING, color="#555555", linewidth=0.9, linestyle=":", zorder=1)
    ax.set(title=PARTS[part], xlabel="evaluation of f", ylabel="relative residual", ylim=(2e-8, 4))


def by_epoch(ax, table: Table, part: str) -> None:
    """Residual after the last of the forced evaluations against the epoch."""
    for record, style in _seeds(table):
        epochs = [t["epoch"] for t in record["traces"]]
        last = [max(trace(record, part, e)[-1], ROUNDING) for e in epochs]
        ax.semilogy(epochs, last, **style)
    ax.axhline(ROUNDING, color="#555555", linewidth=0.9, linestyle=":", zorder=1)
    ax.set(title=f"{PARTS[part]}, last residual", xlabel="epoch", ylabel="relative residual", ylim=(2e-8, 4))


def _convergence(table: Table, parts: tuple[str, ...]):
    fig, axes = plt.subplots(2, len(parts), figsize=(8.2 if len(parts) == 2 else 5.0, 6.4), squeeze=False)
    for (upper, lower), part in zip(axes.T, parts, strict=True):
        by_iteration(upper, table, part)
        by_epoch(lower, table, part)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if handles:
        fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize="small")
    return fig


def figure3(table1: Table):
    """Figure 3: residuals of both solves in train mode."""
    return _convergence(table1, ("train_forward", "train_backward"))


def figure5(table1: Table):
    """Figure 5: residuals of the forward solve in test mode."""
    return _convergence(table1, ("test_forward",))


def work(row) -> float | None:
    """Evaluations of f in both solves of one training step, ours."""
    both = [row.value(f"nfe_train_{way}") for way in ("forward", "backward")]
    return sum(v.mean for v in both) if all(both) else None


def work_paper(row) -> float | None:
    """The same, as the paper prints it."""
    both = [row.paper.get(f"nfe_train_{way}") for way in ("forward", "backward")]
    return sum(both) if all(both) else None


def figure4(table: Table, table1: Table):
    """Figure 4: accuracy, cost and speed against the L of the hyperparameters; accuracy and speed beside each one's MDEQ."""
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(9.4, 3.6))
    base, theirs = table1["mdeq"].value("accuracy"), table1["mdeq"].paper["accuracy"]
    printed = [row for row in table.rows if "accuracy" in row.paper]
    if base:
        values = [row.value("accuracy") for row in table.done]
        x = [promised(row.config) for row in table.done]
        gaps = [v.mean - base.mean for v in values]
        ends = [[v.mean - v.low for v in values], [v.high - v.mean for v in values]]
        left.errorbar(x, gaps, yerr=ends, fmt="none", ecolor=COLOURS["blue"], elinewidth=1)
        ours(left, x, gaps)
        limits = [spread(row, table1["mdeq"]) for row in table.done]
        order = sorted(range(len(x)), key=x.__getitem__)
        band = [[s * limits[i] for i in order] for s in (-1, 1)]
        left.fill_between([x[i] for i in order], *band, color="#222222", alpha=0.07, linewidth=0, label="spread")
    paper(left, [promised(r.config) for r in printed], [r.paper["accuracy"] - theirs for r in printed])
    left.axhline(0, color="#555555", linewidth=0.9, linestyle="-")
    left.set(title="Accuracy minus that of MDEQ", ylabel="points")
    ours(middle, [promised(r.config) for r in table.done], [work(r) for r in table.done])
    paper(middle, [promised(r.config) for r in printed], [work_paper(r) for r in printed])
    middle.set(title="Evaluations in a training step", yscale="log", ylim=(1.5, 50), ylabel="forward + backward")
    middle.set_yticks([2, 5, 10, 20, 40], ["2", "5", "10", "20", "40"])
    middle.minorticks_off()
    timed = [row for row in table.done if row.value("speedup")]
    ours(right, [promised(r.config) for r in timed], [r.value("speedup").mean for r in timed])
    paper(right, [promised(r.config) for r in printed], [r.paper["speedup"] for r in printed])
    right.axhline(1, color="#555555", linewidth=0.9, linestyle="-")
    right.set(title="Speed-up of a training step", ylabel="MDEQ's time / this", ylim=(0, None))
    for ax in (left, middle, right):
        ax.set(xscale="log", xlim=(0.02, 25), xlabel="L of the hyperparameters")
        shade_contraction(ax, axis="x", label="L < 1")
    fig.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return fig


# Each figure, and the tables that it shows; its file belongs to the first of them.
FIGURES = {"figure3": (figure3, "table1"), "figure5": (figure5, "table1"), "figure4": (figure4, "figure4", "table1")}


def products(names: Iterable[str] = TABLES) -> list[str]:
    """The files of some tables: markdown and CSV of each, and the figures."""
    tables = [f"{name}.{end}" for name in names for end in ("md", "csv")]
    return tables + [f"{figure}.svg" for figure, (_, home, *_) in FIGURES.items() if home in names]


def source(figure: str, tables: Mapping[str, Table]) -> str:
    """One hash over all that a figure shows: records, speeds, printed numbers; Figures 3 and 5 show some rows' records."""
    rows = {f"{name}/{row.name}": row for name in FIGURES[figure][1:] for row in tables[name].rows}
    if figure == "figure4":
        speeds = {k: row.bench.get("speedup") for k, row in rows.items()}
        return content_sha256(
            {k: [row.paper, speeds[k], *(r["sha256"] for r in row.records)] for k, row in rows.items()}
        )
    return content_sha256({k: [r["sha256"] for r in row.records] for k, row in rows.items() if row.name in CURVES})


def is_drawn(figure: str, tables: Mapping[str, Table], folder: str | Path) -> bool:
    """Whether a figure in ``folder`` was made from what the tables hold now."""
    path = Path(folder, f"{figure}.svg")
    return path.exists() and source(figure, tables) in path.read_text("utf8")


def write(
    protocol: str = "cpu", root: str | Path = ".", out: str | Path | None = None, files: Iterable[str] | None = None
) -> list[Path]:
    """Write some of the :func:`products`, by default all; returns their paths."""
    folder = Path(out) if out else Path(root) / "results" / protocol / "tables"
    wanted = [(name, *name.split(".")) for name in (products() if files is None else files) if _known(name)]
    shown = [table for _, stem, end in wanted for table in (FIGURES[stem][1:] if end == "svg" else [stem])]
    tables = {name: load(name, protocol, root) for name in dict.fromkeys(shown)}
    folder.mkdir(parents=True, exist_ok=True)  # after all names were found to be good
    use_style()
    for name, stem, end in wanted:
        with writing(folder / name) as part:
            if end == "svg":
                draw, *names = FIGURES[stem]
                fig = draw(*(tables[table] for table in names))
                save(fig, part, source(stem, tables))
                plt.close(fig)
            else:
                part.write_text(tables[stem].texts()[name], encoding="utf8")
    return [folder / name for name, *_ in wanted]


def _known(name: str) -> bool:
    if name not in products():
        raise ValueError(f"file = {name!r}: must be one of {', '.join(products())}")
    return True
