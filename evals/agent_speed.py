"""What our server costs while answers are generated, and whether its memory grows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from typing import Any, Final

import numpy as np

from evals.agent_servers import AgentServer
from evals.agent_session import Message, ask
from evals.rounds import ratio_of

#: Tokens of an answer whose speed is measured.
LONG: Final = 48
STREAMS: Final = (1, 4)
_SUBJECTS: Final = ("a lighthouse", "two old friends", "the sea in winter", "a lost letter")
#: Requests between two looks at the memory.
_LOOK: Final = 50


def decode_speed(stock: AgentServer, ours: AgentServer, rounds: int) -> dict[int, dict[str, float]]:
    """Tokens a second of both, and the ratio with its 95% interval, by streams at once.

    The servers take turns, the first of a round too, with the same prompts, which are in memory
    after one unmeasured round.
    """
    found = {}
    for streams in STREAMS:
        rates: dict[str, list[float]] = {"ours": [], "stock": []}
        order = [("ours", ours), ("stock", stock)]
        for number in range(rounds + 1):
            for name, server in order[:: 1 if number % 2 else -1]:
                rate = _rate(server, streams)
                if number:
                    rates[name].append(rate)
        figures = {name: float(np.median(each)) for name, each in rates.items()}
        found[streams] = figures | ratio_of(rates["ours"], rates["stock"])
    return found


def _rate(server: AgentServer, streams: int) -> float:
    """Tokens a second of all streams together, from the first token of each to its last."""
    with ThreadPoolExecutor(streams) as threads:
        turns = list(
            threads.map(
                lambda subject: ask(server.port, _story(subject), LONG), _SUBJECTS[:streams]
            )
        )
    seconds = [(t.last_seconds - t.first_seconds) / max(1, t.generated - 1) for t in turns]
    return streams / mean(seconds)


def _story(subject: str) -> list[Message]:
    return [{"role": "user", "content": f"Tell a long story about {subject}, with every detail."}]


def memory_growth(server: AgentServer, requests: int, seed: int) -> dict[str, Any]:
    """Answer so many requests, no two of which begin alike; the server's resident megabytes.

    `growth`: from a fifth of the requests on, when caches are full, to the end.
    """
    random = np.random.default_rng(seed)
    sizes: list[float] = []
    for number in range(requests):
        words = " ".join(map(str, random.integers(0, 1000, 40)))
        ask(server.port, [{"role": "user", "content": f"{number}: {words}"}], tokens=4)
        if number % max(1, min(_LOOK, requests // 5)) == 0:
            sizes.append(server.resident_bytes() / 1e6)
    server.wait_until_written()
    sizes.append(server.resident_bytes() / 1e6)
    return {"requests": requests, "megabytes": sizes, "growth": _growth(sizes)}


def _growth(sizes: Sequence[float]) -> float:
    """The median of the last three looks over that of three after the first fifth."""
    begun = len(sizes) // 5
    early, late = sizes[begun : begun + 3], sizes[-3:]
    return float(np.median(late) - np.median(early))
