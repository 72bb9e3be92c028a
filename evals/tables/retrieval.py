"""Retrieval without prefill: one chunk exactly, several composed, against a full prefill.

The corpus is SQLite's FAQ; its questions are asked, BM25 finds the passages.

* One chunk of 512 tokens: *text RAG* prefills chunk and question; Pion hydrates the chunk, from
  this process or from the server, and runs the question. Logits are compared bit for bit with a
  prefill of the same split.
* Packs of 128 tokens: the 1, 2, 4 and 8 best passages are composed behind a shared stub, best
  first ("in place" for the first of them) and in the opposite order ("re-ordered"), with the first
  k tokens of each pack but the first computed again. The answer is compared, token by token, with
  that of a full prefill of the very same tokens.

Expected: one chunk bit-exact and at least 5 times sooner than text RAG; composing 8 packs below 5%
of what prefilling them takes; one pack, and any number computed again whole, agree entirely.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from evals.findings import Bar, Findings, Plot, Quoted, Table
from evals.serving import local_server
from evals.setting import Setting
from evals.speaking import Agreement, Draft, compare, speak, speak_after
from evals.texts import read_records, split_prompt
from pion_vllm_mlx import HybridRetrievalCache
from pion_vllm_mlx.prefill import prefill

CHUNK: Final = 512
PACK: Final = 128
PACKS: Final = (1, 2, 4, 8)
RECOMPUTED: Final = (0, 8, 32, PACK)
QUESTIONS: Final = 5
TOKENS: Final = 16
RUNS: Final = 3
SYSTEM: Final = "Answer the question from these passages of a manual."

SOONER: Final = 5.0
COMPOSING: Final = 0.05


@dataclass(frozen=True, slots=True)
class Corpus:
    """Passages of equally many tokens, and which of them suit a question best."""

    passages: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    def best(self, question: str, count: int) -> list[int]:
        """The `count` best passages, the best first."""
        from rank_bm25 import BM25Okapi

        scores = BM25Okapi([_words(text) for text in self.texts]).get_scores(_words(question))
        return [int(place) for place in np.argsort(-scores, kind="stable")[:count]]


@dataclass(frozen=True, slots=True)
class Composition:
    """Answers from composed packs: how many, in which order, how much was computed again."""

    packs: int
    order: str
    recompute: int
    answers: tuple[Agreement, ...]


def run(setting: Setting) -> Findings:
    model, tokenizer = setting.load()
    faq = read_records("sqlite_faq")
    questions = [record["question"] for record in faq]
    every = len(questions) // QUESTIONS
    asked = setting.take(questions[::every][:QUESTIONS])
    single = _measure_chunks(setting, model, tokenizer, faq, asked)
    packs = PACKS if setting.fraction == 1 else PACKS[: setting.count(len(PACKS), 2)]
    recomputed = RECOMPUTED if setting.fraction == 1 else (0, PACK)
    composed, shares = _measure_packs(
        model, tokenizer, faq, asked, packs, recomputed, setting.count(TOKENS, 8)
    )
    return _findings(single, composed, shares, len(asked))


def cut_corpus(tokenizer: Any, faq: Sequence[dict[str, Any]], tokens: int) -> Corpus:
    """The answers, one after another, in passages of exactly `tokens` tokens."""
    text = "\n\n".join(f"{record['question']}\n{record['answer']}" for record in faq)
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = range(0, len(ids) - tokens + 1, tokens)
    passages = tuple(tuple(ids[start : start + tokens]) for start in whole)
    return Corpus(passages, tuple(tokenizer.decode(list(one)) for one in passages))


def _measure_chunks(
    setting: Setting, model: Any, tokenizer: Any, faq: Sequence[dict[str, Any]], asked: list[str]
) -> dict[str, Any]:
    corpus = cut_corpus(tokenizer, faq, setting.count(CHUNK, 128))
    runs = setting.count(RUNS)
    seconds: dict[str, list[float]] = {"text RAG": [], "inproc": [], "pion": []}
    exact = True
    with local_server() as server, HybridRetrievalCache(model) as held:
        for question in asked:
            chunk = corpus.passages[corpus.best(question, 1)[0]]
            suffix = tokenizer.encode(f"\n\n{question}\n", add_special_tokens=False)
            held.ingest(question, chunk)
            with HybridRetrievalCache(model, "pion", port=server.port, timeout=5) as writer:
                writer.ingest(question, chunk)
            cold: list[Any] = make_prompt_cache(model)
            prefill(model, chunk, cold, held.prefill_step_size)
            wanted = _logits(model, suffix, cold)
            for _ in range(runs):
                said = speak(model, tokenizer, [*chunk, *suffix], 1)
                seconds["text RAG"].append(said.first_seconds)
                with HybridRetrievalCache(model, "pion", port=server.port, timeout=5) as fetched:
                    for name, hr in (("inproc", held), ("pion", fetched)):
                        hr.prepare(question, suffix)
                        started = time.perf_counter()
                        cache, rest = hr.prepare(question, suffix)
                        said = speak(model, tokenizer, rest, 1, cache, started)
                        seconds[name].append(said.first_seconds)
            for hr in (held, HybridRetrievalCache(model, "pion", port=server.port, timeout=5)):
                cache, rest = hr.prepare(question, suffix)
                exact = exact and np.array_equal(_logits(model, rest, cache), wanted)
    found = {name: median(values) for name, values in seconds.items()}
    print({name: round(value * 1e3) for name, value in found.items()}, "ms", exact, flush=True)
    return {"tokens": len(corpus.passages[0]), "seconds": found, "bit_exact": exact}


def _measure_packs(
    model: Any,
    tokenizer: Any,
    faq: Sequence[dict[str, Any]],
    asked: list[str],
    counts: Sequence[int],
    recomputed: Sequence[int],
    tokens: int,
) -> tuple[list[Composition], dict[int, float]]:
    corpus = cut_corpus(tokenizer, faq, PACK)
    found: dict[tuple[int, str, int], list[Agreement]] = {}
    shares: dict[int, list[float]] = {}
    with HybridRetrievalCache(model) as hr:
        for question in asked:
            stub, suffix = split_prompt(tokenizer, SYSTEM, question)
            hr.set_shared_stub(stub)
            best = corpus.best(question, max(counts))
            for place in best:
                hr.ingest_pack(str(place), corpus.passages[place])
            for count, order, places in _orders(best, counts):
                names = [str(place) for place in places]
                ids = [token for place in places for token in corpus.passages[place]]
                full: list[Any] = make_prompt_cache(model)
                took = prefill(model, [*stub, *ids], full, hr.prefill_step_size)
                reference = speak(model, tokenizer, suffix, tokens, full)
                ks = [k for k in recomputed if not k or count > 1]  # before one pack is no other
                drafts = []
                for k in ks:
                    started = time.perf_counter()
                    cache, rest = hr.prepare_multi(names, suffix, recompute_tokens=k)
                    composing = time.perf_counter() - started
                    if not k:
                        share = composing / (took * len(ids) / (len(stub) + len(ids)))
                        shares.setdefault(count, []).append(share)
                    drafts.append(Draft(rest, cache, reference))
                for k, said in zip(ks, speak_after(model, tokenizer, drafts, tokens), strict=True):
                    agreement = compare(tokenizer, said, reference)
                    found.setdefault((count, order, k), []).append(agreement)
                    print(f"{count} packs, {order}, k={k}: {agreement}", flush=True)
    compositions = [Composition(*key, tuple(answers)) for key, answers in found.items()]
    return compositions, {count: median(values) for count, values in shares.items()}


def _orders(best: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[int, str, list[int]]]:
    for count in counts:
        yield count, "in place", list(best[:count])
        if count > 1:
            yield count, "re-ordered", list(reversed(best[:count]))


def _findings(
    single: dict[str, Any],
    composed: Sequence[Composition],
    shares: dict[int, float],
    questions: int,
) -> Findings:
    seconds = single["seconds"]
    sooner = {name: seconds["text RAG"] / seconds[name] for name in ("inproc", "pion")}
    rows = [
        (one.packs, one.order, one.recompute, _mean(one, "first"), _mean(one, "share"),
         sum(answer.identical for answer in one.answers))
        for one in composed
    ]  # fmt: skip
    exact = [one for one in composed if one.packs == 1 or one.recompute >= PACK]
    return Findings(
        figures={
            "questions": questions,
            "chunk": single,
            "sooner": sooner,
            "composing_share": {str(count): share for count, share in shares.items()},
            "packs": [
                {
                    "packs": one.packs,
                    "order": one.order,
                    "recompute": one.recompute,
                    "first_token": _mean(one, "first"),
                    "token_agreement": _mean(one, "share"),
                    "identical": sum(answer.identical for answer in one.answers),
                }
                for one in composed
            ],
        },
        tables=[
            Table(
                f"One chunk of {single['tokens']} tokens, {questions} questions",
                ("way", "first token", "sooner than text RAG"),
                [
                    (name, f"{value * 1e3:.1f} ms", f"{seconds['text RAG'] / value:.2f}x")
                    for name, value in seconds.items()
                ],
            ),
            Table(
                f"Packs of {PACK} tokens against a full prefill of the same tokens",
                ("packs", "order", "k", "first token agrees", "tokens agree", "identical answers"),
                rows,
                "k: tokens of each pack but the first that are computed again.",
            ),
            Table(
                "Composing without recomputation",
                ("packs", "share of prefilling them"),
                [(count, f"{share * 100:.1f}%") for count, share in shares.items()],
            ),
        ],
        plots=[
            Plot(
                "agreement",
                "Agreement with a full prefill by tokens computed again",
                "k, tokens of each pack computed again",
                "share of equal tokens",
                _series(composed),
            )
        ],
        bars=[
            Bar("one chunk is bit-exact", float(single["bit_exact"]), 1.0),
            Bar(
                "one pack, and packs computed again whole, say the full prefill's first token",
                min(_mean(one, "first") for one in exact),
                1.0,
            ),
            Bar("text RAG / inproc, TTFT", sooner["inproc"], SOONER, decides=False),
            Bar("text RAG / pion, TTFT", sooner["pion"], SOONER, decides=False),
            Bar(
                f"prefilling / composing {max(shares)} packs",
                1 / shares[max(shares)],
                1 / COMPOSING,
                decides=False,
            ),
        ],
        quoted=[
            Quoted(
                "RAG, Llama-3.2-1B-Instruct-4bit, TTFT saved: inproc, pion",
                "55% (37 to 73%), 46% (29 to 61%)",
                "the small model, chunks of "
                f"{single['tokens']} tokens: {100 * (1 - 1 / sooner['inproc']):.1f}%, "
                f"{100 * (1 - 1 / sooner['pion']):.1f}%",
            )
        ],
    )


def _series(composed: Sequence[Composition]) -> dict[str, list[tuple[str | float, float]]]:
    series: dict[str, list[tuple[str | float, float]]] = {}
    for one in composed:
        if one.packs > 1:
            points = series.setdefault(f"{one.packs} packs, {one.order}", [])
            points.append((one.recompute, _mean(one, "share")))
    return series


def _mean(one: Composition, field: str) -> float:
    return round(mean(float(getattr(answer, field)) for answer in one.answers), 4)


def _logits(model: Any, ids: Sequence[int], cache: list[Any]) -> Any:
    return np.array(model(mx.array(list(ids))[None], cache=cache)[0].astype(mx.float32))


def _words(text: str) -> list[str]:
    return "".join(letter.lower() if letter.isalnum() else " " for letter in text).split()
