"""The bench of several workers, on a few small prefixes."""

from __future__ import annotations

from evals.bench import workers


def test_every_client_restores_from_both_servers() -> None:
    found = workers.run(rounds=2, clients=4, rows=8)
    assert set(found.figures["seconds"]) == {"one worker", "4 workers"}
    assert all(seconds > 0 for seconds in found.figures["seconds"].values())
    assert found.figures["prefix_bytes"] == 8 * 256 * 8 * 4
    assert found.figures["one_over_several"]["ratio"] > 0
    for busy in found.figures["busy_cores"].values():
        assert all(part["all"] >= part["kernel"] >= 0 for part in busy.values())
