"""What every adapter must do. Write a driver for your framework, and pytest runs the whole contract:

    class TestMine(AdapterConformance):
        @pytest.fixture
        def driver(self):
            return MyDriver()

The proof of attribution is what arrives at the server, compared with the spans in the store (`adapter_proof.prove`).
`AGL_CONFORMANCE_RUNS` says how many runs must leave memory flat (10,000 is the promise, 1,000 the default).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning import context
from agentlightning.context import Scope
from agentlightning.schema import SpanKind, leaf
from tests.adapters.world import World
from tests.conformance.adapter_driver import Driver, Paths
from tests.conformance.adapter_load import Load
from tests.conformance.adapter_proof import HANDOFF, failing_first, is_raw, prove, up
from tests.fakes.engine import Fault

__all__ = ["AdapterConformance", "Driver", "Paths"]

LONG = "one two three four five six seven eight nine ten"
PROMPT = "what is it?"


class Base:
    """The fixtures: a `driver`, and worlds to run it in."""

    @pytest.fixture
    def driver(self) -> Driver:
        raise NotImplementedError("override the fixture `driver` with that of your framework")

    @pytest.fixture
    def worlds(self, tmp_path: Path) -> Iterator[Callable[..., World]]:
        """`worlds(reply)` gives one more running world."""
        with ExitStack() as stack:
            count = 0

            def make(reply: Any = None) -> World:
                nonlocal count
                count += 1
                folder = tmp_path / str(count)
                folder.mkdir()
                return stack.enter_context(World(folder, reply))

            yield make

    @pytest.fixture(autouse=True)
    def _declared(self, request: pytest.FixtureRequest, driver: Driver) -> None:
        """A test names the methods of the driver that it needs; what the framework cannot do is skipped visibly."""
        for marker in request.node.iter_markers("scenario"):
            for scenario in marker.args:
                if scenario in driver.cannot:
                    pytest.skip(f"{driver.name} {scenario}: {driver.cannot[scenario]}")


@contextmanager
def attempt(world: World, driver: Driver) -> Iterator[Scope]:
    """An attempt that is listened to; nothing of the program is in force when it has run."""
    with world.attempt() as scope, driver.listen():
        yield scope
        assert context.current() is scope, "the program has ended, and a scope of it is still in force"


def needs(*scenarios: str) -> pytest.MarkDecorator:
    return pytest.mark.scenario(*scenarios)


class AdapterConformance(Load, Base):
    """The contract."""

    def run(self, world: World, driver: Driver, scenario: str, *args: Any) -> tuple[Scope, list[str]]:
        """Runs a scenario in an attempt of its own; what must be true of every trace is true of this one."""
        with attempt(world, driver) as scope:
            expected = getattr(driver, scenario)(world, PROMPT, *args)
        found = prove(world, scope, driver.operations)
        ordered = scenario != "parallel"
        assert (found if ordered else sorted(found)) == (list(expected) if ordered else sorted(expected))
        assert found, "the program made no request: nothing was tested"
        return scope, found

    @needs("single")
    def test_agent_path(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        scope, found = self.run(world, driver, "single")
        assert len(found) == 1 and leaf(found[0]) == "writer"
        (arrival,) = world.arrivals(scope.attempt_id)
        assert PROMPT in arrival.text
        (call,) = world.spans(scope, SpanKind.LLM)
        assert call.status == "ok"

    @needs("nested")
    def test_nesting(self, driver: Driver, worlds: Any) -> None:
        """A path with two levels, and the span of the outer agent around that of the inner."""
        world = worlds()
        scope, found = self.run(world, driver, "nested")
        deep = [path for path in found if "/" in path]
        assert deep, f"nothing is nested: {found}"
        spans = {span.id: span for span in world.spans(scope)}
        for call in (s for s in spans.values() if s.kind is SpanKind.LLM and s.path in deep):
            around = [s.path for s in up(call, spans) if s.kind is SpanKind.AGENT]
            assert call.path.rpartition("/")[0] in around, f"{call.path} is not inside its team: {around}"

    @needs("handoff")
    def test_b43_b44_b45_handoff(self, driver: Driver, worlds: Any) -> None:
        """The taker's span says who gave; nothing leaks into the next run."""
        world = worlds()
        for _ in range(2):
            scope, found = self.run(world, driver, "handoff")
            assert found[0] != found[-1]
            edges = {(s.attributes[HANDOFF], s.path) for s in world.spans(scope) if HANDOFF in s.attributes}
            assert edges == {(found[0], found[-1])}

    @needs("parallel")
    def test_b47_parallel_branches(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        scope, found = self.run(world, driver, "parallel")
        assert len(found) > 1
        assert len({arrival.span_id for arrival in world.arrivals(scope.attempt_id)}) == len(found)

    @needs("tool_ok")
    def test_tools(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        scope, found = self.run(world, driver, "tool_ok")
        (used,) = world.spans(scope, SpanKind.TOOL)
        assert (used.name, used.status, used.path) == ("look_up", "ok", found[0])
        assert used.attributes["gen_ai.tool.call.arguments"] in ({"word": "x"}, '{"word": "x"}', '{"word":"x"}')
        assert "x means x" in str(used.attributes["gen_ai.tool.call.result"])

    @needs("tool_error")
    def test_tools_with_errors(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        scope, found = self.run(world, driver, "tool_error")
        used = world.spans(scope, SpanKind.TOOL)
        assert {(span.name, span.status, span.path) for span in used} == {("look_up", "error", found[0])}
        assert all("no x" in (span.error or "") for span in used)

    @needs("stream")
    def test_b61_streaming(self, driver: Driver, worlds: Any) -> None:
        world = worlds(LONG)
        scope, _ = self.run(world, driver, "stream")
        assert all(arrival.body.get("stream") is True for arrival in world.arrivals(scope.attempt_id))
        for call in world.spans(scope, SpanKind.LLM):
            assert call.status == "ok"
            assert all(call.attributes[key] is not None for key in call.attributes if "usage" in key)

    @needs("stream_break")
    def test_early_break_from_a_generator(self, driver: Driver, worlds: Any) -> None:
        world = worlds(LONG)
        scope, found = self.run(world, driver, "stream_break")
        assert found[-1] == "" and is_raw(world.arrivals(scope.attempt_id)[-1])
        assert {span.status for span in world.spans(scope)} <= {"ok", "error"}

    @needs("retry")
    def test_retry(self, driver: Driver, worlds: Any) -> None:
        """Each try is attributed; at the end stands one call that went well."""
        fault = Fault("status", status=500, headers={"retry-after-ms": "1"})
        world = worlds(failing_first(2, fault))
        scope, found = self.run(world, driver, "retry")
        assert len(found) == 3
        last = world.arrivals(scope.attempt_id)[-1].span_id
        assert [s.status for s in world.spans(scope, SpanKind.LLM) if s.id == last] == ["ok"]

    @needs("cancel", "single")
    def test_b15_cancellation(self, driver: Driver, worlds: Any) -> None:
        """What was open ends as an error; the next run of the attempt is as if nothing had been."""
        world = worlds(lambda request: Fault("hang"))
        with attempt(world, driver) as scope:
            expected = list(driver.cancel(world, PROMPT))
            world.engine.reply = lambda request: "fine"
            expected += driver.single(world, "after")
        assert prove(world, scope, driver.operations) == expected
        calls = world.spans(scope, SpanKind.LLM)
        assert [call.status for call in calls] == ["error", "ok"]

    @needs("raw_client")
    def test_raw_client_call(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        scope, _ = self.run(world, driver, "raw_client")
        raws = [arrival for arrival in world.arrivals(scope.attempt_id) if is_raw(arrival)]
        assert raws and all(arrival.path for arrival in raws), "the raw call bears no agent"

    @needs("program_error")
    def test_an_exception_of_the_program(self, driver: Driver, worlds: Any) -> None:
        """What comes out with us is what comes out without us."""
        world = worlds()
        error = LookupError("of the user's own")
        alone = self.caught(world, driver, error)
        with attempt(world, driver) as scope:
            traced = self.caught(world, driver, error)
        assert type(traced) is type(alone) and str(traced) == str(alone)
        assert (traced is error) == (alone is error)
        assert len({id(e) for e in chain(traced)}) == len({id(e) for e in chain(alone)}), "a cause was added or lost"
        assert {span.end_ns is not None for span in world.spans(scope)} == {True}

    def caught(self, world: World, driver: Driver, error: Exception) -> BaseException | None:
        try:
            driver.program_error(world, PROMPT, error)
        except Exception as found:  # noqa: BLE001  whatever it is, it is compared
            return found
        return None

    @needs("single")
    def test_unicode_names(self, driver: Driver, worlds: Any) -> None:
        _, found = self.run(worlds(), driver, "single", driver.odd_name)
        assert leaf(found[0]) == driver.odd_name

    @needs("duplicates")
    def test_duplicate_names(self, driver: Driver, worlds: Any) -> None:
        """Each of the two has a span of its own, with its call below it."""
        world = worlds()
        scope, found = self.run(world, driver, "duplicates")
        assert len(found) == 2 and len({leaf(path) for path in found}) == 1
        spans = {span.id: span for span in world.spans(scope)}
        agents = [
            next(s.id for s in up(call, spans) if s.kind is SpanKind.AGENT)
            for call in spans.values()
            if call.kind is SpanKind.LLM
        ]
        assert len(set(agents)) == 2, "both calls hang below one agent's span"

    @needs("nested")
    def test_the_program_is_the_same_with_and_without_us(self, driver: Driver, worlds: Any) -> None:
        """Not a byte of a prompt changes."""
        plain, traced = worlds(), worlds()
        driver.nested(plain, PROMPT)
        self.run(traced, driver, "nested")
        assert bodies(traced) == bodies(plain)

    @needs("single", "undo")
    def test_after_the_undo_nothing_listens(self, driver: Driver, worlds: Any) -> None:
        if not driver.listens_globally:
            pytest.skip("it listens only where it is handed over")
        world = worlds()
        before = snapshot(driver)
        with driver.listen():
            assert snapshot(driver) != before, "nothing of what it says it touches was changed"
        assert snapshot(driver) == before
        with world.attempt() as scope:
            driver.single(world, PROMPT)
        assert [span for span in world.spans(scope) if not (driver.names_itself and span.kind is SpanKind.AGENT)] == []
        assert len(world.arrivals(scope.attempt_id)) == 1, "the request still bears its attempt"

    @needs("single")
    def test_two_listeners_record_once(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        with driver.listen():
            scope, _ = self.run(world, driver, "single")
        assert len(world.spans(scope, SpanKind.LLM)) == 1

    @needs("single")
    def test_two_recorders(self, driver: Driver, worlds: Any) -> None:
        """Each writes what happened in its own attempts."""
        one, two = worlds(), worlds()
        with driver.listen():
            for world in (one, two, one):
                self.run(world, driver, "single")
        assert [len(world.arrivals()) for world in (one, two)] == [2, 1]

    @needs("single")
    def test_outside_attempts_nothing_happens(self, driver: Driver, worlds: Any) -> None:
        world = worlds()
        with driver.listen():
            driver.single(world, PROMPT)
            assert context.current() is None
        (arrival,) = world.arrivals()
        assert (arrival.attempt_id, arrival.path) == ("", "")


def snapshot(driver: Driver) -> list[Any]:
    return [list(one) if isinstance(one, list) else dict(vars(one)) for one in driver.touched()]


def bodies(world: World) -> Sequence[Any]:
    return [arrival.body for arrival in world.arrivals()]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
