"""An agent's session of 20 turns: cold, in session, after a restart, and a second session.

``pion-vllm-mlx serve`` and mlx_lm.server as it is play the same session, turn by turn side by side:
a system prompt of about 600 tokens, tool loops, answers that go into the next prompt; then a second
session with another first question. Another of ours plays it, too, and is killed before turns
together with its pion-server (SIGKILL) and started again: what it is asked then is its first
request. At some turns a server that keeps nothing computes the same prompts whole: all answers must
be the same.

A hybrid model of random weights (the layer pattern of Qwen3.5-4B) plays it, too. What it says and
how long it takes means nothing and is not given; how many tokens it computes does.

Expected: after a restart no more than two blocks (128 tokens) beyond what is new in a turn are
computed, plain and hybrid alike; mlx_lm.server computes everything then. Decoding costs at most 2%,
and memory does not grow over 500 requests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import load as load_tokenizer

from evals.agent_servers import AgentServer, our_server, stock_server
from evals.agent_session import Message, Turn, ask, first_messages, next_messages
from evals.agent_speed import decode_speed, memory_growth
from evals.findings import Bar, Findings, Table
from evals.random_models import random_hybrid
from evals.setting import Setting

TURNS: Final = 20
#: Turns of the real model's session that are computed cold, which takes the longest, and those it
#: is killed before; of the hybrid's session it is every turn.
COLD: Final = (0, 4, 9, 19)
KILLED: Final = (1, 2, 4, 6, 8, 9, 11, 13, 16, 19)
ROUNDS: Final = 6
REQUESTS: Final = 500
BLOCK: Final = 64
#: Beyond what is new in a turn.
MOST_BEYOND: Final = 2 * BLOCK
#: Megabytes that count as flat. What the requests leave in caches would be three times as much.
MOST_GROWTH: Final = 40.0
_OTHER: Final = "Write a test for the parser instead, and tell me which line it covers."
_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_VOCAB: Final = 49152


@dataclasses.dataclass(frozen=True)
class Session:
    """Turns by server and occasion; keys are turn numbers, from 0.

    `seconds`: of the second sessions. `system`: tokens all sessions begin with, the system prompt.
    """

    stock: list[Turn]
    ours: list[Turn]
    #: First requests after a SIGKILL.
    restarted: dict[int, Turn]
    cold: dict[int, Turn]
    #: A second session on each, by "stock", "ours", "restarted".
    second: dict[str, Turn]
    system: int


def run(setting: Setting) -> Findings:
    return measure(
        setting, setting.count(TURNS, 2), setting.count(ROUNDS, 1), setting.count(REQUESTS, 20)
    )


def measure(setting: Setting, turns: int, rounds: int, requests: int) -> Findings:
    """A session of so many turns with the setting's model, and with a random hybrid.

    `rounds` of the decode speed with the former, `requests` to the latter for its memory.
    """
    with tempfile.TemporaryDirectory(prefix="pion-agent-") as name:
        folder = Path(name)
        print(f"{setting.model_name}, {turns} turns", flush=True)
        plain, speed = play_all(
            setting.model_path, turns, folder / "plain", set(KILLED), set(COLD), rounds
        )
        print("a random hybrid", flush=True)
        model = hybrid_folder(Path(setting.model_path), folder / "model", setting.seed)
        every = range(turns)
        hybrid, _ = play_all(str(model), turns, folder / "hybrid", every, every, 0)
        flags = ("--pion-dir", str(folder / "steady"), "--pion-budget-gb", "0.02")
        with our_server(str(model), folder / "steady.log", *flags) as server:
            memory = memory_growth(server, requests, setting.seed)
        print(f"  {requests} requests: {memory['growth']:+.1f} MB", flush=True)
    return _findings(plain, hybrid, turns, speed, memory)


def play_all(
    model: str,
    turns: int,
    folder: Path,
    killed: Collection[int],
    cold: Collection[int],
    rounds: int,
) -> tuple[Session, Mapping[int, Mapping[str, float]]]:
    """The session on all servers, side by side, then the decode speed of the first two.

    Before the turns `killed` one of ours is killed and started again; the turns `cold` and the
    last one are computed from nothing, too. Each server writes a log into `folder`.
    """
    folder.mkdir()
    log = folder / "ours.log"
    with ExitStack() as ends:
        stock = ends.enter_context(stock_server(model, folder / "stock.log"))
        calm = ends.enter_context(our_server(model, log, "--pion-dir", str(folder / "calm")))
        mortal = ends.enter_context(our_server(model, log, "--pion-dir", str(folder / "killed")))
        nothing = ("--no-pion", "--prompt-cache-size", "0")
        empty = ends.enter_context(our_server(model, log, *nothing))
        # mlx_lm.server loads its model with its first request: no measured one waits for that.
        ask(stock.port, [{"role": "user", "content": "?"}])
        session = Session([], [], {}, {}, {}, _system_tokens(Path(model)))
        for number in range(turns):
            messages = next_messages(session.ours)
            session.stock.append(ask(stock.port, messages))
            session.ours.append(ask(calm.port, messages))
            if number and (number in killed or number == turns - 1):
                session.restarted[number] = _ask_after_kill(mortal, messages)
            else:
                ask(mortal.port, messages)
            if number in cold or number == turns - 1:
                session.cold[number] = ask(empty.port, messages)
            _show(session, number)
        question = first_messages(_OTHER)
        session.second["stock"] = ask(stock.port, question)
        session.second["ours"] = ask(calm.port, question)
        session.second["restarted"] = _ask_after_kill(mortal, question)
        return session, decode_speed(stock, calm, rounds) if rounds else {}


def _ask_after_kill(server: AgentServer, messages: Sequence[Message]) -> Turn:
    server.wait_until_written()
    server.kill()
    server.start()
    return ask(server.port, messages)


def _show(session: Session, number: int) -> None:
    turns = {"stock": session.stock[-1], "ours": session.ours[-1]}
    later = {"after SIGKILL": session.restarted, "cold": session.cold}
    turns |= {name: each[number] for name, each in later.items() if number in each}
    told = (f"{n} {t.computed} in {t.first_seconds:.2f} s" for n, t in turns.items())
    print(f"  turn {number + 1}, {session.ours[-1].prompt} tokens: {', '.join(told)}", flush=True)


def _system_tokens(model: Path) -> int:
    """Tokens of the system prompt, as every session begins with them."""
    load: Any = load_tokenizer
    tokenizer = load(model)
    system: list[int] = tokenizer.apply_chat_template(first_messages()[:1], tokenize=True)
    return len(system)


def hybrid_folder(tokenizer: Path, folder: Path, seed: int) -> Path:
    """A model folder of a random hybrid with the tokenizer of another."""
    folder.mkdir()
    model = random_hybrid(seed, layers=8, vocab=_VOCAB)
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = dataclasses.asdict(model.args) | {"eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    for name in _FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder


def new_tokens(session: Session, turn: int) -> int:
    """Tokens of a turn's prompt that the prompt before had not: the answer and what follows it."""
    return session.ours[turn].prompt - (session.ours[turn - 1].prompt if turn else 0)


def beyond(session: Session) -> int:
    """The most that was computed beyond what was new, over all turns after a restart."""
    return max(turn.computed - new_tokens(session, n) for n, turn in session.restarted.items())


def same_answers(session: Session) -> bool:
    """Whether every answer of ours that was also computed cold is the same."""
    return all(
        session.ours[number].answer == cold.answer
        and session.restarted.get(number, cold).answer == cold.answer
        for number, cold in session.cold.items()
    )


def computed_again(session: Session, occasion: str) -> int:
    """Tokens of the system prompt that a second session computes again."""
    return max(0, session.system - session.second[occasion].cached)


def _findings(
    plain: Session,
    hybrid: Session,
    turns: int,
    speed: Mapping[int, Mapping[str, float]],
    memory: Mapping[str, Any],
) -> Findings:
    ratio = median(
        turn.first_seconds / plain.ours[n].first_seconds for n, turn in plain.restarted.items()
    )
    models = (("the model", plain), ("a random hybrid", hybrid))
    return Findings(
        figures={
            "turns": turns,
            "plain": _figures(plain),
            "hybrid": _figures(hybrid),
            "restart_ttft_ratio": ratio,
            "decode": {str(streams): dict(each) for streams, each in speed.items()},
            "memory": dict(memory),
        },
        tables=[
            _turns_table(plain, "the model", times=True),
            _turns_table(hybrid, "a random hybrid", times=False),
            *(_sums_table(session, name) for name, session in models),
            _decode_table(speed),
            _memory_table(memory),
        ],
        bars=[
            *(
                Bar(f"answers are a cold server's, {n}", float(same_answers(s)), 1.0)
                for n, s in models
            ),
            *(
                Bar(
                    f"tokens beyond the new turn after a restart, spared of 128, {name}",
                    float(MOST_BEYOND - beyond(session)),
                    0.0,
                )
                for name, session in models
            ),
            *(
                Bar(
                    f"system prompt of a second session, minus tokens computed again, {name}",
                    0.0 - computed_again(session, "ours"),
                    0.0,
                )
                for name, session in models
            ),
            Bar(
                "in session over after a restart, time to first token",
                1 / ratio,
                1 / 1.1,
                decides=False,
            ),
            *(
                Bar(f"decode, ours over mlx_lm.server, streams: {n}", f["high"], 0.98, False)
                for n, f in speed.items()
            ),
            Bar(
                f"memory after {memory['requests']} requests, MB spared of {MOST_GROWTH:g}",
                MOST_GROWTH - memory["growth"],
                0.0,
            ),
        ],
        notes=[
            "Each row of the first two tables is one request; computed: prompt tokens the server"
            " had to compute; s: time to the first token. `serve` is ready to answer"
            " once it has restored the conversation stored last.",
        ],
    )


def _figures(session: Session) -> dict[str, Any]:
    def facts(turn: Turn) -> list[float]:
        return [turn.prompt, turn.cached, round(turn.first_seconds, 4)]

    def all_facts(turns: Mapping[Any, Turn]) -> dict[str, list[float]]:
        return {str(name): facts(turn) for name, turn in turns.items()}

    return {
        "stock": [facts(turn) for turn in session.stock],
        "ours": [facts(turn) for turn in session.ours],
        "restarted": all_facts(session.restarted),
        "cold": all_facts(session.cold),
        "second": all_facts(session.second),
        "system": session.system,
        "second_computes_again": {n: computed_again(session, n) for n in session.second},
        "beyond_new": beyond(session),
        "same_answers": same_answers(session),
        "stock_answers_the_same": sum(
            one.answer == other.answer
            for one, other in zip(session.stock, session.ours, strict=True)
        ),
    }


def _turns_table(session: Session, model: str, *, times: bool) -> Table:
    """A row a turn: prompt tokens, then for each server what it computed and, if told, how long."""

    def cell(turn: Turn | None) -> str:
        if turn is None:
            return "-"
        return f"{turn.computed:,}" + (f", {turn.first_seconds:.2f} s" if times else "")

    rows: list[tuple[Any, ...]] = []
    for number, ours in enumerate(session.ours):
        found = (session.cold.get(number), session.stock[number], ours)
        cells = [cell(turn) for turn in (*found, session.restarted.get(number))]
        rows.append((str(number + 1), ours.prompt, new_tokens(session, number), *cells))
    second = session.second
    names = ("stock", "ours", "restarted")
    cells = ["-", *(cell(second[name]) for name in names)]
    prompt = second["ours"].prompt
    rows.append(("second session", prompt, prompt - session.system, *cells))
    columns = ("turn", "prompt", "new", "cold", "mlx_lm.server", "ours", "ours after a SIGKILL")
    what = "computed tokens" + (", time to the first" if times else "")
    return Table(f"An agent's session, {model}: {what}", columns, rows)


def _sums_table(session: Session, model: str) -> Table:
    def row(what: str, turns: Sequence[Turn]) -> tuple[str, int, int, int, str]:
        first = f"{median(t.first_seconds for t in turns):.2f} s" if model == "the model" else "-"
        return what, len(turns), sum(t.prompt for t in turns), sum(t.computed for t in turns), first

    after = session.restarted
    rows = [
        row("cold", list(session.cold.values())),
        row("mlx_lm.server, in session", session.stock),
        row("ours, in session", session.ours),
        row("ours, in session, the turns of the next row", [session.ours[n] for n in after]),
        row("ours, first request after a SIGKILL", list(after.values())),
        row("mlx_lm.server, second session", [session.second["stock"]]),
        row("ours, second session", [session.second["ours"]]),
        row("ours, second session after a SIGKILL", [session.second["restarted"]]),
    ]
    columns = ("occasion", "turns", "prompt tokens", "of them computed", "first token, median")
    return Table(f"The same in sums, {model}", columns, rows)


def _decode_table(speed: Mapping[int, Mapping[str, float]]) -> Table:
    rows = [
        (
            streams,
            f"{f['stock']:.1f}",
            f"{f['ours']:.1f}",
            f"{f['ratio']:.3f} ({f['low']:.3f} to {f['high']:.3f})",
        )
        for streams, f in speed.items()
    ]
    columns = ("streams", "mlx_lm.server, tokens/s", "ours, tokens/s", "ours / mlx_lm.server")
    return Table("Decode speed of all streams together, the model", columns, rows)


def _memory_table(memory: Mapping[str, Any]) -> Table:
    sizes = memory["megabytes"]
    row = (memory["requests"], f"{sizes[0]:.0f}", f"{sizes[-1]:.0f}", f"{memory['growth']:+.1f}")
    columns = ("requests", "MB after the first", "MB at the end", "MB more than after a fifth")
    return Table("Resident memory of serve, a random hybrid", columns, [row])
