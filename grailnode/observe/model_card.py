"""The README of an exported policy: where the weights come from, and how training went."""

from collections.abc import Sequence

from grailnode.observe.state import WindowRow
from protocol.run import RunManifest

_MARKUP = "\\`*_{}[]<>|#!\r\n"


def model_card(
    run_id: bytes, run: RunManifest, version: int, digest: bytes, windows: Sequence[WindowRow], *, merged: bool = False
) -> str:
    """Return the text of the card in Markdown, with what validators measured, oldest first."""
    sampling = run.sampling
    filters = f"top-k {sampling.top_k}, top-p {sampling.top_p:g}, min-p {sampling.min_p:g}"
    rows = [
        ("run", f"`{run_id.hex()}`"),
        ("version", str(version)),
        ("weights, BLAKE3", f"`{digest.hex()}`"),
        ("weights of version 0", f"`{run.model.genesis.hex()}`"),
        ("task", _plain(run.task_name)),
        ("rollouts", f"groups of {run.group_size}, up to {sampling.max_tokens} tokens"),
        ("sampling", f"temperature {sampling.temperature:g}, {filters}"),
    ]
    if run.lora is not None:
        targets = ", ".join(f"`{target}`" for target in run.lora.targets)
        rows += [
            ("base, BLAKE3", f"`{run.lora.base.hex()}`"),
            ("adapters", f"rank {run.lora.rank}, alpha {run.lora.alpha:g}, on {targets}"),
        ]
    if run.precision != "bf16":
        rows.append(("precision", f"{run.precision}, written as BF16"))
    files = [(_plain(file.name), f"`{file.digest.hex()}`") for file in run.model.files]
    return "\n".join(
        [
            "---",
            f"library_name: {'transformers' if run.lora is None or merged else 'peft'}",
            "tags:",
            "- grailnode",
            "- reinforcement-learning",
            "---",
            "",
            f"# {_plain(run.name)}, version {version}",
            "",
            *_description(run, merged=merged),
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


def _description(run: RunManifest, *, merged: bool) -> list[str]:
    if run.precision != "bf16":
        return [
            "The weights of one version of a decentralized run of reinforcement learning, whose matrices are",
            f"{run.precision} codes with a scale for each row. These files have the values of the codes in BF16, which",
            "represents them exactly: it is the policy that was trained and checked. The digest below is of codes and",
            "scales; `grailnode verify --run URL` follows the run's chain to them.",
        ]
    if run.lora is None:
        return [
            "The weights of one version of a decentralized run of reinforcement learning, in BF16, bit for bit as",
            "they were published. Check them with `grailnode verify --run URL`, which follows the run's chain to them.",
        ]
    if merged:
        return [
            "One version of a decentralized run of reinforcement learning: the base with the version's adapters added,",
            "and rounded to BF16. That rounding makes it a slightly different model from the one that was trained and",
            "checked, which computes base and adapters apart.",
        ]
    return [
        "The adapters of one version of a decentralized run of reinforcement learning, in BF16, bit for bit as they",
        "were published. They are for the base whose weights have the digest below; PEFT loads them:",
        "`PeftModel.from_pretrained(base, DIRECTORY, autocast_adapter_dtype=False)`.",
    ]


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
