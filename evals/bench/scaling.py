"""How restores scale: with the prefixes a server holds, with clients at once, with prefix size.

Prefixes of 8 layers and 256 values a row over TCP, checked and received as a restore does, by
`RespConnection`s of threads of this process.

Expected: a lookup among 4,000 prefixes as quick as among 10; 32 clients at once no slower in all
than 32 one after another; bytes a second that grow with size until memory bounds them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from evals.findings import Bar, Findings, Plot, Table
from evals.rounds import interleave, medians, ratio_of
from evals.serving import local_server
from pion_vllm_mlx.local_server import LocalServer
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.resp import RespConnection

HELD: Final = (10, 100, 1000, 4000)
CLIENTS: Final = (1, 2, 4, 8, 16, 32)
KILOBYTES: Final = (64, 512, 4096, 32_768)
RESTORED_KB: Final = 8192
ROUNDS: Final = 7
_LAYERS, _DIM = 8, 256
_PATIENCE = Patience(first_byte=30, stall=30)
_LOOKUPS = 200


def run(rounds: int = ROUNDS) -> Findings:
    """Seconds of every point of the three curves."""
    with local_server("--vstore-sessions", "20000") as server:
        sizes = _by_size(server, rounds)
        clients, at_once = _by_clients(server, rounds)
        held = _by_prefixes(server)
    return _findings(held, clients, at_once, sizes)


class _Reader:
    """A connection, and memory for the prefix it restores."""

    def __init__(self, server: LocalServer, name: str, kilobytes: int) -> None:
        self._connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 10)
        rows = _rows(kilobytes)
        memory = np.empty((_LAYERS, rows * _DIM * 4), np.uint8)
        words = ("V.FETCH", f"{name}_pk", "BATCH", 0, rows, _LAYERS, "FMT", "PACKED")
        self._fetch = Command(words, place=lambda layer, size: memoryview(memory[layer])[:size])

    def read(self) -> None:
        self._connection.exchange([self._fetch], _PATIENCE)


def _rows(kilobytes: int) -> int:
    return max(1, kilobytes * 1000 // (_LAYERS * _DIM * 4))


def _store(server: LocalServer, names: Sequence[str], kilobytes: int) -> None:
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 10)
    rows = _rows(kilobytes)
    layer = np.random.default_rng(rows).standard_normal((rows, _DIM), np.float32)
    blob = memoryview(layer.tobytes())
    for name in names:
        commands = [Command.of("KV.PREFIX.REGISTER", name, _DIM, "fp32")]
        commands += [
            Command.of("V.STOREBATCH", f"{name}_pk", number, 0, rows, blob)
            for number in range(_LAYERS)
        ]
        if connection.exchange(commands, _PATIENCE) != ["OK"] * (1 + _LAYERS):
            raise RuntimeError("the server did not store a prefix")


def _by_size(server: LocalServer, rounds: int) -> dict[int, float]:
    """GB/s of one client by the prefix's kilobytes."""
    rates = {}
    for kilobytes in KILOBYTES:
        _store(server, [f"size{kilobytes}"], kilobytes)
        reader = _Reader(server, f"size{kilobytes}", kilobytes)
        seconds = medians(interleave({"read": reader.read}, rounds))["read"]
        rates[kilobytes] = _rows(kilobytes) * _LAYERS * _DIM * 4 / seconds / 1e9
        print(f"{kilobytes:>7,} KB: {rates[kilobytes]:.2f} GB/s", flush=True)
    return rates


def _by_clients(
    server: LocalServer, rounds: int
) -> tuple[dict[int, dict[str, float]], dict[int, dict[str, float]]]:
    """Seconds of n restores at once and one after another, and their ratio."""
    _store(server, ["shared"], RESTORED_KB)
    readers = [_Reader(server, "shared", RESTORED_KB) for _ in range(max(CLIENTS))]
    found: dict[int, dict[str, float]] = {}
    ratios: dict[int, dict[str, float]] = {}
    for count in CLIENTS:
        chosen = readers[:count]

        def in_sequence(chosen: list[_Reader] = chosen) -> None:
            for reader in chosen:
                reader.read()

        def at_once(chosen: list[_Reader] = chosen) -> None:
            threads = [threading.Thread(target=reader.read) for reader in chosen]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        seconds = interleave({"in sequence": in_sequence, "at once": at_once}, rounds)
        found[count] = medians(seconds)
        ratios[count] = ratio_of(seconds["at once"], seconds["in sequence"])
        print(f"{count:>3} clients: at once / in sequence {ratios[count]['ratio']:.2f}", flush=True)
    return found, ratios


def _by_prefixes(server: LocalServer) -> dict[int, float]:
    """Microseconds of a LOOKUP, median, by the number of prefixes held."""
    connection = RespConnection("127.0.0.1", server.port, deadline=time.monotonic() + 10)
    found: dict[int, float] = {}
    held = 0
    for count in HELD:
        _store(server, [f"held{number}" for number in range(held, count)], 8)
        held = count
        seconds: list[float] = []
        draw = np.random.default_rng(count)
        for _ in range(_LOOKUPS):
            command = Command.of("KV.PREFIX.LOOKUP", f"held{draw.integers(count)}")
            started = time.perf_counter()
            if connection.exchange([command], _PATIENCE) != ["HIT"]:
                raise RuntimeError("a stored prefix was a miss")
            seconds.append(time.perf_counter() - started)
        found[count] = float(np.median(seconds)) * 1e6
        print(f"{count:>6,} prefixes: LOOKUP {found[count]:.0f} us", flush=True)
    return found


def _findings(
    held: dict[int, float],
    clients: dict[int, dict[str, float]],
    at_once: dict[int, dict[str, float]],
    sizes: dict[int, float],
) -> Findings:
    most = max(CLIENTS)
    total = _rows(RESTORED_KB) * _LAYERS * _DIM * 4

    def rate(count: int, way: str) -> float:
        return count * total / clients[count][way] / 1e9

    return Findings(
        figures={
            "lookup_us": {str(count): value for count, value in held.items()},
            "clients_seconds": {str(count): value for count, value in clients.items()},
            "at_once_over_sequence": {str(count): value for count, value in at_once.items()},
            "size_gb_s": {str(size): value for size, value in sizes.items()},
        },
        tables=[
            Table(
                f"Clients restoring {RESTORED_KB / 1000:.0f} MB each",
                ("clients", "at once", "one after another", "at once / in sequence (95%)"),
                [
                    (
                        count,
                        f"{rate(count, 'at once'):.2f} GB/s",
                        f"{rate(count, 'in sequence'):.2f} GB/s",
                        f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
                    )
                    for count, ratio in at_once.items()
                ],
            ),
            Table(
                "One client, by prefix size",
                ("prefix", "rate"),
                [(f"{size:,} KB", f"{value:.2f} GB/s") for size, value in sizes.items()],
            ),
            Table(
                "LOOKUP by prefixes held",
                ("prefixes", "median"),
                [(f"{count:,}", f"{value:.0f} us") for count, value in held.items()],
            ),
        ],
        plots=[
            Plot(
                "clients",
                "Restores at once and one after another",
                "clients",
                "GB/s in all",
                {
                    way: [(count, rate(count, way)) for count in clients]
                    for way in ("at once", "in sequence")
                },
            )
        ],
        bars=[
            Bar(f"{most} in sequence / {most} at once", 1 / at_once[most]["low"], 1 / 1.15, False),
        ],
    )
