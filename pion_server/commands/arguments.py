"""Reading a command's arguments: canonical integers, option words, schemas and block tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pion_server.commands.registry import Args
from pion_server.errors import BadArgument, printable
from pion_server.formats import format_names
from pion_server.payload import Buffer
from pion_server.store.schema import MAX_DIM, MAX_LAYERS, LayerSpec, Schema, check, uniform
from pion_server.store.sessions import Blocks

MAX_HASHES = 1_048_576
MAX_PREFILL_MS = 86_400_000
SCHEMA_ONLY = "bf16_rope_fp8_body"

_INTEGER = re.compile(rb"-?[0-9]+\Z")


def integer(value: Buffer, what: str, low: int | None = None, high: int | None = None) -> int:
    """A plain decimal within `[low, high]`; anything else is BadArgument naming `what`."""
    data = bytes(value[:21])
    if len(value) > 20 or not _INTEGER.match(data):
        raise BadArgument(f"invalid integer for {what}: '{printable(value, 24)}'")
    number = int(data)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"{'' if low is None else low}..{'' if high is None else high}"
        raise BadArgument(f"invalid {what} {number} ({bounds})")
    return number


def word(value: Buffer) -> str:
    """A command word in upper case; longer ones are cut, no word of ours is that long."""
    return bytes(value[:32]).decode("latin-1").upper()


def name(value: Buffer) -> bytes:
    """A namespace or sid; dispatch has checked its length."""
    return bytes(value)


def format_name(value: Buffer, *, schema: bool = False) -> str:
    """A storage format's name; BadArgument listing the set."""
    chosen = bytes(value[:32]).decode("latin-1").lower()
    known = [n for n in format_names() if schema or n != SCHEMA_ONLY]
    if chosen not in known:
        if chosen == SCHEMA_ONLY:
            raise BadArgument(f"{SCHEMA_ONLY} requires SCHEMA")
        raise BadArgument(
            f"unknown VQUANT format '{printable(value, 32)}' (one of {', '.join(known)})"
        )
    return chosen


def uniform_schema(dim: Buffer, fmt: Buffer) -> Schema:
    """A schema of one format and width."""
    return uniform(format_name(fmt), integer(dim, "value_dim", 1, MAX_DIM))


def layer_count(value: Buffer) -> int:
    """The N of SCHEMA."""
    count = integer(value, "SCHEMA layer count", 1)
    if count > MAX_LAYERS:
        raise BadArgument(f"SCHEMA layer count {count} exceeds {MAX_LAYERS}")
    return count


def schema_of(specs: Sequence[Buffer], default_dim: int) -> Schema:
    """A heterogeneous schema from its layer specifications."""
    layers = tuple(_layer_spec(i, bytes(spec), default_dim) for i, spec in enumerate(specs))
    return Schema(layers[0], layers)


def _layer_spec(index: int, spec: bytes, default_dim: int) -> LayerSpec:
    fmt, dim, rope = "int8", default_dim, 0
    for segment in filter(None, spec.decode("latin-1").split(",")):
        word, _, value = segment.partition("=")
        key = word.lower()
        if key == "fmt":
            fmt = _schema_format(index, value)
        elif key == "dim":
            dim = integer(value.encode("latin-1"), f"dim of layer {index}", 1, MAX_DIM)
        elif key == "rope":
            rope = integer(value.encode("latin-1"), f"rope of layer {index}", 1, MAX_DIM)
        elif key == "s":
            raise BadArgument(f"layer {index}: S-tensor reserved")
        else:
            raise BadArgument(f"layer {index}: unknown key '{printable(word.encode('latin-1'))}'")
    if not dim:
        raise BadArgument(f"layer {index}: dim missing and no default_dim")
    if fmt == SCHEMA_ONLY and not rope:
        raise BadArgument(f"layer {index}: {SCHEMA_ONLY} is missing rope=")
    if rope and fmt != SCHEMA_ONLY:
        raise BadArgument(f"layer {index}: rope= goes with {SCHEMA_ONLY} only")
    if rope and not 0 < rope < dim:
        raise BadArgument(f"layer {index}: rope not in (0, dim): {rope}, dim {dim}")
    layer = LayerSpec(fmt, dim, rope)
    try:
        check(layer)
    except BadArgument as error:
        raise BadArgument(f"layer {index}: {str(error)[4:]}") from error
    return layer


def _schema_format(index: int, value: str) -> str:
    try:
        return format_name(value.encode("latin-1"), schema=True)
    except BadArgument:
        raise BadArgument(
            f"layer {index}: unknown fmt '{printable(value.encode('latin-1'), 32)}' "
            f"(one of {', '.join(format_names())})"
        ) from None


def register_options(args: Args) -> tuple[Blocks | None, int | None]:
    """`[BLOCKS size count blob] [PREFILL_MS ms]` in any order; unknown words are ignored."""
    blocks, prefill_ms, at = None, None, 0
    while at < len(args):
        option = word(args[at])
        if option == "BLOCKS":
            if len(args) < at + 4:
                raise BadArgument("BLOCKS requires: <block_size> <hash_count> <hash_blob>")
            size = integer(args[at + 1], "block_size", 1, 8192)
            count = integer(args[at + 2], "hash_count", 0, MAX_HASHES)
            blocks = Blocks(size, _hashes(args[at + 3], count))
            at += 4
        elif option == "PREFILL_MS":
            if len(args) < at + 2:
                raise BadArgument("PREFILL_MS requires a value")
            prefill_ms = integer(args[at + 1], "PREFILL_MS", 0, MAX_PREFILL_MS)
            at += 2
        else:
            at += 1
    return blocks, prefill_ms


def _hashes(blob: Buffer, count: int) -> bytes:
    if len(blob) != 8 * count:
        raise BadArgument(f"hash_blob of {len(blob)} bytes is not {count} hashes of 8 bytes")
    return bytes(blob)


def hash_blob(count: Buffer, blob: Buffer) -> bytes:
    """The probes of MEMBERSHIP."""
    return _hashes(blob, integer(count, "hash_count", 0, MAX_HASHES))


def generation(args: Args) -> int:
    """The value behind GEN."""
    if not args:
        raise BadArgument("GEN requires a value")
    return integer(args[0], "GEN", 1, 2**63 - 1)
