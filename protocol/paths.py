"""The path of every object in storage (docs/spec/paths.md). No other module builds a path.

The first part of a path names its only writer: a participant's public key. No object's path is a directory that
contains another object. Below a writer, a path is one of these, and the table in this module says which:

    {name}                      one object, which its writer replaces
    {folder}/{digest}           named by the SHA-256 of its bytes
    {folder}/{number}           of a window, an outer round or a revision: ten digits, so that paths sort by number
    {folder}/{number}-{digest}  of a number, and named by a SHA-256
    {folder}/{number}-{key}     of a number, about the participant with this public key
"""

from dataclasses import dataclass
from typing import Final

from protocol.errors import MalformedError

_NUMBER_DIGITS: Final = 10
_NAME_DIGITS: Final = 64  # of a digest or a public key


def _number(value: int) -> str:
    return f"{value:0{_NUMBER_DIGITS}d}"


@dataclass(frozen=True)
class Folder:
    """The objects of one kind that a writer has."""

    name: str

    def prefix(self, writer: bytes) -> str:
        """Return the prefix of their paths."""
        return f"{writer.hex()}/{self.name}/"


class ByDigest(Folder):
    """Objects that are named by the SHA-256 of their bytes."""

    def __call__(self, writer: bytes, digest: bytes) -> str:
        """Return the path of an object."""
        return f"{self.prefix(writer)}{digest.hex()}"


class ByNumber(Folder):
    """Objects of which there is one for a window, an outer round or a revision."""

    def __call__(self, writer: bytes, number: int) -> str:
        """Return the path of the object of a number."""
        return f"{self.prefix(writer)}{_number(number)}"


class ByNumberAndName(Folder):
    """Objects of a window or a version that also have a digest or a key in their names."""

    def prefix_of(self, writer: bytes, number: int) -> str:
        """Return the prefix of the paths of the objects of a number."""
        return f"{self.prefix(writer)}{_number(number)}-"

    def __call__(self, writer: bytes, number: int, name: bytes) -> str:
        """Return the path of an object by its number and its digest or key."""
        return f"{self.prefix_of(writer, number)}{name.hex()}"


# Of trainers
file = ByDigest("files")  # of the model (config, tokenizer) or the data
manifest = ByNumberAndName("manifests")  # of a version, signed; the digest is that of its body
patch = ByDigest("patches")
anchor = ByDigest("anchors")  # one shard of an anchor
round_manifest = ByNumber("rounds")  # closes an outer round, signed
state_shard = ByDigest("states")  # one shard of an outer state
report = ByNumber("reports")  # on the validators of a window, signed; none where there is nothing to report
# Of workers; a trainer keeps copies of the payloads
contribution = ByNumber("contributions")  # to an outer round, signed
payload = ByDigest("payloads")  # of a contribution
# Of miners
commitment = ByNumber("commitments")  # for a window, signed
batch = ByNumberAndName("batches")  # of a window: its groups' frames in order; the digest is that of the batch
# Of validators, all signed
verdict = ByNumberAndName("verdicts")  # on a miner's window
reaudit = ByNumberAndName("reaudits")  # a verdict on those groups of an earlier window that were not audited then
seal = ByNumber("seals")  # the promise of the summary that will be revealed
witness = ByNumber("witnesses")  # the others' seals that were seen before the own summary was revealed
summary = ByNumber("summaries")  # of a window: scores, evaluation, alarms
# Of trainers and validators
revision_copy = ByNumber("revisions")  # of the run's authority

_CONTENT_ADDRESSED: Final = {kind.name for kind in (file, patch, anchor, state_shard, payload, batch)}

manifests, patches, anchors = manifest.prefix, patch.prefix, anchor.prefix
rounds, states, contributions, payloads = round_manifest.prefix, state_shard.prefix, contribution.prefix, payload.prefix
verdicts = verdict.prefix_of


def head(trainer: bytes) -> str:
    """Return the path of the signed pointer to the newest version, which the trainer replaces."""
    return f"{trainer.hex()}/head"


def newest_round(trainer: bytes) -> str:
    """Return the path of the signed pointer to the newest round manifest, which the trainer replaces."""
    return f"{trainer.hex()}/newest-round"


def probe(writer: bytes, name: str) -> str:
    """Return the path of an object that a node writes, reads and deletes at its start, to see that it can.

    Args:
        name: hexadecimal digits, new at each start, so that no cache knows the object.
    """
    return f"{writer.hex()}/probes/{name}"


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
    return Folder(kind).prefix(writer)


def content_digest_in(path: str) -> bytes | None:
    """Return the SHA-256 of the only object that can lie at a path, or None if the path does not name a digest.

    A manifest's path names the digest of its body, not of the signed bytes, so the result is None for it.
    """
    parts = path.split("/")
    if len(parts) != 3 or parts[1] not in _CONTENT_ADDRESSED:
        return None
    digits = parts[2][-_NAME_DIGITS:]
    name_length = _NUMBER_DIGITS + 1 + _NAME_DIGITS if parts[1] == batch.name else _NAME_DIGITS
    if len(parts[2]) != name_length:
        return None
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return None
    return digest if digest.hex() == digits else None


def window_of(path: str) -> int:
    """Return the window number with which the last part of a path begins, or raise MalformedError."""
    digits = path.rsplit("/", 1)[-1][:_NUMBER_DIGITS]
    if len(digits) != _NUMBER_DIGITS or not (digits.isascii() and digits.isdigit()):
        raise MalformedError("no window in the path", path[:200])
    return int(digits)


def writer(path: str) -> bytes:
    """Return the public key of the only participant that may write to a path."""
    return key_at_end(path if path.startswith(participants()) else path.partition("/")[0])


def key_at_end(path: str) -> bytes:
    """Return the public key that a path ends with, or raise MalformedError."""
    try:
        key = bytes.fromhex(path[-_NAME_DIGITS:])
    except ValueError:
        key = b""
    if len(key) != _NAME_DIGITS // 2 or path[-_NAME_DIGITS:] != key.hex():
        raise MalformedError("no public key at the end of the path", path[:200])
    return key
