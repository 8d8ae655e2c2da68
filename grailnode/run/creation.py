"""Creating a run: the manifest from a policy and rules, signed by the root keys, and the files that it names."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from grailnode.calibration.proof_file import ProofFile
from grailnode.config import EngineSection
from grailnode.engine import policy as policies
from grailnode.engine.models import build_exact
from grailnode.environments import registry
from grailnode.environments.wheels import Wheel, unpack
from grailnode.run import requirements
from grailnode.run.base_files import LoraStart
from grailnode.run.files import is_object
from grailnode.run.rules import Rules
from protocol import paths
from protocol.beacon import ChainInfo
from protocol.difficulty import DifficultySpec
from protocol.digest import digest_weights
from protocol.encoding import content_digest
from protocol.environments.record import EnvironmentSpec, MixtureSpec
from protocol.errors import LimitError, MalformedError, ProtocolError, SignatureError
from protocol.identity.authority import OPEN, Authority
from protocol.identity.signing import Signed, SigningKey, claimed_signers, open_signed, sign
from protocol.judging.ledger import GROUP, SHARE
from protocol.proof import EXACT_PROOF, arithmetic_of
from protocol.quantization import quantize
from protocol.run import ChatSpec, EvaluationSpec, FileRef, ModelSpec, RunManifest, SamplingSpec, ScoringSpec
from roles.node.identity import Node
from roles.ports import ObjectStore
from roles.records import fetch_run_file

MODEL_FILES = (
    *("config.json", "tokenizer.json", "generation_config.json"),
    *("tokenizer_config.json", "chat_template.jinja"),
)

_SAMPLING_RULES = {"temperature", "max_tokens", "top_k", "top_p", "min_p"}
_RULES_OF_MANIFEST = {"precision", "group_size", "groups", "spares", "head_ttl"}
"""Those that stand in the manifest under their own names."""

SCORING = ScoringSpec(
    penalty=10 * GROUP,
    shortfall=1 * GROUP,
    miss_price=1 * GROUP,
    deposit=0,
    cap=SHARE,
    windows=100,
    decay=986_232_704,  # half of a value is left after 50 windows
)


def model_files(directory: Path) -> dict[str, bytes]:
    """Return the files of a policy directory that every node needs, by name."""
    return {name: (directory / name).read_bytes() for name in MODEL_FILES if (directory / name).is_file()}


def completed(rules: Rules, title: str, engine: EngineSection | None = None) -> Rules:
    """Return rules with a value for each rule whose default depends on something else."""
    engine = engine or EngineSection()
    arithmetic = arithmetic_of(engine.kind, engine.dtype)
    return rules.changed(
        title=rules.title or title,
        max_tokens=requirements.completion_tokens(rules),
        miner_arithmetics=rules.miner_arithmetics or (arithmetic,),
        validator_arithmetics=rules.validator_arithmetics or (arithmetic,),
    )


def draft_manifest(
    rules: Rules,
    directory: Path,
    beacon: ChainInfo,
    authority: Authority,
    proof: ProofFile | None,
    chat: ChatSpec | None = None,
    lora: LoraStart | None = None,
    *,
    environment: MixtureSpec = (),
    difficulty: DifficultySpec | None = None,
    first_round: int = 1,
) -> RunManifest:
    """Return a run manifest for the policy in a directory.

    Args:
        rules: as `completed` returns them.
        proof: the thresholds that were measured on this policy, or on the base with such adapters. None for an exact
            run. Quantized weights are other BF16 weights of the same sizes, and nodes differ by the roundings of the
            same arithmetic.
        environment: the members of the task; empty for the built-in ones that the rules name.
    """
    assert rules.title is not None and rules.max_tokens is not None
    policy = policies.Policy.load(directory)
    environment = environment or registry.task_spec(rules.environment, rubric=rules.rubric)
    files = model_files(directory)
    weights = policies.load_weights(directory) if lora is None else {}
    digest = digest_weights(weights) if lora is None else lora.spec.base
    episode = requirements.episode(rules)
    first_version = quantize(weights, rules.precision) if lora is None else lora.adapters
    audit = rules.model_dump(include={"audit_ppm", "audit_floor_ppm", "audit_halving"})
    if proof is None:
        build_exact(policy)
        thresholds = EXACT_PROOF.model_copy(update=audit)
    else:
        spec, turns = None if lora is None else lora.spec, 1 if episode is None else episode.turns
        proof.check(
            *(digest, rules.temperature, rules.max_tokens),
            chat=chat is not None,
            lora=spec,
            turns=turns,
            environment=environment,
            group_size=rules.group_size,
        )
        thresholds = proof.spec(rules.miner_arithmetics, rules.validator_arithmetics, **audit)
    return RunManifest(
        name=rules.title,
        authority=authority,
        model=ModelSpec(
            files=tuple(
                FileRef(name=name, digest=content_digest(data), size=len(data)) for name, data in files.items()
            ),
            genesis=digest_weights(first_version),
        ),
        lora=None if lora is None else lora.spec,
        environment=environment,
        data=requirements.file_reference(rules.data),
        chat=chat,
        sampling=SamplingSpec(stops=policy.stops, **rules.model_dump(include=_SAMPLING_RULES)),
        episode=episode,
        evaluation=EvaluationSpec(
            problems=rules.evaluation_problems, samples=rules.evaluation_samples, pass_at=rules.pass_at
        ),
        numerics="calibrated" if proof is not None else "exact",
        schedule=rules.schedule(first_round),
        beacon=beacon,
        proof=thresholds,
        scoring=SCORING.model_copy(update={"deposit": round(rules.deposit * GROUP)}),
        difficulty=difficulty,
        **rules.model_dump(include=_RULES_OF_MANIFEST),
    )


def first_authority(
    rules: Rules,
    *,
    roots: Sequence[bytes],
    trainers: Sequence[bytes],
    validators: Sequence[bytes],
    workers: Sequence[bytes] = (),
) -> Authority:
    """Return who may act when the run begins."""
    work = rules.work if rules.admission == "open" else 0
    credential = "work" if work else ""
    admission = {"policy": rules.admission, "credential": credential, "difficulty": work}
    return Authority(
        roots=tuple(roots),
        root_threshold=rules.root_threshold,
        trainers=tuple(trainers),
        validators=tuple(validators),
        workers=tuple(sorted(workers)),
        quorum=rules.quorum,
        admission=OPEN.model_copy(update=admission),
        revoked=(),
    )


async def publish_files(store: ObjectStore, writer: bytes, files: Mapping[str, bytes]) -> None:
    """Publish the files that a run manifest names, below a writer's key."""
    for data in files.values():
        await store.put(paths.file(writer, content_digest(data)), data)


def sign_manifest(manifest: RunManifest, *roots: SigningKey) -> Signed[RunManifest]:
    return open_signed(sign(manifest, *roots), RunManifest, manifest.authority.roots, manifest.authority.root_threshold)


def open_run(data: bytes, run_id: bytes | None = None) -> Signed[RunManifest]:
    """Return a run manifest, hostile bytes, after checking that as many of its own roots have signed it as it demands;
    ProtocolError if it is not such a manifest, or has another id than that which is given.
    """
    signers: tuple[bytes, ...] = ()
    try:
        signers = claimed_signers(data, RunManifest)
        manifest = open_signed(data, RunManifest, signers)
    except (MalformedError, LimitError, SignatureError) as error:
        if signers and isinstance(error, MalformedError):  # what was signed is no manifest, or one of another form
            text, advice = "not a run of this version of grailnode", "create the run again, or use the version that did"
        else:
            text, advice = "damaged", "restore it from a copy, or fetch it again"
        raise type(error)(f"{text} ({error}): {advice}", "run manifest") from error
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
    policy: policies.Policy = await node.run_sync(policies.Policy.load, directory)  # a tokenizer takes a second
    return policy


async def fetch_data(node: Node, directory: Path) -> bytes | None:
    """Fetch the run's data file into a directory and check it; None for a run without one."""
    return None if node.run.data is None else await _fetch(node, node.run.data, directory)


async def fetch_wheels(node: Node, environment: EnvironmentSpec, directory: Path) -> list[Path]:
    """Fetch the wheels of an environment of the run, check them, and unpack each into a folder named by its digest."""
    folders: list[Path] = []
    for ref in environment.code:
        folder = directory / ref.digest.hex()
        if not folder.is_dir():
            wheel = Wheel(ref, await fetch_run_file(node, ref, node.authority.trainers, str(ref)))
            await node.run_sync(unpack, wheel, directory)
        folders.append(folder)
    return folders


async def _fetch(node: Node, ref: FileRef, directory: Path) -> bytes:
    """Return a file of the run: from a directory, else from a current trainer's space, and then kept there."""
    target = directory / ref.name
    if await node.run_sync(is_object, target, ref.digest, ref.size):
        kept: bytes = await node.run_sync(target.read_bytes)
        return kept
    data = await fetch_run_file(node, ref, node.authority.trainers, ref.name)
    directory.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return data
