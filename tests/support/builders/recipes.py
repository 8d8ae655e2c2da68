"""Rules and recipes of small runs: the demo's, with other values."""

from typing import Any

from grailnode.run.rules import Rules
from grailnode.run.run_toml import DEMO, Recipe, read_recipe


def demo_rules(**rules: Any) -> Rules:
    """Return the demo's rules, with other values for some of them."""
    return read_recipe(DEMO, rules).rules


def demo_recipe(sections: dict[str, dict[str, Any]] | None = None, **rules: Any) -> Recipe:
    """Return the demo's recipe.

    Args:
        sections: values for run.toml, by section and key.
        rules: values of other rules.
    """
    return Recipe.model_validate({**(sections or {}), "rules": demo_rules(**rules)})
