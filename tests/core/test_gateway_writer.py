"""The writer: batches, a barrier, and no loss without a word."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from agentlightning.errors import GatewayError, StoreError
from agentlightning.gateway.writer import Writer
from agentlightning.schema import Completion


def record(name: str) -> Completion:
    ids = np.array([1], np.int32)
    return Completion(name, None, "agent", None, "m", None, None, ids, ids, np.array([-1], np.float32), "stop", {}, {})


class Memory:
    """A store that keeps what it gets, refuses records named in `bad`, and fails `failures` times first."""

    url = "memory:"

    def __init__(self, bad: str = "", failures: int = 0) -> None:
        self.bad, self.failures = bad, failures
        self.batches: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()

    def add(self, spans: Any = (), completions: Any = (), rewards: Any = ()) -> None:
        self.open.wait()
        if self.failures:
            self.failures -= 1
            raise StoreError("the database is locked")
        names = [completion.id for completion in completions]
        if self.bad in names:
            raise StoreError(f"{self.bad} cannot be stored")
        self.batches.append(names)


def writer(store: Memory, waits: list[float] | None = None) -> Writer:
    made = Writer(store, sleep=(waits if waits is not None else []).append)  # type: ignore[arg-type]
    made.start()
    return made


def test_flush_returns_when_all_is_committed_and_batches_are_shared() -> None:
    store = Memory()
    made = writer(store)
    store.open.clear()
    made.put(record("0"))
    flushed = threading.Event()
    waiting = threading.Thread(target=lambda: (made.flush(), flushed.set()))
    waiting.start()
    for i in range(1, 100):
        made.put(record(str(i)))
    assert not flushed.wait(0.02), "flush must not return before the commit"
    store.open.set()
    waiting.join()
    made.flush()
    assert [name for batch in store.batches for name in batch] == [str(i) for i in range(100)]
    assert len(store.batches) <= 3
    made.close()


def test_a_flush_of_nothing_returns_at_once() -> None:
    made = writer(Memory())
    made.flush()
    made.close()
    made.close()


def test_a_store_that_recovers_loses_nothing() -> None:
    store, waits = Memory(failures=3), list[float]()
    made = writer(store, waits)
    made.put(record("a"), record("b"))
    made.flush()
    assert store.batches == [["a", "b"]] and waits == [0.1, 0.2, 0.4]
    made.close()


def test_one_record_that_is_refused_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    store = Memory(bad="b")
    made = writer(store)
    made.put(record("a"), record("b"), record("c"))
    with pytest.raises(GatewayError, match="1 records of model calls could not be stored .*b cannot be stored.*mend"):
        made.flush()
    assert store.batches == [["a"], ["c"]]
    made.put(record("d"))
    made.flush()
    assert store.batches[-1] == ["d"], "the failure was told once; the writer goes on"
    assert any("model call b is lost" in r.getMessage() for r in caplog.records)
    made.close()


def test_close_stores_what_is_left_and_later_records_are_told() -> None:
    store = Memory()
    made = writer(store)
    made.put(record("a"))
    made.close()
    assert store.batches == [["a"]]
    made.put(record("late"))
    with pytest.raises(GatewayError, match="the gateway was closed"):
        made.flush()


def test_many_threads_hand_in_at_once() -> None:
    store = Memory()
    made = writer(store)

    def work(i: int) -> None:
        for j in range(50):
            made.put(record(f"{i}-{j}"))
        made.flush()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n for b in store.batches for n in b) == sorted(f"{i}-{j}" for i in range(8) for j in range(50))
    made.close()
