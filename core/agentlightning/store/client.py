"""The store over HTTP: every method is one call to a store's server.

All of them may be repeated: records carry ids, a lease carries a secret. So a call whose answer was lost is made again,
and a server that restarts is only a pause.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

from agentlightning.errors import StoreError
from agentlightning.schema import SCHEMA_VERSION, Attempt, Completion, Reward, Rollout, Span, new_id
from agentlightning.store.base import LEASE_S, Store
from agentlightning.store.bodies import MSGPACK, Body, tamed, written
from agentlightning.store.calls import CALLS, FIRST_CALL, STORE_HEADER, Hello
from agentlightning.store.connection import Connections
from agentlightning.store.records import News, title

F = TypeVar("F", bound=Callable[..., Any])

OPENING_S = 5.0
"""Seconds that opening waits for a server that is away."""


def _remote(method: F) -> F:
    """The method of the contract, as a call to the server."""
    call = CALLS[method.__name__]

    @functools.wraps(method)
    def ask(self: HttpStore, *args: Any, **named: Any) -> Any:
        if len(args) > len(call.names) or not set(named) <= set(call.names[len(args) :]):
            raise TypeError(f"{call.name} takes {', '.join(call.names)}")
        return self._call(call.name, dict(zip(call.names, args, strict=False)) | named)

    return cast(F, ask)


class HttpStore:
    """`key`: the server's, or that of an attempt (`keys.attempt_key`). Any thread may use it, and a forked child."""

    def __init__(self, url: str, key: str = "") -> None:
        headers = {"Accept": MSGPACK} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._connections = Connections(url, headers)
        self.url = self._connections.url
        if self._connections.meant:
            headers[STORE_HEADER] = self._connections.meant
        try:
            hello = self._hello()
        except BaseException:
            self.close()
            raise
        self._longest_wait_s = hello.longest_wait_s
        self.identity = headers[STORE_HEADER] = hello.store  # from now on no other store will do

    def _hello(self) -> Hello:
        patience = min(OPENING_S, self._connections.patience_s)
        answer, kind = self._connections.call("GET", f"/store/{FIRST_CALL}", None, "", patience)
        try:
            hello: Hello = Body(Hello).read(answer, kind)
        except ValueError as error:
            raise StoreError(f"{self.url} is no store's server: mend the URL.") from error
        if hello.schema_version != SCHEMA_VERSION:
            raise StoreError(
                f"the server at {self.url} has schema version {hello.schema_version}, this release {SCHEMA_VERSION}: "
                "install the same release on both sides."
            )
        return hello

    begin_run = _remote(Store.begin_run)
    renew_run = _remote(Store.renew_run)
    end_run = _remote(Store.end_run)
    runs = _remote(Store.runs)
    add_step = _remote(Store.add_step)
    steps = _remote(Store.steps)
    publish = _remote(Store.publish)
    resource = _remote(Store.resource)
    see = _remote(Store.see)
    workers = _remote(Store.workers)
    enqueue = _remote(Store.enqueue)
    heartbeat = _remote(Store.heartbeat)
    finish = _remote(Store.finish)
    give_back = _remote(Store.give_back)
    cancel = _remote(Store.cancel)
    rollouts = _remote(Store.rollouts)
    attempts = _remote(Store.attempts)
    attempt = _remote(Store.attempt)
    backlog = _remote(Store.backlog)
    episodes = _remote(Store.episodes)
    trace = _remote(Store.trace)
    find = _remote(Store.find)
    unattributed = _remote(Store.unattributed)
    prune = _remote(Store.prune)

    def lease(
        self, worker: str, limit: int = 1, lease_s: float = LEASE_S, run_id: str | None = None, token: str = ""
    ) -> list[tuple[Rollout, Attempt]]:
        asked = {"worker": worker, "limit": limit, "lease_s": lease_s, "run_id": run_id, "token": token or new_id()}
        return cast(list[tuple[Rollout, Attempt]], self._call("lease", asked))

    def add(
        self,
        spans: Sequence[Span] = (),
        completions: Sequence[Completion] = (),
        rewards: Sequence[Reward] = (),
    ) -> None:
        records = {"spans": spans, "completions": completions, "rewards": rewards}
        try:
            body = written(records)
        except StoreError:  # something of the user's program that is no data: what can be said of it is kept
            body = written(
                records | {"spans": [*map(tamed, spans)], "completions": [*map(tamed, completions)]}, "this record"
            )
        self._post("add", *body)

    def wait(self, rollout_ids: Sequence[str], timeout_s: float | None = None) -> set[str]:
        return cast(set[str], self._wait("wait", {"rollout_ids": rollout_ids}, timeout_s))

    def wait_for_work(self, timeout_s: float) -> bool:
        return bool(self._wait("wait_for_work", {}, timeout_s))

    def follow(
        self,
        after: int = 0,
        *,
        run_id: str | None = None,
        attempt_id: str | None = None,
        kinds: Collection[str] = ("span", "completion", "reward"),
        limit: int = 1000,
        timeout_s: float = 0.0,
    ) -> News:
        asked = {"after": after, "run_id": run_id, "attempt_id": attempt_id, "kinds": list(kinds), "limit": limit}
        return cast(News, self._wait("follow", asked, timeout_s))

    def close(self) -> None:
        self._connections.close()

    def _wait(self, name: str, asked: dict[str, Any], timeout_s: float | None) -> Any:
        """The server lets a call wait for some seconds only: it is asked again until the time is over."""
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = max(0.0, give_up_at - time.monotonic())
            found = self._call(name, asked | {"timeout_s": min(left, self._longest_wait_s)})
            if isinstance(found, News):
                over = bool(found.spans or found.completions or found.rewards)
                asked["after"] = found.cursor
            else:
                over = bool(found) or not asked.get("rollout_ids", True)
            if over or time.monotonic() >= give_up_at:
                return found

    def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            body = written(arguments, f"what {name} was given")
        except StoreError:
            for given in arguments.values():
                for record in given if isinstance(given, list) else ():
                    written(record, title(record))  # names the one that is to blame
            raise
        return self._post(name, *body)

    def _post(self, name: str, body: bytes, content_type: str) -> Any:
        answer, kind = self._connections.call("POST", f"/store/{name}", body, content_type)
        try:
            return CALLS[name].result.read(answer, kind)
        except ValueError as error:
            raise StoreError(
                f"{self.url} answers {name} in an unknown way ({error}): is it of another release?"
            ) from error


def http_store(url: str, key: str | None) -> HttpStore:
    """Without a `key`, that of `AGL_STORE_KEY`."""
    return HttpStore(url, os.environ.get("AGL_STORE_KEY", "") if key is None else key)
