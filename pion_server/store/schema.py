"""What a session may hold: one format for all layers, or one specification a layer."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pion_server.errors import BadArgument
from pion_server.formats import Format, make_format

MAX_LAYERS = 256
MAX_ROWS = 1_048_576
MAX_DIM = 8192


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Format name, row width in values (raw: bytes) and bf16 rope width of one layer."""

    fmt: str
    dim: int
    rope: int = 0

    def format(self) -> Format:
        return make_format(self.fmt, self.dim, self.rope)


@dataclass(frozen=True, slots=True)
class Schema:
    """`layers` empty: `default` for every layer. Otherwise layer i is `layers[i]`, and `default`
    is the first, so that equal layers make equal schemas however they were asked for."""

    default: LayerSpec
    layers: tuple[LayerSpec, ...] = ()

    def __post_init__(self) -> None:
        if self.layers:
            object.__setattr__(self, "default", self.layers[0])

    @property
    def heterogeneous(self) -> bool:
        return bool(self.layers)

    def layer(self, index: int) -> LayerSpec:
        """The specification of a layer; BadArgument outside the caps or the schema."""
        if not 0 <= index < MAX_LAYERS:
            raise BadArgument(f"invalid layer_id {index} (0..{MAX_LAYERS - 1})")
        if not self.layers:
            return self.default
        if index >= len(self.layers):
            raise BadArgument(f"layer {index} is outside the schema of {len(self.layers)} layers")
        return self.layers[index]

    def has_raw(self, layers: Iterable[int]) -> bool:
        """Whether one of these layers is raw: opaque bytes that cannot be decoded."""
        if not self.layers:
            return self.default.fmt == "raw"
        return any(self.layers[i].fmt == "raw" for i in layers if i < len(self.layers))

    def digest(self) -> int:
        """FNV-1a 32 over (dim u32, format tag u8, rope u32) of each layer; 0 without a schema."""
        if not self.layers:
            return 0
        value = 2166136261
        for spec in self.layers:
            for byte in struct.pack("<IBI", spec.dim, spec.format().tag, spec.rope):
                value = (value ^ byte) * 16777619 & 0xFFFFFFFF
        return value

    def to_json(self) -> list[Any]:
        def listed(spec: LayerSpec) -> list[Any]:
            return [spec.fmt, spec.dim, spec.rope]

        return [listed(self.default), [listed(spec) for spec in self.layers]]

    @classmethod
    def from_json(cls, value: list[Any]) -> Schema:
        default, layers = value
        return cls(LayerSpec(*default), tuple(LayerSpec(*spec) for spec in layers))


def uniform(fmt: str, dim: int) -> Schema:
    """A checked schema with one format and width for every layer."""
    spec = LayerSpec(fmt, dim)
    check(spec)
    return Schema(spec)


def check(spec: LayerSpec) -> None:
    """BadArgument unless the format exists and takes this width."""
    if not 1 <= spec.dim <= MAX_DIM:
        raise BadArgument(f"invalid value_dim {spec.dim} (1..{MAX_DIM})")
    try:
        spec.format()
    except ValueError as error:
        raise BadArgument(str(error)) from error
