"""Golden vectors of difficulty tables."""

from protocol.difficulty import Counts, DifficultySpec, DifficultyTable, Stratum
from protocol.encoding import pack
from protocol.environments import get
from protocol.environments.mixture import Strata, drawn_member
from tests.support.builders import samples
from tests.vectors.cases import MALFORMED, Case, bad, good

RULE = DifficultySpec(
    strata=tuple(Stratum(name=name, ppm=ppm) for name, ppm in (("easy", 500_000), ("hard", 200_000), ("new", 300_000))),
    floor_ppm=200_000,
    decay=900_000,
)
COUNTS: tuple[Counts, ...] = (
    ((60_000_000, 3_000_000), (40_000_000, 39_000_001), (0, 0)),
    ((50_000_000, 50_000_000), (30_000_000, 0), (1_000_000, 0)),
    ((55_000_001, 7_000_000), (35_000_000, 30_000_000), (2_000_000, 2_000_000)),
)
NAMES = [f"validator {place}" for place in range(len(COUNTS))]
LEDGERS = {samples.key(name).public: (samples.digest(name), counts) for name, counts in zip(NAMES, COUNTS, strict=True)}
TABLE = DifficultyTable.of(RULE, 7, LEDGERS)


def page() -> list[Case]:
    seeds = [samples.digest(f"seed {number}") for number in range(8)]
    fields = TABLE.model_dump()
    return [
        good("rule", DifficultySpec.kind, RULE.to_bytes()),
        good("table", DifficultyTable.kind, TABLE.to_bytes()),
        bad("shares of less than all", DifficultyTable.kind, pack(fields | {"shares": (1, 1, 1)}), MALFORMED),
        bad("a window without summaries", DifficultyTable.kind, pack(fields | {"summaries": ()}), MALFORMED),
        *(
            {"name": f"shares by {count} summaries", "counts": COUNTS[:count], "shares": RULE.shares(COUNTS[:count])}
            for count in range(4)
        ),
        *(
            {"name": f"counts {later} windows later", "before": COUNTS[0], "after": RULE.count(COUNTS[0], later, ())}
            for later in (1, 3, 1 << 33)
        ),
        {
            "name": "draws",
            "seeds": [seed.hex() for seed in seeds],
            "shares": TABLE.shares,
            "strata": [drawn_member(TABLE.shares, seed) for seed in seeds],
        },
        *(
            {
                "name": f"problems of {name}",
                "seed": seeds[0].hex(),
                "prompts": {level: strata.problem(level, seeds[0]).prompt for level in strata.weights},
            }
            for name in ("addition", "sat")
            if (strata := Strata(get(name)))
        ),
    ]
