"""The documents that `grailnode init --bucket` writes: services accept them, and they allow what a node needs only."""

import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from grailnode import UserError
from grailnode.cli.main import cli
from grailnode.config import load
from grailnode.run.buckets import BucketUse, Document, documents, parse_bucket
from grailnode.run.creation import open_run
from protocol import paths
from tests.support.processes.command_line import fail

ME, OTHER = b"\x11" * 32, b"\x22" * 32
BEACON = "ab" * 32
R2 = "https://account.r2.cloudflarestorage.com/mine/runs-of-mine"
MINIO = "https://minio.example.org/mine"
BUCKETS = {
    "aws": parse_bucket("mine"),
    "aws below a prefix": parse_bucket("s3://mine/some/place", region="eu-west-1"),
    "minio": parse_bucket(MINIO),
    "r2": parse_bucket(R2, url="https://pub-1.r2.dev"),
}


def allows(policy: dict[str, Any], action: str, resource: str, prefix: str | None = None) -> bool:
    """Return whether a policy allows an action, by IAM's rules for Allow statements, ARNs and s3:prefix."""
    for statement in policy["Statement"]:
        assert statement["Effect"] == "Allow"
        conditions = statement.get("Condition", {}).get("StringLike", {}).get("s3:prefix")
        if (
            any(fnmatchcase(action, pattern) for pattern in statement["Action"])
            and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"])
            and (conditions is None or any(fnmatchcase(prefix or "", pattern) for pattern in conditions))
        ):
            return True
    return False


def by_name(all_documents: Sequence[Document]) -> dict[str, Any]:
    return {item.name: json.loads(item.text) for item in all_documents if item.name.endswith(".json")}


WINDOW_PATHS = [paths.commitment(ME, 3), paths.verdict(ME, 3, OTHER), paths.summary(ME, 3), paths.witness(ME, 3)]
OWN = [paths.head(ME), paths.patch(ME, OTHER), *WINDOW_PATHS]
FOREIGN = [paths.head(OTHER), paths.participant(ME), paths.run(OTHER), f"{BEACON}/public/1", "x", f"x/{ME.hex()}/head"]


@pytest.mark.parametrize("kind", ["aws", "aws below a prefix", "minio"])
def test_a_nodes_credentials_write_its_own_objects_and_no_others(kind: str):
    bucket = BUCKETS[kind]
    policy = by_name(documents(bucket, BucketUse((ME,))))["writer-policy.json"]
    root = f"arn:aws:s3:::{bucket.name}"
    for verb in ("GetObject", "PutObject", "DeleteObject"):
        assert all(allows(policy, f"s3:{verb}", f"{root}/{bucket.prefix}{path}") for path in OWN)
        assert not any(allows(policy, f"s3:{verb}", f"{root}/{bucket.prefix}{path}") for path in FOREIGN)
    assert allows(policy, "s3:ListBucket", root, f"{bucket.prefix}{ME.hex()}/manifests/")
    assert not allows(policy, "s3:ListBucket", root, "")
    assert not allows(policy, "s3:ListBucket", root, f"{bucket.prefix}{OTHER.hex()}/")
    for verb in (
        "PutBucketPolicy",
        "DeleteBucket",
        "PutLifecycleConfiguration",
        "PutObjectAcl",
        "ListMultipartUploadParts",
    ):
        assert not allows(policy, f"s3:{verb}", root)
        assert not allows(policy, f"s3:{verb}", f"{root}/{bucket.prefix}{OWN[0]}")


@pytest.mark.parametrize("kind", ["aws", "aws below a prefix", "minio"])
def test_readers_read_and_nothing_else(kind: str):
    bucket = BUCKETS[kind]
    root = f"arn:aws:s3:::{bucket.name}"
    public = by_name(documents(bucket, BucketUse((ME,))))["bucket-policy.json"]
    private = by_name(documents(bucket, BucketUse((ME,), ("arn:aws:iam::1:user/x",))))["bucket-policy.json"]
    for policy in (public, private):
        assert allows(policy, "s3:GetObject", f"{root}/{bucket.prefix}{OWN[0]}")
        for verb in ("PutObject", "DeleteObject", "PutObjectAcl"):
            assert not allows(policy, f"s3:{verb}", f"{root}/{bucket.prefix}{OWN[0]}")
    assert {statement["Principal"] for statement in public["Statement"]} == {"*"}
    assert not allows(public, "s3:ListBucket", root, "")
    assert [statement["Principal"] for statement in private["Statement"]] == [{"AWS": ["arn:aws:iam::1:user/x"]}] * 2
    if bucket.prefix:
        assert not allows(public, "s3:GetObject", f"{root}/elsewhere")


@pytest.mark.parametrize("kind", ["aws", "minio"])
def test_guests_of_a_meeting_point_can_only_announce(kind: str):
    bucket = BUCKETS[kind]
    contents = by_name(documents(bucket, BucketUse((ME,), beacon=BEACON)))
    root = f"arn:aws:s3:::{bucket.name}"
    guest, writer = contents["guest-policy.json"], contents["writer-policy.json"]
    assert allows(guest, "s3:PutObject", f"{root}/{paths.participant(OTHER)}")
    assert allows(guest, "s3:ListBucket", root, "participants/")
    for path in (paths.run(OTHER), f"{BEACON}/public/9"):
        assert allows(guest, "s3:GetObject", f"{root}/{path}")
        assert not allows(guest, "s3:PutObject", f"{root}/{path}")
        assert allows(writer, "s3:PutObject", f"{root}/{path}")
    for path in (*OWN, f"{OTHER.hex()}/public/1"):
        assert not allows(guest, "s3:PutObject", f"{root}/{path}")
    assert not allows(guest, "s3:DeleteObject", f"{root}/{paths.participant(OTHER)}")
    assert "guest-policy.json" not in by_name(documents(bucket, BucketUse((ME,))))


def test_a_token_of_r2_is_for_one_bucket_and_guests_credentials_for_one_prefix():
    contents = by_name(documents(BUCKETS["r2"], BucketUse((ME,), beacon=BEACON)))
    (policy,) = contents["writer-token.json"]["policies"]
    assert policy["resources"] == {"com.cloudflare.edge.r2.bucket.account_default_mine": "*"}
    assert [group["name"] for group in policy["permission_groups"]] == ["Workers R2 Storage Bucket Item Write"]
    assert contents["guest-credentials.json"]["prefixes"] == ["runs-of-mine/participants/"]


@pytest.mark.parametrize("kind", list(BUCKETS))
def test_objects_of_closed_windows_expire_and_others_do_not(kind: str):
    bucket = BUCKETS[kind]
    rules = by_name(documents(bucket, BucketUse((ME, OTHER), days=9)))["lifecycle.json"]["Rules"]
    expiring = {rule["Filter"]["Prefix"]: rule["Expiration"]["Days"] for rule in rules if "Expiration" in rule}
    chain = [paths.head(ME), paths.manifest(ME, 1, ME), paths.patch(ME, ME), paths.anchor(ME, ME)]
    judging = [paths.batch(OTHER, 1, ME), paths.verdict(ME, 1, OTHER), paths.seal(ME, 1), paths.witness(ME, 1)]
    for path in (paths.commitment(ME, 1), *judging):
        assert any((bucket.prefix + path).startswith(prefix) for prefix in expiring), path
    for path in (*chain, paths.summary(ME, 1)):
        assert not any((bucket.prefix + path).startswith(prefix) for prefix in expiring), path
    assert set(expiring.values()) == {9}
    aborts = [rule["AbortIncompleteMultipartUpload"] for rule in rules if "AbortIncompleteMultipartUpload" in rule]
    assert aborts == ([] if kind == "minio" else [{"DaysAfterInitiation": 1}])
    assert len({rule["ID"] for rule in rules}) == len(rules)


@pytest.mark.parametrize("kind", list(BUCKETS))
def test_pages_in_browsers_may_read_ranges(kind: str):
    texts = {item.name: item.text for item in documents(BUCKETS[kind], BucketUse((ME,)))}
    if "cors.xml" in texts:
        (rule,) = ElementTree.fromstring(texts["cors.xml"])
        cors = {child.tag: [item.text for item in rule.findall(child.tag)] for child in rule}
        methods, exposed = cors["AllowedMethod"], cors["ExposeHeader"]
    else:
        (document,) = json.loads(texts["cors.json"])["CORSRules"]
        methods, exposed = document["AllowedMethods"], document["ExposeHeaders"]
    assert methods == ["GET", "HEAD"]
    assert {"ETag", "Content-Range"} <= set(exposed)


def test_a_service_takes_the_documents(moto_bucket):
    """moto checks them as boto3 and S3 do."""
    from grailnode.store.s3.s3_session import S3Session

    location, credentials = moto_bucket
    contents = by_name(documents(parse_bucket(location.bucket), BucketUse((ME,), beacon=BEACON)))
    session = S3Session(location, credentials)
    client, name = session.client, location.bucket
    client.put_bucket_policy(Bucket=name, Policy=json.dumps(contents["bucket-policy.json"]))
    client.put_bucket_cors(Bucket=name, CORSConfiguration=contents["cors.json"])
    client.put_bucket_lifecycle_configuration(Bucket=name, LifecycleConfiguration=contents["lifecycle.json"])
    rules = client.get_bucket_lifecycle_configuration(Bucket=name)["Rules"]
    assert len(rules) == len(contents["lifecycle.json"]["Rules"])
    session.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mine", "not a bucket's name"),
        ("mine/../x", "not a bucket's name"),
        ("ftp://mine", "give NAME"),
        ("https://user:word@host/mine", "give NAME"),
        ('https://ho"st/mine', "give NAME"),
        (R2, "give --url"),
    ],
)
def test_invalid_buckets_are_refused(text: str, message: str, tmp_path: Path):
    assert message in fail("init", str(tmp_path / "run"), "--bucket", text)
    assert not (tmp_path / "run").exists()


def test_the_address_tells_whose_service_it_is_and_where_requests_name_the_bucket():
    assert [bucket.provider for bucket in BUCKETS.values()] == ["aws", "aws", "minio", "r2"]
    for text, provider in {
        "https://s3.eu-west-1.amazonaws.com/mine": "aws",
        "https://a.eu.r2.cloudflarestorage.com/mine": "r2",
        "https://storage.example:9000/mine": "minio",
    }.items():
        bucket = parse_bucket(text)
        assert (bucket.provider, bucket.addressing) == (provider, "path" if provider == "minio" else "auto")


@pytest.mark.parametrize("region", ['x"y', "eu west", "eu\n", "../x"])
def test_an_invalid_region_is_refused(region: str):
    with pytest.raises(UserError, match=r"--region .*: give letters, digits and '-'"):
        parse_bucket("mine", region)


def test_init_writes_a_run_that_lives_in_the_bucket(tmp_path: Path):
    run = tmp_path / "run"
    result = CliRunner().invoke(cli, ["init", str(run), "--bucket", "s3://mine/place", "--region", "eu-west-1"])
    assert result.exit_code == 0, result.output
    config = load(run / "run.toml")
    assert (config.store.kind, config.store.bucket, config.store.prefix) == ("s3", "mine", "place/")
    assert config.store.url == "https://mine.s3.eu-west-1.amazonaws.com/place"
    assert config.store.meeting is not None
    assert config.store.meeting.bucket == "mine"
    assert config.store.credentials == Path("s3.credentials")
    signed = open_run((run / "run.manifest").read_bytes())
    assert len(result.output.splitlines()) <= 15, "what matters would scroll away"
    commands = (run / "bucket" / "commands.sh").read_text()
    assert f"less {run}/bucket/commands.sh" in result.output
    assert all(file.name in commands for file in (run / "bucket").iterdir() if file.name != "commands.sh")
    assert f"grailnode --role trainer   --run {run}/run.toml" in result.output
    assert f"https://mine.s3.eu-west-1.amazonaws.com/place/{paths.run(signed.digest)}" in result.output
    writer = json.loads((run / "bucket" / "writer-policy.json").read_text())
    trainer = signed.record.authority.trainers[0]
    root = "arn:aws:s3:::mine/place"
    assert allows(writer, "s3:PutObject", f"{root}/{paths.head(trainer)}")
    assert allows(writer, "s3:PutObject", f"{root}/{signed.record.beacon.path(1)}")

    second_run = tmp_path / "second"
    url = f"{config.store.url}/{paths.run(signed.digest)}"
    result = CliRunner().invoke(
        cli, ["init", str(second_run), "--bucket", "s3://theirs", "--join", url, "--meeting", "s3://mine/place"]
    )
    assert result.exit_code == 0, result.output
    assert f"editor {second_run}/meeting.credentials" in result.output
    assert f"grailnode --role ROLE --run {second_run}/run.toml --name miner-1" in result.output
    config = load(second_run / "run.toml")
    assert (config.run.manifest, config.run.id) == (url, signed.digest.hex())
    assert (config.store.bucket, config.store.url) == ("theirs", "https://theirs.s3.us-east-1.amazonaws.com")
    assert config.store.meeting is not None
    assert config.store.meeting.credentials == Path("meeting.credentials")
    assert (config.store.meeting.region, config.store.meeting.prefix) == ("eu-west-1", "place/")
    assert config.store.meeting.url == "https://mine.s3.eu-west-1.amazonaws.com/place"
    assert config.beacon.key == ""
    assert (second_run / "keys" / "miner-1.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("url", ["https://pub-Founder.r2.dev", "http://pub-1.r2.dev", "https://user:word@pub-1.r2.dev"])
def test_an_invalid_public_address_is_refused_before_anything_is_created(url: str):
    with pytest.raises(UserError, match="--url: give https://host") as error_info:
        parse_bucket(R2, url=url)
    assert "word" not in str(error_info.value)
