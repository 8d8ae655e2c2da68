"""`grailnode repair` on a host of a trainer that has no key."""

from pathlib import Path

import pytest
import trio

from grailnode.config import load
from grailnode.node.node_makers import run_id_of, state_directory
from grailnode.node.state_care import repair_node
from grailnode.store.state.state_store import StateStore

HOSTS = '[trainer]\nhosts = { count = 2, number = 1, meeting = "10.0.0.1:29500" }\n'


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "checkpoints/000000000001-00000000000000/00001/00000",
            "checkpoints/: lost; remove training/ from the state of host 0, and run `grailnode repair` there",
        ),
        (
            "weights/0000000001/00003",
            "weights/: start this host again; if host 0 needs what is lost, its next line says so",
        ),
    ],
)
def test_what_another_host_has_lost_is_forgotten_and_what_to_do_is_said(run_toml: Path, path: str, line: str) -> None:
    run_toml.write_text(run_toml.read_text().replace("[trainer]\n", HOSTS))
    config, lines = load(run_toml), list[str]()
    objects = state_directory(config, "trainer") / "objects"
    trio.run(StateStore(objects, run_id_of(config)).put, path, b"rows")
    (objects / path).unlink()
    keys = {*config.at(config.node.keys).glob("*")}
    repair_node(config, "trainer", lines.append)
    assert lines[0].startswith(f"{path}: missing")
    assert lines[1:] == [line]
    repair_node(config, "trainer", lines.append)
    assert lines[2:] == ["the state of this host is whole"]
    assert {*config.at(config.node.keys).glob("*")} == keys
