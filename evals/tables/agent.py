"""An agent's session of 20 turns: cold, in session, after a restart, and a second session.

``pion-vllm-mlx serve`` and mlx_lm.server as it is play the same session: a system prompt of about
600 tokens, tool loops, answers that go into the next prompt; then a second session with another
first question. Ours plays it again and is killed (SIGKILL) and started again before some turns. At
those turns a server that keeps nothing computes the same prompts whole: all answers must be the
same.

A hybrid model of random weights (the layer pattern of Qwen3.5-4B) plays it, too. What it says and
how long it takes means nothing and is not given; how many tokens it computes does.

Expected: after a restart no more than two blocks (128 tokens) beyond what is new in a turn are
computed, plain and hybrid alike; mlx_lm.server computes everything then.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from evals.agent_servers import our_server, stock_server, wait_until_written
from evals.agent_session import Turn, ask, first_messages, play
from evals.findings import Bar, Findings, Table
from evals.random_models import random_hybrid
from evals.setting import Setting

TURNS: Final = 20
BLOCK: Final = 64
#: Beyond what is new in a turn.
MOST_BEYOND: Final = 2 * BLOCK
_OTHER: Final = "Write a test for the parser instead, and tell me which line it covers."
_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_VOCAB: Final = 49152


@dataclasses.dataclass(frozen=True)
class Session:
    """Turns by server and occasion; keys are turn numbers, from 0."""

    stock: list[Turn]
    ours: list[Turn]
    #: The same session with kills before some turns: those turns.
    restarted: dict[int, Turn]
    cold: dict[int, Turn]
    second: Turn
    second_restarted: Turn
    second_stock: Turn


def run(setting: Setting) -> Findings:
    return measure(setting, setting.count(TURNS, 2))


def measure(setting: Setting, turns: int) -> Findings:
    """A session of so many turns with the setting's model, and with a random hybrid."""
    with tempfile.TemporaryDirectory(prefix="pion-agent-") as name:
        folder = Path(name)
        print(f"{setting.model_name}, {turns} turns", flush=True)
        plain = play_all(setting.model_path, turns, folder / "plain")
        print("a random hybrid", flush=True)
        model = hybrid_folder(Path(setting.model_path), folder / "model", setting.seed)
        hybrid = play_all(str(model), turns, folder / "hybrid")
    return _findings(plain, hybrid, turns)


def play_all(model: str, turns: int, folder: Path) -> Session:
    """The session on all servers; each writes a log into `folder`."""
    folder.mkdir()
    stops = sorted({turns // 4, turns // 2, turns - 1} - {0})
    with stock_server(model, folder / "stock.log") as port:
        stock = _shown("mlx_lm.server", list(play(port, turns)))
        second_stock = ask(port, first_messages(_OTHER))
    log = folder / "ours.log"
    with our_server(model, log, "--pion-dir", str(folder / "calm")) as port:
        ours = _shown("ours", list(play(port, turns)))
        second = ask(port, first_messages(_OTHER))
    kept = ("--pion-dir", str(folder / "killed"))
    played: list[Turn] = []
    for stop in [*stops, turns]:
        with our_server(model, log, *kept) as port:
            played += play(port, stop, played)
            wait_until_written(port)
    restarted = {stop: _shown("after a SIGKILL", [played[stop]])[0] for stop in stops}
    with our_server(model, log, *kept) as port:
        second_restarted = ask(port, first_messages(_OTHER + " Be quick."))
    with our_server(model, log, "--no-pion", "--prompt-cache-size", "0") as port:
        cold = {turn: ask(port, played[turn].messages) for turn in [0, *restarted]}
    return Session(stock, ours, restarted, cold, second, second_restarted, second_stock)


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
    """Whether every answer that was also computed cold is the same, and every prompt."""
    found = {0: session.ours[0], **session.restarted}
    return all(
        session.ours[turn].messages == cold.messages
        and session.ours[turn].answer == found[turn].answer == cold.answer
        for turn, cold in session.cold.items()
    )


def _shown(name: str, turns: Sequence[Turn]) -> list[Turn]:
    computed = sum(turn.computed for turn in turns)
    print(f"  {name}: {len(turns)} turns, {computed:,} prompt tokens computed", flush=True)
    return list(turns)


def _findings(plain: Session, hybrid: Session, turns: int) -> Findings:
    ratio = median(
        turn.first_seconds / plain.ours[n].first_seconds for n, turn in plain.restarted.items()
    )
    return Findings(
        figures={
            "turns": turns,
            "plain": _figures(plain),
            "hybrid": _figures(hybrid),
            "restart_ttft_ratio": ratio,
        },
        tables=[
            _tokens_table(plain, "the model"),
            _tokens_table(hybrid, "a random hybrid"),
            _times(plain),
        ],
        bars=[
            Bar("answers are those of a cold server", float(same_answers(plain)), 1.0),
            Bar("the hybrid's answers, too", float(same_answers(hybrid)), 1.0),
            Bar(
                "tokens beyond the new turn after a restart, spared of 128",
                float(MOST_BEYOND - beyond(plain)),
                0.0,
            ),
            Bar("the same of the hybrid", float(MOST_BEYOND - beyond(hybrid)), 0.0),
            Bar(
                "in session over after a restart, time to first token",
                1 / ratio,
                1 / 1.1,
                decides=False,
            ),
        ],
    )


def _figures(session: Session) -> dict[str, Any]:
    def counts(turn: Turn) -> list[int]:
        return [turn.prompt, turn.cached]

    return {
        "stock": [counts(turn) for turn in session.stock],
        "ours": [counts(turn) for turn in session.ours],
        "ours_seconds": [turn.first_seconds for turn in session.ours],
        "stock_seconds": [turn.first_seconds for turn in session.stock],
        "restarted": {str(n): counts(turn) for n, turn in session.restarted.items()},
        "cold_seconds": {str(n): turn.first_seconds for n, turn in session.cold.items()},
        "second": counts(session.second),
        "second_restarted": counts(session.second_restarted),
        "second_stock": counts(session.second_stock),
        "beyond_new": beyond(session),
        "same_answers": same_answers(session),
    }


def _tokens_table(session: Session, model: str) -> Table:
    def row(what: str, turns: Sequence[Turn]) -> tuple[str, int, int, int]:
        return what, len(turns), sum(t.prompt for t in turns), sum(t.computed for t in turns)

    rows = [
        row("cold", list(session.cold.values())),
        row("mlx_lm.server, in session", session.stock),
        row("ours, in session", session.ours),
        row(
            "ours, in session, the turns that follow", [session.ours[n] for n in session.restarted]
        ),
        row("ours, first turn after a SIGKILL", list(session.restarted.values())),
        row("mlx_lm.server, second session", [session.second_stock]),
        row("ours, second session", [session.second]),
        row("ours, second session after a SIGKILL", [session.second_restarted]),
    ]
    columns = ("occasion", "turns", "prompt tokens", "of them computed")
    return Table(f"Prompt tokens of an agent's session, {model}", columns, rows)


def _times(session: Session) -> Table:
    def row(what: str, turns: Sequence[Turn]) -> tuple[str, int, str]:
        return what, len(turns), f"{median(t.first_seconds for t in turns) * 1e3:,.0f} ms"

    rows = [
        row(
            "cold, the same turns as after a SIGKILL", [session.cold[n] for n in session.restarted]
        ),
        row("mlx_lm.server, in session", session.stock[1:]),
        row("ours, in session", session.ours[1:]),
        row(
            "ours, in session, the turns that follow", [session.ours[n] for n in session.restarted]
        ),
        row("ours, first turn after a SIGKILL", list(session.restarted.values())),
        row("ours, second session", [session.second]),
        row("ours, second session after a SIGKILL", [session.second_restarted]),
    ]
    return Table("Time to first token, median", ("occasion", "turns", "first token"), rows)
