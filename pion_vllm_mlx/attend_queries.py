"""The ATTEND queries of `PionPromptCache`, for clients with an attention hook of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx.arguments import check_namespace
from pion_vllm_mlx.attend_slots import session_of
from pion_vllm_mlx.attend_wire import F32, as_f32, even_map

if TYPE_CHECKING:
    from pion_patches.remote import RemoteEntry
    from pion_vllm_mlx.stage2 import Stage2
    from pion_vllm_mlx.storing import Storing


class AttendQueries:
    """What `PionPromptCache(stage2=True)` adds.

    Arrays may be numpy's or MLX's, of any number type; they are sent, and answered, as float32.
    Scores are scaled by 1/sqrt(D): multiply queries by scale*sqrt(D) first for another scale.
    `window` is the number of prefix tokens seen, counted from its end; 0 is all, None leaves it to
    the server. A session that turned cold, or went with a restart, is made again from the stored
    rows and the query repeated, once (`cold_rehydrates_observed`).

    All raise ValueError, with nothing sent, for arrays that do not go together; ServerError for
    what the server refuses (`session not found`); ColdEntry where a cold session cannot be made
    again; TransportError; RuntimeError without ``stage2=True``.
    """

    _stage2: Stage2 | None
    _storing: Storing

    @property
    def cold_rehydrates_observed(self) -> int:
        """How often queries had the server make sessions again (KV.PREFIX.WARM)."""
        return self._stage2.cold_rehydrates if self._stage2 is not None else 0

    def attend_query(
        self, namespace: str | bytes, layer: int, queries: Any, *, window: int | None = None
    ) -> tuple[F32, F32]:
        """Attention of `queries` [H_kv][M][D] over the prefix, and its log-sum-exp [H_kv][M].

        Query heads that share a kv head are more rows of it: [H_kv][rep*M][D].
        """
        stage2, name, asked = self._ready(), check_namespace(namespace), as_f32(queries)
        return stage2.ask(
            name,
            *_heads_and_dim(asked),
            lambda sid: stage2.wire.query(sid, layer, asked, window),
        )

    def attend_query_fused(
        self,
        namespace: str | bytes,
        layer: int,
        queries: Any,
        suffix_keys: Any,
        suffix_values: Any,
        *,
        head_map: bytes | None = None,
        window: int | None = None,
    ) -> F32:
        """Attention of `queries` [H_q][M][D] over the prefix and a causal suffix [H_kv][S][D].

        The queries are the last M tokens of the suffix. `head_map` names the kv head of each query
        head, by default h // (H_q / H_kv). Returns [H_q][M][D]. On the binary lane where it is.
        """
        stage2, name, asked = self._ready(), check_namespace(namespace), as_f32(queries)
        keys, values = as_f32(suffix_keys), as_f32(suffix_values)
        mapped = _map(head_map, asked, len(keys))
        return stage2.ask(
            name,
            *_heads_and_dim(keys),
            lambda sid: stage2.wire.query_fused(sid, layer, asked, keys, values, mapped, window),
        )

    def attend_query_sparse_auto(
        self,
        namespace: str | bytes,
        layer: int,
        queries: Any,
        *,
        kv_heads: int,
        block: int = 64,
        blocks: int = 8,
        head_map: bytes | None = None,
        window: int | None = None,
        selector: str = "block_mean",
    ) -> F32:
        """One query a head, `queries` [H_q][D], over the best `blocks` blocks of `block` tokens.

        `selector` is "block_mean" or "quest". Returns [H_q][D].
        """
        stage2, name, asked = self._ready(), check_namespace(namespace), as_f32(queries)
        mapped = _map(head_map, asked, kv_heads)
        return stage2.ask(
            name,
            kv_heads,
            asked.shape[-1],
            lambda sid: stage2.wire.query_sparse_auto(
                sid, layer, asked, (block, blocks), kv_heads, mapped, window, selector
            ),
        )

    def attend_query_sparse_auto_fused(
        self,
        namespace: str | bytes,
        layer: int,
        queries: Any,
        suffix_keys: Any,
        suffix_values: Any,
        *,
        block: int = 64,
        blocks: int = 8,
        head_map: bytes | None = None,
        window: int | None = None,
        selector: str = "block_mean",
    ) -> F32:
        """`attend_query_sparse_auto` over the best blocks and all of a suffix [H_kv][S][D]."""
        stage2, name, asked = self._ready(), check_namespace(namespace), as_f32(queries)
        keys, values = as_f32(suffix_keys), as_f32(suffix_values)
        mapped = _map(head_map, asked, len(keys))
        return stage2.ask(
            name,
            *_heads_and_dim(keys),
            lambda sid: stage2.wire.query_sparse_auto_fused(
                sid, layer, asked, keys, values, (block, blocks), mapped, window, selector
            ),
        )

    def open_remote(
        self, namespace: str | bytes, tokens: int, sparse: Mapping[str, Any] | None = None
    ) -> RemoteEntry | None:
        """The stored prefix of so many tokens as one whose attention the server computes, or None.

        What `make_pion_prompt_cache` asks for where a prefix is not held in this process.
        """
        if self._stage2 is None:
            return None
        name = check_namespace(namespace)
        entry = self._stage2.open(name, tokens, sparse)
        if entry is None and self._storing.busy:
            self._storing.flush()
            entry = self._stage2.open(name, tokens, sparse)
        return entry

    def _attend_session(self, namespace: str | bytes) -> str:
        """`<namespace>_attn`: the attention session of a namespace."""
        return session_of(check_namespace(namespace)).decode("utf-8", "surrogateescape")

    def _warm_namespace(self, namespace: str | bytes, heads: int, dim: int) -> int:
        """KV.PREFIX.WARM: how many layers the server made ready for queries."""
        stage2, name = self._ready(), check_namespace(namespace)
        return stage2.wire.warm(name, heads, dim, session_of(name), stage2.wire.patience)

    def _ready(self) -> Stage2:
        if self._stage2 is None:
            raise RuntimeError("attention queries need PionPromptCache(stage2=True)")
        return self._stage2


def _heads_and_dim(array: F32) -> tuple[int, int]:
    if array.ndim != 3:
        raise ValueError(f"an array of shape {array.shape} is not [H][M][D]")
    return array.shape[0], array.shape[2]


def _map(head_map: bytes | None, queries: F32, kv_heads: int) -> bytes:
    return even_map(len(queries), kv_heads) if head_map is None else bytes(head_map)
