"""`stats`, `ls`, `inspect`, `pin`, `drop`, `warm`, `save` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx import PionPromptCache, cli
from pion_vllm_mlx.operations.server import duration, size
from pion_vllm_mlx.transport.address import Address, find_server, parse_url
from tests.conftest import RawClient
from tests.pion_vllm_mlx.tiny import PREFIX, tiny_llama

Server = Any


@pytest.fixture(scope="module")
def stored(module_server: Callable[..., Server]) -> Server:
    """A server with two prefixes, one of them hit once, and rows nobody wrote a manifest for."""
    server = module_server("--metal-attention")
    model = tiny_llama(head_dim=32)
    with PionPromptCache(model, port=server.port, timeout=20, store="sync", held_bytes=0) as pc:
        pc.get_or_prefill(PREFIX, "docs/one")
        pc.get_or_prefill(PREFIX, "docs/one")
        pc.get_or_prefill(PREFIX[:9], "docs/two")
    client = server.client()
    client.call("KV.PREFIX.REGISTER", "bare", 32, "fp32")
    client.call("V.STOREBATCH", "bare_pk", 0, 0, 1, bytes(128))
    return server


@pytest.fixture
def run(stored: Server, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs one subcommand against the server; its output."""

    def run(*words: str, status: int = 0) -> str:
        assert cli.main([*words, "--port", str(stored.port)]) == status
        return capsys.readouterr().out

    return run


def refusal(*words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_ls_lists_what_is_held(run: Callable[..., str]) -> None:
    rows = {row["name"]: row for row in json.loads(run("ls", "--json"))}
    assert set(rows) == {"docs/one", "docs/two", "bare"}
    one, bare = rows["docs/one"], rows["bare"]
    assert (one["tokens"], one["format"], one["complete"]) == (len(PREFIX), "fp32", True)
    assert one["bytes"] == one["row_bytes"] == len(PREFIX) * 2 * 2 * 64 * 4
    assert (bare["tokens"], bare["complete"], bare["bytes"]) == (None, False, 128)
    table = run("ls", "docs/", "--sort", "size")
    assert "docs/one" in table
    assert "bare" not in table
    assert "2 prefixes" in table
    assert "bare (no manifest)" in run("ls")


def test_stats_tell_hits_and_bytes(run: Callable[..., str]) -> None:
    told = json.loads(run("stats", "--json"))
    assert told["receipt"]["kvprefix_hits"] == "1"
    assert told["receipt"]["kvprefix_hits_measured"] == "1"
    table = run("stats")
    assert "1 of 3 (33.3%)" in table
    assert "prefill saved, measured" in table


def test_inspect_shows_pieces_and_verifies_them(run: Callable[..., str], stored: Server) -> None:
    shown = json.loads(run("inspect", "docs/one", "--verify", "--json"))
    assert shown["tokens"] == len(PREFIX)
    assert shown["first_ids"] == PREFIX[:16]
    assert [piece["piece"] for piece in shown["pieces"]] == ["keys", "values"] * 2
    assert shown["verified_bytes"] == len(PREFIX) * 2 * 2 * 64 * 4
    assert "all pieces whole" in run("inspect", "docs/one", "--verify")
    before = json.loads(run("stats", "--json"))["receipt"]["kvprefix_hits"]
    run("inspect", "docs/one", "--verify")
    assert json.loads(run("stats", "--json"))["receipt"]["kvprefix_hits"] == before  # no hit
    missing = refusal("inspect", "nothing", "--port", str(stored.port))
    assert "no prefix of that name" in missing


def test_a_pin_holds_until_it_is_taken_off(run: Callable[..., str], stored: Server) -> None:
    assert run("pin", "docs/one", "docs/two") == "pinned 2\n"
    assert run("pin", "--off", "docs/one", "docs/two") == "unpinned 2\n"
    assert "holds no nothing" in refusal("pin", "nothing", "--port", str(stored.port))


def test_warm_takes_the_shape_from_the_manifest(run: Callable[..., str], stored: Server) -> None:
    assert run("warm", "docs/one") == "2 layers ready\n"
    assert stored.client().call("ATTEND.PREFIX.LOOKUP", "docs/one_attn", 1) == "HIT"
    assert "0 layers ready, 2 of another width" in run(
        "warm", "docs/one", "--heads", "1", "--head-dim", "32"
    )
    assert "give --heads" in refusal("warm", "bare", "--port", str(stored.port))


def test_save_empties_the_log(run: Callable[..., str], stored: Server) -> None:
    assert run("save").startswith("saved in ")
    assert json.loads(run("stats", "--json"))["store"]["wal_appended"] == "0"
    run("save", "--copy-to", "copy")
    assert (stored.directory / "copy").exists()
    assert "the server says" in refusal("save", "--copy-to", "/etc/x", "--port", str(stored.port))


def test_drop_asks_before_it_takes_many(run: Callable[..., str], stored: Server) -> None:
    client = stored.client()
    for name in ("tmp/a", "tmp/b", "tmp/c"):
        client.call("KV.PREFIX.REGISTER", name, 32, "fp32")
    assert run("drop", "tmp/c") == "dropped 1\n"
    assert "2 prefixes" in run("drop", "--start", "tmp/")
    assert run("drop", "--start", "tmp/", "--yes") == "dropped 2\n"
    port = str(stored.port)
    assert "holds none" in refusal("drop", "tmp/a", "--port", port)
    assert "--start TEXT" in refusal("drop", "--port", port)


def test_a_server_that_is_not_there_is_one_line(server: Callable[..., Server]) -> None:
    gone = server()
    gone.kill()
    for words in (["stats"], ["ls"], ["inspect", "x"], ["pin", "x"], ["drop", "x"], ["save"]):
        told = refusal(*words, "--port", str(gone.port))
        assert told.startswith(f"pion-vllm-mlx {words[0]}: no answer from 127.0.0.1:{gone.port}")


def test_the_environment_names_the_server(
    server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locked = server("--requirepass", "s3:cret", "--tenant", "ann=a")
    monkeypatch.setenv("PION_URL", f"pion://ann:a@127.0.0.1:{locked.port}")
    assert cli.main(["ls", "--json"]) == 0
    assert "NOPERM" in refusal("save")
    monkeypatch.setenv("PION_URL", f"pion://any:s3%3Acret@127.0.0.1:{locked.port}")
    assert cli.main(["save"]) == 0
    monkeypatch.setenv("PION_URL", f"pion://ann:wrong@127.0.0.1:{locked.port}")
    assert "wrong" not in refusal("ls")
    monkeypatch.setenv("PION_URL", f"http://127.0.0.1:{locked.port}")
    assert "begins with pion://" in refusal("ls")
    monkeypatch.delenv("PION_URL")
    secret = tmp_path / "secret"
    secret.write_text("s3:cret\n")
    assert cli.main(["ls", "--port", str(locked.port), "--password-file", str(secret)]) == 0
    absent = str(tmp_path / "absent")
    assert "cannot read" in refusal("ls", "--password-file", absent)


def test_urls_of_servers() -> None:
    assert parse_url("pion://host") == Address("host", 1974)
    assert parse_url("pions://host").tls is True
    assert parse_url("pion://:pw@[::1]:20") == Address("::1", 20, None, "pw")
    assert parse_url("pion://a%2Fb:p%40w@h:1/") == Address("h", 1, "a/b", "p@w")
    for wrong in ("host:1974", "pion://", "pion://h:0", "pion://h:99999", "pion://h/x", "pion:h"):
        with pytest.raises(ValueError, match="server's URL"):
            parse_url(wrong)
    assert "secret" not in repr(parse_url("pion://u:secret@h"))


def test_credentials_of_the_url_stay_with_its_server() -> None:
    environ = {"PION_URL": "pion://ann:pw@shared:2000"}
    assert find_server(environ=environ) == Address("shared", 2000, "ann", "pw")
    assert find_server("shared", 2000, environ=environ) == Address("shared", 2000, "ann", "pw")
    assert find_server("other", environ=environ) == Address("other", 1974)
    assert find_server(port=1975, environ=environ) == Address("127.0.0.1", 1975)
    assert find_server(password="x", environ=environ) == Address("shared", 2000, "ann", "x")


def test_sizes_and_spans_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 47_185_920)] == ["0 B", "999 B", "1.0 KB", "47.2 MB"]
    spans = [duration(s) for s in (0.4, 119, 600, 36_000, 864_000)]
    assert spans == ["0 s", "119 s", "10 min", "10 h", "10 d"]


@pytest.fixture(scope="module")
def three(module_server: Callable[..., Server]) -> Server:
    """Three workers, a prefix of a manifest on each."""
    server = module_server("-w", "3", "--no-attention")
    model = tiny_llama(head_dim=32)
    for worker in range(3):
        at = RawClient("127.0.0.1", server.port + 2 + worker)
        at.call("V.CREATE", f"docs/{worker}_pk", 64, "VQUANT", "fp32")
        with PionPromptCache(model, port=server.port, timeout=20, store="sync", held_bytes=0) as pc:
            pc.get_or_prefill(PREFIX, f"docs/{worker}")
            pc.get_or_prefill(PREFIX, f"docs/{worker}")
    return server


@pytest.fixture
def run_three(three: Server, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: str) -> str:
        assert cli.main([*words, "--port", str(three.port)]) == 0
        return capsys.readouterr().out

    return run


def test_ls_lists_what_every_worker_holds(run_three: Callable[..., str]) -> None:
    rows = {row["name"]: row for row in json.loads(run_three("ls", "--json"))}
    assert {name: row["worker"] for name, row in rows.items()} == {
        f"docs/{worker}": worker for worker in range(3)
    }
    assert all(row["tokens"] == len(PREFIX) for row in rows.values())
    table = run_three("ls", "docs/")
    assert "worker" in table
    assert "3 prefixes" in table


def test_stats_are_the_sum_of_all_workers_and_each_ones(run_three: Callable[..., str]) -> None:
    told = json.loads(run_three("stats", "--json"))
    assert told["receipt"]["kvprefix_hits"] == "3"
    assert [one["receipt"]["kvprefix_hits"] for one in told["workers"]] == ["1"] * 3
    assert [one["receipt"]["worker_id"] for one in told["workers"]] == ["0", "1", "2"]
    assert "worker_id" not in told["receipt"]
    assert told["store"]["registered_prefixes"] == "3"
    assert told["store"]["directory_entries"] == told["store"]["directory_workers"] == "3"
    table = run_three("stats")
    assert all(heading in table for heading in ("all", "worker 0", "worker 2"))


def test_save_saves_every_worker(run_three: Callable[..., str], three: Server) -> None:
    assert run_three("save").startswith("saved in ")
    stores = [one["store"] for one in json.loads(run_three("stats", "--json"))["workers"]]
    assert [store["wal_appended"] for store in stores] == ["0"] * 3
    run_three("save", "--copy-to", "copy")
    assert all((three.directory / f"copy.{worker}").stat().st_size for worker in range(3))
    assert not (three.directory / "copy").exists()


def test_what_is_about_one_prefix_goes_to_its_worker(
    run_three: Callable[..., str], three: Server
) -> None:
    assert run_three("pin", *(f"docs/{worker}" for worker in range(3))) == "pinned 3\n"
    for worker in range(3):
        shown = json.loads(run_three("inspect", f"docs/{worker}", "--verify", "--json"))
        assert shown["owner"] == str(worker)
        at = RawClient("127.0.0.1", three.port + 2 + worker)
        at.call("KV.PREFIX.REGISTER", f"tmp/{worker}", 32, "fp32")
    assert "3 prefixes" in run_three("drop", "--start", "tmp/")
    assert run_three("drop", "--start", "tmp/", "--yes") == "dropped 3\n"
    assert run_three("stats", "--reset")
    assert json.loads(run_three("stats", "--json"))["receipt"]["kvprefix_hits"] == "0"
