"""The path of every object in storage (docs/spec/paths.md). No other module builds a path.

The first part of a path names its only writer: a participant's public key. No object's path is a directory that
contains another object.
"""

from collections.abc import Callable
from typing import Final

from protocol.errors import MalformedError

_WINDOW_DIGITS: Final = 10
_KEY_DIGITS: Final = 64
_CONTENT_ADDRESSED: Final = ("files", "patches", "anchors", "states", "payloads", "batches")


def _number(value: int) -> str:
    return f"{value:0{_WINDOW_DIGITS}d}"


def run(run_id: bytes) -> str:
    """Return the path of the signed run manifest."""
    return f"runs/{run_id.hex()}"


def revision(run_id: bytes, number: int) -> str:
    """Return the path of a signed revision of a run's authority, at the meeting point."""
    return f"revisions/{run_id.hex()}-{_number(number)}"


def participants() -> str:
    """Return the prefix of the paths of the announcements."""
    return "participants/"


def participant(key: bytes) -> str:
    """Return the path of the signed announcement of one participant."""
    return f"{participants()}{key.hex()}"


def writer_prefix(writer: bytes) -> str:
    """Return the prefix of the paths of all objects that a participant writes."""
    return f"{writer.hex()}/"


def kind_prefix(writer: bytes, kind: str) -> str:
    """Return the prefix of the paths of a writer's objects of one kind ('commitments', 'summaries', ...)."""
    return f"{writer.hex()}/{kind}/"


def head(trainer: bytes) -> str:
    """Return the path of the signed pointer to the newest version, which the trainer replaces."""
    return f"{trainer.hex()}/head"


def newest_round(trainer: bytes) -> str:
    """Return the path of the signed pointer to the newest round manifest, which the trainer replaces."""
    return f"{trainer.hex()}/newest-round"


def verdicts(validator: bytes, window: int) -> str:
    """Return the prefix of the paths of a validator's verdicts of a window."""
    return f"{kind_prefix(validator, 'verdicts')}{_number(window)}-"


def probe(writer: bytes, name: str) -> str:
    """Return the path of a probe, new at each start, that a node writes, reads and deletes to see that it can."""
    return f"{kind_prefix(writer, 'probes')}{name}"


def _by_digest(kind: str) -> Callable[[bytes, bytes], str]:
    return lambda writer, digest: f"{kind_prefix(writer, kind)}{digest.hex()}"


def _by_number(kind: str) -> Callable[[bytes, int], str]:
    return lambda writer, number: f"{kind_prefix(writer, kind)}{_number(number)}"


def _by_number_and_name(kind: str) -> Callable[[bytes, int, bytes], str]:
    return lambda writer, number, name: f"{kind_prefix(writer, kind)}{_number(number)}-{name.hex()}"


# Objects that are named by their SHA-256, and stored as they are: the path of (writer, digest).
file: Final = _by_digest("files")  # a file of the model (config, tokenizer) or of its base, or the file of problems
patch: Final = _by_digest("patches")  # a part of a patch
anchor: Final = _by_digest("anchors")  # a shard of an anchor
state_shard: Final = _by_digest("states")  # a shard of an outer state

# Signed objects: the path of (writer, window), or of (writer, number).
revision_copy: Final = _by_number("revisions")  # a revision of the authority, in the space of a trainer or validator
round_manifest: Final = _by_number("rounds")  # closes an outer round
round_plan: Final = _by_number("plans")  # a trainer's, which says who computes what when a round closes
contribution: Final = _by_number("contributions")  # a worker's, to an outer round
commitment: Final = _by_number("commitments")  # a miner's, to its batch of a window
seal: Final = _by_number("seals")  # a validator's promise of the summary that it will reveal
witness: Final = _by_number("witnesses")  # the others' seals that a validator saw before it revealed its summary
summary: Final = _by_number("summaries")  # a validator's, of a window: scores, evaluation, alarms
report: Final = _by_number("reports")  # a trainer's, on the validators of a window; none if it has nothing to report

# The path of (writer, number, digest or key).
payload: Final = _by_number_and_name("payloads")  # a file of a contribution's payload to a round, by its SHA-256: plain
manifest: Final = _by_number_and_name("manifests")  # a signed manifest of a version, by the SHA-256 of its body
batch: Final = _by_number_and_name("batches")  # a miner's groups of a window, their frames in order, by the SHA-256
verdict: Final = _by_number_and_name("verdicts")  # a validator's signed verdict on a miner's window
products: Final = _by_number_and_name("products")  # a worker's, of a share of a plan, or of products that it repeats
reaudit: Final = _by_number_and_name("reaudits")  # a verdict on groups of an earlier window, not audited then


def content_digest_in(path: str) -> bytes | None:
    """Return the SHA-256 of the only object that can lie at a path; None if the path does not name a digest, or, as a
    manifest's, that of its body and not of the signed bytes.
    """
    parts = path.split("/")
    if len(parts) != 3 or parts[1] not in _CONTENT_ADDRESSED:
        return None
    digits = parts[2][-_KEY_DIGITS:]
    name_length = _WINDOW_DIGITS + 1 + _KEY_DIGITS if parts[1] in ("batches", "payloads") else _KEY_DIGITS
    if len(parts[2]) != name_length:
        return None
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if digest.hex() == digits else None


def window_of(path: str) -> int:
    """Return the window number with which the last part of a path begins; MalformedError if with none."""
    digits = path.rsplit("/", 1)[-1][:_WINDOW_DIGITS]
    if len(digits) != _WINDOW_DIGITS or not (digits.isascii() and digits.isdigit()):
        raise MalformedError("no window in the path", path[:200])
    return int(digits)


def writer(path: str) -> bytes:
    """Return the public key of the only participant that may write to a path."""
    if path.startswith(participants()):
        return key_at_end(path)
    return key_at_end(path.partition("/")[0])


def key_at_end(path: str) -> bytes:
    """Return the public key that a path ends with; MalformedError if with none."""
    try:
        key = bytes.fromhex(path[-_KEY_DIGITS:])
    except ValueError:
        key = b""
    if len(key) != _KEY_DIGITS // 2 or path[-_KEY_DIGITS:] != key.hex():
        raise MalformedError("no public key at the end of the path", path[:200])
    return key
