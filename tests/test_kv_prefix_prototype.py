"""One prompt through a transformer written in numpy: no MLX, no client of ours, only commands.

The model has GPT-2's shape (learned positions, LayerNorm, one QKV product, GELU) and random
weights; K and V of a prefix go to the server row by row and come back as float32, and the model
goes on from them. What the design gated with the published gpt2 weights needs none for that.

python tests/test_kv_prefix_prototype.py [--layers 12] [--width 768] [--heads 12] [--tokens 96]

Expected: fp32 rows come back to the bit, and greedy tokens are those of the whole prompt at once;
fp16 gives the same tokens. The numpy model agrees with mlx-lm's gpt2, where that is installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import RawClient, ServerProcess

if TYPE_CHECKING:
    Weights: TypeAlias = dict[str, NDArray[np.float32]]

F32: TypeAlias = NDArray[np.float32]
VOCAB = 512


@dataclass(frozen=True)
class NumpyGpt2:
    """GPT-2 in numpy. A cache is a pair (keys, values) a layer, rows `[tokens][width]`."""

    weights: Weights
    layers: int
    heads: int

    @classmethod
    def random(cls, seed: int, layers: int, width: int, heads: int) -> NumpyGpt2:
        rng = np.random.default_rng(seed)

        def normal(*shape: int, around: float = 0.0) -> F32:
            # GPT-2's own initialisation is 0.02: here more, so that attention prefers some tokens.
            scale = 1.5 / np.sqrt(shape[-1])
            return np.asarray(around + scale * rng.standard_normal(shape), dtype=np.float32)

        weights = {"wte": normal(VOCAB, width), "wpe": normal(1024, width)}
        for layer in range(layers):
            shapes = {"attn.qkv": (3 * width, width), "attn.out": (width, width)}
            shapes |= {"mlp.up": (4 * width, width), "mlp.down": (width, 4 * width)}
            for name, shape in shapes.items():
                weights[f"{layer}.{name}"] = normal(*shape)
                weights[f"{layer}.{name}.bias"] = normal(shape[0])
        for norm in [f"{layer}.{name}" for layer in range(layers) for name in ("ln1", "ln2")]:
            weights[norm], weights[f"{norm}.bias"] = normal(width, around=1), normal(width)
        weights["ln"], weights["ln.bias"] = normal(width, around=1), normal(width)
        return cls(weights, layers, heads)

    def run(self, ids: list[int], cache: list[tuple[F32, F32]]) -> F32:
        """Logits `[vocab]` after the last of `ids`; the cache grows by their rows."""
        start = len(cache[0][0]) if cache else 0
        x = self.weights["wte"][ids] + self.weights["wpe"][start : start + len(ids)]
        for layer in range(self.layers):
            q, k, v = np.split(
                self._linear(f"{layer}.attn.qkv", self._norm(f"{layer}.ln1", x)), 3, 1
            )
            if layer < len(cache):
                k, v = np.concatenate([cache[layer][0], k]), np.concatenate([cache[layer][1], v])
                cache[layer] = (k, v)
            else:
                cache.append((k, v))
            x = x + self._linear(f"{layer}.attn.out", self._attend(q, k, v))
            up = self._linear(f"{layer}.mlp.up", self._norm(f"{layer}.ln2", x))
            gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            x = x + self._linear(f"{layer}.mlp.down", gelu.astype(np.float32))
        return np.asarray(self._norm("ln", x[-1:])[0] @ self.weights["wte"].T)

    def _linear(self, name: str, x: F32) -> F32:
        return np.asarray(x @ self.weights[name].T + self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: F32) -> F32:
        centred = x - x.mean(axis=-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
        return np.asarray(centred / spread * self.weights[name] + self.weights[f"{name}.bias"])

    def _attend(self, q: F32, k: F32, v: F32) -> F32:
        q, k, v = (part.reshape(len(part), self.heads, -1).transpose(1, 0, 2) for part in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[-1]))
        seen = np.arange(k.shape[1]) <= np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        scores = np.where(seen, scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out = (scores / scores.sum(axis=-1, keepdims=True)) @ v
        return np.asarray(out.transpose(1, 0, 2).reshape(q.shape[1], -1), dtype=np.float32)

    def answer(self, ids: list[int], cache: list[tuple[F32, F32]], count: int) -> list[int]:
        """Greedy tokens after `ids`."""
        said: list[int] = []
        for _ in range(count):
            said.append(int(self.run(said[-1:] or ids, cache).argmax()))
        return said


def store(client: RawClient, ns: str, cache: list[tuple[F32, F32]], vquant: str) -> None:
    width = cache[0][0].shape[1]
    assert client.call("KV.PREFIX.REGISTER", ns, width, vquant) == "OK"
    for layer, pair in enumerate(cache):
        for side, rows in zip(("pk", "pv"), pair, strict=True):
            blob = np.ascontiguousarray(rows).tobytes()
            words = f"{ns}_{side}", layer, 0, len(rows), blob
            assert client.call("V.STOREBATCH", *words) == "OK"


def fetch(client: RawClient, ns: str, layers: int, tokens: int) -> list[tuple[F32, F32]]:
    def side(name: str, layer: int) -> F32:
        data = client.call("V.FETCH", f"{ns}_{name}", layer, "RANGE", 0, tokens)
        return np.frombuffer(data, np.float32).reshape(tokens, -1)

    return [(side("pk", layer), side("pv", layer)) for layer in range(layers)]


def check_one_prompt(client: RawClient, model: NumpyGpt2, tokens: int) -> dict[str, bool]:
    """Whether each format gives the answer of the whole prompt at once."""
    ids = [int(token) for token in np.random.default_rng(5).integers(0, VOCAB, tokens)]
    prefix, suffix = ids[:-8], ids[-8:]
    whole = model.answer(ids, [], 20)
    assert len(set(whole)) > 3, "the model says the same whatever it reads"
    assert client.call("KV.PREFIX.LOOKUP", "gpt2-fp32") == "MISS"
    cold: list[tuple[F32, F32]] = []
    model.run(prefix, cold)
    found = {}
    for vquant in ("fp32", "fp16"):
        ns = f"gpt2-{vquant}"
        store(client, ns, cold, vquant)
        assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"
        warm = fetch(client, ns, model.layers, len(prefix))
        if vquant == "fp32":
            pairs = zip(sum(cold, ()), sum(warm, ()), strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in pairs)
        found[vquant] = model.answer(suffix, warm, 20) == whole
    return found


def test_a_prefix_through_the_server_answers_as_the_whole_prompt(
    server: Callable[..., ServerProcess],
) -> None:
    model = NumpyGpt2.random(seed=1, layers=3, width=64, heads=4)
    client = server("--kvcache", "-w", "1").client()
    assert check_one_prompt(client, model, tokens=48) == {"fp32": True, "fp16": True}


def test_the_numpy_model_is_gpt2_as_mlx_lm_has_it() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    from mlx_lm.models import gpt2

    ours = NumpyGpt2.random(seed=2, layers=2, width=64, heads=4)
    arguments = gpt2.ModelArgs("gpt2", 1024, 64, 4, 2, 1024, 1e-5, VOCAB)
    theirs = gpt2.Model(arguments)
    names = {"attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "ln1": "ln_1", "ln2": "ln_2"}
    weights = []
    for name, array in ours.weights.items():
        stem, bias = name.removesuffix(".bias"), name.endswith(".bias")
        layer, _, rest = stem.partition(".")
        path = f"h.{layer}.{names[rest]}" if rest else {"ln": "ln_f"}.get(stem, stem)
        weights.append((f"model.{path}.{'bias' if bias else 'weight'}", mx.array(array)))
    theirs.load_weights(weights)
    ids = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 20)]
    wanted = np.array(theirs(mx.array([ids]))[0, -1])
    np.testing.assert_allclose(ours.run(ids, []), wanted, atol=2e-4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, default in (("layers", 12), ("width", 768), ("heads", 12), ("tokens", 96)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    options = parser.parse_args()
    model = NumpyGpt2.random(1, options.layers, options.width, options.heads)
    with tempfile.TemporaryDirectory(prefix="pion-prototype-") as folder:
        running = ServerProcess(Path(folder) / "data", ("--kvcache", "-w", "1"), None)
        try:
            found = check_one_prompt(running.client(), model, options.tokens)
        finally:
            running.close()
    for vquant, same in found.items():
        print(f"{vquant}: 20 greedy tokens {'as' if same else 'NOT as'} the whole prompt's")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
