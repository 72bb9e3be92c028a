"""What each storage format does to real K and V, and to what the model says after them.

SmolLM2-135M in float32, a prefix of 512 tokens of English. Every piece of its cache is packed as a
client packs it and read back as a client reads it; then the model answers eight questions, greedily
and 20 tokens each. Expected: on fp32 it answers like on the cache that was never stored.

* K and V error: mean and largest |read - stored| over all layers and tokens, and the mean as a
  part of the mean |stored|. Of a tier with `boundary_protect`, V is the mean over all layers.
* first: of the eight questions, those whose first token is the cold run's.
* before: tokens that agree before the first that differs, mean of the eight; 20 is all.
* answers: of the eight, those of which all 20 tokens agree.
* each: of the 160 tokens, those that are chosen again after the cold run's own tokens before them.

A restored cache is given question and cold answer at once, and its choices at every place are read:
up to the first that differs these are the tokens it would have said one by one.

Encode and decode speed is what `formats_speed` measures, on rows of 1,024 normal numbers.

    OPENBLAS_NUM_THREADS=1 LD_PRELOAD=$(python -m pion_vllm_mlx.blas) \
        python -m evals.bench formats_error
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np
import xxhash
from mlx_lm.models.cache import make_prompt_cache

from evals.bench import formats_speed
from pion_patches.cache_rebuild import CacheImage, RowPiece, dismantle, rebuild
from pion_server.formats import InputType, make_format
from pion_vllm_mlx.demo_request import QUESTION, make_prompt
from pion_vllm_mlx.manifest import Rows
from pion_vllm_mlx.pieces import Landing, pack_piece, row_format
from pion_vllm_mlx.prefill import prefill
from pion_vllm_mlx.small_model import load_small_model
from pion_vllm_mlx.tier import NAMED, Tier

TOKENS: Final = 512
ANSWER: Final = 20
PROTECTED: Final = 2
QUESTIONS: Final = (
    QUESTION,
    "How long is the crossing?",
    "How many passengers does the Heron carry?",
    "When does the first boat leave in summer?",
    "What does a ticket for an adult cost?",
    "Where do dogs have to stay?",
    "Who is right when the handbook and the captain disagree?",
    "Write a short notice about the timetable.",
)
_STEP: Final = 512
_SPEED_MEGABYTES: Final = 32
#: A row whose leading head stands for a rotary part; no model here has such rows.
_ROPE: Final = 64
_ROPED: Final = "bf16_rope_fp8_body"
_FP16_BYTES: Final = 2
_WAYS: Final = ("encode", "decode")


def run(
    tokens: int = TOKENS,
    questions: int = len(QUESTIONS),
    megabytes: int = _SPEED_MEGABYTES,
    loaded: tuple[Any, Any] | None = None,
) -> Mapping[str, Any]:
    """Measure, print the table, return the figures by format and tier.

    loaded: another model and its tokenizer than the small one.
    """
    model, tokenizer = loaded or load_small_model()
    prefix, suffix = make_prompt(tokenizer, tokens)
    suffixes = [_ask(tokenizer, suffix, question) for question in QUESTIONS[:questions]]
    cache = make_prompt_cache(model)
    prefill(model, prefix, cache, _STEP)
    image = dismantle(cache, len(prefix))
    cold = [_answer(model, image, ids) for ids in suffixes]
    asked = list(zip(suffixes, cold, strict=True))
    if [_choices(model, image, *one) for one in asked] != cold:
        raise RuntimeError("the cold answers differ when they are read at once")
    speed = formats_speed.run(megabytes)["formats"]
    print(
        f"\n{'format':<22}{'bytes/row':>10}{'to fp16':>9}{'K mean':>10}{'of |K|':>8}{'K max':>9}"
        f"{'V mean':>10}{'of |V|':>8}{'V max':>9}{'first':>7}{'before':>8}{'answers':>9}{'each':>6}"
    )
    figures = {}
    for tier in _tiers():
        stored = through_store(image, tier)
        chosen = [_choices(model, stored.image, *one) for one in asked]
        figure = stored.figures(image) | _agreement(cold, chosen)
        if not tier.boundary_protect:
            figure |= {f"{way}_gb_per_s": speed[tier.vquant][f"{way}_gb_per_s"] for way in _WAYS}
        figures[_label(tier)] = figure
        _print_row(_label(tier), figure)
    figures[_ROPED] = _measure_roped(image) | {
        f"{way}_gb_per_s": speed[_ROPED][f"{way}_gb_per_s"] for way in _WAYS
    }
    _print_row(_ROPED, figures[_ROPED])
    width = pieces_of(image, "keys")[0].layout.widths[0]
    peaks = {side: _peak_to_mean(numbers(image, side)) for side in ("keys", "values")}
    print(
        f"{len(image.leaves)} layers, {len(prefix)} tokens, rows of {width} float32; the largest of"
        f" 32 numbers is {peaks['keys']:.1f} times their mean in K, {peaks['values']:.1f} in V"
    )
    return {
        "peak_to_mean": peaks,
        "tokens": len(prefix),
        "layers": len(image.leaves),
        "width": width,
        "questions": len(cold),
        "answer_tokens": ANSWER,
        "formats": figures,
    }


def _tiers() -> list[Tier]:
    """Every format by itself, then the lossy ones with the outer layers of V and all K in fp16."""
    plain = [Tier(name) for name in NAMED]
    lossy = [name for name in NAMED if name not in ("fp32", "fp16", "bf16")]
    return plain + [Tier(name, boundary_protect=PROTECTED) for name in lossy]


def _label(tier: Tier) -> str:
    return tier.vquant + (f" protect {tier.boundary_protect}" if tier.boundary_protect else "")


def _ask(tokenizer: Any, suffix: list[int], question: str) -> list[int]:
    """The tokens behind the prefix, with another question in them."""
    text = tokenizer.decode(suffix)
    if QUESTION not in text:
        raise RuntimeError("the question is not behind the prefix")
    ids: list[int] = tokenizer.encode(text.replace(QUESTION, question), add_special_tokens=False)
    return ids


def _answer(model: Any, image: CacheImage, suffix: Sequence[int]) -> list[int]:
    """Greedy tokens on a cache of its own, made from the image; no early end."""
    cache = rebuild(make_prompt_cache(model), image)
    said: list[int] = []
    step = mx.array(list(suffix))[None]
    for _ in range(ANSWER):
        said.append(int(np.array(mx.argmax(model(step, cache=cache)[0, -1]))))
        step = mx.array([said[-1:]])
    return said


def _choices(
    model: Any, image: CacheImage, suffix: Sequence[int], answer: Sequence[int]
) -> list[int]:
    """The token chosen at each place of `answer`, given all before it."""
    cache = rebuild(make_prompt_cache(model), image)
    logits = model(mx.array([*suffix, *answer[:-1]])[None], cache=cache)[0]
    return [int(token) for token in np.array(mx.argmax(logits[-len(answer) :], axis=-1))]


def _agreement(cold: Sequence[list[int]], chosen: Sequence[list[int]]) -> dict[str, float]:
    same = np.array(cold) == np.array(chosen)
    before = np.where(same.all(axis=1), ANSWER, same.argmin(axis=1))
    return {
        "first_token_agrees": int(same[:, 0].sum()),
        "tokens_before_difference": float(before.mean()),
        "answers_agree": int(same.all(axis=1).sum()),
        "tokens_agree": int(same.sum()),
    }


@dataclass(frozen=True, slots=True)
class _Stored:
    """A cache image as a client reads it back, and the stored bytes of its pieces by side."""

    image: CacheImage
    nbytes: Mapping[str, int]

    def figures(self, exact: CacheImage) -> dict[str, float]:
        """Sizes and errors against the image that was stored."""
        values = sum(piece.rows * piece.layout.widths[0] for piece in pieces_of(exact, "keys"))
        rows = sum(piece.rows for piece in pieces_of(exact, "keys"))
        total = sum(self.nbytes.values())
        figures = {
            "row_bytes": total / (2 * rows),
            "ratio_to_fp16": 2 * values * _FP16_BYTES / total,
        }
        for side in ("keys", "values"):
            want, got = (numbers(image, side) for image in (exact, self.image))
            figures |= errors(side, want, got)
        return figures


def errors(side: str, want: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> dict[str, float]:
    error = np.abs(got.astype(np.float64) - want)
    mean = float(error.mean())
    return {
        f"{side}_mean_abs_error": mean,
        f"{side}_relative_error": mean / float(np.abs(want).mean(dtype=np.float64)),
        f"{side}_max_error": float(error.max()),
    }


def pieces_of(image: CacheImage, side: str) -> list[RowPiece]:
    found = [getattr(leaf, side) for leaf in image.leaves]
    return [piece for piece in found if piece is not None]


def numbers(image: CacheImage, side: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """All rows of a side, `[layers * tokens, width]`."""
    return np.concatenate([np.array(piece.parts[0]) for piece in pieces_of(image, side)])


def _peak_to_mean(rows: np.ndarray[Any, Any]) -> float:
    """How far the largest of a block of 32 stands out: its ratio to the mean, median of blocks."""
    blocks = np.abs(rows.reshape(-1, 32))
    return float(np.median(blocks.max(axis=1) / blocks.mean(axis=1)))


def through_store(image: CacheImage, tier: Tier) -> _Stored:
    """Every piece packed as it is stored and landed as it is fetched."""
    nbytes = {"keys": 0, "values": 0}
    leaves = []
    for layer, leaf in enumerate(image.leaves):
        landed = {}
        for side in nbytes:
            piece: RowPiece = getattr(leaf, side)
            store = tier.store_for(side, layer, len(image.leaves), piece.layout)
            fmt = row_format(store, piece.layout)
            data = pack_piece(piece, fmt)
            checksum = xxhash.xxh3_64_hexdigest(data)
            landing = Landing(Rows(layer, piece.rows, piece.layout, store, checksum))
            Landing.open([landing])
            if landing.view is None:
                raise RuntimeError("no memory was opened for a piece")
            landing.view[:] = data
            # As it lies in the log: one header for these rows, which are one run.
            nbytes[side] += fmt.header_bytes + fmt.row_bytes * piece.rows
            landed[side] = landing.piece()
        leaves.append(replace(leaf, keys=landed["keys"], values=landed["values"]))
    return _Stored(CacheImage(image.tokens, tuple(leaves)), nbytes)


def _measure_roped(image: CacheImage) -> dict[str, float]:
    """Size and errors of the one format of numbers that `vquant` cannot name."""
    figures: dict[str, float] = {}
    for side in ("keys", "values"):
        rows = numbers(image, side)
        made = make_format(_ROPED, rows.shape[1], _ROPE)
        read = made.decode(made.encode(memoryview(rows.tobytes()), len(rows), InputType.F32))
        figures |= errors(side, rows, read)
        figures["row_bytes"] = made.row_bytes
        figures["ratio_to_fp16"] = rows.shape[1] * _FP16_BYTES / made.row_bytes
    return figures


def _print_row(label: str, figure: Mapping[str, float]) -> None:
    shown = "".join(
        f"{figure[f'{side}_mean_abs_error']:>10.2e}{figure[f'{side}_relative_error']:>8.2%}"
        f"{figure[f'{side}_max_error']:>9.2e}"
        for side in ("keys", "values")
    )
    said = ""
    if "answers_agree" in figure:
        said = (
            f"{figure['first_token_agrees']:>7.0f}"
            f"{figure['tokens_before_difference']:>8.1f}"
            f"{figure['answers_agree']:>9.0f}{figure['tokens_agree']:>6.0f}"
        )
    print(
        f"{label:<22}{figure['row_bytes']:>10.0f}{figure['ratio_to_fp16']:>9.2f}{shown}{said}",
        flush=True,
    )


if __name__ == "__main__":
    run()
