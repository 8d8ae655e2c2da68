"""A recipe: a TOML file with the constants of a run, for `grailnode init --recipe FILE`.

Its section [rules] has what all nodes must agree on, which `init` signs in the manifest; its other sections go to
run.toml as they are. docs/reference/config.md lists each key, docs/examples has recipes.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from grailnode.config import (
    EngineSection,
    MinerSection,
    Section,
    TrainerSection,
    ValidatorSection,
    read_toml,
    validate,
)
from grailnode.run.run_toml import Sections
from protocol.limits import (
    MAX_COMPLETION_TOKENS,
    MAX_EVALUATION_PROBLEMS,
    MAX_EVALUATION_SAMPLES,
    MAX_GROUP_SIZE,
    MAX_GROUPS,
    MAX_LORA_ALPHA,
    MAX_LORA_RANK,
)
from protocol.quantization import Precision


class RulesSection(Section):
    """What all nodes of a run must agree on; an option of `init` of the same name replaces a key.

    None for `max_tokens` is the environment's own length. With `lora_rank` above 0 the run trains adapters of the
    modules whose names end with one of `lora_targets`; 0 for `lora_alpha` is twice the rank.
    """

    environment: str = "addition"
    chat: bool = False
    system_prompt: str = ""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COMPLETION_TOKENS)] | None = None
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    evaluation_problems: Annotated[int, Field(ge=0, le=MAX_EVALUATION_PROBLEMS)] = 256
    evaluation_samples: Annotated[int, Field(ge=0, le=MAX_EVALUATION_SAMPLES)] = 0
    pass_at: Annotated[int, Field(ge=1)] = 1
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP_SIZE)] = 8
    groups: Annotated[int, Field(ge=1, le=MAX_GROUPS)] = 16
    deposit: Annotated[float, Field(ge=0, le=1e9)] = 32.0
    lora_rank: Annotated[int, Field(ge=0, le=MAX_LORA_RANK)] = 0
    lora_alpha: Annotated[float, Field(ge=0, le=MAX_LORA_ALPHA)] = 0.0
    lora_targets: tuple[str, ...] = ()
    precision: Precision = "bf16"

    @field_validator("lora_targets", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(value.split(",")) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_together(self) -> "RulesSection":
        if self.system_prompt and not self.chat:
            raise ValueError("a system prompt belongs to a conversation: set chat as well")
        if self.pass_at > max(1, self.evaluation_samples):
            raise ValueError(f"pass_at = {self.pass_at} needs evaluation_samples of at least as many")
        if bool(self.lora_rank) != bool(self.lora_targets):
            raise ValueError("lora_rank and lora_targets go together")
        if self.lora_alpha and not self.lora_rank:
            raise ValueError("lora_alpha belongs to adapters: set lora_rank as well")
        if self.lora_rank and self.precision != "bf16":
            raise ValueError(f"precision = {self.precision!r} is for runs that train all weights: drop lora_rank")
        return self


class Recipe(Section):
    """A recipe's sections; those beside `rules` are sections of run.toml."""

    rules: RulesSection = RulesSection()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    miner: MinerSection = MinerSection()
    validator: ValidatorSection = ValidatorSection()

    def sections(self) -> Sections:
        """Return what the recipe says, by section of run.toml and key."""
        return self.model_dump(mode="json", exclude={"rules"}, exclude_unset=True)


def read_recipe(path: Path | None) -> Recipe:
    """Read a recipe; None for the defaults."""
    return Recipe() if path is None else validate(Recipe, read_toml(path), str(path))


def with_options(rules: RulesSection, options: dict[str, Any]) -> RulesSection:
    """Return rules with what the command line says instead.

    Args:
        options: by name; None where the command line does not say it, and names that are no rules are ignored.
    """
    changes = {
        name: value for name, value in options.items() if name in RulesSection.model_fields and value is not None
    }
    return validate(RulesSection, rules.model_dump() | changes, "init")
