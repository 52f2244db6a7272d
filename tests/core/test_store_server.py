"""The store's server from outside: keys, limits, errors with their cure, JSON, waiting calls, and what is measured."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import Any

import httpx
import pytest

from agentlightning.errors import Forbidden, StoreError, StoreUnavailable
from agentlightning.schema import new_id
from agentlightning.store import open_store
from agentlightning.store.calls import CALLS
from agentlightning.store.keys import attempt_key
from agentlightning.store.server import StoreServer
from agentlightning.store.sql import SqlStore
from tests.conformance.store_records import LONG, begin, completion, reward, span
from tests.core.store_server_world import KEY

ODD_NAME = "'; DROP TABLE agl_spans; --"


def add_reward(attempt_id: str, **fields: Any) -> dict[str, Any]:
    return {"rewards": [{"id": new_id(), "attempt_id": attempt_id, "value": 1.0} | fields]}


# Keys.


@pytest.mark.parametrize(
    "key", ["", "wrong", KEY[:-1], KEY + "x", f"agl-{'0' * 32}", f"agl-{'0' * 32}-{'0' * 32}", "ключ"]
)
def test_a_wrong_key_is_refused_and_nothing_is_written(server: StoreServer, behind: SqlStore, key: str) -> None:
    attempt = begin(behind)
    headers = {"Authorization": f"Bearer {key}".encode()} if key else {}
    said = [
        httpx.post(f"{server.url}{path}", headers=headers, json=add_reward(attempt.id))
        for path in ("/store/runs", "/store/add", "/v1/traces", "/store/spam")
    ]
    said += [httpx.get(f"{server.url}{path}", headers=headers) for path in ("/store/hello", "/metrics")]
    for one in said:
        assert (one.status_code, one.headers["content-type"]) == (401, "application/problem+json")
        assert "AGL_STORE_KEY" in one.json()["detail"] and one.headers["www-authenticate"] == "Bearer"
    assert behind.trace(attempt.id).rewards == []


def test_a_client_without_the_key_says_where_it_comes_from(server: StoreServer) -> None:
    with pytest.raises(Forbidden, match="asks for a key: .*AGL_STORE_KEY"):
        open_store(server.url)
    with pytest.raises(Forbidden, match="has another key"):
        open_store(server.url, key="guess")


def test_the_key_comes_from_the_environment(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_STORE_KEY", KEY)
    store = open_store(server.url)
    assert store.runs() == [] and store.identity == server.identity
    store.close()


def test_an_attempts_key_writes_its_own_attempt_and_nothing_else(server: StoreServer, behind: SqlStore) -> None:
    mine, other = begin(behind, "r1"), begin(behind, "r2")
    own = open_store(server.url, key=attempt_key(KEY, mine.id))
    own.add([span(mine.id)], [completion(mine.id)], [reward(mine.id)])
    for records in (
        {"rewards": [reward(mine.id), reward(other.id)]},
        {"spans": [span(other.id)]},
        {"completions": [completion(None)]},
    ):
        with pytest.raises(Forbidden, match=f"only writes attempt {mine.id}"):
            own.add(**records)  # type: ignore[arg-type]
    seen = behind.trace(mine.id)
    assert (len(seen.spans), len(seen.completions), len(seen.rewards)) == (1, 1, 1)
    assert behind.trace(other.id).spans == [] and behind.unattributed() == []
    own.close()


def test_an_attempts_key_opens_no_other_method(server: StoreServer, behind: SqlStore) -> None:
    attempt = begin(behind)
    headers = {"Authorization": f"Bearer {attempt_key(KEY, attempt.id)}"}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        for method in sorted(set(CALLS) - {"add"}):
            said = http.post(f"/store/{method}", json={})
            assert said.status_code == 403 and said.json()["title"] == "Forbidden"
        assert http.get("/metrics").status_code == 403
    assert behind.attempt(attempt.id)[1].outcome is None


def test_an_attempts_key_does_not_open_another_store(behind: SqlStore) -> None:
    attempt = begin(behind)
    with StoreServer(behind, key="another key") as other, pytest.raises(Forbidden):
        open_store(other.url, key=attempt_key(KEY, attempt.id))


def test_others_are_served_only_with_a_key(behind: SqlStore) -> None:
    with pytest.raises(StoreError, match="can be reached by others: give the server a key"):
        StoreServer(behind, host="0.0.0.0")
    with StoreServer(behind, host="::1") as server:
        assert server.url.startswith("http://[::1]:") and httpx.get(f"{server.url}/readyz").status_code == 200


# Bodies.


def test_a_body_that_is_too_large_is_refused_before_and_while_it_comes(http: httpx.Client, behind: SqlStore) -> None:
    attempt = begin(behind)
    big = add_reward(attempt.id, name="x" * 200_000)
    told = http.post("/store/add", json=big)
    streamed = http.post(
        "/store/add", content=iter([json.dumps(big).encode()] * 3), headers={"Content-Type": "application/json"}
    )
    for said in (told, streamed):
        assert said.status_code == 413 and "send fewer records" in said.json()["detail"]
    assert behind.trace(attempt.id).rewards == []
    assert http.get("/readyz").status_code == 200


def test_a_client_is_told_that_its_records_were_too_many(server: StoreServer, behind: SqlStore) -> None:
    attempt = begin(behind)
    store = open_store(server.url, key=KEY)
    with pytest.raises(StoreError, match="more than 100,000 bytes: send fewer records at once"):
        store.add(completions=[completion(attempt.id, request={"text": "x" * 20_000_000})])
    store.add(completions=[completion(attempt.id)])
    assert len(behind.trace(attempt.id).completions) == 1
    store.close()


def test_a_compressed_body_is_read_and_never_grows_beyond_the_limit(http: httpx.Client, behind: SqlStore) -> None:
    attempt = begin(behind)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    packed = gzip.compress(json.dumps(add_reward(attempt.id)).encode())
    assert http.post("/store/add", content=packed, headers=headers).status_code == 200
    bomb = gzip.compress(json.dumps(add_reward(attempt.id, name="x" * 50_000_000)).encode())
    assert len(bomb) < 100_000
    assert http.post("/store/add", content=bomb, headers=headers).status_code == 413
    for wrong, status in ((b"no gzip", 400), (packed[:-12], 400)):
        assert http.post("/store/add", content=wrong, headers=headers).status_code == status
    brotli = http.post("/store/add", content=packed, headers=headers | {"Content-Encoding": "br"})
    assert brotli.status_code == 415 and "gzip" in brotli.json()["detail"]
    assert len(behind.trace(attempt.id).rewards) == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "does not take this"),
        (b'{"rewards": 1}', r"\$.rewards"),
        (b'{"spam": []}', "spam"),
        (b'{"rewards": [{"id": "a", "attempt_id": "b", "value": "much"}]}', r"value"),
        (b'{"rewards": [{"id": "a", "attempt_id": "b", "value": 1, "spam": 2}]}', "spam"),
        (b'{"spans": [{"id": "a", "attempt_id": null, "kind": "llm", "name": "n"}]}', "attempt_id"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_what_a_method_does_not_take_is_refused_with_the_place(http: httpx.Client, body: bytes, said: str) -> None:
    answer = http.post("/store/add", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["title"] == "StoreError" and __import__("re").search(said, answer.json()["detail"])


def test_messagepack_that_is_none_is_refused(http: httpx.Client) -> None:
    for body in (b"\xc1", b"\x81\xa5spans", b"\x81\xa5spans\xd9\x05abc", b"\x93" * 50_000):
        answer = http.post("/store/add", content=body, headers={"Content-Type": "application/msgpack"})
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_web_page_cannot_write_here(http: httpx.Client, behind: SqlStore, kind: str) -> None:
    """Pages may send these types to any address; they may not send ours."""
    attempt = begin(behind)
    headers = {"Content-Type": kind} if kind else {}
    said = http.post("/store/add", content=json.dumps(add_reward(attempt.id)), headers=headers)
    assert said.status_code == 415 and "application/msgpack or application/json" in said.json()["detail"]
    assert behind.trace(attempt.id).rewards == []


def test_sql_in_names_is_text(server: StoreServer, behind: SqlStore) -> None:
    store = open_store(server.url, key=KEY)
    attempt = begin(store, ODD_NAME, run_id=ODD_NAME)
    store.add([span(attempt.id, name=ODD_NAME, path=ODD_NAME)], rewards=[reward(attempt.id, name=ODD_NAME)])
    assert store.find("' OR 1=1") == [] and store.find(ODD_NAME) == [ODD_NAME]
    assert store.rollouts("' OR '1'='1") == []
    assert [one.name for one in store.follow(run_id=ODD_NAME).spans] == [ODD_NAME]
    with pytest.raises(StoreError, match="no method"):
        httpx_says(server, "runs; DROP TABLE agl_runs")
    assert behind.rollouts()[0].id == ODD_NAME
    store.close()


def httpx_says(server: StoreServer, method: str) -> None:
    said = httpx.post(f"{server.url}/store/{method}", headers={"Authorization": f"Bearer {KEY}"}, json={})
    raise StoreError(said.json()["detail"])


# JSON, for programs of any language.


def test_json_goes_in_and_comes_out(http: httpx.Client) -> None:
    asked = {"rollouts": [{"id": "r1", "run_id": "run", "task": {"x": 1}, "task_id": "t", "group_id": "g"}]}
    assert http.post("/store/enqueue", json=asked).json() is None
    ((found, attempt),) = http.post("/store/lease", json={"worker": "curl", "lease_s": LONG}).json()
    assert found["task"] == {"x": 1} and attempt["number"] == 1
    given = {
        "id": "c1",
        "attempt_id": attempt["id"],
        "path": "writer",
        "span_id": None,
        "model": "m",
        "policy": "policy",
        "version": 1,
        "prompt_ids": [1, 2],
        "response_ids": base64.b64encode(b"\x03\0\0\0").decode(),
        "logprobs": [-0.5],
        "finish_reason": "stop",
        "request": {"half": "\ud83d"},
        "response": {"big": 2**70},
    }
    assert (
        http.post(
            "/store/add", content=json.dumps({"completions": [given]}), headers={"Content-Type": "application/json"}
        ).status_code
        == 200
    )
    assert http.post("/store/finish", json={"attempt_id": attempt["id"], "outcome": "ok"}).json() == "succeeded"
    ((episode),) = http.post("/store/episodes", json={"rollout_ids": ["r1"]}).json()
    (call,) = episode["completions"]
    assert base64.b64decode(call["prompt_ids"]) == b"\x01\0\0\0\x02\0\0\0"
    assert (call["request"], call["response"]) == ({"half": "\ud83d"}, {"big": 2**70})


def test_numbers_that_json_lacks_come_as_text(http: httpx.Client, behind: SqlStore) -> None:
    attempt = begin(behind)
    behind.add([span(attempt.id, attributes={"nan": math.nan, "more": [math.inf, {"less": -math.inf}]})])
    said = http.post("/store/trace", json={"attempt_id": attempt.id})
    assert said.json()["spans"][0]["attributes"] == {"nan": "nan", "more": ["inf", {"less": "-inf"}]}


def test_an_array_that_is_none_is_refused(http: httpx.Client) -> None:
    for value in ("not base64!", [1, "2"], {"a": 1}, None, [2**40]):
        given = {"completions": [{"id": "c", "prompt_ids": value}]}
        assert http.post("/store/add", json=given).status_code == 400


# Errors.


def test_errors_are_problems_that_name_the_cure(http: httpx.Client, behind: SqlStore) -> None:
    attempt = begin(behind)
    http.post("/store/finish", json={"attempt_id": attempt.id, "outcome": "ok"})
    asked = [
        ("/store/finish", {"attempt_id": attempt.id, "outcome": "timeout"}, 409, "Superseded"),
        ("/store/trace", {"attempt_id": "nothing"}, 404, "NotFound"),
        ("/store/spam", {}, 404, "StoreError"),
        ("/spam", {}, 404, "StoreError"),
        ("/store/end_run", {"run_id": "r", "state": "spam"}, 400, "StoreError"),
    ]
    for path, body, status, title in asked:
        said = http.post(path, json=body)
        assert (said.status_code, said.json()["status"], said.json()["title"]) == (status, status, title)
        assert said.headers["content-type"] == "application/problem+json"
    assert http.get("/store/runs").status_code == 405


def test_a_reward_that_is_no_number_is_refused_with_its_own_error(http: httpx.Client, behind: SqlStore) -> None:
    attempt = begin(behind)
    body = json.dumps(add_reward(attempt.id, value=math.nan))
    said = http.post("/store/add", content=body, headers={"Content-Type": "application/json"})
    assert (said.status_code, said.json()["title"]) == (422, "RewardError")


class _Broken(SqlStore):
    """A database that can do nothing now, or whose driver has a bug."""

    error: Exception | None = None

    def backlog(self, run_id: str | None = None) -> dict[str, int]:
        if self.error is not None:
            raise self.error
        return super().backlog(run_id)


def test_a_store_that_cannot_work_is_not_ready(caplog: pytest.LogCaptureFixture) -> None:
    store = _Broken("sqlite://")
    with StoreServer(store) as server:
        assert httpx.get(f"{server.url}/healthz").text == "ok\n"
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        store.error = StoreUnavailable("the disk is full: free some space.")
        said = httpx.get(f"{server.url}/readyz")
        assert (said.status_code, said.json()["detail"]) == (503, "the disk is full: free some space.")
        client = open_store(server.url)
        with pytest.raises(StoreUnavailable, match="disk is full"):
            client.backlog()
        store.error = ZeroDivisionError("oops")
        with pytest.raises(StoreError, match="server failed .ZeroDivisionError: oops.: see its log"):
            client.backlog()
        assert "failed" in caplog.text
        client.close()
    store.close()
