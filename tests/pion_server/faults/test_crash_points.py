"""A crash before every single file operation of a SAVE, and inside every write of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pion_server.store.key_values import LARGE
from tests.conftest import RawClient
from tests.pion_server.faults import oracle
from tests.pion_server.faults.forge import ForgedServer
from tests.pion_server.faults.injection import Fault, write_plan
from tests.pion_server.faults.load import Ledger, perform
from tests.pion_server.faults.observer import Refused, ask, observe
from tests.pion_server.faults.oracle import DIM, Act

Servers = Callable[..., ForgedServer]


def rows(seed: int, count: int = 2) -> bytes:
    return bytes([seed, 1, 2, 60] * (count * DIM))


def prefix(ns: str, fmt: str, seed: int) -> list[Act]:
    """A prefix with all that one can have."""
    acts = [oracle.register(ns, fmt, bytes(range(16)))]
    acts += [oracle.store(ns, side, fmt, 0, 0, rows(seed)) for side in oracle.SIDES]
    acts += [oracle.store(ns, "_pk", fmt, 1, 0, rows(seed + 1, 3))]
    acts += [oracle.store_state(ns, 0, bytes([seed] * 50))]
    acts += [oracle.set_key(ns, "s0", bytes([seed] * 50)), oracle.set_key(ns, "s1", b"\r\n")]
    return [*acts, oracle.set_fields(ns, "h0", {b"small": b"1", b"large": bytes([seed]) * LARGE})]


def populate(client: RawClient) -> list[Ledger]:
    ledgers = [Ledger("one"), Ledger("two"), Ledger("gone"), Ledger("late")]
    for number, ledger in enumerate(ledgers[:3]):
        perform(client, ledger, prefix(ledger.ns, ["fp16", "int8", "fp32"][number], number))
    complete(client, ledgers[0])
    perform(client, ledgers[2], [oracle.drop("gone")])
    return ledgers


def complete(client: RawClient, ledger: Ledger) -> None:
    """Write the namespace's manifest."""
    gen = perform(client, ledger, [oracle.begin(ledger.ns)])
    perform(client, ledger, [oracle.complete(ledger.ns, gen, b"a manifest")])


def write_meanwhile(client: RawClient, ledgers: list[Ledger]) -> None:
    """Writes of every kind while the snapshot is under way."""
    one, two, gone, late = ledgers
    perform(client, one, [oracle.store("one", "_pk", "fp16", 0, 1, rows(9))])
    perform(client, two, [oracle.drop("two"), oracle.store_state("two", 1, b"new")])
    perform(client, two, [oracle.delete_keys("two", "s0", "h0"), oracle.set_key("two", "s1", b"")])
    perform(client, one, [oracle.set_fields("one", "h0", {b"large": b"2"})])
    perform(client, late, prefix("late", "bf16", 7))
    perform(client, gone, [oracle.register("gone", "fp8")])


def crash_at(forged: Servers, home: Path, fault: Fault) -> bool:
    """Whether the SAVE was over before the fault struck. Everything acknowledged must be there."""
    plan = home / "plan"
    write_plan(plan)
    server = forged(directory=home / "data", faults=plan)
    ledgers = populate(server.client())
    # The snapshot waits before it is flushed, so that there are records to catch up with.
    write_plan(plan, Fault("fsync", "pion.vstore.0.tmp", sleep=0.05), fault)
    saver, writer = server.client(), server.client()
    answers: list[object] = []

    def save() -> None:
        try:
            answers.append(saver.call("KV.PREFIX.SAVE"))
        except (EOFError, OSError) as error:
            answers.append(error)

    thread = threading.Thread(target=save)
    thread.start()
    with contextlib.suppress(EOFError, OSError):
        write_meanwhile(writer, ledgers)
    thread.join(30)
    over = answers == ["OK"]
    server.kill()
    write_plan(plan)
    for _ in range(2):
        server.start()
        client = server.client()
        for ledger in ledgers:
            ledger.settle(client)
        assert not list(server.directory.glob("pion.*.tmp"))
        # What is written now must survive too, whatever the crash left behind.
        perform(client, ledgers[3], [oracle.register("late", "fp32")])
        complete(client, ledgers[3])
        server.kill()
    return over


def crash_everywhere(forged: Servers, home: Path, step: int, **how: bool) -> int:
    """Crash at each `step`th operation until a SAVE gets through; the crashes."""
    for number in range(0, 1000, step):
        (home / f"c{number}").mkdir(parents=True)
        fault = Fault("change", skip=number, times=1, **how)  # type: ignore[arg-type]
        over = crash_at(forged, home / f"c{number}", fault)
        if over:
            return number // step
    raise AssertionError("a SAVE never ended")


def test_a_crash_at_any_step_of_a_save_loses_nothing(forged: Servers, memory_path: Path) -> None:
    """Every seventh operation here, all of them in the nightly run. CASES E01."""
    crashes = crash_everywhere(forged, memory_path, 7, kill=True)
    print(f"\ncrashes before an operation of a SAVE: {crashes}")
    assert crashes >= 8


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["before", "torn"])
def test_a_crash_at_every_step_of_a_save_loses_nothing(
    forged: Servers, memory_path: Path, how: str
) -> None:
    crashes = crash_everywhere(forged, memory_path, 1, kill=True, tear=how == "torn")
    print(f"\ncrashes {how} at every operation of a SAVE: {crashes}")
    assert crashes >= 50


@pytest.mark.parametrize(
    "fault",
    [
        Fault("rename", "pion.vstore.0.tmp", kill=True),
        Fault("rename", "pion.vstore.wal.0.tmp", kill=True),
        Fault("rename", "pion.ssm.0.tmp", kill=True),
        Fault("rename", "pion.ssm.wal.0.tmp", kill=True),
        Fault("rename", "pion.snapshot.0.tmp", kill=True),
        Fault("rename", "pion.wal.0.tmp", kill=True),
        Fault("fsync", "pion.directory", skip=0, kill=True),
        Fault("fsync", "pion.directory", skip=1, kill=True),
        Fault("fsync", "pion.directory", skip=2, kill=True),
    ],
    ids=lambda fault: f"{fault.op}-{fault.name}-{fault.skip}",
)
def test_a_crash_between_the_renames_loses_nothing(
    forged: Servers, memory_path: Path, fault: Fault
) -> None:
    """Between the snapshot's rename and the log's, records already in the snapshot are skipped."""
    over = crash_at(forged, memory_path, fault)
    assert not over


def test_a_log_whose_new_name_was_not_flushed_takes_no_more_writes(
    forged: Servers, memory_path: Path
) -> None:
    """After a power loss the old log may stand under the name: nothing may rely on the new one."""
    plan = memory_path / "plan"
    write_plan(plan)
    server = forged(directory=memory_path / "data", faults=plan)
    client = server.client()
    ledgers = populate(client)
    write_plan(plan, Fault("fsync", "pion.directory", skip=1, times=1, errno=5))
    assert client.error("KV.PREFIX.SAVE").startswith("ERR KV.PREFIX.SAVE failed: ")
    assert client.error(*oracle.register("late", "fp32").words).startswith("MISCONF")
    for ledger in ledgers:
        assert observe(client, ledger.ns) == ledger.image
    server.kill()
    server.start()
    client = server.client()
    for ledger in ledgers:
        ledger.settle(client)


@pytest.mark.parametrize(
    ("op", "number"),
    [("fsync", n) for n in range(8)]
    + [("rename", n) for n in range(4)]
    + [("write", n) for n in (0, 1, 7, 30)],
)
def test_an_error_at_any_step_of_a_save_is_its_answer_and_loses_nothing(
    forged: Servers, memory_path: Path, op: str, number: int
) -> None:
    """EIO once: SAVE says so, nothing is lost, and writes go on unless a flush of names failed."""
    plan = memory_path / "plan"
    write_plan(plan)
    server = forged(directory=memory_path / "data", faults=plan)
    client = server.client()
    ledgers = populate(client)
    pattern = {"write": "pion.*.tmp"}.get(op, "pion.*")
    write_plan(plan, Fault(op, pattern, skip=number, times=1, errno=5))
    (outcome,) = ask(client, [("KV.PREFIX.SAVE",)])
    assert outcome == "OK" or outcome.text.startswith("ERR KV.PREFIX.SAVE failed: ")
    write_plan(plan)
    assert not list(server.directory.glob("pion.*.tmp"))
    late = ledgers[3]
    for act in prefix("late", "bf16", 7):
        (reply,) = ask(client, [act.words])
        if isinstance(reply, Refused):
            assert reply.text.startswith("MISCONF"), reply
            assert outcome != "OK"
            break
        late.image = act.lead(late.image)[-1]
    for ledger in ledgers:
        assert observe(client, ledger.ns) == ledger.image
    server.kill()
    server.start()
    again = server.client()
    for ledger in ledgers:
        ledger.settle(again)
    assert again.call("KV.PREFIX.SAVE") == "OK"
