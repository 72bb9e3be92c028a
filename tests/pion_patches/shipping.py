"""A cache image as plain bytes in a directory, and a zoo model run on what comes back.

    python -m tests.pion_patches.shipping DIRECTORY

is the fresh process of the zoo test: for every subdirectory, named after a family, it rebuilds the
stored cache, continues, and writes the logits to `logits.npy` beside the pieces.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import CacheImage, Leaf, RowLayout, RowPiece, rebuild
from pion_patches.containers import pack_arrays, unpack_arrays
from pion_patches.hybrid import fit_to_store, route
from tests.pion_patches.zoo import ONE_TOKEN_A_CALL, VOCAB, families

#: Calls of a continuation: decoding, then a block, then decoding again; 20 tokens.
CALLS = (1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
DTYPES: dict[str, mx.Dtype] = {
    name: getattr(mx, name) for name in ("float32", "float16", "bfloat16")
}


def token_ids(start: int, count: int) -> list[int]:
    """Reproducible ids at positions start.. of one endless prompt."""
    return [(7 * i * i + 3 * i + 5) % VOCAB for i in range(start, start + count)]


def feed(family: str, model: Any, cache: list[Any], start: int, count: int) -> mx.array:
    """Run `count` tokens of the prompt at `start`; logits of the last call, evaluated."""
    step = 1 if family in ONE_TOKEN_A_CALL else count
    logits = mx.zeros((0,))
    for at in range(start, start + count, step):
        logits = model(mx.array([token_ids(at, step)]), cache=cache)
        mx.eval(logits)
    return logits


def continuation(
    family: str, model: Any, cache: list[Any], start: int, calls: tuple[int, ...] = CALLS
) -> np.ndarray[Any, Any]:
    """Float32 logits of all calls after `start` tokens, one row a call's last token."""
    rows = []
    for count in calls:
        logits = feed(family, model, cache, start, count)
        rows.append(np.array(logits[0, -1].astype(mx.float32)))
        start += count
    return np.stack(rows)


def largest_difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """max |delta|; equal infinities and NaN in the same place differ by nothing."""
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        delta = np.where(same, 0.0, np.abs(one - other))
    return float(np.max(np.nan_to_num(delta, nan=np.inf)))


def to_pieces(image: CacheImage) -> dict[str, bytes]:
    """An image as named pieces of bytes, as a server would hold them."""
    image = fit_to_store(image)
    pieces, leaves = {}, []
    for lane, leaf in zip(route(image).lanes, image.leaves, strict=True):
        entry: dict[str, Any] = {"path": leaf.path, "kind": leaf.kind, "meta": leaf.meta}
        entry |= {"blob": lane.blob}
        for side, piece in (("keys", leaf.keys), ("values", leaf.values)):
            entry[side] = piece and {
                "layer": lane.rank,
                "rows": piece.rows,
                "layout": asdict(piece.layout),
            }
            if piece is not None:
                pieces[f"{side}.{lane.rank}"] = bytes(piece.to_bytes())
        if lane.blob is not None:
            pieces[f"blob.{lane.blob}"] = pack_arrays(leaf.kind, leaf.arrays, image.tokens)
        leaves.append(entry)
    manifest = {"tokens": image.tokens, "leaves": leaves}
    return pieces | {"manifest": json.dumps(manifest).encode()}


def from_pieces(pieces: Mapping[str, bytes]) -> CacheImage:
    """The image of `to_pieces`; a missing piece is a KeyError."""
    manifest = json.loads(pieces["manifest"])
    leaves = []
    for entry in manifest["leaves"]:
        sides: dict[str, RowPiece | None] = {}
        for side in ("keys", "values"):
            rows = entry[side]
            sides[side] = rows and RowPiece.from_buffer(
                pieces[f"{side}.{rows['layer']}"], _layout(rows["layout"]), rows["rows"]
            )
        arrays: tuple[mx.array | None, ...] = ()
        if entry["blob"] is not None:
            blob = pieces[f"blob.{entry['blob']}"]
            arrays = unpack_arrays(entry["kind"], blob, manifest["tokens"])
        leaves.append(
            Leaf(tuple(entry["path"]), entry["kind"], entry["meta"], **sides, arrays=arrays)
        )
    return CacheImage(manifest["tokens"], tuple(leaves))


def _layout(stored: dict[str, Any]) -> RowLayout:
    return RowLayout(stored["fmt"], tuple(stored["dtypes"]), tuple(stored["widths"]))


def copied(cache: list[Any]) -> list[Any]:
    """A cache that continues alone, as mlx-lm's own prompt cache copies one."""
    return copy.deepcopy(cache)


def write_pieces(directory: Path, pieces: Mapping[str, bytes]) -> None:
    """One file a piece."""
    directory.mkdir(parents=True)
    for name, data in pieces.items():
        (directory / name).write_bytes(data)


def main(root: Path) -> None:
    """Restore and continue every family below `root`."""
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        family, dtype = directory.name.split("@")
        model: Any = families[family](seed=1, dtype=DTYPES[dtype])
        pieces = {path.name: path.read_bytes() for path in directory.iterdir()}
        image = from_pieces(pieces)
        cache = rebuild(make_prompt_cache(model), image)
        np.save(directory / "logits.npy", continuation(family, model, cache, image.tokens))
    (root / "done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # A CPU build of MLX may abort while the interpreter shuts down.
    os._exit(0)
