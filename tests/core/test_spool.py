"""The store goes away and comes back: no program waits for it, nothing is lost in silence, and order is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.context import Scope, use
from agentlightning.errors import StoreError, StoreUnavailable
from agentlightning.gateway.writer import Writer
from agentlightning.recorder import Recorder
from agentlightning.schema import Completion, Reward, Span, SpanKind, floats, ids, new_id
from agentlightning.spool import Spooled
from agentlightning.spoolfile import SpoolFile, orphans
from tests.core.runner_world import World, outcomes, values

REPO = Path(__file__).parents[2]
LONG_S = 60.0


class Away:
    """A store that can be away, keeps names in order, and never takes those in `bad`."""

    identity = "the store of this test"

    def __init__(self, bad: Sequence[str] = ()) -> None:
        self.away, self.bad = True, set(bad)
        self.names: list[str] = []
        self.asked = threading.Event()

    def add(self, spans: Any = (), completions: Any = (), rewards: Any = ()) -> None:
        self.asked.set()
        if self.away:
            raise StoreUnavailable("nobody listens")
        names = [record.name for record in (*spans, *rewards)] + [record.id for record in completions]
        if self.bad & set(names):
            raise StoreError("it is no data")
        self.names += names


def span(name: str, **fields: Any) -> Span:
    return Span(new_id()[:16], "a" * 32, SpanKind.TOOL, name, **fields)


def completion(name: str) -> Completion:
    some = ids([1, 2]), ids([3]), floats([-0.5])
    return Completion(name, "a" * 32, "agent", None, "m", "policy", 1, *some, "stop", {"messages": ["\ud800"]}, {})


@pytest.fixture
def store() -> Away:
    return Away()


def spooled(store: Away, folder: Path, **options: Any) -> Spooled:
    return Spooled(store, folder=folder, **options)


def test_b99_the_program_is_not_delayed_and_all_arrives_in_order(tmp_path: Path, store: Away) -> None:
    sink = spooled(store, tmp_path)
    recorder = Recorder(sink)
    slowest = 0.0
    with use(Scope("a" * 32, recorder=recorder)):
        for number in range(3000):
            began = time.perf_counter()
            agl.emit_reward(number, name=f"{number:04}")
            slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 1.0, "a call of the program waited for the store"
    while sink.spooled < 3000:
        time.sleep(0.005)
    with pytest.raises(StoreUnavailable, match="away .nobody listens.; 3000 records wait on disk"):
        recorder.flush(timeout_s=0.2)
    store.away = False
    recorder.flush(timeout_s=LONG_S)
    assert store.names == [f"{number:04}" for number in range(3000)]
    assert (sink.spooled, sink.replayed, sink.dropped, sink.waiting) == (3000, 3000, 0, 0)
    assert list(tmp_path.iterdir()) == [], "nothing is left on disk"
    recorder.close()
    sink.close()


def test_nothing_is_on_disk_while_the_store_is_there(tmp_path: Path, store: Away) -> None:
    store.away = False
    sink = spooled(store, tmp_path / "never")
    sink.add([span("a")], [completion("b")], [Reward("r", "a" * 32, 1.0, "c")])
    sink.settle(0.0)
    sink.close()
    assert store.names == ["a", "c", "b"] and not (tmp_path / "never").exists()


def test_every_kind_of_record_comes_back_as_it_was(tmp_path: Path) -> None:
    kept: list[Any] = [span("s", attributes={"x": [1, None]}), completion("c"), Reward("r", "a" * 32, 0.5, "é")]
    file = SpoolFile.create(tmp_path, "p")
    file.append(kept, 1 << 20)
    found = file.first(10)
    file.remove()
    assert (found[0], found[2]) == (kept[0], kept[2])
    assert found[1].request == kept[1].request and found[1].logprobs.tobytes() == kept[1].logprobs.tobytes()


def test_what_comes_while_others_wait_goes_behind_them(tmp_path: Path, store: Away) -> None:
    sink = spooled(store, tmp_path)
    writer = Writer(sink)
    writer.start()
    sink.add([span("1")])
    writer.put(completion("2"))
    with pytest.raises(StoreUnavailable):
        writer.flush()
    sink.add([span("3")])
    store.away = False
    sink.settle(LONG_S)
    writer.flush()
    assert store.names == ["1", "2", "3"] or store.names == ["1", "3", "2"], "kinds of one transaction have no order"
    writer.close()
    sink.close()


def test_it_is_bounded_and_what_does_not_fit_is_counted(tmp_path: Path, store: Away) -> None:
    sink = spooled(store, tmp_path, limit=20_000)
    recorder = Recorder(sink, capacity=50)
    for _ in range(100):
        recorder.pass_on(span("x", attributes={"text": "y" * 1000}))
        time.sleep(0.001)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert recorder.lost > 0
    store.away = False
    with pytest.raises(StoreError, match="records of 1 attempt.* were lost: 50 records wait"):
        recorder.flush(timeout_s=LONG_S)
    assert len(store.names) + recorder.lost == 100
    recorder.close()
    sink.close()


def test_one_that_no_store_takes_is_told_and_takes_no_other_along(tmp_path: Path) -> None:
    store = Away(bad=["bad"])
    sink = spooled(store, tmp_path)
    sink.add([span("a"), span("bad"), span("b")])
    store.away = False
    with pytest.raises(StoreError, match="it is no data"):
        sink.settle(LONG_S)
    sink.settle(LONG_S)
    assert store.names == ["a", "b"] and sink.dropped == 1
    sink.close()


def test_a_full_disk_is_told(tmp_path: Path, store: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SpoolFile, records: Any, room: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SpoolFile, "append", full)
    sink = spooled(store, tmp_path)
    with pytest.raises(StoreUnavailable, match="No space left on device.*make room"):
        sink.add([span("a")])
    assert list(tmp_path.iterdir()) == []
    sink.close()


class TestAProcessThatDies:
    def left(self, folder: Path, count: int) -> None:
        """A process writes to a store that is away, and is killed."""
        source = """
import os, signal, sys
from pathlib import Path
from tests.core.test_spool import Away, span, spooled
sink = spooled(Away(), Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    sink.add([span(f"{number:03}")])
os.kill(os.getpid(), signal.SIGKILL)
"""
        path = os.pathsep.join([str(REPO), str(REPO / "core"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        subprocess.run(
            [sys.executable, "-c", source, str(folder), str(count)], env=environment, timeout=60, check=False
        )

    @pytest.mark.skipif(os.name != "posix", reason="files of the dead are adopted where there are file locks")
    def test_its_records_are_sent_by_the_next_one(self, tmp_path: Path, store: Away) -> None:
        self.left(tmp_path, 120)
        store.away = False
        sink = spooled(store, tmp_path)
        sink.add([span("mine")])
        sink.settle(LONG_S)
        assert store.names == [f"{number:03}" for number in range(120)] + ["mine"]
        assert list(tmp_path.iterdir()) == []
        sink.close()

    @pytest.mark.skipif(os.name != "posix", reason="files of the dead are adopted where there are file locks")
    def test_not_by_one_of_another_store_nor_while_it_lives(self, tmp_path: Path, store: Away) -> None:
        living = spooled(store, tmp_path)
        living.add([span("a")])
        store.asked.clear()
        other = Away()
        other.identity = "another"
        for rival in (other, Away()):
            sink = spooled(rival, tmp_path)
            assert sink.waiting == 0
            sink.close()
        living.close(timeout_s=0.0)
        heir = spooled(store, tmp_path)
        assert heir.waiting == 1
        heir.close(timeout_s=0.0)

    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(sizes=st.lists(st.integers(0, 200), max_size=8), cut=st.floats(0, 1))
    def test_wherever_it_is_cut_what_is_whole_is_there(self, tmp_path: Path, sizes: list[int], cut: float) -> None:
        file = SpoolFile.create(tmp_path, "cut")
        names = [f"{number}{'n' * size}" for number, size in enumerate(sizes)]
        ends = []
        for name in names:
            file.append([span(name)], 1 << 20)
            ends.append(file.size)
        end = int(cut * file.size)
        file.close()
        os.truncate(file.path, end)
        whole = names[: sum(place <= end for place in ends)]
        found = orphans(tmp_path, "cut")
        assert [record.name for one in found for record in one.first(100)] == whole
        for one in found:
            one.remove()


def test_a_rollout_ends_well_though_the_store_was_away_meanwhile(tmp_path: Path) -> None:
    """Nothing is written for a while, then all of it: spans, rewards, and last the outcome."""

    class Breaks:
        def __init__(self, store: Any) -> None:
            self._store, self.away = store, False
            self.identity = store.identity

        def __getattr__(self, name: str) -> Any:
            if self.away:
                raise StoreUnavailable("nobody listens")
            return getattr(self._store, name)

    with World(tmp_path) as world:
        flaky = Breaks(world.store)
        sink = Spooled(flaky, folder=tmp_path / "spool")
        recorder = Recorder(sink)

        def solve(task: int) -> float:
            flaky.away = True
            agl.emit_annotation({"task": task})
            while not sink.spooled:
                time.sleep(0.005)
            threading.Timer(0.5, lambda: setattr(flaky, "away", False)).start()
            return 1.0

        ids_ = world.enqueue(1)
        runner = world.start(solve, store=flaky, recorder=recorder)
        episodes = world.wait(ids_)
        runner.stop()
        recorder.close()
        sink.close()
    assert outcomes(episodes) == {"ok": 1} and values(episodes[0]) == {"reward": 1.0}
    assert [one.attributes for one in episodes[0].spans] == [{"task": 0}]
    assert sink.spooled >= 1 and sink.waiting == 0
