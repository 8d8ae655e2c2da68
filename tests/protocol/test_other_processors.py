"""What two nodes must compute alike, compared with what other processors have computed.

Scores, evidence, what a coordinator weighs contributions by, and the state after a round are the same to the bit.
"""

import hashlib
import json
import platform
import random
from typing import Any

import numpy as np
import pytest
import torch

from protocol.judging.accounts import Accounts
from protocol.judging.ledger import Summary
from protocol.outer.comparing import PROJECTED, SentRounds, compare
from protocol.outer.drift import settled_contributions
from protocol.outer.robust import weigh_round
from protocol.outer.shared_state import SharedState
from protocol.pseudogradient import DILOCO, Payload, encode
from tests.support.builders import samples
from tests.support.builders.proofs import by_statistic
from tests.support.builders.samples import counts, round_rules, row, summary
from tests.support.processes.dispatches import DISPATCHES, environment, failures, observe_in

LEDGERS, WINDOWS, MINERS, SITES = 100, 3, 40, 5
SCORING = samples.SCORING.model_copy(update={"decay": 870_550_563})
PROOF = samples.run_manifest().proof
DIGESTS = {  # SHA-256
    "judged": "7694482296fccc30d90c004cf9c48b536027875b65d6b5c92d45bc63cc1fda46",
    "weighed": "0a079e50be44a2c8b2c700e034baf1e796788207caef659d549164452b758c57",
    "state": "49839adcfcb76ebcd7198f29800174027d9148a2d576e9feaaa5b03d89590146",
}
KEYS = [samples.key(f"miner {number}") for number in range(MINERS)]


def _ledger(seed: int) -> list[Summary]:
    draw = random.Random(seed)
    return [
        summary(*(row(key, **_groups(draw)) for key in KEYS), window=window, amendments=()) for window in range(WINDOWS)
    ]


def _groups(draw: random.Random) -> dict[str, Any]:
    accepted = draw.randrange(1, 17)
    rejected = draw.randrange(17 - accepted) if draw.random() < 0.1 else 0
    tokens = draw.randrange(1000, 5000)
    missed = counts(sketch=(tokens, draw.randrange(20)), margin=(tokens, draw.randrange(6), draw.randrange(2)))
    return {"audited": accepted + rejected, "accepted": accepted, "rejected": rejected, "counts": missed}


def _judged(seed: int) -> list[Any]:
    """Return the scores of a ledger, and the evidence against its first miner."""
    ledger = _ledger(seed)
    shares = [[miner.hex(), score] for miner, score in Accounts.of(ledger, SCORING, PROOF).scores()]
    evidence = Accounts.of(ledger, SCORING, PROOF).evidence_of(KEYS[0].public, "torch-float32")
    return [shares, {name: list(values) for name, values in by_statistic(evidence, PROOF.table[0]).items()}]


def _weighed_rounds() -> list[Any]:
    """Weigh the contributions to some rounds in which site 2 drifts and site 3 sends more than the others."""
    draw, sent, weighed = np.random.default_rng(0), SentRounds(), list[Any]()
    size, workers = PROJECTED + 100, [bytes([place]) for place in range(SITES)]
    state, drift = SharedState.begin({"a": torch.zeros(size)}, has_momentum=False), draw.uniform(-0.7, 0.7, size)
    for _ in range(settled_contributions(round_rules().local_steps) + 4):
        updates = draw.uniform(-1, 1, size) + draw.uniform(-1, 1, (SITES, size))
        updates[2] += drift
        updates[3] *= draw.uniform(1, 2)
        local = [{"a": torch.from_numpy(update.astype(np.float32))} for update in updates]
        digest = state.digests.weights
        payloads = [encode(state.weights, own, None, DILOCO.coding, digest).payload for own in local]
        comparison = compare(state, payloads, round_rules(), bytes(32))
        weighting = weigh_round(workers, comparison, sent)
        sent = sent.after(weighting.sent)
        projections = hashlib.sha256(weighting.sent.projections.tobytes()).hexdigest()
        weighed.append([weighting.factors, weighting.cosines, weighting.drift_factors, projections])
    return weighed


def _state_after_a_round() -> str:
    random_state = np.random.default_rng(0)  # torch's own normal numbers depend on the processor

    def tensor(scale: float) -> torch.Tensor:
        return torch.from_numpy(random_state.uniform(-scale, scale, (300, 40)).astype(np.float32))

    base, rules = tensor(0.1), round_rules()
    state = SharedState.begin({"a": base}, has_momentum=True)

    def payload() -> Payload:
        local, feedback = {"a": base - tensor(1e-3)}, {"a": tensor(1e-5)}
        return encode({"a": base}, local, feedback, DILOCO.coding, state.digests.weights).payload

    return repr(state.after([payload() for _ in range(3)], [1.0, 0.7312, 1 / 3], rules).digests)


def test_scores_weights_and_states_have_the_bits_of_every_other_processor() -> None:
    """`.ci/run` repeats it with libraries that leave out instruction sets."""
    weighed = _weighed_rounds()
    assert 0 < weighed[-1][2][2] < 1
    assert 0 < weighed[-1][0][3] < 1
    judged = [_judged(seed) for seed in range(LEDGERS)]
    results = {"judged": judged, "weighed": weighed, "state": _state_after_a_round()}
    digests = {name: hashlib.sha256(json.dumps(result).encode()).hexdigest() for name, result in results.items()}
    assert digests == DIGESTS


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the switches are those of x86-64")
def test_a_switch_that_has_no_effect_is_noticed() -> None:
    dispatch, native = DISPATCHES["nehalem"], observe_in({})
    switches = environment(dispatch)
    assert failures(dispatch, observe_in(switches), native) == []
    for switch in switches.keys() - {"NUMBA_CPU_FEATURES"}:  # which only keeps one in the environment from adding some
        others = {name: value for name, value in switches.items() if name != switch}
        assert len(failures(dispatch, observe_in(others), native)) == 1, switch
