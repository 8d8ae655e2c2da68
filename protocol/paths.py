"""The path of every object in storage (docs/spec/paths.md). No other module builds a path.

The first part of a path names its only writer: a participant's public key. No object's path is a directory that
contains another object.
"""

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


def revision_copy(writer: bytes, number: int) -> str:
    """Return the path of a revision's copy in the space of a trainer or validator."""
    return f"{writer.hex()}/revisions/{_number(number)}"


def participants() -> str:
    """Return the prefix of the paths of the announcements."""
    return "participants/"


def participant(key: bytes) -> str:
    """Return the path of the signed announcement of one participant."""
    return f"{participants()}{key.hex()}"


def file(writer: bytes, digest: bytes) -> str:
    """Return the path of a file of the model (config, tokenizer), named by its SHA-256."""
    return f"{writer.hex()}/files/{digest.hex()}"


def writer_prefix(writer: bytes) -> str:
    """Return the prefix of the paths of all objects that a participant writes."""
    return f"{writer.hex()}/"


def head(trainer: bytes) -> str:
    """Return the path of the signed pointer to the newest version, the only object that a trainer ever replaces."""
    return f"{trainer.hex()}/head"


def manifests(trainer: bytes) -> str:
    """Return the prefix of the paths of a trainer's manifests."""
    return f"{trainer.hex()}/manifests/"


def manifest(trainer: bytes, version: int, digest: bytes) -> str:
    """Return the path of the signed manifest of a version."""
    return f"{manifests(trainer)}{_number(version)}-{digest.hex()}"


def patches(trainer: bytes) -> str:
    """Return the prefix of the paths of a trainer's patches."""
    return f"{trainer.hex()}/patches/"


def patch(trainer: bytes, digest: bytes) -> str:
    """Return the path of a patch, named by its SHA-256."""
    return f"{patches(trainer)}{digest.hex()}"


def anchors(trainer: bytes) -> str:
    """Return the prefix of the paths of a trainer's anchor shards."""
    return f"{trainer.hex()}/anchors/"


def anchor(trainer: bytes, digest: bytes) -> str:
    """Return the path of one shard of an anchor, named by its SHA-256."""
    return f"{anchors(trainer)}{digest.hex()}"


def rounds(trainer: bytes) -> str:
    """Return the prefix of the paths of a trainer's round manifests."""
    return f"{trainer.hex()}/rounds/"


def round_manifest(trainer: bytes, number: int) -> str:
    """Return the path of the signed manifest that closes an outer round."""
    return f"{rounds(trainer)}{_number(number)}"


def newest_round(trainer: bytes) -> str:
    """Return the path of the signed pointer to the newest round manifest, which the trainer replaces."""
    return f"{trainer.hex()}/newest-round"


def states(trainer: bytes) -> str:
    """Return the prefix of the paths of the shards of a trainer's outer states."""
    return f"{trainer.hex()}/states/"


def state_shard(trainer: bytes, digest: bytes) -> str:
    """Return the path of one shard of an outer state, named by its SHA-256."""
    return f"{states(trainer)}{digest.hex()}"


def contributions(worker: bytes) -> str:
    """Return the prefix of the paths of a worker's contributions."""
    return f"{worker.hex()}/contributions/"


def contribution(worker: bytes, number: int) -> str:
    """Return the path of a worker's signed contribution to an outer round."""
    return f"{contributions(worker)}{_number(number)}"


def payloads(writer: bytes) -> str:
    """Return the prefix of the paths of the payloads of contributions that a worker or a trainer stores."""
    return f"{writer.hex()}/payloads/"


def payload(writer: bytes, digest: bytes) -> str:
    """Return the path of the payload of a contribution, named by its SHA-256."""
    return f"{payloads(writer)}{digest.hex()}"


def commitment(miner: bytes, window: int) -> str:
    """Return the path of the signed commitment of a miner for a window."""
    return f"{miner.hex()}/commitments/{_number(window)}"


def batch(miner: bytes, window: int, digest: bytes) -> str:
    """Return the path of a miner's batch of a window (its groups' frames in order), named by the batch's SHA-256."""
    return f"{miner.hex()}/batches/{_number(window)}-{digest.hex()}"


def verdicts(validator: bytes, window: int) -> str:
    """Return the prefix of the paths of a validator's verdicts of a window."""
    return f"{validator.hex()}/verdicts/{_number(window)}-"


def verdict(validator: bytes, window: int, miner: bytes) -> str:
    """Return the path of a validator's signed verdict on a miner's window."""
    return f"{verdicts(validator, window)}{miner.hex()}"


def seal(validator: bytes, window: int) -> str:
    """Return the path of a validator's seal: its signed promise of the summary that it will reveal."""
    return f"{validator.hex()}/seals/{_number(window)}"


def witness(validator: bytes, window: int) -> str:
    """Return the path of a validator's witness: the others' seals that it saw before it revealed its summary."""
    return f"{validator.hex()}/witnesses/{_number(window)}"


def reaudit(validator: bytes, window: int, miner: bytes) -> str:
    """Return the path of a re-audit: a validator's signed verdict on those groups of an earlier window that it had not
    audited then.
    """
    return f"{validator.hex()}/reaudits/{_number(window)}-{miner.hex()}"


def report(trainer: bytes, window: int) -> str:
    """Return the path of a trainer's signed report on the validators of a window; the trainer writes none when it has
    nothing to report.
    """
    return f"{trainer.hex()}/reports/{_number(window)}"


def summary(validator: bytes, window: int) -> str:
    """Return the path of a validator's signed summary of a window: scores, evaluation, alarms."""
    return f"{validator.hex()}/summaries/{_number(window)}"


def probe(writer: bytes, name: str) -> str:
    """Return the path of an object that a node writes, reads and deletes at its start, to see that it can.

    Args:
        name: hexadecimal digits, new at each start, so that no cache knows the object.
    """
    return f"{writer.hex()}/probes/{name}"


def kind_prefix(writer: bytes, kind: str) -> str:
    """Return the prefix of the paths of a writer's objects of one kind ('commitments', 'summaries', ...)."""
    return f"{writer.hex()}/{kind}/"


def content_digest_in(path: str) -> bytes | None:
    """Return the SHA-256 of the only object that can lie at a path, or None if the path does not name a digest.

    A manifest's path names the digest of its body, not of the signed bytes, so the result is None for it.
    """
    parts = path.split("/")
    if len(parts) != 3 or parts[1] not in _CONTENT_ADDRESSED:
        return None
    digits = parts[2][-_KEY_DIGITS:]
    name_length = _WINDOW_DIGITS + 1 + _KEY_DIGITS if parts[1] == "batches" else _KEY_DIGITS
    if len(parts[2]) != name_length:
        return None
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if digest.hex() == digits else None


def window_of(path: str) -> int:
    """Return the window number with which the last part of a path begins.

    Raises:
        MalformedError: the last part does not begin with a window number.
    """
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
    """Return the public key that a path ends with.

    Raises:
        MalformedError: the path does not end with a key.
    """
    try:
        key = bytes.fromhex(path[-_KEY_DIGITS:])
    except ValueError:
        key = b""
    if len(key) != _KEY_DIGITS // 2 or path[-_KEY_DIGITS:] != key.hex():
        raise MalformedError("no public key at the end of the path", path[:200])
    return key
