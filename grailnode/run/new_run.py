"""What `grailnode init` does: create a run on this machine or in a bucket, or prepare a node of somebody else's run."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from grailnode import UserError
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import creation, key_files, run_option, run_toml, workspace
from grailnode.run.buckets import Bucket, BucketUse, Document, documents, parse_bucket
from grailnode.run.files import NewFiles
from grailnode.run.rules import Place
from grailnode.run.run_toml import Recipe
from grailnode.run.workspace import MINERS, Workspace
from protocol import paths
from protocol.identity.signing import SigningKey

COMMANDS: Final = Path("bucket") / "commands.sh"
"""The file with the commands that apply the documents that a bucket needs, which lie beside it."""

_COMMANDS_HEADER: Final = """\
# What the bucket needs. Read each document, replace the words in capitals, and run the commands in this directory.
# Those that create a user or a token print credentials, which nodes read from s3.credentials (mode 0600).
"""
_aws_region: Final = re.compile(r"\.s3\.([a-z0-9-]+)\.amazonaws\.com")


@dataclass(frozen=True)
class NewRun:
    """A run that was created, and for one in a bucket what that needs and the manifest's public URL."""

    workspace: Workspace
    documents: tuple[Document, ...] = ()
    url: str = ""


def create_run(
    directory: Path, recipe: Recipe, place: Place, *, policy: Path = PACKAGED_POLICY, proof: Path | None = None
) -> NewRun:
    """Create a run as `workspace.create`, in a bucket if one is named; a UserError says what cannot be used."""
    bucket = None
    if place.bucket is not None:
        bucket = _own_bucket(place.bucket, place)
    if recipe.trainer.outer is not None and not recipe.rules.sites:
        raise UserError("[trainer.outer] of the recipe is for several sites; say how many with --trainers")
    miners = MINERS if recipe.rules.admission == "open" else ()  # others would have to be admitted before they start
    new_workspace = workspace.create(directory, recipe, policy=policy, proof=proof, miners=miners, bucket=bucket)
    if bucket is None:
        return NewRun(new_workspace)
    writers = tuple(key for name, key in new_workspace.keys.items() if not name.startswith("root"))
    manifest = creation.open_run((directory / "run.manifest").read_bytes()).record
    use = BucketUse(writers, place.readers, manifest.beacon.chain_hash.hex(), place.days)
    with new_workspace.files as files:
        texts = _write_documents(files, directory, bucket, use)
    return NewRun(new_workspace, texts, f"{bucket.url}/{paths.run(new_workspace.run_id)}")


def join_run(directory: Path, place: Place, manifest: str, meeting: str) -> tuple[bytes, tuple[Document, ...]]:
    """Prepare a directory for a node of somebody else's run: run.toml, and the node's key unless it is there already.
    Return the public key, and what the node's bucket needs; UserError if a URL or a bucket cannot be
    used, or there is a run already.
    """
    own = _own_bucket(place.bucket or "", place)
    meeting_bucket, run_id = _meeting_bucket(place, manifest, meeting)
    config = directory / "run.toml"
    if config.exists():
        raise UserError(f"{config}: there is a run already; choose another directory")
    with NewFiles() as files:
        path = directory / "keys" / f"{place.name}{key_files.SUFFIX}"
        key = SigningKey(key_files.read(path) if path.exists() else files.create_key(path)).public
        files.write(config, run_toml.for_member(manifest, run_id, own, meeting_bucket).encode())
        use = BucketUse((key,), place.readers, days=place.days)
        return key, _write_documents(files, directory, own, use)


def _own_bucket(text: str, place: Place) -> Bucket:
    bucket = parse_bucket(text, place.region, place.url)
    if bucket.provider == "r2" and not place.url:
        raise UserError(f"{text}: R2 is read by a domain of its own; give --url https://pub-....r2.dev or your own")
    return bucket


def _meeting_bucket(place: Place, manifest: str, meeting: str) -> tuple[Bucket, str]:
    base, run_id = run_option.split_manifest_url(manifest)
    if not base:
        raise UserError(f"{manifest}: which run? a manifest's URL ends with /runs/ID, ID being 64 hexadecimal digits")
    run_option.check_base(base, f"--join {manifest}")
    region = _aws_region.search(base)  # the meeting point may be in another region than this node's bucket
    return replace(parse_bucket(meeting, region[1] if region else place.region, base), url=base), run_id


def _write_documents(files: NewFiles, directory: Path, bucket: Bucket, use: BucketUse) -> tuple[Document, ...]:
    texts = documents(bucket, use)
    for document in texts:
        files.write(directory / COMMANDS.with_name(document.name), document.text.encode())
    commands = "".join(f"\n# {document.name}\n{document.command}\n" for document in texts)
    files.write(directory / COMMANDS, f"{_COMMANDS_HEADER}{commands}".encode())
    return tuple(texts)
