"""The terminal view fits any terminal, shows the figures of the run, and no stranger's text can act in it."""

import io
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from grailnode.observe.state import MinerRow, NetworkState, StratumRow, WindowRow
from grailnode.ui.terminal import open_view
from grailnode.ui.terminal.pages import LiveView, PlainView, render_summary, run_page
from tests.ui import runs

STATES = {
    "usual": runs.network(),
    "empty": runs.empty(),
    "hostile": runs.hostile(),
    "endless": runs.network(planned=None),
    "crowded": runs.network(windows=400, strangers=60),
    "overdue": runs.network(windows=40),
    "sites": runs.many_sites(),
    "many sites": runs.many_sites(rounds=900, count=40, name=runs.HOSTILE),
}
WIDTHS = (20, 34, 46, 60, 80, 99, 100, 120, 200)


def screen(state: NetworkState) -> RenderableType:
    """Return what the live view draws."""
    return run_page("demo", state, is_live=True)


def status(state: NetworkState) -> RenderableType:
    return run_page("status", state)


def render(what: RenderableType, width: int, height: int = 24) -> list[str]:
    """Return the lines of a renderable on a terminal without colour."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(what)
    return capture.get().split("\n")[:-1]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_screen_shows_the_figures_of_the_run(width: int, height: int):
    lines = render(screen(replace(runs.network(), head_age=220.0)), width, height)
    assert len(lines) <= height
    text = "\n".join(lines)
    progress = ("window 12 of 30", "1:45 left", "3f9a2c71", "checking group 5 of 10")
    curves = ("0.43 → 0.54  +0.11", "0.40 → 0.51  +0.11", "19.6 KB = 1/82 of 1.6 MB")
    groups = ("96 verified", "24 rejected", "duplicate 12, sampling 12", "cheating")
    assert not [words for words in (*progress, *curves, *groups) if words not in text]
    assert "renewed" not in text  # a head may look minutes older than the demo is


def test_the_smallest_screen_shows_alarms():
    assert any("ALARM" in line for line in render(screen(runs.hostile()), 20, 8)[:8])


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_screen_and_status_show_what_sites_did(width: int, height: int):
    state = runs.many_sites()
    for page in (screen(state), status(state)):
        text = "\n".join(render(page, width, height))
        figures = ("round 6", "2 of 2 contributions", "8 steps, 60 groups", "worker-0", "worker-1", "180", "4: lost 3")
        assert not [words for words in figures if words not in text]
    assert "2, 6 rounds, 48 local steps on 360 groups" in "\n".join(render(render_summary(runs.report(state)), width))


def test_a_trainer_alone_has_no_sites_to_show():
    pages = (screen(runs.network()), status(runs.network()), render_summary(runs.report()))
    for page in pages:
        text = "\n".join(render(page, 120, 40))
        assert "contributions" not in text
        assert "sites" not in text


def test_plain_lines_name_the_newest_round():
    lines = plain_lines(runs.many_sites())
    assert all("round 6: 2 of 2 sites, 60 groups" in line for line in lines[1:])


UNJUDGED = MinerRow("a1" * 32, "miner-1", "unknown", 192, 0, {"copied": 12}, 0.0)
ENDLESS = STATES["endless"]
UNPUBLISHED = replace(runs.empty(), window=21, window_elapsed=5.9)
STRATA = (StratumRow("easy", 12, 0.75), StratumRow("", 4, 0.25))


@pytest.mark.parametrize(
    ("state", "texts"),
    [
        (replace(ENDLESS, check_rate=12_431.2), ["12,431 tokens in a second of a validator's time"]),
        (replace(ENDLESS, bottleneck="trainer waits; add miners"), ["trainer waits; add miners"]),
        (replace(ENDLESS, window_seconds=10.0, window_elapsed=3_610.0), ["next is late by 1:00:00"]),
        (replace(ENDLESS, miners=(UNJUDGED,)), ["0 verified  12 rejected  180 not judged"]),
        (
            replace(ENDLESS, head_age=7_300.0, silent=("trainer",)),
            ["renewed 2 h 1 min ago", "silent  trainer", "the run has ended or its trainer has stopped"],
        ),
        (UNPUBLISHED, ["window 21  by the clock, and nothing has been published"]),
        (replace(UNPUBLISHED, versions=ENDLESS.versions), ["next in 0:01"]),
        (
            replace(ENDLESS, windows=(WindowRow(3, 2, 8, 0, 0.5, 0.625, 0.9375, STRATA),), pass_at=4),
            ["pass@4", "0.94", "pass@1 by kind of problem: easy 0.75 (12), other 0.25 (4)"],
        ),
    ],
    ids=["rate", "bottleneck", "late", "unjudged", "ended", "unpublished", "next", "strata"],
)
def test_status_says(state: NetworkState, texts: list[str]):
    shown = " ".join(render(status(state), 100))
    assert not [text for text in texts if text not in shown]
    assert not (state.silent and "next in" in shown)


def test_status_cuts_nothing_at_80_columns():
    reasons = {"wrong-sampling": 7, "wrong-sketch": 8, "duplicate": 9, "copied": 11}
    miner = MinerRow("a1" * 32, "miner-1", "unknown", 192, 0, reasons, 0.0)
    alarm = "head: has expired; nobody renews it, or storage hides the newer head; ask the trainer's operator"
    silent = tuple(f"validator {n:08x}" for n in range(9))
    state = replace(
        runs.network(), windows_planned=None, has_ended=True, head_age=7_300.0, nodes=(), silent=silent, alarms=(alarm,)
    )
    text = "\n".join(render(status(replace(state, miners=(miner,))), 80))
    words = f"{alarm} {' '.join(silent)} {'19.6 KB = 1/82 of 1.6 MB, sparsity'} {' '.join(reasons)}".split()
    assert not [word for word in words if word not in text]
    assert "…" not in text


def test_a_miners_row_says_how_many_groups_nobody_judged():
    other = MinerRow("a2" * 32, "miner-2", "unknown", 192, 188, {}, 0.0)
    state = replace(runs.network(), nodes=(), miners=(UNJUDGED, other))
    for page in (status(state), screen(state)):
        text = "\n".join(render(page, 100))
        assert re.search(r"rejected .*\nminer-1 .* 12; 180 not judged: copied 12 .*\n.* 0; 4 not judged ", text)
    assert "not judged" not in "".join(render(screen(replace(state, miners=(replace(UNJUDGED, submitted=12),))), 100))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STATES)
def test_no_word_of_a_stranger_moves_the_cursor_or_leaves_the_terminal(name: str, width: int):
    state = STATES[name]
    for page in (screen(state), status(state), render_summary(runs.report(state))):
        for line in render(page, width):
            assert line.isprintable()
            assert cell_len(line) <= width


def test_the_summary_says_at_80_columns_why_the_trainer_waited_and_why_nobody_judged():
    waiting, unjudged = runs.report(trainer_data_wait_fraction=0.86), runs.report(runs.empty())
    assert "cores" in " ".join(render(render_summary(waiting), 80))
    assert "No group was judged in time" in " ".join(render(render_summary(unjudged), 80))


def test_the_summary_cuts_no_reason_at_80_columns():
    reasons = {"wrong-sampling": 15, "wrong-sketch": 13, "copied": 9, "wrong-reward": 8}
    miner = MinerRow("a3" * 32, "cheat", "cheating", 720, 0, reasons, 0.0)
    text = "\n".join(render(render_summary(runs.report(replace(runs.network(), miners=(miner,)))), 80))
    assert not [word for word in ("45; 675 not judged", *reasons) if word not in text]
    assert "…" not in text
    assert "+" not in text.partition("rejected")[2]


def plain_lines(*states: NetworkState) -> list[str]:
    """Return the lines that the plain view prints for a sequence of states."""
    file = io.StringIO()
    with PlainView("demo", Console(file=file, width=80)) as view:
        for state in states:
            view.update(state)
    return file.getvalue().splitlines()


def test_plain_view_prints_each_window_once_and_counts_none_beyond_the_plan():
    lines = plain_lines(*(runs.network(windows) for windows in (0, 1, 1, 2, 2, 2, 5, 5, 6)))
    assert len(lines) == 1 + 6
    assert [f"window {n} ({n + 1}/30)" in line for n, line in enumerate(lines[1:])] == [True] * 6
    text = "\n".join(plain_lines(runs.network(windows=5, planned=3)))
    assert "window 2 (3/3)" in text
    assert "window 4 (after the 3 planned)" in text


def test_plain_view_prints_a_window_after_a_later_one_exists():
    file = io.StringIO()
    view = PlainView("demo", Console(file=file, width=80))
    view.update(runs.network(3))
    assert "window 1 (2/30)" in file.getvalue()
    assert "window 2 (3/30)" not in file.getvalue()


def test_plain_lines_are_one_line_of_ascii_each():
    lines = plain_lines(runs.hostile(), runs.hostile())
    assert len(lines) == 1 + 1 + 12
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_plain_view_is_not_flooded_by_alarms():
    state = runs.network(0)
    many = [replace(state, alarms=(f"alarm {n}",)) for n in range(100)]
    assert len(plain_lines(*many)) < 10


def test_without_a_terminal_the_view_is_plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(open_view("demo", Console(file=io.StringIO())), PlainView)


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_live_view_prints_its_last_picture_only_when_it_is_interrupted(is_interrupted: bool):
    file = io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None)
    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext(), LiveView("demo", console) as view:
        view.update(runs.network())
        if is_interrupted:
            raise KeyboardInterrupt
    left_alternate_screen = file.getvalue().rindex("\x1b[?1049l")
    shown = file.getvalue()[left_alternate_screen:]
    assert "window 12 of 30" in shown if is_interrupted else "window" not in shown
