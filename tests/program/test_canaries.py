"""Canaries where miners are admitted: the trainer starts with one that is, or says in a line what is missing."""

from pathlib import Path
from typing import Literal

import pytest
import trio

from grailnode.cli.authority_verbs import admit_key
from grailnode.cli.node import check_start, open_config
from grailnode.config import Config, ConfigError
from grailnode.node.processes import make_canary, make_node
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import creation, workspace
from protocol import paths
from protocol.identity.authority import OPEN
from protocol.identity.signing import sign
from roles.authority_updates import refresh_authority
from roles.participants import find_participants


def trainer(tmp_path: Path, policy: Literal["open", "allowlist", "invite"]) -> tuple[str, Config]:
    """A run with this admission, and the configuration of a trainer with a canary."""
    choices = creation.Choices(admission=OPEN.model_copy(update={"policy": policy}))
    made = workspace.create(tmp_path, choices, workspace.Pace())
    run = str(made.directory / "run.toml")
    return run, open_config(run, ("trainer.canaries=1",))


def test_an_open_run_takes_any(tmp_path: Path):
    check_start(trainer(tmp_path, "open")[1], "trainer", "trainer")


@pytest.mark.parametrize("policy", ["allowlist", "invite"])
def test_a_canary_that_nobody_would_hear_is_refused_at_the_start_and_sings_once_admitted(
    tmp_path: Path, policy: Literal["allowlist", "invite"], capsys: pytest.CaptureFixture[str]
):
    run, config = trainer(tmp_path, policy)
    canary = make_canary(config, "trainer", NodeTelemetry("test"))
    public = canary.key.public.hex()
    with pytest.raises(ConfigError, match=f"admits by {policy}.*`grailnode admit {public}`") as caught:
        check_start(config, "trainer", "trainer")
    assert "\n" not in str(caught.value)
    admit_key(run, public, 30, None)
    if policy == "invite":
        token = capsys.readouterr().out.strip()
        (config.at(config.node.keys) / "trainer-canary-0.invite").write_text(token)
    check_start(config, "trainer", "trainer")

    async def heard() -> list[bytes]:
        listener = make_node(config, "validator-1", NodeTelemetry("test"))
        await refresh_authority(listener)
        record = await canary.announcement("miner", canary.clock.now() + 60.0, 4)
        await canary.store.put(paths.participant(canary.key.public), sign(record, canary.key))
        return [item.key for item in await find_participants(listener, "miner")]

    assert trio.run(heard) == [canary.key.public]


def test_a_canary_with_anothers_invitation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, config = trainer(tmp_path, "invite")
    admit_key(run, "ab" * 32, 30, None)
    (config.at(config.node.keys) / "trainer-canary-0.invite").write_text(capsys.readouterr().out)
    with pytest.raises(ConfigError, match="an invitation for another key or run"):
        check_start(config, "trainer", "trainer")
