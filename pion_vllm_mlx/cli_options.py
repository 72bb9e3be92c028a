"""What `import` and `export` share: the options for model, prefix, tokens and server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx.operations.server import (
    ANSWER,
    Failed,
    Server,
    add_server_arguments,
    read_text,
)

if TYPE_CHECKING:
    from pion_vllm_mlx.transport import Patience
    from pion_vllm_mlx.transport.endpoint import Endpoint


def add_prefix_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the name the prefix has on the server, its tokens, the server."""
    parser.add_argument("--model", required=True, metavar="PATH_OR_ID", help="as for mlx_lm.load")
    parser.add_argument(
        "--namespace",
        required=True,
        metavar="NAME",
        help="what the prefix is called on the server (PionPromptCache.make_namespace(…))",
    )
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument(
        "--tokens", type=_token_ids, metavar="IDS", help="the prefix as token ids: 1,15,7"
    )
    tokens.add_argument(
        "--tokens-file", type=Path, metavar="FILE", help="the same in a file, a JSON array or plain"
    )
    tokens.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the prefix as text (- reads it from stdin), encoded as mlx_lm.cache_prompt does",
    )
    parser.add_argument(
        "--no-chat-template", action="store_true", help="encode the text of --prompt as it is"
    )
    add_server_arguments(parser)


def find_prefix_server(options: argparse.Namespace) -> tuple[Endpoint, bytes, Patience]:
    """The server, the prefix's name there, and how long to wait. Nothing is sent; may be Failed."""
    from pion_vllm_mlx.arguments import check_namespace
    from pion_vllm_mlx.transport import Patience

    try:
        namespace = check_namespace(options.namespace)
    except ValueError as error:
        raise Failed(error) from error
    return Server(options).lane, namespace, Patience(first_byte=ANSWER)


def load_model(path: str) -> tuple[Any, Any]:
    """Model and tokenizer as mlx-lm loads them. Raises Failed."""
    from mlx_lm import load

    try:
        model, tokenizer = load(path)[:2]
    except Exception as error:  # whatever a hub, a tokenizer or a model file may raise
        raise Failed(f"cannot load {path}: {error or type(error).__name__}") from error
    return model, tokenizer


def fingerprint_of(model: Any, path: str) -> str:
    """As PionPromptCache(model, model_path=path) takes it."""
    from pion_vllm_mlx.namespace import model_fingerprint

    return model_fingerprint(model, path if Path(path).exists() else None)


def read_ids(options: argparse.Namespace, model: Any, tokenizer: Any) -> tuple[int, ...] | None:
    """The token ids the options name, or None if they name none. Raises Failed."""
    from pion_vllm_mlx.arguments import check_ids, vocab_size_of

    ids: Any
    if options.tokens is not None:
        ids = options.tokens
    elif options.tokens_file is not None:
        try:
            ids = _token_ids(read_text(options.tokens_file))
        except argparse.ArgumentTypeError as error:
            raise Failed(f"{options.tokens_file}: {error}") from error
    elif options.prompt is not None:
        text = sys.stdin.read() if options.prompt == "-" else options.prompt
        ids = _encode(tokenizer, text, not options.no_chat_template)
    else:
        return None
    try:
        checked = check_ids(ids, vocab_size_of(model))
    except ValueError as error:
        raise Failed(error) from error
    if not checked:
        raise Failed("a prefix has one token at least")
    return checked


def _encode(tokenizer: Any, text: str, with_template: bool) -> Any:
    if with_template and tokenizer.has_chat_template:
        message = {"role": "user", "content": text}
        return tokenizer.apply_chat_template(
            [message], add_generation_prompt=False, continue_final_message=True
        )
    return tokenizer.encode(text)


def _token_ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    try:
        loaded = (
            json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in words]
        )
    except ValueError:
        loaded = None
    if not isinstance(loaded, list) or not all(type(token) is int for token in loaded):
        raise argparse.ArgumentTypeError("token ids are integers: 1,15,7")
    return loaded
