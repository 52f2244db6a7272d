"""Who is calling: the strongest evidence counts, and nothing slips into another rollout."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from agentlightning.context import Scope, baggage, propagate_to, traceparent, use
from agentlightning.gateway.identity import Caller, identify
from agentlightning.schema import Attempt, Outcome
from tests.fakes.world import HELLO, World

A, B, C = "a" * 32, "b" * 32, "c" * 32
SPAN = "1234567890abcdef"

URL = {"attempt": A}
KEY = (b"authorization", f"Bearer agl-{B}".encode())
TRACE = (b"traceparent", f"00-{C}-{SPAN}-01".encode())
BAGGAGE = (b"baggage", b"other=1,agl.agent=team%2Fwriter;p=1")


@pytest.mark.parametrize(
    ("params", "headers", "expected"),
    [
        (URL, [KEY, TRACE], Caller(A, "agent", None, "url")),
        ({}, [KEY, TRACE], Caller(B, "agent", None, "key")),
        ({}, [TRACE], Caller(C, "agent", SPAN, "trace")),
        ({}, [], Caller(None, "agent", None, "nothing")),
        ({}, [(b"authorization", b"Bearer sk-real-key")], Caller(None, "agent", None, "nothing")),
        ({}, [(b"authorization", b"bearer AGL-" + B.encode())], Caller(B, "agent", None, "key")),
        ({}, [(b"traceparent", b"garbage")], Caller(None, "agent", None, "nothing")),
        ({"attempt": C}, [TRACE], Caller(C, "agent", SPAN, "url")),
        ({}, [(b"traceparent", f"00-{C}-{C[:16]}-01".encode())], Caller(C, "agent", None, "trace")),
        (URL, [BAGGAGE], Caller(A, "team/writer", None, "url")),
        ({**URL, "agent": "critic"}, [BAGGAGE], Caller(A, "critic", None, "url")),
        ({**URL, "agent": "/a/b/"}, [], Caller(A, "a/b", None, "url")),
        (URL, [(b"baggage", b"agl.agent=")], Caller(A, "agent", None, "url")),
        (URL, [(b"baggage", b"nonsense")], Caller(A, "agent", None, "url")),
    ],
)
def test_precedence(params: dict[str, str], headers: list[tuple[bytes, bytes]], expected: Caller) -> None:
    assert identify(params, headers) == expected


def headers_of(attempt: Attempt, path: str, span: str = SPAN) -> dict[str, str]:
    scope = Scope(attempt.id, path, span)
    return {"traceparent": traceparent(scope), "baggage": baggage(scope)}


def test_a_call_is_joined_to_its_span_and_agent_by_headers_alone(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        world.post(url=world.base_url(), headers=headers_of(attempt, "tëam/wri ter"))
        (call,) = world.calls(attempt)
    assert (call.attempt_id, call.path, call.span_id) == (attempt.id, "tëam/wri ter", SPAN)


def test_propagation_of_the_context_reaches_the_gateway_and_not_the_engine(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        undo = propagate_to(world.gateway.url)
        stop = propagate_to(world.engine.url)
        try:
            with use(Scope(attempt.id, "writer", SPAN)):
                world.post(url=world.base_url())
        finally:
            undo()
            stop()
        (call,) = world.calls(attempt)
    assert (call.path, call.span_id) == ("writer", SPAN)
    assert not {"traceparent", "baggage"} & world.engine.requests[0].headers.keys()


def test_the_bearer_key_names_the_attempt(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        world.post(url=world.base_url(), headers={"authorization": f"Bearer agl-{attempt.id}"})
        assert len(world.calls(attempt)) == 1
        assert world.engine.requests[0].headers["authorization"] == "Bearer engine-key"


def test_an_agent_path_in_the_url_may_contain_anything(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        world.client(attempt, "team%2Fwri%20t%C3%A9r").chat.completions.create(model="policy", messages=HELLO)
        world.client(attempt, "team/v1").chat.completions.create(model="policy", messages=HELLO)
        assert [call.path for call in world.calls(attempt)] == ["team/wri tér", "team/v1"]


def test_a_call_of_no_attempt_is_served_kept_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with World(tmp_path, "hi") as world:
        attempt = world.attempt()
        for _ in range(2):
            assert world.post().status_code == 200
        assert world.post(url=f"{world.gateway.url}/attempts/{A}/v1").status_code == 200
        assert len(world.strays()) == 3 and world.gateway.stats["unattributed"] == 3
        assert {call.attempt_id for call in world.strays()} == {None}
        assert all(len(call.response_ids) == 3 for call in world.strays())
        assert not world.calls(attempt)
    warnings = [record.getMessage() for record in caplog.records if "unattributed" in record.getMessage()]
    assert len(warnings) == 2, "each address is named once, however many calls come from it"
    assert "/v1/chat/completions" in warnings[0] and "policy.base_url" in warnings[0] and A in warnings[1]


def test_a_stray_call_is_refused_where_no_policy_is_known(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        world.store.end_run(world.run.id, "finished")
        response = world.post()
        assert response.status_code == 404 and "names no known attempt" in response.json()["detail"]
        assert "policy.base_url" in response.json()["error"]["message"]


def test_stale_evidence_is_refused_and_never_overridden_by_weaker_evidence(tmp_path: Path) -> None:
    """A client that was built in the first rollout and is used in the second must not write into either."""
    with World(tmp_path, refresh_s=0.0) as world:
        first, second = world.attempt(), world.attempt()
        assert world.post(first).status_code == 200
        world.store.finish(first.id, Outcome.OK)
        response = world.post(first, headers=headers_of(second, "writer"))
        assert response.status_code == 410 and "inside the rollout function" in response.json()["detail"]
        assert world.gateway.stats["refused"] == 1
        assert len(world.calls(first)) == 1 and not world.calls(second)


def test_an_attempt_that_a_newer_one_has_replaced_is_refused(tmp_path: Path) -> None:
    with World(tmp_path, refresh_s=0.0) as world:
        first = world.attempt(max_attempts=2)
        world.store.finish(first.id, Outcome.MODEL_ERROR)
        ((_, second),) = world.store.lease("worker", 1)
        assert world.post(first).status_code == 410
        assert world.post(second).status_code == 200


def test_an_attempt_is_asked_for_once_while_it_is_fresh(tmp_path: Path) -> None:
    with World(tmp_path, refresh_s=3600.0) as world:
        attempt = world.attempt()
        asked = []
        real = world.store.attempt
        world.store.attempt = lambda id_: asked.append(id_) or real(id_)  # type: ignore[method-assign, func-returns-value]
        for _ in range(5):
            world.post(attempt)
        assert asked == [attempt.id]


def test_sdk_headers_of_another_trace_do_not_name_a_span(tmp_path: Path) -> None:
    """A user's own OpenTelemetry may put its trace on the request."""
    with World(tmp_path) as world:
        attempt = world.attempt()
        httpx.post(
            f"{world.base_url(attempt)}/chat/completions",
            json={"model": "policy", "messages": HELLO},
            headers={"traceparent": f"00-{C}-{SPAN}-01"},
        )
        (call,) = world.calls(attempt)
    assert call.span_id is None
