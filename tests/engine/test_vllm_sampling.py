"""The logits processor for vLLM, called as its interface says, gives the tokens that every other engine samples."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch

from grailnode.engine.vllm_sampling import SeedBoundLogitsProcessor
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import choose, seed_words

V = 50
FILTERS = {"grailnode_top_k": 7, "grailnode_top_p": 0.8, "grailnode_min_p": 0.01}


class Direction(Enum):
    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass
class Params:
    extra_args: dict[str, Any] | None
    temperature: float = 0.0


@dataclass
class Update:
    """The fields of vLLM's BatchUpdate that the processor reads."""

    removed: list[int] = field(default_factory=list)
    added: list[tuple[int, Params, list[int] | None, list[int]]] = field(default_factory=list)
    moved: list[tuple[int, int, Direction]] = field(default_factory=list)


def seed(number: int) -> bytes:
    return bytes([number] * 16)


def params(number: int, temperature: float = 1.0, **more: Any) -> Params:
    return Params({"grailnode_seed": seed(number).hex(), "grailnode_temperature": temperature, **more})


def logits(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(step)) * 3


def required_token(
    row: torch.Tensor, number: int, position: int, temperature: float, filters: Filters | None = None
) -> int:
    arguments = (row[None], seed_words([seed(number)]), torch.tensor([position]), temperature)
    return int(choose(*arguments, filters or Filters(0, 1.0, 0.0)))


def test_greedy_decoding_gives_the_required_tokens_while_rows_come_go_and_move():
    processor = SeedBoundLogitsProcessor()
    assert not processor.is_argmax_invariant()
    owners = {0: (1, 1.0), 1: None, 2: (2, 0.7), 3: (3, 1.5)}
    outputs: dict[int, list[int]] = {row: [] for row in owners}
    processor.update_state(
        Update(
            added=[
                (0, params(1), [5], outputs[0]),
                (1, Params(None), [5], outputs[1]),
                (2, params(2, 0.7), [5], outputs[2]),
                (3, params(3, 1.5), None, outputs[3]),
            ]
        )
    )
    for step in range(12):
        if step == 4:  # the request of row 3 ends, row 0 moves to its place
            processor.update_state(Update(removed=[3], moved=[(0, 3, Direction.UNIDIRECTIONAL)]))
            owners, outputs = {1: None, 2: (2, 0.7), 3: (1, 1.0)}, {1: outputs[1], 2: outputs[2], 3: outputs[0]}
        if step == 8:
            processor.update_state(Update(moved=[(3, 2, Direction.SWAP)]))
            owners[2], owners[3] = owners[3], owners[2]
            outputs[2], outputs[3] = outputs[3], outputs[2]
        processor.update_state(None)
        before = logits(step)
        after = processor.apply(before.clone())
        for row, owner in owners.items():
            token = int(after[row].argmax())
            if owner is None:
                assert torch.equal(after[row], before[row])
            else:
                assert token == required_token(before[row], owner[0], len(outputs[row]), owner[1])
            outputs[row].append(token)


def test_filtered_tokens_are_never_chosen():
    processor = SeedBoundLogitsProcessor()
    output: list[int] = []
    processor.update_state(Update(added=[(0, params(9, 1.2, **FILTERS), None, output)]))
    for step in range(30):
        before = logits(step, 1)
        token = int(processor.apply(before.clone())[0].argmax())
        assert token == required_token(before[0], 9, len(output), 1.2, Filters(7, 0.8, 0.01))
        output.append(token)


@pytest.mark.parametrize(
    "arguments",
    [
        {"grailnode_seed": "00"},
        {"grailnode_seed": "zz" * 16},
        {"grailnode_seed": "00" * 16, "grailnode_temperature": 0},
        {"grailnode_seed": "00" * 16, "grailnode_temprature": 1},
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]):
    with pytest.raises(ValueError, match=r"grailnode|hexadecimal"):
        SeedBoundLogitsProcessor.validate_params(Params(arguments))


def test_vllm_must_not_add_noise_of_its_own():
    with pytest.raises(ValueError, match="temperature 0"):
        SeedBoundLogitsProcessor.validate_params(Params({"grailnode_seed": "00" * 16}, temperature=0.7))
    SeedBoundLogitsProcessor.validate_params(Params({"something": 1}, temperature=0.7))
