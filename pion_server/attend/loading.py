"""K and V on their way into a slot: from a request's bytes, or from the V-store's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pion_server.attend.requests import F32
from pion_server.attend.sessions import Shape
from pion_server.errors import BadArgument, NotFound
from pion_server.payload import FileSpan
from pion_server.store.rows import StoredRows
from pion_server.store.sessions import Layer, sides
from pion_server.store.vstore import VStore

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class WarmLayer:
    """A layer of a prefix as the V-store has it: rows `[tokens][heads * dim]` of both sides."""

    layer: int
    shape: Shape
    keys: StoredRows
    values: StoredRows
    generation: int


def plan_layers(
    vstore: VStore,
    ns: bytes,
    heads: int,
    dim: int,
    cold_shape: Callable[[int], Shape | None] = lambda layer: None,
) -> tuple[list[WarmLayer], int]:
    """The layers of `ns` that hold `heads` times `dim` values a row, and how many hold others.

    A caller with grouped queries may name its query heads: then a cold entry of the layer with the
    same `dim` says how many kv heads there are. Reads nothing yet. Raises NotFound, and BadArgument
    if a row was never written or a fill is open, as LOOKUP would not answer a hit either.
    """
    planned: list[WarmLayer] = []
    skipped = 0
    with vstore.lock:
        k_sid, v_sid = sides(ns)
        k_side, v_side = vstore.table.get(k_sid), vstore.table.get(v_sid)
        if k_side is None or v_side is None:
            raise NotFound("KV.PREFIX.WARM: namespace not registered")
        if vstore.manifests.fill(ns) is not None:
            raise BadArgument("KV.PREFIX.WARM: the namespace is just being filled")
        vstore.table.touch(k_sid)
        generation = generation_of(vstore, ns)
        for index in sorted(k_side.layers.keys() & v_side.layers.keys()):
            k, v = k_side.layers[index], v_side.layers[index]
            tokens = min(k.count, v.count)
            if not tokens:
                continue
            width = _width(k, v)
            cold = cold_shape(index)
            if width != heads * dim and cold is not None and cold.dim == dim:
                found = cold.heads
            else:
                found = heads
            if width != found * dim:
                skipped += 1
                continue
            keys, values = (vstore.rows(sid, index, 0, tokens) for sid in (k_sid, v_sid))
            if keys is None or values is None:
                raise BadArgument(
                    f"KV.PREFIX.WARM: layer {index} has rows never written below {tokens}"
                )
            shape = Shape(found, tokens, dim)
            planned.append(WarmLayer(index, shape, keys, values, generation))
    return planned, skipped


def generation_of(vstore: VStore, ns: bytes) -> int:
    """The fill whose rows `ns` holds, 0 if they are of none."""
    manifest = vstore.manifests.by_ns.get(ns)
    return manifest.gen if manifest is not None else 0


def verify_layers(layers: list[WarmLayer]) -> None:
    """Check the sums of all that will be read; raises DamagedEntry."""
    for layer in layers:
        layer.keys.verify()
        layer.values.verify()


def read_rows(rows: StoredRows, target: NDArray[Any]) -> None:
    """Decode rows `[tokens][heads * dim]` into `target` `[heads][tokens][dim]`."""
    import numpy as np

    heads, _, dim = target.shape
    at = 0
    for chunk in rows.decoded().chunks():
        assert not isinstance(chunk, FileSpan)
        piece = np.frombuffer(chunk, np.float32).reshape(-1, heads, dim)
        fill(target[:, at : at + len(piece)], piece.transpose(1, 0, 2))
        at += len(piece)


def fill(target: NDArray[Any], source: F32) -> None:
    """Copy into (part of) a slot's tensor; BadArgument if a finite number overflows float16."""
    import numpy as np

    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="same_kind")
    if target.dtype != np.float32 and np.any(np.isinf(target) & np.isfinite(source)):
        raise BadArgument("K or V has values beyond float16, which --metal-attention-fp16 asks for")


def _width(k: Layer, v: Layer) -> int:
    """Values a row, 0 where the sides differ or the rows are opaque."""
    opaque = "raw" in (k.format.name, v.format.name)
    return 0 if opaque or k.format.dim != v.format.dim else k.format.dim
