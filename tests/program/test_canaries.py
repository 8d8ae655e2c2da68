"""Canaries of runs that admit their miners: a trainer starts with an admitted one, or reports what is missing."""

from pathlib import Path
from typing import Literal

import pytest
import trio

from grailnode.cli.actions.miner_admission import Options, admit_miner
from grailnode.config import Config, ConfigError
from grailnode.node.node_makers import make_canary, make_node
from grailnode.node.role_processes import check_start
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import creation, workspace
from grailnode.run.joining import open_config
from protocol import paths
from protocol.identity.authority import OPEN
from protocol.identity.signing import sign
from roles.authority_updates import refresh_authority
from roles.participants import find_participants


def trainer(tmp_path: Path, policy: Literal["open", "allowlist", "invite"]) -> tuple[str, Config]:
    """Create a run with this admission, and return its run.toml and the configuration of a trainer with a canary."""
    choices = creation.Choices(admission=OPEN.model_copy(update={"policy": policy}))
    run = str(workspace.create(tmp_path, choices, workspace.Pace()).config)
    return run, open_config(run, ("trainer.canaries=1",))


def admit(run: str, key: str) -> None:
    """Admit a miner as `grailnode admit` does."""
    admit_miner(Options(key=key, run=run, days=30, inviter=None))


def test_an_open_run_accepts_any_canary(tmp_path: Path):
    check_start(trainer(tmp_path, "open")[1], "trainer", "trainer", print)


@pytest.mark.parametrize("policy", ["allowlist", "invite"])
def test_a_canary_is_refused_at_the_start_until_it_is_admitted(
    tmp_path: Path, policy: Literal["allowlist", "invite"], capsys: pytest.CaptureFixture[str]
):
    run, config = trainer(tmp_path, policy)
    canary = make_canary(config, "trainer", NodeTelemetry("test"))
    public = canary.key.public.hex()
    with pytest.raises(ConfigError, match=f"admits by {policy}.*`grailnode admit {public}`") as error_info:
        check_start(config, "trainer", "trainer", print)
    assert "\n" not in str(error_info.value)
    admit(run, public)
    if policy == "invite":
        token = capsys.readouterr().out.strip()
        (config.at(config.node.keys) / "trainer-canary-0.invite").write_text(token)
    check_start(config, "trainer", "trainer", print)

    async def announce() -> list[bytes]:
        reader = make_node(config, "validator-1", NodeTelemetry("test"))
        await refresh_authority(reader)
        record = await canary.announcement("miner", canary.clock.now() + 60.0, 4, 0, "torch-float32")
        await canary.store.put(paths.participant(canary.key.public), sign(record, canary.key))
        return [item.key for item in await find_participants(reader, "miner")]

    assert trio.run(announce) == [canary.key.public]


def test_a_canary_with_the_invitation_of_another_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, config = trainer(tmp_path, "invite")
    admit(run, "ab" * 32)
    (config.at(config.node.keys) / "trainer-canary-0.invite").write_text(capsys.readouterr().out)
    with pytest.raises(ConfigError, match="an invitation for another key or run"):
        check_start(config, "trainer", "trainer", print)
