"""A network in which a validator's prefill takes a fixed time of the virtual clock."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from grailnode.engine.compute import make_engine
from grailnode.run.rules import Rules
from protocol.rollout.checking import Check, CheckRules
from roles.authority_updates import under_authority
from roles.miner.produce import HonestProducer
from roles.policy.follower import Follower
from roles.ports import CheckRequest, Engine
from roles.validator.ledger_state import Ledger
from roles.validator.validator import Validator
from roles.validator.validator_settings import ValidatorSettings
from tests.support.simulation.network import Network, TrainerSettings

_NEVER: Final = 1 << 20  # groups of a step


class TimedEngine:
    """An engine whose prefills take time.

    Args:
        seconds: returns the seconds of one prompt with its completion.
    """

    def __init__(self, inner: Engine, seconds: Callable[[], float]) -> None:
        self._inner = inner
        self._seconds = seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def check(self, requests: Sequence[CheckRequest], rules: CheckRules) -> list[Check]:
        """Check completions, and take the time of a prefill for each."""
        await trio.sleep(self._seconds() * len(requests))
        return await self._inner.check(requests, rules)


class TimedNetwork(Network):
    """A network whose validators take some time for a prefill, and evaluate nothing. Its miners deliver as many groups
    as the run allows. Its trainer takes no steps: new versions would make pledges lapse.

    Attributes:
        prefill_seconds: of a group.
    """

    def __init__(self, rules: Rules, validators: int, quorum: int) -> None:
        super().__init__(rules, validators, quorum)
        self.prefill_seconds = 0.0

    def trainer_settings(self, groups_per_step: int = _NEVER, canaries: int = 0, **publisher: Any) -> TrainerSettings:
        return super().trainer_settings(_NEVER, canaries, **publisher)

    async def run_miner(self, name: str, groups: int = 0, producer: Any = HonestProducer) -> None:
        await super().run_miner(name, self.run.groups, producer)

    async def run_validator(self, name: str = "validator-0", poll_seconds: float = 0.2) -> None:
        node = self.node(name)
        async with under_authority(node):
            engine = TimedEngine(
                make_engine(self.compute, node.run_sync), lambda: self.prefill_seconds / node.run.group_size
            )
            follower = await Follower(node, keep=16).open()
            ledger = await Ledger.open(node.state, node.run)
            settings = ValidatorSettings(evaluate=False, poll_seconds=poll_seconds)
            await Validator(node, follower, engine, self.task(node), ledger, settings).run()  # type: ignore[arg-type]
