"""The one model a server serves, and whether it is there yet."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.server import ModelProvider

log = logging.getLogger("pion_vllm_mlx")


class Provider(ModelProvider):
    """Loads its model on the generation thread. `ready` is set when that has worked or failed.

    `prepare(provider)` is called in between, on that thread.
    """

    def __init__(
        self, flags: argparse.Namespace, prepare: Callable[[Any], None] | None = None
    ) -> None:
        initialise: Any = super().__init__
        initialise(flags)
        self._prepare = prepare
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self.seconds = 0.0

    def load_default(self) -> None:
        started = time.monotonic()
        load: Any = super().load_default
        try:
            load()
            if self._prepare is not None:
                self._prepare(self)
        except Exception as error:
            self.failure = error
            raise
        finally:
            self.seconds = time.monotonic() - started
            self.ready.set()


def warm_up(provider: Provider) -> None:
    """Do once what otherwise the first request would: load weights, compile kernels and template.

    On the generation thread. Whatever fails here fails again where somebody is told.
    """
    model: Any = provider.model
    try:
        cache = make_prompt_cache(model)
        # A piece of a prompt and a token of an answer: these are different kernels.
        for tokens in (2, 1):
            mx.eval(model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache))
        tokenizer: Any = provider.tokenizer
        if tokenizer.has_chat_template:
            question = [{"role": "user", "content": "?"}]
            tokenizer.apply_chat_template(question, add_generation_prompt=True)
    except Exception as error:
        log.debug("the model could not be warmed up: %r", error)
