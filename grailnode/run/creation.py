"""Creating a run: the manifest from a policy and some choices, signed by the root keys, and the files that it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grailnode.calibration.proof_file import ProofFile
from grailnode.engine import policy as policies
from grailnode.engine.models import build_exact
from grailnode.run import requirements
from grailnode.run.base_files import LoraStart
from grailnode.run.files import is_object
from protocol import paths
from protocol.beacon import ChainInfo
from protocol.digest import content_digest, digest_weights
from protocol.errors import ProtocolError, SignatureError
from protocol.identity.authority import OPEN, Admission, Authority
from protocol.identity.signing import Signed, SigningKey, open_announced, open_signed, sign
from protocol.limits import MAX_KEYS
from protocol.proof import EXACT_PROOF, Arithmetic
from protocol.quantization import Precision, quantize
from protocol.run import (
    ChatSpec,
    EvaluationSpec,
    FileRef,
    ModelSpec,
    Numerics,
    RunManifest,
    SamplingSpec,
    ScoringSpec,
)
from protocol.window import Schedule
from roles.node.identity import Node
from roles.ports import ObjectStore
from roles.records import fetch_run_file

MODEL_FILES = (
    *("config.json", "tokenizer.json", "generation_config.json"),
    *("tokenizer_config.json", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Choices:
    """What whoever creates a run decides beside the model; the defaults are the demo's.

    Windows are counted in beacon rounds: see protocol/window.py.

    Attributes:
        name: the run's title.
        data: the file of problems, for an environment that reads one.
        chat: whether prompts are conversations, by the chat template of the policy's tokenizer; `system_prompt` is what
            they begin with, empty for nothing.
        evaluation_problems, evaluation_samples, pass_at: see `EvaluationSpec` of protocol/run.py.
        lora_rank: of the adapters that the run trains; 0 for a run that trains all weights. lora_alpha: 0 for twice the
            rank. lora_targets: the modules that have adapters.
        precision: what the matrices of the run's versions consist of.
        sites: how many keys of sites are created with the run; 0 if its trainer trains alone.
        validators: how many keys of validators are created with the run.
        remote_validators: the public keys of validators whose secret keys other people hold.
        quorum: how many of both must accept a group.
        spares: to how many validators beyond the quorum a group is dealt; by default, all judge every group.
        numerics: "exact" if all nodes compute the same bits.
        miner_arithmetics, validator_arithmetics: how miners and validators may compute, where it is not.
    """

    name: str = "demo"
    environment: str = "addition"
    data: Path | None = None
    chat: bool = False
    system_prompt: str = ""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 8
    evaluation_problems: int = 256
    evaluation_samples: int = 0
    pass_at: int = 1
    group_size: int = 8
    groups: int = 16
    rounds: int = 8
    commit_rounds: int = 5
    audit_rounds: int = 6
    seal_rounds: int = 16
    verdict_rounds: int = 24
    first_round: int = 1
    lead: int = 1
    max_lag: int = 2
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: tuple[str, ...] = ()
    precision: Precision = "bf16"
    sites: int = 0
    deposit: float = 32.0
    validators: int = 1
    remote_validators: tuple[bytes, ...] = ()
    quorum: int = 1
    spares: int = MAX_KEYS
    head_ttl: int = 3600
    audit_ppm: int = 1_000_000
    audit_floor_ppm: int = 1_000_000
    audit_halving: int = 16
    roots: int = 1
    root_threshold: int = 1
    admission: Admission = OPEN
    numerics: Numerics = "calibrated"
    miner_arithmetics: tuple[Arithmetic, ...] = ("torch-float32",)
    validator_arithmetics: tuple[Arithmetic, ...] = ("torch-float32",)

    @property
    def system(self) -> str | None:
        """The system prompt of conversations; None for bare prompts."""
        return self.system_prompt if self.chat else None

    def in_rounds(self, rounds: int) -> "Choices":
        """Return these choices with the same proportions for windows of another number of rounds, at least 3."""
        commit, audit, seal, verdict = (
            moment * rounds // self.rounds
            for moment in (self.commit_rounds, self.audit_rounds, self.seal_rounds, self.verdict_rounds)
        )
        commit = max(1, commit)
        audit = max(commit + 1, audit)
        seal = max(audit + 1, seal)
        return replace(
            self,
            rounds=rounds,
            commit_rounds=commit,
            audit_rounds=audit,
            seal_rounds=seal,
            verdict_rounds=max(seal + 1, verdict),
        )


SCORING = ScoringSpec(
    exponent=2.0,
    penalty=10.0,
    shortfall=1.0,
    miss_price=1.0,
    deposit=Choices.deposit,
    cap=1.0,
    windows=100,
    half_life=50.0,
)


def model_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a policy directory that every node needs, by name."""
    return {name: (directory / name).read_bytes() for name in MODEL_FILES if (directory / name).is_file()}


def draft_manifest(
    choices: Choices,
    directory: Path,
    beacon: ChainInfo,
    authority: Authority,
    proof: ProofFile | None,
    chat: ChatSpec | None = None,
    lora: LoraStart | None = None,
) -> RunManifest:
    """Return a run manifest for the policy in a directory.

    Args:
        proof: the thresholds that were measured on this policy, or on the base with such adapters. None for an exact
            run. Quantized weights are other BF16 weights of the same sizes, and nodes differ by the roundings of the
            same arithmetic.
        chat: how a problem becomes a conversation; None for bare prompts.
        lora: the adapters of a LoRA run; None for a run that trains all weights.
    """
    policy = policies.Policy.load(directory)
    files = model_files(directory)
    weights = policies.load_weights(directory) if lora is None else {}
    digest = digest_weights(weights) if lora is None else lora.spec.base
    first_version = quantize(weights, choices.precision) if lora is None else lora.adapters
    audit = {name: getattr(choices, name) for name in ("audit_ppm", "audit_floor_ppm", "audit_halving")}
    if proof is None:
        build_exact(policy)
        rules = EXACT_PROOF.model_copy(update=audit)
    else:
        spec = None if lora is None else lora.spec
        proof.check(digest, choices.temperature, choices.max_tokens, chat=chat is not None, lora=spec)
        rules = proof.spec(choices.miner_arithmetics, choices.validator_arithmetics, **audit)
    return RunManifest(
        name=choices.name,
        authority=authority,
        model=ModelSpec(
            files=tuple(
                FileRef(name=name, digest=content_digest(data), size=len(data)) for name, data in files.items()
            ),
            genesis=digest_weights(first_version),
        ),
        lora=None if lora is None else lora.spec,
        precision=choices.precision,
        environment=choices.environment,
        data=requirements.file_reference(choices.data),
        chat=chat,
        sampling=SamplingSpec(
            temperature=choices.temperature,
            max_tokens=choices.max_tokens,
            stops=policy.stops,
            top_k=choices.top_k,
            top_p=choices.top_p,
            min_p=choices.min_p,
        ),
        evaluation=EvaluationSpec(
            problems=choices.evaluation_problems, samples=choices.evaluation_samples, pass_at=choices.pass_at
        ),
        numerics="calibrated" if proof is not None else "exact",
        group_size=choices.group_size,
        groups=choices.groups,
        spares=choices.spares,
        schedule=Schedule(
            first_round=choices.first_round,
            rounds=choices.rounds,
            commit_rounds=choices.commit_rounds,
            audit_rounds=choices.audit_rounds,
            seal_rounds=choices.seal_rounds,
            verdict_rounds=choices.verdict_rounds,
            lead=choices.lead,
            max_lag=choices.max_lag,
        ),
        beacon=beacon,
        proof=rules,
        scoring=SCORING.model_copy(update={"deposit": choices.deposit}),
        head_ttl=choices.head_ttl,
    )


def first_authority(
    choices: Choices,
    *,
    roots: Sequence[bytes],
    trainers: Sequence[bytes],
    validators: Sequence[bytes],
    workers: Sequence[bytes] = (),
) -> Authority:
    """Return who may act when the run begins."""
    return Authority(
        roots=tuple(roots),
        root_threshold=choices.root_threshold,
        trainers=tuple(trainers),
        validators=tuple(validators),
        workers=tuple(sorted(workers)),
        quorum=choices.quorum,
        admission=choices.admission,
        revoked=(),
    )


async def publish_files(store: ObjectStore, writer: bytes, files: Mapping[str, bytes]) -> None:
    """Publish the files that a run manifest names, below a writer's key."""
    for data in files.values():
        await store.put(paths.file(writer, content_digest(data)), data)


def sign_manifest(manifest: RunManifest, *roots: SigningKey) -> Signed[RunManifest]:
    """Return the manifest signed by root keys."""
    return open_signed(sign(manifest, *roots), RunManifest, manifest.authority.roots, manifest.authority.root_threshold)


def open_run(data: bytes, run_id: bytes | None = None) -> Signed[RunManifest]:
    """Return a run manifest after checking that as many of its own roots have signed it as it demands.

    Args:
        data: hostile bytes.
        run_id: the id that the manifest must have; None accepts any.

    Raises:
        ProtocolError: it is not such a manifest, or another run's.
    """
    manifest = open_announced(data, RunManifest)
    authority = manifest.record.authority
    if not set(manifest.signers) <= set(authority.roots) or len(manifest.signers) < authority.root_threshold:
        raise SignatureError(f"not signed by {authority.root_threshold} of its own roots", "run manifest")
    authority.check_keys()
    if run_id is not None and manifest.digest != run_id:
        raise ProtocolError(f"is run {manifest.digest.hex()}, not {run_id.hex()}", "run manifest")
    return manifest


async def fetch_model(node: Node, directory: Path) -> policies.Policy:
    """Fetch the run's model files into a directory, check them, and load the policy."""
    for ref in node.run.model.files:
        await _fetch(node, ref, directory)
    return policies.Policy.load(directory)


async def fetch_data(node: Node, directory: Path) -> bytes | None:
    """Fetch the run's data file into a directory and check it; None for a run without one."""
    return None if node.run.data is None else await _fetch(node, node.run.data, directory)


async def _fetch(node: Node, ref: FileRef, directory: Path) -> bytes:
    """Return a file of the run: from a directory, else from a current trainer's space, and then kept there."""
    target = directory / ref.name
    if await node.run_sync(is_object, target, ref):
        return target.read_bytes()
    data = await fetch_run_file(node, ref, node.authority.trainers, ref.name)
    directory.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return data
