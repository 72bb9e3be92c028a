"""The server's attention slots of stored prefixes: made, checked, dropped.

A slot mirrors one layer of one fill, and queries say which one they mean. Whoever makes slots
compares the manifest's generation before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from pion_vllm_mlx.attend_wire import F32, AttendWire
from pion_vllm_mlx.manifest import Manifest
from pion_vllm_mlx.pieces import is_lossless
from pion_vllm_mlx.restore import Found, Miss, find_generation
from pion_vllm_mlx.transport import Command, Lane, Patience
from pion_vllm_mlx.wire_prefix import WireLayer

_SUFFIX: Final = b"_attn"
#: Bytes of K and V that a server makes slots of in a second, on a bad day.
_SLOWEST: Final = 32 << 20
#: Seconds for an engine to start, on the same day.
_START: Final = 10.0


def session_of(namespace: bytes) -> bytes:
    """The attention session of a namespace."""
    return namespace + _SUFFIX


class AttendSlots:
    """Slots of one server's prefixes through one lane.

    `holds` raises Miss or TransportError where the server does not say; all others raise those, and
    ServerError for a refusal.
    """

    def __init__(self, lane: Lane, wire: AttendWire, quick: Patience) -> None:
        self._lane = lane
        self._wire = wire
        self._quick = quick

    def holds(self, name: bytes, found: Found) -> bool:
        """Whether the server still has this very fill."""
        return find_generation(self._lane, name, self._quick) == found.gen

    def are_ready(self, name: bytes, layers: Sequence[WireLayer]) -> bool:
        """Whether every layer can be queried at once."""
        states = self._wire.states(session_of(name), [one.layer for one in layers])
        return set(states) == {"HIT"}

    def warm(self, name: bytes, found: Found, layers: Sequence[WireLayer]) -> None:
        """Have the server make slots of the rows it has stored; Miss unless they are `found`'s."""
        sid, manifest = session_of(name), found.manifest
        if not self.holds(name, found):
            raise Miss("changed", "stored anew or dropped")
        nbytes = sum(8 * one.kv_heads * one.dim * len(manifest.ids) for one in layers)
        # No longer than the prefill that it saves, if that is known, or than it can take.
        longest = nbytes / _SLOWEST
        if manifest.prefill_ms:
            longest = min(longest, manifest.prefill_ms / 1000)
        patience = Patience(_START + longest, _START + longest, _START + longest)
        shapes = dict.fromkeys((one.kv_heads, one.dim) for one in layers)
        count = sum(self._wire.warm(name, *shape, sid, patience) for shape in shapes)
        if count < len(layers):
            raise Miss("rows", f"{count} of {len(layers)} layers could be made ready")
        if not self.holds(name, found):
            raise Miss("changed", "stored anew or dropped while it was made ready")
        self._drop_others(sid, manifest, layers)

    def store(self, name: bytes, found: Found, layers: Mapping[int, tuple[F32, F32]]) -> None:
        """Send K and V [H][N][D] of every layer; the server refuses them once `found` is gone."""
        sid = session_of(name)
        for layer, (keys, values) in layers.items():
            self._wire.store(sid, layer, keys, values, found.gen)

    def _drop_others(self, sid: bytes, manifest: Manifest, layers: Sequence[WireLayer]) -> None:
        """Free the slots of layers that nobody will ask for, such as windows."""
        wanted = {one.layer for one in layers}
        others = [leaf.keys.layer for leaf in manifest.leaves if leaf.keys is not None]
        drops = [
            Command.of("ATTEND.PREFIX.DROP", sid, layer) for layer in others if layer not in wanted
        ]
        if drops:
            self._lane.exchange(drops, self._quick)


def is_exact(manifest: Manifest, layers: Sequence[WireLayer]) -> bool:
    """Whether reading the stored rows of these layers gives the bits that were computed."""
    there = {one.path for one in layers}
    sides = [(leaf.keys, leaf.values) for leaf in manifest.leaves if leaf.path in there]
    return all(is_lossless(rows) for pair in sides for rows in pair if rows is not None)
