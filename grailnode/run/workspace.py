"""A run's directory on one machine: run.toml, the signed manifest, keys, store, state, logs."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grailnode import UserError
from grailnode.beacon.public_chains import RELAYS
from grailnode.calibration import proof_file
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.run import creation, key_files, requirements
from grailnode.run.creation import Choices
from grailnode.run.files import NewFiles
from protocol.beacon import ChainInfo, LocalKey
from protocol.environments.dataset import Dataset
from protocol.identity.signing import SigningKey
from protocol.rollout.challenge import stream

MINERS = ("miner-1", "miner-2")

_TEMPLATE = """\
# A grailnode run on this machine. These, each in a terminal of its own, make the network:
{starts}
# Any key can be overridden for one start: --set miner.groups=8
# Paths are relative to this file. Secrets are not in it: they lie in keys/, readable by their owner alone.

[run]
manifest = "run.manifest"  # the signed rules that all nodes share
id = "{run_id}"

[store]
kind = "local"  # a directory that all nodes of this machine share
path = "store"

[node]
keys = "keys"    # one file for each name
state = "state"  # one directory for each name: never share one between two processes
logs = "logs"    # one file of JSON lines for each process
metrics_port = 0 # of 127.0.0.1, for Prometheus; a trainer's processes take the next ones too; 0 for none

[beacon]
key = "beacon"  # the trainer's node runs this run's local beacon with keys/beacon.key

[engine]
device = "cpu"      # or "cuda"
dtype = "float32"   # what BF16 weights are widened to; "bfloat16" on a GPU
threads = 1         # of torch, for each process

[trainer]
policy = "genesis"        # the packaged policy, or a directory with a Hugging Face checkpoint
learning_rate = {learning_rate}
warmup_steps = {warmup_steps}         # over which the learning rate rises to that
groups_per_step = {groups_per_step}      # groups of one optimizer step
steps_per_version = {steps_per_version}     # optimizer steps between two published versions
max_uses = {max_uses}              # times that a group is trained on
decay = {decay}               # weight of a group for each version that it is behind
max_staleness = {max_staleness}         # versions behind after which it is dropped
anchor_interval = {anchor_interval}      # versions between two full checkpoints
patch_profile = "compact" # or "fast", or "auto": whichever brings a version to the followers first, as measured

[miner]
groups = {groups}  # a window, at most what the run allows

[validator]
evaluation_problems = {evaluation_problems}  # held-out problems solved greedily for every version
"""


_OWN_BEACON = "key = \"beacon\"  # the trainer's node runs this run's local beacon with keys/beacon.key\n"


@dataclass(frozen=True)
class Pace:
    """How fast a run on one machine goes, and how it learns. The defaults are the demo's: bench/learning.py found them.

    Attributes:
        period_ms: of the beacon; choices.rounds of these make a window.
    """

    period_ms: int = 250
    learning_rate: float = 7e-6
    warmup_steps: int = 10
    groups_per_step: int = 16
    steps_per_version: int = 1
    max_uses: int = 1
    decay: float = 0.7
    max_staleness: int = 16
    anchor_interval: int = 25
    groups: int = 16
    evaluation_problems: int = 256


@dataclass(frozen=True)
class Workspace:
    """What was made: the directory, run.toml in it, the run's id, and the public keys by name; its problems where they
    come from a data file; the commands that start its nodes; and the files that were written.
    """

    directory: Path
    config: Path
    run_id: bytes
    keys: dict[str, bytes]
    problems: Dataset | None
    starts: tuple[str, ...]
    files: NewFiles


class WorkspaceError(UserError):
    """A run that cannot be made here: says why and what to do."""


def create(
    directory: Path,
    choices: Choices,
    pace: Pace,
    *,
    policy: Path = PACKAGED_POLICY,
    proof: Path | None = None,
    miners: tuple[str, ...] = MINERS,
    judges: Sequence[bytes] = (),
    beacon: ChainInfo | None = None,
    seed: int | None = None,
    begin: float | None = None,
) -> Workspace:
    """Make a run.

    The data file is copied into the directory, so that whatever becomes of the original the run keeps the one that it
    names.

    Args:
        proof: the file of thresholds that were measured on the policy; None for proof.json in its directory.
        judges: public keys of validators that other people hold, beside the `choices.validators` whose keys are made
            here.
        beacon: the public chain that gives the rounds, and the pace of the windows with them; None for one of the run's
            own.
        seed: keys follow from it, so that a demo can be repeated; None for random ones.
        begin: when window 0 opens, seconds since the Unix epoch; None for now.

    Raises:
        WorkspaceError: there is a run already, or no proof.
        ProofFileError: the proof cannot be used, or was measured on another policy.
        PolicyError, ProvisionError, KeyFileError, OSError: the policy, the data file or the directory cannot be used.
    """
    config = directory / "run.toml"
    if config.exists():
        raise WorkspaceError(f"{config}: there is a run already; choose another directory")
    problems = requirements.check(choices.environment, choices.data, Policy.load(policy), choices.max_tokens)
    measured = proof_file.read(_proof_of(policy) if proof is None else proof)
    roots = ("root",) if choices.roots == 1 else tuple(f"root-{number + 1}" for number in range(choices.roots))
    validators = tuple(
        "validator" if number == 0 else f"validator-{number + 1}" for number in range(choices.validators)
    )
    names = (*roots, "trainer", *validators, *miners)
    drawn = {name: _secret(name, seed) for name in names}
    signing = {name: SigningKey(secret) for name, secret in drawn.items()}
    moment = time.time() if begin is None else begin
    if beacon is None:
        drawn["beacon"] = _secret("beacon", seed)
        chain = LocalKey.from_seed(drawn["beacon"]).chain(pace.period_ms, int(moment * 1000))
    else:
        chain = beacon
        choices = replace(choices, first_round=chain.round_at(moment) + 1)
    manifest = creation.draft(
        choices,
        policy,
        chain,
        creation.authority(
            choices,
            roots=[signing[name].public for name in roots],
            trainers=[signing["trainer"].public],
            validators=[*(signing[name].public for name in validators), *judges],
        ),
        measured,
    )
    signed = creation.seal(manifest, *(signing[name] for name in roots[: choices.root_threshold]))
    starts = _starts(config, validators, miners)
    values = {**pace.__dict__, "run_id": signed.digest.hex(), "starts": "\n".join(f"#   {start}" for start in starts)}
    text = _TEMPLATE.format(**values)
    if beacon is not None:
        text = text.replace(_OWN_BEACON, _public_beacon(beacon))
    if policy != PACKAGED_POLICY:
        text = text.replace('policy = "genesis"', f"policy = {str(policy.absolute())!r}")
    if choices.data is not None:
        text = text.replace(
            "[trainer]\n", f'[trainer]\ndata = "{requirements.DATA}"       # the problems: what the manifest names\n'
        )
    with NewFiles() as files:  # nothing is written before everything else has gone well
        for name, secret in drawn.items():
            files.create_key(directory / "keys" / f"{name}{key_files.SUFFIX}", secret)
        files.write(directory / "run.manifest", signed.data)
        if choices.data is not None:
            files.write(directory / requirements.DATA, choices.data.read_bytes())
        files.write(config, text.encode())
    public = {name: key.public for name, key in signing.items()}
    return Workspace(directory, config, signed.digest, public, problems, starts, files)


def _starts(config: Path, validators: Sequence[str], miners: Sequence[str]) -> tuple[str, ...]:
    """The commands that start the nodes whose keys are made; a role's first node has the name that is the default."""
    nodes = [("trainer", ""), *_named("validator", validators), *_named("miner", miners)]
    return tuple(f"grailnode --role {role:<9} --run {config}{name}" for role, name in nodes)


def _named(role: str, names: Sequence[str]) -> list[tuple[str, str]]:
    return [(role, f" --name {name}" if place else "") for place, name in enumerate(names)]


def _public_beacon(chain: ChainInfo) -> str:
    relays = "".join(f'    "{relay}",\n' for relay in RELAYS.get(chain.chain_hash, ()))
    return f'key = ""  # public: {chain.beacon_id}; asked are, one after another,\nrelays = [\n{relays}]\n'


def _proof_of(policy: Path) -> Path:
    path = policy / proof_file.NAME
    if not path.is_file():
        raise WorkspaceError(
            f"{path}: not there, and thresholds are measured, not guessed: run `grailnode calibrate --policy {policy}` first"
        )
    return path


def _secret(name: str, seed: int | None) -> bytes:
    if seed is None:
        return secrets.token_bytes(32)
    return stream(seed.to_bytes(8, "little", signed=True), f"demo key {name}", 32)
