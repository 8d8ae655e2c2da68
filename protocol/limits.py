"""Every wire maximum in one place, with its unit. A cap is checked before the bytes behind it are decoded."""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# encoding.py
MAX_DEPTH: Final = 16  # nested containers in one canonical object
MAX_RECORD_BYTES: Final = 8 * MIB  # one record, where its kind does not say otherwise
MAX_ITEMS: Final = 1 << 20  # values in one canonical object: containers, map keys and scalars together
MAX_STRING_BYTES: Final = 4 * KIB  # UTF-8 bytes of one string

# signing.py
MAX_SIGNATURES: Final = 16  # signatures of one envelope
MAX_ENVELOPE_BYTES: Final = 4 * KIB  # what an envelope adds to its body

# run.py
MAX_RUN_BYTES: Final = 512 * KIB  # one run manifest, or one revision of its authority
MAX_REVISIONS: Final = 4096  # revisions of a run's authority
MAX_KEYS: Final = 1024  # keys of one role
MAX_MODEL_FILE_BYTES: Final = 64 * MIB  # config, tokenizer

# environments
MAX_DATA_BYTES: Final = 64 * MIB  # one data file
MAX_DATA_LINES: Final = 1 << 20  # lines of one data file, empty ones included
MAX_DATA_LINE_BYTES: Final = 256 * KIB  # one problem of a data file

# weights
MAX_TENSORS: Final = 1 << 17  # tensors of one model
MAX_NAME_BYTES: Final = 512  # UTF-8 bytes of a tensor's name
MAX_RANK: Final = 8  # dimensions of a tensor
MAX_ELEMENTS: Final = 1 << 40  # elements of one tensor
MAX_SAFETENSORS_HEADER_BYTES: Final = 16 * MIB  # JSON header of one safetensors file
MAX_ANCHOR_SHARDS: Final = 4096  # shards of one anchor
MAX_SHARD_BYTES: Final = 64 * GIB  # one anchor shard

# patches
MAX_PATCH_BYTES: Final = 64 * GIB  # one patch object
MAX_PATCH_HEADER_BYTES: Final = 16 * MIB  # the table of a patch, packed or not: 128 bytes for each of MAX_TENSORS

# chain
MAX_CHAIN: Final = 4096  # manifests that a head lists
MAX_HEAD_BYTES: Final = 512 * KIB  # one head
MAX_CLOCK_SKEW_MS: Final = 300_000  # milliseconds by which a publisher's clock may be ahead of a reader's

# rollouts
MAX_GROUP_SIZE: Final = 256  # rollouts of one group
MAX_GROUPS: Final = 4096  # groups of one miner in one window
MAX_PROMPT_TOKENS: Final = 1 << 16  # tokens of one prompt
MAX_COMPLETION_TOKENS: Final = 1 << 17  # tokens of one completion
MAX_GROUP_BYTES: Final = 64 * MIB  # one encoded group
MAX_GROUP_ITEMS: Final = 1 << 12  # values in one encoded group
MAX_ZSTD_WINDOW_BYTES: Final = 128 * MIB  # what a zstd frame may ask its reader to hold
MAX_BATCH_BYTES: Final = 1 * GIB  # one miner's batch of one window
MAX_COMMITMENT_BYTES: Final = 512 * KIB  # one commitment

# verdicts
MAX_VERDICT_BYTES: Final = 64 * MIB  # one verdict, log-probabilities included
MAX_SUMMARY_BYTES: Final = 4 * MIB  # one summary
MAX_SEAL_BYTES: Final = 512  # one seal with its envelope
MAX_WITNESS_BYTES: Final = 1 * MIB  # one witness
MAX_PARTICIPANTS: Final = 4096  # participants that a node takes notice of
MAX_ANNOUNCEMENT_BYTES: Final = 4 * KIB  # one announcement
MAX_SPACE_BYTES: Final = 256  # the URL of a space
MAX_PROOF_BYTES: Final = 1 * KIB  # what an announcement shows to be admitted
MAX_LISTED_PARTICIPANTS: Final = 1 << 16  # announcements' paths that a node reads of a listing
MAX_WORK_MS: Final = 2 * 86_400_000  # milliseconds that a proof of work may count for: two days

# beacon.py
MAX_BEACON_BYTES: Final = 4 * KIB  # one relay's answer, or one chain's description
MAX_BEACON_ROUND: Final = (1 << 53) - 1  # a round number: what every JSON reader takes exactly
MAX_BEACON_PERIOD_MS: Final = 86_400_000  # milliseconds between two rounds: a day
MAX_TIME_MS: Final = (1 << 43) - 1  # milliseconds since the epoch: the year 2248; float64 counts its microseconds

# object stores
MAX_OBJECT_PATH_BYTES: Final = 900  # UTF-8 bytes of a path; S3 takes 1,024 in all
MAX_OBJECT_PART_BYTES: Final = 200  # UTF-8 bytes between two slashes; file systems take 255
