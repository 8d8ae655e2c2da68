"""The tables of the terminal view: miners and nodes. Columns fall away as the terminal narrows; no cell ever wraps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import MinerRow, NodeRow
from grailnode.ui.figures import clean, reasons_text
from grailnode.ui.terminal.glyphs import bar

KIND_STYLE: Final = {"honest": "green", "cheating": "red"}
_GAP: Final = 2


@dataclass(frozen=True)
class Column:
    """A column: its heading, its width in cells, and the side that it leans to."""

    title: str
    cells: int
    right: bool = True


def miners(
    rows: Sequence[MinerRow], width: int, most: int, *, scored: bool = True, keyed: bool = False
) -> RenderableType:
    """One line a miner: name, kind, submitted, accepted, rejected by reason, score. At most `most` lines with the
    heading.

    Below 72 cells the kind goes (its colour stays on the name), below 58 what was sent, below 46 the score's bar. Where
    `keyed`, the first 8 digits of the key stand behind the name, from 58 cells on.
    """
    shown = _ranked(rows, most - 1)
    name = max([cell_len(clean(row.name, 16)) for row in shown] + [5])
    kind, submitted, drawn = width >= 72, width >= 58, width >= 46
    keyed = keyed and submitted
    drawing = (12 if width >= 100 else 4) if drawn else 0
    score = (drawing + 5 if drawn else 5) if scored else 0
    fixed = name + (8 if keyed else 0) + (8 if kind else 0) + (6 if submitted else 0) + 8 + score
    gaps = _GAP * (2 + keyed + kind + submitted + scored)
    why = max(width - fixed - gaps, 4)
    table = fitted(
        [
            Column("miner", name, right=False),
            Column("key", 8, right=False) if keyed else None,
            Column("kind", 8, right=False) if kind else None,
            Column("sent", 6) if submitted else None,
            Column("accepted", 8),
            Column("rejected", why, right=False),
            Column("score", score, right=False) if scored else None,
        ],
        [_miner(row, why, named=kind, drawing=drawing) for row in shown],
    )
    return _with_rest(table, len(rows) - len(shown), "miner")


def nodes(rows: Sequence[NodeRow], width: int, most: int) -> RenderableType:
    """One line a node: name, version, and what it does now. At most `most` lines with the heading."""
    fits = len(rows) <= most - 1
    shown = rows if fits else rows[: max(most - 2, 0)]
    name = max([cell_len(clean(row.name, 16)) for row in shown] + [4])
    version = max([len(_version(row)) for row in shown] + [7])
    doing = max(width - name - version - 2 * _GAP, 4)
    table = fitted(
        [Column("node", name, right=False), Column("version", version), Column("now", doing, right=False)],
        [[Text(clean(row.name, 16)), Text(_version(row), style="cyan"), Text(clean(row.doing, 120))] for row in shown],
    )
    return _with_rest(table, len(rows) - len(shown), "node")


def lines_of(count: int) -> int:
    """The lines that a table of so many rows wants: its heading and them; none where it would be empty."""
    return count + 1 if count else 0


def fitted(columns: Sequence[Column | None], rows: Sequence[Sequence[Text]]) -> Table:
    """A table without the columns that are None, and without their cells. What is too long is cut with an ellipsis."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, collapse_padding=True, header_style="dim")
    kept = [place for place, column in enumerate(columns) if column is not None]
    for column in columns:
        if column is not None:
            justify: Literal["right", "left"] = "right" if column.right else "left"
            table.add_column(column.title, width=column.cells, no_wrap=True, justify=justify)
    for row in rows:
        table.add_row(*(row[place] for place in kept))
    return table


def _miner(row: MinerRow, why: int, *, named: bool, drawing: int) -> list[Text]:
    """A miner's cells, all seven; its name carries the colour of its kind where the kind has no column."""
    style = KIND_STYLE.get(row.kind, "")
    return [
        Text(clean(row.name, 16), style="" if named else style),
        Text(row.key[:8], style="dim"),
        Text(clean(row.kind, 8), style=style),
        Text(f"{row.submitted:,}"),
        Text(f"{row.accepted:,}", style="green" if row.accepted else ""),
        _rejected(row, why),
        _score(row.score, drawing),
    ]


def _ranked(rows: Sequence[MinerRow], most: int) -> Sequence[MinerRow]:
    """All of them in their order where they fit, else the ones with the highest scores, with a line left for the rest."""
    if len(rows) <= most:
        return rows
    return sorted(rows, key=lambda row: (-row.score, -row.submitted, row.key))[: max(most - 1, 0)]


def _with_rest(table: Table, left: int, what: str) -> RenderableType:
    if left <= 0:
        return table
    words = f"and {left:,} more {what}{'s' if left > 1 else ''}"
    return Group(table, Text(words, style="dim", no_wrap=True, overflow="ellipsis"))


def _rejected(row: MinerRow, cells: int) -> Text:
    total = sum(row.rejected.values())
    if not total:
        return Text("-", style="dim")
    count = f"{total:,}"
    text = Text.assemble((count, "red"))
    room = cells - len(count) - 1
    if room >= 6:
        text.append(f" {reasons_text(row.rejected, room)}", style="dim")
    return text


def _score(score: float, drawing: int) -> Text:
    if not drawing:
        return Text(f"{score:.2f}")
    return Text.assemble((bar(score, drawing), "green"), f" {score:.2f}")


def _version(row: NodeRow) -> str:
    return "-" if row.version is None else f"v{row.version}"
