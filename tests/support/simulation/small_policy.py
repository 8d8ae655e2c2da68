"""The policy of simulations by the thousand: one layer, 13,440 weights, and right about one sum in six.

    python -m tests.support.simulation.small_policy

makes tests/network/policy anew (some minutes on one core). It is trained rather than drawn at random because a group
whose rewards are all alike teaches nothing, and then no version would ever follow the first.
"""

from pathlib import Path
from typing import Final

from grailnode.calibration import proof_file
from grailnode.calibration.proof_file import Proof
from grailnode.demo import genesis
from grailnode.engine import policy
from grailnode.engine.policy import PACKAGED_POLICY
from protocol.digest import digest_weights

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


def proof(policy_directory: Path) -> Proof:
    """The thresholds of a simulated run: those of a policy's own proof.json, and the packaged policy's for one that has
    none.

    Everybody in a simulation computes with one engine on one machine, so honest nodes agree to the bit.
    """
    own = policy_directory / proof_file.NAME
    if own.is_file():
        return proof_file.read(own)
    packaged = proof_file.read(PACKAGED_POLICY / proof_file.NAME)
    digest = digest_weights(policy.load_weights(policy_directory)).hex()
    return packaged.model_copy(update={"measured": packaged.measured.model_copy(update={"policy": digest})})


if __name__ == "__main__":
    policy.save(DIRECTORY, RECIPE.config(), genesis.tokenizer(), genesis.make(RECIPE, 0, progress=True))
