"""A needle in a haystack: a number at some depth of a long text, by every lane and by blocks.

*Model*: the sentence with the number stands at a depth of the text, the question after it. Every
lane gets the prefix that mlx-lm prefilled and must give vanilla's answer, right or wrong; whether
vanilla finds the number says something about the model only. Of a lane that reads blocks only, the
number is what counts, where vanilla finds it.

*Kernel*: keys of 100 needles are planted in random K of 65,536 and 131,072 tokens. The server is
asked with 8 blocks of 64 chosen by their means, and densely; the value planted must come back.

Expected: every lane answers as vanilla; 100 of 100 planted needles, dense and by blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from evals.findings import NOT_MEASURED, Bar, Findings, Quoted, Table
from evals.lanes import APPROXIMATE, LANES, Prefix
from evals.needles import found_by, plant_needles
from evals.serving import SERVER_FLAGS, Caller, local_server
from evals.setting import Setting
from evals.speaking import speak
from evals.texts import read_long_text, split_prompt
from pion_vllm_mlx.local_server import LocalServer

LENGTHS: Final = (512, 1024, 2048)
DEPTHS: Final = (0.0, 0.5, 0.9)
TOKENS: Final = 16
NUMBER: Final = "48203"
NEEDLE: Final = f"The magic number of Nordvik is {NUMBER}."
QUESTION: Final = "What is the magic number of Nordvik? Answer with the number."

KERNEL_LENGTHS: Final = (65_536, 131_072)
NEEDLES: Final = 100
HEADS, KV_HEADS, DIM = 8, 2, 64
BLOCK, BLOCKS = 64, 8


@dataclass(frozen=True, slots=True)
class Found:
    """One length and depth: whether vanilla found the number, and which lanes answered as it.

    approximate: which of those lanes found the number.
    """

    length: int
    depth: float
    vanilla: bool
    lanes: dict[str, bool]
    approximate: dict[str, bool]


def run(setting: Setting) -> Findings:
    lengths = setting.take(LENGTHS)
    depths = setting.take(DEPTHS, 2)
    found = measure_model(setting, lengths, depths)
    planted = measure_kernel(setting.take(KERNEL_LENGTHS), setting.count(NEEDLES, 10))
    return _findings(setting, found, planted)


def measure_model(setting: Setting, lengths: Sequence[int], depths: Sequence[float]) -> list[Found]:
    """The model's part, at every length and depth."""
    model, tokenizer = setting.load()
    found = []
    with local_server(*SERVER_FLAGS) as server:
        for length in lengths:
            for depth in depths:
                text = make_haystack(tokenizer, length, depth)
                ids, suffix = split_prompt(tokenizer, text, QUESTION)
                prefix = Prefix(model, server.port, tuple(ids))
                one = _ask_lanes(prefix, suffix, tokenizer, depth)
                print(f"{one.length:>6} tokens, depth {depth:.1f}: {one}", flush=True)
                found.append(one)
    return found


def make_haystack(tokenizer: Any, tokens: int, depth: float) -> str:
    """About `tokens` tokens of the long text, with the needle between sentences at `depth`."""
    text = read_long_text()
    ids = tokenizer.encode(text[: 6 * tokens], add_special_tokens=False)[: max(tokens - 40, 1)]
    body = tokenizer.decode(ids)
    # To the end of a sentence, so that the needle does not stand in the middle of another.
    place = body.find(". ", int(depth * len(body)))
    place = len(body) if place < 0 or depth >= 1 else place + 2
    if depth <= 0:
        place = 0
    return f"{body[:place]}{NEEDLE} {body[place:]}"


def _ask_lanes(prefix: Prefix, suffix: list[int], tokenizer: Any, depth: float) -> Found:
    vanilla = speak(prefix.model, tokenizer, suffix, TOKENS, prefix.store())
    lanes = {}
    for lane, make in LANES.items():
        with make(prefix) as open_cache:
            said = speak(prefix.model, tokenizer, suffix, TOKENS, open_cache())
        lanes[lane] = (said.tokens, said.ended) == (vanilla.tokens, vanilla.ended)
    approximate = {}
    for lane, make in APPROXIMATE.items():
        with make(prefix) as open_cache:
            said = speak(prefix.model, tokenizer, suffix, TOKENS, open_cache())
        approximate[lane] = NUMBER in tokenizer.decode(said.tokens)
    found = NUMBER in tokenizer.decode(vanilla.tokens)
    return Found(len(prefix.ids), depth, found, lanes, approximate)


def measure_kernel(lengths: Sequence[int], needles: int) -> dict[int, dict[str, Any]]:
    """Needles found by the server at each length, dense and by blocks, and milliseconds a query."""
    found = {}
    for length in lengths:
        with local_server(*SERVER_FLAGS) as server:
            found[length] = _ask_kernel(server, length, needles)
        print(f"{length:>7} keys: {found[length]}", flush=True)
    return found


def _ask_kernel(server: LocalServer, length: int, needles: int) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    k, v = (rng.standard_normal((KV_HEADS, length, DIM), dtype=np.float32) for _ in "kv")
    queries, answers = plant_needles(k, v, needles, HEADS)
    call = Caller(server.port)
    head_map = bytes(head // (HEADS // KV_HEADS) for head in range(HEADS))
    call("ATTEND.PREFIX.STORE", "niah", 0, KV_HEADS, length, DIM, k.tobytes(), v.tobytes())
    sizes = ("niah", 0, HEADS, DIM)

    def by_blocks(query: bytes) -> Any:
        words = (*sizes, BLOCK, BLOCKS, KV_HEADS, query, head_map)
        return call("ATTEND.PREFIX.QUERY_SPARSE_AUTO", *words)

    def dense(query: bytes) -> Any:
        return call("ATTEND.PREFIX.QUERY_FUSED", *sizes, 0, KV_HEADS, query, b"", b"", head_map)

    result: dict[str, Any] = {"needles": needles}
    for way, ask in (("blocks", by_blocks), ("dense", dense)):
        ask(queries[0].tobytes())  # the first makes the summaries of blocks
        started = time.perf_counter()
        result[way] = sum(
            found_by(np.frombuffer(ask(query.tobytes()), np.float32), answer)
            for query, answer in zip(queries, answers, strict=True)
        )
        result[f"{way}_ms"] = (time.perf_counter() - started) / needles * 1e3
    return result


def _findings(setting: Setting, found: list[Found], planted: dict[int, dict[str, Any]]) -> Findings:
    rows = [
        (
            f"{one.length:,}",
            f"{one.depth:.1f}",
            "yes" if one.vanilla else "no",
            *("yes" if one.lanes[lane] else "no" for lane in LANES),
            *("yes" if one.approximate[lane] else "no" for lane in APPROXIMATE),
        )
        for one in found
    ]
    kernel = [
        (
            f"{length:,}",
            *(f"{one[way]}/{one['needles']}" for way in ("dense", "blocks")),
            *(f"{one[f'{way}_ms']:.2f} ms" for way in ("dense", "blocks")),
        )
        for length, one in planted.items()
    ]
    same = sum(all(one.lanes.values()) for one in found)
    share = min(
        one[way] / one["needles"] for one in planted.values() for way in ("dense", "blocks")
    )
    text = ", ".join(f"{one['blocks']}/{one['needles']} at {n:,}" for n, one in planted.items())
    return Findings(
        figures={
            "places": len(found),
            "vanilla_finds": sum(one.vanilla for one in found),
            "found_by_blocks": {
                lane: sum(one.approximate[lane] for one in found) for lane in APPROXIMATE
            },
            "as_vanilla": {lane: sum(one.lanes[lane] for one in found) for lane in LANES},
            "kernel": {str(length): one for length, one in planted.items()},
        },
        tables=[
            Table(
                f"{setting.model_name}: the number at a depth of a text",
                (
                    "prefix, tokens",
                    "depth",
                    "vanilla finds it",
                    *(f"{lane}: as vanilla" for lane in LANES),
                    *(f"{lane}: finds it" for lane in APPROXIMATE),
                ),
                rows,
            ),
            Table(
                f"Planted keys, {HEADS} heads on {KV_HEADS}, D = {DIM}; {BLOCKS} blocks of {BLOCK}",
                ("keys", "found, dense", "found, by blocks", "a dense query", "by blocks"),
                kernel,
            ),
        ],
        bars=[
            Bar("places where every lane answers as vanilla", same, len(found)),
            Bar("share of planted needles found, least", share, 1.0),
        ],
        quoted=[
            Quoted(
                "64K tokens, blocks of 64, 8 of them: needles found",
                "100% (Gemma-4-E2B-4bit, in process), 326x warm TTFT",
                f"planted keys: {text}; that model: {NOT_MEASURED}",
            ),
            Quoted(
                "sparse consumer over the wire",
                "same magic-number answers as vanilla (Llama-3.2-1B)",
                f"{same}/{len(found)} places as vanilla by every exact lane; the number found by"
                f" blocks at {sum(all(one.approximate.values()) for one in found)} places, by"
                f" vanilla at {sum(one.vanilla for one in found)}",
            ),
        ],
    )
