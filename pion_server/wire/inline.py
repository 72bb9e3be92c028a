"""Inline commands: one line of space-separated words, with the quoting redis-cli and Redis use."""

from __future__ import annotations

INLINE_LIMIT = 64 * 1024
_SPACE = frozenset(b" \t\n\r\v\f\0")
_ESCAPES = {ord("n"): 10, ord("r"): 13, ord("t"): 9, ord("b"): 8, ord("a"): 7}
_QUOTE, _APOSTROPHE, _BACKSLASH = b"\"'\\"


class UnbalancedQuotes(ValueError):
    """A quoted word is not closed, or goes on behind its closing quote."""


def split_inline(line: bytes) -> list[bytes]:
    r"""The words of a line. "…" knows \n \r \t \b \a \xHH and \<any>; '…' only \'."""
    if b'"' not in line and b"'" not in line:
        return line.replace(b"\0", b" ").split()
    words: list[bytes] = []
    pos = 0
    while True:
        while pos < len(line) and line[pos] in _SPACE:
            pos += 1
        if pos == len(line):
            return words
        word, pos = _read_word(line, pos)
        words.append(word)


def _read_word(line: bytes, pos: int) -> tuple[bytes, int]:
    word = bytearray()
    while pos < len(line) and line[pos] not in _SPACE:
        byte = line[pos]
        if byte in (_QUOTE, _APOSTROPHE):
            pos = _read_quoted(line, pos, word)
            if pos < len(line) and line[pos] not in _SPACE:
                raise UnbalancedQuotes
            break
        word.append(byte)
        pos += 1
    return bytes(word), pos


def _read_quoted(line: bytes, pos: int, word: bytearray) -> int:
    """Append what stands between the quotes; the position behind the closing one."""
    quote = line[pos]
    pos += 1
    while pos < len(line):
        byte = line[pos]
        following = line[pos + 1] if pos + 1 < len(line) else None
        if byte == quote:
            return pos + 1
        if byte == _BACKSLASH and quote == _QUOTE and following is not None:
            number = line[pos + 2 : pos + 4]
            if following == ord("x") and len(number) == 2 and _is_hex(number):
                word.append(int(number, 16))
                pos += 4
                continue
            word.append(_ESCAPES.get(following, following))
            pos += 2
        elif byte == _BACKSLASH and quote == _APOSTROPHE and following == _APOSTROPHE:
            word.append(_APOSTROPHE)
            pos += 2
        else:
            word.append(byte)
            pos += 1
    raise UnbalancedQuotes


def _is_hex(digits: bytes) -> bool:
    return all(digit in b"0123456789abcdefABCDEF" for digit in digits)
