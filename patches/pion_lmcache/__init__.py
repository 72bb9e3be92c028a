"""Pion for engines that are not MLX: prefixes by name, and LMCache's chunks by key.

`PionStore` stores and fetches rows layer by layer; `LMCacheRemoteBackend` keeps opaque chunks in
the keyspace. `pion_lmcache.connector` and `pion_lmcache.l2_adapter` are LMCache's plugins, the only
modules here that need LMCache. Nothing here imports MLX.
"""

from pion_lmcache.backend import LMCacheRemoteBackend
from pion_lmcache.store import PionStore

__all__ = ["LMCacheRemoteBackend", "PionStore"]
