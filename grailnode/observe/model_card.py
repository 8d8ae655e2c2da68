"""The README of an exported policy: where the weights come from, and how training went."""

from collections.abc import Sequence

from grailnode.observe.state import WindowRow
from protocol.run import RunManifest

_MARKUP = "\\`*_{}[]<>|#!\r\n"


def model_card(run_id: bytes, run: RunManifest, version: int, digest: bytes, windows: Sequence[WindowRow]) -> str:
    """Return the text of the card in Markdown.

    Args:
        digest: of the weights, as the version's manifest has it.
        windows: what validators measured, oldest first; empty where nothing is at hand.
    """
    sampling = run.sampling
    filters = f"top-k {sampling.top_k}, top-p {sampling.top_p:g}, min-p {sampling.min_p:g}"
    rows = [
        ("run", f"`{run_id.hex()}`"),
        ("version", str(version)),
        ("weights, BLAKE3", f"`{digest.hex()}`"),
        ("weights of version 0", f"`{run.model.genesis.hex()}`"),
        ("task", _plain(run.environment)),
        ("rollouts", f"groups of {run.group_size}, up to {sampling.max_tokens} tokens"),
        ("sampling", f"temperature {sampling.temperature:g}, {filters}"),
    ]
    files = [(_plain(file.name), f"`{file.digest.hex()}`") for file in run.model.files]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "tags:",
            "- grailnode",
            "- reinforcement-learning",
            "---",
            "",
            f"# {_plain(run.name)}, version {version}",
            "",
            "The weights of one version of a decentralized run of reinforcement learning, in BF16, bit for bit as",
            "they were published. Check them with `grailnode verify --run URL`, which follows the run's chain to them.",
            "",
            *_table(("", ""), rows),
            "",
            "Files beside the weights, as the run's manifest names them (SHA-256):",
            "",
            *_table(("file", "digest"), files),
            "",
            *_curve(windows),
        ]
    )


def _curve(windows: Sequence[WindowRow]) -> list[str]:
    if not windows:
        return ["No window's results were at hand when these files were written.", ""]
    rows = [
        (
            str(row.window),
            str(row.version),
            "" if row.reward is None else f"{row.reward:.3f}",
            "" if row.pass_at_1 is None else f"{row.pass_at_1:.3f}",
        )
        for row in windows
    ]
    return [
        "What the validators measured in the last windows:",
        "",
        *_table(("window", "version", "mean reward", "held-out pass@1"), rows),
        "",
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _plain(text: str) -> str:
    """Return a text without characters that Markdown gives a meaning."""
    return "".join(char if char.isprintable() and char not in _MARKUP else " " for char in text).strip()
