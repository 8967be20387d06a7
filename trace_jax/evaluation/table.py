"""Results of several agents side by side, as a rich table and as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from trace_jax.evaluation import paper as reported
from trace_jax.evaluation.kinds import KINDS, kind_of

PLAIN_WIDTH = 120  # characters of a line in logs and files

LABELS = {
    "untrained": "untrained",
    **{name: name for kind in KINDS.values() for name in (*kind.agents, *kind.rivals)},
    "sft": "SFT",
    "grpo": "SFT->GRPO",
}


@dataclass(frozen=True)
class ResultTable:
    """Strings of a finished table: `columns` are headings, `rows` are `(label, cells)`, one cell per column; `corner`
    is the heading of the labels."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]
    title: str = ""
    corner: str = "metric"


def cell(result: Mapping, path: tuple[str, ...], decimals: int, intervals: bool) -> str:
    """`value [low, high]` of an entry of a result, "-" where it has none."""
    node = result
    for key in path:
        node = node.get(key) or {}
    value, low, high = (node.get(k) for k in ("value", "low", "high"))
    if value is None:
        return "-"

    def show(x: float) -> str:
        return f"{x:.{decimals}f}"

    if not intervals or low is None or high is None:
        return show(value)
    return f"{show(value)} [{show(low)}, {show(high)}]"


def build(agents: Mapping[str, Mapping], *, intervals: bool = True, paper: bool = True) -> ResultTable:
    """Arrange results in columns.

    Args:
        agents: result of `metrics.summarise` by agent name; the names of `LABELS` come first and in that order.
        intervals: write `value [low, high]`.
        paper: add the reported columns of arXiv 2609.10315, if its environment is theirs.

    Raises:
        ConfigError: results of several environments.
    """
    kind = kind_of(agents)
    order = [name for name in LABELS if name in agents] + [name for name in agents if name not in LABELS]
    columns = [(LABELS.get(name, name), agents[name]) for name in order]
    notes = []
    sizes = {(a["extra"]["episodes"], a["extra"]["confidence"]) for _, a in columns if "extra" in a}
    if intervals and len(sizes) == 1:
        episodes, confidence = sizes.pop()
        notes.append(f"{episodes} held-out episodes; brackets: {confidence:.0%} bootstrap interval over episodes")
    if paper and kind.in_paper:
        columns += [(reported.LABELS[name], reported.PAPER[name]) for name in reported.PAPER]
        notes.append(reported.NOTE)
    shown = kind.rows(agents)
    rows = tuple((label, tuple(cell(r, path, d, intervals) for _, r in columns)) for label, path, d in shown)
    title = f"{kind.headline} and companions, held-out episodes"
    return ResultTable(tuple(name for name, _ in columns), rows, tuple(notes), title)


def parts(table: ResultTable, width: int, edges: int = 2) -> list[ResultTable]:
    """The table in pieces of whole columns, each with all labels and no wider than `width` characters where that can
    be; the notes are the last one's.

    Args:
        edges: characters between two columns.
    """
    lines = [(table.corner, *table.columns), *((label, *cells) for label, cells in table.rows)]
    first, *widths = [max(len(line[i]) for line in lines) + edges for i in range(len(lines[0]))]
    groups: list[list[int]] = [[]]
    for number, wide in enumerate(widths):
        if groups[-1] and first + sum(widths[i] for i in groups[-1]) + wide > width:
            groups.append([])
        groups[-1].append(number)
    return [
        ResultTable(
            tuple(table.columns[i] for i in own),
            tuple((label, tuple(cells[i] for i in own)) for label, cells in table.rows),
            table.notes if own is groups[-1] else (),
            table.title if own is groups[0] else "",
            table.corner,
        )
        for own in groups
    ]


def rich_table(table: ResultTable) -> Table:
    """The table for a terminal; notes become its caption."""
    out = Table(title=table.title or None, caption="\n".join(table.notes) or None)
    out.add_column(table.corner, no_wrap=True)
    for name in table.columns:
        out.add_column(name, justify="right", no_wrap=True)
    for label, cells in table.rows:
        out.add_row(label, *cells)
    return out


def show(table: ResultTable) -> None:
    """Prints the table in as many pieces as the width asks for, as plain text when stdout is not a terminal."""
    console = Console()
    if console.is_terminal:
        for part in parts(table, console.width - 1, edges=3):
            console.print(rich_table(part))
    else:
        print("\n\n".join(map(plain_text, parts(table, PLAIN_WIDTH))))


def plain_text(table: ResultTable) -> str:
    """The table with aligned columns and no control characters, for logs and files."""
    lines = [(table.corner, *table.columns), *((label, *cells) for label, cells in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def row(line: tuple[str, ...]) -> str:
        first = line[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()

    body = [row(lines[0]), "  ".join("-" * w for w in widths), *(row(line) for line in lines[1:])]
    return "\n".join([*body, *table.notes])


def markdown(table: ResultTable) -> str:
    """The table as Markdown, its notes below."""
    lines = [f"| {table.corner} | {' | '.join(table.columns)} |", "|---" * (len(table.columns) + 1) + "|"]
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in table.rows]
    return "\n".join([*lines, "", *(f"{note[:1].upper()}{note[1:]}." for note in table.notes)]) + "\n"
