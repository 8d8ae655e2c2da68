"""Write docs/spec/examples.md (`python -m tests.vectors.examples`): one record of each kind, its fields and its bytes.

The records are those of the golden vectors (tests/support/builders/samples.py), and the records inside them.
"""

import json
from pathlib import Path
from typing import Any, Final

from protocol.encoding import Record, content_digest, pack
from protocol.environments import rubric
from protocol.identity.signing import Envelope, sign
from protocol.judging.ledger import Seal
from protocol.lora import LoraSpec
from protocol.run import ChatSpec, EpisodeSpec
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID, VALIDATOR, digest
from tests.vectors import difficulty

PAGE: Final = Path(__file__).parents[2] / "docs" / "spec" / "examples.md"
TEXT: Final = """\
# Examples

This page shows one record of each kind, encoded by the rules of [encoding.md](encoding.md). It is written by
`python -m tests.vectors.examples`, and a test compares it with the code. Each digest is the SHA-256 of a short ASCII
text, and the secret of each key is such a digest: the run id is that of `run`, the validator's secret that of
`key of validator`.

## A signed record

The bytes of the name and of the value of each field of a seal; the message that is signed (domain, kind and record,
with zero bytes between them); the validator's public key and signature; the envelope, which is the object in storage:

```
{fields}
message {message}
key {key}
signature {signature}
envelope {envelope}
```

## Every kind

Each example has the kind, the number of bytes, their SHA-256, the fields as JSON (bytes in hex, `<kind>` for a record
of that kind, `<kind>*3` for an array of three), and the bytes. Where `..` stands, bytes are left out; `encoding.json`
in `tests/vectors/` has all bytes of these records or of records that contain them.

```
{records}
```
"""


def shown(data: bytes, first: int, last: int, longest: int) -> str:
    """Return bytes in hex; of more than `longest`, only the first and the last ones."""
    return data.hex() if len(data) <= longest else f"{data[:first].hex()}..{data[-last:].hex()}"


def plain(value: Any) -> Any:
    """Return the value of a field in JSON's types."""
    if isinstance(value, Record):
        return f"<{value.kind}>"
    if isinstance(value, bytes):
        return shown(value, 3, 1, 12)
    if isinstance(value, tuple) and value and isinstance(value[0], Record):
        return f"<{value[0].kind}>*{len(value)}"
    return list(map(plain, value)) if isinstance(value, tuple) else value


def records() -> dict[str, Record]:
    """Return the longest sample record of each kind, in the order of kinds."""
    shards = samples.round_pointer().shards
    queue: list[Any] = [
        *samples.every_record(),
        *rubric.parse("overlong:512=1/10"),
        *(difficulty.RULE, difficulty.TABLE),
        EpisodeSpec(turns=4, turn_tokens=8, reply_tokens=8, tokens=64),
        ChatSpec(template=digest("template"), system="", before="Q: ", after="\nA: ", trim=True),
        LoraSpec(rank=8, alpha=16.0, targets=("k_proj", "q_proj"), base=digest("base"), shards=shards),
    ]
    longest: dict[str, Record] = {}
    for value in queue:  # which grows by the values inside each value
        if isinstance(value, Record):
            longest[value.kind] = max(longest.get(value.kind, value), value, key=lambda record: len(record.to_bytes()))
            queue += [getattr(value, name) for name in type(value).model_fields]
        elif isinstance(value, tuple):
            queue += value
    return dict(sorted(longest.items()))


def example(record: Record) -> str:
    """Return the lines of one record."""
    data = record.to_bytes()
    fields = {name: plain(getattr(record, name)) for name in sorted(record.model_dump())}
    lines = (json.dumps(fields, separators=(",", ":")), shown(data, 32, 8, 160))
    return "\n  ".join((f"{record.kind} {len(data)} {content_digest(data).hex()}", *lines))


def text() -> str:
    """Return the contents of the page."""
    seal = Seal(run=RUN_ID, window=7, validator=VALIDATOR.public, summary=digest("summary 7"))
    fields, envelope = sorted(seal.model_dump().items()), sign(seal, VALIDATOR)
    lines = ["84 map of 4", *(f"{pack(name).hex()} {pack(value).hex()} {name}" for name, value in fields)]
    return TEXT.format(
        fields="\n".join(lines),
        message=b"\0".join((b"grailnode/1", seal.kind.encode(), seal.to_bytes())).hex(),
        key=VALIDATOR.public.hex(),
        signature=Envelope.from_bytes(envelope).signatures[0].value.hex(),
        envelope=envelope.hex(),
        records="\n".join(map(example, records().values())),
    )


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
