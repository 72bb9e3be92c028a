"""mlx-lm's prompt cache files become images and images such files, in both dialects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

from pion_patches.cache_rebuild import RebuildError, UnsupportedCache, dismantle, rebuild
from pion_patches.prompt_cache_file import export_prompt_cache, import_prompt_cache
from tests.pion_patches.positions import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    append,
    filled,
    state,
)
from tests.pion_patches.shipping import continuation, feed, to_pieces
from tests.pion_patches.zoo import RECENT, build, families

KINDS = ["llama", "gemma3n", "qwen3_5", "mamba2", "baichuan_m1", "deepseek_v3"]
if RECENT:
    # Before, a chunked cache depended on the length of its buffer, which its file does not keep.
    KINDS.append("llama4")
load_prompt_cache: Any = mlx_caches.load_prompt_cache
NOTE = {"model": "a model", "tokenizer.config": "{}"}


@pytest.mark.parametrize("family", KINDS)
def test_file_of_mlx_lm_becomes_the_image_of_its_cache(family: str, tmp_path: Path) -> None:
    model: Any = build(family)
    live = make_prompt_cache(model)
    feed(family, model, live, 0, 40)
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(str(path), live, NOTE)
    image, metadata = import_prompt_cache(path, make_prompt_cache(model), tokens=40)
    assert metadata == NOTE
    expected = to_pieces(dismantle(live, 40))
    found = to_pieces(image)
    assert {n: d for n, d in found.items() if n != "manifest"} == {
        n: d for n, d in expected.items() if n != "manifest"
    }
    restored = rebuild(make_prompt_cache(model), image)
    cold = continuation(family, model, live, 40, (1, 3, 1))
    assert np.array_equal(continuation(family, model, restored, 40, (1, 3, 1)), cold)


@pytest.mark.parametrize("family", KINDS)
def test_exported_file_is_loaded_by_mlx_lm(family: str, tmp_path: Path) -> None:
    model: Any = build(family)
    live = make_prompt_cache(model)
    feed(family, model, live, 0, 40)
    path = tmp_path / "prompt.safetensors"
    export_prompt_cache(path, make_prompt_cache(model), dismantle(live, 40), NOTE)
    loaded: Any = load_prompt_cache(str(path), return_metadata=True)
    cache, metadata = loaded
    assert metadata["model"] == "a model"
    cold = continuation(family, model, live, 40, (1, 3, 1))
    assert np.array_equal(continuation(family, model, cache, 40, (1, 3, 1)), cold)
    again, _ = import_prompt_cache(path, make_prompt_cache(model), tokens=40)
    assert again.tokens == 40
    assert [p.name for p in tmp_path.iterdir()] == ["prompt.safetensors"]


def test_exported_file_holds_the_tokens_and_no_padding(tmp_path: Path) -> None:
    """A10: five tokens of one layer, 2 x 5 x 2 values of 4 bytes, and a header."""
    path = tmp_path / "prompt.safetensors"
    export_prompt_cache(path, [KVCache()], dismantle([filled(KVCache(), 5)], 5))
    data = path.read_bytes()
    scalars = 1 if RECENT else 0
    header = int.from_bytes(data[:8], "little")
    assert len(data) - 8 - header <= 2 * 5 * 2 * 4 + 16 * scalars
    (cache,) = load_prompt_cache(str(path))
    assert append(cache, 5, 1) == list(range(6))


def test_quantised_ring_and_state_round_trip_through_a_file(tmp_path: Path) -> None:
    quantised, ring = QuantizedKVCache(32, 4), RotatingKVCache(max_size=8)
    quantised.update_and_fetch(*[mx.ones((1, 2, 20, 32), mx.float16)] * 2)
    for position in range(20):
        append(ring, position, 1)
    live = [quantised, ring, state(mx.ones((1, 3)))]
    path = tmp_path / "prompt.safetensors"
    template = [QuantizedKVCache(32, 4), RotatingKVCache(max_size=8), ArraysCache(1)]
    export_prompt_cache(path, template, dismantle(live, 20))
    image, _ = import_prompt_cache(path, template)
    assert to_pieces(image) == to_pieces(dismantle(live, 20))
    assert append(rebuild(template, image)[1], 20, 4) == list(range(13, 24))


def write_031(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """A file as mlx-lm 0.31 flattens (info, metadata, classes)."""
    mx.save_safetensors(str(path), arrays, metadata)


def write_032(path: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """A file as mlx-lm 0.32 flattens (metadata, classes, scalars)."""
    mx.save_safetensors(str(path), arrays, metadata)


ROWS = mx.arange(12, dtype=mx.float32).reshape(1, 1, 6, 2)


def old_file(path: Path) -> None:
    write_031(
        path,
        {
            "0.0": ROWS,
            "0.1": ROWS,
            "1.0": ROWS[:, :, :4],
            "1.1": ROWS[:, :, :4],
            "2.0": mx.ones((1, 3)),
            "3.0.0": mx.ones((1, 2)),
            "3.1.0": ROWS,
            "3.1.1": ROWS,
        },
        {
            "0.0": "",
            "0.1.0": "0",
            "0.1.1": "4",
            "0.1.2": "6",
            "0.1.3": "2",
            "0.2": "",
            "0.3.0.0": "ArraysCache",
            "0.3.0.1": "KVCache",
            "0.3.1.0": "",
            "0.3.1.1": "",
            "1.note.one": "kept",
            "2.0": "KVCache",
            "2.1": "RotatingKVCache",
            "2.2": "ArraysCache",
            "2.3": "CacheList",
        },
    )


def new_file(path: Path) -> None:
    names = ["KVCache", "RotatingKVCache", "ArraysCache", "CacheList"]
    six, scalar = mx.array(6), "scalar"
    marks = [
        ("0.2", six, scalar),
        ("1.2", six, scalar),
        ("1.3", mx.array(0), scalar),
        ("1.4", mx.array(4), scalar),
        ("1.5", mx.array(2), scalar),
        ("2.1", mx.array([]), "none"),
        ("2.2", mx.array([]), "none"),
        ("3.0.0.1", mx.array([]), "none"),
        ("3.0.0.2", mx.array([]), "none"),
        ("3.0.1", mx.array([ord(c) for c in "ArraysCache"]), "string"),
        ("3.1.0.2", six, scalar),
        ("3.1.1", mx.array([ord(c) for c in "KVCache"]), "string"),
    ]
    arrays = {
        "0.0": ROWS,
        "0.1": ROWS,
        "1.0": ROWS[:, :, :4],
        "1.1": ROWS[:, :, :4],
        "2.0.0": mx.ones((1, 3)),
        "3.0.0.0.0": mx.ones((1, 2)),
        "3.1.0.0": ROWS,
        "3.1.0.1": ROWS,
        **{name: array for name, array, _ in marks},
    }
    metadata = {"0.note.one": "kept", "2.0": ""}
    metadata |= {f"1.{index}": name for index, name in enumerate(names)}
    for index, (name, _, kind) in enumerate(marks, 1):
        metadata |= {f"2.{index}.0": name, f"2.{index}.1": kind}
    write_032(path, arrays, metadata)


def template() -> list[Any]:
    return [
        KVCache(),
        RotatingKVCache(max_size=4),
        ArraysCache(1),
        CacheList(ArraysCache(1), KVCache()),
    ]


@pytest.mark.parametrize("write", [old_file, new_file])
def test_both_dialects_are_read_by_either_version(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    """`load_prompt_cache` of the other version gives an empty list instead."""
    path = tmp_path / "prompt.safetensors"
    write(path)
    image, metadata = import_prompt_cache(path, template())
    assert metadata == {"note.one": "kept"}
    assert image.tokens == 6
    cache = rebuild(template(), image)
    assert cache[1]._idx == 2
    assert [c.offset for c in (cache[0], cache[1], cache[3].caches[1])] == [6, 6, 6]
    assert mx.array_equal(cache[3].caches[1].keys[:, :, :6], ROWS).item()
    assert mx.array_equal(cache[2].cache[0], mx.ones((1, 3))).item()


def test_token_count_a_file_does_not_tell_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(str(path), [state(mx.ones((1, 3)))])
    with pytest.raises(RebuildError, match="token count not told"):
        import_prompt_cache(path, [ArraysCache(1)])
    image, _ = import_prompt_cache(path, [ArraysCache(1)], tokens=11)
    assert image.tokens == 11
    save_prompt_cache(str(path), [filled(KVCache(), 3)])
    with pytest.raises(UnsupportedCache, match="3 tokens"):
        import_prompt_cache(path, [KVCache()], tokens=4)


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(str(path), [filled(KVCache(), 3)])
    for other in ([KVCache(), KVCache()], [RotatingKVCache(max_size=8)], []):
        with pytest.raises(RebuildError):
            import_prompt_cache(path, other)
    with pytest.raises(FileNotFoundError):
        import_prompt_cache(tmp_path / "absent.safetensors", [KVCache()])


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 64, b"PK\x03\x04" + b"\0" * 60])
def test_file_that_is_no_cache_is_refused(data: bytes, tmp_path: Path) -> None:
    """E18."""
    path = tmp_path / "prompt.safetensors"
    path.write_bytes(data)
    with pytest.raises(RebuildError):
        import_prompt_cache(path, [KVCache()])


@pytest.mark.parametrize(("name", "entry"), [
    ("1.0", "Unknown"), ("1.0", "BatchKVCache"), ("1.0", "_BaseCache"), ("1.0", "Any"),
    ("1.0", "RotatingKVCache"), ("1.9", "KVCache"), ("2.1.0", "9.9"), ("2.1.1", "pickle"),
    ("2.1.1", "string"), ("2.0", "x"),
])  # fmt: skip
def test_file_whose_metadata_lies_is_refused(name: str, entry: str, tmp_path: Path) -> None:
    """No class but those listed is ever looked up, and no field is believed without its place."""
    metadata = {"1.0": "KVCache", "2.0": "", "2.1.0": "0.2", "2.1.1": "scalar", name: entry}
    path = tmp_path / "prompt.safetensors"
    write_032(path, {"0.0": ROWS, "0.1": ROWS, "0.2": mx.array(6)}, metadata)
    with pytest.raises((RebuildError, UnsupportedCache)):
        import_prompt_cache(path, [KVCache()])


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    """E18: a header that points beyond the end."""
    path = tmp_path / "prompt.safetensors"
    save_prompt_cache(str(path), [filled(KVCache(), 3)])
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(RebuildError):
        import_prompt_cache(path, [KVCache()])
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["0.0"]["data_offsets"][1] += 8
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(RebuildError):
        import_prompt_cache(path, [KVCache()])


def test_old_file_with_a_trimmed_chunk_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompt.safetensors"
    metadata = {"0.0.0": "8", "0.0.1": "4", "2.0": "ChunkedKVCache"}
    write_031(path, {"0.0": ROWS, "0.1": ROWS}, metadata)
    with pytest.raises(RebuildError, match="trimmed chunk"):
        import_prompt_cache(path, [ChunkedKVCache(8)])
    write_031(path, {"0.0": ROWS, "0.1": ROWS}, metadata | {"0.0.1": "0"})
    assert import_prompt_cache(path, [ChunkedKVCache(8)])[0].tokens == 6


@pytest.mark.skipif("deepseek_v41" not in families, reason="this mlx-lm has no private cache")
def test_caches_mlx_lm_cannot_load_are_not_exported(tmp_path: Path) -> None:
    model: Any = build("deepseek_v41")
    live = make_prompt_cache(model)
    feed("deepseek_v41", model, live, 0, 9)
    path = tmp_path / "prompt.safetensors"
    with pytest.raises(UnsupportedCache, match="LayerCache"):
        export_prompt_cache(path, make_prompt_cache(model), dismantle(live, 9))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UnsupportedCache):
        dismantle([BatchKVCache([0])], 0)
