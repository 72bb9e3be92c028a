"""Restores by 32 clients at once: a server of four workers against a server of one.

Prefixes of 8 MB (8 layers, 256 values a row, float32), 32 of them, 8 on each worker; every client
restores one over TCP, from the worker that has it. The clients are processes of their own, one a
core, each of a thread per connection: threads of one process would wait for one another.

Expected: at least 1.5 times as quick with four workers where one worker is what everybody waits
for. Where server and clients share the cores and keep all of them busy with one worker already
(`busy cores`), more workers cannot add anything. Nearly all of it is `in the kernel`:
rows are copied from the page cache into sockets, and out of these into the clients' memory.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import numpy as np

from evals.findings import Bar, Findings, Table
from evals.rounds import interleave, medians, ratio_of
from evals.serving import Caller, local_server
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.endpoint import Endpoint

CLIENTS: Final = 32
WORKERS: Final = 4
ROUNDS: Final = 9
_LAYERS, _DIM, _ROWS = 8, 256, 1000
_PATIENCE = Patience(first_byte=60, stall=60)


def run(rounds: int = ROUNDS, clients: int = CLIENTS, rows: int = _ROWS) -> Findings:
    """Seconds in which all clients have restored, for both servers."""
    flags = ("--no-attention",)
    with (
        local_server(*flags) as alone,
        local_server(*flags, "-w", str(WORKERS)) as several,
    ):
        names = [f"prefix{number}" for number in range(clients)]
        _store(alone.port, names, rows, workers=1)
        _store(several.port, names, rows, workers=WORKERS)
        servers = {"one worker": alone.port, f"{WORKERS} workers": several.port}
        restores = {server: _Restoring(port, names, rows) for server, port in servers.items()}
        ports = {"one worker": [alone.port], f"{WORKERS} workers": _own_ports(several.port)}
        try:
            ways: dict[str, Callable[[], object]] = {
                server: restoring.once for server, restoring in restores.items()
            }
            for way in ways.values():  # connections, redirects and page caches
                way()
            before = {server: _cpu_of(ports[server]) for server in ports}
            for restoring in restores.values():
                restoring.cpu = _NOTHING
            seconds = interleave(ways, rounds)
            cpu = {
                server: {
                    "server": (_cpu_of(ports[server]) - before[server]).in_cores(seconds[server]),
                    "clients": restores[server].cpu.in_cores(seconds[server]),
                }
                for server in ports
            }
        finally:
            for restoring in restores.values():
                restoring.close()
            several.stop()  # in order: workers of a killed server write for another moment
    ratio = ratio_of(seconds["one worker"], seconds[f"{WORKERS} workers"])
    found = medians(seconds)
    total = clients * _LAYERS * _DIM * rows * 4
    return Findings(
        figures={
            "clients": clients,
            "workers": WORKERS,
            "prefix_bytes": total // clients,
            "cores": os.cpu_count(),
            "seconds": found,
            "one_over_several": ratio,
            "busy_cores": cpu,
        },
        tables=[
            Table(
                f"{clients} clients restore {total // clients / 1e6:.0f} MB each at once",
                (
                    *("server", "seconds", "GB/s", "busy cores: server", "in the kernel"),
                    *("clients", "in the kernel"),
                ),
                [
                    (
                        server,
                        f"{value:.3f}",
                        f"{total / value / 1e9:.2f}",
                        *(
                            f"{cpu[server][side][part]:.2f}"
                            for side in ("server", "clients")
                            for part in ("all", "kernel")
                        ),
                    )
                    for server, value in found.items()
                ],
            )
        ],
        bars=[Bar(f"one worker / {WORKERS} workers", ratio["ratio"], 1.5, False)],
    )


class _Cpu(NamedTuple):
    """Seconds of processor time, and how many of them in the kernel."""

    all: float
    kernel: float

    def __sub__(self, other: _Cpu) -> _Cpu:
        return _Cpu(self.all - other.all, self.kernel - other.kernel)

    def plus(self, other: _Cpu) -> _Cpu:
        return _Cpu(self.all + other.all, self.kernel + other.kernel)

    def in_cores(self, seconds: Sequence[float]) -> dict[str, float]:
        """The cores that were busy so long during these seconds."""
        return {"all": self.all / sum(seconds), "kernel": self.kernel / sum(seconds)}


_NOTHING: Final = _Cpu(0.0, 0.0)


def _own_ports(port: int) -> list[int]:
    return [port + 2 + number for number in range(WORKERS)]


def _cpu_of(ports: Sequence[int]) -> _Cpu:
    """What the servers behind these ports have used."""
    used = _NOTHING
    for port in ports:
        text = bytes(Caller(port)("INFO", "CPU")).decode()
        lines = dict(line.split(":") for line in text.splitlines() if ":" in line)
        kernel = float(lines["used_cpu_sys"])
        used = used.plus(_Cpu(float(lines["used_cpu_user"]) + kernel, kernel))
    return used


def _store(port: int, names: Sequence[str], rows: int, workers: int) -> None:
    """Each name on the next worker."""
    layer = np.random.default_rng(rows).standard_normal((rows, _DIM), np.float32)
    blob = memoryview(layer.tobytes())
    homes = [port] if workers == 1 else _own_ports(port)
    endpoints = [Endpoint(port=home, connect_timeout=20) for home in homes]
    for index, name in enumerate(names):
        commands = [Command.of("KV.PREFIX.REGISTER", name, _DIM, "fp32")]
        commands += [
            Command.of("V.STOREBATCH", f"{name}_pk", number, 0, rows, blob)
            for number in range(_LAYERS)
        ]
        answers = endpoints[index % workers].exchange(commands, _PATIENCE)
        if answers != ["OK"] * (1 + _LAYERS):
            raise RuntimeError(f"the server did not store a prefix: {answers[:2]}")
    for endpoint in endpoints:
        endpoint.close()


class _Restoring:
    """Client processes, one a core, which restore their names whenever they are told to."""

    def __init__(self, port: int, names: Sequence[str], rows: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        count = min(os.cpu_count() or 1, len(names))
        #: Of the rounds since it was last set to nothing.
        self.cpu = _NOTHING
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, port, list(names[number::count]), rows)
            process = spawn.Process(target=_serve_rounds, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def once(self) -> None:
        """All names restored."""
        for pipe in self._pipes:
            pipe.send(None)
        for pipe in self._pipes:
            self.cpu = self.cpu.plus(_Cpu(*pipe.recv()))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)


def _serve_rounds(pipe: Connection, port: int, names: list[str], rows: int) -> None:
    readers = [_Reader(port, name, rows) for name in names]
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        started = _own_cpu()
        threads = [threading.Thread(target=reader.read) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if any(reader.failed for reader in readers):
            return
        pipe.send(tuple(_own_cpu() - started))


def _own_cpu() -> _Cpu:
    used = os.times()
    return _Cpu(used.user + used.system, used.system)


class _Reader:
    """A client, and memory for the prefix it restores."""

    def __init__(self, port: int, name: str, rows: int) -> None:
        self._endpoint = Endpoint(port=port, connect_timeout=20)
        memory = np.empty((_LAYERS, rows * _DIM * 4), np.uint8)
        words = ("V.FETCH", f"{name}_pk", "BATCH", 0, rows, _LAYERS, "FMT", "PACKED")
        self._fetch = Command(words, place=lambda layer, size: memoryview(memory[layer])[:size])
        self.failed = True

    def read(self) -> None:
        self.failed = True
        (layers,) = self._endpoint.exchange([self._fetch], _PATIENCE)
        self.failed = not isinstance(layers, list) or len(layers) != _LAYERS
