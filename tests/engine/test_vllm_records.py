"""Records of what vLLM drew agree with its answers where it goes beyond them, or computes a request several times."""

import base64
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import trio
import trio.testing

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.vllm.inside.hidden_taps import WIDTHS, checked
from grailnode.engine.vllm.inside.request_records import GIVEN, CheckArguments, RequestArguments, RequestRecords
from grailnode.engine.vllm.inside.row_sampling import DrawnRows
from grailnode.engine.vllm.vllm_client import BrokenEngineError, GenerationCall, RefusedCommandError, VllmClient
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ExternalServer
from protocol.rollout.checking import CheckRules
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError, Request
from tests.engine.engine_contract import serve
from tests.engine.vllm_site import SHORT_MEMORY, BendableServer, check_preempted, refuse_restarts, shared_server
from tests.support.builders.policies import random_weights

SEED = bytes(16)
CALL = GenerationCall("a", Request((5,), SEED), SamplingParams(temperature=1.0, max_tokens=4, stops=(1,)))


def record_of(*tokens: int) -> dict[str, Any]:
    """Return a record whose states and log-probabilities tell to which token they belong."""
    numbers = {"states": torch.arange(2.0 * len(tokens)), "log_probabilities": -torch.arange(float(len(tokens)))}
    coded = {name: base64.b64encode(values.numpy().tobytes()).decode() for name, values in numbers.items()}
    return {"tokens": list(tokens), **coded}


@pytest.mark.parametrize("late", [(), (7,), (1,), (7, 8)])
def test_what_was_drawn_after_a_complete_answer_is_cut_off(late: tuple[int, ...]) -> None:
    for answer in ([7, 1], [7, 8, 9, 7]):
        generation = CALL.result(answer, record_of(*answer, *late))
        assert list(generation.tokens) == answer
        assert generation.hidden.tolist() == [[2.0 * place, 2.0 * place + 1] for place in range(len(answer))]
        assert generation.logprobs == tuple(-float(place) for place in range(len(answer)))


@pytest.mark.parametrize(
    ("answer", "drawn"),
    [
        ([7, 1], (8, 1, 9)),  # another token
        ([7, 1], (7,)),  # one that was not drawn
        ([7, 8], (7, 8, 9)),  # an answer that vLLM cut
        ([], (7,)),
        ([7, 1, 9], (7, 1, 9, 9)),  # an answer that goes on after its stop token
    ],
)
def test_an_answer_of_other_tokens_is_refused(answer: list[int], drawn: tuple[int, ...]) -> None:
    with pytest.raises(BrokenEngineError, match="other tokens"):
        CALL.result(answer, record_of(*drawn))


def test_an_answer_that_ends_where_vllm_has_no_room_is_refused() -> None:
    with pytest.raises(EngineError, match=r"2 of 4 tokens: .* engine\.max_tokens") as refusal:
        CALL.result([7, 8], record_of(7, 8))
    assert not isinstance(refusal.value, BrokenEngineError)  # a restart changes nothing


def draw_at(records: RequestRecords, *positions: int) -> None:
    for position in positions:
        records.sampled_states = torch.full((1, 2), float(position))
        rows = DrawnRows([(0, RequestArguments("a", SEED))], torch.device("cpu"))
        rows.draw(torch.randn(1, 50), np.array([position]), records)


def test_a_step_that_comes_after_its_record_was_taken_leaves_nothing_behind() -> None:
    records = RequestRecords()
    draw_at(records, 0, 1)
    assert records.take("a") is not None
    draw_at(records, 2)
    assert not records._records
    # a new request of the same id is not continued by what is left of the old one
    draw_at(records, 0, 3, 1)
    record = records.take("a")
    assert record is not None
    assert record["states"].tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_a_request_that_is_computed_again_continues_where_it_was_preempted() -> None:
    records = RequestRecords()
    # It is computed again in pieces, each with a row of logits; what was drawn before from its first one on is void.
    for again, versions in (((2, 2, 3), ["1", "2"]), ((0, 0, 1, 2, 3), ["2"])):
        records.version = 1
        draw_at(records, 0, 1, 2)
        records.version = 2
        draw_at(records, *again)
        record = records.take("a")
        assert record is not None
        assert (record["versions"], records.take("a")) == (versions, None)
        assert record["states"].tolist() == [[float(position)] * 2 for position in range(4)]


def test_a_prefill_that_is_computed_again_in_other_pieces_counts_once() -> None:
    records = RequestRecords()
    results = torch.arange(12.0).view(6, 2)
    for pieces in ([(2, 4), (4, 5)], [(2, 3), (3, 6)]):
        for begin, end in pieces:
            records.record("a").write_prefill(begin, 1, results[begin:end])
    record = records.take("a")
    assert record is not None
    assert record["checked"].tolist() == results[2:].tolist()


@pytest.mark.parametrize("cuts", [(1, 3), (2, 9), (0, 11), (4, 4), (5, 7)])
@pytest.mark.parametrize("rivals", [False, True])
def test_a_check_that_comes_in_several_passes_is_that_of_one(cuts: tuple[int, int], rivals: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    states, head = torch.randn(11, 8, generator=generator), torch.randn(30, 8, generator=generator)
    tokens = (5, 6, GIVEN, 7, 1, GIVEN, GIVEN, 8, 9, 10, 11)
    rules = CheckRules(SamplingParams(temperature=1.0, max_tokens=1, stops=(1,)), rivals=rivals)
    arguments = CheckArguments(0, tokens, SEED, SketchKey("projection", bytes(32)), rules)
    passes = zip((0, *cuts), (*cuts, 11), strict=True)
    whole, *parts = (
        checked(arguments, begin, states[begin:end], lambda hidden: hidden @ head.T, 30)
        for begin, end in [(0, 11), *passes]
    )
    assert whole.shape == (8, sum(WIDTHS) + 2 * rivals)
    torch.testing.assert_close(torch.cat(parts), whole)


def test_a_pass_of_replies_alone_is_on_the_device_of_the_others() -> None:
    arguments = CheckArguments(0, (5, GIVEN, GIVEN), SEED, SketchKey("projection", bytes(32)), CheckRules(CALL.params))
    assert checked(arguments, 1, torch.empty(2, 8, device="meta"), lambda hidden: hidden, 8).is_meta


def test_what_an_abandoned_request_draws_late_is_not_kept() -> None:
    records = RequestRecords()
    draw_at(records, 0, 1)
    records.forget(["a", "never begun"])
    draw_at(records, 2)
    assert not records._records


class WaitingClient(VllmClient):
    """A client whose completions never end, until they fail with an error; it notes what it was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.abandoned: list[str] = []

    async def generate(self, body: Mapping[str, object]) -> tuple[list[int], str]:
        if self.error is not None:
            raise self.error
        await trio.sleep_forever()
        raise AssertionError

    async def call(self, command: str, seconds: float | None = None, **arguments: object) -> list[dict[str, Any]]:
        if command == "take":
            self.abandoned = list(cast(list[str], arguments["abandoned"]))
            return [{"b": {"versions": ["3"], **record_of(7, 1)}}]
        return [{}]


class AnsweringClient(WaitingClient):
    async def generate(self, body: Mapping[str, object]) -> tuple[list[int], str]:
        return [7, 1], "stop"


@pytest.mark.parametrize(
    ("error", "is_named"),
    [(None, True), (RefusedCommandError("no room"), True), (BrokenEngineError("restarted with new records"), False)],
    ids=["cancelled", "refused", "broken"],
)
async def test_records_of_abandoned_requests_are_named_at_the_next_take_once(
    policy: Policy, tmp_path: Path, autojump_clock: trio.testing.MockClock, error: EngineError | None, is_named: bool
) -> None:
    engine = VllmEngine(build(policy), ExternalServer("http://127.0.0.1:1"), tmp_path)
    with trio.move_on_after(1), suppress(EngineError):
        await engine._run_calls(3, [CALL], WaitingClient(error))
    client = AnsweringClient()
    for names in ((["a"] if is_named else []), []):
        (generation,) = await engine._run_calls(3, [replace(CALL, request="b")], client)
        assert generation.tokens == (7, 1)
        assert client.abandoned == names


# With the real vLLM, whose memory for keys and values is short


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def server(
    policy: Policy, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[BendableServer]:
    directory = tmp_path_factory.mktemp("server")
    server = shared_server(policy.directory, directory, ahead=request.param, sequences=16, flags=SHORT_MEMORY)
    yield server
    server.end()


@pytest.fixture
async def engine(model: CausalModel, server: BendableServer, tmp_path: Path) -> AsyncIterator[VllmEngine]:
    """Return an engine that serves random weights."""
    engine = VllmEngine(model, server, tmp_path, report=refuse_restarts)
    await serve(engine, random_weights(model))
    yield engine
    await engine.close()


@pytest.mark.vllm
async def test_vllm_draws_once_more_after_a_stop_token_if_it_schedules_ahead(
    engine: VllmEngine, server: BendableServer
) -> None:
    hot = SamplingParams(temperature=20.0, max_tokens=200, stops=(1,))
    async with aclosing(VllmClient(server)) as client:
        for stops, reason in ((hot.stops, "stop"), ((), "length")):
            params = SamplingParams(hot.temperature, hot.max_tokens if stops else 9, stops)
            answer, ended = await client.generate(GenerationCall("a", Request((5, 6), SEED), params).body())
            (records,) = await client.call("take", requests=["a"])
            assert ended == reason
            assert records["a"]["tokens"][: len(answer)] == answer
            assert len(records["a"]["tokens"]) == len(answer) + (server.ahead and reason == "stop")
    assert await server.records() == 0


@pytest.mark.vllm
async def test_a_call_that_was_cancelled_leaves_no_record_behind(engine: VllmEngine, server: BendableServer) -> None:
    hot = SamplingParams(temperature=20.0, max_tokens=200, stops=())
    # On a busy machine the completion may end before it is cancelled.
    while not await server.records():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.generate, [Request((5, 6), SEED)], hot)
            with trio.move_on_after(1):
                while not await server.records():
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    await engine.generate([Request((5, 6), SEED)], SamplingParams(temperature=1.0, max_tokens=2, stops=()))
    assert await server.records() == 0


@pytest.mark.vllm
async def test_requests_that_were_preempted_are_those_of_torch(
    engine: VllmEngine, model: CausalModel, server: BendableServer
) -> None:
    await check_preempted(engine, server, model, count=64)
