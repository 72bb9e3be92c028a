"""Greedy answers: where they end, how they compare, and that checking a draft says the same."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx.core")

from evals.speaking import Draft, Said, compare, speak, speak_after, text_bleu
from evals.texts import TwoBeginnings, check_beginning, render, split_prompt
from pion_vllm_mlx.prefill import prefill
from tests.evals.letters import BOS, EOS, LetterTokenizer
from tests.pion_vllm_mlx.tiny import PREFIX, SUFFIX, tiny_llama


def said(text: str, ended: bool = True) -> Said:
    return Said(tuple(LetterTokenizer().encode(text, False)), ended, 0.0, 0.0)


def cache_after(model: Any, ids: list[int]) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    cache: list[Any] = make_prompt_cache(model)
    prefill(model, ids, cache, 512)
    return cache


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wrong_at", [0, 1, 7, 11, None])
def test_a_checked_draft_gives_the_answer_of_one_by_one(seed: int, wrong_at: int | None) -> None:
    model, tokenizer = tiny_llama(seed), LetterTokenizer()
    answer = speak(model, tokenizer, SUFFIX, 12, cache_after(model, PREFIX))
    tokens = list(answer.tokens)
    if wrong_at is not None and wrong_at < len(tokens):
        tokens[wrong_at:] = [(token + 1) % 60 for token in tokens[wrong_at:]]
    draft = Said(tuple(tokens), answer.ended, 0.0, 0.0)
    (checked,) = speak_after(
        model, tokenizer, [Draft(SUFFIX, cache_after(model, PREFIX), draft)], 12
    )
    assert (checked.tokens, checked.ended) == (answer.tokens, answer.ended)


def test_answers_that_go_on_together_are_those_of_one_by_one() -> None:
    model, tokenizer = tiny_llama(2), LetterTokenizer()
    prefixes = [PREFIX[:length] for length in (9, 20, 33, len(PREFIX), 26)]
    tokenizer.eos_token_ids = {1000}
    alone = [speak(model, tokenizer, SUFFIX, 16, cache_after(model, ids)) for ids in prefixes]
    # One that ends early, at a token others may come by, too; and drafts wrong at other places.
    tokenizer.eos_token_ids = {alone[1].tokens[9]}
    alone = [speak(model, tokenizer, SUFFIX, 16, cache_after(model, ids)) for ids in prefixes]
    drafts = []
    for place, (answer, ids) in enumerate(zip(alone, prefixes, strict=True)):
        tokens = [*answer.tokens[:place], BOS, *answer.tokens[place + 1 :]]
        said = Said(tuple(tokens), False, 0.0, 0.0)
        drafts.append(Draft(SUFFIX, cache_after(model, ids), said))
    together = speak_after(model, tokenizer, drafts, 16)
    assert [(one.tokens, one.ended) for one in together] == [
        (one.tokens, one.ended) for one in alone
    ]
    assert any(one.ended for one in alone)
    assert not all(one.ended for one in alone)


def test_nothing_is_said_after_the_end() -> None:
    model, tokenizer = tiny_llama(1), LetterTokenizer()
    tokenizer.eos_token_ids = {1000}
    whole = speak(model, tokenizer, SUFFIX, 12, cache_after(model, PREFIX))
    assert len(whole.tokens) == 12
    assert not whole.ended
    tokenizer.eos_token_ids = {whole.tokens[5]}
    cut = whole.tokens.index(whole.tokens[5])
    short = speak(model, tokenizer, SUFFIX, 12, cache_after(model, PREFIX))
    assert short.ended
    assert short.tokens == whole.tokens[:cut]
    draft = Draft(SUFFIX, cache_after(model, PREFIX), short)
    (again,) = speak_after(model, tokenizer, [draft], 12)
    assert (again.tokens, again.ended) == (short.tokens, True)


def test_an_answer_that_goes_on_where_the_other_ended_is_not_identical() -> None:
    tokenizer = LetterTokenizer()
    assert compare(tokenizer, said("the boat is late"), said("the boat is late")).identical
    longer = compare(tokenizer, said("the boat is late today"), said("the boat is late"))
    assert not longer.identical
    assert longer.before == len("the boat is late")
    assert longer.bleu < 1
    cut_off = compare(tokenizer, said("the boat", ended=False), said("the boat"))
    assert not cut_off.identical
    assert cut_off.first


def test_agreement_counts_places_of_the_longer_answer() -> None:
    tokenizer = LetterTokenizer()
    one = compare(tokenizer, said("abcd", ended=False), said("abxd", ended=False))
    assert (one.before, one.share, one.first, one.identical) == (2, 0.75, True, False)
    empty = compare(tokenizer, said(""), said(""))
    assert (empty.bleu, empty.share, empty.identical) == (1.0, 1.0, True)
    assert EOS in said("").with_end(EOS)


def test_bleu_is_sacrebleus_between_0_and_1() -> None:
    assert text_bleu("a b c d e", "a b c d e") == 1.0
    assert text_bleu("", "a b c d e") == 0.0
    # Four of five words: 4/5, 3/4, 2/3, 1/2 of the n-grams, no brevity penalty.
    assert text_bleu("a b c d x", "a b c d e") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25)


def test_a_second_bos_is_refused() -> None:
    """L10: a rendered prompt that is encoded again gets BOS twice, and both sides look alike."""
    tokenizer = LetterTokenizer(template=True)
    ids = render(tokenizer, "be kind", "who are you")
    assert ids.count(tokenizer.bos_token_id) == 1
    twice = tokenizer.encode(tokenizer.decode(ids))
    assert twice[:2] == [tokenizer.bos_token_id] * 2
    with pytest.raises(TwoBeginnings):
        check_beginning(twice, tokenizer.bos_token_id)
    tokenizer.careless = True
    with pytest.raises(TwoBeginnings):
        render(tokenizer, "be kind", "who are you")


def test_a_second_bos_inflates_agreement() -> None:
    """Why it is refused: attention falls into the second BOS, and other prompts look the same."""
    import mlx.core as mx
    import numpy as np

    def apart(model: Any, beginning: list[int], seed: int) -> float:
        """How far the last logits of two prompts are apart, as a part of their size."""
        one, two = (
            np.array(model(mx.array([[*beginning, *middle.tolist(), 17]]))[0, -1])
            for middle in np.random.default_rng(seed).integers(0, 58, (2, 5))
        )
        return float(np.linalg.norm(one - two) / np.linalg.norm(one))

    def mean_apart(beginning: list[int]) -> float:
        return float(np.mean([apart(model, beginning, seed) for model in models for seed in seeds]))

    models, seeds = [tiny_llama(seed) for seed in range(4)], range(4)
    assert mean_apart([BOS, BOS]) < mean_apart([BOS])


@pytest.mark.parametrize("template", [True, False])
def test_a_prompt_is_split_where_any_question_begins(template: bool) -> None:
    tokenizer = LetterTokenizer(template=template)
    prefix, suffix = split_prompt(tokenizer, "be kind", "is it late")
    assert prefix + suffix == render(tokenizer, "be kind", "is it late")
    for question in ("is it", "is", "nine", "it is (late)"):
        assert split_prompt(tokenizer, "be kind", question)[0] == prefix
    assert tokenizer.decode(suffix).startswith("is it late")


@pytest.mark.model
def test_the_small_models_template_is_applied_as_its_text_reads() -> None:
    from mlx_lm import utils

    from evals.texts import read_prompts
    from pion_vllm_mlx.small_model import small_model_dir

    mlx_lm_utils: Any = utils  # not typed
    tokenizer = mlx_lm_utils.load_tokenizer(small_model_dir())
    for prompt in read_prompts():
        for question in prompt.questions:
            prefix, suffix = split_prompt(tokenizer, prompt.system, question)
            messages = [
                {"role": "system", "content": prompt.system},
                {"role": "user", "content": question},
            ]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            assert tokenizer.encode(text, add_special_tokens=False) == prefix + suffix
            assert (prefix + suffix)[1] != tokenizer.bos_token_id
            assert prompt.system in tokenizer.decode(prefix)
            assert question not in tokenizer.decode(prefix)
            assert tokenizer.decode(suffix).startswith(question[:3])
