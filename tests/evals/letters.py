"""A tokenizer of letters, with BOS, EOS and a chat template that writes BOS itself."""

from __future__ import annotations

from collections.abc import Sequence

_LETTERS = "abcdefghijklmnopqrstuvwxyzAI9(). \n:"
BOS, EOS = 59, 60


class LetterTokenizer:
    """One token a letter; `encode` puts BOS in front unless told not to."""

    bos_token_id = BOS

    def __init__(self, template: bool = False) -> None:
        self.chat_template = "letters" if template else None
        self.eos_token_ids = {EOS}
        #: Renders a text with BOS and encodes it with another one, as careless callers do.
        self.careless = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        parts = text.replace("<s>", "\x00")
        ids = [BOS if part == "\x00" else _number(part) for part in parts]
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("<s>" if i == BOS else "" if i == EOS else _letter(i) for i in ids)

    def apply_chat_template(
        self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False
    ) -> list[int]:
        text = "".join(f"{one['role']}: {one['content']}\n" for one in messages)
        return self.encode(f"<s>{text}assistant:", add_special_tokens=self.careless)


def _number(letter: str) -> int:
    # Other letters than those above share the numbers behind them.
    place = _LETTERS.find(letter)
    return place if place >= 0 else len(_LETTERS) + ord(letter) % (BOS - len(_LETTERS))


def _letter(number: int) -> str:
    return _LETTERS[number] if number < len(_LETTERS) else chr(0x3B1 + number - len(_LETTERS))
