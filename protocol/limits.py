"""Every wire maximum, with its unit, by the module that checks it. A limit is checked before the bytes that it bounds
are decoded.
"""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

# encoding.py
MAX_DEPTH: Final = 16  # nested containers in one canonical object
MAX_RECORD_BYTES: Final = 8 * MIB  # bytes of one record, unless its class sets another limit
MAX_ITEMS: Final = 1 << 20  # values in one canonical object: containers, map keys and scalars together
MAX_STRING_BYTES: Final = 4 * KIB  # UTF-8 bytes of one string

# beacon.py
MAX_BEACON_BYTES: Final = 4 * KIB  # bytes of one relay's answer, or of one chain's description
MAX_BEACON_ROUND: Final = (1 << 53) - 1  # largest round number: every JSON reader takes it exactly
MAX_BEACON_PERIOD_MS: Final = 86_400_000  # milliseconds between two rounds: one day
MAX_TIME_MS: Final = (1 << 43) - 1  # milliseconds since the epoch: the year 2248; float64 holds it to two microseconds

# run.py
MAX_RUN_BYTES: Final = 512 * KIB  # bytes of one run manifest, or of one revision of its authority
MAX_MODEL_FILE_BYTES: Final = 64 * MIB  # bytes of one file of the model: config, tokenizer
MAX_STOP_TOKENS: Final = 16  # token ids that end a completion
MAX_EVALUATION_PROBLEMS: Final = 4096  # held-out problems of one evaluation
MAX_EVALUATION_SAMPLES: Final = 64  # completions of one of them

# lora.py
MAX_LORA_RANK: Final = 1024  # rank of one adapter
MAX_LORA_ALPHA: Final = 65536.0  # largest alpha of the adapters
MAX_LORA_TARGETS: Final = 64  # names of modules that have adapters
MAX_BASE_FILE_BYTES: Final = 1 * GIB  # bytes of the tensors in one file of a base, or one tensor that is larger

# compression.py
MAX_ZSTD_WINDOW_BYTES: Final = 128 * MIB  # bytes of the window that a zstd frame may require its reader to hold

# identity/signing.py
MAX_SIGNATURES: Final = 16  # signatures of one envelope
MAX_ENVELOPE_BYTES: Final = 4 * KIB  # bytes that an envelope adds to its body

# identity/authority.py
MAX_REVISIONS: Final = 4096  # revisions of a run's authority
MAX_KEYS: Final = 1024  # keys of one role
MAX_PARTICIPANTS: Final = 1 << 17  # participants whose announcements a node remembers
MAX_WINDOW_MINERS: Final = 1 << 14  # miners of one window: rows of one summary
MAX_STRANGERS: Final = 4096  # keys never admitted before whose announcements a node reads at once

# identity/participant.py
MAX_ANNOUNCEMENT_BYTES: Final = 4 * KIB  # bytes of one announcement
MAX_MIRRORS: Final = 64  # copies of the trainers' spaces that an authority names
MAX_SPACE_BYTES: Final = 256  # UTF-8 bytes of a space's URL
MAX_LISTED_PARTICIPANTS: Final = 1 << 17  # announcements' paths that a node reads of one listing

# identity/admission.py
MAX_CREDENTIAL_BYTES: Final = 1 * KIB  # bytes of the credential in an announcement
MAX_WORK_MS: Final = 2 * 86_400_000  # milliseconds for which a proof of work may be valid: two days

# environments/record.py
MAX_WHEELS: Final = 64  # distributions of one plug-in: its own, and all that it imports
MAX_WHEEL_BYTES: Final = 64 * MIB  # bytes of one wheel
MAX_CONFIG_BYTES: Final = 64 * KIB  # bytes of one environment's configuration
MAX_RUBRIC_PARTS: Final = 6  # parts of one reward
MAX_MIXTURE_MEMBERS: Final = 16  # environments of one run

# environments/dataset.py
MAX_DATA_BYTES: Final = 64 * MIB  # bytes of one data file
MAX_DATA_LINES: Final = 1 << 20  # lines of one data file, including empty ones
MAX_DATA_LINE_BYTES: Final = 256 * KIB  # bytes of one problem of a data file
MAX_STRATUM_CHARS: Final = 64  # characters of the name of a kind of problems

# chain/safetensors.py, and the tables of chain/manifest.py and patch/container.py
MAX_TENSORS: Final = 1 << 17  # tensors of one model
MAX_NAME_BYTES: Final = 512  # UTF-8 bytes of a tensor's name
MAX_RANK: Final = 8  # dimensions of a tensor
MAX_ELEMENTS: Final = 1 << 40  # elements of one tensor
MAX_SAFETENSORS_HEADER_BYTES: Final = 16 * MIB  # bytes of the JSON header of one safetensors file

# chain/manifest.py
MAX_ANCHOR_SHARDS: Final = 4096  # shards of one anchor
MAX_SHARD_BYTES: Final = 64 * GIB  # bytes of one anchor shard
MAX_PATCH_PARTS: Final = 4096  # parts of one patch
MAX_CHAIN: Final = 4096  # manifests that a head lists
MAX_HEAD_BYTES: Final = 512 * KIB  # bytes of one head

# chain/verifier.py
MAX_CLOCK_SKEW_MS: Final = 300_000  # milliseconds by which a publisher's clock may be ahead of a reader's

# patch/container.py
MAX_PATCH_BYTES: Final = 64 * GIB  # bytes of one patch
MAX_PATCH_HEADER_BYTES: Final = 16 * MIB  # bytes of a patch's table, packed or not: 128 for each of MAX_TENSORS

# pseudogradient/payload.py
MAX_CONTRIBUTION_BYTES: Final = 16 << 40  # bytes of one contribution's frames
MIN_PAYLOAD_FILE_BYTES: Final = MIB  # least of the following that a contribution may state, which bounds its files
MAX_PAYLOAD_FILE_BYTES: Final = 1 * GIB  # bytes of the frames in one file of a contribution, or one that is larger

# outer/round_records.py
MAX_WORKERS: Final = 1024  # sites that train together
MAX_STREAMS: Final = 16  # parts of the weights that sites send in turn
MAX_ROUND_GROUPS: Final = 4096  # groups that a site uses in one round
MAX_ALL_ROUND_GROUPS: Final = 1 << 19  # groups that all sites use in one round
MAX_ROUND_CONTRIBUTION_BYTES: Final = 256 * KIB  # bytes of one contribution's record
MAX_ROUND_MANIFEST_BYTES: Final = 32 * MIB  # bytes of one round manifest: 34 for each group, and 512 for each worker
MAX_ROUND_PLAN_BYTES: Final = 256 * KIB  # bytes of one plan of a round
MAX_SHARE_PARTS: Final = 1 << 16  # parts of which a site computes products in one round
MAX_ROUND_PRODUCTS_BYTES: Final = 64 * MIB  # bytes of them: 8 for each worker and part
MAX_STATE_SHARDS: Final = 1024  # shards of one outer state
MAX_STATE_SHARD_BYTES: Final = 1 * GIB  # bytes of one of them
MAX_ROUND_POINTER_BYTES: Final = 128 * KIB  # bytes of one round pointer

# rollout/batch.py
MAX_GROUP_SIZE: Final = 256  # rollouts of one group
MAX_GROUPS: Final = 4096  # groups of one miner in one window
MAX_STEPS: Final = 16  # steps of a statistic in a row of thresholds
MAX_ALTERNATIVES: Final = 16  # alternatives of one of them
MAX_REWARD: Final = 10**12  # largest reward, in millionths
MAX_PROMPT_TOKENS: Final = 1 << 16  # tokens of one prompt
MAX_COMPLETION_TOKENS: Final = 1 << 17  # tokens of one completion
MAX_TURNS: Final = 256  # turns of one episode
MAX_REPLY_TOKENS: Final = 1 << 16  # tokens of one reply of an environment
MAX_REPLY_BYTES: Final = 64 * KIB  # UTF-8 bytes of the text of one
MAX_EPISODE_TOKENS: Final = 1 << 18  # tokens of an episode behind its prompt
MAX_GROUP_BYTES: Final = 64 * MIB  # bytes of one encoded group
MAX_GROUP_ITEMS: Final = 1 << 12  # values in one encoded group
MAX_BATCH_BYTES: Final = 1 * GIB  # bytes of one miner's batch of one window
MAX_COMMITMENT_BYTES: Final = 512 * KIB  # bytes of one commitment

# judging/verdict.py
MAX_VERDICT_BYTES: Final = 64 * MIB  # bytes of one verdict, including its log-probabilities

# judging/ledger.py
MAX_SUMMARY_BYTES: Final = 16 * MIB  # bytes of one summary
MAX_SUMMARY_ITEMS: Final = 5 << 19  # values in one summary: 118 in a row, and scores and amendments
MAX_SEAL_BYTES: Final = 512  # bytes of one seal with its envelope
MAX_STRATA: Final = 64  # kinds of problems of one evaluation
MAX_WITNESS_BYTES: Final = 1 * MIB  # bytes of one witness

# object stores, which are outside this package
MAX_OBJECT_PATH_BYTES: Final = 900  # UTF-8 bytes of a path; S3 allows 1,024 in all
MAX_OBJECT_PART_BYTES: Final = 200  # UTF-8 bytes between two slashes; file systems allow 255
