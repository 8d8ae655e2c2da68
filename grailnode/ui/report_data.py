"""The data of report.json: the record of a finished run.

The plots are drawn over two lists of indexes: `pass_at_1` and `reward` have one entry for each of `window_index`,
`sparsity` and `patch_bytes` one for each of `version_index`. An entry is null where nothing was measured.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grailnode.observe.state import MinerRow, NetworkState, RoundRow, SiteRow

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
Kind = Literal["honest", "cheating", "unknown"]

# A misspelt key must not pass silently, and JSON has no NaN.
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class MinerGroups(BaseModel):
    """One miner's groups: committed to, accepted, and rejected by reason code."""

    model_config = _STRICT

    name: str
    key: Hex
    kind: Kind
    submitted: Count
    accepted: Count
    rejected: dict[str, Count]

    @classmethod
    def of(cls, row: MinerRow) -> Self:
        """Return the part of a miner's row that a report keeps."""
        return cls.model_validate({name: getattr(row, name) for name in cls.model_fields})


class SiteWork(BaseModel):
    """One site's rounds: counted, and refused by reason code; local steps, groups and bytes of those that counted."""

    model_config = _STRICT

    name: str
    key: Hex
    rounds: Count
    refused: dict[str, Count]
    steps: Count
    groups: Count
    payload_bytes: Count

    @classmethod
    def of(cls, row: SiteRow) -> Self:
        """Return a site's row as a report keeps it."""
        return cls.model_validate({name: getattr(row, name) for name in cls.model_fields})


class RoundResult(BaseModel):
    """One round of sites that train together: its contributions, and what those that counted used and sent."""

    model_config = _STRICT

    number: Count
    step: Count
    version: Count
    counted: Count
    sites: Count
    local_steps: Count
    groups: Count
    payload_bytes: Count

    @classmethod
    def of(cls, row: RoundRow) -> Self:
        """Return a round's row as a report keeps it."""
        return cls.model_validate({name: getattr(row, name) for name in cls.model_fields})


class TokensPerSecond(BaseModel):
    """Completion tokens per second over the whole run, all miners or all validators together."""

    model_config = _STRICT

    generated: Annotated[float, Field(ge=0)]
    verified: Annotated[float, Field(ge=0)]


class RunFacts(BaseModel):
    """The part of a report that only the operator of the run knows; the rest follows from the public state.

    Attributes:
        command: the command line that repeats the run.
        verify_command: the command line that checks its chain again.
        seed: of the run; environment: the name of its task; model_parameters: elements of the policy.
        weights_digest: hex digest of the weights that each node holds at the end, by node name; the trainer is one of
            the nodes.
        trainer_io_wait_fraction: share of the training process' time spent waiting for its own uploads and downloads.
        trainer_data_wait_fraction: share of it spent waiting for verified groups to exist.
    """

    model_config = _STRICT

    command: str
    verify_command: str = "grailnode verify --run run.toml"
    seed: int
    environment: str
    model_parameters: Count
    weights_digest: dict[str, Hex]
    trainer_io_wait_fraction: Share
    trainer_data_wait_fraction: Share


class DemoReport(RunFacts):
    """A whole report.json.

    Attributes:
        run_id: hex digest of the run manifest; run_name: its human name.
        seconds: how long the run took.
        windows, versions: how many windows were judged, and policy versions published.
        window_index, version_index: their numbers.
        pass_at: k of pass@k.
        pass_at_1, pass_at_k, reward: for each window; sparsity, patch_bytes: for each version (null for genesis and
            re-anchorings).
        anchor_bytes: size of the newest anchor, 0 for none; full_bytes: of a full BF16 checkpoint.
        groups: for each miner.
        sites, rounds: of the sites that train together; both are missing where the trainer trains alone.
    """

    run_id: Hex
    run_name: str
    seconds: Annotated[float, Field(ge=0)]
    windows: Count
    versions: Count
    window_index: list[Count]
    version_index: list[Count]
    pass_at_1: list[Share | None]
    pass_at: Count
    pass_at_k: list[Share | None]
    reward: list[float | None]
    sparsity: list[Share | None]
    patch_bytes: list[Count | None]
    anchor_bytes: Count
    full_bytes: Count
    groups: list[MinerGroups]
    tokens_per_second: TokensPerSecond
    sites: list[SiteWork] = Field(default_factory=list)
    rounds: list[RoundResult] = Field(default_factory=list)

    @model_validator(mode="after")
    def _lists_match(self) -> Self:
        for index, values in (("window_index", "pass_at_1"), ("window_index", "pass_at_k"), ("window_index", "reward")):
            self._same_length(index, values)
        for index, values in (("version_index", "sparsity"), ("version_index", "patch_bytes")):
            self._same_length(index, values)
        return self

    def _same_length(self, index: str, values: str) -> None:
        index_size, size = len(getattr(self, index)), len(getattr(self, values))
        if index_size != size:
            raise ValueError(f"{values} has {size} entries, {index} has {index_size}: one is needed for each")

    @classmethod
    def of(cls, state: NetworkState, facts: RunFacts) -> Self:
        """Return the report of a run that has ended in `state`."""
        anchors = [row.anchor_bytes for row in state.versions if row.anchor_bytes is not None]
        return cls(
            **facts.model_dump(),
            run_id=state.run_id,
            run_name=state.run_name,
            seconds=max(state.seconds, 0.0),
            windows=len(state.windows),
            versions=len(state.versions),
            window_index=[row.window for row in state.windows],
            version_index=[row.version for row in state.versions],
            pass_at_1=[row.pass_at_1 for row in state.windows],
            pass_at=state.pass_at,
            pass_at_k=[row.pass_at_k for row in state.windows],
            reward=[row.reward for row in state.windows],
            sparsity=[row.sparsity for row in state.versions],
            patch_bytes=[row.patch_bytes for row in state.versions],
            anchor_bytes=anchors[-1] if anchors else 0,
            full_bytes=state.full_bytes,
            groups=[MinerGroups.of(row) for row in state.miners],
            sites=[SiteWork.of(row) for row in state.sites],
            rounds=[RoundResult.of(row) for row in state.rounds],
            tokens_per_second=TokensPerSecond(generated=state.generated_per_second, verified=state.verified_per_second),
        )
