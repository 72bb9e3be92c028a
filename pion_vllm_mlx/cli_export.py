"""Write a prefix from a server into an mlx-lm prompt cache file.

mlx_lm.generate --prompt-cache-file and mlx_lm.models.cache.load_prompt_cache read it; `import` puts
it into another server. The tokens are those the prefix was stored for; --prompt or --tokens only
makes sure of them. Only what was stored without loss is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from pion_vllm_mlx.cli_options import (
    add_prefix_arguments,
    find_prefix_server,
    fingerprint_of,
    load_model,
    read_ids,
)
from pion_vllm_mlx.operations.server import Failed, fail

_REASONS: Final = {
    "absent": "the server has no prefix of that name",
    "ids": "the prefix is for other tokens than the given ones",
    "length": "the prefix is for other tokens than the given ones",
    "model": "the prefix was computed by another model, or by other weights or settings",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    add_prefix_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(options: argparse.Namespace) -> int:
    from pion_patches.pieces import RebuildError, UnsupportedCache
    from pion_vllm_mlx.restore import Miss
    from pion_vllm_mlx.transport import TransportError

    try:
        print(_export(options))
    except Miss as miss:
        fail("export", _REASONS.get(miss.reason, f"the prefix cannot be used: {miss}"))
    except (Failed, OSError, RebuildError, TransportError, UnsupportedCache) as error:
        fail("export", error)
    return 0


def _export(options: argparse.Namespace) -> str:
    from pion_patches.prompt_cache_file import export_prompt_cache
    from pion_vllm_mlx.file_description import describe
    from pion_vllm_mlx.kv_bits import kv_bits_of
    from pion_vllm_mlx.restore import check_wanted, fetch_prefix, find_any_prefix
    from pion_vllm_mlx.tier import Tier

    path: Path = options.file
    if path.exists() and not options.force:
        raise Failed(f"{path} exists; --force replaces it")
    if not path.absolute().parent.is_dir():
        raise Failed(f"there is no folder {path.absolute().parent}")
    server, namespace, patience = find_prefix_server(options)
    found = find_any_prefix(server, namespace, patience)
    model, tokenizer = load_model(options.model)
    ids = read_ids(options, model, tokenizer) or found.manifest.ids
    check_wanted(found.manifest, ids, fingerprint_of(model, options.model), Tier())
    image = fetch_prefix(server, namespace, found, patience.first_byte, credited=False).image
    # The first two are what mlx_lm.generate wants to know.
    mlx_lm = {"model": options.model, "tokenizer_config": "{}"}
    metadata = mlx_lm | describe(found.manifest)
    export_prompt_cache(path, kv_bits_of(image).template(model, len(ids)), image, metadata)
    return f"wrote {len(ids):,} tokens ({path.stat().st_size:,} bytes) to {path}"
