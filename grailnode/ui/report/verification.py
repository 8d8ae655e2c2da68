"""The plot of the judgements: for each miner, groups accepted and rejected by reason, as stacked bars."""

from typing import Final

from grailnode.observe.state import MinerRow
from grailnode.ui.findings import Findings
from grailnode.ui.formatting import clean
from grailnode.ui.report.charts import figure, legend
from grailnode.ui.report.markup import Markup, element
from grailnode.ui.report.plot import HEIGHT, RIGHT, drawing, empty_message
from grailnode.ui.report_data import DemoReport
from grailnode.ui.tallies import by_count

MOST_MINERS: Final = 12  # the rest are in the table
COLOURS: Final = 7  # reasons with a colour of their own; the rarer ones share the last
_EDGE: Final = 14.0
_ROW: Final = 52.0
_BAR: Final = 16.0


def groups(report: DemoReport, findings: Findings) -> Markup:
    """Plot the groups accepted and rejected per miner by reason, the largest miners first."""
    ranked = sorted(report.groups, key=lambda miner: -_whole(miner))
    largest, rest = ranked[:MOST_MINERS], ranked[MOST_MINERS:]
    css = {reason: f"r{min(place, COLOURS)}" for place, (reason, _) in enumerate(by_count(findings.groups.reasons))}
    widest = max((_whole(miner) for miner in largest), default=0)
    body = [_row(miner, place, widest, css) for place, miner in enumerate(largest)] or [
        empty_message("no miner took part")
    ]
    height = max(_EDGE + _ROW * len(largest), HEIGHT if not largest else 0.0)
    more = element("p", f"and {len(rest)} smaller miners, in the table below", class_="aside") if rest else None
    return figure(
        "Verification",
        drawing(
            "groups",
            "Groups accepted and rejected by reason, for each miner",
            ". ".join(f"{clean(miner.name)}: {_counts(miner)}" for miner in largest) or "No miner took part.",
            *body,
            height=height,
        ),
        _legend(findings, css),
        more,
    )


def _legend(findings: Findings, css: dict[str, str]) -> Markup:
    """Return the legend: accepted groups, each reason with a colour, and the other reasons as one entry."""
    ranked = by_count(findings.groups.reasons)
    frequent, rest = ranked[:COLOURS], ranked[COLOURS:]
    entries = [("ok", "accepted", f"{findings.groups.accepted:,}")]
    entries += [(css[reason], clean(reason, 32), f"{count:,}") for reason, count in frequent]
    if rest:
        entries.append((f"r{COLOURS}", f"{len(rest)} other reasons", f"{sum(count for _, count in rest):,}"))
    return legend(*entries)


def _row(miner: MinerRow, place: int, widest: int, css: dict[str, str]) -> Markup:
    """Draw a miner's name, its counts, and its bar."""
    top = _EDGE + _ROW * place
    scale = (RIGHT - _EDGE) / widest if widest else 0.0
    open_groups = max(0, miner.submitted - miner.judged)
    parts = [("ok", "accepted", miner.accepted)]
    parts += [(css[reason], reason, count) for reason, count in by_count(miner.rejected)]
    parts.append(("open", "not judged", open_groups))
    bars, at = [], _EDGE
    for name, words, count in parts:
        if count:
            tooltip = element("title", f"{clean(miner.name)}: {count} {clean(words)}")
            width = max(count * scale, 1.5)
            css_class = name if width > 4 else f"{name} thin"
            bars.append(element("rect", tooltip, class_=css_class, x=at, y=top + 18, width=width, height=_BAR))
        at += count * scale
    kind = element("tspan", f"  {miner.kind}", class_=f"kind {miner.kind}")
    return element(
        "g",
        element("text", clean(miner.name, 16), kind, class_="label", x=_EDGE, y=top + 10),
        element("text", _counts(miner), class_="tick", x=RIGHT, y=top + 10, text_anchor="end"),
        *bars,
    )


def _counts(miner: MinerRow) -> str:
    return f"{miner.accepted:,} accepted, {miner.rejections:,} rejected"


def _whole(miner: MinerRow) -> int:
    """Return the length of a miner's bar: more groups may be judged than this view read commitments for."""
    return max(miner.submitted, miner.judged)
