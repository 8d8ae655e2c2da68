"""The logits processors of both model runners have vLLM's interface and draw the required tokens, in vLLM's process."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grailnode.engine.vllm.inside.request_records import (
    GIVEN,
    CheckArguments,
    RequestArguments,
    RequestRecords,
    validate,
)
from grailnode.engine.vllm.inside.row_sampling import DrawnRows
from grailnode.engine.vllm.vllm_server import write_modules
from protocol.rollout import sampling
from protocol.rollout.checking import CheckRules
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams
from protocol.rollout.sketch import SketchKey
from tests.engine.vllm_site import vllm_python

SEEDS = [bytes([number]) * 16 for number in range(4)]

PROGRAM = """
import json, sys, torch
from types import SimpleNamespace
from vllm import SamplingParams
from grailnode.engine.vllm.inside.request_records import RequestArguments, records
from protocol.rollout import sampling

def params(number, **extra):
    arguments = RequestArguments(str(number), bytes([number]) * 16, **extra)
    return SamplingParams(temperature=0, extra_args={"grailnode": arguments.to_json()})

def greedy(logits):
    return logits.argmax(-1).tolist()

logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
records.sampled_states = torch.zeros(4, 8)
if sys.argv[1] == "v1":
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
    from grailnode.engine.vllm.inside.sampling_v1 import SeedBoundSampling
    processor = SeedBoundSampling(None, torch.device("cpu"), False)
    added = [(row, params(row), [], [7] * (10 + row)) for row in range(4)]
    processor.update_state(BatchUpdate(4, [], added, [(0, 3, MoveDirectionality.SWAP)]))
    positions, order = [13, 11, 12, 10], [3, 1, 2, 0]
    result = processor.apply(logits.clone())
    # a request that ends leaves the others' tokens as they are
    processor.update_state(BatchUpdate(3, [3], [], []))
    assert torch.equal(processor.apply(logits.clone())[:3], result[:3])
    assert torch.equal(processor.apply(logits.clone())[3], logits[3])
else:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
    from grailnode.engine.vllm.inside.sampling_v2 import SeedBoundSampling
    import numpy as np
    lengths = SimpleNamespace(np=np.array([5, 6, 7, 8, 9]))
    processor = SeedBoundSampling(None, SimpleNamespace(prompt_len=lengths, prefill_len=lengths))
    assert not processor.add_request(4, SamplingParams(temperature=0))
    for slot in range(4):
        assert processor.add_request(slot, params(slot))
    order = [3, 1, 2, 0]
    positions = [13, 11, 12, 10]
    seen = np.array([lengths.np[slot] + position for slot, position in zip(order, positions)])
    context = SimpleNamespace(idx_mapping_np=np.array(order), seq_lens_upper_bound_np=seen)
    result = processor.apply(logits.clone(), context)
    # nothing is drawn from the rows of prompts that go on in the next step
    context = SimpleNamespace(idx_mapping_np=np.array(order), seq_lens_upper_bound_np=lengths.np[order] - 1)
    assert torch.equal(processor.apply(logits.clone(), context), logits)
    # another request in a slot, at once in the next batch
    assert not processor.add_request(3, SamplingParams(temperature=0))
    context = SimpleNamespace(idx_mapping_np=np.array(order), seq_lens_upper_bound_np=seen)
    again = processor.apply(logits.clone(), context)
    assert torch.equal(again[0], logits[0]) and torch.equal(again[1:], result[1:])
assert issubclass(SeedBoundSampling, LogitsProcessor)
words = sampling.seed_words([bytes([number]) * 16 for number in order])
expected = sampling.choose(logits, words, torch.tensor(positions), 1.0).tolist()
try:
    SeedBoundSampling.validate_params(SamplingParams(temperature=1.0, extra_args={"grailnode": '{"request": "x"}'}))
    refused = False
except ValueError:
    refused = True
print(json.dumps([greedy(result), expected, refused]))
"""


@pytest.mark.vllm
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_processor_draws_the_required_tokens(runner: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(write_modules(tmp_path)), "VLLM_NO_USAGE_STATS": "1"}
    command = [str(vllm_python()), "-c", PROGRAM, runner]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    sampled_tokens, expected, refused = json.loads(result.stdout.splitlines()[-1])
    assert sampled_tokens == expected
    assert refused


def test_rows_with_other_temperatures_and_filters_are_drawn_together() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(1))
    kinds = [(1.0, Filters()), (0.5, Filters()), (1.0, Filters(top_k=3)), (1.0, Filters())]
    records = RequestRecords()
    records.version, records.sampled_states = 7, torch.arange(8.0).view(4, 2)
    for step in range(8):
        # one row begins after the other, and the last one is not ours
        arguments = [(row, RequestArguments(str(row), SEEDS[row], *kinds[row])) for row in range(3) if step + row >= 2]
        positions = np.array([step + row - 2 for row, _ in arguments])
        scores = DrawnRows(arguments, logits.device).draw(logits.clone(), positions, records)
    assert torch.equal(scores[3], logits[3])
    for row in range(3):
        words = sampling.seed_words([SEEDS[row]])
        (expected,) = sampling.choose(logits[row : row + 1], words, torch.tensor([5 + row]), *kinds[row]).tolist()
        assert scores[row].argmax() == expected
        record = records.record(str(row)).collect()
        assert len(record["tokens"]) == 6 + row
        assert record["tokens"][-1] == expected
        assert record["versions"] == ["7"]
        assert record["states"].tolist() == [[2.0 * row, 2.0 * row + 1]] * (6 + row)


def test_without_the_worker_extension_nothing_is_drawn() -> None:
    rows = DrawnRows([(0, RequestArguments("a", SEEDS[0]))], torch.device("cpu"))
    with pytest.raises(RuntimeError, match="worker extension"):
        rows.draw(torch.zeros(1, 5), np.array([0]), RequestRecords())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "request"),
        ({"request": "a", "sed": "00"}, "sed"),
        ({"request": "a", "seed": "00"}, "at least 16 bytes"),
        ({"request": "a", "seed": "zz"}, "valid hex"),
        ({"request": "a", "temperature": 0.0}, "greater than 0"),
        ({"request": "a", "offset": -1}, "greater than or equal to 0"),
        ({"request": "a", "sketch": {"kind": "other", "seed": "00"}}, "sketch.kind"),
        ({"request": "a", "check": {"begin": 3, "tokens": []}}, "check.sketch"),
    ],
)
def test_bad_arguments_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestArguments.parse({"grailnode": json.dumps(values)})
    with pytest.raises(ValueError, match="JSON"):
        RequestArguments.parse({"grailnode": values})


def test_arguments_are_read_as_they_were_written() -> None:
    params, key = SamplingParams(0.7, 1, (1, 2), Filters(5, 0.9, 0.1)), SketchKey("topk", bytes(range(32)))
    check = CheckArguments(4, (5, GIVEN, 6), SEEDS[1], key, CheckRules(params, 0.1, 0.2, 0.3, rivals=True))
    for arguments in (RequestArguments("a", SEEDS[2], 0.1, sketch=key, offset=3), RequestArguments("b", check=check)):
        assert RequestArguments.parse({"grailnode": arguments.to_json()}) == arguments
    assert RequestArguments.parse({"other": 1}) is None


def test_a_request_with_noise_of_vllm_is_refused() -> None:
    class Params:
        extra_args = {"grailnode": '{"request": "a"}'}  # noqa: RUF012
        temperature = 0.0
        presence_penalty = frequency_penalty = 0.0
        repetition_penalty = 1.0

    validate(Params())
    for name, value in (("temperature", 1.0), ("presence_penalty", 0.5), ("repetition_penalty", 1.1)):
        params = Params()
        setattr(params, name, value)
        with pytest.raises(ValueError, match=r"grailnode needs|takes no penalties"):
            validate(params)
