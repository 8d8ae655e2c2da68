"""Invented runs for the tests of the terminal and the report, and the elements of a page."""

from dataclasses import replace
from html.parser import HTMLParser

from grailnode.observe.state import MinerRow, NetworkState, NodeRow, RoundRow, SiteRow, VersionRow, WindowRow
from grailnode.ui.report_data import DemoReport

HOSTILE = (
    "<script>alert('x')</script>\x1b[31m\u202e\r\n&amp;\"" + "W" * 300 + "\N{FULLWIDTH LATIN CAPITAL LETTER A}" * 50
)
TOTAL = 806_400


def network(windows: int = 12, planned: int | None = 30, strangers: int = 0) -> NetworkState:
    """Return a run with two honest miners and a cheating one, after `windows` judged windows."""
    versions = [VersionRow(0, 0, 0, None, 2 * TOTAL + 900, 0, TOTAL)]
    versions += [VersionRow(v, 4 * v, v + 1, 19_200 + 37 * v, None, 22_000 + 40 * v, TOTAL) for v in range(1, windows)]
    rows = [
        WindowRow(w, max(w - 1, 0), 8, 2, 0.4 + 0.3 * min(w, 30) / 30, None if w % 3 else min(0.43 + w / 80, 0.97))
        for w in range(windows)
    ]
    miners = [
        MinerRow("a1" * 32, "miner-1", "honest", 4 * windows, 4 * windows, {}, 0.5),
        MinerRow("a2" * 32, "miner-2", "honest", 4 * windows, 4 * windows, {}, 0.5),
        MinerRow("a3" * 32, "cheater", "cheating", 2 * windows, 0, {"sampling": windows, "duplicate": windows}, 0.0),
    ]
    miners += [MinerRow(f"{n:064x}", f"{n:08x}", "unknown", 5, 4, {"late": 1}, 0.01) for n in range(strangers)]
    nodes = [NodeRow("trainer", windows, "training"), NodeRow("validator", None, "checking group 5 of 10 of window 3")]
    return NetworkState(
        run_id="3f9a2c71" * 8,
        run_name="demo",
        seconds=6.0 * windows,
        window=windows,
        windows_planned=planned,
        window_seconds=6.0,
        window_elapsed=2.5,
        full_bytes=2 * TOTAL,
        versions=tuple(versions),
        windows=tuple(rows),
        miners=tuple(miners),
        nodes=tuple(nodes),
        tokens_generated=90_000,
        tokens_verified=70_000,
    )


def many_sites(rounds: int = 6, count: int = 2, name: str = "worker") -> NetworkState:
    """Return the run of `network` with some sites that train together; the last of them is lost at times."""
    numbers, own = range(1, rounds + 1), (4 * rounds, 30 * rounds, 51_200 * rounds)
    rows = [RoundRow(n, n, n, count - n % 2, count, 4 * count, 30 * count, 51_200 * count) for n in numbers]
    sites = [SiteRow(f"b{n:063x}", f"{name}-{n}", rounds, {}, *own) for n in range(count)]
    sites[-1] = replace(sites[-1], refused={"lost": rounds // 2, "poisoned": 1})
    return replace(network(), rounds=tuple(rows), sites=tuple(sites))


def empty() -> NetworkState:
    """Return a run of which nothing has been read yet."""
    return NetworkState("ab" * 32, "", 0.0, None, None, 6.0, 0.0, 0)


def hostile() -> NetworkState:
    """Return a run in which every text that a stranger chooses is an attack."""
    state = network(strangers=1)
    miner = MinerRow("ff" * 32, HOSTILE, "unknown", 9, 1, {HOSTILE: 5, "b" + HOSTILE: 3}, 1.0)
    node = NodeRow(HOSTILE, 3, HOSTILE)
    return replace(
        state, run_name=HOSTILE, miners=(*state.miners, miner), nodes=(*state.nodes, node), alarms=(HOSTILE,)
    )


def report(state: NetworkState | None = None, **changes: object) -> DemoReport:
    """Return the report of a run, with facts that only its operator knows."""
    values: dict[str, object] = {
        "state": state or network(),
        "command": "grailnode demo --seed 7 --out out",
        "seed": 7,
        "environment": "addition",
        "model_parameters": TOTAL,
        "weights_digest": {"trainer": "5d" * 32, "miner-1": "5d" * 32, "validator": "5d" * 32},
        "trainer_io_wait_fraction": 0.0003,
        "trainer_data_wait_fraction": 0.31,
    }
    return DemoReport.model_validate(values | changes)


# Pages


class Tags(HTMLParser):
    """The elements of a page and their attributes; fails if an element is closed that is not the innermost open one."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
