"""The terminal view fits any terminal, says what it should, and lets no stranger's word act on it."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from grailnode.observe.state import NetworkState
from grailnode.ui.terminal import LiveView, PlainView, open_view, render_status, render_summary
from grailnode.ui.terminal.glyphs import AsciiFallback
from grailnode.ui.terminal.screen import Screen
from tests.view import runs

STATES = {
    "usual": runs.network(),
    "empty": runs.empty(),
    "hostile": runs.hostile(),
    "endless": runs.network(planned=None),
    "crowded": runs.network(windows=400, strangers=60),
    "overdue": runs.network(windows=40),
}
WIDTHS = (20, 34, 46, 60, 80, 99, 100, 120, 200)


def drawn(what: RenderableType, width: int, height: int = 24, encoding: str = "utf-8") -> list[str]:
    """The lines of a renderable on a terminal without colour."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=file, width=width, height=height, color_system=None, force_terminal=True)
    console.print(what)
    file.seek(0)
    return file.read().split("\n")[:-1]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STATES)
def test_screen_never_exceeds_the_terminal(name: str, width: int):
    for height in (8, 24, 40, 60):
        lines = drawn(Screen("demo", STATES[name]), width, height)
        assert max(cell_len(line) for line in lines) <= width
        if height >= 24:
            assert len(lines) <= height


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", STATES)
def test_pages_never_exceed_the_terminal(name: str, width: int):
    state = STATES[name]
    for page in (render_status(state), render_summary(runs.report(state))):
        assert max(cell_len(line) for line in drawn(page, width)) <= width


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_screen_shows_what_matters(width: int, height: int):
    text = "\n".join(drawn(Screen("demo", runs.network()), width, height))
    for words in (
        "window 12 of 30",
        "1:45 left",
        "3f9a2c71",
        "0.43 → 0.54  +0.11",
        "0.40 → 0.51  +0.11",
        "19.6 KB = 1/82 of 1.6 MB",
        "96 verified",
        "24 rejected",
        "duplicate 12, sampling 12",
        "cheating",
        "checking group 5 of 10",
    ):
        assert words in text


def test_alarms_are_seen_on_the_smallest_screen():
    assert any("ALARM" in line for line in drawn(Screen("demo", runs.hostile()), 20, 8))


def test_crowd_is_counted_when_it_does_not_fit():
    text = "\n".join(drawn(Screen("demo", STATES["crowded"]), 80, 24))
    assert "more miners" in text
    assert "miner-1" in text
    assert "validator" in text


@pytest.mark.parametrize("name", STATES)
def test_no_word_of_a_stranger_moves_the_cursor(name: str):
    state = STATES[name]
    for page in (Screen("demo", state), render_status(state), render_summary(runs.report(state))):
        assert all(line.isprintable() for line in drawn(page, 80))


def test_consoles_without_unicode_get_ascii_of_the_same_shape():
    for page in (Screen("demo", runs.hostile()), render_summary(runs.report())):
        plain, full = drawn(AsciiFallback(page), 100, 40, "ascii"), drawn(AsciiFallback(page), 100, 40)
        assert [cell_len(line) for line in plain] == [cell_len(line) for line in full]


def printed(*states: NetworkState) -> list[str]:
    """What the plain view prints for states that come one after the other."""
    file = io.StringIO()
    with PlainView("demo", Console(file=file, width=80)) as view:
        for state in states:
            view.update(state)
    return file.getvalue().splitlines()


def test_plain_view_prints_each_window_once():
    lines = printed(*(runs.network(windows) for windows in (0, 1, 1, 2, 2, 2, 5, 5, 6)))
    assert len(lines) == 1 + 6
    assert [f"window {n}/30" in line for n, line in enumerate(lines[1:])] == [True] * 6


def test_plain_view_waits_until_a_window_is_settled():
    file = io.StringIO()
    view = PlainView("demo", Console(file=file, width=80))
    view.update(runs.network(3))
    assert "window 1/30" in file.getvalue()
    assert "window 2/30" not in file.getvalue()


def test_plain_lines_are_one_line_of_ascii_each():
    lines = printed(runs.hostile(), runs.hostile())
    assert len(lines) == 1 + 1 + 12
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_plain_view_is_not_flooded_by_alarms():
    state = runs.network(0)
    many = [state.__class__(**{**vars(state), "alarms": (f"alarm {n}",)}) for n in range(100)]
    assert len(printed(*many)) < 10


def test_without_a_terminal_the_view_is_plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(open_view("demo", Console(file=io.StringIO())), PlainView)


def test_live_view_keeps_its_last_picture_when_it_is_interrupted():
    file = io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None)
    with pytest.raises(KeyboardInterrupt), LiveView("demo", console) as view:
        view.update(runs.network())
        raise KeyboardInterrupt
    left_alternate_screen = file.getvalue().rindex("\x1b[?1049l")
    assert "window 12 of 30" in file.getvalue()[left_alternate_screen:]


def test_live_view_leaves_nothing_behind_when_it_ends_well():
    file = io.StringIO()
    console = Console(file=file, width=80, height=24, force_terminal=True, color_system=None)
    with LiveView("demo", console) as view:
        view.update(runs.network())
    left_alternate_screen = file.getvalue().rindex("\x1b[?1049l")
    assert "window" not in file.getvalue()[left_alternate_screen:]
