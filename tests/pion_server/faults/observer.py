"""Reads everything a server holds of a namespace, as an `oracle.Image`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.conftest import RawClient, ReplyError
from tests.pion_server.faults.oracle import HASHES, LAYERS, SIDES, STRINGS, Image, Words


@dataclass(frozen=True)
class Refused:
    """An error reply in the place of a value; any two are equal."""

    text: str = field(compare=False)


def observe(client: RawClient, ns: str) -> Image:
    """All of namespace `ns`; where the server answers an error, the value is a `Refused`.

    No fill of `ns` may be open.
    """
    infos = [("V.INFO", ns + side) for side in SIDES]
    states = [("SSM.PREFIX.FETCH", ns, layer) for layer in range(LAYERS)]
    rest = [("KV.PREFIX.BLOCKS", ns), ("KV.PREFIX.META", ns, "GET"), ("KV.PREFIX.LOOKUP", ns)]
    keys: list[Words] = [("GET", f"{ns}:{word}") for word in STRINGS]
    keys += [("HGETALL", f"{ns}:{word}") for word in HASHES]
    answers = ask(client, [*infos, *rest, *states, *keys])
    table, manifest, hit = answers[2:5]
    image: Image = {}
    counts: dict[tuple[str, int], int] = {}
    for side, info in zip(SIDES, answers[:2], strict=True):
        image |= _session(side, info, counts)
    image |= _rows(client, ns, counts)
    if table != "UNKNOWN":
        image[("blocks", "_pk")] = table
    if manifest is not None:
        image[("manifest",)] = manifest if isinstance(manifest, Refused) else tuple(manifest)
    for layer, state in enumerate(answers[5 : 5 + LAYERS]):
        if state is not None:
            image[("state", layer)] = state
    for word, held in zip((*STRINGS, *HASHES), answers[5 + LAYERS :], strict=True):
        if isinstance(held, list) and held:
            image[("key", word)] = frozenset(zip(held[::2], held[1::2], strict=True))
        elif held not in (None, []):
            image[("key", word)] = held
    assert (hit == "HIT") == all(("session", side) in image for side in SIDES)
    return image


def ask(client: RawClient, commands: list[Words]) -> list[Any]:
    """All of them in one go; error replies come as `Refused`."""
    client.send(b"".join(client.pack(*words) for words in commands))
    replies = [client.read() for _ in commands]
    return [Refused(str(reply)) if isinstance(reply, ReplyError) else reply for reply in replies]


def _session(side: str, info: Any, counts: dict[tuple[str, int], int]) -> Image:
    """The session's shape; notes the row counts of its layers in `counts`."""
    if isinstance(info, Refused):
        assert info.text == "ERR session not found", info
        return {}
    fields = dict(line.split(":", 1) for line in info.decode().splitlines())
    for layer in range(int(fields["num_layers"])):
        count = int(fields[f"layer_{layer}_tokens"])
        if count:
            counts[(side, layer)] = count
    return {("session", side): (fields["v_format"], int(fields["value_dim"]))}


def _rows(client: RawClient, ns: str, counts: dict[tuple[str, int], int]) -> Image:
    """Each layer whole; row by row where it has gaps or is damaged."""
    image: Image = {}
    wholes = ask(client, [_range(ns, side, layer, 0, n) for (side, layer), n in counts.items()])
    for ((side, layer), count), whole in zip(counts.items(), wholes, strict=True):
        rows: list[Any]
        if isinstance(whole, bytes):
            size = len(whole) // count
            rows = [whole[at : at + size] for at in range(0, len(whole), size)]
        else:
            rows = ask(client, [_range(ns, side, layer, n, n + 1) for n in range(count)])
        image[("rows", side, layer)] = tuple(rows)
    return image


def _range(ns: str, side: str, layer: int, start: int, end: int) -> Words:
    return ("V.FETCH", ns + side, layer, "RANGE", start, end, "FMT", "PACKED")
