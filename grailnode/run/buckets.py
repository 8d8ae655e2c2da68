"""The documents that a bucket needs so that one participant writes to it, everybody reads it, and old objects go.

They are for AWS, Cloudflare R2 and MinIO, in the form that the services' own tools accept. They grant the least
privilege: the credentials of a node write and delete below its own key and nowhere else; readers get objects and change
nothing; a guest of a meeting point writes announcements.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from grailnode import UserError
from protocol.identity.participant import SPACE_FORM

Provider = Literal["aws", "r2", "minio"]

EXPIRING: Final = ("commitments", "batches", "verdicts", "seals", "witnesses", "reaudits", "reports")
"""Kinds of objects that nobody reads long after their window is closed; summaries are the ledger, and stay."""

_TEMPLATES: Final = Path(__file__).parents[1] / "data" / "buckets"
_IAM: Final = (
    "aws iam create-user --user-name {user} && aws iam put-user-policy --user-name {user} --policy-name grailnode "
    "--policy-document file://{file} && aws iam create-access-key --user-name {user}"
)
_MC_ADMIN: Final = (
    "mc admin user add ALIAS {user} SECRET && mc admin policy create ALIAS {user} {file} && "
    "mc admin policy attach ALIAS {user} --user {user}"
)
_CLOUDFLARE: Final = (
    'curl -H "Authorization: Bearer $CLOUDFLARE_API_TOKEN" --json @{file} https://api.cloudflare.com/client/v4/'
)
_S3API: Final = {
    "cors.json": "aws s3api put-bucket-cors {place} --cors-configuration file://cors.json",
    "lifecycle.json": (
        "aws s3api put-bucket-lifecycle-configuration {place} --lifecycle-configuration file://lifecycle.json"
    ),
}
_COMMANDS: Final[dict[Provider, dict[str, str]]] = {
    "aws": {
        "writer-policy.json": _IAM,
        "bucket-policy.json": "{unblock}aws s3api put-bucket-policy {place} --policy file://bucket-policy.json",
        **_S3API,
        "guest-policy.json": _IAM,
    },
    "r2": {
        "writer-token.json": f"{_CLOUDFLARE}user/tokens",
        **_S3API,
        "guest-credentials.json": f"{_CLOUDFLARE}accounts/{{account}}/r2/temp-access-credentials",
    },
    "minio": {
        "writer-policy.json": _MC_ADMIN,
        "bucket-policy.json": "mc anonymous set-json bucket-policy.json ALIAS/{bucket.name}",
        "cors.xml": "mc cors set ALIAS/{bucket.name} cors.xml",
        "lifecycle.json": "mc ilm rule import ALIAS/{bucket.name} < lifecycle.json",
        "guest-policy.json": _MC_ADMIN,
    },
}
"""By provider and document, the command that applies it; those for guests are for a meeting point."""

_name: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_host: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_region: Final = re.compile(r"[A-Za-z0-9-]*")
_segment: Final = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,99}")


@dataclass(frozen=True)
class Bucket:
    """A bucket, or the part of one below a prefix that ends with '/', and the URL where everybody reads it."""

    provider: Provider
    name: str
    endpoint: str
    region: str
    prefix: str
    url: str

    @property
    def addressing(self) -> Literal["auto", "path"]:
        """Where requests name the bucket: a service like MinIO often has no host for each bucket."""
        return "path" if self.provider == "minio" else "auto"

    @property
    def section(self) -> dict[str, str]:
        """The keys of a section of run.toml that name this place."""
        return {
            "kind": "s3",
            "bucket": self.name,
            "endpoint": self.endpoint,
            "region": self.region,
            "prefix": self.prefix,
            "addressing": self.addressing,
        }

    @property
    def account(self) -> str:
        """Whose bucket of R2 it is."""
        return (urlsplit(self.endpoint).hostname or "").partition(".")[0]

    @property
    def arn(self) -> str:
        """The name of the bucket in policies."""
        return f"arn:aws:s3:::{self.name}"

    def paths(self, paths: list[str]) -> list[str]:
        """Return paths in the bucket of paths below the prefix."""
        return [f"{self.prefix}{path}" for path in paths]

    def arns(self, paths: list[str]) -> list[str]:
        """Return the names in policies of paths below the prefix."""
        return [f"{self.arn}/{path}" for path in self.paths(paths)]


@dataclass(frozen=True)
class Document:
    """A file for the service's tool: its name, its text, and the command that applies it in the file's directory."""

    name: str
    text: str
    command: str


def parse_bucket(text: str, region: str = "", url: str = "") -> Bucket:
    """Return the bucket that NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME/PREFIX names; UserError for any other
    text. Without a region it has the provider's default, and without a url the service's own, where everybody reads it.
    """
    if not _region.fullmatch(region):
        raise UserError(f"--region {region!r}: give letters, digits and '-', such as eu-west-1")
    endpoint, rest = "", text
    if "://" in text:
        parts = urlsplit(text)
        if parts.scheme == "s3":
            rest = parts.netloc + parts.path
        elif parts.scheme in {"https", "http"} and _host.fullmatch(parts.netloc) and not parts.query:
            endpoint, rest = f"{parts.scheme}://{parts.netloc}", parts.path.lstrip("/")
        else:
            raise UserError(f"{text}: give NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME/PREFIX")
    name, _, prefix = rest.rstrip("/").partition("/")
    if not _name.fullmatch(name) or not all(_segment.fullmatch(part) for part in prefix.split("/") if prefix):
        raise UserError(f"{text}: not a bucket's name and prefix; give NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME")
    provider = _provider(urlsplit(endpoint).hostname)
    if url and not re.fullmatch(SPACE_FORM, url.rstrip("/")):
        raise UserError("--url: give https://host[:port][/path], host in lower case, without user or query")
    region = region or ("auto" if provider == "r2" else "us-east-1")
    below = f"/{prefix}" if prefix else ""
    service_url = f"{endpoint}/{name}" if endpoint else f"https://{name}.s3.{region}.amazonaws.com"
    base = url.rstrip("/") or service_url
    return Bucket(provider, name, endpoint, region, prefix + "/" if prefix else "", base + below)


def _provider(host: str | None) -> Provider:
    """Return whose service a host is: AWS without one, and a service like MinIO where its name tells nothing."""
    if host is None or host.endswith(".amazonaws.com"):
        return "aws"
    return "r2" if host.endswith(".r2.cloudflarestorage.com") else "minio"


@dataclass(frozen=True)
class BucketUse:
    """Who uses a bucket, and how."""

    keys: tuple[bytes, ...]  # the participants whose objects the owner's credentials may write
    readers: tuple[str, ...] = ()  # AWS or MinIO principals that may read; everybody where there are none
    beacon: str = ""  # for a meeting point, the first part of the paths of the run's beacon
    days: int = 7

    @property
    def user(self) -> str:
        """The name of the owner's credentials."""
        return f"grailnode-{self.keys[0].hex()[:8]}"

    @property
    def rules(self) -> list[str]:
        """The paths of the run's own objects: its manifest, revisions of its authority, rounds of a local beacon."""
        return ["runs/*", "revisions/*", f"{self.beacon}/public/*"]

    @property
    def written(self) -> list[str]:
        """The paths that the owner's credentials may write."""
        return [f"{key.hex()}/*" for key in self.keys] + (["participants/*", *self.rules] if self.beacon else [])

    @property
    def expiring(self) -> dict[str, str]:
        """By the name of a rule, the prefix of objects that are deleted after some days."""
        prefixes = {f"{kind}-{key.hex()[:8]}": f"{key.hex()}/{kind}/" for key in self.keys for kind in EXPIRING}
        return prefixes | ({"participants": "participants/"} if self.beacon else {})


def documents(bucket: Bucket, use: BucketUse) -> list[Document]:
    """Return what a bucket needs, from the templates in grailnode/data/buckets."""
    environment = Environment(  # noqa: S701 - no HTML; names of buckets and principals were checked or become JSON
        loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    endpoint = f"--endpoint-url {bucket.endpoint} " if bucket.provider == "r2" else ""
    place, account = f"{endpoint}--bucket {bucket.name}", bucket.account
    values = {"bucket": bucket, "use": use, "account": account, "arns": bucket.arns, "expiring": use.expiring}
    unblock = "" if use.readers else f"aws s3api delete-public-access-block {place} && "
    texts = []
    for name, command in _COMMANDS[bucket.provider].items():
        is_for_guests = name.startswith("guest-")
        if use.beacon or not is_for_guests:
            user = "grailnode-guest" if is_for_guests else use.user
            text = environment.get_template(name).render(values, user=user)
            applied = command.format(**values, user=user, file=name, place=place, unblock=unblock)
            texts.append(Document(name, text, applied))
    return texts
