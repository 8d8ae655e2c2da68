"""The golden vectors of docs/spec/sampling.md, sketch.md and rollout.md."""

import dataclasses
import struct

import torch

from protocol.encoding import content_digest, pack, unpack
from protocol.rollout import sampling, sketch
from protocol.rollout.batch import EpisodeRule, Turn
from tests.support.builders import samples
from tests.vectors.cases import LIMIT, MALFORMED, Case, bad, good, uncompressed_frame


def sampling_page() -> list[Case]:
    """Build cases of hashes, of noise in units of 2^-19, and of sampled tokens."""

    def units(noise: torch.Tensor) -> list[int]:
        return [int(value) for value in (noise.double() / sampling.NOISE_UNIT).tolist()]

    words = [0, 1, 2, 255, 256, 65537, (1 << 31) - 1, 1 << 31, (1 << 32) - 3, (1 << 32) - 2, (1 << 32) - 1]
    cases: list[Case] = [
        {"name": "noise of words", "words": words, "units": units(sampling.gumbel(torch.tensor(words)))}
    ]
    tokens = torch.tensor([0, 1, 2, 31999, 151_935])
    for name, seed in (("zeros", bytes(16)), ("ascending", bytes(range(16))), ("ones", b"\xff" * 16)):
        for position in (0, 1, 131_071):
            words_of_tokens = sampling.hash_words(sampling.seed_words([seed])[0], torch.tensor(position), tokens)
            case: Case = {"name": f"seed of {name}, token {position}", "seed": seed.hex(), "position": position}
            drawn = {"words": words_of_tokens.tolist(), "units": units(sampling.gumbel(words_of_tokens))}
            cases.append(case | {"tokens": tokens.tolist()} | drawn)
    seed = bytes(range(16))
    logits = [[float((token * 7 + t * 3) % 11) / 4 for token in range(12)] for t in range(6)]
    for temperature in (0.5, 1.0, 2.0):
        words_of_seed = sampling.seed_words([seed]).expand(6, 4)
        chosen = sampling.choose(torch.tensor(logits), words_of_seed, torch.arange(6), temperature).tolist()
        case = {"name": f"tokens at temperature {temperature}", "seed": seed.hex(), "logits": logits}
        cases.append(case | {"temperature": temperature, "tokens": chosen})
    return cases


def sketch_page() -> list[Case]:
    """Build cases of sketches. The states are small integers of distinct magnitudes, so that all machines agree about
    the largest.
    """
    states = [[(d * (t + 2) * 7 % 53) * (-1) ** (d * d // 3) for d in range(1, 53)] for t in range(4)]
    cases: list[Case] = []
    kinds: tuple[sketch.SketchKind, ...] = ("projection", "topk")
    for kind in kinds:
        for name in ("first", "second"):
            seed = samples.digest(f"{name} {kind} sketch")
            data = sketch.commit(kind, torch.tensor(states, dtype=torch.float32), seed)
            case: Case = {"name": f"{kind}, {name} seed", "kind": kind, "seed": seed.hex()}
            cases.append(case | {"hidden": states, "sketch": data.hex()})
    pairs = ((bytes(8), bytes([0, 2, 254, 0, 0, 0, 0, 3])), (bytes([127] * 4), bytes([129] * 4)), (b"", b""))
    for place, (other, recomputed) in enumerate(pairs):
        distances = sketch.distances(other, recomputed).tolist()
        case = {"name": f"distances {place}", "other": other.hex(), "recomputed": recomputed.hex()}
        cases.append(case | {"distances": distances})
    return cases


def rollout() -> list[Case]:
    """Build cases of groups and frames, which are not compressed. The case `commitment` is that to groups 0 and 1; the
    parser `group 0` opens a frame as its first group.
    """
    groups = [samples.group(0), samples.group(1)]
    frames = [uncompressed_frame(group.to_bytes()) for group in groups]
    batch = b"".join(frames)
    committed = tuple((content_digest(frame), len(frame)) for frame in frames)
    commitment = samples.commitment(committed, batch=content_digest(batch))
    data = groups[0].to_bytes()
    fields = unpack(data)
    altered_rollouts = [fields["rollouts"][0] | {"sketch": bytes(8)}, *fields["rollouts"][1:]]
    episodes = samples.group(1, rollouts=(samples.episode_rollout(),))
    episode = unpack(episodes.to_bytes())["rollouts"][0]

    def altered_episode(*turns: object) -> bytes:
        return pack(fields | {"rollouts": (episode | {"turns": turns},)})

    return [
        *_forms(),
        good("a group of an episode", "group", episodes.to_bytes(), work=episodes.work_digest().hex()),
        bad("turns of too many tokens", "group", altered_episode((2, b""), (2, b"")), MALFORMED),
        bad("turns of too few tokens", "group", altered_episode((2, b"")), MALFORMED),
        bad("no turns", "group", altered_episode(), MALFORMED),
        bad("an empty turn", "group", altered_episode((3, b""), (0, b"")), MALFORMED),
        bad("half a token of a reply", "group", altered_episode((2, b"abcde"), (1, b"")), MALFORMED),
        good("group", "group", data, work=groups[0].work_digest().hex()),
        good("frame", "frame", frames[0], digest=content_digest(frames[0]).hex()),
        good("commitment", "commitment", commitment.to_bytes(), extents=[commitment.extent(i) for i in range(2)]),
        {"name": "batch", "batch": batch.hex(), "commitment": commitment.to_bytes().hex()},
        bad("another group's frame", "group 0", frames[1], MALFORMED),
        bad("a frame with a bit flipped", "group 0", frames[0][:-1] + bytes([frames[0][-1] ^ 1]), MALFORMED),
        bad("two frames", "frame", batch, MALFORMED),
        bad("half a frame", "frame", frames[0][:-10], MALFORMED),
        bad("a frame that declares too little", "frame", uncompressed_frame(data, len(data) - 1), MALFORMED),
        bad("a frame that declares too much", "frame", uncompressed_frame(data, len(data) + 1), MALFORMED),
        bad("a frame that declares 4 GiB", "frame", uncompressed_frame(data, (1 << 32) - 1), LIMIT),
        bad("a skippable frame", "frame", struct.pack("<II", 0x184D2A50, 4) + b"abcd", MALFORMED),
        bad("a frame of no group", "frame", uncompressed_frame(pack(None)), MALFORMED),
        bad("a frame of too many values", "frame", uncompressed_frame(pack((None,) * 4096)), LIMIT),
        bad("a sketch too short", "group", pack(fields | {"rollouts": altered_rollouts}), MALFORMED),
        bad("half a token", "group", pack(fields | {"prompt": b"abcde"}), MALFORMED),
        bad("no rollouts", "group", pack(fields | {"rollouts": ()}), MALFORMED),
    ]


def _forms() -> list[Case]:
    """Build cases of episodes by one rule, with 1 as the stop token: whether they have the form that sampling gives."""
    rule = EpisodeRule(turns=3, turn_tokens=3, reply_tokens=4, tokens=14, max_tokens=7, stops=(1,))
    cases: dict[str, tuple[bool, list[int], list[Turn]]] = {
        "one turn": (True, [5, 1], [(2, ())]),
        "three turns": (True, [5, 1, 5, 6, 7, 1], [(2, (9,)), (3, (9, 9)), (1, ())]),
        "a stop token alone": (True, [1, 1], [(1, ()), (1, ())]),
        "as many policy tokens as there may be": (True, [5, 6, 7, 5, 6, 7, 5], [(3, (9,)), (3, (9,)), (1, ())]),
        "as many tokens as there may be": (True, [5, 1, 5, 6, 7, 1], [(2, (9,) * 4), (3, (9,) * 4), (1, ())]),
        "a turn that does not end": (False, [5, 6], [(2, ())]),
        "a stop token within a turn": (False, [1, 5, 1], [(3, ())]),
        "a turn too long": (False, [5, 6, 7, 8], [(4, ())]),
        "a reply too long": (False, [1, 1], [(1, (9,) * 5), (1, ())]),
        "a reply at the end": (False, [1], [(1, (9,))]),
        "a turn too many": (False, [1, 1, 1, 1], [(1, ())] * 4),
        "a turn behind the last policy token": (False, [5, 6, 7] * 2 + [5, 1], [(3, ()), (3, ()), (2, ())]),
        "a turn behind the last token": (False, [5, 6, 7, 5, 6, 7, 1], [(3, (9,) * 4), (3, (9,) * 4), (1, ())]),
    }
    form = {"rule": dataclasses.asdict(rule)}
    return [
        {"name": f"form: {name}", **form, "tokens": tokens, "turns": turns, "complete": complete}
        for name, (complete, tokens, turns) in cases.items()
    ]
