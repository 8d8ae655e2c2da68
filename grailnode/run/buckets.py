"""The documents that a bucket needs so that one participant writes to it, everybody reads it, and old objects go.

They are for AWS, Cloudflare R2 and MinIO, in the form that the services' own tools accept. They grant the least
privilege: the credentials of a node write and delete below its own key and nowhere else; readers get objects and change
nothing; a guest of a meeting point writes announcements.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from grailnode import UserError
from protocol.identity.participant import SPACE_FORM

Provider = Literal["aws", "r2", "minio"]
Json = dict[str, Any]

EXPIRING: Final = ("commitments", "batches", "verdicts", "seals", "witnesses", "reaudits", "reports")
"""Kinds of objects that nobody reads long after their window is closed; summaries are the ledger, and stay."""

_READ_HEADERS: Final = ("ETag", "Content-Length", "Content-Range", "Accept-Ranges")
_R2_WRITE: Final = {"id": "2efd5506f9c8494dacb1fa10a3e7d5b6", "name": "Workers R2 Storage Bucket Item Write"}
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


def documents(bucket: Bucket, use: BucketUse) -> list[Document]:
    makers = {"aws": _aws, "r2": _r2, "minio": _minio}
    return makers[bucket.provider](bucket, use)


def _aws(bucket: Bucket, use: BucketUse) -> list[Document]:
    api = f"aws s3api {{}} --bucket {bucket.name}"
    unblock = "" if use.readers else f"{api.format('delete-public-access-block')} && "
    publish = f"{unblock}{api.format('put-bucket-policy')} --policy file://bucket-policy.json"
    texts = [
        _json("writer-policy.json", _writer(bucket, use), _iam(use.user, "writer-policy.json")),
        _json("bucket-policy.json", _reader(bucket, use.readers), publish),
        *_s3api_documents(bucket, use, api),
    ]
    if use.beacon:
        texts.append(_json("guest-policy.json", _guest(bucket, use), _iam("grailnode-guest", "guest-policy.json")))
    return texts


def _s3api_documents(bucket: Bucket, use: BucketUse, api: str) -> list[Document]:
    """Return what AWS and R2 take alike. `api` is the command line, with {} in place of the verb."""
    cors = {
        "AllowedMethods": ["GET", "HEAD"],
        "AllowedOrigins": ["*"],
        "AllowedHeaders": ["Range", "If-Range"],
        "ExposeHeaders": list(_READ_HEADERS),
        "MaxAgeSeconds": 3600,
    }
    put_cors, put_lifecycle = api.format("put-bucket-cors"), api.format("put-bucket-lifecycle-configuration")
    expire = f"{put_lifecycle} --lifecycle-configuration file://lifecycle.json"
    return [
        _json("cors.json", {"CORSRules": [cors]}, f"{put_cors} --cors-configuration file://cors.json"),
        _json("lifecycle.json", _lifecycle(bucket, use, abort=True), expire),
    ]


def _iam(user: str, file: str) -> str:
    return (
        f"aws iam create-user --user-name {user} && aws iam put-user-policy --user-name {user} --policy-name grailnode "
        f"--policy-document file://{file} && aws iam create-access-key --user-name {user}"
    )


def _r2(bucket: Bucket, use: BucketUse) -> list[Document]:
    account = (urlsplit(bucket.endpoint).hostname or "").partition(".")[0]
    api = f"aws s3api {{}} --endpoint-url {bucket.endpoint} --bucket {bucket.name}"
    cloudflare = (
        'curl -H "Authorization: Bearer $CLOUDFLARE_API_TOKEN" --json @{} https://api.cloudflare.com/client/v4/{}'
    )
    resources = {f"com.cloudflare.edge.r2.bucket.{account}_default_{bucket.name}": "*"}
    policy = {"effect": "allow", "permission_groups": [_R2_WRITE], "resources": resources}
    token = {"name": use.user, "policies": [policy]}
    texts = [
        _json("writer-token.json", token, cloudflare.format("writer-token.json", "user/tokens")),
        *_s3api_documents(bucket, use, api),
    ]
    if use.beacon:
        guest = {
            "bucket": bucket.name,
            "parentAccessKeyId": "ACCESS_KEY_ID of the token above",
            "permission": "object-read-write",
            "prefixes": [f"{bucket.prefix}participants/"],
            "ttlSeconds": 604_800,
        }
        place = f"accounts/{account}/r2/temp-access-credentials"
        texts.append(_json("guest-credentials.json", guest, cloudflare.format("guest-credentials.json", place)))
    return texts


def _minio(bucket: Bucket, use: BucketUse) -> list[Document]:
    place = f"ALIAS/{bucket.name}"
    expiry = _lifecycle(bucket, use, abort=False)  # MinIO deletes stale uploads itself, after a day
    texts = [
        _mc_policy("writer-policy.json", _writer(bucket, use), use.user),
        _json("bucket-policy.json", _reader(bucket, use.readers), f"mc anonymous set-json bucket-policy.json {place}"),
        Document("cors.xml", _CORS_XML, f"mc cors set {place} cors.xml"),
        _json("lifecycle.json", expiry, f"mc ilm rule import {place} < lifecycle.json"),
    ]
    return [*texts, _mc_policy("guest-policy.json", _guest(bucket, use), "grailnode-guest")] if use.beacon else texts


def _mc_policy(name: str, content: Json, user: str) -> Document:
    add = f"mc admin user add ALIAS {user} SECRET && mc admin policy create ALIAS {user} {name}"
    return _json(name, content, f"{add} && mc admin policy attach ALIAS {user} --user {user}")


def _json(name: str, content: Json, command: str) -> Document:
    return Document(name, json.dumps(content, indent=2) + "\n", command)


def _policy(*statements: Json) -> Json:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def _allow(sid: str, actions: list[str], resources: list[str], prefixes: list[str] | None = None) -> Json:
    condition = {"Condition": {"StringLike": {"s3:prefix": prefixes}}} if prefixes else {}
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources, **condition}


def _arn(bucket: Bucket, path: str = "") -> str:
    arn = f"arn:aws:s3:::{bucket.name}"
    return f"{arn}/{bucket.prefix}{path}" if path else arn


def _writer(bucket: Bucket, use: BucketUse) -> Json:
    own = [f"{key.hex()}/*" for key in use.keys]
    if use.beacon:
        own += ["participants/*", *use.rules]
    return _policy(
        _allow(
            "WriteOwnObjects",
            [f"s3:{verb}" for verb in ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")]
            + ["s3:ListMultipartUploadParts"],
            [_arn(bucket, path) for path in own],
        ),
        _allow("ListOwnObjects", ["s3:ListBucket"], [_arn(bucket)], [bucket.prefix + path for path in own]),
        _allow("ResumeOwnUploads", ["s3:ListBucketMultipartUploads"], [_arn(bucket)]),
    )


def _reader(bucket: Bucket, readers: tuple[str, ...]) -> Json:
    """Return the policy of the bucket: everybody may read, or the principals that are named."""
    principal: Any = {"AWS": list(readers)} if readers else "*"
    read = {**_allow("ReadObjects", ["s3:GetObject"], [_arn(bucket, "*")]), "Principal": principal}
    if not readers:
        return _policy(read)
    listing = _allow("TellMissingFromForbidden", ["s3:ListBucket"], [_arn(bucket)], [f"{bucket.prefix}*"])
    return _policy(read, {**listing, "Principal": principal})


def _guest(bucket: Bucket, use: BucketUse) -> Json:
    """Return the policy of a meeting point's guests: they announce themselves and see who else did."""
    return _policy(
        _allow("Announce", ["s3:GetObject", "s3:PutObject"], [_arn(bucket, "participants/*")]),
        _allow("ReadRules", ["s3:GetObject"], [_arn(bucket, path) for path in use.rules]),
        _allow("SeeParticipants", ["s3:ListBucket"], [_arn(bucket)], [f"{bucket.prefix}participants/*"]),
    )


_CORS_XML: Final = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<CORSConfiguration>\n  <CORSRule>\n    <AllowedOrigin>*</AllowedOrigin>\n'
    + "".join(f"    <AllowedMethod>{method}</AllowedMethod>\n" for method in ("GET", "HEAD"))
    + "".join(f"    <AllowedHeader>{header}</AllowedHeader>\n" for header in ("Range", "If-Range"))
    + "".join(f"    <ExposeHeader>{header}</ExposeHeader>\n" for header in _READ_HEADERS)
    + "    <MaxAgeSeconds>3600</MaxAgeSeconds>\n  </CORSRule>\n</CORSConfiguration>\n"
)


def _lifecycle(bucket: Bucket, use: BucketUse, *, abort: bool) -> Json:
    prefixes = {f"{kind}-{key.hex()[:8]}": f"{key.hex()}/{kind}/" for key in use.keys for kind in EXPIRING}
    if use.beacon:
        prefixes["participants"] = "participants/"
    actions = [(f"expire-{name}", prefix, {"Expiration": {"Days": use.days}}) for name, prefix in prefixes.items()]
    if abort:
        actions.append(("abort-incomplete-uploads", "", {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}))
    return {
        "Rules": [
            {"ID": name, "Status": "Enabled", "Filter": {"Prefix": bucket.prefix + prefix}, **action}
            for name, prefix, action in actions
        ]
    }
