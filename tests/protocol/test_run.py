"""Run manifests, announcements and adapters: contradictory or invalid fields are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol import environments, limits
from protocol.chain.verifier import ChainVerifier
from protocol.encoding import pack, unpack
from protocol.environments.record import EnvironmentShare
from protocol.errors import ChainError, MalformedError
from protocol.identity.participant import Announcement
from protocol.objects import ObjectRef
from protocol.run import FileRef, RunManifest
from tests.protocol.signed_chain import Trainer, chain, follow
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID, digest, environment, lora, run_manifest

DATA = FileRef(name="data.jsonl", digest=samples.digest("data"), size=limits.MAX_DATA_BYTES)


def test_a_run_has_a_data_file_if_its_environment_reads_one() -> None:
    for name in environments.data_names:
        task = samples.task(name=name)
        assert RunManifest.from_bytes(run_manifest(environment=task, data=DATA).to_bytes()).data == DATA
        with pytest.raises(ValidationError, match="no data file for one that does"):
            run_manifest(environment=task)
    for name in environments.names:
        with pytest.raises(ValidationError, match="does not read"):
            run_manifest(environment=samples.task(name=name), data=DATA)


@pytest.mark.parametrize("data", [None, DATA])
def test_an_unsupported_environment_is_not_checked(data: FileRef | None) -> None:
    assert run_manifest(environment=samples.task(name="chess"), data=data).data == data


def mixture(*members: tuple[int, str], **changes: Any) -> tuple[EnvironmentShare, ...]:
    return tuple(EnvironmentShare(ppm=ppm, environment=environment(name=name, **changes)) for ppm, name in members)


def test_a_mixture_has_one_data_file_and_counts_as_exact_if_every_member_does() -> None:
    task = mixture((300_000, "addition"), (700_000, "math"))
    run = run_manifest(environment=task, data=DATA)
    assert RunManifest.from_bytes(run.to_bytes()).environment == task
    assert run.task_name == "addition=300000,math=700000"
    assert run.exact_rewards
    inexact = mixture((1, "code-3.11"), exact=False)
    assert not run_manifest(environment=(*mixture((999_999, "addition")), *inexact), data=DATA).exact_rewards
    with pytest.raises(ValidationError, match="no data file for one that does"):
        run_manifest(environment=task)
    with pytest.raises(ValidationError, match="several environments that read a data file"):
        run_manifest(environment=mixture((300_000, "code-3.11"), (700_000, "math")), data=DATA)
    with pytest.raises(ValidationError, match="an episode that the environment does not play"):
        run_manifest(environment=mixture((300_000, "addition"), (700_000, "wordle")))


HOSTILE_MIXTURES = {
    "shares of less": (mixture((1, "addition"), (999_998, "sat")), "add up to 1000000"),
    "shares of more": (mixture((1_000_000, "addition"), (1, "sat")), "add up to 1000000"),
    "unordered": (mixture((1, "sat"), (999_999, "addition")), "strictly ascend"),
    "one twice": (mixture((1, "sat"), (999_999, "sat")), "strictly ascend"),
    "none": ((), "at least 1 item"),
    "too many": (mixture(*((62_500 - (n == 16) * 62_499, f"a{n:02}") for n in range(17))), "at most 16 items"),
    "two Pythons": (
        (*mixture((1, "a"), python="3.11"), *mixture((999_999, "b"), python="3.12")),
        "several versions of Python",
    ),
}


@pytest.mark.parametrize(("task", "reason"), HOSTILE_MIXTURES.values(), ids=HOSTILE_MIXTURES)
def test_a_hostile_mixture_is_refused(task: tuple[EnvironmentShare, ...], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        run_manifest(environment=task)


def test_a_mixture_of_mixtures_and_shares_out_of_range_are_refused_as_bytes() -> None:
    body = unpack(run_manifest(environment=mixture((999_999, "addition"), (1, "sat"))).to_bytes())
    (first, second) = body["environment"]
    changes = [[first, {**second, "environment": [second]}], [first, {**second, "environment": first}], [second] * 2]
    changes += [[{**first, "ppm": ppm}, second] for ppm in (0, -1, 1_000_001, 0.5, True, None)]
    for change in changes:
        with pytest.raises(MalformedError):
            RunManifest.from_bytes(pack(body | {"environment": change}))


def test_times_of_a_window() -> None:
    manifest = run_manifest()
    assert manifest.deadline_time(2) - manifest.opening_time(2) == pytest.approx(18.0)
    assert manifest.window_at(manifest.opening_time(5) + 0.5) == 5
    assert manifest.window_at(manifest.opening_time(5) - 0.5) == 4


@pytest.mark.parametrize(
    "space",
    [
        "",
        "https://pub-1a2b.r2.dev",
        "https://bucket.s3.eu-west-1.amazonaws.com/run",
        "https://account.example.org:8443/bucket/a_b/c~d",
        "https://host:1",
        "https://host:65535/a",
        "http://127.0.0.1:9000/bucket",
        "http://localhost/bucket",
    ],
)
def test_valid_space_urls(space: str) -> None:
    announcement = samples.announcement(space=space)
    assert Announcement.from_bytes(announcement.to_bytes()).space == space


# Adapters in a run manifest, and the tables of versions that a run of adapters allows


M = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN, UP = (f"{M}.lora_A.weight", "BF16", (4, 32)), (f"{M}.lora_B.weight", "BF16", (16, 4))


def test_a_target_is_the_end_of_a_modules_name() -> None:
    adapters = lora(targets=("mlp.up_proj", "q_proj"))
    for name in ("model.layers.0.self_attn.q_proj", "q_proj", "model.layers.3.mlp.up_proj"):
        assert adapters.is_target(name)
    for name in ("model.layers.3.other.up_proj", "model.layers.0.self_attn.my_q_proj"):
        assert not adapters.is_target(name)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((("model.norm.weight", "BF16", (32,)),), "none of the run's adapters"),
        ((DOWN, UP, ("model.layers.0.self_attn.q_proj.weight", "BF16", (16, 32))), "none of the run's adapters"),
        ((DOWN, (M + ".lora_B.bias", "BF16", (16, 4))), "half an adapter|none of the run's"),
        (((M.replace("q_proj", "k_proj") + ".lora_A.weight", "BF16", (4, 32)),), "none of the run's adapters"),
        (((M.removeprefix("base_model.model.") + ".lora_A.weight", "BF16", (4, 32)),), "none of the run's adapters"),
        ((DOWN,), "half an adapter"),
        ((UP,), "half an adapter"),
        (((DOWN[0], "BF16", (5, 32)), UP), "not an adapter of the run's rank"),
        ((DOWN, (UP[0], "BF16", (4, 16))), "not an adapter of the run's rank"),
        ((DOWN, (UP[0], "F32", (16, 4))), "not in BF16"),
        ((DOWN, (UP[0], "BF16", (16, 4, 1))), "not an adapter of the run's rank"),
        (((DOWN[0], "BF16", (4, 1 << 38)), UP), "larger than the base allows"),
        ((DOWN, (UP[0], "BF16", (900, 4))), "larger than the base allows"),
    ],
    ids=str,
)
def test_other_tables_are_refused(tensors: Any, message: str) -> None:
    lora().check_table((DOWN, UP), "here")
    with pytest.raises(ChainError, match=message):
        lora(shards=(ObjectRef(digest=digest("shard"), size=2048),)).check_table(tensors, "here")


def test_a_version_of_other_tensors_is_refused_by_its_manifest() -> None:
    """Nothing of the version has been fetched then."""
    run = run_manifest(lora=lora())
    follow(ChainVerifier(RUN_ID, run), Trainer().add(tensors=(DOWN, UP)).add(tensors=(DOWN, UP)))
    with pytest.raises(ChainError, match="none of the run's adapters"):
        follow(ChainVerifier(RUN_ID, run), chain(2))
