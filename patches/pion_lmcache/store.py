"""PionStore: a prefix's keys and values, layer by layer, from any engine that has arrays."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.transport import Argument, Command, Patience, Place, Reply, ServerError
from pion_vllm_mlx.transport.address import find_server
from pion_vllm_mlx.transport.endpoint import Endpoint
from pion_vllm_mlx.transport.tls import Tls, client_context

F32 = NDArray[np.float32]
Side = Literal["K", "V"]

_SIDES: Final = {"K": "_pk", "V": "_pv"}
# One request holds at most so many bytes of rows: a server takes no bulk above 512 MB.
_REQUEST_BYTES: Final = 64 << 20


class PionStore:
    """A connection to a server's prefixes; a context manager. Methods may be called from threads.

        with PionStore(port=1974, vquant="fp16") as store:
            store.register("my_app|prompt_a", kv_dim=128)
            store.store_layer("my_app|prompt_a", "V", layer=0, token_offset=0, tensor_fp32=v)

    Without `host` and `port` it is the server of `PION_URL`, else 127.0.0.1:1974; `tls` is True to
    connect with TLS, or a file of the certificates to trust. `vquant` names the format rows are
    stored in. With `auto_redirect` a call about a prefix that lives on another worker is repeated
    there. Methods raise `TransportError` when there is no answer within
    `timeout` seconds, `ServerError` when the server refuses.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        vquant: str = "fp16",
        auto_redirect: bool = True,
        *,
        user: str | None = None,
        password: str | None = None,
        tls: Tls = None,
        timeout: float = 60.0,
        connect_timeout: float = 2.0,
    ) -> None:
        self.vquant = vquant
        where = find_server(host, port, user, password, tls)
        # Who calls is told of every failure: no call is spared by one before.
        self._lane = Endpoint(
            where.host,
            where.port,
            username=where.username,
            password=where.password,
            connect_timeout=connect_timeout,
            tls=client_context(where.tls),
            pause=0.0,
            follow=auto_redirect,
        )
        self._patience = Patience(first_byte=timeout, stall=timeout, total=10 * timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        self._lane.close()

    def register(
        self,
        namespace: str,
        kv_dim: int,
        *,
        vquant: str | None = None,
        prefill_ms: int | None = None,
    ) -> None:
        """Make both sides of a prefix, of rows of `kv_dim` values (all heads of one token).

        Rows stored before under another width or format are dropped. `prefill_ms` is what a hit
        is credited with.
        """
        words: list[Argument] = [namespace, kv_dim, vquant or self.vquant]
        if prefill_ms is not None:
            words += ["PREFILL_MS", prefill_ms]
        self._ask("KV.PREFIX.REGISTER", *words)

    def store_layer(
        self, namespace: str, side: Side, layer: int, token_offset: int, tensor_fp32: Any
    ) -> None:
        """Store rows `[token_offset, token_offset + tokens)` of one layer and side.

        `tensor_fp32` is anything numpy understands, of shape [tokens, kv_dim] or [tokens, H, D].
        """
        rows = np.ascontiguousarray(tensor_fp32, dtype=np.float32)
        if rows.ndim < 2 or not len(rows):
            raise ValueError(f"rows of shape [tokens, kv_dim] expected, not {rows.shape}")
        rows = rows.reshape(len(rows), -1)
        step = max(1, _REQUEST_BYTES // max(1, rows[0].nbytes))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            self._ask(
                "V.STOREBATCH",
                _sid(namespace, side),
                layer,
                token_offset + start,
                len(part),
                part.data.cast("B"),
            )

    def fetch_layer(
        self, namespace: str, side: Side, layer: int, start: int, end: int
    ) -> F32 | None:
        """Rows `[start, end)` as float32 [end - start, kv_dim]; None if any was never stored."""
        made: list[F32] = []

        def place(index: int, nbytes: int) -> memoryview:
            made.append(np.empty(nbytes // 4, np.float32))
            return made[0].data.cast("B")

        sid = _sid(namespace, side)
        reply = self._ask("V.FETCH", sid, layer, "RANGE", start, end, place=place)
        return None if reply is None else made[0].reshape(end - start, -1)

    def lookup(self, namespace: str, *, tokens: int | None = None) -> bool:
        """Whether the prefix is held; a hit is credited with `tokens`."""
        words: tuple[Argument, ...] = () if tokens is None else ("TOKENS", tokens)
        return self._ask("KV.PREFIX.LOOKUP", namespace, *words) == "HIT"

    def owner(self, namespace: str) -> int | None:
        """The worker it lives on, None if none has it."""
        # Behind the number may stand the digest of a mixed schema.
        worker = int(str(self._ask("KV.PREFIX.OWNER", namespace)).split()[0])
        return None if worker < 0 else worker

    def drop(self, namespace: str) -> bool:
        """Forget the prefix; whether there was one."""
        return self._ask("KV.PREFIX.DROP", namespace) == 1

    def info(self) -> dict[str, int]:
        """The figures of KV.PREFIX.INFO, of the worker that answered."""
        reply = self._ask("KV.PREFIX.INFO")
        assert isinstance(reply, (bytes, bytearray, memoryview))
        lines = bytes(reply).decode().split("\r\n")
        return {name: int(value) for name, _, value in (s.partition(":") for s in lines) if value}

    def commit(self) -> None:
        """Have everything acknowledged so far survive a power loss too, whichever worker has it."""
        commands = [Command.of("KV.PREFIX.COMMIT")]
        for worker in self._lane.workers(self._patience):
            (reply,) = self._lane.exchange_at(worker, commands, self._patience)
            if isinstance(reply, ServerError):
                raise reply

    def _ask(self, *words: Argument, place: Place | None = None) -> Reply:
        (reply,) = self._lane.exchange([Command(words, place)], self._patience)
        if isinstance(reply, ServerError):
            raise reply
        return reply


def _sid(namespace: str, side: Side) -> str:
    if side not in _SIDES:
        raise ValueError(f"a side is 'K' or 'V', not {side!r}")
    return namespace + _SIDES[side]
