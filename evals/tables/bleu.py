"""Answers from a stored prefix against mlx-lm alone, for every storage format.

Twenty questions on five system prompts, 50 greedy tokens each. *Standalone* is mlx-lm by itself,
the whole prompt at once. For each tier the prefix is stored by one `PionPromptCache` and fetched
by another, over TCP; the answer is compared with standalone's, up to its end. The model's own
format ("auto", lossless) answers token by token; for the others standalone's answer is checked in
one pass and goes on from the first difference, all questions together, which says the same in less
time.

By lane: what models answer from a prefix that comes as a file (the local lane), and what those do
that share one (lanes C of `evals.lanes`). Attention is merged from two parts in lanes C, so logits
differ from standalone's in the last bits.

Expected: BLEU 1.000 and every answer identical for lossless formats; others as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Final

from evals.findings import Bar, Findings, Plot, Quoted, Table
from evals.lanes import LANES, LOCAL, Lane, Prefix, over_tcp
from evals.serving import SERVER_FLAGS, local_server
from evals.setting import Setting
from evals.speaking import Agreement, Draft, Said, compare, speak, speak_after
from evals.texts import read_prompts, split_prompt
from pion_vllm_mlx import PionPromptCache
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.tier import NAMED

#: Nothing here is timed: it may run beside others.
TIMED: Final = False

TOKENS: Final = 50
LEAST_TOKENS: Final = 12
PROTECTED: Final = 2
LOSSLESS: Final = ("auto", "fp32")
_HALF: Final = ("fp16", "bf16")


@dataclass(frozen=True, slots=True)
class Tier:
    """A storage policy as `PionPromptCache` takes it."""

    vquant: str
    boundary_protect: int = 0

    @property
    def label(self) -> str:
        protected = f", boundary_protect={self.boundary_protect}" if self.boundary_protect else ""
        return self.vquant + protected


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, split where its prefix ends, and what standalone said."""

    prompt: str
    question: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    standalone: Said


def run(setting: Setting) -> Findings:
    questions = setting.count(20)
    # At least one tier of each kind, so that a small fraction still meets all of the code.
    tiers = TIERS if setting.fraction == 1 else TIERS[: setting.count(len(TIERS), 5)]
    return measure(setting, tiers, questions, setting.count(TOKENS, LEAST_TOKENS))


def _tiers() -> tuple[Tier, ...]:
    others = [name for name in NAMED if name not in (*LOSSLESS, *_HALF, "mlx4g32")]
    first = [Tier("auto"), Tier("fp16"), Tier("mlx4g32"), Tier("mlx4g32", PROTECTED), Tier("fp32")]
    rest = [Tier("bf16"), *(Tier(name) for name in others)]
    return (*first, *rest, *(Tier(name, PROTECTED) for name in others))


TIERS: Final = _tiers()


def measure(setting: Setting, tiers: Sequence[Tier], questions: int, tokens: int) -> Findings:
    """The eval for some tiers, questions and tokens an answer."""
    model, tokenizer = setting.load()
    asked = ask_standalone(model, tokenizer, questions, tokens)
    found: dict[str, list[Agreement]] = {}
    with local_server(*SERVER_FLAGS) as server:
        for tier in tiers:
            with over_tcp():
                said = _Answering(model, tokenizer, tokens, tier).from_store(server, asked)
            found[tier.label] = [
                compare(tokenizer, answer, one.standalone)
                for answer, one in zip(said, asked, strict=True)
            ]
            _print_line(tier.label, found[tier.label])
        # The other lanes B give the cache that "auto" answered from.
        others = {name: make for name, make in LANES.items() if name[0] == "C" or name == LOCAL}
        lanes = _answer_by_lane(model, tokenizer, asked, tokens, server.port, others)
    return _findings(asked, found, lanes)


def measure_lanes(setting: Setting, questions: int, tokens: int) -> dict[str, list[Agreement]]:
    """Only the answers by lane, against standalone."""
    model, tokenizer = setting.load()
    asked = ask_standalone(model, tokenizer, questions, tokens)
    with local_server(*SERVER_FLAGS) as server:
        return _answer_by_lane(model, tokenizer, asked, tokens, server.port, LANES)


def _answer_by_lane(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Asked],
    tokens: int,
    port: int,
    lanes: Mapping[str, Lane],
) -> dict[str, list[Agreement]]:
    found = {}
    prefixes = {one.prefix: Prefix(model, port, one.prefix) for one in asked}
    for prefix in prefixes.values():
        prefix.store()
    for lane, make in lanes.items():
        answers = []
        for one in asked:
            with make(prefixes[one.prefix]) as open_cache:
                if lane.startswith("B"):  # a cache as any other: much like "auto"
                    draft = Draft(one.suffix, open_cache(), one.standalone)
                    (said,) = speak_after(model, tokenizer, [draft], tokens)
                else:
                    said = speak(model, tokenizer, one.suffix, tokens, open_cache())
            answers.append(compare(tokenizer, said, one.standalone))
        found[lane] = answers
        _print_line(lane, answers)
    return found


def ask_standalone(model: Any, tokenizer: Any, questions: int, tokens: int) -> list[Asked]:
    """The first questions, prompt by prompt in turns, and mlx-lm's own answers."""
    prompts = read_prompts()
    asked = []
    for number in range(questions):
        prompt = prompts[number % len(prompts)]
        question = prompt.questions[number // len(prompts) % len(prompt.questions)]
        prefix, suffix = split_prompt(tokenizer, prompt.system, question)
        said = speak(model, tokenizer, [*prefix, *suffix], tokens)
        asked.append(Asked(prompt.name, question, tuple(prefix), tuple(suffix), said))
    return asked


@dataclass(frozen=True, slots=True)
class _Answering:
    model: Any
    tokenizer: Any
    tokens: int
    tier: Tier

    def from_store(self, server: LocalServer, asked: Sequence[Asked]) -> list[Said]:
        """Two clients of one server: one stores the prefixes, the other answers from them."""
        with self._client(server) as writer, self._client(server) as reader:
            for prefix, name in {one.prefix: self._name(one) for one in asked}.items():
                writer.get_or_prefill(prefix, name)
            said = self._answer(reader, asked)
            if reader.stats()["hits"] != len(asked):
                raise RuntimeError(f"a stored prefix was a miss: {reader.stats()}")
            return said

    def _answer(self, reader: PionPromptCache, asked: Sequence[Asked]) -> list[Said]:
        caches = (reader.get_or_prefill(one.prefix, self._name(one)) for one in asked)
        pairs = zip(asked, caches, strict=True)
        model, tokenizer, tokens = self.model, self.tokenizer, self.tokens
        if self.tier.vquant == "auto":
            return [speak(model, tokenizer, one.suffix, tokens, cache) for one, cache in pairs]
        drafts = [Draft(one.suffix, cache, one.standalone) for one, cache in pairs]
        return speak_after(model, tokenizer, drafts, tokens)

    def _name(self, one: Asked) -> str:
        return PionPromptCache.make_namespace("bleu", self.tier.label, one.prompt)

    def _client(self, server: LocalServer) -> PionPromptCache:
        return PionPromptCache(
            self.model,
            vquant=self.tier.vquant,
            boundary_protect=self.tier.boundary_protect,
            port=server.port,
            held_bytes=0,
            timeout=5,
            store="sync",
        )


def _findings(
    asked: Sequence[Asked],
    found: dict[str, list[Agreement]],
    lanes: dict[str, list[Agreement]],
) -> Findings:
    count = len(asked)
    figures = {label: _figures(answers) for label, answers in found.items()}
    by_lane = {label: _figures(answers) for label, answers in lanes.items()}
    columns = (
        "mean BLEU",
        "first token",
        "identical",
        "tokens before a difference",
        "tokens agree",
    )
    by_question = [
        (one.prompt, one.question, *(f"{found[label][number].bleu:.3f}" for label in found))
        for number, one in enumerate(asked)
    ]
    lossless = [label for label in LOSSLESS if label in figures]
    return Findings(
        figures={"questions": count, "formats": figures, "lanes": by_lane},
        tables=[
            Table(
                f"{count} questions against standalone mlx-lm",
                ("format", *columns),
                _rows(figures, count),
                "Tokens agree: places with the same token, of the longer answer's, EOS included.",
            ),
            Table("The same by lane", ("lane", *columns), _rows(by_lane, count)),
            Table("BLEU of each question", ("prompt", "question", *found), by_question),
        ],
        plots=[
            Plot(
                "formats",
                f"Mean BLEU of {count} answers against standalone",
                "storage format",
                "BLEU",
                _series(figures),
            )
        ],
        bars=[
            *(Bar(f"{label}: mean BLEU", figures[label]["bleu"], 1.0) for label in lossless),
            *(Bar(f"{label}: identical", figures[label]["identical"], count) for label in lossless),
            *(Bar(f"{lane}: first token", one["first"], count) for lane, one in by_lane.items()),
        ],
        quoted=_quoted(figures, count),
    )


def _series(figures: dict[str, dict[str, float]]) -> dict[str, list[tuple[str | float, float]]]:
    """Mean BLEU of each format, the best first, as it is and with protected layers."""
    best = sorted(figures, key=lambda label: -figures[label]["bleu"])
    series: dict[str, list[tuple[str | float, float]]] = {}
    for label in best:
        name, _, protected = label.partition(", ")
        points = series.setdefault(protected or "every layer in this format", [])
        points.append((name, figures[label]["bleu"]))
    return series


def _rows(figures: dict[str, dict[str, float]], count: int) -> list[tuple[str, ...]]:
    return [
        (
            label,
            f"{figure['bleu']:.3f}",
            f"{figure['first']}/{count}",
            f"{figure['identical']}/{count}",
            f"{figure['before']:.1f}",
            f"{figure['share']:.1%}",
        )
        for label, figure in figures.items()
    ]


def _figures(answers: Sequence[Agreement]) -> dict[str, float]:
    return {
        "bleu": mean(one.bleu for one in answers),
        "first": sum(one.first for one in answers),
        "identical": sum(one.identical for one in answers),
        "before": mean(one.before for one in answers),
        "share": mean(one.share for one in answers),
    }


def _quoted(figures: dict[str, dict[str, float]], count: int) -> list[Quoted]:
    design = {
        "fp16": "0.969, first token 20/20, identical 17/20",
        "int8": "not benchmarked; first token 95% or more",
        "turbo4": "0.538, first token 18/20",
    }
    lines = []
    for label, text in design.items():
        if label not in figures:
            lines.append(Quoted(f"{label}: mean BLEU, 20 questions of 50 tokens", text))
            continue
        one = figures[label]
        ours = f"{one['bleu']:.3f}, first token {one['first']}/{count}"
        ours += f", identical {one['identical']}/{count}"
        lines.append(Quoted(f"{label}: mean BLEU, 20 questions of 50 tokens", text, ours))
    return lines


def _print_line(label: str, answers: Sequence[Agreement]) -> None:
    one, count = _figures(answers), len(answers)
    print(
        f"{label:<30} BLEU {one['bleu']:.3f}  first {one['first']}/{count}"
        f"  identical {one['identical']}/{count}  before {one['before']:.1f}",
        flush=True,
    )
