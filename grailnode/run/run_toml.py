"""The text of run.toml, with comments for the operator, as `grailnode init` writes it.

The templates are TOML. Values are set in them with tomlkit, which keeps the comments and quotes strings correctly.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.items import AbstractTable

from grailnode.beacon.public_chains import RELAYS
from grailnode.run.buckets import Bucket
from protocol.beacon import ChainInfo

Value = str | int | float | Mapping[str, str | int | float] | None
"""Of a key; None leaves the key out of the file, and a mapping is a section in the section."""

Sections = Mapping[str, Mapping[str, Value]]
"""Values by section and key."""

_HEADER: Final = """\
A grailnode run on this machine. These, each in a terminal of its own, make the network:
{starts}
Any key can be overridden for one start: --set miner.groups=8
Paths are relative to this file. Secrets are not in it: they are in keys/, readable by their owner alone.
"""

_RUN: Final = """
[run]
manifest = "run.manifest"  # the signed rules that all nodes share
id = ""
"""

_LOCAL_STORE: Final = """
[store]
kind = "local"  # a directory that all nodes of this machine share
path = "store"
"""

_BUCKET_STORE: Final = """
[store]
kind = "s3"
bucket = ""
endpoint = ""
region = ""
prefix = ""
addressing = "auto"
credentials = "s3.credentials"  # mode 0600; without this key: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
url = ""  # where everybody reads what this node writes

[store.meeting]  # where participants announce themselves
kind = "s3"
bucket = ""
endpoint = ""
region = ""
prefix = ""
addressing = "auto"
credentials = "s3.credentials"
url = ""
"""

_SETTINGS: Final = """
[node]
keys = "keys"    # one file for each name
state = "state"  # one directory for each name: never share one between two processes
logs = "logs"    # one file of JSON lines for each process
metrics_port = 0 # of 127.0.0.1, for Prometheus; a trainer's processes take the next ports too; 0 for none

[beacon]
key = "beacon"  # the trainer's node runs this run's local beacon with keys/beacon.key
relays = []

[engine]
device = "cpu"      # or "cuda"
dtype = "float32"   # what BF16 weights are widened to; "bfloat16" on a GPU, where the run admits it
threads = 1         # of torch, for each process

[trainer]
data = "data.jsonl"       # the problems, as named in the manifest
adapters = "adapters"     # of version 0, for a run of LoRA adapters on the policy
policy = "genesis"        # the packaged policy, or a directory with a Hugging Face checkpoint
loss = "token-mean"       # or grpo, dr-grpo, gspo, cispo; docs/reference/config.md has every constant
learning_rate = 7e-6
warmup_steps = 10         # over which the learning rate rises to that
groups_per_step = 16      # groups of one optimizer step
steps_per_version = 1     # optimizer steps between two published versions
max_uses = 1              # times that a group is trained on
decay = 0.7               # weight of a group for each version that it is behind
max_staleness = 16        # versions behind after which it is dropped
anchor_interval = 25      # versions between two full checkpoints
patch_profile = "compact" # or "fast": encoded and applied in less time, in more bytes
"""

_SITES: Final = """
[trainer.outer]  # the run's workers train; docs/reference/config.md has every key
method = "pulseloco"   # or pulseloco-exact, sparseloco, diloco, averaging
local_steps = 4        # of a site in a round
quorum = 1             # contributions that a round needs
round_windows = 2      # a round's length
upload_seconds = 0.8   # so long before the end of a round a site stops its local steps
"""

_FOLLOWERS: Final = """
[miner]
groups = 16  # a window, at most what the run allows

[validator]
evaluate = true  # on the held-out problems of the run's rule, for every version
"""

_REMOTE_RUN: Final = """\
[run]
manifest = ""
id = ""
"""

_REMOTE_BEACON: Final = """
[beacon]
key = ""  # somebody else runs it; for a public one, relays = ["https://..."] names other relays
"""


def for_new_run(
    values: Sections,
    starts: Sequence[str],
    bucket: Bucket | None,
    beacon: ChainInfo | None,
    *,
    has_sites: bool = False,
) -> str:
    """Return the run.toml of a run that is created here.

    Args:
        values: what differs from the templates.
        starts: the commands that start the nodes.
        bucket: where the run is stored and its participants meet; None for a directory of this machine.
        beacon: the public beacon; None for one of the run's own.
        has_sites: whether several sites train.
    """
    header = _HEADER.format(starts="\n".join(f"  {start}" for start in starts))
    comments = "".join(f"# {line}\n" for line in header.splitlines())
    store = _LOCAL_STORE if bucket is None else _BUCKET_STORE
    settings = _SETTINGS + (_SITES if has_sites else "") + _FOLLOWERS
    document = tomlkit.parse(comments + _RUN + store + settings)
    if bucket is not None:
        _set_buckets(document, bucket, bucket, meeting_credentials="s3.credentials")
    if beacon is None:
        _table(document, "beacon").remove("relays")
    else:
        _set_public_beacon(_table(document, "beacon"), beacon)
    for section, keys in values.items():
        _set(_table(document, section), keys)
    return document.as_string()


def for_member(manifest: str, run_id: str, bucket: Bucket, meeting: Bucket) -> str:
    """Return the run.toml of a node that joins somebody else's run.

    Args:
        manifest: the URL of the run's manifest.
        bucket: where the node writes.
        meeting: where participants announce themselves; the node has credentials of its own for it.
    """
    document = tomlkit.parse(_REMOTE_RUN + _BUCKET_STORE + _REMOTE_BEACON)
    _set(_table(document, "run"), {"manifest": manifest, "id": run_id})
    _set_buckets(document, bucket, meeting, meeting_credentials="meeting.credentials")
    return document.as_string()


def _table(parent: TOMLDocument | AbstractTable, name: str) -> AbstractTable:
    table = parent[name]
    assert isinstance(table, AbstractTable)
    return table


def _set(table: AbstractTable, values: Mapping[str, Value]) -> None:
    for key, value in values.items():
        if value is None:
            table.remove(key)
        elif isinstance(value, Mapping) and key in table:
            _set(_table(table, key), value)
        else:
            table[key] = value


def _set_buckets(document: TOMLDocument, own: Bucket, meeting: Bucket, *, meeting_credentials: str) -> None:
    store = _table(document, "store")
    _set(store, _place(own))
    if own.url.startswith("http://"):  # only servers of this machine are read so, which others may try on purpose
        permission = tomlkit.item(True)
        permission.comment("announced URLs may be of this machine or of a private network")
        store["private_addresses"] = permission
    _set(_table(store, "meeting"), {**_place(meeting), "credentials": meeting_credentials})


def _place(bucket: Bucket) -> dict[str, Value]:
    return {
        "bucket": bucket.name,
        "endpoint": bucket.endpoint or None,
        "region": bucket.region,
        "prefix": bucket.prefix or None,
        "addressing": "path" if bucket.provider == "minio" else "auto",
        "url": bucket.url,
    }


def _set_public_beacon(table: AbstractTable, chain: ChainInfo) -> None:
    key = tomlkit.string("")
    key.trivia.comment = f"# public: {chain.beacon_id}; its relays, in the order in which they are asked:"
    table["key"] = key
    relays = tomlkit.array()
    relays.extend(RELAYS.get(chain.chain_hash, ()))
    table["relays"] = relays.multiline(True)
