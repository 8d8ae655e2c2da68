"""A small policy for many simulations: one layer, 13,440 weights, and a right answer to one sum in six.

    python -m tests.support.simulation.small_policy

makes tests/support/simulation/policy again (some minutes on one core). It is trained, because random weights give
groups of equal rewards, from which a trainer learns nothing and makes no second version.
"""

from pathlib import Path
from typing import Final

from grailnode.calibration import proof_file
from grailnode.calibration.proof_file import ProofFile
from grailnode.engine import policy
from grailnode.engine.policy import PACKAGED_POLICY
from protocol import limits
from protocol.digest import digest_weights
from tests.support.builders import genesis

DIRECTORY: Final = Path(__file__).parent / "policy"
RECIPE: Final = genesis.Recipe(
    width=32,
    layers=1,
    heads=2,
    key_value_heads=1,
    head_size=16,
    feed_forward=96,
    steps=3000,
    batch=128,
    learning_rate=1e-2,
)


def proof_of(policy_directory: Path) -> ProofFile:
    """Return the thresholds of a policy's proof.json, or those of the packaged policy.

    All nodes of a simulation compute with one engine on one machine, so honest nodes agree bit for bit, in episodes of
    any number of turns too.
    """
    own_file = policy_directory / proof_file.NAME
    changes: dict[str, object] = {"turns": limits.MAX_TURNS}
    if own_file.is_file():
        proof = proof_file.read(own_file)
    else:
        proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
        changes["policy"] = digest_weights(policy.load_weights(policy_directory)).hex()
    return proof.model_copy(update={"subject": proof.subject.model_copy(update=changes)})


if __name__ == "__main__":
    genesis.save(DIRECTORY, RECIPE.config(), genesis.tokenizer(), genesis.make(RECIPE, 0, progress=True))
