"""The command line: every flag, what is refused and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion_server.config import Config, config_of_worker, parse
from pion_server.doors import bind_doors
from pion_server.flag_values import ConfigError, size
from pion_server.flags import FLAGS, IGNORED, help_text
from pion_server.tenants import Tenant


def refusal(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults() -> None:
    config = parse([], {})
    assert config == Config()
    assert (config.port, config.bind, config.vstore_sessions) == (1974, "127.0.0.1", 256)
    assert (config.max_request, config.password) == (1 << 30, None)


def test_every_flag_that_works_sets_its_field(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret\nsecond line\n")
    config = parse(
        [
            *("--port", "1984", "--bind", "0.0.0.0", "--dir", "/data", "-w", "1"),
            *("--requirepass-file", str(secret), "--max-clients", "7", "--kvcache"),
            *("--fsync", "ALWAYS", "--no-wal", "--no-vstore-wal", "--no-auto-save"),
            *("--vstore-sessions", "20000", "--maxmemory", "512mb", "--max-disk", "4gb"),
            *("--ssm-budget", "1g", "--export-budget", "0", "--max-request", "2mb"),
            *("--max-output", "3mb", "--fetch-zero-fill", "--status-file", "/s"),
            *("--tenant", "ann=a", "--tenant", "bob=b=c", "--tenant-quota", "bob=1mb,8"),
            *(
                "--tls-port",
                "0",
                "--tls-cert",
                "/c.pem",
                "--tls-key",
                "/k.pem",
                "--tls-ca",
                "/a.pem",
            ),
            *("--tls-only", "--tenant-strict", "--ns-prefix", "team/"),
            *("--crash-log", "/c", "--no-crash-log"),
        ],
        {"PION_EXPORT_DIR": "/exports"},
    )
    assert config == Config(
        port=1984,
        bind="0.0.0.0",
        directory=Path("/data"),
        password="s3cret",
        tls_port=0,
        tls_cert=Path("/c.pem"),
        tls_key=Path("/k.pem"),
        tls_ca=Path("/a.pem"),
        tls_only=True,
        tenants=(Tenant("ann", "a"), Tenant("bob", "b=c", 1 << 20, 8)),
        tenant_strict=True,
        ns_prefix=b"team/",
        max_clients=7,
        fsync="always",
        keyspace_log=False,
        vstore_log=False,
        auto_save=False,
        vstore_sessions=20000,
        max_memory=512 << 20,
        max_disk=4 << 30,
        ssm_budget=10**9,
        max_request=2 << 20,
        output_limit=3 << 20,
        fetch_zero_fill=True,
        export_directory=Path("/exports"),
        status_file=Path("/s"),
        crash_log=Path("/c"),
        crash_log_wanted=False,
    )


@pytest.mark.parametrize(
    "line",
    [
        "--kvcache -w 1",
        "--kvcache --metal-attention -w 1",
        "-p 1984",
        "--port=1984",
        "-p 1984 -w 1 --kvcache --no-auto-detect --no-auto-embed --no-crash-log --no-wal "
        "--profile kv",
        "--kvcache --metal-attention-fp16 --cuda-attention --no-attention --sdpa-auto-warm "
        "--fa-window 128 --sdpa-slots 256 --independent-workers",
    ],
)
def test_known_invocations_work_verbatim(line: str) -> None:
    assert parse(line.split(), {}).action == "serve"


def test_flags_without_effect_are_accepted_with_a_notice() -> None:
    words = "--io-threads 4 --epoll --cluster-enabled yes --moe-cache -p 7 --metal-attention"
    config = parse(words.split(), {})
    assert config.port == 7
    assert [notice.split()[0] for notice in config.notices] == [
        "--io-threads",
        "--epoll",
        "--cluster-enabled",
        "--moe-cache",
    ]
    for name in IGNORED:
        assert parse([name, "x"], {}).notices


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("--max-memory", "--maxmemory"),
        ("--vstore-session", "--vstore-sessions"),
        ("--requirepas", "--requirepass"),
        ("--prot", "--port"),
        ("--metal-atention", "--metal-attention"),
    ],
)
def test_an_unknown_flag_names_the_nearest(wrong: str, nearest: str) -> None:
    assert refusal(wrong, "1") == f"unknown flag '{wrong}'; did you mean {nearest}?"


def test_nothing_near_points_to_the_help() -> None:
    assert refusal("--zzzzzz") == "unknown flag '--zzzzzz'; -h lists all flags"
    assert refusal("1974").startswith("unknown word '1974'")
    assert "unknown word 'a\\nb'" in refusal("a\nb")


@pytest.mark.parametrize(
    "words",
    [
        ("--wal-size", "1mb"),
    ],
)
def test_what_does_not_exist_yet_is_refused(words: tuple[str, ...]) -> None:
    assert refusal(*words) == f"{words[0]} is not available in this version"


def test_workers_share_the_limits_of_their_server_and_of_each_tenant() -> None:
    config = parse(
        [
            *("--kvcache", "-w", "4", "--independent-workers", "--metrics-port", "9000"),
            *("--maxmemory", "4gb", "--max-disk", "8gb", "--requirepass", "s"),
            *("--tenant", "a=x", "--tenant-quota", "a=1gb,6"),
        ],
        {},
    )
    assert (config.workers, config.notices) == (4, ())
    part = config_of_worker(config, 3)
    assert (part.max_memory, part.max_disk, part.ssm_budget) == (1 << 30, 2 << 30, None)
    assert part.metrics_port == 9003
    assert (part.tenants[0].max_bytes, part.tenants[0].max_sessions) == (256 << 20, 2)


def test_workers_need_ports_above() -> None:
    with pytest.raises(ConfigError, match="--port 65530 leaves no ports for 4 workers"):
        bind_doors(parse(["-p", "65530", "-w", "4"], {}))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("1kb", 1024),
        ("1k", 1000),
        ("512MB", 512 << 20),
        ("4gb", 4 << 30),
        ("4GiB", 4 << 30),
        ("1.5gb", 3 << 29),
        ("2tb", 2 << 40),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "1 gb x", "1e9", "mb", "1.gb", "٣mb", "inf"])
def test_what_is_no_size(text: str) -> None:
    assert refusal(f"--maxmemory={text}").startswith("--maxmemory wants a size")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-p",), "-p wants a value: N"),
        (("-p", "--kvcache"), "-p wants a value: N"),
        (("-p", "65536"), "-p wants a whole number from 0 to 65535, not '65536'"),
        (("-p", "x"), "-p wants a whole number from 0 to 65535, not 'x'"),
        (("--vstore-sessions", "1"), "--vstore-sessions wants a whole number from 2"),
        (("--fsync", "often"), "--fsync wants always, everysec or no, not 'often'"),
        (("--max-request", "1k"), "--max-request wants at least 1mb, not '1k'"),
        (("--no-wal=yes",), "--no-wal takes no value"),
        (("--requirepass", ""), "--requirepass wants a password"),
        (("--requirepass-file", "/no/such/file"), "--requirepass-file cannot read"),
        (("--requirepass", "a", "--requirepass-file", "/f"), "--requirepass-file cannot read"),
        (("--requirepass", "a", "--requirepass", "b"), "cannot be given together"),
        (("--check", "/a", "--repair", "/b"), "--check and --repair cannot be given together"),
    ],
)
def test_malformed_values_are_refused(words: tuple[str, ...], text: str) -> None:
    assert text in refusal(*words)


def test_a_password_file_without_a_password_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\n", b"\r\nsecond\n", b"\xff\xfe\n"):
        (tmp_path / "file").write_bytes(content)
        assert "file" in refusal("--requirepass-file", str(tmp_path / "file"))


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "192.0.2.1"])
def test_serving_everybody_needs_a_password(host: str) -> None:
    assert "without a password would serve everybody" in refusal("--bind", host)
    assert parse(["--bind", host, "--requirepass", "x"], {}).bind == host
    assert parse(["--bind", host], {"PION_REQUIREPASS": "x"}).password == "x"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert parse(["--bind", host], {}).bind == host


def test_an_address_that_means_nothing_is_refused() -> None:
    assert refusal("--bind", "999.1.2.3.4").startswith("--bind 999.1.2.3.4: ")
    assert refusal("--bind", "a" * 300).startswith("--bind aaa")


def test_a_flag_wins_over_the_environment() -> None:
    environ = {"PION_REQUIREPASS": "from-env"}
    assert parse([], environ).password == "from-env"
    assert parse(["--requirepass", "from-flag"], environ).password == "from-flag"
    assert parse([], {"PION_REQUIREPASS": ""}).password is None


def test_a_password_is_never_shown() -> None:
    assert "s3cret" not in repr(parse(["--requirepass", "s3cret"], {}))


def test_check_and_repair_name_a_directory() -> None:
    config = parse(["--check", "/data"], {})
    assert (config.action, config.target) == ("check", Path("/data"))
    config = parse(["--repair=/data"], {})
    assert (config.action, config.target) == ("repair", Path("/data"))


def test_the_help_names_every_flag_and_fits_a_terminal() -> None:
    text = help_text(Config())
    for flag in FLAGS:
        assert f"  {flag.names}" in text
    for name in IGNORED:
        assert name in text
    assert "[1974]" in text
    assert "[1024mb]" in text
    assert max(map(len, text.splitlines())) <= 100 or text.splitlines()[-1].startswith("Other")


def test_status_and_crash_log_paths_may_be_left_out() -> None:
    config = parse(["--status-file", "--crash-log", "-p", "7"], {})
    assert (config.status_file, config.crash_log, config.port) == (None, None, 7)
