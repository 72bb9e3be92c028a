"""PionPromptCache: a prefix is computed once, by anyone, and restored everywhere else.

    pc = PionPromptCache(model)
    cache = pc.get_or_prefill(prefix_ids, PionPromptCache.make_namespace(model_id, prompt))
    generate(model, tokenizer, prompt=suffix_ids, prompt_cache=cache)

The cache is the one a cold run would have: bit for bit wherever the stored format is lossless.
Every doubt is a miss, a miss prefills and stores again, and no trouble with the server ever
reaches the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import mlx.core as mx

from pion_patches.attention import is_installed
from pion_patches.cache_rebuild import (
    evaluate,
)
from pion_patches.hybrid import classify, is_hybrid
from pion_vllm_mlx.arguments import check_ids, check_namespace, vocab_size_of
from pion_vllm_mlx.attend_queries import AttendQueries
from pion_vllm_mlx.calls import CallThread, Ticket
from pion_vllm_mlx.held import HeldPrefixes
from pion_vllm_mlx.kv_bits import KvBits
from pion_vllm_mlx.lineage import Lineage
from pion_vllm_mlx.model_survey import Glance
from pion_vllm_mlx.named_prefixes import NamedPrefixes
from pion_vllm_mlx.namespace import make_namespace, model_fingerprint
from pion_vllm_mlx.prefill import Progress
from pion_vllm_mlx.prefix_reuse import PrefixReuse
from pion_vllm_mlx.process_lock import ProcessLock
from pion_vllm_mlx.rates import Rates
from pion_vllm_mlx.restore import Miss, has_manifest
from pion_vllm_mlx.split_prefixes import SplitPrefixes
from pion_vllm_mlx.stage2 import Stage2
from pion_vllm_mlx.storing import Mode, Storing
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Lane, Patience, TransportError
from pion_vllm_mlx.transport.address import find_server
from pion_vllm_mlx.transport.binary import BinaryLane
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.local import LocalLane
from pion_vllm_mlx.transport.tls import Tls, client_context

PREFILL_STEP: Final = 512
HELD_BYTES: Final = 1 << 30
STORE_WAIT: Final = 10.0


class PionPromptCache(AttendQueries):
    """The shared prefixes of one model: kept in this process, and on one server.

    Thread-safe: restores of several threads take turns on one connection, prefills on the model.
    A context manager.
    """

    make_namespace = staticmethod(make_namespace)

    def __init__(
        self,
        model: Any,
        vquant: str = "auto",
        host: str | None = None,
        port: int | None = None,
        password: str | None = None,
        boundary_protect: int = 0,
        *,
        user: str | None = None,
        tls: Tls = None,
        protect_dtype: str = "float16",
        softmax_bitexact: bool = False,
        prefill_step_size: int = PREFILL_STEP,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 0,
        timeout: float = 0.25,
        model_path: str | Path | None = None,
        held_bytes: int = HELD_BYTES,
        store: Mode = "background",
        store_wait: float = STORE_WAIT,
        lane: Lane | None = None,
        stage2: bool = False,
        binary_port: int | None = None,
    ) -> None:
        """Nothing is sent yet, and no server need be there.

        Args:
            model: an mlx-lm model. `UnsupportedCache` if its caches cannot be stored exactly.
            vquant: "auto" keeps every bit of the model's own K/V; a named format ("fp16", "int8",
                "fp8", "turbo4", "mlx4g32", …) stores that one. A hit takes any lossless format.
            boundary_protect: with a named format, K and the first and last N layers of V are kept
                in `protect_dtype` ("float16", or "auto" for the model's own).
            softmax_bitexact: in a model that mixes recurrent and softmax attention layers, keep
                every bit of the latter's K/V whatever `vquant` says (recurrent state always is).
            host, port: the server, 127.0.0.1:1974 unless the environment's `PION_URL` names another
                (`pion://user:password@host:port`, with TLS `pions://`).
            password, user: for a server with `--requirepass`; a tenant has both.
            tls: True to connect with TLS, or a file of the certificates to trust, or a context.
            prefill_step_size: tokens a chunk of a cold prefill.
            kv_bits, kv_group_size, quantized_kv_start: as for mlx-lm's `generate_step`, to which
                the same have to be given. Quantised caches are stored as their codes.
            timeout: seconds to connect, and to wait for the first byte of an answer.
            model_path: where the weights were loaded from, so that their hash can be kept between
                processes; see `model_fingerprint`.
            held_bytes: how much this process keeps for itself; 0 keeps nothing.
            store: what becomes of a computed prefix. "background": it is stored after the call has
                returned, by a thread; `flush` waits for it. "sync": before the call returns. "off":
                not at all.
            store_wait: seconds that `close` and the end of the interpreter wait for stores.
            lane: another way to the server than TCP.
            stage2: have the server compute attention for processes that do not hold a prefix; see
                `stage2` and `AttendQueries`.
            binary_port: the binary lane's port, by default the one after `port`; 0 for RESP only.

        Raises ValueError for arguments that mean nothing.
        """
        if type(prefill_step_size) is not int or prefill_step_size < 1:
            raise ValueError("prefill_step_size is a number of tokens, 1 or more")
        if not timeout > 0:
            raise ValueError("timeout is a number of seconds above 0")
        self.model = model
        server = find_server(host, port, user, password, tls)
        self.host, self.port = server.host, server.port
        self.vquant, self.boundary_protect = vquant, boundary_protect
        self.softmax_bitexact = softmax_bitexact
        self.prefill_step_size = prefill_step_size
        self.timeout = timeout
        self._kv_bits = KvBits(kv_bits, kv_group_size, quantized_kv_start)
        self._tier = Tier(vquant, boundary_protect, protect_dtype)
        self._vocab_size = vocab_size_of(model)
        self._model_path = model_path
        context = client_context(server.tls)
        self._lane = lane or Endpoint(
            server.host,
            server.port,
            username=server.username,
            password=server.password,
            connect_timeout=timeout,
            tls=context,
        )
        self._local = LocalLane(
            self._lane,
            username=server.username,
            password=server.password,
            connect_timeout=timeout,
        )
        self._tally = Tally()
        self._prefilling = ProcessLock(reentrant=True)
        self._calls = CallThread()
        self._rates = Rates()
        self._split = SplitPrefixes(model, self._tally)
        #: By namespace, for `make_pion_prompt_cache`.
        self._mlx_prefix_kv = self._split.store
        slots = classify(self._template(quantized_kv_start))
        if softmax_bitexact and is_hybrid(slots):
            self._tier = Tier()
        self._storing = Storing(
            store, self._lane, self._tier, self._tally, prefill_step_size, store_wait
        )
        #: What serves calls without a namespace; made by the first of them.
        self._reuse: PrefixReuse | None = None
        self._held_bytes = held_bytes
        self._stage2 = None
        if stage2:
            binary = None
            if binary_port != 0:
                binary = BinaryLane(
                    server.host,
                    server.port + 1 if binary_port is None else binary_port,
                    username=server.username,
                    password=server.password,
                    connect_timeout=timeout,
                    tls=context,
                    homes=self._lane.homes if isinstance(self._lane, Endpoint) else None,
                )
            self._stage2 = self._make_stage2(binary)
        self._named = NamedPrefixes(
            model,
            self._lane,
            self._local,
            self._tier,
            self._tally,
            self._storing,
            self._stage2,
            held=HeldPrefixes(held_bytes),
            kv_bits=self._kv_bits,
            prefill_step=prefill_step_size,
            timeout=timeout,
            rates=self._rates,
            computing=self._prefilling,
        )
        self.fingerprint()

    def get_or_prefill(
        self,
        prefix_ids: Iterable[Any],
        namespace: str | bytes | None = None,
        progress: Progress | None = None,
    ) -> list[Any]:
        """Return a prompt cache that holds exactly `prefix_ids`, restored or computed.

        It is the caller's own: generate with it, change it, call again for another. Pass the
        model only the tokens after the prefix, at least one of them (`require_suffix`).

        Without a namespace the longest beginning of `prefix_ids` that was ever computed is
        restored, whatever prompt it belonged to, the rest is computed, and what is new is stored.

        `progress(done, total)` is called during a prefill, with tokens; not on a hit.

        Raises ValueError for ids that are no token ids of this model and for a namespace that is
        not 1 to 200 bytes, UnsupportedCache for a model whose caches cannot be stored. An empty
        prefix is an empty cache.
        """
        ids = check_ids(prefix_ids, self._vocab_size)
        name = None if namespace is None else check_namespace(namespace)
        template = self._template(len(ids))
        classify(template)
        if not ids:
            self._tally.add_miss("empty")
            return template
        if name is None:
            return self._prefixes().get(ids, progress)
        fingerprint = self.fingerprint()
        cache = self._named.get(name, ids, fingerprint, progress)
        if is_installed():
            self._split.hold(name, ids, fingerprint, cache)
        return cache

    async def aget_or_prefill(
        self,
        prefix_ids: Iterable[Any],
        namespace: str | bytes | None = None,
        progress: Progress | None = None,
    ) -> list[Any]:
        """As `get_or_prefill`, from an event loop and without blocking it.

        Calls of one object are made one after another, in a thread of its own; `progress` is called
        in the loop. The cache is evaluated, so the loop's thread may go on with it. A cancelled
        call ends with the chunk that is being computed.
        """
        ids = check_ids(prefix_ids, self._vocab_size)
        # An array that is not evaluated belongs to this thread.
        mx.eval(Glance(self.model).arrays())
        loop = asyncio.get_running_loop()

        def call(ticket: Ticket) -> list[Any]:
            def report(done: int, total: int) -> None:
                ticket.check()
                if progress is not None:
                    loop.call_soon_threadsafe(progress, done, total)

            cache = self.get_or_prefill(ids, namespace, report)
            evaluate(cache)
            return cache

        return await self._calls.run(call)

    def restore(self, namespace: str | bytes, tokens: int) -> list[Any] | None:
        """Return a cache of the `tokens` tokens stored under this name, or None; never prefill.

        Nothing but this model's fingerprint and the number of tokens is compared: that the
        namespace stands for the prefix meant is the caller's word. `get_or_prefill` compares ids.
        """
        return self._named.restore(check_namespace(namespace), tokens, self.fingerprint())

    def lookup(self, namespace: str | bytes) -> bool:
        """Whether the server holds a whole prefix under this name; False if it cannot be asked.

        With ``stage2`` also whether all of it is ready for attention queries.
        """
        name = check_namespace(namespace)
        if self._stage2 is not None:
            return self._stage2.is_ready(name)
        try:
            return has_manifest(self._lane, name, self._quick())
        except (TransportError, Miss):
            return False

    def fingerprint(self) -> str:
        """The model's fingerprint as it is now; see `model_fingerprint`."""
        return model_fingerprint(self.model, self._model_path)

    def stats(self) -> dict[str, Any]:
        """Figures since this object was made.

        hits, misses, hit_rate, miss_reasons (by word), hits_in_process, hits_local (from a file on
        this machine), not_lent (by word: why others came over the network), tokens_restored,
        bytes_fetched, bytes_stored, stores, stores_skipped (it was there already, somebody else
        is storing it, a newer one took its place, too many wait), stores_failed, given_up
        (restores that became slower than a prefill); milliseconds in
        fetch_ms_total (a restore, from the first command to rebuilt caches), store_ms_total (of
        this thread and the storing one), prefill_ms_total.

        With ``stage2``: wire_prefixes (opened to be attended to in the server), wire_losses (given
        up since), attend_binary and attend_resp (answers of each lane), attend_ms_total (waited
        for them).
        """
        return self._tally.snapshot()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: `store_wait`) for the prefixes still being stored.

        True if every store so far has ended and none has failed since the last `flush`.
        """
        return self._storing.flush(timeout)

    def close(self) -> None:
        """Let go of the connections and of what is held in process. The object stays usable.

        Calls going on in other threads end soon, with a cold answer; stores have `store_wait`
        seconds.
        """
        self._lane.close()
        self._local.close()
        self._storing.close()
        if self._reuse is not None:
            self._reuse.clear()
        self._named.clear()
        self._split.clear()
        if self._stage2 is not None:
            self._stage2.clear()

    def __enter__(self) -> PionPromptCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _prefixes(self) -> PrefixReuse:
        with self._prefilling:
            if self._reuse is None:
                index = Lineage(
                    self.model,
                    self._lane,
                    self._storing.lane,
                    local=self._local,
                    tier=self._tier,
                    kv_bits=self._kv_bits,
                    timeout=self.timeout,
                    model_path=self._model_path,
                    prefill_step=self.prefill_step_size,
                    rates=self._rates,
                    tally=self._tally,
                )
                self._reuse = PrefixReuse(
                    self.model,
                    index,
                    self._tally,
                    storing=self._storing,
                    kv_bits=self._kv_bits,
                    prefill_step=self.prefill_step_size,
                    held_bytes=self._held_bytes,
                    computing=self._prefilling,
                )
            return self._reuse

    def _make_stage2(self, binary: BinaryLane | None) -> Stage2:
        return Stage2(
            self.model,
            self._lane,
            binary,
            self._tally,
            self._tier,
            self._quick(),
            fingerprint=self.fingerprint,
            template=self._template,
            restore=self.get_or_prefill,
        )

    def _template(self, tokens: int) -> list[Any]:
        return self._kv_bits.template(self.model, tokens)

    def _quick(self) -> Patience:
        return Patience(first_byte=self.timeout, stall=2.0, total=10.0)
