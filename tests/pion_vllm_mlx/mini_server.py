"""The least server a prompt cache needs, in memory, for tests that interfere with each command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from tests.pion_vllm_mlx.fake_peer import Answer, FakePeer, Words, array, bulk

OK = b"+OK\r\n"
#: Sees each command and its answer, and returns what is sent instead.
Meddler = Callable[[Words, Answer], Answer]


def dying(survived: int, answered: bool) -> Meddler:
    """Dies at the command after `survived` others, before answering it or right after."""
    seen = 0

    def die(words: Words, answer: Answer) -> Answer:
        nonlocal seen
        seen += 1
        if seen <= survived:
            return answer
        assert isinstance(answer, bytes)
        return [answer, None] if answered and seen == survived + 1 else None

    return die


class MiniServer(FakePeer):
    """Manifests, rows and blobs by name. `meddle` may change any answer."""

    def __init__(self, meddle: Meddler | None = None, port: int = 0) -> None:
        self.meddle = meddle
        self.manifests: dict[bytes, tuple[int, bytes]] = {}
        #: Generation and connection (its thread) of each open fill.
        self.fills: dict[bytes, tuple[int, int]] = {}
        self.rows: dict[tuple[bytes, bytes], bytearray] = {}
        self.widths: dict[tuple[bytes, bytes], int] = {}
        self.blobs: dict[tuple[bytes, bytes], bytes] = {}
        self._gen = 0
        self._guard = threading.Lock()
        super().__init__(self._answer_and_meddle, port)

    def restart(self, meddle: Meddler | None = None) -> MiniServer:
        """A new server on the same port that holds what this one had acknowledged."""
        self.stop()
        again = MiniServer(meddle, self.port)
        again.manifests, again.rows, again.widths = self.manifests, self.rows, self.widths
        again.blobs, again._gen = self.blobs, self._gen
        return again

    def gone(self, sock: socket.socket) -> None:
        """A disconnect ends the connection's fills."""
        with self._guard:
            mine = [ns for ns, fill in self.fills.items() if fill[1] == threading.get_ident()]
            for ns in mine:
                del self.fills[ns]

    def _answer_and_meddle(self, words: Words) -> Answer:
        with self._guard:
            answer = self._answer(words)
        return answer if self.meddle is None else self.meddle(words, answer)

    def _answer(self, words: Words) -> Answer:
        match words:
            case [b"KV.PREFIX.META", ns, b"BEGIN"]:
                if ns in self.fills and self.fills[ns][1] != threading.get_ident():
                    return b":0\r\n"
                self._gen += 1
                self.fills[ns] = (self._gen, threading.get_ident())
                self.manifests.pop(ns, None)
                return b":%d\r\n" % self._gen
            case [b"KV.PREFIX.META", ns, b"SET", gen, blob]:
                if self.fills.get(ns, (0, 0))[0] != int(gen):
                    return b"-STALE fill\r\n"
                del self.fills[ns]
                self.manifests[ns] = (int(gen), blob)
                return OK
            case [b"KV.PREFIX.META", ns, b"ABORT", _]:
                self.fills.pop(ns, None)
                return OK
            case [b"KV.PREFIX.META", ns, b"GET"]:
                gen_blob = self.manifests.get(ns)
                return (
                    bulk(None)
                    if gen_blob is None
                    else array(b":%d\r\n" % gen_blob[0], bulk(gen_blob[1]))
                )
            case [b"KV.PREFIX.LOOKUP", ns, *_]:
                return b"+HIT\r\n" if ns in self.manifests else b"+MISS\r\n"
            case [b"KV.PREFIX.REGISTER" | b"KV.PREFIX.REGISTER.SCHEMA", ns, *_]:
                # Always as if the formats had changed, so that a client has to send every row.
                for key in [key for key in self.rows if key[0] in (ns + b"_pk", ns + b"_pv")]:
                    del self.rows[key]
                return OK
            case [b"V.STOREBATCH", sid, layer, start, count, blob, b"FMT", b"PACKED", b"GEN", gen]:
                if self.fills.get(sid[:-3], (0, 0))[0] != int(gen):
                    return b"-STALE fill\r\n"
                width = len(blob) // int(count)
                rows = self.rows.setdefault((sid, layer), bytearray())
                rows[int(start) * width : (int(start) + int(count)) * width] = blob
                self.widths[sid, layer] = width
                return OK
            case [b"V.FETCH", sid, b"BATCH", start, end, layers, b"FMT", b"PACKED"]:
                return array(
                    *(self._rows(sid, b"%d" % n, int(start), int(end)) for n in range(int(layers)))
                )
            case [b"V.FETCH", sid, layer, b"RANGE", start, end, b"FMT", b"PACKED"]:
                return self._rows(sid, layer, int(start), int(end))
            case [b"SSM.PREFIX.STORE", ns, layer, blob, b"GEN", _]:
                self.blobs[ns, layer] = blob
                return OK
            case [b"SSM.PREFIX.FETCH", ns, layer]:
                return bulk(self.blobs.get((ns, layer)))
        return b"-ERR unknown command\r\n"

    def _rows(self, sid: bytes, layer: bytes, start: int, end: int) -> bytes:
        rows, width = self.rows.get((sid, layer)), self.widths.get((sid, layer), 0)
        if rows is None or len(rows) < end * width:
            return bulk(None)
        return bulk(bytes(rows[start * width : end * width]))
