"""Measurements of one pair: groups are generated in one way and checked in another."""

from collections.abc import AsyncIterator

from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, check_groups, generate_groups
from grailnode.calibration.variants import Pair, VllmServers
from protocol.digest import Weights
from roles.ports import Engine


async def measure_pair(
    work: CalibrationTask,
    pair: Pair,
    weights: Weights,
    groups: int,
    *,
    copy: Weights | None = None,
    first: int = 0,
    servers: VllmServers | None = None,
) -> AsyncIterator[GroupMeasurement]:
    """Generate groups in one way, check them in the other way, and yield the measurements.

    Args:
        weights: of the policy, with its adapters if the run trains some.
        groups: number of groups.
        copy: other weights without adapters for the generating side, which it passes off as the policy.
        first: number of the first group; the same numbers have the same prompts, noise and projections.
        servers: of pairs with vLLM; both sides may have the same one, because all groups are generated first.
    """
    servers = servers or VllmServers()
    lora = work.lora if copy is None else None
    generating = await servers.serve(pair.generating, work.policy, weights if copy is None else copy, lora)
    submissions = [part async for part in generate_groups(work, generating, groups, first=first)]
    checking = await servers.serve(pair.checking, work.policy, weights, work.lora)
    for part in submissions:
        for group in await check_groups(work, checking, part):
            yield group


async def measure(
    work: CalibrationTask, generating: Engine, checking: Engine, groups: int, *, first: int = 0
) -> AsyncIterator[GroupMeasurement]:
    """Generate groups with one engine, check them with another, and yield the measurements.

    Args:
        generating, checking: engines that serve; which versions does not matter.
        groups, first: as for `measure_pair`.
    """
    async for submissions in generate_groups(work, generating, groups, first=first):
        for group in await check_groups(work, checking, submissions):
            yield group
