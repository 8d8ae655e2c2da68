"""Where every object lies (docs/spec/paths.md). A path is built here or nowhere.

The first part names the only writer: a participant's public key. No path is a prefix-directory of another object's
path.
"""

from typing import Final

from protocol.errors import MalformedError

_WINDOW_DIGITS: Final = 10
_KEY_DIGITS: Final = 64
_CONTENT_ADDRESSED: Final = ("files", "patches", "anchors", "batches")


def _number(value: int) -> str:
    return f"{value:0{_WINDOW_DIGITS}d}"


def run(run_id: bytes) -> str:
    """The signed run manifest."""
    return f"runs/{run_id.hex()}"


def revision(run_id: bytes, number: int) -> str:
    """A signed revision of a run's authority, at the meeting point."""
    return f"revisions/{run_id.hex()}-{_number(number)}"


def revision_copy(writer: bytes, number: int) -> str:
    """The same in the space of a trainer or validator, who copies what it knows."""
    return f"{writer.hex()}/revisions/{_number(number)}"


def participants() -> str:
    """Prefix of the announcements."""
    return "participants/"


def participant(key: bytes) -> str:
    """The signed announcement of one participant."""
    return f"{participants()}{key.hex()}"


def file(writer: bytes, digest: bytes) -> str:
    """A file of the model bundle (config, tokenizer), by its SHA-256."""
    return f"{writer.hex()}/files/{digest.hex()}"


def owned(writer: bytes) -> str:
    """What the paths of a participant's own objects begin with."""
    return f"{writer.hex()}/"


def head(trainer: bytes) -> str:
    """The signed pointer to the newest version: the only object of a trainer that is ever replaced."""
    return f"{trainer.hex()}/head"


def manifests(trainer: bytes) -> str:
    """Prefix of a trainer's manifests."""
    return f"{trainer.hex()}/manifests/"


def manifest(trainer: bytes, version: int, digest: bytes) -> str:
    """The signed manifest of a version."""
    return f"{manifests(trainer)}{_number(version)}-{digest.hex()}"


def patches(trainer: bytes) -> str:
    """Prefix of a trainer's patches."""
    return f"{trainer.hex()}/patches/"


def patch(trainer: bytes, digest: bytes) -> str:
    """A patch, by its SHA-256."""
    return f"{patches(trainer)}{digest.hex()}"


def anchors(trainer: bytes) -> str:
    """Prefix of a trainer's anchor shards."""
    return f"{trainer.hex()}/anchors/"


def anchor(trainer: bytes, digest: bytes) -> str:
    """One shard of an anchor, by its SHA-256."""
    return f"{anchors(trainer)}{digest.hex()}"


def commitment(miner: bytes, window: int) -> str:
    """The signed commitment of a miner for a window."""
    return f"{miner.hex()}/commitments/{_number(window)}"


def batch(miner: bytes, window: int, digest: bytes) -> str:
    """A miner's groups of a window, one frame behind another, by the SHA-256 of the whole."""
    return f"{miner.hex()}/batches/{_number(window)}-{digest.hex()}"


def verdicts(validator: bytes, window: int) -> str:
    """Prefix of a validator's verdicts of a window."""
    return f"{validator.hex()}/verdicts/{_number(window)}-"


def verdict(validator: bytes, window: int, miner: bytes) -> str:
    """A validator's signed verdict on a miner's window."""
    return f"{verdicts(validator, window)}{miner.hex()}"


def seal(validator: bytes, window: int) -> str:
    """A validator's signed promise of the summary that it will reveal."""
    return f"{validator.hex()}/seals/{_number(window)}"


def witness(validator: bytes, window: int) -> str:
    """The others' seals that a validator saw before it revealed."""
    return f"{validator.hex()}/witnesses/{_number(window)}"


def reaudit(validator: bytes, window: int, miner: bytes) -> str:
    """A validator's signed verdict on the groups of an earlier window that it had not audited."""
    return f"{validator.hex()}/lookbacks/{_number(window)}-{miner.hex()}"


def report(trainer: bytes, window: int) -> str:
    """A trainer's signed report on the validators of a window; none where there is nothing to say."""
    return f"{trainer.hex()}/reports/{_number(window)}"


def summary(validator: bytes, window: int) -> str:
    """A validator's signed summary of a window: scores, evaluation, alarms."""
    return f"{validator.hex()}/summaries/{_number(window)}"


def windowed(writer: bytes, kind: str) -> str:
    """Prefix of a writer's objects of one kind that are ordered by window, such as 'commitments' or 'summaries'."""
    return f"{writer.hex()}/{kind}/"


def content_digest_in(path: str) -> bytes | None:
    """The SHA-256 of the only object that can lie at a path; None where the path does not say.

    Manifests are named by the digest of their body, not of the signed bytes, and so say nothing here.
    """
    parts = path.split("/")
    if len(parts) != 3 or parts[1] not in _CONTENT_ADDRESSED:
        return None
    digits = parts[2][-_KEY_DIGITS:]
    wanted = _WINDOW_DIGITS + 1 + _KEY_DIGITS if parts[1] == "batches" else _KEY_DIGITS
    if len(parts[2]) != wanted:
        return None
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if digest.hex() == digits else None


def window_of(path: str) -> int:
    """The window in the last part of a windowed path.

    Raises:
        MalformedError: no window there.
    """
    digits = path.rsplit("/", 1)[-1][:_WINDOW_DIGITS]
    if len(digits) != _WINDOW_DIGITS or not (digits.isascii() and digits.isdigit()):
        raise MalformedError("no window in the path", path[:200])
    return int(digits)


def writer(path: str) -> bytes:
    """Return the public key of the only participant that may write a path.

    Raises:
        MalformedError: the path is not below a key, and is no announcement.
    """
    if path.startswith(participants()):
        return key_at_end(path)
    return key_at_end(path.partition("/")[0])


def key_at_end(path: str) -> bytes:
    """The public key that a path ends with.

    Raises:
        MalformedError: it ends with no key.
    """
    try:
        key = bytes.fromhex(path[-_KEY_DIGITS:])
    except ValueError:
        key = b""
    if len(key) != _KEY_DIGITS // 2 or path[-_KEY_DIGITS:] != key.hex():
        raise MalformedError("no public key at the end of the path", path[:200])
    return key
