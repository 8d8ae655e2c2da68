"""The rules of each method of outer training, for the tests of this room."""

from tests.support.builders.samples import round_rules

METHODS = {
    "dense": round_rules(values="dense", fraction=0, feedback_decay=0.0),
    "averaging": round_rules(values="dense", fraction=0, feedback_decay=0.0, momentum=0.0, outer_rate=1.0),
    "exact": round_rules(values="exact", fraction=0),
    "grid": round_rules(),
    "chunked": round_rules(
        values="chunked", fraction=0, chosen=128, feedback_decay=0.95, frozen_steps=2, momentum=0.0, outer_rate=1.0
    ),
}
