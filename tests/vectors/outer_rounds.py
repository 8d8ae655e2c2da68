"""The vectors of docs/spec/outer-round.md."""

from typing import Any

from protocol.encoding import content_digest, pack, unpack
from protocol.identity.signing import sign
from protocol.outer.round_checks import owner, turn_of
from protocol.outer.round_records import Refusal, RoundManifest, RoundPointer
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID, TRAINER, WORKERS
from tests.vectors.cases import MALFORMED, Case, bad, good


def page() -> list[Case]:
    first = samples.round_manifest()
    link = content_digest(first.to_bytes())
    following = samples.round_manifest(1, link)
    same = samples.outer_state(0)
    both = (samples.counted(WORKERS[0]), samples.counted(WORKERS[1]))
    refusals = tuple(Refusal(worker=worker, reason="quorum") for worker in WORKERS)

    def step(name: str, record: RoundManifest, error: str | None, trusted: RoundManifest = first) -> Case:
        data = {"trusted": sign(trusted, TRAINER).hex(), "following": sign(record, TRAINER).hex()}
        return {"name": f"manifest: {name}", **data, "error": error}

    def after(**changes: Any) -> RoundManifest:
        return samples.round_manifest(1, link, **changes)

    spread = samples.round_manifest(rules=samples.round_rules(spread=1))

    def spread_after(**changes: Any) -> RoundManifest:
        shares = (samples.aggregated(**changes),)
        return samples.round_manifest(1, content_digest(spread.to_bytes()), aggregated=shares)

    two = samples.round_manifest(rules=samples.round_rules(quorum=2))
    link_of_two = content_digest(two.to_bytes())
    fields, contribution = unpack(following.to_bytes()), unpack(samples.contribution().to_bytes())
    plan, products = unpack(samples.round_plan().to_bytes()), unpack(samples.round_products().to_bytes())
    share = unpack(samples.aggregated().to_bytes())
    plans = {
        "workers not ascending": {"contributions": plan["contributions"][::-1]},
        "one aggregator": {"aggregators": plan["aggregators"][:1]},
        "an aggregator twice": {"aggregators": plan["aggregators"][:1] * 2},
        "of round 0": {"number": 0},
    }
    manifests = {
        "without a link": {"previous": b""},
        "a worker twice": {"counted": (fields["counted"][0],) * 2},
        "counted and refused": {"refused": ({"worker": WORKERS[0], "reason": "lost"},)},
        "an unknown reason": {"refused": ({"worker": WORKERS[1], "reason": "tired"},)},
        "workers not ascending": {"workers": WORKERS[::-1]},
        "a quorum of more than all": {"rules": fields["rules"] | {"quorum": 3}},
        "a fraction of dense values": {"rules": fields["rules"] | {"values": "dense"}},
        "rules with a momentum, no momentum": {"state": fields["state"] | {"momentum": b""}},
        "closing before it opens": {"closes": fields["beacon_round"]},
        "a factor of 0": {"counted": (fields["counted"][0] | {"factor": 0.0},)},
        "a delay of two rounds": {"rules": fields["rules"] | {"delay": 2}},
        "rules that spread in two ways": {"rules": fields["rules"] | {"spread": 2}},
        "lost products with a digest": {"aggregated": (share | {"outcome": "lost"},)},
        "sound products without a digest": {"aggregated": (share | {"products": b""},)},
        "an unknown outcome": {"aggregated": (share | {"outcome": "late"},)},
        "a factor above 1": {"counted": (fields["counted"][0] | {"factor": 1.5},)},
    }
    contributions = {
        "groups not ascending": {"groups": contribution["groups"][::-1]},
        "a group twice": {"groups": contribution["groups"][:1] * 2},
        "round 0": {"number": 0},
        "no local step": {"local_steps": 0},
        "a negative norm": {"norm": -1.0},
        "half a digest of the feedback": {"feedback": bytes(16)},
    }
    pointer = unpack(samples.round_pointer().to_bytes())
    return [
        *(
            good(record.kind, record.kind, record.to_bytes())
            for record in (
                following,
                samples.contribution(),
                samples.round_pointer(),
                samples.round_plan(),
                samples.round_products(),
            )
        ),
        *(bad(f"round: {name}", "round", pack(fields | change), MALFORMED) for name, change in manifests.items()),
        *(
            bad(f"contribution: {name}", "contribution", pack(contribution | change), MALFORMED)
            for name, change in contributions.items()
        ),
        *(bad(f"plan: {name}", "round-plan", pack(plan | change), MALFORMED) for name, change in plans.items()),
        bad("products: parts not ascending", "products", pack(products | {"parts": (2, 1)}), MALFORMED),
        bad("a state of the future", RoundPointer.kind, pack(pointer | {"state_number": 4}), MALFORMED),
        bad("no shards", RoundPointer.kind, pack(pointer | {"shards": ()}), MALFORMED),
        step("the next one", following, None),
        step("a newer epoch", after(epoch=2), None),
        step("below quorum", after(counted=(), refused=refusals, state=same, version=0), None),
        step("both sites", after(counted=both, refused=()), None),
        step("shares of a spread round", spread_after(), None, spread),
        step("shares of a round that is not spread", after(aggregated=(samples.aggregated(),)), "ChainError"),
        step("a stranger's share", spread_after(worker=TRAINER.public), "ChainError", spread),
        step("the same again", first, "RollbackError"),
        step("an older epoch", after(epoch=0), "RollbackError"),
        step("one too far", samples.round_manifest(2, link), "GapError"),
        step("another link", samples.round_manifest(1), "ForkError"),
        step("of another run", after(run=samples.digest("other")), "ChainError"),
        step("before its time", after(beacon_round=109), "ChainError"),
        step("a worker unmentioned", after(refused=()), "ChainError"),
        step("a stranger", after(counted=(samples.counted(TRAINER.public),)), "ChainError"),
        step("one where two are needed", samples.round_manifest(1, link_of_two), "ChainError", two),
        step("two steps", after(state=samples.outer_state(2)), "ChainError"),
        step("a version too far", after(version=2), "ChainError"),
        step("other weights without a contribution", after(counted=(), refused=refusals, version=0), "ChainError"),
        {
            "name": "dealing",
            "run": RUN_ID.hex(),
            "workers": [worker.hex() for worker in WORKERS],
            "owners": [
                [number, delay, group.hex(), owner(RUN_ID, turn_of(number, delay), group, WORKERS).hex()]
                for number, delay in ((1, 0), (2, 0), (2, 1), (3, 1), (4, 1))
                for group in (samples.digest(f"group {index}") for index in range(4))
            ],
        },
    ]
