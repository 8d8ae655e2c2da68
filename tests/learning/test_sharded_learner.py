"""A learner on several ranks: the steps of one process, its files, and ranks that die."""

import hashlib
import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import trio

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.node.process_launch import Seat
from grailnode.node.supervisor import ProcessSpec, Supervisor
from grailnode.store.local import LocalStore
from protocol.chain import safetensors
from protocol.digest import digest_weights
from protocol.outer.local_work import encode_work, masters, with_masters, without_masters
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import Payload
from protocol.quantization import Precision
from roles.ports import StateError
from roles.trainer.learn.checkpoint_files import CheckpointNote, checkpoint_folder, newest_checkpoint, put_checkpoint
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.loss.loss_settings import LossSettings
from roles.trainer.learn.state_rows import SavedRows
from roles.trainer.outer.local_steps import LocalLearner
from roles.trainer.spool import weights_folder
from roles.trainer.tensor_shards import WrittenWeights
from tests.support.builders.policies import random_weights, write_policy
from tests.support.builders.samples import round_rules
from tests.support.processes.programs import eventually
from tests.support.processes.ranks import (
    SETTINGS,
    Ranks,
    Tensors,
    assert_equal,
    assert_same_run,
    go_on,
    group,
    groups_of,
    run_ranks,
    train,
)
from tests.support.simulation.virtual_clock import running

MUON = replace(SETTINGS, optimizer=SETTINGS.optimizer.model_copy(update={"optimizer": "muon"}))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy")).directory


def alone(policy: Path, settings: LearnerSettings = SETTINGS, dtype: torch.dtype = torch.float32) -> Learner:
    model = build(Policy.load(policy), recompute=True)
    return Learner(model, random_weights(model), settings, dtype=dtype)


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        replace(SETTINGS, max_batch_tokens=8192, ranks=2),
        replace(SETTINGS, max_batch_tokens=8192, ranks=2, packing=True),
        MUON,
    ],
    ids=["full", "few", "packed", "muon"],
)
def test_two_ranks_with_a_pass_each_take_the_steps_of_one_process_bit_for_bit(
    policy: Path, settings: LearnerSettings
) -> None:
    """With full passes, and with tokens for one pass, which is divided between the ranks."""
    trained = run_ranks(2, policy, settings, train, None, 0, 4)
    assert_same_run(trained, train(alone(policy, settings), None, 0, 4))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_models_of_transformers_are_gathered_layer_by_layer(tmp_path: Path, family: str) -> None:
    from tests.support.builders.families import write_family  # it imports transformers

    write_family(tmp_path, family)
    assert len(build(Policy.load(tmp_path), recompute=True).layers) == 2
    trained = run_ranks(2, tmp_path, SETTINGS, train, None, 0, 2)
    assert_same_run(trained, train(alone(tmp_path), None, 0, 2))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, MUON], ids=["adamw", "muon"])
def test_a_run_goes_on_from_what_ranks_on_two_hosts_have_saved(
    policy: Path, tmp_path: Path, settings: LearnerSettings
) -> None:
    """Of three ranks one has no pass, and tensors are divided unevenly."""
    expected_views, _ = train(alone(policy, settings), None, 0, 4)
    hosts, saved = [tmp_path / "a", tmp_path / "b"], None
    for host in hosts:
        host.mkdir()
    for last, count in enumerate((1, 2, 3, 1), 1):
        if count == 1:
            shutil.copytree(hosts[1], hosts[0], dirs_exist_ok=True)
            views, saved = go_on(alone(policy, settings), hosts[0], saved, last)
        else:
            views, saved = run_ranks(count, policy, settings, go_on, hosts[0], saved, last, states=hosts)
        assert len(saved.parts) == count
        assert_equal(views[-1], expected_views[last - 1])


def load_missing(learner: Learner, directory: Path, saved: SavedRows) -> str:
    try:
        go_on(learner, directory, saved, 3)
    except StateError as error:
        return str(error)
    return ""


def test_each_rank_writes_its_rows_on_its_host_and_a_host_that_has_lost_them_is_named(
    policy: Path, tmp_path: Path
) -> None:
    hosts = [tmp_path / "a", tmp_path / "b"]
    for host in hosts:
        host.mkdir()
    old = hosts[1] / checkpoint_folder(1, 0) / "00001" / "00000"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of a run that was killed")
    _, saved = run_ranks(2, policy, SETTINGS, go_on, hosts[0], None, 2, states=hosts)
    files = [sorted(path.relative_to(host) for path in host.glob("checkpoints/*/*/*")) for host in hosts]
    assert [{path.parts[2] for path in paths} for paths in files] == [{"00000"}, {"00001"}]
    sizes = [sum((host / path).stat().st_size for path in paths) for host, paths in zip(hosts, files, strict=True)]
    state = alone(policy).state()
    assert sum(sizes) == pytest.approx(sum(tensor.nbytes for tensor in state.values()), rel=0.1)
    assert max(sizes) < 0.6 * sum(sizes)
    (hosts[1] / files[1][0]).unlink()
    error = run_ranks(2, policy, SETTINGS, load_missing, hosts[0], saved, states=hosts)
    assert "00001/: not in the state of this host" in error


def put_version(learner: Learner, directory: Path) -> WrittenWeights:
    return trio.run(learner.put_version, LocalStore(directory), weights_folder(1), trio.to_thread.run_sync, 4096)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_each_host_writes_a_range_of_the_files_of_a_version(policy: Path, tmp_path: Path, precision: Precision) -> None:
    hosts = [tmp_path / "a", tmp_path / "b", tmp_path / "alone"]
    old = hosts[1] / weights_folder(1) / "00000"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"of a process that was killed")
    several = run_ranks(2, policy, SETTINGS, put_version, hosts[0], states=hosts[:2], precision=precision)
    model = build(Policy.load(policy), recompute=True)
    alone = put_version(Learner(model, random_weights(model), SETTINGS, precision=precision), hosts[2])
    written = [{path.name: path.read_bytes() for path in host.glob("weights/*/*")} for host in hosts]
    assert written[0] | written[1] == written[2]
    assert written[0] and written[1] and max(written[0]) < min(written[1])
    tensors = [[item for file in files.values() for item in safetensors.read(file).items()] for files in written]
    first, second, whole = (digest_weights(dict(items)) for items in tensors)
    assert several == WrittenWeights(alone.files, (first, second))
    assert alone.digests == (whole,)


@pytest.mark.slow
def test_more_passes_than_ranks_give_the_same_gradients_but_for_the_order_of_the_sum(policy: Path) -> None:
    """Also with a reference policy, and with logits in chunks."""
    settings = replace(SETTINGS, max_batch_tokens=1, logits_chunk=2, loss=LossSettings(kl_coefficient=0.1))
    (view, _), state = run_ranks(2, policy, settings, train, None, 0, 2)
    (expected_view, _), expected_state = train(alone(policy, settings), None, 0, 2)
    for name, tensor in state.items():
        if name.startswith("exp_avg/"):
            torch.testing.assert_close(tensor, expected_state[name], rtol=1e-3, atol=1e-6)
    different = sum(int((tensor != expected_view[name]).sum()) for name, tensor in view.items())
    assert different < sum(tensor.numel() for tensor in view.values()) / 100


@pytest.mark.slow
def test_ranks_that_compute_in_bfloat16_agree(policy: Path) -> None:
    runs = [run_ranks(count, policy, SETTINGS, train, None, 0, 2, dtype=torch.bfloat16) for count in (1, 2)]
    assert_equal(runs[0][0][-1], runs[1][0][-1])


def refuse(learner: Learner) -> tuple[list[str], list[Tensors]]:
    """Give a learner what it must refuse, and take a step after it."""
    errors, state = [], learner.state()
    weight = min(name for name in state if name.startswith("master/"))
    infinite = group("c", rewards=(1.0, float("inf")))
    for attempt in (
        lambda: learner.restore(state | {weight: torch.zeros(1)}),
        lambda: learner.restore(state | {"master/other": torch.zeros(1)}),
        lambda: learner.gradients([]),
        lambda: learner.update(learner.gradients([infinite])),
    ):
        try:
            attempt()
        except ValueError as error:
            errors.append(str(error))
    return errors, train(learner, None, 0, 1)[0]


def test_what_is_refused_changes_nothing_on_any_rank(policy: Path) -> None:
    errors, views = run_ranks(2, policy, SETTINGS, refuse)
    assert errors[:3] == ["a saved state of another model or optimizer"] * 2 + ["no tokens to learn from"]
    assert errors[3].startswith("the gradient's norm is")
    assert_equal(views[0], train(alone(policy), None, 0, 1)[0][0])


def save_without_end(learner: Learner, directory: Path) -> None:
    """Take steps, and write a checkpoint after each."""
    state = LocalStore(directory)
    save = partial(learner.save, state, trio.to_thread.run_sync, 4096)
    while True:
        train(learner, None, learner.steps, learner.steps + 1)
        trio.run(put_checkpoint, state, (learner.steps, learner.steps), save, b"")


def newest_note(directory: Path) -> CheckpointNote | None:
    return trio.run(newest_checkpoint, LocalStore(directory))


def stops_amid_a_checkpoint(pid: int, hosts: list[Path]) -> bool:
    """Stop rank 1, and let it go on unless it has written some files, not all, of a checkpoint behind a whole one."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: "State:\tT" in Path(f"/proc/{pid}/status").read_text(), "the rank stops")
    note, files = newest_note(hosts[0]), Counter(path.parts[-3] for path in hosts[1].glob("checkpoints/*/00001/*"))
    newest = max(files, default="")
    if note is not None and newest not in note.folder and files[newest] < note.parts[1]:
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_a_run_goes_on_from_its_last_whole_checkpoint_if_a_rank_is_killed_while_it_writes_the_next(
    policy: Path, tmp_path: Path
) -> None:
    """All ranks end. As many go on from it, and one more."""
    hosts = [tmp_path / "a", tmp_path / "b"]
    for host in hosts:
        host.mkdir()
    with Ranks(2, policy, SETTINGS, save_without_end, hosts[0], states=hosts) as ranks:
        pid = ranks.processes[1].pid
        assert pid is not None
        eventually(partial(stops_amid_a_checkpoint, pid, hosts), "a part of a checkpoint")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EOFError):
            ranks.answer()
    note = newest_note(hosts[0])
    assert note is not None
    expected_views, _ = train(alone(policy), None, 0, note.step + 2)
    for count in (3, 2):
        views, _ = run_ranks(count, policy, SETTINGS, go_on, hosts[0], note.rows, note.step + 2, states=hosts)
        assert_equal(views[-1], expected_views[-1])


def sit(directory: Path, seat: Seat) -> None:
    """Write down who sits where, and stay."""
    name = f"{hashlib.sha256(seat.meeting.encode()).hexdigest()}-{seat.rank}-{seat.count}-{os.getpid()}"
    (directory / name).touch()
    signal.pause()


async def test_the_supervisor_starts_all_ranks_again_when_one_ends(tmp_path: Path) -> None:
    """Each start has a meeting of its own, so that a late rank of the last start joins nobody."""
    lines: list[str] = []

    def seated() -> set[tuple[str, ...]]:
        return {tuple(path.name.split("-")) for path in tmp_path.iterdir()}

    with trio.fail_after(60):
        async with running(
            Supervisor(lines.append).keep,
            [ProcessSpec("ranks", sit, (tmp_path,), [Seat(0, 2, "", 2), Seat(1, 2, "", 2)])],
        ):
            while len(seated()) < 2:
                await trio.sleep(0.02)
            first = seated()
            os.kill(next(int(pid) for _, rank, _, pid in first if rank == "1"), signal.SIGKILL)
            while len(seated()) < 4:
                await trio.sleep(0.02)
            second = seated() - first
    for seats in (first, second):
        assert {(rank, count) for _, rank, count, _ in seats} == {("0", "2"), ("1", "2")}
        assert len({meeting for meeting, *_ in seats}) == 1
    assert {meeting for meeting, *_ in first} != {meeting for meeting, *_ in second}
    assert not [pid for *_, pid in first | second if Path(f"/proc/{pid}").exists()]
    (line,) = lines
    assert line.startswith("ranks ended (killed by SIGKILL")


def contributions(local: LocalLearner) -> list[Payload]:
    """Return the payloads of two rounds of two local steps, with their error feedback."""
    state = local.state()
    shared, rules = SharedState.begin(masters(state), has_momentum=True), round_rules()
    inner: Tensors = without_masters(state)
    feedback: Tensors | None = None
    payloads: list[Payload] = []
    for number in range(2):
        local.restore(with_masters(inner, shared.weights))
        for step in range(2):
            local.step(groups_of(2 * number + step))
        work = encode_work(shared, local.state(), feedback, rules, bytes(32))
        inner, feedback = dict(work.inner), work.feedback
        payloads.append(work.payload)
        shared = shared.after([work.payload], [1.0], rules)
    return payloads


@pytest.mark.slow
def test_a_site_on_two_ranks_contributes_what_one_process_does(policy: Path) -> None:
    expected = contributions(alone(policy))
    assert sum(map(len, expected[1])) > 500
    assert run_ranks(2, policy, SETTINGS, contributions) == expected
