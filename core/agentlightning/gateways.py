"""The gateways that rollouts of a store belong to, as a worker on another machine sees them.

Each trainer publishes its gateway's address and secret as a resource of its run. A program's calls go there; when it has
ended the gateway is asked to commit them, and only then the outcome is written.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx

from agentlightning.context import propagate_to
from agentlightning.errors import ConfigError, GatewayError, GatewayGone, NotFound, StoreError, StoreUnavailable
from agentlightning.schema import Attempt, Resource, Rollout, Run
from agentlightning.store.base import LEASE_S, Store

log = logging.getLogger(__name__)

RESOURCE = "agl.gateway"
"""Name and kind of the resource; its value has `url` and `secret`."""
ASK_S = 10.0
"""Seconds that a gateway may take for an answer."""
MOST_REMEMBERED = 64
"""Addresses that model calls are marked for; the oldest are forgotten."""

Place = tuple[str, str]
"""URL and secret."""


def gateway_resource(url: str, secret: str) -> Resource:
    """What a trainer publishes; again, with `moved=True`, when its gateway has another address."""
    return Resource(RESOURCE, 1, RESOURCE, {"url": url, "secret": secret})


def reachable(url: str) -> str:
    """`url` as other machines reach it: one that listens everywhere is called by this machine's name."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"


class Workers:
    """A trainer that runs no rollouts itself says now and then when nobody else is there to do it."""

    def __init__(self, store: Store, run_id: str, program: str) -> None:
        self._store, self._run_id, self._program = store, run_id, program
        self._next = time.monotonic() + LEASE_S / 2

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 60.0
        there = [w for w in self._store.workers(seen_within_s=2 * LEASE_S) if w.state == "running"]
        if not any(w.run_id in (None, self._run_id) and w.program == self._program for w in there):
            log.warning(
                "rollouts wait and no worker of %s is there: start `agl worker MODULE:%s --store URL`",
                self._program,
                self._program,
            )


def held(run: Run) -> bool:
    """Whether a trainer that lives works on it."""
    return run.state == "running" and run.lease_until > time.time()


class Gateways:
    """`url`, `cancel` and `flush` are what a `Runner` takes as `gateway_url`, `on_cancel` and `barrier`. Any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._client = httpx.Client(timeout=ASK_S, trust_env=False)
        self._lock = threading.Lock()
        self._open: dict[str, tuple[str, Place]] = {}
        """Attempt -> run and place, while its program runs."""
        self._ended: defaultdict[tuple[str, Place], list[str]] = defaultdict(list)
        """Attempts whose calls may not be committed."""
        self._marked: dict[str, Callable[[], None]] = {}

    def url(self, rollout: Rollout, attempt: Attempt) -> str:
        """Where the attempt's model calls go; empty where there are none to make. Raises StoreError when its run has published
        no gateway and pins resources."""
        place = self._place(rollout.run_id)
        if place is None:
            if rollout.resources:
                raise StoreError(
                    f"run {rollout.run_id} has published no gateway: its rollouts are run by workers while its Trainer fits."
                )
            return ""
        with self._lock:
            self._open[attempt.id] = rollout.run_id, place
            if place[0] not in self._marked:
                self._marked[place[0]] = propagate_to(place[0])
                if len(self._marked) > MOST_REMEMBERED:
                    self._marked.pop(next(iter(self._marked)))()
        return place[0]

    def alive(self, run_id: str) -> bool:
        """Whether the run's gateway answers, if it has one: rollouts of one that does not are better left in the queue."""
        place = self._place(run_id)
        try:
            return place is None or self._client.get(f"{place[0]}/control/{place[1]}").status_code == 204
        except httpx.HTTPError:
            return False

    def cancel(self, attempt_id: str) -> None:
        """No call of the attempt is answered from now on."""
        with self._lock:
            found = self._open.pop(attempt_id, None)
            if found is None:
                return
            self._ended[found].append(attempt_id)
        url, secret = found[1]
        self._client.post(f"{url}/control/{secret}/end", json=[attempt_id])

    def flush(self) -> None:
        """Returns when the calls of all attempts that have ended are committed. Raises GatewayGone when their gateway died
        with them, GatewayError when some are lost, StoreUnavailable while it is worth asking again."""
        with self._lock:
            asked = dict(self._ended)
        for (run_id, place), attempt_ids in asked.items():
            try:
                self._commit(run_id, place, list(attempt_ids))
            except StoreUnavailable:
                raise
            except Exception:
                self._forget(run_id, place, len(attempt_ids))
                raise
            self._forget(run_id, place, len(attempt_ids))

    def close(self) -> None:
        self._client.close()
        with self._lock:
            marked, self._marked = self._marked, {}
        for undo in marked.values():
            undo()

    def _forget(self, run_id: str, place: Place, count: int) -> None:
        with self._lock:
            left = self._ended.pop((run_id, place))[count:]
            if left:
                self._ended[run_id, place] = left

    def _commit(self, run_id: str, place: Place, attempt_ids: Sequence[str]) -> None:
        url, secret = place
        try:
            answer = self._client.post(f"{url}/control/{secret}/flush", json=attempt_ids)
        except httpx.HTTPError as error:
            if self._place(run_id) != place or not self._held(run_id):
                raise GatewayGone(
                    f"the gateway at {url} is gone, and with it calls of this attempt ({error})."
                ) from error
            raise StoreUnavailable(
                f"the gateway at {url} does not answer ({error}): see that this machine can reach it."
            ) from error
        if answer.status_code == 503:
            raise StoreUnavailable(answer.text)
        if answer.status_code == 410:
            raise GatewayGone(f"the gateway at {url} was started again: calls of this attempt may be lost.")
        if answer.status_code != 204:
            raise GatewayError(f"the gateway at {url} answers {answer.status_code}: {answer.text}")

    def _held(self, run_id: str) -> bool:
        return any(held(run) for run in self._store.runs() if run.id == run_id)

    def _place(self, run_id: str) -> Place | None:
        try:
            value = self._store.resource(run_id, RESOURCE).value
        except NotFound:
            return None
        if not isinstance(value.get("url"), str) or not isinstance(value.get("secret"), str):
            raise ConfigError(
                f"run {run_id} has a resource {RESOURCE!r} that is none of ours: give yours another name."
            )
        return value["url"].rstrip("/"), value["secret"]
