"""Invented runs as a dashboard reads them, of any size, with a stranger's words wherever strangers have a word."""

from collections.abc import Sequence

from grailnode.cli.actions.run_dashboard import View
from grailnode.observe.rollout_reader import PublishedRollout
from grailnode.observe.state import (
    HeadRow,
    JudgedWindow,
    MinerRow,
    NetworkState,
    RoundRow,
    SiteRow,
    StageRow,
    StratumRow,
    ValidatorRow,
    VersionRow,
    WindowRow,
)

NOW = 1_790_000_000.0
TOTAL = 806_400
REASONS = ("wrong-sampling", "wrong-sketch", "copied")


def observed_run(windows: int = 60, miners: int = 6, words: Sequence[str] = ()) -> View:
    """Return a run after some windows.

    Args:
        words: texts of strangers, each put in all places; a run has as many miners, strata, sites, rollouts and alarms.
    """
    rows = [_window(window, words) for window in range(windows)]
    keys = [f"{1000 + number:064x}" for number in range(max(miners, len(words)))]
    recent = tuple(JudgedWindow(row.window, 4, row.window % 3 // 2) for row in rows[-40:])
    state = NetworkState(
        run_id="3f9a2c71" * 8,
        run_name=words[0] if words else "arithmetic",
        seconds=6.0 * windows,
        window=windows + 1,
        windows_planned=None,
        window_seconds=6.0,
        window_elapsed=2.5,
        full_bytes=2 * TOTAL,
        versions=tuple(
            VersionRow(v, 4 * v, v + 1, 19_200 + v % 997 if v else None, None if v else 2 * TOTAL, 22_000 + v, TOTAL)
            for v in range(max(0, windows - 4000), windows)
        ),
        windows=tuple(rows),
        miners=tuple(_miner(number, key, windows, words) for number, key in enumerate(keys)),
        rounds=(RoundRow(1, 1, 1, 1, 2, 4, 30, 51_200),) if words else (),
        sites=tuple(SiteRow(key, word, 3, {word: 2}, 4, 5, 6) for key, word in zip(keys, words, strict=False)),
        alarms=tuple(words),
        bottleneck=words[0] if words else "",
        troubles=tuple(words),
        unjudged=tuple(words),
        pass_at=4,
        recent=dict.fromkeys(keys, recent),
        validators=tuple(
            ValidatorRow(key, words[-1] if words else f"validator-{n}", windows, 900, 60, 4200.0, recent)
            for n, key in enumerate(keys[:4])
        ),
        stages=(
            StageRow(windows + 1, "miners generate", NOW + 3, 0),
            StageRow(windows, "validators judge", NOW + 9, 2),
        ),
        head=HeadRow(windows, NOW - 42, NOW - 5, NOW + 600, 1, 0, 0, 1, (0,), "5d" * 32),
        read_at=NOW - 1,
    )
    return View(state, tuple(_rollouts(keys, windows - 1, words)))


def _window(window: int, words: Sequence[str]) -> WindowRow:
    share = min(0.43 + 0.5 * window / (window + 400), 0.97)
    names = words or ("easy", "hard")
    strata = tuple(StratumRow(name, 128, share, min(1.0, share + 0.1)) for name in names) if window % 3 == 0 else ()
    reward = share - 0.1 + 0.02 * (window % 7)
    if not strata:
        return WindowRow(window, window, 8, 2, reward, None)
    return WindowRow(window, window, 8, 2, reward, share, min(1.0, share + 0.1), strata)


def _miner(number: int, key: str, windows: int, words: Sequence[str]) -> MinerRow:
    word = words[number % len(words)] if words else ""
    rejected = {word or REASONS[number % 3]: number % 5}
    return MinerRow(key, word or f"miner-{number}", "unknown", 5 * windows, 4 * windows, rejected, 0.9 / (number + 2))


def _rollouts(keys: Sequence[str], window: int, words: Sequence[str]) -> list[PublishedRollout]:
    rollouts = []
    for number, key in enumerate(keys):
        word = words[number % len(words)] if words else f"17+{number}="
        reasons = () if number % 4 else (words[number % len(words)] if words else REASONS[number // 4 % 3],)
        turns = ("policy", f"guess {word}"), ("environment", f"no\n{word}"), ("policy", word)
        judged = number % 5 != 1
        rollouts.append(
            PublishedRollout(
                *(
                    bytes.fromhex(key),
                    window,
                    number,
                    0,
                    window,
                    f"Solve {word}",
                    "".join(text for _, text in turns),
                    12,
                ),
                *(number % 11 / 10, reasons, int(judged and not reasons), int(judged or bool(reasons)), turns),
                *((9, word) if judged and not reasons else ()),
            )
        )
    return rollouts
