"""Records reach the store in order and once; the program never waits, and nothing is lost without a word."""

from __future__ import annotations

import datetime
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agentlightning.context import Scope, use
from agentlightning.errors import NotFound, RewardError, StoreError
from agentlightning.recorder import BATCH, CurrentRecorder, Recorder
from agentlightning.schema import Outcome, Rollout, SpanKind, new_id
from agentlightning.store import open_store
from tests.fakes.sink import Sink


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def recorder(sink):
    made = Recorder(sink)
    yield made
    sink.open.set()
    sink.refuse = lambda records: None
    made._lost.clear()
    made.close()


@pytest.fixture
def attempt(recorder):
    with use(Scope(new_id(), "team", "1" * 16, recorder)) as scope:
        yield scope


def test_start_and_end(sink, recorder, attempt):
    span = recorder.start(SpanKind.TOOL, "search", attributes={"q": "x"})
    assert (span.status, span.end_ns) == ("open", None)
    recorder.end(span, attributes={"found": 3})
    recorder.flush()
    (stored,) = sink.spans
    assert (stored.id, stored.attempt_id, stored.kind) == (span.id, attempt.attempt_id, SpanKind.TOOL)
    assert (stored.path, stored.parent_id, stored.name) == ("team", "1" * 16, "search")
    assert (stored.status, stored.attributes) == ("ok", {"q": "x", "found": 3})
    assert stored.start_ns <= (stored.end_ns or 0)


def test_path_and_parent_may_be_given(sink, recorder, attempt):
    recorder.end(recorder.start("llm", "m", path="other", parent_id="2" * 16))
    recorder.end(recorder.start("llm", "m", scope=Scope("f" * 32, "elsewhere")))
    recorder.flush()
    assert [(s.path, s.parent_id) for s in sink.spans] == [("other", "2" * 16), ("elsewhere", None)]
    assert sink.spans[1].attempt_id == "f" * 32


def test_a_span_that_ends_at_once_is_written_once(sink, attempt):
    sink.open.clear()
    recorder = Recorder(sink)
    for _ in range(100):
        recorder.end(recorder.start("tool", "t"))
    sink.open.set()
    recorder.close()
    assert len(sink.spans) == 100
    assert sum(sink.batches) <= 101, "at most the first was caught half-way"


def test_spans_are_in_the_order_in_which_they_began(sink, recorder, attempt):
    outer = recorder.start("agent", "outer")
    inner = recorder.start("llm", "inner")
    recorder.end(inner)
    recorder.end(outer)
    recorder.flush()
    assert [span.name for span in sink.spans] == ["outer", "inner"]


def test_open_spans_are_stored_as_open(sink, recorder, attempt):
    """B101: what never ends is in the trace as such."""
    recorder.start("tool", "never ends")
    recorder.flush()
    (span,) = sink.spans
    assert (span.status, span.end_ns) == ("open", None)


def test_the_second_end_changes_nothing(sink, recorder, attempt):
    span = recorder.start("tool", "t")
    recorder.end(span, error=ValueError("first"))
    recorder.end(span)
    recorder.flush()
    assert (sink.spans[0].status, sink.spans[0].error) == ("error", "ValueError: first")


def test_what_was_stored_does_not_change_with_the_callers_objects(sink, recorder, attempt):
    span = recorder.start("tool", "t", attributes={"a": 1})
    recorder.flush()
    span.attributes["a"] = 2
    span.name = "other"
    assert (sink.spans[0].attributes, sink.spans[0].name) == ({"a": 1}, "t")


def test_b16_attributes_may_be_anything(sink, recorder, attempt):
    circle: list[Any] = []
    circle.append(circle)
    values = {"day": datetime.date(2020, 1, 1), "bytes": b"\xff", "nan": float("nan"), "set": {1}, "circle": circle}
    recorder.end(recorder.start("tool", "\ud800", attributes={**values, 7: "key"}), error="\ud800")
    recorder.flush()
    (span,) = sink.spans
    assert span.attributes["day"] == "datetime.date(2020, 1, 1)" and span.attributes["7"] == "key"
    assert (span.name, span.error) == ("?", "?")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("mute")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("x"), "ValueError: x"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Mute(), "Mute: <str() failed: RuntimeError>"),
        ("text", "text"),
    ],
)
def test_errors_are_told(sink, recorder, attempt, error, told):
    recorder.end(recorder.start("tool", "t"), error=error)
    recorder.flush()
    assert (sink.spans[0].status, sink.spans[0].error) == ("error", told)


def test_rewards(sink, recorder, attempt):
    recorder.reward(1, name="final", target="agent:team", source="return")
    recorder.reward(0.5, attempt_id="f" * 32)
    recorder.flush()
    first, second = sink.rewards
    assert (first.value, first.name, first.target, first.source) == (1.0, "final", "agent:team", "return")
    assert (first.attempt_id, second.attempt_id) == (attempt.attempt_id, "f" * 32)
    with pytest.raises(RewardError):
        recorder.reward(float("nan"))


def test_outside_an_attempt_nothing_is_stored(sink, recorder):
    recorder.end(recorder.start("tool", "t"))
    recorder.event("message", "m")
    recorder.reward(1.0)
    recorder.flush()
    assert sink.batches == []


def test_flush_is_a_barrier(sink, recorder, attempt):
    """B7: whatever was handed in before is there after, a thousand times."""
    for number in range(1000):
        recorder.event("message", str(number))
        recorder.flush()
        assert sink.spans[-1].name == str(number)


def test_many_threads(sink, recorder):
    def work(number: int) -> None:
        with use(Scope(f"{number:032x}", recorder=recorder)):
            for _ in range(50):
                recorder.end(recorder.start("tool", str(number)))
                recorder.reward(number)
            recorder.flush()
            mine = [span for span in list(sink.spans) if span.name == str(number)]
            assert len(mine) == 50 and all(span.end_ns for span in mine)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(sink.rewards) == 400
    assert {(r.value, int(r.attempt_id, 16)) for r in sink.rewards} == {(n, n) for n in range(8)}


def test_batches_are_bounded(sink, attempt):
    sink.open.clear()
    recorder = Recorder(sink)
    for number in range(3 * BATCH):
        recorder.event("message", str(number))
    sink.open.set()
    recorder.close()
    assert max(sink.batches) <= BATCH
    assert [int(span.name) for span in sink.spans] == list(range(3 * BATCH))


# When the store fails.


def test_b99_a_dead_store_does_not_delay_the_program(sink, recorder, attempt):
    """The store hangs; the program's calls return all the same, flush says so, and later all is there."""
    sink.open.clear()
    for number in range(1000):
        recorder.end(recorder.start("tool", str(number)))
    with pytest.raises(StoreError, match="kept and tried again"):
        recorder.flush(timeout_s=0.05)
    sink.open.set()
    recorder.flush()
    assert len(sink.spans) == 1000 and recorder.lost == 0


def test_a_failure_that_passes_is_tried_again(sink, recorder, attempt):
    failures = [OSError("disk full"), StoreError("locked"), StoreError("locked")]
    sink.refuse = lambda records: failures.pop() if failures else None
    recorder.event("message", "kept")
    recorder.flush()
    assert [span.name for span in sink.spans] == ["kept"] and not failures


def test_the_cause_is_in_the_error(sink, recorder, attempt):
    tried = threading.Event()

    def refuse(records: Any) -> Exception:
        tried.set()
        return OSError("No space left on device")

    sink.refuse = refuse
    recorder.event("message", "m")
    assert tried.wait(10)
    with pytest.raises(StoreError, match="No space left on device"):
        recorder.flush(timeout_s=0.2)


def test_a_record_that_no_store_takes_does_not_take_others_along(sink, attempt, caplog):
    sink.refuse = lambda records: TypeError("bad") if any(r.name == "bad" for r in records) else None
    sink.open.clear()
    recorder = Recorder(sink)
    for name in ["a", "bad", "b", "bad", "c"]:
        recorder.event("message", name)
    sink.open.set()
    with caplog.at_level(logging.ERROR), pytest.raises(StoreError, match="TypeError: bad"):
        recorder.flush(attempt.attempt_id)
    recorder.flush(attempt.attempt_id)
    assert [span.name for span in sink.spans] == ["a", "b", "c"]
    assert recorder.lost == 2
    assert len(caplog.records) == 1, "said once, then counted"
    recorder.close()


def test_lost_records_are_told_to_their_own_attempt(sink, recorder):
    sink.refuse = lambda records: NotFound("gone") if any(r.attempt_id == "a" * 32 for r in records) else None
    for letter in "ab":
        with use(Scope(letter * 32, recorder=recorder)):
            recorder.event("message", letter)
    recorder.flush("b" * 32)
    with pytest.raises(StoreError, match="gone"):
        recorder.flush("a" * 32)
    recorder.flush()


def test_the_queue_is_bounded(sink, attempt):
    sink.open.clear()
    recorder = Recorder(sink, capacity=10)
    for number in range(100):
        recorder.event("message", str(number))
    assert recorder.lost >= 80
    sink.open.set()
    with pytest.raises(StoreError, match="10 records wait"):
        recorder.close()
    assert len(sink.spans) == 100 - recorder.lost


def test_close_writes_what_is_left_and_then_refuses(sink, attempt):
    recorder = Recorder(sink)
    recorder.event("message", "last")
    recorder.close()
    recorder.close()
    recorder.flush()
    assert [span.name for span in sink.spans] == ["last"]
    recorder.event("message", "late")
    assert recorder.lost == 1
    with pytest.raises(StoreError, match="closed"):
        recorder.flush()


def test_close_gives_up_on_a_dead_store(sink, attempt):
    sink.refuse = lambda records: StoreError("dead")
    recorder = Recorder(sink)
    recorder.event("message", "m")
    with pytest.raises(StoreError, match="dead"):
        recorder.close(timeout_s=0.1)
    assert not recorder._thread.is_alive()


def test_it_holds_nothing_of_what_was_written(sink, recorder):
    """B100: ten thousand attempts, and no container of the recorder grows."""
    sink.add = lambda spans=(), completions=(), rewards=(): None  # type: ignore[method-assign]
    for _ in range(10_000):
        with use(Scope(new_id(), recorder=recorder)):
            recorder.end(recorder.start("tool", "t"))
    recorder.flush()
    assert recorder._queue.qsize() == 0 and recorder._lost == {}
    assert sum(sys.getsizeof(value) for value in vars(recorder).values()) < 5_000


# With a real store, and standing for another recorder.


def test_with_a_real_store(tmp_path):
    store = open_store(f"sqlite:///{tmp_path}/store.db")
    store.enqueue([Rollout(id="r", run_id="run", task={}, task_id="t", group_id="g")])
    ((_, attempt),) = store.lease("worker")
    recorder = Recorder(store)
    with use(Scope(attempt.id, recorder=recorder)):
        span = recorder.start("agent", "writer", path="writer")
        recorder.flush()
        recorder.end(span, attributes={"odd": {1, 2}, "text": "\ud800"})
        recorder.reward(0.5)
    recorder.flush(attempt.id)
    store.finish(attempt.id, Outcome.OK)
    (episode,) = store.episodes(["r"])
    assert [(s.id, s.status, s.attributes) for s in episode.spans] == [(span.id, "ok", {"odd": [1, 2], "text": "?"})], (
        "the open form was replaced"
    )
    assert [reward.value for reward in episode.rewards] == [0.5]
    recorder.close()
    store.close()


def test_current_recorder_writes_to_that_of_the_attempt(sink, recorder, attempt):
    ambient = CurrentRecorder()
    ambient.end(ambient.start("tool", "t"))
    ambient.reward(1.0)
    ambient.event("message", "m")
    ambient.flush()
    assert [span.name for span in sink.spans] == ["t", "m"] and len(sink.rewards) == 1
    ambient.close()
    recorder.event("message", "still open")


def test_current_recorder_outside_attempts(sink):
    ambient = CurrentRecorder()
    ambient.end(ambient.start("tool", "t"))
    ambient.flush()
    with use(Scope(new_id())):
        ambient.event("message", "no recorder here")
    assert sink.batches == []
