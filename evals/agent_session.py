"""A coding agent's session, made up: one system prompt, tool loops, a context that grows.

What the model says goes into the next prompt, as it does with a real agent.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Message = dict[str, Any]

#: Tokens an answer has at most: it is the prompts that are measured.
ANSWER: Final = 12
_WAIT: Final = 900.0

#: About 600 tokens, as an agent's instructions and tools are, only shorter.
SYSTEM: Final = (
    "You are a careful programming assistant that works in a repository on the user's machine. "
    "Read before you write. Change as little as the task needs. Say what you did in one line. "
) + " ".join(
    f"Tool {number}: {name}(path, text) {purpose}. It answers with plain text; an error begins"
    f" with the word Error and says what to do about it, and is no reason to give up."
    for number, (name, purpose) in enumerate(
        (
            ("read_file", "returns the lines of a file with their numbers"),
            ("write_file", "replaces a file and returns how many lines it has now"),
            ("list_files", "returns the names in a folder, folders with a slash"),
            ("search", "returns the places where a text occurs, with file and line"),
            ("run_tests", "runs the tests of a folder and returns the failures"),
            ("show_changes", "returns the difference to the last commit"),
            ("commit", "keeps the changes under a message of one line"),
            ("ask_user", "asks a question and returns what the user answered"),
            ("fetch_page", "returns the text of a page of the documentation"),
            ("measure", "runs a benchmark and returns its seconds"),
        )
    )
)
_RESULTS: Final = (
    "src/store.py:{n}: def put(self, key, value): # {n} callers, the last of them in tests",
    "{n} passed, 1 failed: test_a_full_disk_is_told in tests/test_store.py, line {n}",
    "Error: the file has changed since line {n} was read; read it again before writing",
)
#: Lines of a tool's result: about 150 tokens.
_ROWS: Final = 6
_QUESTIONS: Final = (
    "The store forgets what it was told when the disk is full. Find out why, and mend it.",
    "Now do the same for the other backend, number {n}, and keep the tests green.",
    "Explain change {n} in one line, then go on with what is left.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request and what came back. `cached`: prompt tokens that were not computed."""

    messages: tuple[Message, ...]
    answer: str
    prompt: int
    cached: int
    generated: int
    #: From the request to the first token, and to the last.
    first_seconds: float
    last_seconds: float

    @property
    def computed(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt - self.cached


def requests_after(answer: str, messages: Sequence[Message], number: int) -> list[Message]:
    """The messages of turn `number`: the last ones, the answer, and a result or a question."""
    if number % 3:
        line = _RESULTS[number % len(_RESULTS)]
        text = "\n".join(line.format(n=17 * number + row) for row in range(_ROWS))
        following = {"role": "tool", "content": text}
    else:
        text = _QUESTIONS[1 + number % 2].format(n=number)
        following = {"role": "user", "content": text}
    return [*messages, {"role": "assistant", "content": answer}, following]


def first_messages(question: str = _QUESTIONS[0]) -> list[Message]:
    """A session's beginning."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def next_messages(done: Sequence[Turn]) -> list[Message]:
    """What is asked after these turns."""
    if not done:
        return first_messages()
    return requests_after(done[-1].answer, done[-1].messages, len(done))


def ask(port: int, messages: Sequence[Message], tokens: int = ANSWER) -> Turn:
    """Put one streaming request to the server on `port`; raises OSError if it gives no answer."""
    body = {
        "messages": list(messages),
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT)
    started = time.perf_counter()
    first, last, text, usage = None, 0.0, "", None
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{response.status}: {response.read(500)!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                last = time.perf_counter() - started
                first = last if first is None else first
                text += choice["delta"].get("content") or ""
    finally:
        connection.close()
    if usage is None or first is None:
        raise OSError("the answer has no end")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
    return Turn(tuple(messages), text, *counts, first, last)
