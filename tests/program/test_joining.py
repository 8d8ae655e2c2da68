"""A run that is named by a URL: the command line gives the run's id, or accepts the server's word for it on purpose."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from grailnode import UserError
from grailnode.cli.actions import node_start
from grailnode.config import Config
from grailnode.node.node_makers import make_auditor, make_spectator
from grailnode.run import workspace
from grailnode.run.joining import open_config, open_config_to_read
from protocol import paths
from protocol.encoding import content_digest
from protocol.errors import ProtocolError
from roles.node.identity import Node
from roles.ports import NotFoundError
from tests.support.builders.recipes import demo_recipe
from tests.support.servers.loopback import FileServer, Reply, serving


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
