"""What episodes cost beside single turns: `python -m bench.episodes`.

The packaged policies play groups of each environment, and a validator judges them, all in torch float32 on one thread.
For each environment the command prints the turns and tokens of a rollout, the tokens that generation computed (the
prompt's, too), the processor time of generating and of judging a rollout, and the bytes of a rollout in its batch.
`higher-lower` is the plug-in of docs/guide/own-task.md, whose processes in the sandbox are not in these times: `python
-m bench.sandbox` has those. It takes half a minute, and needs Linux with bubblewrap and the `test` extra.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.tables import print_table
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.sandbox import BubblewrapSandbox
from protocol import environments
from protocol.environments import Environment
from protocol.rollout.batch import EpisodeRollout, Group, assemble
from protocol.run import EpisodeSpec
from roles.miner.produce import HonestProducer
from roles.policy.causal_model import CausalModel
from roles.validator.judge import Judge
from tests.support.adversaries.harness import PolicyHistory, TrialHarness
from tests.support.builders.plugins import files_of_page, install
from tests.support.builders.proofs import packaged_thresholds, proof_of
from tests.support.builders.tasks import OWN
from tests.support.measuring.wrapped_model import WrappedModel
from tests.support.simulation.virtual_clock import simulate

GROUPS, GROUP_SIZE = 16, 8
HEAD = ("environment", "turns", "tokens", "computed", "generated, ms", "judged, ms", "bytes")


class _CountingModel(WrappedModel):
    """A model that counts the tokens that it computes, without pads."""

    tokens = 0

    def hidden(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        self.tokens += int(mask[:, -ids.shape[1] :].sum())
        return super().hidden(weights, ids, mask, cache)


def main() -> None:
    """Print a row for each environment."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    turns = {"turn_tokens": 3, "reply_tokens": 8}
    calculator = EpisodeSpec(turns=4, turn_tokens=12, reply_tokens=12, tokens=84)
    rows = [
        measure(environments.get("addition"), 8, None),
        measure(environments.get("wordle"), 18, EpisodeSpec(turns=6, tokens=58, **turns)),
        measure(environments.get("calculator"), 48, calculator, PACKAGED_POLICY.parent / "calculator"),
    ]
    with tempfile.TemporaryDirectory() as directory:
        folders = [install(files_of_page(), Path(directory))]
        plugin = PluginEnvironment.open(BubblewrapSandbox.open(OWN), folders, "higher-lower", b"{}")
        rows.append(measure(plugin, 18, EpisodeSpec(turns=6, tokens=58, **turns)))
        plugin.close()
    print_table("Episodes beside single turns", HEAD, rows)


def measure(
    environment: Environment, max_tokens: int, episode: EpisodeSpec | None, policy: Path = PACKAGED_POLICY
) -> Sequence[str]:
    """Return the row of an environment, whose values are means over the rollouts of some groups."""
    weights, proof, models = load_weights(policy), proof_of(packaged_thresholds()), list[_CountingModel]()

    def counting(model: CausalModel) -> CausalModel:
        models.append(_CountingModel(model))
        return models[-1]

    history = PolicyHistory(Policy.load(policy), 0, lambda _: weights)
    harness = TrialHarness(
        history, environment, proof, max_tokens, GROUP_SIZE, GROUPS, episode=episode, change=counting
    )

    async def scenario() -> tuple[list[Group], int, float, float]:
        engine = await harness.serving_engine()
        producer, window = HonestProducer(harness.task, engine), harness.mining_window(0)
        judge = Judge(harness.task, engine, 0, window.randomness)
        row = harness.proof.row(harness.arithmetic, harness.own_arithmetic)
        for indices in (range(2), range(GROUPS)):  # the first ones warm up
            models[0].tokens = 0
            moments = [time.process_time()]
            groups = await producer.produce(window, indices)
            computed = models[0].tokens
            moments.append(time.process_time())
            judgements = await judge.judge([(group, bytes(32)) for group in groups], row)
            moments.append(time.process_time())
        assert all(item.accepted for item in judgements)
        return groups, computed, moments[1] - moments[0], moments[2] - moments[1]

    groups, computed, generated, judged = simulate(scenario)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = sum(len(item.turns) if isinstance(item, EpisodeRollout) else 1 for item in rollouts)
    size = len(assemble(groups, harness.arithmetic)[0])
    totals = turns, sum(len(item.sequence) for item in rollouts), computed
    means = [f"{total / len(rollouts):.1f}" for total in totals]
    times = [f"{1000 * seconds / len(rollouts):.2f}" for seconds in (generated, judged)]
    return (environment.name, *means, *times, f"{size / len(rollouts):.0f}")


if __name__ == "__main__":
    main()
