"""report.json: what a finished run was, as data.

Two lists of indexes carry the plots: `pass_at_1` and `reward` have one entry for each of `window_index`, `sparsity` and
`patch_bytes` one for each of `version_index`. An entry is null where nothing was measured.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grailnode.observe.state import MinerRow, NetworkState

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

    @property
    def rejections(self) -> int:
        """Groups rejected, for whatever reason."""
        return sum(self.rejected.values())

    @classmethod
    def of(cls, row: MinerRow) -> Self:
        """What a report keeps of a miner's row."""
        return cls.model_validate({name: getattr(row, name) for name in cls.model_fields})


class TokensPerSecond(BaseModel):
    """Completion tokens per second over the whole run, all miners or all validators together."""

    model_config = _STRICT

    generated: Annotated[float, Field(ge=0)]
    verified: Annotated[float, Field(ge=0)]


class RunFacts(BaseModel):
    """What only the one who ran it knows; the rest of a report follows from the public state.

    Attributes:
        command: the command line that repeats the run.
        verify_command: the command line that re-checks its chain.
        seed: of the run; environment: the name of its task; model_parameters: elements of the policy.
        weights_digest: hex digest of the weights that each node holds at the end, by node name, the trainer's among
            them.
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
    """report.json, whole.

    Attributes:
        run_id: hex digest of the run manifest; run_name: its human name.
        seconds: how long the run took.
        windows, versions: how many windows were judged, and policy versions published.
        window_index, version_index: their numbers.
        pass_at_1, reward: for each window; sparsity, patch_bytes: for each version (null for genesis and
            re-anchorings).
        anchor_bytes: size of the newest anchor, 0 for none; full_bytes: of a full BF16 checkpoint.
        groups: for each miner.
    """

    run_id: Hex
    run_name: str
    seconds: Annotated[float, Field(ge=0)]
    windows: Count
    versions: Count
    window_index: list[Count]
    version_index: list[Count]
    pass_at_1: list[Share | None]
    reward: list[float | None]
    sparsity: list[Share | None]
    patch_bytes: list[Count | None]
    anchor_bytes: Count
    full_bytes: Count
    groups: list[MinerGroups]
    tokens_per_second: TokensPerSecond

    @model_validator(mode="after")
    def _lists_match(self) -> Self:
        for index, values in (("window_index", "pass_at_1"), ("window_index", "reward")):
            self._same_length(index, values)
        for index, values in (("version_index", "sparsity"), ("version_index", "patch_bytes")):
            self._same_length(index, values)
        return self

    def _same_length(self, index: str, values: str) -> None:
        expected, found = len(getattr(self, index)), len(getattr(self, values))
        if expected != found:
            raise ValueError(f"{values} has {found} entries, {index} has {expected}: one is needed for each")

    @classmethod
    def of(cls, state: NetworkState, facts: RunFacts) -> Self:
        """The report of a run that has ended in `state`."""
        anchors = [row.anchor_bytes for row in state.versions if row.anchor_bytes is not None]
        seconds = max(state.seconds, 0.0)
        return cls(
            **facts.model_dump(),
            run_id=state.run_id,
            run_name=state.run_name,
            seconds=seconds,
            windows=len(state.windows),
            versions=len(state.versions),
            window_index=[row.window for row in state.windows],
            version_index=[row.version for row in state.versions],
            pass_at_1=[row.pass_at_1 for row in state.windows],
            reward=[row.reward for row in state.windows],
            # A version without a patch has no predecessor to be compared with: genesis, or an anchor after a failed
            # upload.
            sparsity=[row.sparsity if row.patch_bytes is not None else None for row in state.versions],
            patch_bytes=[row.patch_bytes for row in state.versions],
            anchor_bytes=anchors[-1] if anchors else 0,
            full_bytes=state.full_bytes,
            groups=[MinerGroups.of(row) for row in state.miners],
            tokens_per_second=TokensPerSecond(
                generated=state.tokens_generated / seconds if seconds else 0.0,
                verified=state.tokens_verified / seconds if seconds else 0.0,
            ),
        )
