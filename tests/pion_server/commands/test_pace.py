"""Which writes the event loop does itself."""

from __future__ import annotations

from pion_server.commands.pace import LARGEST, LONG, PAUSE, Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_write_that_took_long_sends_the_next_ones_to_threads_for_a_while() -> None:
    clock = Clock()
    pace = Pace(clock)

    def take(seconds: float) -> str:
        clock.now += seconds
        return "OK"

    assert pace.allows(LARGEST)
    assert not pace.allows(LARGEST + 1)
    assert pace.run(lambda: take(LONG / 2)) == "OK"
    assert pace.allows(1)
    assert pace.run(lambda: take(LONG * 2)) == "OK"
    assert not pace.allows(1)
    clock.now += PAUSE
    assert pace.allows(1)
