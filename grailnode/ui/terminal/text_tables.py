"""The tables of the terminal view: miners, sites and nodes. Narrow terminals get fewer columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from grailnode.observe.state import MinerRow, NodeRow, SiteRow
from grailnode.ui.formatting import byte_text, clean
from grailnode.ui.series import reasons_text
from grailnode.ui.terminal.glyphs import bar

KIND_STYLE: Final = {"honest": "green", "cheating": "red"}
_GAP: Final = 2
_ALL: Final = 1 << 20  # cells


@dataclass(frozen=True)
class Column:
    """A column: its heading, its width in cells, and whether its text is aligned to the right, and wraps."""

    title: str
    cells: int
    right: bool = True
    wraps: bool = False


def miners(rows: Sequence[MinerRow], width: int, *, keyed: bool = False, wraps: bool = False) -> Table:
    """Return one line for each miner: name, kind, submitted, accepted, rejected by reason, score.

    Tables of less than 72 cells have no kind (its colour stays on the name), of less than 58 no submitted groups and no
    key, of less than 46 no bar for the score. With `keyed` the first 8 digits of the key follow the name; with `wraps`
    reasons wrap that do not fit, down to 46 cells.
    """
    name = _name_cells(rows, 5)
    kind, submitted, barred = width >= 72, width >= 58, width >= 46
    keyed, wraps = keyed and submitted, wraps and barred
    bar_width = (12 if width >= 100 else 4) if barred else 0
    score = bar_width + 5 if barred else 5
    fixed = name + (8 if keyed else 0) + (8 if kind else 0) + (6 if submitted else 0) + 8 + score
    gaps = _GAP * (3 + keyed + kind + submitted)
    why = max(width - fixed - gaps, 4)
    is_partly_judged = why >= 20 and any(row.unjudged for row in rows)
    return fitted(
        [
            Column("miner", name, right=False),
            Column("key", 8, right=False) if keyed else None,
            Column("kind", 8, right=False) if kind else None,
            Column("sent", 6) if submitted else None,
            Column("accepted", 8),
            Column("rejected; not judged" if is_partly_judged else "rejected", why, right=False, wraps=wraps),
            Column("score", score, right=False),
        ],
        [_miner(row, _ALL if wraps else why, has_kind=kind, bar_width=bar_width) for row in rows],
    )


def sites(rows: Sequence[SiteRow], width: int) -> Table:
    """Return one line for each site that trains: its contributions that counted, with their local steps, groups and
    bytes, and those that did not, by reason.

    Tables of less than 58 cells have no bytes, of less than 46 no steps.
    """
    name = _name_cells(rows, 4)
    sized, stepped = width >= 58, width >= 46
    fixed = name + 7 + 6 + (6 if stepped else 0) + (8 if sized else 0)
    why = max(width - fixed - _GAP * (3 + stepped + sized), 4)
    return fitted(
        [
            Column("site", name, right=False),
            Column("counted", 7),
            Column("steps", 6) if stepped else None,
            Column("groups", 6),
            Column("sent", 8) if sized else None,
            Column("refused", why, right=False),
        ],
        [_site(row, why) for row in rows],
    )


def nodes(rows: Sequence[NodeRow], width: int) -> Table:
    """Return one line for each node: name, version, and what it does now."""
    name = _name_cells(rows, 4)
    versions = ["-" if row.version is None else f"v{row.version}" for row in rows]
    version = max([len(text) for text in versions] + [7])
    doing = max(width - name - version - 2 * _GAP, 4)
    return fitted(
        [Column("node", name, right=False), Column("version", version), Column("now", doing, right=False)],
        [
            [Text(clean(row.name, 16)), Text(text, style="cyan"), Text(clean(row.doing, 120))]
            for row, text in zip(rows, versions, strict=True)
        ],
    )


def fitted(columns: Sequence[Column | None], rows: Sequence[Sequence[Text]]) -> Table:
    """Return a table without columns that are None; long text wraps in columns that do, and is cut in others."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, collapse_padding=True, header_style="dim")
    places = [place for place, column in enumerate(columns) if column is not None]
    for column in columns:
        if column is not None:
            justify: Literal["right", "left"] = "right" if column.right else "left"
            overflow: Literal["fold", "ellipsis"] = "fold" if column.wraps else "ellipsis"
            table.add_column(
                column.title, width=column.cells, no_wrap=not column.wraps, overflow=overflow, justify=justify
            )
    for row in rows:
        table.add_row(*(row[place] for place in places))
    return table


def _miner(row: MinerRow, why: int, *, has_kind: bool, bar_width: int) -> list[Text]:
    """Return a miner's seven cells; its name has the colour of its kind if the kind has no column."""
    style = KIND_STYLE.get(row.kind, "")
    return [
        Text(clean(row.name, 16), style="" if has_kind else style),
        Text(row.key[:8], style="dim"),
        Text(clean(row.kind, 8), style=style),
        Text(f"{row.submitted:,}"),
        Text(f"{row.accepted:,}", style="green" if row.accepted else ""),
        _rejections(row.rejected, why, row.unjudged),
        _score(row.score, bar_width),
    ]


def _site(row: SiteRow, why: int) -> list[Text]:
    return [
        Text(clean(row.name, 16)),
        Text(f"{row.rounds:,}", style="green" if row.rounds else ""),
        Text(f"{row.steps:,}"),
        Text(f"{row.groups:,}"),
        Text(byte_text(row.payload_bytes)),
        _rejections(row.refused, why),
    ]


def _name_cells(rows: Sequence[MinerRow | SiteRow | NodeRow], least: int) -> int:
    return max([cell_len(clean(row.name, 16)) for row in rows] + [least])


def _rejections(reasons: Mapping[str, int], cells: int, unjudged: int = 0) -> Text:
    """Write '45: copied 30, +2; 675 not judged', as far as there is room, the reasons last."""
    total = sum(reasons.values())
    number = f"{total:,}" if total or unjudged else "-"
    rest = f"; {unjudged:,} not judged" if unjudged else ""
    if cell_len(number + rest) > cells:
        rest = ""
    text = Text.assemble((number, "red" if total else "dim"))
    room = cells - cell_len(number + rest) - 2
    if total and room >= 6:
        text.append(f": {reasons_text(reasons, room)}", style="dim")
    return text.append(rest, style="dim")


def _score(score: float, bar_width: int) -> Text:
    if not bar_width:
        return Text(f"{score:.2f}")
    return Text.assemble((bar(score, bar_width), "green"), f" {score:.2f}")
