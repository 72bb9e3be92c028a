"""Which layers a server can attend to, and what a remote prefix does when an answer fails."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import dismantle
from pion_patches.remote import RemoteLost
from pion_vllm_mlx.attend_wire import AttendWire, NoSessions
from pion_vllm_mlx.manifest import Manifest
from pion_vllm_mlx.restore import Found
from pion_vllm_mlx.shipment import pack_prefix
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import ServerError, Unavailable
from pion_vllm_mlx.transport.binary import ColdEntry
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.wire_prefix import NotOnTheWire, WirePrefix, wire_layers
from tests.pion_patches.zoo import build
from tests.pion_vllm_mlx.tiny import PREFIX, tiny_llama

ROOT = Path(__file__).parents[2]


def manifest_of(model: Any) -> Manifest:
    cache = make_prompt_cache(model)
    model(mx.array([PREFIX]), cache=cache)
    image = dismantle(cache, len(PREFIX))
    return pack_prefix(image, PREFIX, "f" * 64, Tier(), prefill_ms=1, prefill_step=512).draft


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return manifest_of(tiny_llama(head_dim=32))


def test_layers_are_named_as_the_store_names_them(manifest: Manifest) -> None:
    layers = wire_layers(manifest)
    assert [(one.path, one.layer, one.kv_heads, one.dim) for one in layers] == [
        ((0,), 0, 2, 32),
        ((1,), 1, 2, 32),
    ]


def test_only_layers_that_see_the_whole_prefix_are_attended_to_there() -> None:
    model = build("gemma3_text", head_dim=32)
    paths = [one.path for one in wire_layers(manifest_of(model))]
    assert paths == [(1,), (3,)]


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"head_dim": 16}, "head dimension 16 is none of 32, 64"),
        ("mamba2", {}, "a ArraysCache is not attended to in the server"),
        ("deepseek_v2", {}, "keys and values of different widths"),
        ("recurrent_gemma", {}, "a RotatingKVCache is not attended to"),
    ],
)
def test_a_model_without_such_a_layer_is_refused_with_the_reason(
    family: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotOnTheWire, match=reason):
        wire_layers(manifest_of(build(family, **changes)))


def test_rows_of_another_number_than_tokens_are_not_attended_to(manifest: Manifest) -> None:
    shorter = dataclasses.replace(manifest, ids=manifest.ids[:-1])
    with pytest.raises(NotOnTheWire, match="other rows than one a token"):
        wire_layers(shorter)


def test_layers_that_warm_cannot_tell_apart_are_not_mixed_up(manifest: Manifest) -> None:
    """Two heads of 32 and one of 64 are rows of the same width."""
    first, second = manifest.leaves
    side = {"heads": 1, "widths": [64], "dtypes": ["float32"]}
    other = dataclasses.replace(second, meta={**second.meta, "keys": side, "values": side})
    layers = wire_layers(dataclasses.replace(manifest, leaves=(first, other)))
    assert [one.layer for one in layers] == [0]


@pytest.mark.parametrize(
    "side",
    [None, "rows", {}, {"heads": 2}, {"heads": "2", "widths": [32]}, {"heads": 2, "widths": 32}]
    + [{"heads": 2, "widths": widths} for widths in ([], [33], ["32"], [32, 32], [-32])],
    ids=str,
)
def test_a_manifest_whose_shapes_do_not_add_up_is_not_attended_to(
    manifest: Manifest, side: Any
) -> None:
    leaves = tuple(
        dataclasses.replace(leaf, meta={**leaf.meta, "keys": side, "values": side})
        for leaf in manifest.leaves
    )
    with pytest.raises(NotOnTheWire, match="keys and values of different widths"):
        wire_layers(dataclasses.replace(manifest, leaves=leaves))


class Owner:
    """What a `WirePrefix` is given, and what of it was called."""

    def __init__(self, manifest: Manifest) -> None:
        self.calls: list[str] = []
        self.told: list[str] = []
        wire = AttendWire(Endpoint(port=1), None, Tally())
        self.prefix = WirePrefix(
            wire,
            b"ns_attn",
            Found(3, manifest),
            wire_layers(manifest),
            rehydrate=lambda: self.calls.append("rehydrate"),
            still_held=lambda: True,
            restore=list,
            tell=lambda error: self.told.append(str(error)),
        )

    def ask(self, *outcomes: Any) -> Any:
        """Ask for the first outcome and, should it be asked again, the next; errors are raised."""
        left = list(outcomes)

        def query() -> Any:
            self.calls.append("query")
            outcome = left.pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return self.prefix.ask(query)


MISSING = ServerError("ERR session not found")


@pytest.mark.parametrize("error", [ColdEntry("cold"), MISSING], ids=["cold", "missing"])
def test_what_is_cold_or_missing_is_made_again_once(manifest: Manifest, error: Exception) -> None:
    owner = Owner(manifest)
    assert owner.ask(error, "answer") == "answer"
    assert owner.calls == ["query", "rehydrate", "query"]
    with pytest.raises(RemoteLost):
        owner.ask(error, error, "never asked for")
    assert owner.told == [str(error)]


@pytest.mark.parametrize(
    "error",
    [ServerError("ERR no"), Unavailable("gone"), ValueError("odd"), KeyError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_everything_else_ends_the_wire_and_never_the_generation(
    manifest: Manifest, error: Exception
) -> None:
    owner = Owner(manifest)
    with pytest.raises(RemoteLost):
        owner.ask(error)
    with pytest.raises(RemoteLost, match="given up before"):
        owner.ask("an answer")
    assert owner.calls == ["query"]
    assert len(owner.told) == 1


def test_a_server_without_decode_sessions_is_not_lost(manifest: Manifest) -> None:
    owner = Owner(manifest)
    with pytest.raises(NoSessions):
        owner.ask(NoSessions())
    assert owner.ask("answer") == "answer"


def test_threads_share_a_prefix_and_its_loss_costs_one_prefill(
    server: Callable[..., Any],
) -> None:
    running = server()
    which = str(running.port), str(running.pid)
    done = subprocess.run(
        [sys.executable, "-m", "tests.pion_vllm_mlx.wire_threads", *which],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "patches")])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr
