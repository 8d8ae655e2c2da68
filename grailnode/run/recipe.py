"""A recipe: a TOML file with the constants of a run, for `grailnode init --recipe FILE`.

Its section [rules] has what all nodes must agree on, which `init` signs in the manifest; its other sections go to
run.toml as they are. docs/reference/config.md lists each key, docs/examples has recipes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from grailnode.config import EngineSection, TrainerSection, read_toml, validate
from grailnode.run.rules import Rules
from roles.miner.miner_settings import MinerSettings
from roles.settings_base import Settings
from roles.validator.validator_settings import ValidatorSettings

DEMO: Final = Path(__file__).parents[1] / "data" / "demo.toml"
"""The recipe of `grailnode demo`."""


class Recipe(Settings):
    """A recipe's sections; those beside `rules` are sections of run.toml."""

    rules: Rules = Rules()
    engine: EngineSection = EngineSection()
    trainer: TrainerSection = TrainerSection()
    miner: MinerSettings = MinerSettings()
    validator: ValidatorSettings = ValidatorSettings()


def read_recipe(path: Path | None, options: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe, by default the default one, in which rules from the command line of `init` replace others."""
    recipe = Recipe() if path is None else validate(Recipe, read_toml(path), str(path))
    if not options:
        return recipe
    rules = validate(Rules, recipe.rules.model_dump(exclude_unset=True) | dict(options), "init")
    return recipe.model_copy(update={"rules": rules})
