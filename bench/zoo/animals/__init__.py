"""Every animal by name.

An animal is a function from (field, turn, numbers of groups) to the groups that it delivers, in the module of what it falsifies:
`sketches`, `policies`, `tokens`, or `claims`. What plays with storage and deadlines instead is in `bench.zoo.smugglers`.
"""

from bench.zoo.animals import claims, policies, sketches, tokens
from bench.zoo.animals.registry import ANIMALS, Animal, Specimen

__all__ = ["ANIMALS", "Animal", "Specimen", "claims", "policies", "sketches", "tokens"]
