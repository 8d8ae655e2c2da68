"""The sections of the dashboard: the report's charts and tables over a run that goes on, and its rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from string import Template
from typing import Final
from urllib.parse import parse_qs

from grailnode.observe.rollout_reader import PublishedRollout
from grailnode.observe.state import STORAGE_ALARM, NetworkState
from grailnode.ui.formatting import byte_part_text, byte_text, clean, decimal_text, rate_text, share_text
from grailnode.ui.report.charts import groups, learning, patches, sparsity
from grailnode.ui.report.html_tables import history, miners, number_row, participant, rounds, sites, table
from grailnode.ui.report.markup import Child, Markup, element, join, prose, text
from grailnode.ui.report.page import asset, change_tile, fact_list, run_title, shell, tile_list
from grailnode.ui.report_data import Findings, RunFigures
from protocol.judging.verdict import Reason

SECTIONS: Final = (
    *("head", "tiles", "plots", "alarms", "windows", "strata", "miners", "validators", "sites", "chain"),
)
_SHOWN_ROLLOUTS: Final = 20
_SHOWN_MINERS: Final = 200
_SHOWN_ROWS: Final = 12  # windows and versions in tables; the plots show all
_LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
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
        """Return the rollouts to show."""
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


def dashboard(
    run_name: str, sections: dict[str, str], rollout_list: str, choice: Choice, revision: int, rollout_revision: int
) -> str:
    """Return the whole page."""
    content = Template(asset("dashboard.html")).substitute(
        heading=text(run_title(run_name)),
        filter=_filter(choice, revision, rollout_revision),
        rollouts=rollout_list,
        **{name: sections.get(name, "") for name in SECTIONS},
    )
    links = '<link rel="stylesheet" href="style.css">\n<script src="dashboard.js" defer></script>'
    return shell(f"{run_title(run_name)} · grailnode", links, content)


def sections_of(state: NetworkState) -> dict[str, str]:
    """Return the sections of `SECTIONS`. The same state gives the same text."""
    figures = RunFigures.of(state)
    findings = Findings.of(figures)
    return {
        "head": _head(state),
        "tiles": _tiles(state, findings),
        "plots": join([plot(figures, findings) for plot in (learning, patches, sparsity, groups)], "\n"),
        "alarms": _alarms(state),
        "windows": _windows(state),
        "strata": _strata(state),
        "miners": _miners(figures, state),
        "validators": _validators(state),
        "sites": join([sites(figures), rounds(figures)]) if state.sites else Markup(""),
        "chain": _chain(state),
    }


def _time(moment: float | None) -> Markup:
    """Return a moment, which the page's script replaces by how long ago it is."""
    if moment is None:
        return text("never")
    at = min(moment, _LATEST)
    words = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup(f'<time data-at="{at:.3f}">{words}</time>')


def _head(state: NetworkState) -> Markup:
    entries = [("run", element("code", state.run_id[:16], title=state.run_id)), ("figures read", _time(state.read_at))]
    if state.head is not None:
        entries += [
            ("version", text(f"{state.head.version:,}")),
            ("made", _time(state.head.made_at)),
            ("head signed", _time(state.head.signed_at)),
            ("expires", _time(state.head.expires_at)),
        ]
    if state.window is not None:
        entries.append(("window", text(f"{state.window:,}, each of {state.window_seconds:g} s")))
    failing = [line for line in state.alarms if line.startswith(STORAGE_ALARM)]
    silent = [f"No sign of {', '.join(state.silent)}."] if state.silent else []
    lines = [element("p", clean(line, 400), class_="alert") for line in (*silent, *failing, *state.troubles)]
    notes = [element("p", clean(line, 400), class_="aside") for line in (state.bottleneck, *state.unjudged) if line]
    return join([fact_list(entries), *lines, *notes])


def _tiles(state: NetworkState, findings: Findings) -> Markup:
    patch = "-" if findings.patch_bytes is None else byte_text(findings.patch_bytes)
    return tile_list(
        [
            change_tile("held-out pass@1", findings.pass_at_1, "by a validator"),
            change_tile("mean reward", findings.reward, "verified rollouts"),
            ("median patch", patch, f"a full checkpoint has {byte_text(state.full_bytes)}"),
            ("miners", f"{len(state.miners):,}", f"{sum(miner.score > 0 for miner in state.miners):,} earn"),
            ("groups verified", f"{findings.groups.accepted:,}", f"of {findings.groups.judged:,} judged"),
            ("groups rejected", f"{findings.groups.rejected:,}", f"{len(findings.groups.reasons)} reasons, see below"),
            ("validators", f"{len(state.validators):,}", f"{rate_text(state.check_rate)} tokens/s of checking"),
            ("alarms", f"{len(state.alarms):,}", "since this page was started"),
        ]
    )


def _alarms(state: NetworkState) -> Markup:
    if not state.alarms:
        return element("p", "None.", class_="aside")
    items = [element("li", clean(line, 600)) for line in reversed(state.alarms)]
    return element("ul", *items, class_="alarms scroll tall")


def _windows(state: NetworkState) -> Markup:
    """Return the windows with their stage: those that are open, and the newest with a summary."""
    rows_by_window = {row.window: row for row in state.windows[-_SHOWN_ROWS:]}
    stages = {row.window: row for row in state.stages}
    names = ["version", "accepted", "rejected", "reward", "pass@1", *_pass_at_k(state)]
    rows = []
    for window in sorted({*rows_by_window, *stages}, reverse=True):
        row, stage = rows_by_window.get(window), stages.get(window)
        cells: list[Child] = ["-"] * len(names)
        if row is not None:
            values = (row.reward, row.pass_at_1, row.pass_at_k)[: len(names) - 3]
            cells = [str(row.version), f"{row.accepted:,}", f"{row.rejected:,}", *(decimal_text(v, 3) for v in values)]
        words = "decided" if stage is None else stage.stage
        until = join([text(", ends "), _time(stage.until)]) if stage and stage.until is not None else Markup("")
        revealed = f"{stage.revealed} of {len(state.validators)}" if stage else "-"
        rows.append(
            element(
                "tr",
                element("td", str(window), class_="n"),
                element("td", words, until),
                *(element("td", cell, class_="n") for cell in (revealed, *cells)),
            )
        )
    columns = ((name, "n") for name in ("revealed", *names))
    return table((("window", "n"), ("stage", ""), *columns), rows, "No window was judged yet.")


def _pass_at_k(state: NetworkState) -> list[str]:
    return [f"pass@{state.pass_at}"] if state.pass_at > 1 else []


def _strata(state: NetworkState) -> Markup:
    """Return the newest evaluation by kind of problems, beside the oldest that was read."""
    evaluations = [row for row in state.windows if row.strata]
    if not evaluations:
        return element("p", "No validator has measured them yet.", class_="aside")
    first = {item.name: item.pass_at_1 for item in evaluations[0].strata}
    rows = [
        element(
            "tr",
            element("td", clean(item.name, 40) or "all", class_="name"),
            *(
                element("td", cell, class_="n")
                for cell in (
                    f"{item.problems:,}",
                    decimal_text(first.get(item.name), 3),
                    decimal_text(item.pass_at_1, 3),
                    *(decimal_text(item.pass_at_k, 3) for _ in _pass_at_k(state)),
                )
            ),
        )
        for item in evaluations[-1].strata
    ]
    oldest, newest = evaluations[0].window, evaluations[-1].window
    names = ("problems", f"pass@1, window {oldest}", f"pass@1, window {newest}", *_pass_at_k(state))
    return table((("problems of", ""), *((name, "n") for name in names)), rows, "")


def _miners(figures: RunFigures, state: NetworkState) -> Markup:
    """Return the table of those miners that earn most, by name."""
    shown = sorted(figures.groups, key=lambda miner: (-miner.score, -miner.accepted))[:_SHOWN_MINERS]
    rows = tuple(sorted(shown, key=lambda miner: miner.name))
    count = f"{len(rows)} of {len(figures.groups):,} miners: those that earn most."
    lines = [element("p", count, class_="aside")] if len(rows) < len(figures.groups) else []
    return join(
        [*lines, element("div", miners(figures.model_copy(update={"groups": rows}), state.recent), class_="tall")]
    )


def _validators(state: NetworkState) -> Markup:
    heads = ("windows", "newest windows", "accepted", "rejected", "tokens/s")
    rows = [
        participant(
            row,
            None,
            *history(f"{row.windows:,}", row.recent),
            *(element("td", cell, class_="n") for cell in (f"{row.accepted:,}", f"{row.rejected:,}")),
            element("td", rate_text(row.check_rate), class_="n"),
        )
        for row in state.validators
    ]
    columns = [(name, "" if name == "newest windows" else "n") for name in heads]
    return table((("validator", ""), ("key", "wide"), *columns), rows, "The run has no validator.")


def _chain(state: NetworkState) -> Markup:
    if state.head is None:
        return element("p", "The run has published no version that could be read.", class_="aside")
    head = state.head
    facts = fact_list(
        [
            ("manifests", text(f"{head.base:,} to {head.version:,}, signed and linked")),
            ("anchors", text(", ".join(f"{version:,}" for version in head.anchors[-8:]))),
            ("patches from", text(f"{head.oldest_patch:,}")),
            ("epoch", text(f"{head.epoch:,}")),
            ("authority revision", text(f"{head.revision:,}")),
            ("weights", element("code", head.weights)),
        ]
    )
    rows = [
        number_row(
            str(row.version),
            f"{row.optimizer_step:,}",
            f"{row.first_window:,}",
            "-" if row.patch_bytes is None else byte_part_text(row.patch_bytes, state.full_bytes),
            "-" if row.anchor_bytes is None else byte_text(row.anchor_bytes),
            "-" if row.sparsity is None else share_text(row.sparsity),
        )
        for row in reversed(state.versions[-_SHOWN_ROWS:])
    ]
    names = ("version", "step", "serves from window", "patch", "anchor", "sparsity")
    return join([facts, table(tuple((name, "n") for name in names), rows, "")])


def _filter(choice: Choice, revision: int, rollout_revision: int) -> Markup:
    def options(name: str, words: dict[str, str], chosen: str) -> Markup:
        items = [
            element("option", label, value=value, selected="" if value == chosen else None)
            for value, label in words.items()
        ]
        return element("label", f"{name} ", element("select", *items, name_=name))

    miner = element("input", name_="miner", value=choice.miner, size=16, placeholder="name or key")
    return element(
        "form",
        options("order", _ORDERS, choice.order),
        options("judgement", _FILTERS, choice.judgement),
        element("label", "miner ", miner),
        element("noscript", element("button", "Show")),
        id="filter",
        data_revision=str(revision),
        data_rollouts=str(rollout_revision),
    )


def rollout_list(published: Sequence[PublishedRollout], names: dict[str, str], choice: Choice) -> Markup:
    """Return the rollouts of a choice, each with its whole episode folded.

    Args:
        names: of miners, by key in hex.
    """
    chosen = choice.select(published, names)
    windows = sorted({rollout.window for rollout in published})
    place = f" of window {windows[-1]}" if windows else ""
    count = f"{min(len(chosen), _SHOWN_ROLLOUTS)} of {len(chosen)} that fit, of {len(published)} rollouts read{place}"
    items = [_rollout(rollout, names.get(rollout.miner.hex(), "")) for rollout in chosen[:_SHOWN_ROLLOUTS]]
    return join([element("p", count, class_="aside"), *items])


def _rollout(rollout: PublishedRollout, name: str) -> Markup:
    figures = f" reward {rollout.reward:g}, {clean(rollout.status, 120)}, {rollout.tokens} tokens"
    turns = [element("pre", prose(words), class_=speaker) for speaker, words in rollout.turns]
    return element(
        "details",
        element("summary", element("b", clean(name, 40)), figures, " ", element("code", rollout.place)),
        element("p", f"version {rollout.version}, rollout {rollout.index}; prompt:", class_="aside"),
        element("pre", prose(rollout.prompt), class_="environment"),
        element("p", "policy" if len(turns) == 1 else "policy and environment, turn by turn:", class_="aside"),
        *turns,
        class_="rollout",
    )
