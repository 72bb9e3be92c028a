"""The command line of ``pion-vllm-mlx serve``: mlx_lm.server's flags and ours, in groups.

mlx_lm.server keeps its parser to itself, so its flags are declared again; a test holds names and
defaults to the installed one's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

#: Flags of mlx_lm.server by group: name, default, metavar or None for a switch, help.
_STOCK: Final[dict[str, list[tuple[str, Any, str | None, str]]]] = {
    "model": [
        ("--adapter-path", None, "PATH", "adapter weights and configuration"),
        ("--draft-model", None, "PATH_OR_ID", "a smaller model that proposes tokens"),
        ("--num-draft-tokens", 3, "N", "tokens it proposes at a time"),
        ("--trust-remote-code", False, None, "run code that comes with the tokenizer"),
        ("--chat-template", "", "TEMPLATE", "in place of the tokenizer's own"),
        ("--use-default-chat-template", False, None, "where the tokenizer has none"),
        ("--chat-template-args", {}, "JSON", 'for every prompt, as {"enable_thinking": false}'),
    ],
    "sampling, where a request does not say": [
        ("--temp", 0.0, "X", "temperature"),
        ("--top-p", 1.0, "X", "nucleus sampling"),
        ("--top-k", 0, "N", "0: not used"),
        ("--min-p", 0.0, "X", "0: not used"),
        ("--max-tokens", 512, "N", "tokens of an answer"),
    ],
    "speed and memory": [
        ("--decode-concurrency", 32, "N", "answers generated at the same time"),
        ("--prompt-concurrency", 8, "N", "prompts computed at the same time"),
        ("--prefill-step-size", 2048, "N", "tokens of a prompt computed at a time"),
        ("--prompt-cache-size", 10, "N", "conversations held in memory"),
        (
            "--prompt-cache-bytes",
            None,
            "SIZE",
            "their size, as 8GB (default: a quarter of the RAM)",
        ),
        ("--kv-bits", None, "N", "quantise the K/V cache; requests are served one at a time then"),
        ("--kv-group-size", 64, "N", "values that share a scale"),
        ("--quantized-kv-start", 5000, "N", "tokens before which nothing is quantised"),
        ("--pipeline", False, None, "several machines: layers instead of tensors"),
    ],
}
_TYPES: Final[dict[str, Any]] = {
    "--num-draft-tokens": int,
    "--chat-template-args": json.loads,
    "--kv-bits": int,
}


def given_stock_flags(options: argparse.Namespace) -> list[str]:
    """Flags that only mlx_lm.server has a use for and that differ from their defaults."""
    groups = [entry for group in _STOCK.values() for entry in group]
    others = [("--no-normalize", True), ("--cors-origin", []), ("--allowed-host", [])]
    others.append(("--log-level", "INFO"))
    names = {"--no-normalize": "normalise", "--cors-origin": "allowed_origins"}
    defaults = [*others, *((flag, default) for flag, default, _, _ in groups)]
    return [
        flag
        for flag, default in defaults
        if getattr(options, names.get(flag, flag[2:].replace("-", "_"))) != default
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare every flag."""
    parser.usage = "%(prog)s --model PATH_OR_ID [options] [-- FLAGS_OF_THE_ENGINE]"
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        metavar="PATH_OR_ID",
        help="as for mlx_lm.load; it serves every name",
    )
    model.add_argument(
        "--engine",
        choices=["mlx-lm", "vllm-mlx"],
        default="mlx-lm",
        help="vllm-mlx: its own server; of the flags below only address and memory, the rest its"
        " own after -- (default: %(default)s)",
    )
    model.add_argument("engine_flags", nargs="*", metavar="FLAGS_OF_THE_ENGINE", help="vllm-mlx's")
    _add_stock(model, "model")
    _add_http(parser.add_argument_group("endpoint"))
    _add_pion(parser.add_argument_group("what outlives the process"))
    for name in list(_STOCK)[1:]:
        _add_stock(parser.add_argument_group(name), name)


def _add_http(group: Any) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    group.add_argument("--port", type=_port, default=8080, help="0: any (default: %(default)s)")
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name clients may call this machine by; addresses and localhost always work",
    )
    group.add_argument(
        "--cors-origin",
        "--allowed-origins",
        dest="allowed_origins",
        type=lambda text: [origin for origin in text.split(",") if origin],
        default=[],
        metavar="ORIGIN,…",
        help="pages that may use this server, * for all (default: none)",
    )
    group.add_argument(
        "--no-normalize",
        dest="normalise",
        action="store_false",
        help="keep the accounting line some agents begin their system prompt with",
    )
    group.add_argument(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"],
        help="default: %(default)s",
    )


def _add_pion(group: Any) -> None:
    group.add_argument(
        "--pion-host",
        metavar="HOST",
        help="a pion-server that runs (default: one of its own, in the user's data folder)",
    )
    group.add_argument("--pion-port", type=_port, default=1974, help="default: %(default)s")
    group.add_argument("--pion-username", metavar="TENANT", help="for a server with tenants")
    group.add_argument(
        "--pion-password", metavar="WORD", help="others may see it in ps: better PION_PASSWORD"
    )
    group.add_argument(
        "--pion-budget-gb",
        type=_positive,
        default=4.0,
        metavar="GB",
        help="the most that is kept on disk (default: %(default)g)",
    )
    group.add_argument(
        "--pion-min-gain",
        type=_count,
        default=16,
        metavar="TOKENS",
        help="fewer are not worth a restore (default: %(default)s)",
    )
    group.add_argument(
        "--pion-vquant",
        default="auto",
        metavar="FORMAT",
        help="auto keeps every bit; see docs/formats.md for smaller ones",
    )
    group.add_argument(
        "--pion-dir", type=Path, metavar="DIR", help="another folder for the server of its own"
    )
    group.add_argument("--no-pion", action="store_true", help="only what fits into memory")


def _add_stock(group: Any, name: str) -> None:
    for flag, default, metavar, text in _STOCK[name]:
        if metavar is None:
            group.add_argument(flag, action="store_true", help=text)
            continue
        shown = text if default is None or default in ("", {}) else f"{text} (default: {default})"
        kind = _TYPES.get(flag, type(default) if default is not None else str)
        kind = size if metavar == "SIZE" else kind
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown)


def size(text: str) -> int:
    """Bytes, as mlx_lm.server reads them: 8GB, 500M, 1000000."""
    units = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}
    digits = text.rstrip("GMBgmb ")
    try:
        return int(float(digits) * units[text[len(digits) :].strip().upper()])
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 8GB") from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of gigabytes")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 0 to 65535")
    return int(text)
