"""The base of all settings: sections of run.toml, rules of a run, and constants of a role."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Values that an operator sets, all of them known.

    A field stands once, with its bounds, its default and a docstring below it: options of the command line, comments in
    run.toml and the pages of docs/reference are made from these.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
