"""Every animal by name.

An animal is a function from (field, turn, numbers of groups) to the groups that it delivers, in the module of what it
falsifies: `sketches`, `policies`, `tokens`, or `claims`. What plays with storage and deadlines instead is in
`tests.support.adversaries.storage_adversaries`.
"""

from tests.support.adversaries.miners import claims, policies, sketches, tokens
from tests.support.adversaries.miners.registry import ANIMALS, Animal, Specimen

__all__ = ["ANIMALS", "Animal", "Specimen", "claims", "policies", "sketches", "tokens"]
