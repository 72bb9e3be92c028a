"""The attention engine as commands see it: who holds what, on the loop; who computes, off it.

Exists in every server and costs nothing until the first ATTEND command: only then is the engine's
thread started and MLX imported. All methods are called on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from pion_server.attend.decode import DecodeSessions
from pion_server.attend.loading import (
    WarmLayer,
    fill,
    generation_of,
    plan_layers,
    read_rows,
    verify_layers,
)
from pion_server.attend.requests import DecodeStep, OneShot, Query, Store, check_dim
from pion_server.attend.sessions import ATTEND_SUFFIX, Key, Shape, Slot, Slots, namespace_of
from pion_server.attend.thread import EngineThread
from pion_server.config import Config
from pion_server.errors import BadArgument, ColdMiss, CommandError, EngineOff, Stale
from pion_server.store.vstore import VStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pion_server.attend.engine import Engine

T = TypeVar("T")
Tensor: TypeAlias = "NDArray[Any]"


class Attention:
    """`writer_lock` is taken where room is made: evictions write to the V-store's log."""

    def __init__(
        self, config: Config, vstore: VStore, writer_lock: AbstractAsyncContextManager[None]
    ) -> None:
        self.slots = Slots(config.sdpa_slots)
        self.decodes = DecodeSessions(config.decode_sessions, config.decode_idle)
        self._config = config
        self._vstore = vstore
        self._lock = writer_lock
        self._thread = EngineThread()
        self._engine: Engine | None = None  # the engine thread's own
        self._off: str | None = None if config.attention else "--no-attention"
        vstore.budget.add_source(lambda: self.slots.nbytes, self.slots.victims)
        vstore.budget.add_source(lambda: self.decodes.nbytes, self.decodes.victims)
        vstore.on_drop.append(self.drop_namespace)

    def require(self) -> None:
        """Raises EngineOff where attention is turned off or MLX is not installed."""
        if self._off is None and self._engine is None and not importlib.util.find_spec("mlx"):
            self._off = "MLX is not installed"
        if self._off is not None:
            raise EngineOff(f"attention engine not available ({self._off})")

    # --- holding -----------------------------------------------------------------------------

    async def store(self, request: Store) -> None:
        """ATTEND.PREFIX.STORE: make a warm slot of a request.

        Raises OutOfMemory, and Stale where the prefix is not of the generation it names.
        """
        self.require()

        def copy(keys: Tensor, values: Tensor) -> None:
            fill(keys, request.keys)
            fill(values, request.values)

        slot = await self._load(request.key, request.shape, request.generation, copy)
        async with self._room(request.key[0], slot.nbytes - self.slots.held_bytes(request.key)):
            ns, named = namespace_of(request.key[0]), request.generation
            if named and generation_of(self._vstore, ns) != named:
                raise Stale(f"generation {named} is not what this namespace holds")
            self.slots.put(slot)

    async def warm(self, ns: bytes, heads: int, dim: int, sid: bytes) -> tuple[int, int]:
        """KV.PREFIX.WARM: slots (sid, layer) from the rows of `ns`; layers made and skipped.

        Raises NotFound, BadArgument, DamagedEntry or OutOfMemory before any slot changes.
        """
        self.require()
        check_dim("KV.PREFIX.WARM", dim)
        planned, skipped = plan_layers(
            self._vstore, ns, heads, dim, lambda layer: self.slots.cold_shape((sid, layer))
        )
        await self._rehydrate(sid, ns, planned)
        return len(planned), skipped

    def drop(self, sid: bytes, layer: int | None = None) -> int:
        """Forget a layer of `sid` or all of them, and what continued it; how many there were."""
        self.decodes.drop(sid, layer)
        return self.slots.drop(sid, layer)

    def drop_namespace(self, ns: bytes) -> None:
        """Forget what belongs to a dropped prefix."""
        self.drop(ns)
        self.drop(ns + ATTEND_SUFFIX)

    # --- answering ---------------------------------------------------------------------------

    async def answer(self, request: Query) -> memoryview:
        """The reply's bytes. Raises NotFound, ColdMiss, or BadArgument for an unfit request."""
        self.require()
        request.check(self.slots.shape(request.key))
        slot = await self._use(request.key, request.generation)
        return await self._submit(lambda engine: engine.answer(slot, request))

    async def step(self, step: DecodeStep) -> memoryview:
        """ATTEND.DECODE.STEP: append to a suffix, then attend to it and its prefix.

        Raises Replay, NotFound, ColdMiss, OutOfMemory or BadArgument, and has then appended
        nothing.
        """
        self.require()
        prefix = self.slots.shape(step.key)
        step.check(prefix)
        slot = await self._use(step.key, step.generation) if step.queries.size else None
        source = slot.source if slot is not None else None
        with self.decodes.stepping(step) as session:
            growth = self.decodes.growth(session, step, prefix, source)
            async with self._room(step.key[0], growth):
                suffix = self.decodes.open(session, step, prefix, source)
            return await self._submit(lambda engine: engine.step(slot, suffix, step))

    async def answer_once(self, request: OneShot) -> memoryview:
        """ATTEND.QUERYBATCH: the reply's bytes."""
        self.require()
        return await self._submit(lambda engine: engine.answer_once(request))

    # --- the way there -----------------------------------------------------------------------

    async def _use(self, key: Key, generation: int) -> Slot:
        """The warm slot, of that fill; with `--sdpa-auto-warm` a cold one is brought back."""
        try:
            return self.slots.use(key, generation)
        except ColdMiss:
            if not self._config.sdpa_auto_warm:
                raise
            await self._warm_again(key)
            return self.slots.use(key, generation)

    async def _warm_again(self, key: Key) -> None:
        """`--sdpa-auto-warm`: bring one cold layer back from the V-store, if it is still the same.

        Its client counts on as many tokens as it stored: more rows or fewer are no match.
        """
        sid, layer = key
        cold = self.slots.shape(key)
        for ns in dict.fromkeys((namespace_of(sid), sid)):
            try:
                planned, _ = plan_layers(self._vstore, ns, cold.heads, cold.dim)
                chosen = [one for one in planned if one.layer == layer and one.shape == cold]
                await self._rehydrate(sid, ns, chosen)
            except CommandError:
                continue
            if chosen:
                return

    async def _rehydrate(self, sid: bytes, ns: bytes, layers: list[WarmLayer]) -> None:
        """Fill slots from rows of `ns`, one layer at a time; room for all of them is made before.

        Raises BadArgument once the rows are, or will be, of another fill than they were.
        """
        await asyncio.to_thread(verify_layers, layers)
        width = 2 if self._config.attention_fp16 else 4
        wanted = sum(2 * width * math.prod(one.shape) for one in layers)
        held = sum(self.slots.held_bytes((sid, one.layer)) for one in layers)
        async with self._room(sid, wanted - held):
            pass
        for one in layers:

            def copy(keys: Tensor, values: Tensor, one: WarmLayer = one) -> None:
                read_rows(one.keys, keys)
                read_rows(one.values, values)

            slot = await self._load((sid, one.layer), one.shape, one.generation, copy)
            filling = self._vstore.manifests.fill(ns) is not None
            if filling or generation_of(self._vstore, ns) != one.generation:
                raise BadArgument("KV.PREFIX.WARM: the namespace was replaced meanwhile")
            self.slots.put(slot)

    async def _load(
        self, key: Key, shape: Shape, generation: int, copy: Callable[[Tensor, Tensor], None]
    ) -> Slot:
        """A slot filled by `copy`, in a thread of its own: queries need not wait for that."""
        slot, keys, values = await self._submit(
            lambda engine: engine.allocate(key, shape, generation)
        )
        await asyncio.to_thread(copy, keys, values)
        return slot

    @asynccontextmanager
    async def _room(self, sid: bytes, nbytes: int) -> AsyncIterator[None]:
        """Make room under `--maxmemory`, not at the cost of the namespace itself."""
        budget = self._vstore.budget
        if budget.limit is None:
            yield
            return
        async with self._lock:
            budget.reserve(nbytes, namespace_of(sid))
            yield

    def _submit(self, work: Callable[[Engine], T]) -> asyncio.Future[T]:
        return self._thread.submit(lambda: work(self._start()))

    def _start(self) -> Engine:
        if self._engine is None:
            config = self._config
            # On GPUs that have TF32, MLX would multiply float32 matrices in its 19 bits.
            os.environ.setdefault("MLX_ENABLE_TF32", "0")
            try:
                from pion_server.attend.engine import Engine

                self._engine = Engine(
                    half=config.attention_fp16, window=config.fa_window, grow=self.slots.grow
                )
            except (ImportError, RuntimeError) as error:
                raise EngineOff(f"attention engine not available ({error})") from error
        return self._engine
