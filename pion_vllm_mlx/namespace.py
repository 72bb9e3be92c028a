"""Names for prefixes and for models: the namespace contract, and what a model *is*.

Two different keys, on purpose. A namespace is chosen by the application and only finds a prefix;
the fingerprint says which model computed it. A manifest carries the fingerprint and the token ids,
so a namespace that names too much (two prompts, or new weights under an old name) is a miss.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import xxhash
from mlx.nn.layers.base import Module

from pion_vllm_mlx.fingerprint_file import FingerprintFile, file_identity
from pion_vllm_mlx.model_snapshot import NoSnapshot, Snapshot
from pion_vllm_mlx.model_survey import (
    Glance,
    Survey,
    netstrings,
    shape_of,
    survey_model,
    tensor_bytes,
)

#: Hashing this much costs a millisecond, less than it is worth to rely on array identity.
_ALWAYS_HASHED: Final = 8 << 20
_PROBE: Final = 64


def make_namespace(*parts: object) -> str:
    """Return `sha256("|".join(parts))`, first 32 hex digits: the design's namespace contract.

    Name everything the prefix depends on: model, tokenizer, RoPE settings, format, adapter, prompt
    text. Parts that are no strings are taken as `str(part)`; bytes raise TypeError.

    The parts are joined, not length-prefixed, because other clients compute the same key: parts
    that contain "|" themselves can give one key for two meanings. Such a collision costs speed,
    never correctness: token ids and model fingerprint in the manifest turn it into a miss.
    """
    for part in parts:
        if isinstance(part, bytes | bytearray | memoryview):
            raise TypeError("namespace parts are text; decode bytes first")
    return hashlib.sha256("|".join(str(part) for part in parts).encode()).hexdigest()[:32]


@dataclass(slots=True)
class _Known:
    glance: Glance
    snapshot: Snapshot | None
    content: str | None
    fingerprint: str

    def still_holds(self, model: Module) -> bool:
        """Whether the model is the same: its parts, and in a small one its weights, by content."""
        return self._shows_the_same(model) and (
            self.content is None or self.content == _content(self.glance.arrays())
        )

    def _shows_the_same(self, model: Module) -> bool:
        snapshot = self.snapshot
        if snapshot is not None and snapshot.still_shows(model):
            return True
        same = self.glance.still_shows(model)
        if same and snapshot is not None:
            self.snapshot = _snapshot_of(model)
        return same


def _snapshot_of(model: Module) -> Snapshot | None:
    try:
        return Snapshot(model)
    except NoSnapshot:
        return None


_known: dict[int, _Known] = {}


def model_fingerprint(model: Module, source: str | Path | None = None) -> str:
    """Return the sha256 hex of what decides a model's K/V: code, configuration, RoPE, weights.

    Every field is tagged and length-prefixed: module classes, their plain attributes (RoPE base
    and scaling, LoRA scales, …), configuration dataclasses, and name, shape, dtype and xxh3-128
    of the bytes of every tensor, adapters and private tables included.

    The answer is remembered for the model object as long as it holds the very same arrays.
    Models of up to 8 MB are hashed anew each time; in a larger one a weight written *in place*
    (`weight[0] = x`) goes unseen: call `forget_fingerprint(model)` after such a write.

    `source`: the folder or file the weights were loaded from. Then the answer is also kept in
    the user's cache folder under the files' identity (path, size, mtime, inode) and samples of
    every tensor, so that the next process does not read gigabytes again.
    """
    known = _known.get(id(model))
    if known is not None and known.still_holds(model):
        return known.fingerprint
    survey = survey_model(model)
    small = survey.nbytes <= _ALWAYS_HASHED
    fingerprint = _hash_model(survey, None if small else source)
    glance = Glance(model)
    content = _content(glance.arrays()) if small else None
    weakref.finalize(model, _known.pop, id(model), None).atexit = False
    _known[id(model)] = _Known(glance, _snapshot_of(model), content, fingerprint)
    return fingerprint


def forget_fingerprint(model: Module) -> None:
    """Have the next `model_fingerprint(model)` hash the weights again."""
    _known.pop(id(model), None)


def _hash_model(survey: Survey, source: str | Path | None) -> str:
    if source is None:
        return _fingerprint(survey)
    identity = file_identity(Path(source))
    if identity is None:
        return _fingerprint(survey)
    # Samples of the weights in memory tie the key to *this* model, not merely to these files.
    probes = "".join(_probe(array) for _, array in survey.tensors)
    key = hashlib.sha256(netstrings(("source", identity, survey.structure, probes))).hexdigest()
    shelf = FingerprintFile()
    kept = shelf.get(key)
    if kept is not None:
        return kept
    fingerprint = _fingerprint(survey)
    shelf.put(key, fingerprint)
    return fingerprint


def _fingerprint(survey: Survey) -> str:
    digest = hashlib.sha256(netstrings(("pion-model", "1", "structure", survey.structure)))
    for path, array in survey.tensors:
        content = xxhash.xxh3_128_hexdigest(tensor_bytes(array))
        digest.update(netstrings(("tensor", path, shape_of(array), content)))
    return digest.hexdigest()


def _content(arrays: Iterable[mx.array]) -> str:
    """One hash of the bytes of all arrays, in their order."""
    hasher = xxhash.xxh3_128()
    for array in arrays:
        hasher.update(tensor_bytes(array))
    return hasher.hexdigest()


def _probe(array: mx.array) -> str:
    """A few bytes from the start, the middle and the end of a tensor, hashed."""
    view = tensor_bytes(array)
    middle = len(view) // 2
    sample = bytes(view[:_PROBE]) + bytes(view[middle : middle + _PROBE]) + bytes(view[-_PROBE:])
    return xxhash.xxh3_64_hexdigest(sample)
