"""The sections of the dashboard: the report's charts and tables over a run that goes on, and its rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import parse_qs

from markupsafe import Markup

from grailnode.observe.rollout_reader import PublishedRollout
from grailnode.observe.state import STORAGE_ALARM, NetworkState
from grailnode.ui.formatting import byte_text, rate_text
from grailnode.ui.report.page import Tile, change_tile, figures, run_title
from grailnode.ui.report.templates import asset_urls, part, render
from grailnode.ui.report_data import Findings
from protocol.judging.verdict import Reason

SECTIONS: Final = (
    *("head", "tiles", "plots", "alarms", "windows", "strata", "miners", "validators", "sites", "chain"),
)
_SHOWN_ROLLOUTS: Final = 20
_SHOWN_MINERS: Final = 200
_SHOWN_ROWS: Final = 12  # windows and versions in tables; the plots show all
_ORDERS: Final = {"newest": "as delivered", "best": "best first", "worst": "worst first"}
_FILTERS: Final = {
    "": "all",
    "accepted": "accepted",
    "open": "not judged",
    "rejected": "rejected, for any reason",
    **{reason.value: f"rejected: {reason.value}" for reason in Reason},
}


@dataclass(frozen=True)
class Choice:
    """Which rollouts to show: in which order, of which judgement, and of miners whose name or key begins so."""

    order: str = "newest"
    judgement: str = ""
    miner: str = ""

    @classmethod
    def of(cls, query: str) -> "Choice":
        """Read a query; what is not understood counts for nothing."""
        try:
            values = {name: items[-1] for name, items in parse_qs(query[:1000], max_num_fields=8).items()}
        except ValueError:
            return cls()
        order, judgement = values.get("order", ""), values.get("judgement", "")
        return cls(
            order if order in _ORDERS else "newest",
            judgement if judgement in _FILTERS else "",
            values.get("miner", "")[:64],
        )

    def select(self, published: Sequence[PublishedRollout], names: dict[str, str]) -> list[PublishedRollout]:
        chosen = [rollout for rollout in published if self._fits(rollout, names.get(rollout.miner.hex(), ""))]
        if self.order != "newest":
            chosen.sort(key=lambda rollout: rollout.reward, reverse=self.order == "best")
        return chosen

    def _fits(self, rollout: PublishedRollout, name: str) -> bool:
        if not (rollout.miner.hex().startswith(self.miner.lower()) or name.startswith(self.miner)):
            return False
        if self.judgement in ("accepted", "open"):
            return not rollout.reasons and bool(rollout.judged) == (self.judgement == "accepted")
        return not self.judgement or self.judgement in (*rollout.reasons, *(["rejected"] if rollout.reasons else []))


def dashboard_page(
    run_name: str, sections: dict[str, str], rollout_list: str, choice: Choice, revision: int, rollout_revision: int
) -> str:
    return render(
        "dashboard.html",
        name=run_title(run_name),
        assets=asset_urls(),
        sections={name: Markup(sections.get(name, "")) for name in SECTIONS},  # noqa: S704 - of `sections_of`
        rollouts=Markup(rollout_list),  # noqa: S704 - likewise
        choice=choice,
        orders=_ORDERS,
        filters=_FILTERS,
        revision=str(revision),
        rollout_revision=str(rollout_revision),
    )


def sections_of(state: NetworkState) -> dict[str, str]:
    """Return the sections of `SECTIONS`. The same state gives the same text."""
    findings = Findings.of(state)
    section = partial(part, "sections.html")
    earning = sorted(state.miners, key=lambda miner: (-miner.score, -miner.accepted))[:_SHOWN_MINERS]
    rows, stages = ({row.window: row for row in rows} for rows in (state.windows[-_SHOWN_ROWS:], state.stages))
    windows = [(number, rows.get(number), stages.get(number)) for number in sorted({*rows, *stages}, reverse=True)]
    return {
        "head": section("head", state, tuple(line for line in state.alarms if line.startswith(STORAGE_ALARM))),
        "tiles": section("tiles", _tiles(state, findings)),
        "plots": figures(state, findings),
        "alarms": section("alarms", state.alarms),
        "windows": section("windows", state, windows),
        "strata": section("strata", state),
        "miners": section("miners", sorted(earning, key=lambda miner: miner.name), len(state.miners), state.recent),
        "validators": section("validators", state.validators),
        "sites": section("sites", state),
        "chain": section("chain", state, state.versions[-_SHOWN_ROWS:][::-1]),
    }


def _tiles(state: NetworkState, findings: Findings) -> list[Tile]:
    patch = "-" if findings.patch_bytes is None else byte_text(findings.patch_bytes)
    return [
        change_tile("held-out pass@1", findings.pass_at_1, "by a validator"),
        change_tile("mean reward", findings.reward, "verified rollouts"),
        ("median patch", patch, f"a full checkpoint has {byte_text(state.full_bytes)}"),
        ("miners", f"{len(state.miners):,}", f"{sum(miner.score > 0 for miner in state.miners):,} earn"),
        ("groups verified", f"{findings.groups.accepted:,}", f"of {findings.groups.judged:,} judged"),
        ("groups rejected", f"{findings.groups.rejected:,}", f"{len(findings.groups.reasons)} reasons, see below"),
        ("validators", f"{len(state.validators):,}", f"{rate_text(state.check_rate)} tokens/s of checking"),
        ("alarms", f"{len(state.alarms):,}", "since this page was started"),
    ]


def rollout_list(published: Sequence[PublishedRollout], names: dict[str, str], choice: Choice) -> Markup:
    """Return the rollouts of a choice, each with its whole episode folded; names of miners are by key in hex."""
    chosen = choice.select(published, names)
    windows = sorted({rollout.window for rollout in published})
    place = f" of window {windows[-1]}" if windows else ""
    count = f"{min(len(chosen), _SHOWN_ROLLOUTS)} of {len(chosen)} that fit, of {len(published)} rollouts read{place}"
    return part("sections.html", "rollout_list", count, chosen[:_SHOWN_ROLLOUTS], names)
