"""What a run's environment requires: every way in which it can be missing or wrong is an error of one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.config import load
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.environments.registry import built_in_spec
from grailnode.environments.wheels import PluginError
from grailnode.node.bodies import published_files
from grailnode.run import requirements, workspace
from grailnode.run.creation import open_run
from grailnode.run.rules import Rules
from protocol import limits
from protocol.run import EpisodeSpec
from tests.support.builders.policies import write_speaking_policy
from tests.support.builders.recipes import demo_recipe
from tests.support.builders.samples import run_manifest, task
from tests.support.builders.tasks import CODE, MATH


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Return a policy whose tokenizer knows ASCII, a token a character, with room for 2,048."""
    return write_speaking_policy(tmp_path_factory.mktemp("policy"), ["<solution>4</solution>"])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(MATH)
    return path


def error_of(environment: str, data: Path | None, policy: Policy, max_tokens: int = 64, **options: Any) -> str:
    with pytest.raises(UserError) as error_info:
        requirements.check(Rules(environment=environment, data=data, max_tokens=max_tokens, **options), policy)
    assert "\n" not in str(error_info.value)
    return str(error_info.value)


def test_episodes_by_default_and_by_rules() -> None:
    spec = requirements.episode(Rules(environment="wordle"))
    assert spec == EpisodeSpec(turns=6, turn_tokens=3, reply_tokens=16, tokens=98)
    rules = Rules(environment="wordle", turns=3, turn_tokens=4, reply_tokens=8, max_tokens=10, episode_tokens=20)
    assert requirements.episode(rules) == EpisodeSpec(turns=3, turn_tokens=4, reply_tokens=8, tokens=20)
    assert requirements.episode(Rules()) is None
    with pytest.raises(UserError, match="'addition' has no turns"):
        requirements.episode(Rules(turns=2))
    with pytest.raises(UserError, match="an episode of 'wordle' has 6 turns"):
        requirements.episode(Rules(environment="wordle", turns=7))


def test_the_files_that_ship_with_the_program_are_accepted(reader: Policy, data: Path) -> None:
    problems = requirements.check(Rules(environment="math", data=data, max_tokens=64), reader).problems
    assert problems is not None
    assert len(problems.problems) == len(MATH.splitlines())
    data.write_bytes(CODE)
    assert requirements.check(Rules(environment="code-3.11", data=data, max_tokens=64), reader).problems is not None
    assert requirements.check(Rules(environment="sat"), reader).problems is None


def test_difficulty_is_of_levels_members_or_kinds_in_the_data(reader: Policy, data: Path) -> None:
    def shares(**rules: Any) -> dict[str, int]:
        strata = requirements.check(Rules(max_tokens=64, **rules), reader).difficulty.strata
        return {stratum.name: stratum.ppm for stratum in strata}

    assert shares(environment="sat") == dict.fromkeys("45678", 200_000)
    assert sum(shares().values()) == 1_000_000
    assert shares(environment="countdown=600000,sat=400000") == {"countdown": 600_000, "sat": 400_000}
    lines = [json.loads(line) | {"level": number % 3} for number, line in enumerate(MATH.splitlines())]
    data.write_text("\n".join(map(json.dumps, lines)))
    assert list(shares(environment="math", data=data)) == ["0", "1", "2"]
    with pytest.raises(UserError, match=r"^--difficulty: the task's problems are of 0 kinds"):
        shares(environment="wordle")
    with pytest.raises(ValueError, match="several sites count no groups"):
        Rules(trainers=2, difficulty=True)


def test_a_missing_or_a_needless_file_is_refused(reader: Policy, data: Path) -> None:
    error = error_of("math", None, reader)
    assert error.startswith("environment 'math' takes its problems from a data file: --data FILE; a packaged example")
    assert Path(error.split()[-1]).is_file()
    assert error_of("sat", data, reader) == "environment 'sat' takes no data file: drop --data"
    assert error_of("chess", data, reader).startswith("unknown environment 'chess'; there are: addition, ")


def test_files_that_cannot_be_read(reader: Policy, data: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "missing"
    assert error_of("math", nowhere, reader) == f"{nowhere}: the data file cannot be read (no such file or directory)"
    assert error_of("math", tmp_path, reader) == f"{tmp_path}: the data file cannot be read (is a directory)"
    data.write_bytes(MATH + b"\n{}\n")
    assert error_of("math", data, reader) == f"{data}: line {len(MATH.splitlines()) + 2}: no 'question'"
    with data.open("wb") as file:
        file.truncate(limits.MAX_DATA_BYTES + 1)
    assert "more than 67108864; leave some problems out" in error_of("math", data, reader)


def test_prompts_that_the_policy_cannot_read_or_has_no_positions_for(reader: Policy, data: Path) -> None:
    error = error_of("math", data, Policy.load(PACKAGED_POLICY))
    assert "has characters that the policy's tokenizer does not know; give a policy that reads text" in error
    room = "and with up to 2000 tokens behind it the policy has room for 48; leave it out, or lower --max-tokens"
    assert error_of("math", data, reader, 2000).endswith(room)
    assert error_of("wordle", None, reader, 5000).endswith(" 0; lower --turns, --max-tokens or --reply-tokens")
    assert error_of("wordle", None, reader, 5000, episode_tokens=4000).endswith(" 0; lower --episode-tokens")
    data.write_bytes(MATH + json.dumps({"question": "é?", "answer": "#### 4"}).encode())
    assert "'é?" in error_of("math", data, reader)


def test_a_run_keeps_the_data_file_that_it_names(reader: Policy, data: Path, tmp_path: Path) -> None:
    recipe = demo_recipe(environment="math", data=data, max_tokens=64)
    config = workspace.create(tmp_path / "run", recipe, policy=reader.directory).config
    data.unlink()
    run = open_run(config.with_name("run.manifest").read_bytes()).record
    own, _ = published_files(load(config))
    assert own == config.with_name("data.jsonl")
    assert requirements.files_to_publish(run, own) == {"data.jsonl": MATH}
    with pytest.raises(UserError, match=r"^this run has a data file, .*: set \[trainer\] data$"):
        requirements.files_to_publish(run, None)
    own.write_bytes(MATH + b"\n")
    with pytest.raises(UserError, match=r"data\.jsonl: not the data file of this run .*: put the original back"):
        requirements.files_to_publish(run, own)
    own.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        requirements.files_to_publish(run, own)


def test_runs_without_data_require_none_and_an_environment_of_a_later_program_is_unknown() -> None:
    assert requirements.files_to_publish(run_manifest(), None) == {}
    assert requirements.file_reference(None) is None
    assert requirements.open_sandbox(run_manifest(environment=task(built_in_spec("sat")))) is None
    with pytest.raises(PluginError, match="unknown environment 'chess'; there are: addition, "):
        requirements.open_sandbox(run_manifest(environment=task(name="chess")))
