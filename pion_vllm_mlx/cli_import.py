"""Store an mlx-lm prompt cache file (mlx_lm.cache_prompt) as a prefix on a server.

Every process with the same model then gets it from get_or_prefill(tokens, namespace). A file of
mlx-lm does not say which tokens it is for, so --prompt or --tokens has to; one of `export` does.
What the file holds is compared with what the model itself computes for these tokens, since a wrong
one would answer wrongly for everybody; --trust saves that time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx.cli_options import (
    add_prefix_arguments,
    find_prefix_server,
    fingerprint_of,
    load_model,
    read_ids,
)
from pion_vllm_mlx.operations.server import Failed, fail

if TYPE_CHECKING:
    from pion_patches.pieces import CacheImage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a prompt cache (safetensors)")
    add_prefix_arguments(parser)
    parser.add_argument(
        "--kv-bits", type=int, metavar="N", help="the file was made with this; needs --trust"
    )
    parser.add_argument(
        "--kv-group-size", type=int, default=64, metavar="N", help="likewise; default: %(default)s"
    )
    parser.add_argument(
        "--trust", action="store_true", help="store the file without computing its prefix"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace what the server has under this name"
    )


def run(options: argparse.Namespace) -> int:
    from pion_patches.pieces import RebuildError, UnsupportedCache
    from pion_vllm_mlx.fill import StoreFailed
    from pion_vllm_mlx.restore import Miss
    from pion_vllm_mlx.shipment import Unstorable
    from pion_vllm_mlx.transport import TransportError

    try:
        print(_import(options))
    except (RebuildError, UnsupportedCache) as error:
        fail("import", f"{options.file} does not fit: {error}")
    except (Failed, Miss, OSError, StoreFailed, TransportError, Unstorable) as error:
        fail("import", error)
    return 0


def _import(options: argparse.Namespace) -> str:
    from pion_patches.prompt_cache_file import import_prompt_cache
    from pion_vllm_mlx.file_description import read_description
    from pion_vllm_mlx.kv_bits import KvBits
    from pion_vllm_mlx.restore import has_manifest
    from pion_vllm_mlx.ship import Outcome, store_prefix
    from pion_vllm_mlx.shipment import pack_prefix
    from pion_vllm_mlx.tier import Tier

    path: Path = options.file
    if options.kv_bits is not None and not options.trust:
        raise Failed("codes of kv_bits cannot be compared with what the model computes: --trust")
    try:
        kv_bits = KvBits(options.kv_bits, options.kv_group_size)
    except ValueError as error:
        raise Failed(error) from error
    try:
        said = read_description(path)
    except ValueError as error:
        raise Failed(f"{path} is no prompt cache: {error}") from error
    server, namespace, patience = find_prefix_server(options)
    if has_manifest(server, namespace, patience) and not options.force:
        raise Failed("the server has a prefix under this name; --force replaces it")
    model, tokenizer = load_model(options.model)
    ids = _agree(read_ids(options, model, tokenizer), said.ids)
    fingerprint = fingerprint_of(model, options.model)
    if said.fingerprint not in (None, fingerprint):
        raise Failed(f"{path} was exported for a model of other weights or settings")
    image, _ = import_prompt_cache(path, kv_bits.template(model, len(ids)), len(ids))
    prefill_ms = said.prefill_ms
    if not options.trust:
        prefill_ms = _check(model, image, ids, said.prefill_step)
    shipment = pack_prefix(
        image, ids, fingerprint, Tier(), prefill_ms=prefill_ms, prefill_step=said.prefill_step
    )
    if store_prefix(server, namespace, shipment).outcome is Outcome.BUSY:
        raise Failed("another client is storing a prefix under this name; try again later")
    return f"stored {len(ids):,} tokens ({shipment.nbytes:,} bytes) as {options.namespace}"


def _agree(given: tuple[int, ...] | None, said: tuple[int, ...] | None) -> tuple[int, ...]:
    """The tokens as the user or else the file names them."""
    ids = given or said
    if ids is None:
        raise Failed("the file does not say its tokens: give --prompt, --tokens or --tokens-file")
    if said not in (None, ids):
        raise Failed("the file was exported for other tokens than the given ones")
    return ids


def _check(model: Any, image: CacheImage, ids: tuple[int, ...], step: int) -> int:
    """Compare the file with the model; the milliseconds a prefill takes."""
    from pion_vllm_mlx.image_check import compare

    print(f"computing {len(ids):,} tokens to compare the file with …", file=sys.stderr)
    found = compare(model, image, ids, step)
    if not found.holds:
        raise Failed(
            "the file is not what this model computes for these tokens: logits after it differ by"
            f" {found.logits:.1%} of the largest, K and V rows by {found.rows:.1%} of a usual one"
        )
    return found.prefill_ms
