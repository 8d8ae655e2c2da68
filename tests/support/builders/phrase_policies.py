"""Policies whose tokens are whole phrases, so that a policy of random weights writes solutions or attacks."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from grailnode.calibration import proof_file
from grailnode.engine import policy
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol.digest import digest_weights
from tests.support.builders.policies import RECIPE, random_weights

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_CHARACTERS = ("\n", *map(chr, range(32, 127)))
_PUSH = 4.0  # of every embedding in one direction, which the layers do not change
_QUIET = 0.05  # scale of what the layers add, so that the push remains larger
_LOUDNESS = 2.0  # of phrases in that direction; single characters have none


def write_speaking_policy(directory: Path, phrases: Sequence[str], chat_template: str = "") -> Policy:
    """Write a policy whose completions consist mostly of these phrases.

    Args:
        phrases: all different, of two characters or more.
        chat_template: of its tokenizer, whose first token is <pad> and whose last is <eos>; empty for none.
    """
    tokens = (*_SPECIAL, *_CHARACTERS, *phrases)
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    config_changes = {"vocab_size": len(tokens), "max_position_embeddings": 2048, "tie_word_embeddings": False}
    config = RECIPE.config() | config_changes
    policy.save(directory, config, tokenizer.to_str(), {})
    weights = random_weights(build(Policy.load(directory)))
    weights["model.embed_tokens.weight"][:, 0] = _PUSH
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(_QUIET)[0] = 0.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][-len(phrases) :, 0] = _LOUDNESS
    policy.save(directory, config, tokenizer.to_str(), weights)
    proof = proof_file.read(PACKAGED_POLICY / proof_file.NAME)  # one engine at work is as far from itself on any policy
    if chat_template:
        special_tokens = {"bos_token": "<pad>", "eos_token": {"content": "<eos>"}}
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template, **special_tokens}))
    own_proof = {
        "chat": bool(chat_template),
        "policy": digest_weights(load_weights(directory)).hex(),
        "max_tokens": 512,
    }
    subject = proof.subject.model_copy(update=own_proof)
    (directory / proof_file.NAME).write_text(proof.model_copy(update={"subject": subject}).to_json())
    return Policy.load(directory)
