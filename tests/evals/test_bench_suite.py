"""The benchmarks the report is made of run, compare what they say they compare, and make a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import evals.bench
import evals.bench.__main__ as command
from evals.bench import fetch_throughput, keyspace, restore_local, scaling, throughput, ttft_lanes
from evals.provenance import describe_machine, save_result
from evals.registry import load_module
from evals.report import BENCHES, newest_results, write_report


def test_every_part_of_the_suite_is_a_benchmark() -> None:
    assert set(command.SUITE) <= set(command.bench_names())
    for name in command.SUITE:
        assert callable(load_module(evals.bench, name).run)


def test_servers_are_compared_on_the_same_bytes() -> None:
    found = throughput.run(megabytes=(1,), rounds=1)
    rows = {(row[0], row[2]) for row in found.tables[0].rows}
    assert {("read", "pion-server"), ("write", "pion-server")} <= rows
    # What is not installed is said to be missing, never stood in for.
    for peer in throughput.PEERS:
        assert (("read", peer) in rows) != (f"{peer}: not measured" in found.tables[0].note)


def test_restores_are_timed_by_every_way_and_beside_the_bare_bytes() -> None:
    found = restore_local.run((64,), rounds=1)  # raises where the ways do not continue alike
    restored, received = (table.rows for table in found.tables)
    assert [row[:2] for row in restored] == [(64, "restore"), (64, "restore + append")]
    assert [row[0] for row in received] == [64]


def test_what_is_fetched_is_what_was_stored() -> None:
    found = fetch_throughput.run(rounds=1)  # raises where it is not
    assert {row[0] for row in found.tables[0].rows} >= {"pion", fetch_throughput.BARE}


def test_keys_are_compared_where_there_is_a_redis() -> None:
    found = keyspace.run(megabytes=(1,), rounds=1)  # raises where a value differs
    assert [row[:2] for row in found.tables[0].rows] == [("SET", "1 MB"), ("GET", "1 MB")]


def test_scaling_has_a_point_for_each_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "CLIENTS", (1, 2))
    monkeypatch.setattr(scaling, "HELD", (3, 5))
    monkeypatch.setattr(scaling, "KILOBYTES", (64,))
    monkeypatch.setattr(scaling, "RESTORED_KB", 64)
    found = scaling.run(rounds=1)
    assert list(found.figures["lookup_us"]) == ["3", "5"]
    assert list(found.figures["at_once_over_sequence"]) == ["1", "2"]


@pytest.mark.model
def test_every_lane_gives_the_cold_answer_and_a_time() -> None:
    found = ttft_lanes.measure([34], rounds=1)  # raises where an answer differs
    assert [row[1] for row in found.tables[0].rows] == [ttft_lanes.COLD, *ttft_lanes._LANES]


def test_the_report_is_made_of_the_newest_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "CLIENTS", (1,))
    monkeypatch.setattr(scaling, "HELD", (2,))
    monkeypatch.setattr(scaling, "KILOBYTES", (64,))
    monkeypatch.setattr(scaling, "RESTORED_KB", 64)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.run_bench("scaling")
    save_result("bench-figures-only", describe_machine(), {"n": 1}, tmp_path)
    (document,) = newest_results(tmp_path, BENCHES)
    assert document["name"] == "bench-scaling"
    page = write_report(tmp_path, BENCHES).read_text()
    assert page.startswith("# Benchmarks")
    assert "Clients restoring" in page
    assert (tmp_path / "bench-scaling-clients.png").stat().st_size > 1000
    assert json.loads((tmp_path / document["file"]).read_text())["result"]["figures"]
