"""TRL's GRPOTrainer trains the policy of a run: it publishes each step, and learns from verified groups.

    pip install grailnode 'trl==1.16.*'
    python examples/trl_grpo.py run/run.toml checkpoints --steps 100

Miners and validators run beside it. Prompts, completions, rewards, and the log-probabilities under the policy that
sampled them come from the network, so TRL generates nothing. Called again, it goes on from its last checkpoint.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import grailnode
from grailnode.library import Group, Trainer


class Network(TrainerCallback):
    """The run as TRL sees it: a source of rollouts, and a callback that publishes.

    TRL's checkpoint has the digests of the groups since the one before, in the history of its log. They are
    acknowledged behind it, and after a restart again.
    """

    def __init__(self, net: Trainer) -> None:
        self._net = net
        self._groups: list[Group] = []  # since the last checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        lines = [line["groups"] for line in state.log_history if "groups" in line]
        self._net.acknowledge([bytes.fromhex(digest) for digest in (lines or [[]])[-1]])

    def on_step_end(self, args: Any, state: Any, control: Any, model: torch.nn.Module, **_: Any) -> None:
        state.log_history.append({"step": state.global_step, "groups": [group.digest.hex() for group in self._groups]})
        self._net.publish(model.state_dict(), step=state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._net.acknowledge(self._groups)
        self._groups = []

    def rollouts(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Return one rollout for each of TRL's prompts, of which only the number counts: whole groups, in order.

        TRL needs a token in each completion. One that has none gets an end, which has no part in the loss.
        """
        count = len(prompts) // self._net.run.group_size
        groups = self._net.groups(count, count)
        self._groups += groups
        rollouts = [(group, i) for group in groups for i in range(len(group.completions))]
        end = self._net.run.sampling.stops[0]
        return {
            "prompt_ids": [list(group.prompt) for group, _ in rollouts],
            "completion_ids": [list(group.completions[i]) or [end] for group, i in rollouts],
            "logprobs": [group.logprobs[i].tolist() or [0.0] for group, i in rollouts],
            "env_mask": [list(map(int, group.drawn[i])) or [0] for group, i in rollouts],
            "verified_reward": [group.rewards[i] for group, i in rollouts],
        }


class OffPolicyTrainer(GRPOTrainer):
    """GRPO whose importance ratio is that of the policy that sampled, which may be some versions old."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        return output | {"old_per_token_logps": output["sampling_per_token_logps"]}


def verified_rewards(completions: Sequence[str], verified_reward: Sequence[float], **_: Any) -> Sequence[float]:
    return verified_reward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="the path of run.toml")
    parser.add_argument("directory", help="for TRL's checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--groups", type=int, default=8, help="of a step")
    options = parser.parse_args()
    with grailnode.open_trainer(options.run) as net:
        network, rules = Network(net), net.run
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(net.policy / "tokenizer.json"))
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(rules.sampling.stops[0])
        settings = GRPOConfig(
            output_dir=options.directory,
            max_steps=options.steps,
            save_steps=1,
            save_total_limit=2,
            logging_steps=1,
            learning_rate=7e-6,
            lr_scheduler_type="constant",
            per_device_train_batch_size=rules.group_size,
            gradient_accumulation_steps=options.groups,
            num_generations=rules.group_size,
            temperature=rules.sampling.temperature,
            max_completion_length=rules.sampling.max_tokens,
            bf16=torch.cuda.is_available(),  # autocast; the model itself is FP32, since small steps must add up
            report_to="none",
        )
        trainer = OffPolicyTrainer(
            model=AutoModelForCausalLM.from_pretrained(net.policy, dtype=torch.float32),
            reward_funcs=verified_rewards,
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": ""}] * options.groups),
            processing_class=tokenizer,
            callbacks=[network],
            rollout_func=network.rollouts,
        )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(options.directory))
        net.wait_for_uploads()


if __name__ == "__main__":
    main()
