"""What `tool_choice` asks for, in any of the three APIs, and that an answer keeps to it.

`none` offers no tools, a name only that one: both change the prompt. Where a call is required the
answer is made to begin with one (`lead_in`), and one without a call to a tool that was offered is
an error all the same: a client that asked for a call gets one or is told that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pion_vllm_mlx.serve.errors import BadRequest

if TYPE_CHECKING:
    from pion_vllm_mlx.serve.exchange import Sink

#: What the model was required to do and did not: the request was understood, and no retry helps.
UNMET: Final = 422

Tool = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """The tools to offer, as chat requests have them, and whether one has to be called."""

    tools: list[Tool]
    required: bool = False

    def fields(self) -> dict[str, Any]:
        """The same as fields of a chat request."""
        if not self.tools:
            return {}
        return {"tools": self.tools, "tool_choice": "required" if self.required else "auto"}


def choose(tools: list[Tool], choice: Any) -> Choice:
    """What `tool_choice` leaves of `tools`. Raises BadRequest for what means nothing here.

    As texts `auto`, `none`, `required`; as objects with a `type` of `auto`, `none`, `any`, `tool`
    or `function` and a name, or `allowed_tools`.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in (None, "auto"):
        return Choice(tools)
    if kind == "none":
        return Choice([])
    if kind in ("any", "required"):
        return _required(tools)
    if kind in ("tool", "function"):
        return _required(_named(tools, [choice]))
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools") or choice
        chosen = _named(tools, allowed.get("tools") or [])
        return _required(chosen) if allowed.get("mode") == "required" else Choice(chosen)
    raise BadRequest(f"tool_choice: {kind!r} is not known")


def _required(tools: list[Tool]) -> Choice:
    if not tools:
        raise BadRequest("tool_choice: a tool has to be called, and none is offered")
    return Choice(tools, required=True)


def _named(tools: list[Tool], wanted: Sequence[Any]) -> list[Tool]:
    names = [each.get("name") or (each.get("function") or {}).get("name") for each in wanted]
    for name in names:
        if not any(tool["function"]["name"] == name for tool in tools):
            raise BadRequest(f"tool_choice: there is no tool {name!r}")
    return [tool for tool in tools if tool["function"]["name"] in names]


def lead_in(tokenizer: Any, state: str) -> list[int]:
    """The tokens an answer has to begin with to be a call; none where that is the model's to say.

    `state`: what mlx_lm.server takes the answer to begin as. A thought that the prompt has opened
    is closed first.
    """
    targets = {to for edges in tokenizer.response_transitions.values() for _, to in edges}
    if not tokenizer.has_tool_calling or not tokenizer.tool_call_start_tokens or "tool" in targets:
        return []
    thought: Sequence[int] = ()
    if state == "reasoning":
        thought = tokenizer.think_end_tokens or ()
        if not thought:
            return []
    return [*thought, *tokenizer.tool_call_start_tokens]


class Demanding:
    """A sink that hands an answer on to another one if it calls one of the tools `names`.

    One that has run out of tokens says so, and is handed on as it is.
    """

    def __init__(self, sink: Sink, names: frozenset[str]) -> None:
        self._sink = sink
        self._names = names
        self._called: list[str] = []
        self._is_unmet = False

    def result(self, answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        self._note(choice["message"].get("tool_calls"))
        if self._has_failed(choice["finish_reason"]):
            self._sink.fail(UNMET, self._complaint())
        else:
            self._sink.result(answer)

    def begin(self) -> None:
        self._sink.begin()

    def chunk(self, chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices") or []:
            self._note((choice.get("delta") or {}).get("tool_calls"))
            if (finish := choice.get("finish_reason")) is not None:
                self._is_unmet = self._has_failed(finish)
        if not self._is_unmet:
            self._sink.chunk(chunk)

    def progress(self, done: int, total: int) -> None:
        self._sink.progress(done, total)

    def end(self) -> None:
        if self._is_unmet:
            self._sink.fail(UNMET, self._complaint())
        else:
            self._sink.end()

    def fail(self, status: int, message: str) -> None:
        self._sink.fail(status, message)

    def _note(self, calls: Any) -> None:
        self._called += [call["function"]["name"] for call in calls or ()]

    def _has_failed(self, finish: str) -> bool:
        return finish != "length" and (not self._called or not self._names.issuperset(self._called))

    def _complaint(self) -> str:
        other = f"called {', '.join(map(repr, self._called))}" if self._called else "made no call"
        names = " or ".join(sorted(self._names))
        return f"tool_choice: a call of {names} was required, the model {other}"
