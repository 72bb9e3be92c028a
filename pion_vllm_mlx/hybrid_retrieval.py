"""HybridRetrievalCache: a retrieved chunk that was ingested before is hydrated, not prefilled.

    hr = HybridRetrievalCache(model)
    hr.ingest("eiffel", tokenizer.encode("The Eiffel Tower is …"))
    cache, suffix = hr.prepare("eiffel", tokenizer.encode("How tall?\nAnswer:"))
    generate(model, tokenizer, prompt=suffix, prompt_cache=cache)

One chunk is exact: the cache is bit for bit that of a cold prefill of the same ids. Several chunks
are composed behind a shared stub, in any order, and are approximate from the second one on, since
a chunk has not seen the ones before it:

    hr.set_shared_stub(tokenizer.encode("Answer from these passages:"))
    hr.ingest_pack("eiffel", …); hr.ingest_pack("louvre", …)
    cache, suffix = hr.prepare_multi(["louvre", "eiffel"], question_ids, recompute_tokens=16)

Which chunks to retrieve is the application's business, with whatever embedding it likes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import RebuildError, dismantle, rebuild
from pion_patches.hybrid import classify
from pion_patches.rotation import require_rotation
from pion_vllm_mlx.arguments import check_ids, vocab_size_of
from pion_vllm_mlx.composition import compose, rows_behind
from pion_vllm_mlx.model_survey import netstrings
from pion_vllm_mlx.namespace import model_fingerprint
from pion_vllm_mlx.prefill import prefill, require_suffix
from pion_vllm_mlx.prompt_cache import PREFILL_STEP
from pion_vllm_mlx.shelf import ProcessShelf, ServerShelf, Shelf, Volume
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport.address import find_server
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.local import LocalLane
from pion_vllm_mlx.transport.tls import Tls, client_context

BUDGET_BYTES: Final = 4 << 30
MAX_PACKS: Final = 8
#: Chunks whose token ids this process remembers, so that a lost one can be computed again.
_REMEMBERED: Final = 10_000


class HybridRetrievalCache:
    """K/V of retrieved chunks by chunk id. Thread-safe. A context manager."""

    def __init__(
        self,
        model: Any,
        backend: Literal["inproc", "pion"] = "inproc",
        host: str | None = None,
        port: int | None = None,
        password: str | None = None,
        *,
        user: str | None = None,
        tls: Tls = None,
        vquant: str = "auto",
        adapter: str = "",
        budget_bytes: int = BUDGET_BYTES,
        prefill_step_size: int = PREFILL_STEP,
        timeout: float = 0.25,
        model_path: str | Path | None = None,
    ) -> None:
        """Nothing is computed or sent yet.

        Args:
            model: an mlx-lm model; `UnsupportedCache` if its caches cannot be stored exactly.
            backend: "inproc" keeps chunks in this process, up to `budget_bytes`; "pion" keeps them
                on a pion-server, for every process and host, across restarts.
            host, port, user, password, tls, timeout: the server, as for `PionPromptCache`.
            vquant: storage format on the server; "auto" keeps every bit.
            adapter: names an adapter whose weights are not part of `model`.
            prefill_step_size: tokens a chunk of a prefill.
            model_path: where the weights were loaded from; see `model_fingerprint`.

        Raises ValueError for arguments that mean nothing.
        """
        if type(prefill_step_size) is not int or prefill_step_size < 1:
            raise ValueError("prefill_step_size is a number of tokens, 1 or more")
        self.model = model
        self.backend = backend
        self.prefill_step_size = prefill_step_size
        self._adapter, self._vquant = adapter, vquant
        self._model_path = model_path
        self._vocab_size = vocab_size_of(model)
        self._tally = Tally()
        tier = Tier(vquant)
        self._shelf: Shelf
        match backend:
            case "inproc":
                self._shelf = ProcessShelf(budget_bytes)
            case "pion":
                server = find_server(host, port, user, password, tls)
                lane = Endpoint(
                    server.host,
                    server.port,
                    username=server.username,
                    password=server.password,
                    connect_timeout=timeout,
                    tls=client_context(server.tls),
                )
                local = LocalLane.beside(lane, timeout)
                self._shelf = ServerShelf(
                    lane, local, tier, self._tally, prefill_step_size, timeout
                )
            case _:
                raise ValueError(f"backend {backend!r} is not 'inproc' or 'pion'")
        self._stub: tuple[int, ...] | None = None
        self._ids: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._counts = dict.fromkeys(_FIGURES, 0)
        self._lock = threading.RLock()
        classify(self._template())

    def ingest(self, chunk_id: str, tokens: Iterable[Any]) -> None:
        """Compute and keep the K/V of a chunk, unless the same text is there already.

        Another text under a known id replaces it. A server that cannot be reached costs one
        warning: the chunk is then computed when it is asked for.

        Raises ValueError for no tokens, ids that are not this model's, and (backend "inproc") a
        chunk larger than the whole budget.
        """
        ids = self._check(chunk_id, tokens)
        with self._lock:
            name = self._name("chunk", chunk_id)
            self._remember(name, ids)
            if not self._shelf.holds(name, self._fingerprint(), ids):
                self._keep(name, chunk_id, self._compute(ids), strict=True)
            self._counts["ingested"] += 1

    def has(self, chunk_id: str) -> bool:
        """Whether the chunk is there for this model, without computing anything."""
        with self._lock:
            return self._shelf.holds(self._name("chunk", chunk_id), self._fingerprint(), None)

    def prepare(
        self, chunk_id: str, suffix_ids: Sequence[int], tokens: Iterable[Any] | None = None
    ) -> tuple[list[Any], list[int]]:
        """A cache that holds exactly the chunk, and what to run on top of it.

        `tokens`: what the chunk should consist of. With them nothing can go wrong: a chunk of
        other tokens, or none, is computed and kept.

        Raises KeyError for an unknown or evicted chunk whose tokens are not known, ValueError for
        an empty suffix.
        """
        suffix = require_suffix(suffix_ids)
        with self._lock:
            name = self._name("chunk", chunk_id)
            ids = None if tokens is None else self._check(chunk_id, tokens)
            volume = self._take(name, ids)
            cache = None if volume is None else self._rebuild(volume)
            if cache is None:
                known = ids if ids is not None else self._ids.get(name)
                if known is None:
                    raise KeyError(self._unknown("chunk", chunk_id))
                volume = self._compute(known)
                self._remember(name, known)
                self._keep(name, chunk_id, volume)
                cache = rebuild(self._template(), volume.image)
            return cache, suffix

    def set_shared_stub(self, tokens: Iterable[Any]) -> None:
        """The tokens every composition begins with; packs are computed behind them.

        Another stub makes other packs: those ingested before belong to the old one.
        """
        with self._lock:
            ids = self._check("the stub", tokens)
            self._stub = ids
            self._stub_volume()

    def ingest_pack(self, pack_id: str, tokens: Iterable[Any]) -> None:
        """Compute and keep a chunk behind the shared stub, for `prepare_multi`.

        Raises RuntimeError without a stub, CannotRotate (a ValueError) with the reason for a model
        whose chunks cannot be composed, ValueError as `ingest`.
        """
        ids = self._check(pack_id, tokens)
        with self._lock:
            require_rotation(self.model)
            name = self._pack_name(pack_id)
            self._remember(name, ids)
            if not self._shelf.holds(name, self._fingerprint(), ids):
                self._keep(name, pack_id, self._compute_pack(ids), strict=True)
            self._counts["packs_ingested"] += 1

    def prepare_multi(
        self,
        pack_ids: Sequence[str],
        suffix_ids: Sequence[int],
        *,
        max_packs: int = MAX_PACKS,
        recompute_tokens: int = 0,
    ) -> tuple[list[Any], list[int]]:
        """A cache that holds the stub and these packs in this order, and what to run on top.

        `recompute_tokens`: as many tokens of each pack but the first are computed again, with
        everything before them in view; a whole pack at least as long makes it exact.

        Raises RuntimeError without a stub, KeyError for an unknown pack, ValueError for no or more
        than `max_packs` packs and for an empty suffix, CannotRotate as `ingest_pack`.
        """
        suffix = require_suffix(suffix_ids)
        if isinstance(pack_ids, str) or not 1 <= len(pack_ids) <= max_packs:
            count = "text" if isinstance(pack_ids, str) else f"{len(pack_ids)} packs"
            raise ValueError(f"{count}: a list of 1 to {max_packs} pack ids is composed")
        if type(recompute_tokens) is not int or recompute_tokens < 0:
            raise ValueError("recompute_tokens is a number of tokens, 0 or more")
        with self._lock:
            turns = require_rotation(self.model)
            names = [self._pack_name(pack_id) for pack_id in pack_ids]
            stub = self._stub_volume()
            packs = [self._pack(*named) for named in zip(names, pack_ids, strict=True)]
            composed = compose(
                self.model, turns, stub.image, packs, recompute_tokens, self.prefill_step_size
            )
            self._counts["composed"] += 1
            self._counts["tokens_recomputed"] += composed.recomputed
            return composed.cache, suffix

    def evict(self, chunk_id: str) -> bool:
        """Forget a chunk, and the pack of that id behind the present stub, here and on the server.

        False if neither was there.
        """
        with self._lock:
            names = [self._name("chunk", chunk_id)]
            if self._stub is not None:
                names.append(self._pack_name(chunk_id))
            known = [self._ids.pop(name, None) is not None for name in names]
            removed = [self._shelf.remove(name) for name in names]
            gone = any(removed)
            self._counts["evicted"] += gone
            return gone or any(known)

    def stats(self) -> dict[str, Any]:
        """Figures since this object was made.

        ingested, packs_ingested, hits, misses, hit_rate (of chunks, packs and stubs asked for),
        composed, tokens_recomputed, evicted, tokens_restored, bytes_held (in this process),
        bytes_fetched and bytes_stored (on the server), hits_local (from a file on this machine),
        not_lent (by word: why others came over the network), stores_failed, prefill_ms_total.
        """
        with self._lock:
            tally = self._tally.snapshot()
            shown = {name: tally[name] for name in _FROM_TALLY}
            return {**self._counts, **shown, "bytes_held": self._shelf.nbytes}

    def close(self) -> None:
        """Let go of what is held in this process and of the connection. It stays usable."""
        with self._lock:
            self._shelf.close()

    def __enter__(self) -> HybridRetrievalCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, chunk_id: str, tokens: Iterable[Any]) -> tuple[int, ...]:
        ids = check_ids(tokens, self._vocab_size)
        if not ids:
            raise ValueError(f"{chunk_id!r} has no tokens")
        return ids

    def _take(self, name: bytes, ids: tuple[int, ...] | None) -> Volume | None:
        volume = self._shelf.take(name, self._fingerprint(), ids)
        if volume is None:
            self._tally.add_miss("absent")
            return None
        self._tally.add("hits")
        self._tally.add("tokens_restored", len(volume.ids))
        return volume

    def _rebuild(self, volume: Volume) -> list[Any] | None:
        """The caller's own cache; None for stored rows that are not this model's after all."""
        try:
            return rebuild(self._template(), volume.image)
        except RebuildError:
            self._tally.add_miss("rebuild")
            return None

    def _pack(self, name: bytes, pack_id: str) -> Volume:
        volume = self._take(name, None)
        if volume is not None:
            return volume
        known = self._ids.get(name)
        if known is None:
            raise KeyError(self._unknown("pack", pack_id))
        volume = self._compute_pack(known)
        self._keep(name, pack_id, volume)
        return volume

    def _stub_volume(self) -> Volume:
        ids = self._require_stub()
        name = self._name("stub", *map(str, ids))
        volume = self._take(name, ids)
        if volume is None:
            volume = self._compute(ids)
            self._keep(name, "the stub", volume)
        return volume

    def _require_stub(self) -> tuple[int, ...]:
        if self._stub is None:
            raise RuntimeError("packs are composed behind a stub: call set_shared_stub first")
        return self._stub

    def _compute(self, ids: tuple[int, ...]) -> Volume:
        cache = self._template()
        seconds = self._prefill(ids, cache)
        return Volume(ids, dismantle(cache, len(ids)), seconds)

    def _compute_pack(self, ids: tuple[int, ...]) -> Volume:
        stub = self._stub_volume()
        cache = rebuild(self._template(), stub.image, room=len(ids))
        seconds = self._prefill(ids, cache)
        image = rows_behind(self.model, cache, len(stub.ids), len(ids))
        return Volume(ids, image, seconds)

    def _prefill(self, ids: tuple[int, ...], cache: list[Any]) -> float:
        seconds = prefill(self.model, ids, cache, self.prefill_step_size)
        self._tally.add_seconds("prefill_ms_total", seconds)
        return seconds

    def _keep(self, name: bytes, chunk_id: str, volume: Volume, *, strict: bool = False) -> None:
        kept = self._shelf.put(name, self._fingerprint(), volume)
        if strict and not kept and isinstance(self._shelf, ProcessShelf):
            raise ValueError(
                f"{chunk_id!r} takes {volume.image.nbytes} bytes, budget_bytes is "
                f"{self._shelf.budget}"
            )

    def _remember(self, name: bytes, ids: tuple[int, ...]) -> None:
        self._ids[name] = ids
        self._ids.move_to_end(name)
        while len(self._ids) > _REMEMBERED:
            self._ids.popitem(last=False)

    def _unknown(self, what: str, chunk_id: str) -> str:
        return f"{what} {chunk_id!r} is not there: never ingested for this model, or evicted"

    def _pack_name(self, pack_id: str) -> bytes:
        return self._name("pack", pack_id, *map(str, self._require_stub()))

    def _name(self, *fields: str) -> bytes:
        """A namespace: tagged and length-prefixed, so that no two meanings share one."""
        meaning = ("pion-retrieval", "1", self._adapter, self._vquant, self._fingerprint())
        return b"hr1-" + hashlib.sha256(netstrings((*meaning, *fields))).hexdigest()[:40].encode()

    def _fingerprint(self) -> str:
        return model_fingerprint(self.model, self._model_path)

    def _template(self) -> list[Any]:
        make: Any = make_prompt_cache
        template: list[Any] = make(self.model)
        return template


_FIGURES: Final = ("ingested", "packs_ingested", "composed", "tokens_recomputed", "evicted")
_FROM_TALLY: Final = (
    "hits",
    "misses",
    "hit_rate",
    "hits_local",
    "not_lent",
    "tokens_restored",
    "bytes_fetched",
    "bytes_stored",
    "stores_failed",
    "prefill_ms_total",
)
