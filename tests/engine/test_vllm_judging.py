"""With the real vLLM, a validator judges miners right, a pair is calibrated, and the miners of a demo are believed."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.variants import Variant, VllmServers, VllmVariant, run_pairs
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.vllm.installation import installed_version
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.ui.report_data import DemoReport
from protocol import environments
from protocol.proof import Arithmetic
from protocol.rollout.batch import assemble
from protocol.rollout.sampling import SamplingParams
from protocol.run import EpisodeSpec
from roles.miner.produce import HonestProducer
from tests.engine.engine_contract import serve
from tests.engine.vllm_site import BendableServer, refuse_restarts, shared_server, vllm_python
from tests.support.adversaries.false_episodes import CHEATS as CHEATS_OF_EPISODES
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.adversaries.miners import ADVERSARIES
from tests.support.builders.proofs import LENIENT, packaged_thresholds, proof_of, with_thresholds
from tests.support.measuring.pair_measurements import measure_pair
from tests.support.processes.programs import ENVIRONMENT, run_program

CHEATS = (
    *("own noise", "special tokens", "one edited token in 10% of rollouts", "tokens outside the vocabulary"),
    *("forced end of sequence", "draft model of half the depth, full prefill", "4-bit weights", "one layer skipped"),
    *("random sketch", "sketch of another position", "prompt tampered with, the due one shown", "false reward"),
)
FALSE = ("forged-reply", "noise-begun-again")  # of the cheats in episodes
HONEST = ("miner-1", "miner-2")
MINER: Arithmetic = "torch-float32"
VALIDATOR: Arithmetic = "vllm-float32"

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BendableServer]:
    server = shared_server(PACKAGED_POLICY, tmp_path_factory.mktemp("server"))
    yield server
    server.end()


@pytest.fixture
async def harness(server: BendableServer, tmp_path: Path) -> AsyncIterator[TrialHarness]:
    """Return a harness whose miners compute with torch, and whose validator does with vLLM."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    engine = VllmEngine(build(policy), server, tmp_path, report=refuse_restarts)
    try:
        await serve(engine, weights)
        rows = packaged_thresholds(MINER, VALIDATOR), packaged_thresholds(VALIDATOR, VALIDATOR)
        yield TrialHarness(
            PolicyHistory(policy, 0, lambda version: weights),
            environments.get("addition"),
            proof_of(*rows, miners=(MINER,)),
            max_tokens=8,
            groups=10,
            declaration=MINER,
            judging_engine=engine,
        )
    finally:
        await engine.close()


async def test_honest_miners_are_accepted_and_cheats_refused_for_what_they_did(harness: TrialHarness) -> None:
    for window in range(3):
        outcome = await harness.honest_trial(harness.miner, window)
        assert (outcome.accepted, outcome.reasons) == (harness.groups, {})
    for name in CHEATS:
        outcome = await harness.trial(ADVERSARIES[name].producer(harness), 0)
        assert ADVERSARIES[name].explains(outcome.reasons), (name, outcome.reasons)


async def test_rollouts_are_continued_from_their_first_miss(harness: TrialHarness) -> None:
    lenient = replace(harness, proof=with_thresholds(harness.proof, **LENIENT))
    outcome, expected = await lenient.luck(ADVERSARIES["forced end of sequence"].producer(lenient), 0)
    assert outcome == expected
    assert outcome.counts.luck.trials


async def test_episodes_are_played_with_vllm_and_cheats_in_them_are_refused(harness: TrialHarness) -> None:
    """vLLM plays turns behind replies, and it judges these episodes as torch does."""
    episode = EpisodeSpec(turns=6, turn_tokens=3, reply_tokens=8, tokens=58)
    wordle = replace(
        harness, environment=environments.get("wordle"), max_tokens=18, group_size=4, groups=2, episode=episode
    )
    vllm = harness.judging_engine
    assert vllm is not None
    for name, make in {"honest": HonestProducer, **{name: CHEATS_OF_EPISODES[name][0] for name in FALSE}}.items():
        groups = await make(wordle.task, vllm).produce(wordle.mining_window(0), range(2))
        assert max(len(rollout.turns) for group in groups for rollout in group.rollouts) > 1  # type: ignore[union-attr]
        outcome = await wordle.judge(*assemble(groups, MINER), wordle.miner)
        reasons = {} if name == "honest" else {CHEATS_OF_EPISODES[name][1].value: 2}
        assert outcome.reasons == reasons, name


async def test_a_pair_with_vllm_is_measured(tmp_path: Path) -> None:
    """vLLM in float32 is as far from torch as another batch is, and serves a copy as well as the policy."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    prompts = environments.get("addition")
    work = CalibrationTask(policy, SamplingParams(1.0, 8, policy.stops), 8, lambda seed: prompts.problem(seed).prompt)
    python = vllm_python()
    pair = run_pairs(VllmVariant(python, tmp_path, installed_version(python)), Variant())[0]
    assert str(pair.generating).startswith("vllm 0.")

    servers = VllmServers()
    try:
        honest = [group async for group in measure_pair(work, pair, weights, 8, servers=servers)]
        other = {name: tensor * 1.05 for name, tensor in weights.items()}
        copied = [group async for group in measure_pair(work, pair, weights, 8, copy=other, servers=servers)]
    finally:
        await servers.close()

    assert max(float(group.shifts.max()) for group in honest) < 0.001
    assert max(float(group.shifts.max()) for group in copied) > 0.001


def test_miners_with_vllm_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is found where `grailnode engine install` puts it by default."""
    (tmp_path / "grailnode").mkdir()
    (tmp_path / "grailnode" / "vllm").symlink_to(vllm_python().parents[1])
    monkeypatch.setitem(ENVIRONMENT, "XDG_DATA_HOME", str(tmp_path))
    accepted: dict[str, int] = {}
    for windows in (8, 40):  # windows have a fixed length: a busy machine needs more of them to show as much
        out = tmp_path / f"out-{windows}"
        result = run_program("demo", "--windows", str(windows), "--seed", "3", "--out", str(out), "--engine", "vllm")
        assert result.returncode == 0, result.stdout + result.stderr
        report = DemoReport.model_validate_json((out / "report.json").read_bytes())
        groups = {miner.name: miner for miner in report.state.miners}
        assert not any(groups[name].rejected for name in HONEST if name in groups)
        assert "cheat" not in groups or groups["cheat"].accepted == 0
        accepted = {name: groups[name].accepted for name in HONEST if name in groups}
        if len(accepted) == len(HONEST) and min(accepted.values()) > 0:
            return
    pytest.fail(f"accepted groups of the miners with vLLM: {accepted}")
