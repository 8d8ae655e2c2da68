"""`grailnode init --bucket`: run.toml for a bucket of one's own, and the documents that the bucket needs."""

from dataclasses import dataclass
from pathlib import Path

from grailnode.run import joining, key_files
from grailnode.run.buckets import Bucket, BucketError, BucketUse, Document, documents
from grailnode.run.files import NewFiles
from grailnode.run.key_files import SUFFIX
from protocol.identity.signing import SigningKey

DOCUMENTS = "bucket"
"""The folder beside run.toml that holds them."""


@dataclass(frozen=True)
class Membership:
    """What a newcomer gives: the URL of the run's manifest, the name of the node, and where participants meet."""

    manifest: str
    name: str
    meeting: Bucket


def store_section(bucket: Bucket, meeting: Bucket, *, guest: bool) -> str:
    """The [store] part of run.toml; a guest at the meeting point has credentials of its own for it."""
    return (
        '[store]\nkind = "s3"\n'
        + _place(bucket)
        + 'credentials = "s3.credentials"  # mode 0600; without the file name: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY\n'
        + f'url = "{bucket.url}"  # where everybody reads what this node writes\n\n'
        + '[store.meeting]  # where participants announce themselves\nkind = "s3"\n'
        + _place(meeting)
        + f'credentials = "{"meeting" if guest else "s3"}.credentials"\n'
        + f'url = "{meeting.url}"\n'
    )


def _place(bucket: Bucket) -> str:
    lines = {"bucket": bucket.name, "endpoint": bucket.endpoint, "region": bucket.region, "prefix": bucket.prefix}
    addressing = "path" if bucket.provider == "minio" else "auto"
    written = {name: value for name, value in lines.items() if value} | {"addressing": addressing}
    return "".join(f'{name} = "{value}"\n' for name, value in written.items())


def move_store(files: NewFiles, config: Path, bucket: Bucket) -> None:
    """Let a run that was just made live in a bucket, which is its meeting point as well."""
    text = config.read_text(encoding="utf-8")
    begin = text.index("[store]")
    end = text.index("[node]")
    moved = text[:begin] + store_section(bucket, bucket, guest=False) + "\n" + text[end:]
    files.write(config, moved.encode())


def join(files: NewFiles, directory: Path, bucket: Bucket, member: Membership) -> bytes:
    """Write a newcomer's run.toml, and its key where there is none yet; returns the public key.

    Raises:
        BucketError: there is a run already.
        KeyFileError: the key can be neither read nor made.
    """
    config = directory / "run.toml"
    if config.exists():
        raise BucketError(f"{config}: there is a run already; choose another directory")
    _, run_id = joining.named_run(member.manifest)
    path = directory / "keys" / f"{member.name}{SUFFIX}"
    key = SigningKey(key_files.read(path) if path.exists() else files.create_key(path))
    text = (
        f'[run]\nmanifest = "{member.manifest}"\nid = "{run_id}"\n\n'
        + store_section(bucket, member.meeting, guest=True)
        + '\n[beacon]\nkey = ""  # somebody else runs it; of a public one, relays = ["https://..."] names other relays\n'
    )
    files.write(config, text.encode())
    return key.public


def write_documents(files: NewFiles, directory: Path, bucket: Bucket, use: BucketUse) -> list[Document]:
    """Put a bucket's documents beside run.toml; returns them.

    Raises:
        OSError: they cannot be written.
    """
    made = documents(bucket, use)
    for document in made:
        files.write(directory / DOCUMENTS / document.name, document.text.encode())
    return made
