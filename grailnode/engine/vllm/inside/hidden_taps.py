"""Takes hidden states in the serving model: those that tokens are drawn from, and those of prefills, which are checked
here: only a few numbers of each token leave the GPU.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from grailnode.engine.vllm.inside.request_records import GIVEN, CheckArguments, records
from protocol.rollout.checking import DrawnTokens, check_completions
from protocol.rollout.sketch import BYTES_PER_TOKEN

WIDTHS: Final = (BYTES_PER_TOKEN, 1, 1, 1)
"""Numbers of each token: the values of its sketch, its margin, whether a stop token is due, its log-probability; its
best rival may follow.
"""

Project = Callable[[Tensor], Tensor]

Prefill = tuple[int, str, CheckArguments]
"""A prefill's row in the batch, its request, and how it is checked."""
Record = Callable[[Tensor, Iterable[Prefill], Any, Any], None]


def install(runner: Any) -> None:
    """Wrap a model runner of version 1 or 2.

    `compute_logits` gets exactly the states of the rows that are sampled. A prefill's states are taken where the
    forward pass ends, because only its last row is sampled; the scheduler may split it into several passes.
    """
    model = runner.get_model()
    compute_logits = model.compute_logits

    def recording_compute_logits(hidden_states: Any, *arguments: Any, **keywords: Any) -> Any:
        records.sampled_states = hidden_states
        return compute_logits(hidden_states, *arguments, **keywords)

    model.compute_logits = recording_compute_logits
    # The two runners keep a batch differently, so each has its own tap for prefills.
    tap = _tap_v1 if hasattr(runner, "_model_forward") else _tap_v2
    tap(runner, partial(_record, compute_logits, runner.model_config.get_vocab_size()))


def _tap_v1(runner: Any, record: Record) -> None:
    from grailnode.engine.vllm.inside.sampling_v1 import rows  # noqa: PLC0415 - only one of the two can be imported

    forward = runner._model_forward

    def recording_forward(*arguments: Any, **keywords: Any) -> Any:
        output = forward(*arguments, **keywords)
        # Rows whose token is drawn have no `check`; their states come from the output projection above.
        prefills = [(row, ours.request, ours.check) for row, (ours, _) in rows.items() if ours.check is not None]
        if prefills and isinstance(output, Tensor):
            starts, computed = runner.query_start_loc.np, runner.input_batch.num_computed_tokens_cpu
            record(output, prefills, starts, computed)
        return output

    runner._model_forward = recording_forward


def _tap_v2(runner: Any, record: Record) -> None:
    from grailnode.engine.vllm.inside.sampling_v2 import slots  # noqa: PLC0415 - only one of the two can be imported

    sample = runner.sample

    # V2 gives the states of all tokens to its sampler, before it takes those that are sampled.
    def recording_sample(hidden_states: Any, input_batch: Any, *arguments: Any, **keywords: Any) -> Any:
        in_batch = ((row, slots.get(slot)) for row, slot in enumerate(input_batch.idx_mapping_np.tolist()))
        prefills = [(row, ours.request, ours.check) for row, ours in in_batch if ours and ours.check]
        if prefills:
            record(hidden_states, prefills, input_batch.query_start_loc_np, input_batch.num_computed_tokens_np)
        return sample(hidden_states, input_batch, *arguments, **keywords)

    runner.sample = recording_sample


def _record(
    project: Project, vocabulary: int, states: Tensor, prefills: Iterable[Prefill], starts: Any, computed: Any
) -> None:
    """Check prefills, and record the results. The states [N, D] are of all tokens of the pass, request behind request;
    `starts`, int [B + 1], is where each begins in them, and `computed`, int [B], its tokens of earlier passes.
    """
    for row, request, arguments in prefills:
        start, position = int(starts[row]), int(computed[row])
        skipped = max(0, arguments.begin - position)
        part, position = states[start + skipped : int(starts[row + 1])], position + skipped
        # The prompt's states before `begin` are not needed, and may cover the whole pass.
        if len(part):
            result = checked(arguments, position - arguments.begin, part, project, vocabulary)
            records.record(request).write_prefill(position, records.version, result)


def checked(arguments: CheckArguments, begin: int, states: Tensor, project: Project, vocabulary: int) -> Tensor:
    """Check the tokens that one pass of a prefill covers, from a position of the completion on: float32 [n, S], with
    WIDTHS for each that the policy drew. All ranks project alike, as all have the same batch.
    """
    tokens = arguments.tokens[begin : begin + len(states)]
    # Replies of an environment lie among the tokens that the policy drew.
    rows = [row for row, token in enumerate(tokens) if token != GIVEN]
    if not rows:
        return states.new_empty(0, sum(WIDTHS) + 2 * arguments.rules.rivals, dtype=torch.float32)
    before = sum(token != GIVEN for token in arguments.tokens[:begin])
    drawn = DrawnTokens([tokens[row] for row in rows], arguments.seed, arguments.sketch)
    own = states if len(rows) == len(states) else states[rows]
    check = check_completions(
        own, lambda part: project(part).to(torch.float32), [drawn], arguments.rules, vocabulary, first=before
    )
    others = torch.stack([check.margins, check.stops.float(), check.logprobs], dim=1)
    return torch.cat([check.sketch, others, check.rivals], dim=1)
