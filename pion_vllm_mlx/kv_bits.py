"""mlx-lm's quantised K/V caches: when a prefix has them, as `generate_step` would give it them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import CacheImage, UnsupportedCache, known_caches

#: What MLX quantises to on every device.
_BITS: Final = (2, 3, 4, 5, 6, 8)
_GROUPS: Final = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class KvBits:
    """`kv_bits`, `kv_group_size` and `quantized_kv_start` of mlx-lm; bits None: not quantised."""

    bits: int | None = None
    group_size: int = 64
    start: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for what MLX does not quantise to."""
        if self.bits is not None and (type(self.bits) is not int or self.bits not in _BITS):
            raise ValueError(f"kv_bits is None or one of {', '.join(map(str, _BITS))}")
        if self.group_size not in _GROUPS:
            raise ValueError(f"kv_group_size is one of {', '.join(map(str, _GROUPS))}")
        if type(self.start) is not int or self.start < 0:
            raise ValueError("quantized_kv_start is a number of tokens, 0 or more")

    def apply(self, cache: list[Any]) -> None:
        """Quantise, in place, what mlx-lm would quantise after a chunk."""
        quantise: Any = maybe_quantize_kv_cache
        quantise(cache, self.start, self.group_size, self.bits)

    def template(self, model: Any, tokens: int) -> list[Any]:
        """Empty caches as a prefix of `tokens` tokens has them.

        Raises UnsupportedCache for a model with windows: mlx-lm does not quantise those.
        """
        make: Any = make_prompt_cache
        template: list[Any] = make(model)
        if self.bits is not None and tokens >= self.start:
            try:
                KvBits(self.bits, self.group_size).apply(template)
            except NotImplementedError as error:
                raise UnsupportedCache(f"kv_bits: {error}", known_caches()) from error
        return template


def kv_bits_of(image: CacheImage) -> KvBits:
    """What the caches of an image were quantised to, if they were."""
    for leaf in image.leaves:
        if leaf.kind == "QuantizedKVCache":
            return KvBits(leaf.meta["bits"], leaf.meta["group_size"])
    return KvBits()
