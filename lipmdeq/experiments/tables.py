"""The paper's tables from the records of runs, ours next to the paper's.

``load("table1")`` reads results/<protocol>/<table>/<row>/seed<k>.json, checks each record against its configuration and groups
them by row. Any subset will do: a row without records is "not run yet", a missing seed only means fewer seeds. The paper's
numbers are in results/paper.yaml, our times in results/bench (:func:`times_file`).
"""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from lipmdeq.experiments.rows import (
    HEADS,
    MISSING,
    PROVED,
    SCALE,
    SHARED,
    TABLES,
    UNPROVED,
    Row,
    Value,
    over_seeds,
    promised,
    read_paper,
    read_rows,
    spread,
)

__all__ = ["SHARED", "TABLES", "Grid", "Row", "Table", "Value", "load", "over_seeds", "promised", "spread"]


@dataclass
class Table:
    """All rows of one table, in the paper's order; prints itself as markdown, CSV and in notebooks as HTML."""

    name: str
    protocol: str
    title: str
    setting: str
    rows: list[Row]

    def __getitem__(self, row: str) -> Row:
        return next(r for r in self.rows if r.name == row)

    @property
    def done(self) -> list[Row]:
        """The rows that have a record."""
        return [row for row in self.rows if row.records]

    @cached_property
    def keys(self) -> list[str]:
        """What the table compares with the paper: the columns for which the paper has a number."""
        return [key for key in HEADS if any(key in row.paper for row in self.rows)]

    def spread(self, one: str, other: str) -> float:
        """How large the difference of two rows must be to be called one, see :func:`spread`."""
        return spread(self[one], self[other])

    def compare(self, one: str, other: str) -> str:
        """A sentence on two rows' accuracies that claims no difference smaller than the spread of these two."""
        a, b = self[one], self[other]
        if not (a.records and b.records):
            return f"{a.title} against {b.title}: {MISSING}."
        x, y = a.value("accuracy"), b.value("accuracy")
        seeds = "one seed each" if x.seeds == y.seeds == 1 else f"{x.seeds} and {y.seeds} seeds"
        gap, limit = x.mean - y.mean, spread(a, b)
        if abs(gap) <= limit:
            verdict = f"no difference that stands out from a spread of {limit:.1f} points"
        else:
            verdict = f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'}, more than the spread of {limit:.1f}"
        return f"{a.title}: {x.mean:.1f} %. {b.title}: {y.mean:.1f} % ({seeds}). {verdict.capitalize()}."

    @property
    def scale(self) -> str:
        """What our numbers were computed at, from the records."""
        records = [r for row in self.done for r in row.records]
        if not records:
            return MISSING
        seen = {key: sorted({str(get(r)) for r in records}) for key, get in SCALE.items()}
        images, data, size, epochs, weights, threads, seeds = (", ".join(v) for v in seen.values())
        cpu = "one CPU thread" if threads == "1" else f"{threads} CPU threads"
        return f"{images} images of {data} at {size}×{size}, {epochs} epochs, {weights}M weights, {cpu}, seeds {seeds}"

    @property
    def command(self) -> str:
        """What makes the records of this table, and then the table."""
        protocol = "" if self.protocol == "cpu" else f" protocol={self.protocol}"
        return f"python -m snakemake --cores 2 --config tables={self.name}{protocol}"

    @property
    def caption(self) -> str:
        """Title, scale, meaning of the ranges, command."""
        count = f"{len(self.done)} of {len(self.rows)} rows run"
        return (
            f"{self.title}. Ours: {self.scale}; mean over seeds (lowest–highest); {count}. The paper: {self.setting}. "
            f"Made by `{self.command}`."
        )

    def lines(self) -> tuple[list[str], list[list[str]]]:
        """Heading and cells, as text: ours and the paper's in turn, then the proved L in test mode."""
        head = ["model", *(h for k in self.keys for h in (HEADS[k][0], "paper")), "proved L, test mode"]
        body = [
            [row.title, *(c for k in self.keys for c in (row.ours(k), f"{row.paper.get(k, '–')}")), row.ours("perron_test")]
            for row in self.rows
        ]  # fmt: skip
        return head, body

    def certificates(self) -> Grid:
        """What is proved about every row's trained weights, next to what the hyperparameters alone promise."""
        readings = (f"{reading.capitalize()}, {mode}" for mode, reading in PROVED.values())
        head = ["model", "before training", *readings, "‖J‖ seen", "verdict"]
        body = []
        for row in self.rows:
            norms = over_seeds(
                r["certificate"]["measured_norm"] for r in row.records if r["certificate"]["measured_norm"]
            )
            verdict = "L < 1 proved" if row.certified else UNPROVED if row.records else MISSING
            closed = f"{promised(row.config):.4g}".replace("inf", "∞")
            cells = [_few(row.value(key)) for key in PROVED]
            body.append([row.title, closed, *cells, _few(norms), verdict])
        return Grid(head, body)

    def markdown(self) -> str:
        """Caption and table."""
        return f"{self.caption}\n\n{Grid(*self.lines()).markdown()}"

    def csv(self) -> str:
        """One line for each row, numbers unrounded: mean, low, high over seeds and the paper's."""
        keys, out = [*HEADS, *PROVED], io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(
            ["row", "seeds", *(f"{k}{end}" for k in keys for end in ("", "_low", "_high", "_paper")), "L_promised"]
        )
        for row in self.rows:
            cells: list = [row.name, len(row.records)]
            for key in keys:
                v = row.value(key)
                cells += [f"{x:.6g}" for x in (v.mean, v.low, v.high)] if v else [""] * 3
                cells.append(row.paper.get(key, ""))
            writer.writerow([*cells, f"{promised(row.config):.6g}"])
        return out.getvalue()

    def texts(self) -> dict[str, str]:
        """The table's files: from their names to what is in them."""
        return {
            f"{self.name}.md": self.markdown() + "\n" + self.certificates().markdown(),
            f"{self.name}.csv": self.csv(),
        }

    def is_written(self, folder: str | Path) -> bool:
        """Whether the table's files in ``folder`` are what the records give now."""
        files = {Path(folder, name): text for name, text in self.texts().items()}
        return all(path.exists() and path.read_text("utf8") == text for path, text in files.items())

    def __repr__(self) -> str:
        return f"{self.title}: {len(self.done)} of {len(self.rows)} rows"

    def _repr_html_(self) -> str:
        """Ours above the paper's in one cell: a page is not wide enough for both side by side."""
        head, body = self.lines()
        pairs = range(1, len(head) - 1, 2)
        lines = [[line[0], *(f"{line[i]}\n{line[i + 1]}" for i in pairs), line[-1]] for line in body]
        caption = f"{self.caption} In each cell: ours, and below it the paper's in italics."
        return Grid([head[0], *(head[i] for i in pairs), head[-1]], lines, caption).html()


@dataclass
class Grid:
    """A heading and cells of text, as markdown or HTML."""

    head: list[str]
    body: list[list[str]]
    caption: str = ""

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.body]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def html(self) -> str:
        """A second line in a cell is set in italics. The class is that of pandas, which themes know in light and dark."""

        def line(cells: list[str], tag: str) -> str:
            pairs = (escape(cell).partition("\n") for cell in cells)
            shown = (f"{first}<br><i>{second}</i>" if cut else first for first, cut, second in pairs)
            return "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in shown) + "</tr>"

        parts = enumerate(self.caption.split("`"))
        text = "".join(f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in parts)
        rows = "".join(line(cells, "td") for cells in self.body)
        table = f"<table class='dataframe'><thead>{line(self.head, 'th')}</thead><tbody>{rows}</tbody></table>"
        return f"<p>{text}</p>{table}" if text else table

    def __repr__(self) -> str:
        return f"{len(self.body)} rows"

    def _repr_html_(self) -> str:
        return self.html()


def _few(value: Value | None) -> str:
    """Three significant digits; infinity is shown as ∞."""
    if value is None:
        return "–"
    ends = [f"{x:#.3g}" if math.isfinite(x) else "∞" for x in (value.mean, value.low, value.high)]
    return ends[0] if ends[1] == ends[2] else f"{ends[0]} ({ends[1]}–{ends[2]})"


def load(table: str, protocol: str = "cpu", root: str | Path = ".") -> Table:
    """One table of the paper.

    Args:
        table: one of ``TABLES``.
        protocol: folder of configs/ and results/.
        root: the repository.
    """
    if table not in TABLES:
        raise ValueError(f"table = {table!r}: must be one of {', '.join(TABLES)}")
    root = Path(root)
    if not re.fullmatch("[A-Za-z0-9_-]+", str(protocol)) or not (root / "configs" / protocol / table).is_dir():
        raise ValueError(f"protocol = {protocol!r}: must be a folder of configs/ in {str(root)!r}")
    paper = read_paper(root / "results" / "paper.yaml", table)
    return Table(table, protocol, paper["title"], paper["setting"], read_rows(table, protocol, root, paper["rows"]))
