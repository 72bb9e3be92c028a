"""Restoring a match on the server's own machine: each segment comes as a file that is lent.

The rows are read from the files straight to where they belong, head by head, in one array a piece
for the whole match. The server has compared every block and every state with the checksums of the
manifest that the match was found by, which are part of what the file is asked for by.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Self, cast

import mlx.core as mx

from pion_patches.cache_rebuild import CacheImage, RowPiece
from pion_patches.pieces import HeadPiece, dtype_named
from pion_vllm_mlx.lent import ROOM, Tensors, tensors_of
from pion_vllm_mlx.lineage.blocks import BLOCK
from pion_vllm_mlx.lineage.fetching import State, image_of, receipt_of
from pion_vllm_mlx.lineage.match import Link, Match
from pion_vllm_mlx.lineage.records import Segment
from pion_vllm_mlx.manifest_fields import Blob, Rows
from pion_vllm_mlx.pieces import Landing
from pion_vllm_mlx.tally import Tally
from pion_vllm_mlx.transport import Command, Patience
from pion_vllm_mlx.transport.local import Loan, LocalLane, NotLent

#: Files a match may take; one of more segments comes over the network.
MOST_FILES: Final = 128
#: Bytes they may take together; the files of a server take 1 GiB unless it was told otherwise.
MOST_BYTES: Final = 15 << 26
_VIEWS_A_CALL: Final = 512
_LONGEST_HEADER: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Unmade:
    """Nothing came; `commands` have the server make the files for the next time."""

    local: LocalLane
    commands: tuple[Command, ...]

    def order(self) -> None:
        """Send them. Not before the rows were fetched: the two slow each other down."""
        for command in self.commands:
            self.local.tell(command)


def try_to_borrow(
    local: LocalLane | None, match: Match, patience: Patience, tally: Tally
) -> CacheImage | Unmade | None:
    """As `borrow_match`; None where files cannot be had, and why not is counted."""
    if local is None:
        return None
    try:
        found = borrow_match(local, match, patience)
    except NotLent as reason:
        tally.add_not_lent(reason.reason)
        return None
    if isinstance(found, Unmade):
        tally.add_not_lent("unmade")
    return found


def borrow_match(local: LocalLane, match: Match, patience: Patience) -> CacheImage | Unmade:
    """The cache image of `match.tokens` tokens from lent files, in one round trip.

    Raises NotLent where they cannot be had or are not sound, Miss, TransportError.
    """
    last = match.links[-1]
    links = [link for link in match.links if any(link.segment.pieces())]
    layouts = [FileLayout.of_rows(link.segment) for link in links]
    holders = [(link.name, link.segment.gen) for link in links]
    if match.state_gen:
        layouts.append(FileLayout.of_state(last.segment))
        holders.append((match.asked.state_at(match.tokens), match.state_gen))
    if len(layouts) > MOST_FILES or match.nbytes > MOST_BYTES:
        raise NotLent("large", f"{match.nbytes} bytes in {len(layouts)} files")
    with ExitStack() as stack:
        loans = local.borrow_each([name for name, _ in holders], patience)
        for loan in loans:
            if loan is not None:
                stack.callback(loan.close)
        files = [
            loan if loan is not None and loan.digest == layout.digest else None
            for loan, layout in zip(loans, layouts, strict=True)
        ]
        if not all(files):
            wanted = zip(holders, layouts, files, strict=True)
            return Unmade(
                local,
                tuple(order_of(*holder, layout) for holder, layout, file in wanted if file is None),
            )
        image = _read(match, links, layouts, cast(list[Loan], files))
    for command in receipt_of(match):
        local.tell(command)
    return image


def _read(
    match: Match, links: Sequence[Link], layouts: Sequence[FileLayout], files: Sequence[Loan]
) -> CacheImage:
    """`layouts`, `files`: of the rows of each link, and of the state behind them if any."""
    state = State(match)
    try:
        places = [layout.places(file) for layout, file in zip(layouts, files, strict=True)]
        rows = _Rows(layouts[0], sum(link.read for link in match.links))
        before = 0
        for link, layout, file, at in zip(links, layouts, files, places, strict=False):
            rows.read(file, layout, at, link.read, before)
            before += link.read
        blobs = [bytearray(blob.nbytes) for blob in state.blobs]
        for blob, data in zip(state.blobs, blobs, strict=True):
            _fill([memoryview(data)], files[-1], places[-1][f"s.{blob.layer}"])
        state.take(blobs)
        return image_of(match, rows.tokens, rows.piece, state)
    except OSError as error:
        raise NotLent("unreadable", str(error)) from error
    except (ValueError, KeyError) as error:
        raise NotLent("unsound", str(error)) from error


def order_of(name: bytes, gen: int, layout: FileLayout) -> Command:
    """The command that has a file of a record made, as fill `gen` brought it."""
    return Command.of("KV.PREFIX.LEND", name, gen, layout.text)


class FileLayout:
    """What a file holds: a segment's rows, under the checksums of its blocks, or its state."""

    def __init__(
        self, rows: int, sides: Sequence[Tensors], blobs: Sequence[Blob], sums: str
    ) -> None:
        self.rows, self.sides, self._blobs = rows, sides, blobs
        lines = [tensors.line for tensors in sides]
        if lines:
            lines.append(f"b {BLOCK} {sums}")
        lines += [f"s {blob.layer} {blob.nbytes} {blob.checksum}" for blob in blobs]
        self.text = "\n".join(lines).encode()
        self.digest = hashlib.blake2b(self.text, digest_size=16).digest()

    @classmethod
    def of_rows(cls, segment: Segment) -> Self:
        """Raises NotLent for rows that no file can hold."""
        pieces = segment.pieces()
        sides = [tensors_of(side[0], segment.leaves[at], rows) for side, at, rows in pieces]
        return cls(len(segment.ids), sides, (), "".join(segment.sums))

    @classmethod
    def of_state(cls, segment: Segment) -> Self:
        """That of the state at its end."""
        return cls(0, (), [leaf.blob for leaf in segment.leaves if leaf.blob is not None], "")

    def places(self, loan: Loan) -> dict[str, int]:
        """Where in the file each tensor begins. Raises ValueError for any other file, OSError."""
        length = int.from_bytes(os.pread(loan.fd, 8, 0), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(os.pread(loan.fd, length, 8))
        places, at = {}, 0
        for name, dtype, shape, nbytes in self._tensors():
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
            if header.pop(name, None) != entry:
                raise ValueError(f"{name} is not what was asked for")
            places[name] = 8 + length + at
            at += nbytes
        if header:
            raise ValueError("more tensors than were asked for")
        return places

    def _tensors(self) -> Iterator[tuple[str, str, list[int], int]]:
        """Name, dtype, shape and bytes of each tensor, in the order of the file."""
        for side in self.sides:
            for index, (code, width, row_bytes) in enumerate(side.stored):
                shape = [1, side.heads, self.rows, width]
                yield f"{side.name}.{index}", code, shape, side.heads * self.rows * row_bytes
        for blob in self._blobs:
            yield f"s.{blob.layer}", "U8", [blob.nbytes], blob.nbytes


class _Rows:
    """The rows of a match in memory of MLX arrays: head-major, or PACKED to be decoded."""

    def __init__(self, layout: FileLayout, tokens: int) -> None:
        self.tokens = tokens
        self._sides = layout.sides
        #: Rows a head has room for: those of caches that grow are appended to in place.
        self._length = {side.name: tokens + (ROOM if side.grows else 0) for side in self._sides}
        sizes = [
            side.heads * self._length[side.name] * row_bytes
            for side in self._sides
            for _, _, row_bytes in side.stored
        ]
        arrays = [mx.zeros((size,), dtype=mx.uint8) for size in sizes]
        mx.eval(arrays)
        taken = iter(arrays)
        self._arrays = {side.name: [next(taken) for _ in side.parts] for side in self._sides}
        self._views = {
            name: [memoryview(cast(Any, array)) for array in each]
            for name, each in self._arrays.items()
        }

    def read(
        self, file: Loan, layout: FileLayout, places: dict[str, int], rows: int, before: int
    ) -> None:
        """The first `rows` rows of a segment, behind the `before` rows already here.

        Raises OSError, also for a file that ends early.
        """
        runs: list[tuple[int, memoryview]] = []
        for side in layout.sides:
            for index, (_, _, width) in enumerate(side.stored):
                place, view = places[f"{side.name}.{index}"], self._views[side.name][index]
                for head in range(side.heads):
                    to = (head * self._length[side.name] + before) * width
                    source = place + head * layout.rows * width
                    runs.append((source, view[to : to + rows * width]))
        for at, views in _joined(runs):
            _fill(views, file, at)

    def piece(self, side: str, at: int, rows: Rows) -> RowPiece:
        """Keys or values of a leaf."""
        tensors = next(each for each in self._sides if each.name == f"{side[0]}.{rows.layer}")
        arrays = self._arrays[tensors.name]
        if not tensors.turned:
            whole = Rows(rows.layer, self.tokens, rows.layout, rows.store, "")
            landing = Landing(whole)
            landing.adopt(arrays[0])
            return landing.piece()
        length = self._length[tensors.name]
        parts = (
            array.view(dtype_named(dtype)).reshape(1, tensors.heads, length, width)
            for array, (dtype, width) in zip(arrays, tensors.parts, strict=True)
        )
        return HeadPiece(tuple(parts), rows.layout.fmt, length - self.tokens)


def _joined(runs: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Places that follow one another in the file, as what one call can read."""
    start, end = 0, -1
    views: list[memoryview] = []
    for at, view in runs:
        if views and (at != end or len(views) == _VIEWS_A_CALL):
            yield start, views
            views = []
        if not views:
            start = end = at
        views.append(view)
        end += len(view)
    if views:
        yield start, views


def _fill(views: list[memoryview], file: Loan, at: int) -> None:
    """Read what stands at `at` into the views, one after another.

    Read, not mapped: a file that is cut short, or a failing disk, is an error and no signal.
    """
    left = [view for view in views if len(view)]
    while left:
        count = os.preadv(file.fd, left, at)
        if not count:
            raise OSError("the file ends before its rows")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
