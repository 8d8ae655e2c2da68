"""The adversaries by name.

An adversary is a function from an attempt (harness, window, numbers of groups) to the groups that it delivers, in the
module of what it falsifies: `sketches`, `policies`, `tokens` or `claims`. Adversaries that use storage or deadlines are
in `tests/adversaries/test_storage_adversaries.py`.
"""

from tests.support.adversaries.miners import claims, policies, sketches, tokens
from tests.support.adversaries.miners.registry import ADVERSARIES, AdversarialProducer, Adversary

__all__ = ["ADVERSARIES", "AdversarialProducer", "Adversary", "claims", "policies", "sketches", "tokens"]
