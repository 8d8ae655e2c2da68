"""From run.toml, or a run's URL, to a node's store: the adapter, the credentials, the run's id, and what is missing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio

from grailnode import UserError
from grailnode.cli.actions import node_start
from grailnode.config import Config, load
from grailnode.node.node_makers import make_auditor, make_node, make_spectator
from grailnode.node.state_care import repair_node
from grailnode.node.stores import STRANGER, Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import workspace
from grailnode.run.joining import open_config, open_config_to_read
from grailnode.store.checks import PermanentError
from grailnode.store.s3.s3_session import read_credentials
from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from roles.node.identity import Node
from roles.ports import NotFoundError
from tests.support.builders.chains import PunctualBeacon
from tests.support.builders.recipes import demo_recipe
from tests.support.servers.loopback import FileServer, HttpRequest, Reply, serve, serving

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
    values = dict(zip(VARIABLES, ("a", "secret b", "token c"), strict=True))
    credentials = read_credentials(None, values)
    assert credentials is not None
    assert (credentials.access_key, credentials.secret_key, credentials.session_token) == tuple(values.values())
    assert not [secret for secret in ("secret b", "token c") if secret in repr(credentials)]
    assert read_credentials(None, {}) is None


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        *((FILE, mode, "run `chmod 600") for mode in (0o640, 0o604, 0o660, 0o777, 0o620)),
        *((text, 0o600, r"s3\.credentials: ") for text in ("", "secret%word", "[default]\n[default]\n", "\x00")),
        *((text, 0o600, r"s3\.credentials: ") for text in (FILE.partition("aws_secret")[0], "[other]\n" + FILE[10:])),
    ],
)
def test_a_file_that_others_may_use_or_without_credentials_is_refused(
    tmp_path: Path, text: str, mode: int, message: str
):
    with pytest.raises(UserError, match=message) as error_info:
        read_credentials(secret_file(tmp_path, text, mode))
    assert "\n" not in str(error_info.value)
    assert "secret%word" not in str(error_info.value)


def test_missing_credentials_are_refused(tmp_path: Path):
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


async def test_a_node_of_many_buckets_announces_its_own(run_toml: Path):
    config = load(run_toml, ["store.path=mine", "store.url=https://m.example.org", "store.meeting.path=square"])
    # no trainer runs a beacon here
    node = replace(make_node(config, "miner-1", NodeTelemetry("x")), beacon=PunctualBeacon())
    assert node.space == "https://m.example.org"

    await node.store.put(paths.head(node.key.public), b"x")
    await node.announce("miner", 60.0)
    with pytest.raises(PermanentError):
        await node.store.put(paths.head(b"k" * 32), b"x")

    directory = run_toml.parent
    assert (directory / "mine" / paths.head(node.key.public)).is_file()
    announcement = (directory / "square" / paths.participant(node.key.public)).read_bytes()
    assert b"https://m.example.org" in announcement


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


def test_a_repair_of_a_name_that_is_no_nodes_makes_no_key_and_says_so(run_toml: Path):
    with pytest.raises(UserError, match=r"trainr\.key: not there; is --name the name of the node\?"):
        repair_node(load(run_toml), "trainr", print)
    assert not [*run_toml.parent.rglob("*trainr*")]


async def test_spaces_that_hang_keep_no_other_waiting(
    run_toml: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a validator reads commitments at a time (window_cases.py). Nor do they end connections of others."""
    opened, open_stream = list[Any](), trio.open_tcp_stream

    async def open_counted(*address: Any, **options: Any) -> trio.SocketStream:
        opened.append(address)
        return await open_stream(*address, **options)

    monkeypatch.setattr(trio, "open_tcp_stream", open_counted)
    storage = Storage(load(run_toml, ["store.private_addresses=true"]), NodeTelemetry("x"))

    async def hang(request: HttpRequest) -> Reply:
        return await trio.sleep_forever()

    async def read(url: str) -> bytes:
        return await storage.space(url).get("o", 2)

    hanging, honest = await nursery.start(serve, hang), FileServer()
    honest.objects["/o"] = b"hi"
    url = await nursery.start(serve, honest.answer)
    for number in range(256):
        nursery.start_soon(read, f"{hanging}/{number}")
    await trio.testing.wait_all_tasks_blocked(0.1)
    with trio.fail_after(STRANGER.silence_seconds / 2):  # after which the others would give up
        assert [await read(url) for _ in range(3)] == [b"hi"] * 3
    assert len(opened) == 256 + 1
    nursery.cancel_scope.cancel()


# A run that is named by a URL: the command line gives its id, or accepts the server's word for it on purpose


class Host(NamedTuple):
    """A file server in a thread of its own, which gives some replies before those of its files."""

    files: FileServer
    first_replies: list[Reply]
    url: str


@pytest.fixture
def host() -> Iterator[Host]:
    files, replies = FileServer(), list[Reply]()
    with serving(lambda request: replies.pop(0) if replies else files.answer(request)) as url:
        yield Host(files, replies, url)


@pytest.fixture
def run(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    """A run whose manifest is served at /run/runs/ID and at /latest; the node's directory is elsewhere."""
    run = workspace.create(tmp_path / "founder", demo_recipe())
    data = (run.directory / "run.manifest").read_bytes()
    host.files.objects[f"/run/{paths.run(run.run_id)}"] = data
    host.files.objects["/latest"] = data
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return run


def test_a_url_that_names_the_run_is_enough(run: workspace.Workspace, host: Host):
    url = f"{host.url}/run/{paths.run(run.run_id)}"
    config = open_config(url)
    assert config.run.id == run.run_id.hex()
    assert make_spectator(config).run_id == run.run_id
    assert not config.store.private_addresses  # of strangers, though the run is on this machine
    host.files.objects.clear()
    again = open_config(url)  # from the copy in the node's state
    assert Path(again.run.manifest).is_relative_to(Path.cwd())


def test_a_reader_leaves_nothing_where_it_was_called(
    run: workspace.Workspace, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    config = open_config_to_read(f"{host.url}/run/{paths.run(run.run_id)}")
    assert make_spectator(config).run_id == run.run_id
    assert Path(config.run.manifest).is_relative_to(tmp_path / "user" / "grailnode")
    assert config.at(config.node.cache) == tmp_path / "user" / "grailnode" / "objects"
    assert not list(Path.cwd().iterdir())
    founder = tmp_path / "founder"
    (founder / "store" / ".tmp").mkdir(parents=True)
    files = sorted(founder.rglob("*"))
    config = open_config_to_read(str(founder / "run.toml"))
    assert make_spectator(config).run_id == run.run_id
    assert sorted(founder.rglob("*")) == files  # nothing that a node of another user could fail on
    config_with_option = open_config_to_read(str(founder / "run.toml"), (f"node.cache={tmp_path / 'mine'}",))
    assert config_with_option.at(config_with_option.node.cache) == tmp_path / "mine"


def test_an_auditor_reads_what_storage_shows_now_and_not_the_cache_of_this_machine(
    run: workspace.Workspace, host: Host
):
    config, data = open_config(f"{host.url}/run/{paths.run(run.run_id)}"), b"weights"
    path = paths.anchor(bytes(32), content_digest(data))
    host.files.objects[f"/run/{path}"] = data

    def read(make: Callable[[Config], Node]) -> bytes:
        return trio.run(partial(make(config).store.get, path, len(data)))

    assert read(make_spectator) == read(make_auditor) == data
    host.files.objects[f"/run/{path}"] = b"another"
    assert read(make_spectator) == data  # from the cache
    assert read(make_auditor) == b"another"


def test_a_request_to_a_busy_server_is_repeated(run: workspace.Workspace, host: Host):
    host.first_replies.extend([Reply(503), Reply(200, b"x", cut=0)])
    assert open_config(f"{host.url}/run/{paths.run(run.run_id)}").run.id == run.run_id.hex()
    assert not host.first_replies


def test_a_server_that_shows_another_run_is_refused(run: workspace.Workspace, host: Host, tmp_path: Path):
    other = workspace.create(tmp_path / "other", demo_recipe(title="other"))
    url = f"{host.url}/run/{paths.run(run.run_id)}"
    host.files.objects[f"/run/{paths.run(run.run_id)}"] = (other.directory / "run.manifest").read_bytes()
    with pytest.raises(ProtocolError, match=r"is run .*, not "):
        open_config(url)
    for rubbish in (b"", b"rubbish", b"\0" * 1000):
        host.files.objects[f"/run/{paths.run(run.run_id)}"] = rubbish
        with pytest.raises(ProtocolError):
            open_config(url)
    assert not list(Path.cwd().rglob("*.manifest"))


def test_a_url_without_an_id_needs_one_or_trust(run: workspace.Workspace, host: Host):
    lines: list[str] = []
    url = f"{host.url}/latest"
    with pytest.raises(UserError, match=r"which run\? give its id with --set run\.id=ID, or .* --trust-run"):
        open_config(url)
    pinned = open_config(url, (f"run.id={run.run_id.hex()}",))
    assert pinned.run.id == run.run_id.hex()
    assert not lines
    config = open_config(url, trust=lines.append)
    assert config.run.id == run.run_id.hex()
    (line,) = lines
    assert run.run_id.hex() in line
    assert "on the word of 127.0.0.1 alone" in line
    with pytest.raises(ProtocolError, match="is run"):
        open_config(url, ("run.id=" + "0" * 64,))


def test_a_node_that_comes_before_the_first_publication_waits(
    run: workspace.Workspace, host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path, pauses = f"/run/{paths.run(run.run_id)}", list[float]()
    manifest = host.files.objects.pop(path)

    def publish_after_two_pauses(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            host.files.objects[path] = manifest

    monkeypatch.setattr("time.sleep", publish_after_two_pauses)
    config = node_start.wait_for_run(run=host.url + path, overrides=(), trust=None)
    assert config.run.id == run.run_id.hex()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no run is there; its trainer publishes it, or the URL is wrong; waiting since" in line


def test_a_missing_manifest_is_an_error(host: Host, run: workspace.Workspace):
    with pytest.raises(NotFoundError, match="no run is there; its trainer publishes it, or the URL is wrong"):
        open_config(f"{host.url}/run/{paths.run(b'x' * 32)}")
    host.files.objects[f"/run/{paths.run(b'y' * 32)}"] = b"a page"
    with pytest.raises(ProtocolError, match=f"^{host.url}/run/runs/7979"):
        open_config(f"{host.url}/run/{paths.run(b'y' * 32)}")
    with pytest.raises(UserError, match="not a base URL"):
        open_config("http://example.org/latest", trust=print)
