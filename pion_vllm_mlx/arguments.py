"""What a caller may pass: token ids and namespaces, checked before anything is done."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, Final

import mlx.core as mx
import numpy as np

LONGEST_NAMESPACE: Final = 200
_MOST_TOKENS: Final = 1 << 20


def check_ids(prefix_ids: Iterable[Any], vocab_size: int | None) -> tuple[int, ...]:
    """Token ids as plain ints. Lists, tuples, NumPy and MLX arrays of integers will do.

    Raises ValueError for anything else: text, floats, booleans, more than one dimension, an id
    outside the vocabulary, more tokens than the server holds rows.
    """
    if isinstance(prefix_ids, str | bytes | bytearray):
        raise ValueError("prefix_ids are token ids, not text: encode it first")  # noqa: TRY004
    tokens: Any = prefix_ids
    if isinstance(tokens, mx.array | np.ndarray):
        tokens = tokens.tolist()
    try:
        ids = tuple(tokens)
        if set(map(type, ids)) != {int}:
            ids = tuple(_as_int(token) for token in ids)
    except TypeError as error:
        raise ValueError(f"prefix_ids must be a flat sequence of integers: {error}") from error
    if len(ids) > _MOST_TOKENS:
        raise ValueError(f"{len(ids)} tokens, at most {_MOST_TOKENS} can be stored")
    limit = min(vocab_size or 2**32, 2**32)
    if ids and not 0 <= min(ids) <= max(ids) < limit:
        wrong = next(token for token in ids if not 0 <= token < limit)
        raise ValueError(f"token id {wrong} is not in 0..{limit - 1}")
    return ids


def check_namespace(namespace: str | bytes) -> bytes:
    """A namespace as its 1 to 200 bytes; raises ValueError."""
    if not isinstance(namespace, str | bytes):
        raise ValueError("a namespace is text or bytes")  # noqa: TRY004
    try:
        name = namespace.encode() if isinstance(namespace, str) else namespace
    except UnicodeEncodeError as error:
        raise ValueError("a namespace must be encodable as UTF-8") from error
    if not 1 <= len(name) <= LONGEST_NAMESPACE:
        raise ValueError(f"a namespace has 1 to {LONGEST_NAMESPACE} bytes, not {len(name)}")
    return name


def vocab_size_of(model: Any) -> int | None:
    """The model's vocabulary size as its arguments give it, or None where they do not."""
    args = getattr(model, "args", None)
    for source in (args, getattr(args, "text_config", None)):
        size = source.get("vocab_size") if isinstance(source, dict) else None
        size = getattr(source, "vocab_size", size)
        if type(size) is int and size > 0:
            return size
    return None


def _as_int(token: Any) -> int:
    if isinstance(token, bool | np.bool_):
        raise TypeError("a boolean is no token id")
    return operator.index(token)
