"""What the gateway knows of attempts, rollouts and endpoints: read from the store, cached, bounded.

Pinned resource versions never change and are kept; whether an attempt still runs is asked again after `refresh_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import msgspec

from agentlightning.errors import NotFound
from agentlightning.gateway.problems import Problem
from agentlightning.schema import FINAL_STATES, Attempt, Budget, Endpoint, Resource, Rollout, selector_of
from agentlightning.store.base import Store

POLICY = "policy"
"""Name of the resource that serves calls whose `model` is no resource; also the kind of what is trained."""
SERVED = frozenset({POLICY, "llm"})
"""Kinds of resources that are endpoints."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Place(msgspec.Struct, frozen=True):
    """A known attempt."""

    rollout: Rollout
    attempt: Attempt

    @property
    def over(self) -> bool:
        """Ended, cancelled or replaced by a newer attempt."""
        return (
            self.attempt.outcome is not None
            or self.rollout.state in FINAL_STATES
            or self.attempt.number < self.rollout.attempts
        )


class Target(msgspec.Struct, frozen=True):
    """Who will answer a call."""

    base_url: str
    api_key: str
    model: str
    """The name to ask the engine for."""
    policy: str | None
    """The policy resource; None for other endpoints."""
    version: int | None
    trained: bool
    stop_ids: frozenset[int] = frozenset()
    ask: dict[str, Any] = {}
    """Further fields that make the server send tokens."""
    context: int = 1 << 30
    budget: Budget = Budget()
    tokenize: str = ""
    replicas: tuple[str, ...] = ()
    """All base URLs that serve the same; those beyond `base_url`."""


class Cache(Generic[K, V]):
    """The most recent `size` answers of a blocking function; those who ask for the same key wait for one call."""

    def __init__(self, load: Callable[[K], V], pool: ThreadPoolExecutor, size: int, clock: Callable[[], float]) -> None:
        self._load, self._pool, self._size, self._clock = load, pool, size, clock
        self._entries: OrderedDict[K, tuple[float, asyncio.Future[V]]] = OrderedDict()

    async def get(self, key: K, max_age: float | None = None) -> V:
        entry = self._entries.get(key)
        if entry is None or (max_age is not None and self._clock() - entry[0] > max_age):
            entry = self._clock(), asyncio.get_running_loop().run_in_executor(self._pool, self._load, key)
            self._entries[key] = entry
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        try:
            return entry[1].result() if entry[1].done() else await asyncio.shield(entry[1])
        except Exception:
            if self._entries.get(key) is entry:
                del self._entries[key]
            raise


class Directory:
    """Looks things up; raises Problem for what cannot be served. All methods run on the gateway's loop."""

    def __init__(
        self, store: Store, *, refresh_s: float = 1.0, size: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._refresh_s = store, refresh_s
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="agl-gateway-lookup")
        self._places: Cache[str, Place | None] = Cache(self._load_place, self._pool, size, clock)
        self._pinned: Cache[tuple[str, str, int], Resource | None] = Cache(self._load_pinned, self._pool, size, clock)
        self._newest: Cache[tuple[str | None, str], Resource | None] = Cache(self._load_newest, self._pool, size, clock)

    async def place(self, attempt_id: str | None) -> Place | None:
        """None when the store does not know this attempt."""
        return await self._places.get(attempt_id, self._refresh_s) if attempt_id else None

    async def target(self, place: Place | None, model: str, path: str) -> Target:
        """The endpoint for a call of agent `path` that asks for `model`."""
        resource = await self._resource(place, model)
        if resource is None:
            raise Problem(404, "no_policy", _no_policy(place, model))
        endpoint = _endpoint(resource)
        chosen = next((route for route in endpoint.routes if selector_of([route.selector], path)), None)
        if chosen is None:
            selectors = ", ".join(route.selector for route in endpoint.routes) or "none"
            raise Problem(
                404,
                "no_route",
                f"resource {resource.name!r} has no route for agent {path!r} (its selectors: {selectors}): "
                "add a route with the selector '*'.",
            )
        if chosen.base_url:
            return Target(chosen.base_url, chosen.api_key, chosen.model, None, None, False)
        policy = resource.name if resource.kind == POLICY else None
        return Target(
            endpoint.base_url,
            endpoint.api_key,
            chosen.model,
            policy,
            resource.version if policy else None,
            chosen.trained,
            frozenset(endpoint.stop_ids),
            endpoint.ask,
            endpoint.context,
            endpoint.budget,
            endpoint.tokenize,
            endpoint.replicas,
        )

    async def models(self, place: Place | None) -> list[str]:
        """Names that a call from here may ask for."""
        names = list(place.rollout.resources) if place else []
        found = [(name, await self._resource(place, name)) for name in names or [POLICY]]
        return [name for name, resource in found if resource and resource.name == name and resource.kind in SERVED]

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _resource(self, place: Place | None, model: str) -> Resource | None:
        if place is None:
            return await self._newest.get((None, POLICY), self._refresh_s)
        rollout = place.rollout
        for name in (model, POLICY):
            version = rollout.resources.get(name)
            if version is None:
                continue
            found = await self._pinned.get((rollout.run_id, name, version))
            if found is not None and found.kind in SERVED:
                return found
        return await self._newest.get((rollout.run_id, POLICY), self._refresh_s)

    def _load_place(self, attempt_id: str) -> Place | None:
        try:
            return Place(*self._store.attempt(attempt_id))
        except NotFound:
            return None

    def _load_pinned(self, key: tuple[str, str, int]) -> Resource | None:
        return self._find(*key)

    def _load_newest(self, key: tuple[str | None, str]) -> Resource | None:
        run_id, name = key
        if run_id is not None:
            return self._find(run_id, name, None)
        running = (run.id for run in reversed(self._store.runs()) if run.state == "running")
        return next((found for run in running if (found := self._find(run, name, None))), None)

    def _find(self, run_id: str, name: str, version: int | None) -> Resource | None:
        try:
            return self._store.resource(run_id, name, version)
        except NotFound:
            return None


def _endpoint(resource: Resource) -> Endpoint:
    try:
        endpoint: Endpoint = msgspec.convert(resource.value, Endpoint)
    except msgspec.ValidationError as error:
        detail = f"resource {resource.name!r} version {resource.version} is no endpoint ({error})"
        raise Problem(500, "bad_resource", f"{detail}: publish msgspec.to_builtins(Endpoint(...)).") from error
    if not endpoint.base_url.startswith(("http://", "https://")):
        detail = f"resource {resource.name!r} has the base URL {endpoint.base_url!r}"
        raise Problem(500, "bad_resource", f"{detail}: publish one that starts with http:// or https://.")
    return endpoint


def _no_policy(place: Place | None, model: Any) -> str:
    if place is None:
        return (
            "this call names no known attempt, and no running run has published a policy that could serve it: call "
            "`policy.base_url` inside a rollout, or pass the callback so that the trace context names the attempt."
        )
    return (
        f"rollout {place.rollout.id} has no endpoint for the model {model!r}: publish a resource of that name, or one "
        f"named {POLICY!r}, of kind 'policy' or 'llm'."
    )
