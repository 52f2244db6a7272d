"""A store, a run, a fake engine and a gateway, ready for calls: what tests of the gateway need and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import openai

from agentlightning.gateway import Gateway
from agentlightning.schema import (
    Attempt,
    Completion,
    Endpoint,
    Episode,
    Outcome,
    Resource,
    Rollout,
    Route,
    Span,
    new_id,
)
from agentlightning.store import open_store
from tests.fakes.engine import FakeEngine, Script

HELLO = [{"role": "user", "content": "hello"}]


async def no_wait(seconds: float) -> None:
    """Stands in for the pause between tries."""


class World:
    """`reply` scripts the engine, which serves as resource `policy`, version 3, unless `publish` says otherwise."""

    def __init__(
        self, folder: Path, reply: Script | str | None = None, routes: Sequence[Route] = (), **gateway: Any
    ) -> None:
        self.engine = FakeEngine(reply, version=3).start()
        self.store = open_store(f"sqlite:///{folder}/store.db")
        self.run = self.store.begin_run("test", {}, "here:1:nonce")
        self.publish("policy", 3, self.engine.endpoint(routes))
        self.gateway = Gateway(self.store, **({"sleep": no_wait} | gateway)).start()
        self._clients: list[openai.OpenAI] = []
        self.http = httpx.Client(timeout=30)

    def close(self) -> None:
        self.http.close()
        for client in self._clients:
            client.close()
        self.gateway.close()
        self.engine.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def publish(self, name: str, version: int, endpoint: Endpoint, kind: str = "policy") -> None:
        self.store.publish(self.run.id, [Resource(name, version, kind, msgspec.to_builtins(endpoint))])

    def attempt(self, **fields: Any) -> Attempt:
        """A running attempt of a new rollout with these fields."""
        given: dict[str, Any] = {
            "id": new_id(),
            "task": {},
            "task_id": "t",
            "group_id": "g",
            "resources": {"policy": 3},
        }
        self.store.enqueue([Rollout(**given | {"run_id": self.run.id} | fields)])
        ((_, attempt),) = self.store.lease("worker", 1)
        return attempt

    def base_url(self, attempt: Attempt | None = None, agent: str = "") -> str:
        prefix = f"/attempts/{attempt.id}" if attempt else ""
        return f"{self.gateway.url}{prefix}{f'/agents/{agent}' if agent else ''}/v1"

    def client(self, attempt: Attempt | None = None, agent: str = "", retries: int = 0) -> openai.OpenAI:
        """A real SDK client for this attempt."""
        client = openai.OpenAI(base_url=self.base_url(attempt, agent), api_key="any", max_retries=retries)
        self._clients.append(client)
        return client

    def post(
        self, attempt: Attempt | None = None, *, url: str = "", headers: Any = None, **body: Any
    ) -> httpx.Response:
        """A plain HTTP call, as a program without any SDK makes it."""
        request = {"model": "policy", "messages": HELLO} | body
        return self.http.post(f"{url or self.base_url(attempt)}/chat/completions", json=request, headers=headers)

    def calls(self, attempt: Attempt) -> list[Completion]:
        """What was recorded of the attempt, which ends with this."""
        return self._episode(attempt).completions

    def spans(self, attempt: Attempt) -> list[Span]:
        return self._episode(attempt).spans

    def strays(self) -> list[Completion]:
        """The unattributed calls."""
        self.gateway.flush()
        return self.store.unattributed()

    def _episode(self, attempt: Attempt) -> Episode:
        self.gateway.flush()
        self.store.finish(attempt.id, Outcome.OK)
        (episode,) = self.store.episodes([attempt.rollout_id])
        return episode
