"""Attention requests with their tensors, checked for size: what both lanes build from bytes.

Tensors are float32 numpy views of the request's own bytes, shapes as in each field. A request is
complete in itself; `check` compares it with the session it names. `window` None means the server's
default, 0 no window, W > 0 the last W prefix tokens. `generation` is the fill of the prefix that is
meant, 0 for whatever the session holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pion_server.attend.sessions import Key, Shape
from pion_server.errors import BadArgument
from pion_server.payload import Buffer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A word at run time: the commands are known, and a server is up, before numpy is loaded.
F32: TypeAlias = "NDArray[np.float32]"

TOKEN_BYTES = 16
_POSITIONS = 2**31

DIMS = (32, 64, 96, 128, 160, 192, 256, 512)
BLOCK_MEAN, QUEST = 0, 1


@dataclass(frozen=True, slots=True)
class Store:
    """K and V of a layer, `[heads][tokens][dim]` each."""

    name: ClassVar[str] = "ATTEND.PREFIX.STORE"
    key: Key
    keys: F32
    values: F32
    generation: int = 0

    @classmethod
    def of(cls, key: Key, shape: Shape, keys: Buffer, values: Buffer, generation: int = 0) -> Store:
        """Raises BadArgument for blobs of another size and for an unsupported dimension."""
        check_dim(cls.name, shape.dim)
        sides = tensor(cls.name, "K", keys, shape), tensor(cls.name, "V", values, shape)
        return cls(key, *sides, generation)

    @property
    def shape(self) -> Shape:
        return Shape(*self.keys.shape)


@dataclass(frozen=True, slots=True)
class DenseQuery:
    """QUERY: `queries` [H][M][D], one kv head a query head, every visible token seen."""

    name: ClassVar[str] = "ATTEND.PREFIX.QUERY"
    key: Key
    queries: F32
    window: int | None = None
    generation: int = 0

    @classmethod
    def of(
        cls,
        key: Key,
        heads: int,
        dim: int,
        queries: Buffer,
        window: int | None = None,
        generation: int = 0,
    ) -> DenseQuery:
        """Raises BadArgument unless the blob holds M >= 1 rows a head."""
        return cls(key, _rows(cls.name, queries, heads, dim), window, generation)

    def check(self, held: Shape) -> None:
        """Raises BadArgument if the session has other heads or another dimension."""
        heads, _, dim = self.queries.shape
        _check_held(self.name, held, heads, dim)


@dataclass(frozen=True, slots=True)
class FusedQuery:
    """QUERY_FUSED: `queries` [H_q][M][D] over the prefix and a causal suffix [H_kv][S][D].

    `head_map` [H_q] int32 names the kv head of each query head.
    """

    name: ClassVar[str] = "ATTEND.PREFIX.QUERY_FUSED"
    key: Key
    queries: F32
    suffix_keys: F32
    suffix_values: F32
    head_map: NDArray[np.int32]
    window: int | None = None
    generation: int = 0

    @classmethod
    def of(
        cls,
        key: Key,
        heads: tuple[int, int],
        dim: int,
        suffix: int,
        blobs: Sequence[Buffer],
        window: int | None = None,
        generation: int = 0,
    ) -> FusedQuery:
        """`heads` are H_q and H_kv, `blobs` Q, K_suf, V_suf and head_map. Raises BadArgument."""
        _check_groups(cls.name, *heads)
        queries = _rows(cls.name, blobs[0], heads[0], dim)
        keys, values = _suffix(cls.name, blobs[1:3], heads[1], suffix, dim)
        mapped = _head_map(cls.name, blobs[3], *heads)
        return cls(key, queries, keys, values, mapped, window, generation)

    def check(self, held: Shape) -> None:
        """Raises BadArgument if the session has other kv heads or another dimension."""
        heads, _, dim = self.suffix_keys.shape
        _check_held(self.name, held, heads, dim)


@dataclass(frozen=True, slots=True)
class SparseQuery:
    """QUERY_SPARSE: head h of `queries` [H][D] sees tokens `indices[h][:counts[h]]` [H][Kmax]."""

    name: ClassVar[str] = "ATTEND.PREFIX.QUERY_SPARSE"
    key: Key
    queries: F32
    indices: NDArray[np.int32]
    counts: NDArray[np.uint32]
    window: int | None = None
    generation: int = 0

    @classmethod
    def of(
        cls,
        key: Key,
        heads: int,
        dim: int,
        most: int,
        blobs: Sequence[Buffer],
        window: int | None = None,
        generation: int = 0,
    ) -> SparseQuery:
        """`blobs` are Q, indices (i32) and counts (u32). Raises BadArgument."""
        queries = tensor(cls.name, "Q", blobs[0], (heads, dim))
        indices = tensor(cls.name, "indices", blobs[1], (heads, most), "<i4")
        counts = tensor(cls.name, "counts", blobs[2], (heads,), "<u4")
        return cls(key, queries, indices, counts, window, generation)

    def check(self, held: Shape) -> None:
        """Raises BadArgument if the session has other heads or another dimension."""
        _check_held(self.name, held, *self.queries.shape)


@dataclass(frozen=True, slots=True)
class BlockQuery:
    """QUERY_SPARSE_AUTO(_FUSED): `queries` [H_q][D] see the best `top` blocks of `block` tokens.

    The suffix [H_kv][S][D] is seen whole; AUTO has none (S = 0).
    """

    name: str
    key: Key
    queries: F32
    suffix_keys: F32
    suffix_values: F32
    head_map: NDArray[np.int32]
    block: int
    top: int
    window: int | None = None
    selector: int = BLOCK_MEAN
    generation: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        key: Key,
        heads: tuple[int, int],
        dim: int,
        blocks: tuple[int, int],
        suffix: int,
        blobs: Sequence[Buffer],
        window: int | None = None,
        selector: int = BLOCK_MEAN,
        generation: int = 0,
    ) -> BlockQuery:
        """`heads` are H_q and H_kv, `blocks` B and K_top, `blobs` Q, K_suf, V_suf, head_map.

        An empty head_map spreads the query heads evenly; an unknown selector is block-mean.
        Raises BadArgument.
        """
        _check_groups(name, *heads)
        queries = tensor(name, "Q", blobs[0], (heads[0], dim))
        keys, values = _suffix(name, blobs[1:3], heads[1], suffix, dim)
        mapped = _head_map(name, blobs[3], *heads) if len(blobs[3]) else even_map(*heads)
        chosen = selector if selector in (BLOCK_MEAN, QUEST) else BLOCK_MEAN
        choice = *blocks, window, chosen, generation
        return cls(name, key, queries, keys, values, mapped, *choice)

    def check(self, held: Shape) -> None:
        """Raises BadArgument if the session has other kv heads or another dimension."""
        heads, _, dim = self.suffix_keys.shape
        _check_held(self.name, held, heads, dim)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """DECODE.STEP: rows for the suffix kept under `token`, and queries of its last positions.

    `keys`, `values` [H_kv][S][D] go behind the first `length - drop` rows of a suffix that has
    `length`; `queries` [H_q][M][D] stand at the last M positions then. `prefix` is the number of
    prefix tokens its client counts on. `window` W > 0: each query sees the last W positions up to
    its own, of prefix and suffix together; 0: all of them.
    """

    command: ClassVar[str] = "ATTEND.DECODE.STEP"
    key: Key
    token: bytes
    queries: F32
    keys: F32
    values: F32
    head_map: NDArray[np.int32]
    prefix: int
    length: int
    drop: int
    window: int = 0
    generation: int = 0

    @classmethod
    def of(
        cls,
        key: Key,
        token: Buffer,
        heads: tuple[int, int],
        dim: int,
        place: tuple[int, int, int],
        suffix: int,
        blobs: Sequence[Buffer],
        window: int = 0,
        generation: int = 0,
    ) -> DecodeStep:
        """`heads` are H_q and H_kv, `place` N, length and drop, `blobs` Q, K, V and head_map.

        Raises BadArgument.
        """
        prefix, length, drop = place
        _check_groups(cls.command, *heads)
        check_token(cls.command, token)
        rows = len(blobs[0]) // (heads[0] * dim * 4)
        queries = tensor(cls.command, "Q", blobs[0], (heads[0], rows, dim))
        keys, values = _suffix(cls.command, blobs[1:3], heads[1], suffix, dim)
        mapped = _head_map(cls.command, blobs[3], *heads)
        if drop > length or rows > length - drop + suffix:
            raise BadArgument(
                f"{cls.command}: dropping {drop} rows and asking {rows} does not fit a suffix of "
                f"{length} and {suffix} more"
            )
        if prefix + length + suffix >= _POSITIONS:
            raise BadArgument(f"{cls.command}: a prefix and its suffix have less than 2^31 tokens")
        tensors = queries, keys, values, mapped
        return cls(key, bytes(token), *tensors, prefix, length, drop, window, generation)

    @property
    def name(self) -> tuple[bytes, bytes]:
        """The session's: sid and token."""
        return self.key[0], self.token

    @property
    def end(self) -> int:
        """Tokens of the suffix once the step is done."""
        return self.length - self.drop + int(self.keys.shape[1])

    def check(self, held: Shape) -> None:
        """Raises BadArgument for a prefix of other kv heads, dimension or length."""
        heads, _, dim = self.keys.shape
        _check_held(self.command, held, heads, dim)
        if held.tokens != self.prefix:
            raise BadArgument(
                f"{self.command}: the prefix has {held.tokens} tokens, not {self.prefix}"
            )


Query: TypeAlias = DenseQuery | FusedQuery | SparseQuery | BlockQuery


@dataclass(frozen=True, slots=True)
class OneShot:
    """QUERYBATCH: `queries` [H][D] over K, V [H][N][D] of its own, the best `top` tokens a head."""

    name: ClassVar[str] = "ATTEND.QUERYBATCH"
    queries: F32
    keys: F32
    values: F32
    top: int

    @classmethod
    def of(cls, shape: Shape, top: int, blobs: Sequence[Buffer]) -> OneShot:
        """`blobs` are Q, K and V. Raises BadArgument."""
        queries = tensor(cls.name, "Q", blobs[0], (shape.heads, shape.dim))
        keys = tensor(cls.name, "K", blobs[1], shape)
        return cls(queries, keys, tensor(cls.name, "V", blobs[2], shape), top)


def tensor(
    name: str, what: str, blob: Buffer, shape: Sequence[int], dtype: str = "<f4"
) -> NDArray[Any]:
    """The blob as an array of `shape`; BadArgument for another size.

    Its bytes are not copied, unless they lie at an odd address, as parts of a frame may.
    """
    wanted = math.prod(shape) * 4
    if len(blob) != wanted:
        sides = "x".join(map(str, shape))
        raise BadArgument(f"{name}: {what} has {len(blob)} bytes, {sides} needs {wanted}")
    import numpy as np

    flat = np.frombuffer(blob, dtype)
    return (flat if flat.flags.aligned else flat.copy()).reshape(shape)


def even_map(heads: int, kv_heads: int) -> NDArray[np.int32]:
    """The usual grouping: query head h reads kv head h / (H_q / H_kv)."""
    import numpy as np

    return np.arange(heads, dtype=np.int32) // (heads // kv_heads)


def check_token(name: str, token: Buffer) -> None:
    """Raises BadArgument for what cannot be a decode session's token."""
    if len(token) != TOKEN_BYTES:
        raise BadArgument(f"{name}: a token has {TOKEN_BYTES} bytes, not {len(token)}")


def check_dim(name: str, dim: int) -> None:
    """Raises BadArgument for a head dimension no session can have."""
    if dim not in DIMS:
        raise BadArgument(f"{name}: unsupported D {dim} (one of {', '.join(map(str, DIMS))})")


def _rows(name: str, blob: Buffer, heads: int, dim: int) -> F32:
    row = heads * dim * 4
    if not len(blob) or len(blob) % row:
        raise BadArgument(f"{name}: Q has {len(blob)} bytes, no positive multiple of {row}")
    return tensor(name, "Q", blob, (heads, len(blob) // row, dim))


def _suffix(name: str, blobs: Sequence[Buffer], heads: int, count: int, dim: int) -> list[F32]:
    shape = (heads, count, dim)
    return [
        tensor(name, what, blob, shape)
        for what, blob in zip(("K_suf", "V_suf"), blobs, strict=True)
    ]


def _check_groups(name: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise BadArgument(f"{name}: H_q {heads} is no multiple of H_kv {kv_heads}")


def _head_map(name: str, blob: Buffer, heads: int, kv_heads: int) -> NDArray[np.int32]:
    if len(blob) != heads:
        raise BadArgument(f"{name}: head_map has {len(blob)} bytes, H_q is {heads}")
    import numpy as np

    mapped = np.frombuffer(blob, np.uint8).astype(np.int32)
    if int(mapped.max()) >= kv_heads:
        raise BadArgument(f"{name}: head_map names kv head {mapped.max()} of {kv_heads}")
    return mapped


def _check_held(name: str, held: Shape, heads: int, dim: int) -> None:
    if (heads, dim) != (held.heads, held.dim):
        raise BadArgument(
            f"{name} failed: the session has {held.heads} heads of dimension {held.dim}, "
            f"not {heads} of {dim}"
        )
