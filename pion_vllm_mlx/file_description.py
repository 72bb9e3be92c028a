"""What an exported prompt cache file says of itself, in the metadata mlx-lm keeps for writers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError, safe_open

from pion_vllm_mlx.arguments import check_ids
from pion_vllm_mlx.manifest import Manifest

#: Tokens a chunk of mlx-lm's own prefill, for files that say nothing.
MLX_LM_STEP: Final = 2048
#: The header of a safetensors file has to be read whole, by some readers up to a megabyte only.
_LONGEST: Final = 900_000


@dataclass(frozen=True, slots=True)
class FileDescription:
    """Whose state a file holds. None where it does not say, as in a file mlx-lm wrote by itself."""

    ids: tuple[int, ...] | None = None
    fingerprint: str | None = None
    prefill_ms: int = 0
    prefill_step: int = MLX_LM_STEP


def describe(manifest: Manifest) -> dict[str, str]:
    """A stored prefix's own description as a writer's metadata.

    The tokens are left out where there are so many that the file could become unreadable.
    """
    tokens = json.dumps(manifest.ids, separators=(",", ":"))
    return {
        "pion_model": manifest.fingerprint,
        "pion_prefill_ms": str(manifest.prefill_ms),
        "pion_prefill_step": str(manifest.prefill_step),
        **({"pion_tokens": tokens} if len(tokens) <= _LONGEST else {}),
    }


def read_description(path: Path) -> FileDescription:
    """Read a file's header; raises ValueError for a file that is no safetensors or says nonsense.

    Also raises OSError.
    """
    path.open("rb").close()  # the library's own errors do not say which file
    try:
        with safe_open(str(path), framework="numpy") as file:
            flat: dict[str, str] = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"no safetensors file: {error}") from error
    # mlx-lm 0.32 puts a writer's metadata first, 0.31 second.
    tokens, fingerprint, prefill_ms, step = (
        flat.get(f"0.pion_{name}", flat.get(f"1.pion_{name}"))
        for name in ("tokens", "model", "prefill_ms", "prefill_step")
    )
    return FileDescription(
        None if tokens is None else check_ids(json.loads(tokens), None),
        fingerprint,
        _number(prefill_ms, 0, least=0),
        _number(step, MLX_LM_STEP, least=1),
    )


def _number(text: str | None, default: int, *, least: int) -> int:
    number = default if text is None else int(text)
    if number < least:
        raise ValueError(f"{number} is not {least} or more")
    return number
