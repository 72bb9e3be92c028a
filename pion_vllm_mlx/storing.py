"""What becomes of a computed prefix: stored before the call returns, after it, or not at all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, get_args

from pion_patches.cache_rebuild import CacheImage
from pion_vllm_mlx.background import Background, Job
from pion_vllm_mlx.fill import StoreFailed
from pion_vllm_mlx.ship import Outcome, store_prefix
from pion_vllm_mlx.shipment import Shipment, Unstorable, pack_prefix
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Lane, TransportError

log = logging.getLogger("pion_vllm_mlx")

Mode: TypeAlias = Literal["background", "sync", "off"]
#: Bytes of prefixes that wait to be stored.
WAITING_BYTES: Final = 1 << 30
#: The caller's next step is the first token; a store waits this share of the prefill for it.
_SHARE_OF_PREFILL: Final = 0.2
_LONGEST_DELAY: Final = 1.0


class Storing:
    """Stores prefixes through one lane, counts how that went, and never raises.

    In the background it has a lane of its own: a restore waits for no store.
    """

    def __init__(
        self, mode: Mode, lane: Lane, tier: Tier, tally: Tally, prefill_step: int, patience: float
    ) -> None:
        """`patience`: seconds that `close` and the interpreter's end wait for the stores.

        Raises ValueError for another mode or a wait that is no number of seconds.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"store is one of {', '.join(get_args(Mode))}")
        if not patience >= 0:
            raise ValueError("store_wait is a number of seconds, 0 or more")
        self.mode = mode
        self._tier = tier
        self._tally = tally
        self._prefill_step = prefill_step
        self._lane = lane.twin() if mode == "background" else lane
        self._background = Background(WAITING_BYTES, patience, self._lane.close)

    def begin(
        self,
        name: bytes,
        ids: tuple[int, ...],
        fingerprint: str,
        image: CacheImage,
        seconds: float,
        damaged: int = 0,
        then: Callable[[Lane], None] | None = None,
    ) -> Callable[[], bool]:
        """Begin to store a prefix that took `seconds` to compute.

        It goes on in what is returned, to be called once: False if it is known already that the
        prefix will not be stored.

        When it returns every array of `image` is evaluated, which need not have been before: the
        first rows are on their way by then. `damaged`: see `store_prefix`. `then` is called once
        the prefix is stored, with the lane and in the thread that stored it.
        """
        shipment = self._pack(ids, fingerprint, image, seconds)
        if shipment is None:
            image.evaluate()
            return lambda: False
        try:
            return self._start(
                name, lambda: self._send(name, shipment, damaged, then), image.nbytes, seconds
            )
        finally:
            # In the caller's thread: MLX's arrays become bytes that any thread may read.
            shipment.evaluate()
            image.evaluate()

    def _pack(
        self, ids: tuple[int, ...], fingerprint: str, image: CacheImage, seconds: float
    ) -> Shipment | None:
        """What is to be stored, its rows not computed yet; None if nothing is."""
        if self.mode == "off":
            return None
        if not self._lane.available:
            self._tally.add("stores_failed")
            return None  # nothing is worth encoding for a server that was gone a moment ago
        try:
            return pack_prefix(
                image,
                ids,
                fingerprint,
                self._tier,
                prefill_ms=round(seconds * 1000),
                prefill_step=self._prefill_step,
                wait=False,
            )
        except Exception as error:
            self._fail(error)
            return None

    def _start(
        self, key: bytes, work: Callable[[], bool], nbytes: int, seconds: float
    ) -> Callable[[], bool]:
        """Begin with `work`, or queue it; its outcome, as far as somebody waits for it."""
        if self.mode == "background":
            queued = self.run(key, work, nbytes, seconds)
            return lambda: queued
        outcome = []
        sender = threading.Thread(target=lambda: outcome.append(work()), name="pion-send")
        try:
            sender.start()
        except RuntimeError:  # no more threads
            return work

        def finish() -> bool:
            sender.join()
            return bool(outcome and outcome[0])

        return finish

    def run(self, key: object, work: Callable[[], bool], nbytes: int, seconds: float) -> bool:
        """Do a store now or in the background, by the mode; False if it failed or never will be.

        `work` answers whether it succeeded. `key`: what it is about, of which only the newest
        counts; `nbytes`: the memory it holds on to; `seconds`: how long the prefill took.
        """
        if self.mode == "off":
            return False
        if self.mode == "sync":
            return work()
        delay = min(_LONGEST_DELAY, _SHARE_OF_PREFILL * seconds)
        try:
            job = Job(key, work, nbytes, time.monotonic() + delay)
            queued, replaced = self._background.submit(job)
        except RuntimeError as error:
            self._fail(error)
            return False
        self._tally.add("stores_skipped", replaced + (not queued))
        return queued

    @property
    def lane(self) -> Lane:
        """The lane that stores go through."""
        return self._lane

    @property
    def busy(self) -> bool:
        """Whether a prefix is still being stored."""
        return self._background.busy

    def flush(self, timeout: float | None = None) -> bool:
        """Wait for the stores so far; True if all of them are done and none failed meanwhile."""
        return self._background.flush(self._background.patience if timeout is None else timeout)

    def close(self) -> None:
        """Wait for the stores as long as was agreed, then give them up and let the lane go."""
        if not self._background.flush(self._background.patience):
            self._tally.add("stores_failed", self._background.abandon())
        self._lane.close()

    def _send(
        self,
        name: bytes,
        shipment: Shipment,
        damaged: int,
        then: Callable[[Lane], None] | None,
    ) -> bool:
        started = time.perf_counter()
        try:
            receipt = store_prefix(self._lane, name, shipment, tier=self._tier, damaged=damaged)
        except StoreFailed as failure:
            if failure.code != "STALE":
                self._fail(failure)
                return False
            self._tally.add("stores_skipped")
        except Exception as error:
            self._fail(error)
            return False
        else:
            stored = receipt.outcome is Outcome.STORED
            self._tally.settle("store")
            self._tally.add("stores" if stored else "stores_skipped")
            self._tally.add("bytes_stored", receipt.nbytes)
            if then is not None:
                then(self._lane)
        finally:
            self._tally.add_seconds("store_ms_total", time.perf_counter() - started)
        return True

    def _fail(self, error: Exception) -> None:
        self._tally.add("stores_failed")
        match error:
            case TransportError():
                pass  # the lane tells about its outages
            case StoreFailed():
                self._tally.warn_once("store", "the server did not store a prefix: %s", error)
            case Unstorable():
                self._tally.warn_once("unstorable", "a prefix cannot be stored: %s", error)
            case _:
                self._tally.wonder("a prefix could not be stored", error)
