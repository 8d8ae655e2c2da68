"""The supervisor of a node's processes, with real processes that end as they are told."""

import sys
from pathlib import Path

import pytest
import trio

from grailnode.node.supervisor import EXIT_PERMANENT, EXIT_TRANSIENT, ProcessError, ProcessSpec, Supervisor, next_delay


def end(counter: Path, codes: list[int]) -> None:
    """Count a start, and end with the exit code for it; the last one is for all later starts."""
    starts = counter.stat().st_size if counter.exists() else 0
    with counter.open("a") as file:
        file.write(".")
    sys.exit(codes[min(starts, len(codes) - 1)])


async def keep(counter: Path, codes: list[int]) -> list[str]:
    """Keep a process that ends with these codes, and return what the supervisor reports until it gives up."""
    lines: list[str] = []
    with pytest.raises(ProcessError, match=r"^worker "):
        await Supervisor(lines.append).keep([ProcessSpec("worker", end, (counter, codes))])
    return lines


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grailnode.node.supervisor.next_delay", lambda delay, uptime: 0.0)


@pytest.mark.usefixtures("no_delays")
def test_a_node_goes_on_however_often_storage_ends_its_process(tmp_path: Path) -> None:
    lines = trio.run(keep, tmp_path / "starts", [EXIT_TRANSIENT] * 8 + [EXIT_PERMANENT])
    assert len(lines) == 8
    assert "storage or this machine failed" in lines[0]


@pytest.mark.usefixtures("no_delays")
def test_a_node_gives_up_on_a_program_that_fails_six_times_within_a_minute(tmp_path: Path) -> None:
    codes = [1, EXIT_TRANSIENT, 1, 1, 1, 1, 1]
    assert len(trio.run(keep, tmp_path / "starts", codes)) == 6
    assert (tmp_path / "starts").stat().st_size == 7


def test_the_delay_grows_to_half_a_minute_and_begins_anew_after_a_minute_of_work() -> None:
    delay, delays = 0.0, []
    for _ in range(20):
        delay = next_delay(delay, 1.0)
        delays.append(delay)
    assert delays == sorted(delays)
    assert delays[0] < 1 < delays[6] < 5
    assert delays[-1] == 30.0
    assert next_delay(30.0, 61.0) == delays[0]
