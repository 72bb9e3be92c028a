"""The command line: one table of flags, from which parsing, the help and the nearest match come."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MB = 1024 * 1024


class ConfigError(Exception):
    """The command line cannot be served; `str(error)` is one line for the user."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that is fixed at start. Sizes are bytes; a limit of None is no limit."""

    port: int = 1974
    bind: str = "127.0.0.1"
    directory: Path = Path(".")
    password: str | None = field(default=None, repr=False)
    max_clients: int = 10_000
    max_request: int = 1024 * MB
    output_limit: int = 256 * MB
    workers: int = 1
    max_memory: int | None = None
    max_disk: int | None = None
    vstore_sessions: int = 256
    fetch_zero_fill: bool = False
    ssm_budget: int | None = None
    export_budget: int | None = None
    export_directory: Path | None = None
    keyspace_log: bool = True
    vstore_log: bool = True
    auto_save: bool = True
    fsync: Literal["always", "everysec", "no"] = "no"
    status_file: Path | None = None
    crash_log: Path | None = None
    crash_log_wanted: bool = True
    # What to do instead of serving.
    action: Literal["serve", "version", "help", "check", "repair"] = "serve"
    target: Path | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. `read(text)` gives the value of `field`; without it the flag stands for `value`."""

    names: tuple[str, ...]
    group: str
    help: str
    field: str | None = None
    metavar: str = ""
    read: Callable[[str], Any] | None = None
    value: Any = None
    status: Literal["works", "noted", "missing"] = "works"
    optional: bool = False  # the value may be left out


def _number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text) or not low <= int(text) <= high:
            raise ConfigError(f"wants a whole number from {low} to {high}, not {text!r}")
        return int(text)

    return read


_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}b": 1024**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


def read_size(text: str) -> int:
    """`1048576`, `512mb`, `4gb`, `1.5g`: kb, mb, gb, tb are powers of 1024, k, m, g, t of 1000."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,6})?)([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"wants a size such as 512mb or 4gb, not {text!r}")
    return (
        int(float(match[1]) * _UNITS[match[2]])
        if "." in match[1]
        else (int(match[1]) * _UNITS[match[2]])
    )


def _size_or_none(text: str) -> int | None:
    return read_size(text) or None


def _request_size(text: str) -> int:
    size = read_size(text)
    if size < MB:
        raise ConfigError(f"wants at least 1mb, not {text!r}")
    return size


def _choice(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text.lower() not in words:
            raise ConfigError(f"wants one of {', '.join(words)}, not {text!r}")
        return text.lower()

    return read


def _password(text: str) -> str:
    if not text:
        raise ConfigError("wants a password, not an empty word")
    return text


def _password_file(text: str) -> str:
    """The file's first line, without its line end."""
    try:
        password = Path(text).read_bytes().split(b"\n")[0].rstrip(b"\r").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text}: {error}") from None
    if not password:
        raise ConfigError(f"{text} holds no password")
    return password


_NET, _DATA, _CAPS, _LOG = "Network", "Data and durability", "Limits", "Reports"
_LATER, _ENGINE = "Other", "Attention engine"

OPTIONS: tuple[Option, ...] = (
    Option(("--port", "-p"), _NET, "TCP port, 0 for any free one", "port", "N", _number(0, 65535)),
    Option(
        ("--bind",),
        _NET,
        "address to listen on; others than loopback need a password",
        "bind",
        "ADDRESS",
        str,
    ),
    Option(
        ("--requirepass",),
        _NET,
        "password (visible in `ps`: a file is better)",
        "password",
        "PASSWORD",
        _password,
    ),
    Option(
        ("--requirepass-file",),
        _NET,
        "password from the first line of a file (or the environment: PION_REQUIREPASS)",
        "password",
        "FILE",
        _password_file,
    ),
    Option(
        ("--max-clients",), _NET, "connections at a time", "max_clients", "N", _number(1, 1_000_000)
    ),
    Option(("--workers", "-w"), _NET, "worker processes", "workers", "N", _number(1, 256)),
    Option(("--independent-workers",), _NET, "workers share nothing but the port", status="noted"),
    Option(
        ("--unixsocket",), _NET, "also listen on a Unix socket", metavar="PATH", status="missing"
    ),
    Option(("--dir",), _DATA, "data directory", "directory", "DIR", Path),
    Option(
        ("--fsync",),
        _DATA,
        "when acknowledged writes reach the disk itself",
        "fsync",
        "always|everysec|no",
        _choice("always", "everysec", "no"),
    ),
    Option(
        ("--no-wal",),
        _DATA,
        "no keyspace log; KV.PREFIX.COMMIT refuses",
        "keyspace_log",
        value=False,
    ),
    Option(
        ("--no-vstore-wal",),
        _DATA,
        "no V-store log: rows die with the process",
        "vstore_log",
        value=False,
    ),
    Option(
        ("--no-auto-save",),
        _DATA,
        "never compact the logs in the background",
        "auto_save",
        value=False,
    ),
    Option(
        ("--check",),
        _DATA,
        "verify the files of a stopped server, then exit",
        "target",
        "DIR",
        Path,
    ),
    Option(
        ("--repair",),
        _DATA,
        "as --check, and cut what cannot be read (kept beside the file)",
        "target",
        "DIR",
        Path,
    ),
    Option(("--kvcache",), _DATA, "accepted: the K/V store is always on", status="works"),
    Option(
        ("--vstore-sessions",),
        _CAPS,
        "sessions kept, two for each prefix",
        "vstore_sessions",
        "N",
        _number(2, 10_000_000),
    ),
    Option(
        ("--maxmemory",),
        _CAPS,
        "stored bytes before least recently used prefixes go",
        "max_memory",
        "SIZE",
        _size_or_none,
    ),
    Option(
        ("--max-disk",), _CAPS, "bytes of the data directory", "max_disk", "SIZE", _size_or_none
    ),
    Option(
        ("--ssm-budget",), _CAPS, "bytes of recurrent state", "ssm_budget", "SIZE", _size_or_none
    ),
    Option(
        ("--export-budget",),
        _CAPS,
        "bytes of exported files",
        "export_budget",
        "SIZE",
        _size_or_none,
    ),
    Option(("--max-request",), _CAPS, "bytes of one request", "max_request", "SIZE", _request_size),
    Option(
        ("--max-output",),
        _CAPS,
        "reply bytes held for a client that does not read",
        "output_limit",
        "SIZE",
        _request_size,
    ),
    Option(
        ("--fetch-zero-fill",),
        _CAPS,
        "zeros, not null, for rows never written",
        "fetch_zero_fill",
        value=True,
    ),
    Option(
        ("--status-file",),
        _LOG,
        "where the 1 Hz status goes (pion-PORT.status in --dir)",
        "status_file",
        "PATH",
        Path,
        optional=True,
    ),
    Option(
        ("--crash-log",),
        _LOG,
        "where start and exit lines go (pion-PORT.crash.log in --dir)",
        "crash_log",
        "PATH",
        Path,
        optional=True,
    ),
    Option(("--no-crash-log",), _LOG, "no such lines", "crash_log_wanted", value=False),
    Option(("--version", "-v"), _LOG, "print the version", "action", value="version"),
    Option(("--help", "-h"), _LOG, "print this", "action", value="help"),
    *(
        Option(
            (name,),
            _ENGINE,
            "noted; this version computes no attention",
            metavar=metavar,
            status="noted",
        )
        for name, metavar in (
            ("--metal-attention", ""),
            ("--metal-attention-fp16", ""),
            ("--cuda-attention", ""),
            ("--no-attention", ""),
            ("--fa-window", "N"),
            ("--sdpa-slots", "N"),
            ("--sdpa-auto-warm", ""),
        )
    ),
    *(
        Option((name,), _LATER, "not available in this version", metavar=metavar, status="missing")
        for name, metavar in (
            ("--tenant", "NAME=PASSWORD"),
            ("--tenant-quota", "NAME=BYTES"),
            ("--tenant-strict", ""),
            ("--ns-prefix", "PREFIX"),
            ("--wal-size", "SIZE"),
            ("--wal-max-segments", "N"),
            ("--wal-full-policy", "POLICY"),
        )
    ),
)

# Flags of other servers that mean nothing here; scripts that pass them go on working.
IGNORED = ("--io-threads", "--epoll", "--iouring", "--moe-cache", "--dim", "--max-elements",
           "--auto-embed", "--no-auto-embed", "--no-auto-detect", "--blob-threshold",
           "--no-blob-tier", "--profile")  # fmt: skip

_BY_NAME = {name: option for option in OPTIONS for name in option.names}


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Config:
    """The configuration a command line asks for; ConfigError for one that cannot be served."""
    words = list(argv)
    values: dict[str, Any] = {}
    notices: list[str] = []
    given: dict[str, str] = {}
    while words:
        name, equals, text = words.pop(0).partition("=")
        attached = text if equals else None
        if name in IGNORED or name.startswith("--cluster"):
            while attached is None and words and not words[0].startswith("-"):
                words.pop(0)
            notices.append(f"{name} means nothing to this server and is ignored")
            continue
        option = _BY_NAME.get(name)
        if option is None:
            raise ConfigError(_unknown(name))
        value = _take_value(option, name, attached, words)
        if option.status == "missing":
            raise ConfigError(f"{name} is not available in this version")
        if option.status == "noted":
            notices.append(
                f"{name} is accepted, but {option.help.removeprefix('noted; ')}"
                if option.group == _ENGINE
                else f"{name}: one worker runs alone anyway"
            )
        elif option.field is not None and value is not None:
            if option.field in ("password", "target") and option.field in given:
                raise ConfigError(f"{given[option.field]} and {name} exclude each other")
            given[option.field] = name
            values[option.field] = value
            if option.field == "target":
                values["action"] = name.lstrip("-")
    _complete(values, os.environ if environ is None else environ)
    config = Config(**values, notices=tuple(notices))
    _check(config)
    return config


def _take_value(option: Option, name: str, attached: str | None, words: list[str]) -> Any:
    if not option.metavar:
        if attached is not None:
            raise ConfigError(f"{name} takes no value")
        return option.value
    if attached is None:
        if words and not (words[0].startswith("-") and len(words[0]) > 1):
            attached = words.pop(0)
        elif option.optional:
            return None
        else:
            raise ConfigError(f"{name} wants a value: {option.metavar}")
    if option.read is None:
        return attached
    try:
        return option.read(attached)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from None


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*_BY_NAME, *IGNORED], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "; -h lists them all"
    what = "flag" if name.startswith("-") else "word"
    return f"unknown {what} {name}{hint}"


def _complete(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """What the environment adds; a flag wins over it."""
    if environ.get("PION_REQUIREPASS"):
        values.setdefault("password", environ["PION_REQUIREPASS"])
    if environ.get("PION_EXPORT_DIR"):
        values["export_directory"] = Path(environ["PION_EXPORT_DIR"])


def _check(config: Config) -> None:
    if config.action != "serve":
        return
    if config.workers > 1:
        raise ConfigError("more than one worker is not available in this version")
    if config.password is None and not is_loopback(config.bind):
        raise ConfigError(
            f"binding {config.bind} without a password would serve everybody: "
            "set --requirepass-file, or bind 127.0.0.1"
        )


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """The addresses a bind word stands for; ConfigError when it stands for none."""
    host = {"*": "0.0.0.0", "": "0.0.0.0"}.get(host, host.strip("[]"))
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--bind {host}: {error.strerror or error}") from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def is_loopback(host: str) -> bool:
    """Whether every address of `host` can be reached from this machine only."""
    return all(
        ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback
        for _, address in resolve(host, 0)
    )


def help_text() -> str:
    """The grouped flag list of `-h`."""
    lines = ["usage: pion-server [flags]", "", "Keeps the K/V and recurrent state of LLM prefixes."]
    groups = dict.fromkeys(option.group for option in OPTIONS)
    for group in groups:
        lines += ["", f"{group}:"]
        for option in OPTIONS:
            if option.group == group:
                names = ", ".join(sorted(option.names, key=len))
                flag = f"{names} {option.metavar}".rstrip()
                lines.append(f"  {flag:<34}{option.help}{_default(option)}")
    return "\n".join([*lines, "", "Ignored with a notice: " + ", ".join(IGNORED), ""])


def _default(option: Option) -> str:
    if option.read is None or option.field in (None, "password", "target"):
        return ""
    value = getattr(Config(), option.field)
    if value is None or option.optional:
        return ""
    if isinstance(value, int) and value >= MB:
        value = f"{value // MB}mb"
    return f" ({value})"
