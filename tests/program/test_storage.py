"""From run.toml to a node's store: the adapter, the credentials, and the errors when something is missing."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from grailnode import UserError
from grailnode.config import Config, load
from grailnode.node.node_makers import make_node, make_spectator
from grailnode.node.stores import Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.store.checks import PermanentError
from grailnode.store.s3.s3_session import read_credentials
from protocol import paths
from roles.node.identity import Node
from tests.support.builders.chains import PunctualBeacon

FILE = "[default]\naws_access_key_id = AK\naws_secret_access_key = secret%word\n"
VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def secret_file(directory: Path, text: str = FILE, mode: int = 0o600) -> Path:
    file = directory / "s3.credentials"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_credentials_of_a_file(tmp_path: Path):
    credentials = read_credentials(secret_file(tmp_path), {"AWS_ACCESS_KEY_ID": "other"})
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key, credentials.session_token) == ("AK", "secret%word", None)
    assert "secret" not in repr(credentials)


def test_credentials_of_the_environment():
    values = dict(zip(VARIABLES, ("a", "b", "c"), strict=True))
    credentials = read_credentials(None, values)
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key, credentials.session_token) == ("a", "b", "c")
    assert read_credentials(None, {}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777, 0o620])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int):
    with pytest.raises(UserError, match="run `chmod 600"):
        read_credentials(secret_file(tmp_path, mode=mode))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "secret%word",
        "[default]\naws_access_key_id = AK\n",
        "[other]\n" + FILE[10:],
        "[default]\n[default]\n",
        "\x00",
    ],
)
def test_a_file_without_credentials_is_refused(tmp_path: Path, text: str):
    with pytest.raises(UserError) as error_info:
        read_credentials(secret_file(tmp_path, text))
    assert "\n" not in str(error_info.value)
    assert "secret%word" not in str(error_info.value)


def test_incomplete_credentials_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="AWS_SECRET_ACCESS_KEY is not set"):
        read_credentials(None, {"AWS_ACCESS_KEY_ID": "a"})
    with pytest.raises(UserError, match="no such file"):
        read_credentials(tmp_path / "nowhere")


def test_a_bucket_without_credentials_says_where_to_put_them(run_toml: Path):
    config = load(run_toml, ["store.kind=s3", "store.bucket=b"])
    with pytest.raises(UserError, match="set AWS_ACCESS_KEY_ID"):
        make_node(config, "trainer", NodeTelemetry("x"))


def test_a_spectator_without_credentials_reads_by_url(run_toml: Path):
    config = load(run_toml, ["store.kind=s3", "store.bucket=b", "store.url=http://127.0.0.1:1/b"])
    make_spectator(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["store.kind=s3"], 'store: kind "s3" needs a bucket'),
        (["store.kind=https"], 'store: kind "https" needs a url'),
        (["store.kind=https", "store.url=https://user:word@host"], "store: a url is https://host"),
        (["store.kind=https", "store.url=http://host"], "store: a url is https://host"),
        (["store.meeting.path=x"], "url says where they read what this node writes"),
        (["store.peers.abc.path=x"], "store.peers.abc"),
        (["store.secret_key=x"], "unknown key store.secret_key"),
        (["store.prefix=../x"], "store.prefix"),
        (["run.id=abc"], "run.id"),
    ],
)
def test_a_section_that_describes_no_store_is_refused(run_toml: Path, overrides: list[str], message: str):
    with pytest.raises(UserError, match=r"^\S") as error_info:
        load(run_toml, overrides)
    assert message in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_relays_are_urls(run_toml: Path):
    config = load(run_toml, ['beacon.relays=["https://api.drand.sh", "http://127.0.0.1:9"]'])
    assert [relay.name for relay in Storage(config, NodeTelemetry("x")).relays(bytes(32))] == list(config.beacon.relays)
    for wrong in ("http://api.drand.sh", "api.drand.sh"):
        with pytest.raises(UserError, match=r"beacon\.relays"):
            Storage(load(run_toml, [f'beacon.relays=["{wrong}"]']), NodeTelemetry("x")).relays(bytes(32))


def _apart(run_toml: Path, *more: str) -> Config:
    """Return the configuration of a node with a directory of its own and a meeting point in another."""
    return load(run_toml, ["store.path=mine", "store.url=https://m.example.org", "store.meeting.path=square", *more])


def _punctual(config: Config, name: str) -> Node:
    """Return a node whose beacon has every round in time, since no trainer runs one here."""
    return replace(make_node(config, name, NodeTelemetry("x")), beacon=PunctualBeacon())


async def test_a_node_of_many_buckets_announces_its_own(run_toml: Path):
    node = _punctual(_apart(run_toml), "miner-1")
    assert node.space == "https://m.example.org"

    await node.store.put(paths.head(node.key.public), b"x")
    await node.announce("miner", 60.0)
    with pytest.raises(PermanentError):
        await node.store.put(paths.head(b"k" * 32), b"x")

    directory = run_toml.parent
    assert (directory / "mine" / paths.head(node.key.public)).is_file()
    announcement = (directory / "square" / paths.participant(node.key.public)).read_bytes()
    assert b"https://m.example.org" in announcement


def test_plain_http_to_this_machine_must_be_allowed(run_toml: Path):
    async def read(config: Config) -> None:
        owner = replace(_punctual(config, "miner-2"), space="http://127.0.0.1:1")
        node = make_node(config, "miner-1", NodeTelemetry("x"))
        await owner.announce("miner", 60.0)
        await node.store.get(paths.head(owner.key.public), 10)

    with pytest.raises(PermanentError, match="private_addresses = true allows it"):
        trio.run(read, _apart(run_toml))


async def test_a_server_of_this_machine_that_the_operator_named_opens_no_other_private_address(run_toml: Path):
    own = "http://127.0.0.1:9"
    storage = Storage(load(run_toml, ["store.kind=https", f"store.url={own}/run"]), NodeTelemetry("x"))
    storage.space(f"{own}/miner")
    for other in ("http://127.0.0.1:10", "http://localhost:9"):
        with pytest.raises(PermanentError, match="private_addresses = true allows it"):
            storage.space(other)
    for host in ("169.254.169.254", "127.0.0.1:9", "10.0.0.1"):
        with pytest.raises(PermanentError, match="not a public address"):
            await storage.space(f"https://{host}").get("x", 10)
