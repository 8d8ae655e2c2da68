"""What every engine must do, whatever computes it (Engine of roles/ports.py).

A subclass gives the fixtures `model`, the architecture, and `new_engine`, which makes engines that serve nothing yet;
and so runs it all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from protocol.chain.manifest import Manifest
from protocol.digest import Weights, digest_weights
from protocol.patch import encode
from protocol.rollout import sketch
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.filters import Filters
from protocol.rollout.sampling import SamplingParams, batch_margins, seed_words, token_places
from protocol.rollout.sampling import noise as sampling_noise
from protocol.rollout.sketch import SketchKey
from roles.policy.causal_model import CausalModel
from roles.ports import CheckRequest, Engine, EngineError, Generation, Request
from tests.support.builders.policies import NOISE, PARAMS, engine_of, random_weights, requests_of_many_lengths

NewEngine = Callable[[], Engine]


async def serve(engine: Engine, *versions: Weights) -> None:
    """Bring whole weights into an engine as version 0, and the next versions as patches."""
    await engine.stage(0, versions[0])
    await engine.commit()
    for version, (old, new) in enumerate(pairwise(versions), 1):
        await engine.stage_patch(version, encode(old, new), manifest(version, new))
        await engine.commit()


async def serving(new_engine: NewEngine, weights: Weights) -> Engine:
    """Return an engine that serves these weights as version 0."""
    engine = new_engine()
    await serve(engine, weights)
    return engine


async def check_tokens(
    engine: Engine, model: CausalModel, weights: Weights, params: SamplingParams = PARAMS, count: int = 24
) -> list[tuple[Generation, Generation]]:
    """Check that an engine generates what the torch engine generates with these weights; return what the torch engine
    and this one have generated.
    """
    requests = requests_of_many_lengths(count)
    expected = await (await engine_of(model, dict(weights))).generate(requests, params)
    generations = await engine.generate(requests, params)
    assert [g.tokens for g in generations] == [g.tokens for g in expected]
    return list(zip(expected, generations, strict=True))


def manifest(version: int, weights: Weights) -> Manifest:
    """Return a manifest of which only the digest of the weights matters."""
    return Manifest.model_construct(version=version, weights=digest_weights(weights))


def changed(weights: Weights, seed: int, share: float = 0.05) -> dict[str, torch.Tensor]:
    """Return weights of which some elements have other bits: negative zeros and NaN payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in weights.items():
        bits = tensor.clone().view(torch.int16)
        mask = torch.rand(bits.shape, generator=generator) < share
        result[name] = torch.where(mask, bits ^ 1, bits).view(torch.bfloat16)
    return result


FILTERED = SamplingParams(temperature=5.0, max_tokens=20, stops=(1, 9), filters=Filters(top_k=9, top_p=0.9, min_p=0.01))
RULES = (CheckRules(PARAMS), CheckRules(FILTERED, slack=0.02, limit=0.05, cap=0.03), CheckRules(PARAMS, rivals=True))
KEYS = (SketchKey("projection", bytes(32)), SketchKey("topk", bytes(range(32))))
SKETCH_NOISE = 1.0  # in its units, of which rounding shows one


def check_requests(requests: Sequence[Request], completions: Sequence[tuple[int, ...]]) -> list[CheckRequest]:
    """Return requests that check completions, with sketches of both kinds."""
    return [
        CheckRequest(request.prompt, tokens, request.seed, KEYS[place % 3 // 2])
        for place, (request, tokens) in enumerate(zip(requests, completions, strict=True))
    ]


def assert_checks_agree(checks: Sequence[Check], others: Sequence[Check], noise: float = NOISE) -> None:
    """Check that two engines say the same of completions, up to rounding."""
    for check, other in zip(checks, others, strict=True):
        assert torch.equal(check.stops, other.stops)
        torch.testing.assert_close(check.margins, other.margins, rtol=0, atol=noise)
        torch.testing.assert_close(check.logprobs, other.logprobs, rtol=0, atol=noise)
        torch.testing.assert_close(check.sketch, other.sketch, rtol=0, atol=SKETCH_NOISE)
        torch.testing.assert_close(check.rivals, other.rivals, rtol=0, atol=noise)


async def check_like_torch(
    engine: Engine, model: CausalModel, weights: Weights, params: SamplingParams = PARAMS, count: int = 24
) -> list[tuple[int, ...]]:
    """Check that an engine generates, and checks by every rule, what the torch engine does; return the completions."""
    pairs = await check_tokens(engine, model, weights, params, count)
    for expected, generation in pairs:
        torch.testing.assert_close(generation.hidden, expected.hidden, rtol=0, atol=NOISE)
    completions = [generation.tokens for generation, _ in pairs]
    items = check_requests(requests_of_many_lengths(count), completions)
    reference = await engine_of(model, dict(weights))
    for rules in RULES:
        assert_checks_agree(await engine.check(items, rules), await reference.check(items, rules))
    return completions


class EngineContract:
    """The contract of Engine.

    Attributes:
        noise: bound on the differences between two computations of the same value.
        samples: how many tokens the test of the distribution draws.
    """

    noise = NOISE
    samples = 4000

    @pytest.fixture
    async def engine(self, model: CausalModel, new_engine: NewEngine) -> Engine:
        return await serving(new_engine, random_weights(model))

    @pytest.mark.parametrize("rules", RULES, ids=["plain", "filters", "rivals"])
    async def test_a_check_agrees_with_the_torch_engine(
        self, model: CausalModel, engine: Engine, rules: CheckRules
    ) -> None:
        requests = requests_of_many_lengths()
        true = [generation.tokens for generation in await engine.generate(requests, rules.params)]
        false = [tuple((token + 1) % model.vocabulary for token in tokens) for tokens in true]
        reference = await engine_of(model, random_weights(model))
        for completions in (true, false):
            items = check_requests(requests, completions)
            checks = await engine.check(items, rules)
            assert_checks_agree(checks, await reference.check(items, rules), self.noise)
            is_true = completions is true
            assert all((check.margins < self.noise).all() for check in checks) == is_true
        assert [len(check.margins) for check in checks] == [len(tokens) for tokens in true]

    async def test_a_check_agrees_with_the_states_of_generation(self, engine: Engine) -> None:
        requests = requests_of_many_lengths()
        generations = await engine.generate(requests, PARAMS)
        items = check_requests(requests, [generation.tokens for generation in generations])
        for item, generation, check in zip(items, generations, await engine.check(items, RULES[0]), strict=True):
            values = sketch.values_of(item.sketch.kind, generation.hidden, item.sketch.seed)
            torch.testing.assert_close(check.sketch, values, rtol=0, atol=SKETCH_NOISE)
            torch.testing.assert_close(torch.tensor(generation.logprobs), check.logprobs, rtol=0, atol=self.noise)
            assert len(check.margins) == len(generation.tokens)
            assert check.margins.max() < self.noise
            assert generation.hidden.dtype == torch.float32

    async def test_rivals_are_the_best_other_tokens(self, model: CausalModel, engine: Engine) -> None:
        requests = requests_of_many_lengths(8)
        completions = [generation.tokens for generation in await engine.generate(requests, PARAMS)]
        checks = await engine.check(check_requests(requests, completions), RULES[2])
        reference = await engine_of(model, random_weights(model))
        forwards = await reference.forward([request.prompt for request in requests], completions)
        for request, tokens, check, forward in zip(requests, completions, checks, forwards, strict=True):
            words, places = seed_words([request.seed]), torch.arange(len(tokens))
            scores = forward.logits / PARAMS.temperature + sampling_noise(words, places, model.vocabulary)
            best, others = scores.topk(2).values.unbind(1)
            torch.testing.assert_close(check.rivals[:, 1], best - others, rtol=0, atol=2 * self.noise)
            assert check.rivals[:, 0].tolist() == scores.topk(2).indices[:, 1].tolist()

    async def test_only_the_tokens_that_the_policy_drew_are_checked(self, model: CausalModel, engine: Engine) -> None:
        requests = requests_of_many_lengths()
        completions = [tuple(range(2, 3 + place)) for place in range(len(requests))]
        whole = check_requests(requests, completions)
        parts = [replace(item, drawn=tuple(token % 3 == 0 for token in item.completion)) for item in whole]
        checks = await engine.check(parts, RULES[0])
        reference = await engine_of(model, random_weights(model))
        forwards = await reference.forward([item.prompt for item in whole], completions)
        for item, check, all_of_it, forward in zip(
            parts, checks, await engine.check(whole, RULES[0]), forwards, strict=True
        ):
            rows = torch.tensor([place for place, own in enumerate(item.drawn or ()) if own], dtype=torch.int64)
            tokens = torch.tensor(item.drawn_tokens, dtype=torch.int64)
            torch.testing.assert_close(check.sketch, all_of_it.sketch[rows], rtol=0, atol=SKETCH_NOISE)
            torch.testing.assert_close(check.logprobs, all_of_it.logprobs[rows], rtol=0, atol=self.noise)
            margins = batch_margins(
                forward.logits[rows], tokens, *token_places([item.seed], [len(rows)]), PARAMS.temperature
            )
            torch.testing.assert_close(check.margins, margins, rtol=0, atol=self.noise)

    async def test_results_do_not_depend_on_the_batch(self, engine: Engine) -> None:
        requests = requests_of_many_lengths()
        together = await engine.generate(requests, PARAMS)
        for request, generation in zip(requests, together, strict=True):
            (alone,) = await engine.generate([request], PARAMS)
            assert alone.tokens == generation.tokens
            torch.testing.assert_close(alone.hidden, generation.hidden, rtol=0, atol=self.noise)
        items = check_requests(requests, [generation.tokens for generation in together])
        for item, check in zip(items, await engine.check(items, RULES[0]), strict=True):
            assert_checks_agree(await engine.check([item], RULES[0]), [check], self.noise)

    async def test_completions_end_at_their_first_stop_token_or_at_the_limit(self, engine: Engine) -> None:
        for stops in ((1,), (1, 5, 9)):
            hot = SamplingParams(temperature=20.0, max_tokens=40, stops=stops)  # nearly uniform: 1 is drawn after 30
            generations = await engine.generate(requests_of_many_lengths(), hot)
            assert all(hot.is_complete(item.tokens) and len(item.hidden) == len(item.tokens) for item in generations)
            assert len({len(item.tokens) for item in generations}) > 3
        assert {item.tokens[-1] for item in generations} >= {1, 5, 9}

    async def test_seeds_determine_the_tokens(self, engine: Engine) -> None:
        prompt = (5, 6, 7)
        same = await engine.generate([Request(prompt, b"a" * 16)] * 2, PARAMS)
        assert same[0].tokens == same[1].tokens
        others = await engine.generate([Request(prompt, bytes([i]) * 16) for i in range(16)], PARAMS)
        assert len({generation.tokens for generation in others}) > 8

    async def test_an_offset_goes_on_with_the_noise_of_a_completion(self, engine: Engine) -> None:
        """A completion is the same whether it is drawn at once or cut and drawn from there on."""
        long = SamplingParams(temperature=1.0, max_tokens=12, stops=(1,))
        requests = requests_of_many_lengths()
        whole = [generation.tokens for generation in await engine.generate(requests, long)]
        cuts = [len(tokens) // 2 for tokens in whole]
        rest = [
            Request(request.prompt + tokens[:cut], request.seed, offset=cut)
            for request, tokens, cut in zip(requests, whole, cuts, strict=True)
        ]
        again = [generation.tokens for generation in await engine.generate(rest, long)]
        pairs = zip(whole, again, cuts, strict=True)
        assert all(tokens[cut:] == part[: len(tokens) - cut] for tokens, part, cut in pairs)
        begun_again = await engine.generate([replace(request, offset=0) for request in rest], long)
        assert [generation.tokens for generation in begun_again] != again

    async def test_sampling_follows_the_softmax(self, model: CausalModel, engine: Engine) -> None:
        one = SamplingParams(temperature=1.5, max_tokens=1, stops=(1,))
        count = self.samples
        seeds = [index.to_bytes(16, "little") for index in range(count)]
        samples = await engine.generate([Request((5, 6, 7), seed) for seed in seeds], one)
        (result,) = await (await engine_of(model, random_weights(model))).forward([(5, 6, 7)], [(0,)])
        probabilities = torch.softmax(result.logits[0] / one.temperature, dim=-1)
        frequencies = torch.bincount(torch.tensor([g.tokens[0] for g in samples]), minlength=model.vocabulary) / count
        # four standard deviations of a frequency of one half
        assert (frequencies - probabilities).abs().max() < 2 / count**0.5

    async def test_filtered_tokens_are_never_sampled(self, model: CausalModel, engine: Engine) -> None:
        """Only the two most likely tokens occur, even at a high temperature."""
        params = SamplingParams(temperature=20.0, max_tokens=4, stops=(1,), filters=Filters(top_k=2))
        requests = requests_of_many_lengths()
        generations = await engine.generate(requests, params)
        reference = await engine_of(model, random_weights(model))
        checked = await reference.forward([r.prompt for r in requests], [g.tokens for g in generations])
        for generation, result in zip(generations, checked, strict=True):
            sampled_logits = result.logits.gather(-1, torch.tensor(generation.tokens)[:, None])
            assert (sampled_logits >= result.logits.topk(2, dim=-1).values[:, -1:] - self.noise).all()

    async def test_greedy_takes_the_most_likely(self, model: CausalModel, engine: Engine) -> None:
        prompts = [request.prompt for request in requests_of_many_lengths(8)]
        generations = await engine.generate([Request(prompt, b"") for prompt in prompts], PARAMS)
        completions = [generation.tokens for generation in generations]
        forwards = await (await engine_of(model, random_weights(model))).forward(prompts, completions)
        for tokens, result in zip(completions, forwards, strict=True):
            best = result.logits.max(dim=-1).values
            greedy_logits = result.logits.gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
            assert (best - greedy_logits).max() < self.noise

    async def test_no_requests_and_an_empty_completion(self, engine: Engine) -> None:
        assert await engine.generate([], PARAMS) == []
        assert await engine.check([], RULES[0]) == []
        requests = [CheckRequest((5, 6), (), bytes(16), KEYS[0]), CheckRequest((5,), (6, 7), bytes(16), KEYS[0])]
        nothing, something = await engine.check(requests, RULES[0])
        assert (nothing.sketch.shape, len(nothing.margins), len(something.margins)) == ((0, 4), 0, 2)

    async def test_nothing_is_served_before_the_first_commit(self, model: CausalModel, new_engine: NewEngine) -> None:
        engine = new_engine()
        await engine.stage(3, random_weights(model))
        assert engine.version is None
        with pytest.raises(EngineError, match="no policy"):
            await engine.generate([Request((5,), bytes(16))], PARAMS)
        with pytest.raises(EngineError, match="no policy"):
            await engine.check([CheckRequest((5,), (6,), bytes(16), KEYS[0])], RULES[0])
        await engine.commit()
        assert engine.version == 3

    async def test_staging_changes_nothing_until_the_commit(self, model: CausalModel, new_engine: NewEngine) -> None:
        """Neither do the tensors that were staged, of which an engine has copies."""
        weights = random_weights(model, 0)
        engine = await serving(new_engine, weights)
        request = Request((5, 6, 7, 8), b"s" * 16)
        (before,) = await engine.generate([request], PARAMS)
        for tensor in weights.values():
            tensor.zero_()
        await engine.stage(1, random_weights(model, 1))
        (during,) = await engine.generate([request], PARAMS)
        assert torch.equal(before.hidden, during.hidden)
        assert engine.version == 0
        await engine.commit()
        (after,) = await engine.generate([request], PARAMS)
        assert not torch.equal(before.hidden[0], after.hidden[0])
        assert engine.version == 1

    @pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
    async def test_weights_that_do_not_fit_are_refused(self, model: CausalModel, engine: Engine, fault: str) -> None:
        weights: dict[str, Tensor] = random_weights(model)
        if fault == "missing":
            del weights["model.norm.weight"]
        else:
            name = "model.extra.weight" if fault == "unknown" else "model.norm.weight"
            weights[name] = torch.zeros(1, dtype=torch.bfloat16)
        with pytest.raises(EngineError, match=r"model\."):
            await engine.stage(1, weights)
        assert engine.version == 0
        with pytest.raises(EngineError, match="nothing is staged"):
            await engine.commit()

    async def test_patches_give_the_rollouts_of_whole_weights(self, model: CausalModel, new_engine: NewEngine) -> None:
        weights = random_weights(model)
        engine = await serving(new_engine, weights)
        for version in range(1, 4):
            target = changed(weights, version)
            await engine.stage_patch(version, encode(weights, target), manifest(version, target))
            assert engine.version == version - 1
            await engine.commit()
            assert engine.version == version
            await check_tokens(engine, model, target)
            weights = target

    async def test_a_patch_that_does_not_fit_is_refused(self, model: CausalModel, new_engine: NewEngine) -> None:
        weights = random_weights(model)
        engine = await serving(new_engine, weights)
        target, other = changed(weights, 1), changed(weights, 2)
        with pytest.raises(EngineError, match="version 1"):
            await engine.stage_patch(1, encode(other, target), manifest(1, target))
        with pytest.raises(EngineError, match="version 1"):
            await engine.stage_patch(1, encode(weights, target), manifest(1, other))
        with pytest.raises(EngineError, match="nothing is staged"):
            await engine.commit()
        assert engine.version == 0

    @pytest.mark.parametrize("bad", [(), (32,), (-1,)])
    async def test_invalid_prompts_are_refused(self, engine: Engine, bad: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match=r"token"):
            await engine.generate([Request(bad, bytes(16))], PARAMS)
        for prompt, completion in ((bad, (1,)), *([((5,), (6, *bad))] if bad else [])):
            with pytest.raises(ValueError, match=r"token"):
                await engine.check([CheckRequest(prompt, completion, bytes(16), KEYS[0])], RULES[0])
