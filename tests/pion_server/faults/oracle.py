"""What a server has acknowledged of a namespace, as values that can be compared.

An `Image` is all that a client can read of one namespace:

    ("session", side)      (format, dim)
    ("rows", side, layer)  the rows in stored form (FMT PACKED), None where none was written
    ("blocks", "_pk")      the block table
    ("manifest",)          (generation, blob)
    ("state", layer)       recurrent state
    ("key", word)          what key `<ns>:<word>` of the keyspace holds: a string's bytes, or a
                           hash's fields and values as a frozenset of pairs

An `Act` is one command and the images it leads through: the last one counts when the command is
acknowledged; after a crash before that, any of them may stand, whole, but nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pion_server.formats import InputType, make_format

Image = dict[tuple[Any, ...], Any]
Words = tuple[str | bytes | int, ...]
# Every format a V.CREATE takes.
FORMATS = ("fp32", "int8", "fp16", "turbo4", "bf16", "turbo3", "raw", "turbo2", "mlx4g32", "fp8")
DIM = 32
LAYERS = 4
SIDES = ("_pk", "_pv")
STRINGS, HASHES = ("s0", "s1"), ("h0",)


@dataclass(frozen=True)
class Act:
    """`lead(image)` is the images after each record that the command writes."""

    words: Words
    lead: Callable[[Image], list[Image]]


def without(image: Image, *kinds: str, side: str | None = None) -> Image:
    """Everything of these kinds gone, of one side only if `side` is given."""
    return {k: v for k, v in image.items() if k[0] not in kinds or (side and k[1] != side)}


def unmanifested(image: Image) -> list[Image]:
    """A write from outside a fill removes the manifest first."""
    return [without(image, "manifest")]


def register(ns: str, fmt: str, hashes: bytes = b"") -> Act:
    """Both sides, and the block table if there is one. A side of another format that holds rows
    takes the other side with it; an empty one adopts the format."""

    def lead(image: Image) -> list[Image]:
        held = {key[1] for key in image if key[0] == "session"}
        unfit = {side for side in held if image[("session", side)] != (fmt, DIM)}
        if any(key[0] == "rows" and key[1] in unfit for key in image):
            unfit = held
        images = [image]
        if unfit or held != set(SIDES):
            images += unmanifested(image)
        made = images[-1]
        for side in unfit:
            made = without(made, "session", "rows", "blocks", side=side)
        made = made | {("session", side): (fmt, DIM) for side in SIDES}
        if hashes:
            made |= {("blocks", "_pk"): struct.pack("<II", 16, len(hashes) // 8) + hashes}
        return [*images, made]

    blocks = ("BLOCKS", 16, len(hashes) // 8, hashes) if hashes else ()
    return Act(("KV.PREFIX.REGISTER", ns, DIM, fmt, *blocks), lead)


def packed_rows(fmt: str, values: bytes) -> list[bytes]:
    """The stored form of float32 rows; raw rows are their own."""
    form = make_format(fmt, DIM)
    data = values
    if fmt != "raw":
        count = len(values) // (4 * DIM)
        data = bytes(form.pack(form.encode(values, count, InputType.F32)))
    size = form.packed_row_bytes
    return [data[at : at + size] for at in range(0, len(data), size)]


def store(
    ns: str, side: str, fmt: str, layer: int, start: int, values: bytes, gen: int | None = None
) -> Act:
    """V.STOREBATCH of float32 rows; of raw ones in the raw format."""
    rows = packed_rows(fmt, values)
    words: Words = ("V.STOREBATCH", ns + side, layer, start, len(rows), values)
    words += ("FMT", "PACKED") if fmt == "raw" else ()
    words += ("GEN", gen) if gen is not None else ()

    def lead(image: Image) -> list[Image]:
        images = [image] if gen is not None else unmanifested(image)
        key = ("rows", side, layer)
        held = list(image.get(key, ()))
        held += [None] * (start + len(rows) - len(held))
        held[start : start + len(rows)] = rows
        return [*images, images[-1] | {key: tuple(held)}]

    return Act(words, lead)


def restore(ns: str, side: str, number: int, counts: dict[int, int]) -> Act:
    """V.RESTORE to a V.SNAPSHOT that had these row counts."""

    def lead(image: Image) -> list[Image]:
        cut = dict(image)
        for key, rows in image.items():
            if key[:2] == ("rows", side):
                cut[key] = rows[: counts.get(key[2], 0)]
        cut = {key: value for key, value in cut.items() if value != ()}
        return [image] if cut == image else [*unmanifested(image), without(cut, "manifest")]

    return Act(("V.RESTORE", ns + side, number), lead)


def drop(ns: str) -> Act:
    """KV.PREFIX.DROP. State goes with a manifest, but by the other log and after it."""

    def lead(image: Image) -> list[Image]:
        gone = without(image, "session", "rows", "blocks", "manifest")
        return [gone, without(gone, "state")] if ("manifest",) in image else [gone]

    return Act(("KV.PREFIX.DROP", ns), lead)


def drop_side(ns: str, side: str) -> Act:
    """V.DROP of one session."""

    def lead(image: Image) -> list[Image]:
        if ("session", side) not in image:
            return [image]
        bare = without(image, "manifest")
        return [bare, without(bare, "session", "rows", "blocks", side=side)]

    return Act(("V.DROP", ns + side), lead)


def begin(ns: str) -> Act:
    """Open a fill."""
    return Act(("KV.PREFIX.META", ns, "BEGIN"), unmanifested)


def complete(ns: str, gen: int, blob: bytes) -> Act:
    """Write the manifest."""
    words: Words = ("KV.PREFIX.META", ns, "SET", gen, blob)
    return Act(words, lambda image: [image | {("manifest",): (gen, blob)}])


def store_state(ns: str, layer: int, blob: bytes, gen: int | None = None) -> Act:
    """SSM.PREFIX.STORE."""
    words: Words = ("SSM.PREFIX.STORE", ns, layer, blob)
    words += ("GEN", gen) if gen is not None else ()

    def lead(image: Image) -> list[Image]:
        images = [image] if gen is not None else unmanifested(image)
        return [*images, images[-1] | {("state", layer): blob}]

    return Act(words, lead)


def drop_state(ns: str, layer: int) -> Act:
    """SSM.PREFIX.DROP of one layer."""

    def lead(image: Image) -> list[Image]:
        if ("state", layer) not in image:
            return [image]
        bare = without(image, "manifest")
        return [bare, {k: v for k, v in bare.items() if k != ("state", layer)}]

    return Act(("SSM.PREFIX.DROP", ns, layer), lead)


def set_key(ns: str, word: str, value: bytes) -> Act:
    """SET, whatever the key was before."""
    return Act(("SET", f"{ns}:{word}", value), lambda image: [image | {("key", word): value}])


def set_fields(ns: str, word: str, fields: dict[bytes, bytes]) -> Act:
    """HSET: all of its fields or none."""
    words: Words = ("HSET", f"{ns}:{word}", *(part for pair in fields.items() for part in pair))

    def lead(image: Image) -> list[Image]:
        held = dict(image.get(("key", word), ())) | fields
        return [image | {("key", word): frozenset(held.items())}]

    return Act(words, lead)


def delete_keys(ns: str, *words: str) -> Act:
    """DEL: all of them or none."""
    gone = {("key", word) for word in words}

    def lead(image: Image) -> list[Image]:
        return [{key: value for key, value in image.items() if key not in gone}]

    return Act(("DEL", *(f"{ns}:{word}" for word in words)), lead)
