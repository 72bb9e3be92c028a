"""Recurrent state through the server: decoding goes on to the bit, in the design's own container.

`serialize_arrays_cache` writes what the design calls the reference format (version, arrays, shape,
dtype, bytes); it knows any number of arrays a layer, so Mamba (two), RWKV-7 (three) and families
to come need no code. Random models of those families stand for the published ones.

python tests/test_ssm_prefix_roundtrip.py [--tokens 512]

Expected: every token and every bit of every logit as without a snapshot.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from tests.conftest import RawClient, ReplyError, ServerProcess
from tests.pion_patches.zoo import VOCAB, families

#: Arrays a layer's state has, by family.
FAMILIES = {"mamba": 2, "rwkv7": 3}
PROMPT = [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 24)]
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def serialize_arrays_cache(layer: Any) -> bytes:
    """`u32 version=1 | u32 n | n times: u32 ndim | u32[ndim] shape | u32 dtype | bytes`.

    dtype: 0 fp32, 1 fp16, 2 bf16; bf16 travels as fp32, which loses nothing.
    """
    parts = [struct.pack("<II", 1, len(layer.cache))]
    for array in layer.cache:
        code = _DTYPES.index(array.dtype)
        kept = np.array(array.astype(mx.float32) if code == 2 else array)
        parts.append(struct.pack(f"<I{kept.ndim}II", kept.ndim, *kept.shape, code))
        parts.append(kept.tobytes())
    return b"".join(parts)


def deserialize_arrays_cache(blob: bytes, layer: Any) -> None:
    """Put what `serialize_arrays_cache` wrote into a fresh layer's cache."""
    version, count = struct.unpack_from("<II", blob)
    assert version == 1
    place = 8
    for index in range(count):
        (ndim,) = struct.unpack_from("<I", blob, place)
        *shape, code = struct.unpack_from(f"<{ndim}II", blob, place + 4)
        place += 8 + 4 * ndim
        kind = np.float16 if code == 1 else np.float32
        values = np.frombuffer(blob, kind, int(np.prod(shape)), place).reshape(shape)
        place += values.nbytes
        layer[index] = mx.array(values).astype(_DTYPES[code])
    assert place == len(blob)


def decode(model: Any, cache: list[Any], token: int, count: int) -> tuple[list[int], bytes]:
    """`count` greedy tokens from `token` on, and the bits of all logits."""
    tokens, bits = [token], b""
    for _ in range(count):
        logits = model(mx.array([tokens[-1:]]), cache=cache)[0, -1].astype(mx.float32)
        bits += np.array(logits).tobytes()
        tokens.append(int(mx.argmax(logits)))
    return tokens[1:], bits


def check_family(client: RawClient, family: str, count: int, dtype: Any = mx.float32) -> None:
    """Prefill, store, fetch into fresh caches, and decode from both."""
    model: Any = families[family](seed=3, dtype=dtype)
    cache, fresh = model.make_cache(), model.make_cache()
    model(mx.array([PROMPT]), cache=cache)
    for number, layer in enumerate(cache):
        assert len(layer.cache) == FAMILIES[family]
        blob = serialize_arrays_cache(layer)
        assert client.call("SSM.PREFIX.STORE", f"{family}-{dtype}", number, blob) == "OK"
    for number, layer in enumerate(fresh):
        blob = client.call("SSM.PREFIX.FETCH", f"{family}-{dtype}", number)
        deserialize_arrays_cache(blob, layer)
    wanted = decode(model, cache, 7, count)
    assert decode(model, fresh, 7, count) == wanted
    # What would differ if the state had not travelled.
    assert decode(model, model.make_cache(), 7, count)[1] != wanted[1]


@pytest.fixture(scope="module")
def client(module_server: Callable[..., ServerProcess]) -> RawClient:
    return module_server("--kvcache", "-w", "1").client()


@pytest.mark.parametrize("family", FAMILIES)
def test_64_tokens_are_bit_perfect(client: RawClient, family: str) -> None:
    check_family(client, family, 64)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_state_keeps_its_bits(client: RawClient, dtype: Any) -> None:
    check_family(client, "mamba", 8, dtype)


def test_a_megabyte_comes_back_is_overwritten_and_dropped_by_layer(client: RawClient) -> None:
    blobs = [np.random.default_rng(seed).bytes(1 << 20) for seed in range(3)]
    for layer, blob in enumerate(blobs):
        assert client.call("SSM.PREFIX.STORE", "big", layer, blob) == "OK"
    assert [client.call("SSM.PREFIX.FETCH", "big", n) for n in range(3)] == blobs
    assert client.call("SSM.PREFIX.STORE", "big", 1, blobs[0]) == "OK"
    assert client.call("SSM.PREFIX.FETCH", "big", 1) == blobs[0]
    assert client.call("SSM.PREFIX.DROP", "big", 1) == "OK"
    assert client.call("SSM.PREFIX.FETCH", "big", 1) is None
    assert client.call("SSM.PREFIX.FETCH", "big", 2) == blobs[2]
    assert client.call("SSM.PREFIX.DROP", "big") == "OK"
    assert [client.call("SSM.PREFIX.FETCH", "big", n) for n in range(3)] == [None] * 3
    with pytest.raises(ReplyError):
        client.call("SSM.PREFIX.STORE", "big", 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="decoded of each family")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pion-ssm-") as folder:
        running = ServerProcess(Path(folder) / "data", ("--kvcache", "-w", "1"), None)
        try:
            for family in FAMILIES:
                check_family(running.client(), family, options.tokens)
                print(f"{family}: {options.tokens}/{options.tokens} tokens, every logit the same")
        finally:
            running.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
