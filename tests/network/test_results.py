"""What comes out of a run: an exported checkpoint, the rollouts of a window, and a mirror of a trainer's space."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from grailnode import UserError
from grailnode.cli.actions.model_export import export_version
from grailnode.cli.actions.offline_training import make_learner, take_steps
from grailnode.cli.actions.policy_evaluation import asked_task, serve_newest
from grailnode.cli.actions.run_reading import select
from grailnode.config import Config
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.observe.rollout_reader import ReadWindow, find_miners, read_rollouts, read_verified_groups
from grailnode.run import creation
from grailnode.run.creation import model_files, publish_files
from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import digest_weights
from protocol.errors import ProtocolError
from protocol.judging.ledger import Evaluation, Summary
from roles.policy.follower import Follower
from roles.policy.mirroring import Mirror
from roles.policy.serving import serve
from roles.ports import NotFoundError
from roles.records import fetch_record
from roles.trainer.learn.learner import StepReport
from roles.validator.evaluation import evaluate
from tests.support.attacked_nodes.follower import follow_chain
from tests.support.builders.chains import TRAINER as FOLLOWED_TRAINER
from tests.support.builders.recipes import demo_rules
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.faults.full_disk import free_space
from tests.support.simulation.network import Network, inline, key
from tests.support.simulation.network_runs import RULES as LONG_GROUPS
from tests.support.simulation.network_runs import run_nodes
from tests.support.simulation.virtual_clock import simulate

RULES = demo_rules(groups=4, group_size=4)
WINDOW = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Play a network with an honest miner and a cheat; return what was read from its store, by name."""
    return simulate(play, tmp_path_factory.mktemp("export"))


async def play(directory: Path) -> dict[str, Any]:
    values: dict[str, Any] = {"directory": directory}
    network = Network(RULES)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_cheat)
        await network.until_window(WINDOW + 4)
    await publish_files(network.store, key("trainer").public, model_files(network.policy.directory))
    values["policy"] = network.policy
    node = network.node("observer")
    tokenizer = network.policy.tokenizer
    values["rollouts"] = await read_rollouts(node, tokenizer, WINDOW, await find_miners(node))
    for text in (key("miner-1").public.hex()[:8].upper(), "miner-1", "cheat"):
        values[text] = await find_miners(node, text)
    with pytest.raises(UserError, match=r"--miner zz: no miner has this name.*(cheat.*miner-1|miner-1.*cheat)"):
        await find_miners(node, "zz")
    values["verified"] = [group for window in range(WINDOW + 3) for group in await read_verified_groups(node, window)]
    values["trained on"] = [event["groups"] for event in network.events("trainer/training", "step")]
    values["run"] = network.run
    values["newest"] = await export_version(node, directory / "newest")
    values["first"] = await export_version(node, directory / "first", version=0)
    with pytest.raises(UserError, match="the newest version is"):
        await export_version(node, directory / "later", version=1000)
    with free_space(10_000), pytest.raises(UserError, match=r"full: cannot be written .*File too large"):
        await export_version(node, directory / "full")
    assert sorted(path.name for path in directory.iterdir()) == ["first", "newest"]
    values["evaluations"] = await evaluations(network, directory.with_name("files"))
    return values


async def evaluations(network: Network, files: Path) -> list[Evaluation]:
    """Return a validator's evaluation of a version, and those of `grailnode evaluate` of this and another task."""
    node = network.node("observer")
    path = paths.summary(key("validator-0").public, WINDOW)
    published = (await fetch_record(node, Summary, path)).record.evaluation
    assert published is not None
    results, version = [published], published.version
    async with serve_newest(node, Config(), files) as served:
        assert served.follower is not None
        assert served.engine.version == (await network.head()).version > version
        await serve(node, served.engine, await served.follower.rebuild(version))
        for values in ({}, {"environment": "countdown"}, {"max_tokens": 1}):
            task = asked_task(served, network.run.evaluation, values)
            results.append(await evaluate(replace(task, run_sync=inline), served.engine, version))
    return results


def test_an_evaluation_of_a_version_is_what_its_validators_publish(results: dict[str, Any]) -> None:
    published, own, other_task, one_token = results["evaluations"]
    assert own == published
    assert own.pass_at(1) > other_task.pass_at(1) == one_token.pass_at(1) == 0


def test_transformers_and_another_run_load_the_exported_weights_bit_for_bit(results: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    newest, directory = results["newest"], results["directory"] / "newest"
    assert newest.version > 0
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, local_files_only=True)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == newest.weights.keys()
    for name, tensor in newest.weights.items():
        assert torch.equal(parameters[name].view(torch.int16), tensor.view(torch.int16)), name
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tuple(tokenizer("12+34=").input_ids) == results["policy"].tokenizer.encode("12+34=")
    assert digest_weights(load_weights(directory)) == newest.digest
    assert Policy.load(directory).stops == results["policy"].stops


def test_verified_groups_are_those_that_the_trainer_learned_from(results: dict[str, Any]) -> None:
    digests = {group.digest.hex()[:16] for group in results["verified"]}
    used = {digest for groups in results["trained on"] for digest in groups.split(",")}
    assert len(used & digests) > 4
    assert all(len(group.completions) == RULES.group_size for group in results["verified"])
    assert {reward for group in results["verified"] for reward in group.rewards} == {0.0, 1.0}


def test_offline_training_takes_the_steps_of_a_trainer(results: dict[str, Any]) -> None:
    run, directory = results["run"], results["policy"].directory
    groups = [group for group in results["verified"] if group.informative][:6]

    def reports() -> list[StepReport]:
        return list(take_steps(make_learner(Config(), run, directory), groups, 2))

    first = reports()
    assert [report.step for report in first] == [1, 2, 3]
    assert all(report.grad_norm > 0 for report in first)
    assert first == reports()
    with pytest.raises(UserError, match="2 groups, and a step needs 3; read more windows"):
        next(take_steps(make_learner(Config(), run, directory), groups[:2], 3))


def test_version_0_is_the_policy_that_the_run_began_with(results: dict[str, Any]) -> None:
    assert results["first"].digest == digest_weights(load_weights(results["policy"].directory))


def test_the_card_names_run_version_digests_and_curve(results: dict[str, Any]) -> None:
    card = (results["directory"] / "newest" / "README.md").read_text()
    assert results["newest"].digest.hex() in card
    assert f"version {results['newest'].version}" in card
    assert "| window | version | mean reward | held-out pass@1 |" in card


def test_rollouts_have_text_reward_and_reason(results: dict[str, Any]) -> None:
    read: ReadWindow = results["rollouts"]
    assert not read.unread
    honest = [rollout for rollout in read.rollouts if rollout.miner == key("miner-1").public]
    cheating = [rollout for rollout in read.rollouts if rollout.miner == key("cheat").public]
    assert honest
    assert {rollout.status for rollout in honest} == {"accepted by 1"}
    assert {rollout.prompt[-1] for rollout in honest} == {"="}
    assert all(len(rollout.completion) > 0 for rollout in honest)
    assert {rollout.reward for rollout in honest} <= {0.0, 1.0}
    assert cheating
    assert {rollout.status for rollout in cheating} == {"rejected: copied", "not judged"}


def test_a_miner_is_found_by_its_key_and_by_its_name(results: dict[str, Any]) -> None:
    assert results[key("miner-1").public.hex()[:8].upper()] == results["miner-1"] == [key("miner-1").public]
    assert results["cheat"] == [key("cheat").public]


def test_selections(results: dict[str, Any]) -> None:
    published = results["rollouts"].rollouts
    best, worst = select(published, "best"), select(published, "worst")
    assert [r.reward for r in best] == sorted((r.reward for r in published), reverse=True)
    assert [r.reward for r in worst] == sorted(r.reward for r in published)
    assert {r.miner for r in select(published, "rejected")} == {key("cheat").public}
    assert select(published, None) == list(published)


# A mirror of a trainer's space: whoever reads the copy alone follows the same chain to the same weights


TRAINER = key("trainer").public


async def test_a_copy_leads_to_the_trainers_weights_also_after_a_restart_of_the_mirror() -> None:
    network, copy = Network(LONG_GROUPS), MemoryStore()
    await creation.publish_files(network.store, TRAINER, creation.model_files(network.policy.directory))
    unknown = paths.patch(TRAINER, bytes(32))
    async with run_nodes(network):
        await network.until_window(3)
        await Mirror(network.node("mirror"), copy).copy()
        await copy.put(unknown, b"of a head that is long past")
        await network.until_window(6)
        restarted = Mirror(network.node("mirror"), copy)
        await restarted.copy()
        assert await copy.get(unknown, 100)  # readers of the copy may still use it
        await network.until_window(7)
        await restarted.copy()
        copied = network.events("mirror", "mirrored")
        digests = []
        for store in (network.store, copy):
            follower = await Follower(network.node("reader", store=store)).open()
            await follower.refresh()
            digests.append((await follower.rebuild(copied[-1]["version"])).digest)
    assert digests[0] == digests[1]
    fetched = [event["fetched"] for event in network.events("mirror", "anchor-mirrored")]
    assert fetched == [1] + [0] * (len(fetched) - 1)  # the copy computes later anchors from patches
    assert len(fetched) > 1
    assert copied[0]["version"] < copied[1]["version"] < copied[-1]["version"]
    assert 0 < copied[1]["copied"] < copied[1]["objects"]  # what the copy had already was not fetched again
    names = {info.path async for info in copy.list(paths.writer_prefix(TRAINER))}
    assert unknown not in names
    assert paths.head(TRAINER) in names
    await network.store.delete(paths.head(TRAINER))
    for mirror in (restarted, Mirror(network.node("mirror"), MemoryStore())):
        with pytest.raises(NotFoundError):  # an origin that is gone
            await mirror.copy()


async def test_one_trainers_broken_space_does_not_stop_the_copy_of_another() -> None:
    network, copy, broken = Network(LONG_GROUPS), MemoryStore(), key("broken").public
    authority = network.run.authority.model_copy(update={"trainers": (broken, TRAINER)})
    network.amend(authority=authority)
    await creation.publish_files(network.store, TRAINER, creation.model_files(network.policy.directory))
    await network.store.put(paths.head(broken), b"no head")
    async with run_nodes(network):
        await network.until_window(3)
        with pytest.raises(ProtocolError):
            await Mirror(network.node("mirror"), copy).copy()
    assert await copy.get(paths.head(TRAINER), 1 << 20)


@pytest.mark.parametrize("is_new", [True, False], ids=["from the start", "from an anchor on"])
async def test_a_target_that_refuses_anchors_is_tried_more_and_more_rarely(is_new: bool) -> None:
    """Each try computes an anchor, or fetches it from the trainer."""
    testbed = await follow_chain()
    await creation.publish_files(testbed.store, FOLLOWED_TRAINER.public, creation.model_files(PACKAGED_POLICY))
    anchors = paths.kind_prefix(FOLLOWED_TRAINER.public, "anchors")
    target = UnreachableStore(MemoryStore(), anchors, operations=["put"], is_away=is_new)
    mirror = Mirror(testbed.node, target)
    if not is_new:
        await mirror.copy()
        await testbed.publish(anchor=True)
        target.is_away = True
    with trio.move_on_after(1800):
        await mirror.keep(poll_seconds=1.0)
    assert target.refusals < 30
    target.is_away = False
    await trio.sleep(600)
    await mirror.copy()
    assert [info.path async for info in target.list(anchors)]
