"""What a run's environment requires beside its name: a file of problems, wheels, a sandbox.

They are checked before a run is created and before a node joins it; what is missing is reported in one line.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from grailnode import UserError
from grailnode.chat.chat_template import ChatTemplate
from grailnode.engine.policy import Policy
from grailnode.environments import registry
from grailnode.environments.contract import example_data
from grailnode.environments.wheels import Wheel
from grailnode.run.rules import Rules
from grailnode.sandbox import BubblewrapSandbox
from protocol import environments, limits
from protocol.difficulty import DifficultySpec, Stratum
from protocol.encoding import content_digest
from protocol.environments import Environment, Problem, Requirements
from protocol.environments.dataset import Dataset
from protocol.environments.mixture import Strata, drawn_member, mixed
from protocol.environments.record import SHARES, CodeRef, EnvironmentSpec, MixtureSpec
from protocol.errors import ProtocolError
from protocol.run import ChatSpec, EpisodeSpec, FileRef, RunManifest
from roles.policy.assignment import encode_prompt

DATA: Final = "data.jsonl"
"""The name of a run's data file in the run's directory, whatever the original is called."""

_FLOOR_PPM: Final = 50_000  # what every stratum of a new run keeps of its own share
_DECAY_PPM: Final = 900_000  # what remains of what validators count by stratum after a window: half after 7
_CHANGED_PAST: Final = (
    "the chat template changes earlier turns: of a conversation it gives the text around replies alone, and episodes "
    "keep what was said"
)
_QUOTED_CHARACTERS: Final = 40
_GENERATED_PROMPTS: Final = 64


@dataclass(frozen=True)
class CheckedTask:
    """An environment, its data and a policy that fit each other."""

    members: MixtureSpec
    problems: Dataset | None  # of the data file; None for a task without one
    generated: Mapping[str, Environment]  # the environments that generate their problems, by name
    wheels: tuple[Wheel, ...]
    chat: ChatSpec | None
    notice: str = ""  # what whoever creates the run should know; empty for nothing

    def problem(self, seed: bytes) -> Problem:
        member = self.members[drawn_member([member.ppm for member in self.members], seed)]
        source = self.generated.get(member.environment.name) or self.problems
        assert source is not None
        return source.problem(seed)

    @property
    def environment(self) -> Environment | None:
        """The task's environment, if it generates its problems."""
        if self.problems is not None:
            return None
        return mixed([(member.ppm, self.generated[member.environment.name]) for member in self.members])

    @property
    def difficulty(self) -> DifficultySpec:
        """How difficulty tables are computed for the task's strata; raises as `difficulty_rule` does."""
        if self.problems is not None and len(self.members) > 1:
            weights = {member.environment.name: member.ppm for member in self.members}
        else:
            source = self.environment or self.problems
            assert source is not None
            weights = Strata(source).weights
        return difficulty_rule(weights)


def difficulty_rule(weights: Mapping[str, int]) -> DifficultySpec:
    """Return how difficulty tables are computed in a new run; UserError if there are too few or too many strata.
    The weights, ascending by name, say how many problems each has, in any unit.
    """
    if not 2 <= len(weights) <= limits.MAX_STRATA:
        raise UserError(
            f"--difficulty: the task's problems are of {len(weights)} kinds, and a table has 2 to {limits.MAX_STRATA}; "
            "give a mixture, an environment with levels, or a data file with the field 'difficulty' or 'level'"
        )
    ends = [SHARES * end // sum(weights.values()) for end in accumulate(weights.values(), initial=0)]
    shares = [max(1, after - before) for before, after in pairwise(ends)]
    shares[shares.index(max(shares))] += SHARES - sum(shares)
    strata = tuple(Stratum(name=name, ppm=share) for name, share in zip(weights, shares, strict=True))
    return DifficultySpec(strata=strata, floor_ppm=_FLOOR_PPM, decay=_DECAY_PPM)


def check(rules: Rules, policy: Policy) -> CheckedTask:
    """Check that an environment, a data file and a policy fit each other, before a run is created with them;
    UserError if one is unknown, missing or not needed, or the policy cannot be trained on the problems.
    """
    environment, data = rules.environment, rules.data
    needs = find(rules)
    if needs.data and data is None:
        raise UserError(
            f"environment {environment!r} takes its problems from a data file: --data FILE; a packaged example is "
            f"{example_data(needs)}"
        )
    if data is not None and not needs.data:
        raise UserError(f"environment {environment!r} takes no data file: drop --data")
    readers = [name for name in registry.parse_mixture(environment) if name in environments.data_names]
    try:
        problems = None if data is None else environments.dataset(readers[0], _read(data))
    except ProtocolError as error:
        raise UserError(f"{data}: {error}") from error
    plugins = {name: registry.open_plugin(name, config) for name, config in _configs(rules).items()}
    generated = {name: plugin.environment for name, plugin in plugins.items()} | {
        name: environments.get(name) for name in registry.parse_mixture(environment) if name in environments.names
    }
    members = registry.task_spec(environment, {name: plugin.spec for name, plugin in plugins.items()}, rules.rubric)
    prompts = _prompts(problems, generated.values())
    chat, turns, notice = None, episode(rules), ""
    if rules.system is not None:
        template = ChatTemplate.read(policy.directory)
        chat = template.chat(rules.system, prompts)
        if turns is not None:
            chat, changes = template.with_turns(chat, [policy.tokenizer.decode((stop,)) for stop in policy.stops])
            notice = _CHANGED_PAST if changes else ""
    if rules.rubric and turns is not None:
        raise UserError(f"environment {environment!r} has episodes, which no rubric covers: drop --rubric")
    if turns is None:
        longest, options = completion_tokens(rules), "--max-tokens"
    else:
        longest = turns.tokens
        options = "--episode-tokens" if rules.episode_tokens else "--turns, --max-tokens or --reply-tokens"
    advice = f"lower {options}" if data is None else f"leave it out, or lower {options}"
    _check_prompts(data or environment, prompts, policy, longest, chat, advice)
    wheels = {wheel.ref.digest: wheel for plugin in plugins.values() for wheel in plugin.wheels}
    return CheckedTask(members, problems, generated, tuple(wheels.values()), chat, notice)


def _configs(rules: Rules) -> dict[str, str]:
    """Return the configuration of each plug-in, as JSON. Of a mixture, the rule has them by the members' names."""
    names = registry.parse_mixture(rules.environment)
    plugins = [name for name in names if not registry.is_built_in(name)]
    config = json.loads(registry.parse_config(rules.environment_config))
    configs = config if len(names) > 1 else dict.fromkeys(names, config) if config else {}
    if others := configs.keys() - set(plugins):
        raise UserError(f"environment {min(others)!r} takes no configuration: change --environment-config")
    return {name: json.dumps(configs.get(name, {})) for name in plugins}


def completion_tokens(rules: Rules) -> int:
    """Return the length of the longest completion, in all turns together: the rule's, or else the environment's."""
    needs = find(rules)
    return rules.max_tokens or (rules.turns or needs.turns) * (rules.turn_tokens or needs.tokens)


def episode(rules: Rules) -> EpisodeSpec | None:
    """Return how long episodes may be, None without them; UserError if the rules have more turns."""
    needs = find(rules)
    if needs.turns == 1:
        if rules.turns or rules.turn_tokens or rules.reply_tokens or rules.episode_tokens:
            raise UserError(f"environment {rules.environment!r} has no turns: drop the options of episodes")
        return None
    turns, reply_tokens = rules.turns or needs.turns, rules.reply_tokens or needs.reply_tokens
    if turns > needs.turns:
        raise UserError(f"an episode of {rules.environment!r} has {needs.turns} turns: lower --turns")
    longest = completion_tokens(rules) + (turns - 1) * reply_tokens
    return EpisodeSpec(
        turns=turns,
        turn_tokens=rules.turn_tokens or needs.tokens,
        reply_tokens=reply_tokens,
        tokens=rules.episode_tokens or min(longest, limits.MAX_EPISODE_TOKENS),
    )


def find(rules: Rules) -> Requirements:
    """Return what an environment requires, or a mixture: for the longest completions of any member; UserError if
    one is unknown, or they do not fit each other.
    """
    environment = rules.environment
    configs = _configs(rules)
    names = registry.parse_mixture(environment)
    members = [
        registry.requirements(name, configs[name]) if name in configs else environments.requirements(name)
        for name in names
    ]
    if sum(needs.data for needs in members) > 1:
        raise UserError(f"environment {environment!r}: several members read a data file, and a run has one")
    pythons = {needs.python for needs in members} - {""}
    if len(pythons) > 1:
        raise UserError(f"environment {environment!r}: members need Python {' and '.join(sorted(pythons))}")
    if len({needs.turns == 1 for needs in members}) > 1:
        raise UserError(f"environment {environment!r}: some members have turns, and others have not")
    return Requirements(
        data=any(needs.data for needs in members),
        python="".join(pythons),
        tokens=max(needs.tokens for needs in members),
        turns=min(needs.turns for needs in members),
        reply_tokens=max(needs.reply_tokens for needs in members),
    )


def _prompts(problems: Dataset | None, generated: Iterable[Environment]) -> list[str]:
    """Return the prompts of a file's problems, and some of those that environments generate."""
    seeds = [number.to_bytes(32, "little") for number in range(_GENERATED_PROMPTS)]
    drawn = [environment.problem(seed).prompt for environment in generated for seed in seeds]
    return drawn + ([problem.prompt for problem in problems.problems] if problems else [])


def _check_prompts(
    source: Path | str, prompts: Sequence[str], policy: Policy, max_tokens: int, chat: ChatSpec | None, advice: str
) -> None:
    """Refuse prompts that the policy cannot read or, with advice, has no positions for: else a miner would fail in
    mid-run.
    """
    positions = policy.config.get("max_position_embeddings")
    longest = limits.MAX_PROMPT_TOKENS
    if isinstance(positions, int):
        longest = min(longest, positions - max_tokens)
    unknown = policy.tokenizer.unknown
    for prompt in prompts:
        tokens = encode_prompt(policy.tokenizer, chat, prompt)
        which = f"{source}: the problem {prompt[:_QUOTED_CHARACTERS]!r}..."
        if unknown is not None and unknown in tokens:
            raise UserError(
                f"{which} has characters that the policy's tokenizer does not know; give a policy that reads text: "
                "--policy DIR"
            )
        if len(tokens) > longest:
            raise UserError(
                f"{which} is {len(tokens)} tokens long, and with up to {max_tokens} tokens behind it the policy has "
                f"room for {max(0, longest)}; {advice}"
            )


def file_reference(data: Path | None) -> FileRef | None:
    """Return the reference of a data file in a run manifest; None without a file."""
    if data is None:
        return None
    content = _read(data)
    return FileRef(name=DATA, digest=content_digest(content), size=len(content))


def files_to_publish(run: RunManifest, data: Path | None, wheels: Path | None = None) -> dict[str, bytes]:
    """Return a run's data file and wheels by name, from where the operator has them; UserError names a wrong
    one.
    """
    files: dict[str, bytes] = {}
    for spec in run.tasks:
        files |= _wheels_to_publish(spec, wheels) if spec.is_plugin else {}
    if run.data is None:
        return files
    if data is None:
        raise UserError("this run has a data file, and run.toml does not say where: set [trainer] data")
    content = _read(data)
    if content_digest(content) != run.data.digest:
        raise UserError(
            f"{data}: not the data file of this run (SHA-256 {content_digest(content).hex()[:16]}, the run's is "
            f"{run.data.digest.hex()[:16]}): put the original back, or make another run with this one"
        )
    return files | {run.data.name: content}


def _wheels_to_publish(environment: EnvironmentSpec, folder: Path | None) -> dict[str, bytes]:
    if folder is None:
        raise UserError("this run has wheels, and run.toml does not say where: set [trainer] wheels")
    files: dict[str, bytes] = {}
    for ref in environment.code:
        name = wheel_name(ref)
        try:
            files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"{folder / name}: the wheel cannot be read ({error.strerror})") from error
        if content_digest(files[name]) != ref.digest:
            raise UserError(f"{folder / name}: not the wheel of this run, {ref}: put the original back")
    return files


def wheel_name(ref: CodeRef) -> str:
    """Return the name of a wheel's file in the run's directory."""
    return f"{ref.distribution}-{ref.version}.whl"


def open_sandbox(run: RunManifest) -> BubblewrapSandbox | None:
    """Open and try the sandbox that a miner or validator of a run needs; None if it runs no foreign code."""
    for spec in run.tasks:
        registry.check_code(spec)
    python = max(spec.python for spec in run.tasks)  # members that execute code do so with one version
    return BubblewrapSandbox.open(python) if python else None


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > limits.MAX_DATA_BYTES:
            raise UserError(f"{path}: {size} bytes, more than {limits.MAX_DATA_BYTES}; leave some problems out")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the data file cannot be read ({(error.strerror or str(error)).lower()})") from error
