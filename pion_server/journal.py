"""What a running server says: lines for people, or one JSON object a line for programs.

Text: what programs wait for goes to stdout (`tell`), everything else to stderr (`complain`). With
`--log-format json` stdout stays as it is, and every event, those of stdout too, is an object on
stderr: `time`, `level`, `event`, `message`, and the event's own fields.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import asyncio

Level = Literal["info", "warning", "error"]

_in_json = False


def choose(form: Literal["text", "json"]) -> None:
    """From now on write in that form. With json the interpreter's own last words are events too."""
    global _in_json
    _in_json = form == "json"
    if _in_json:
        sys.excepthook = lambda kind, error, trace: _uncaught(error)
        threading.excepthook = lambda args: _uncaught(args.exc_value)
        sys.unraisablehook = lambda args: _uncaught(args.exc_value)


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """With json, what fails in a callback of the loop is an event; asyncio's text otherwise."""
    if _in_json:
        loop.set_exception_handler(
            lambda _, context: fail("loop", str(context["message"]), context.get("exception"))
        )


def tell(event: str, text: str, **fields: object) -> None:
    """A line for stdout."""
    _write(sys.stdout, text)
    if _in_json:
        _write(sys.stderr, _as_json("info", event, text, fields))


def complain(event: str, text: str, *, level: Level = "warning", **fields: object) -> None:
    """A line for stderr, after the program's name."""
    line = _as_json(level, event, text, fields) if _in_json else f"pion-server: {text}"
    _write(sys.stderr, line)


def complain_of_client(event: str, number: int, address: str, text: str) -> None:
    """A line for stderr about one connection, after the time and who it is."""
    if _in_json:
        line = _as_json("warning", event, text, {"client": number, "address": address})
    else:
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} client {number} {address}: {text}"
    _write(sys.stderr, line)


def fail(event: str, text: str, error: BaseException | None, **fields: object) -> None:
    """An error nobody foresaw: its line and its traceback, which names no request's content."""
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    if _in_json:
        line = _as_json("error", event, text, {**fields, "traceback": trace})
    else:
        line = f"{text}:\n{trace.rstrip()}"
    _write(sys.stderr, line)


def _uncaught(error: BaseException | None) -> None:
    fail("uncaught", type(error).__name__, error)


def _as_json(level: Level, event: str, text: str, fields: dict[str, Any]) -> str:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
    head = {"time": f"{stamp}.{int(now * 1000) % 1000:03d}Z", "level": level, "event": event}
    return json.dumps({**head, "message": text, **fields}, default=str)


def _write(stream: Any, line: str) -> None:
    # In one piece: threads write here too.
    stream.write(line + "\n")
    stream.flush()
