"""A small world for adapter tests: the fake engine, a real store, attempts to run programs in, and what came of it.

The proof of attribution is what arrives at the server: `check` compares the headers of every request with the spans in
the store.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from agentlightning import context
from agentlightning.recorder import Recorder
from agentlightning.schema import Outcome, Reward, Rollout, Span, SpanKind, new_id
from agentlightning.store import open_store
from tests.fakes.engine import FakeEngine, Script

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

T = TypeVar("T")
RAW = "raw"
"""The prompt of calls that a program makes with a client of its own."""


class Arrival(NamedTuple):
    """One request as the server saw it."""

    attempt_id: str
    span_id: str
    path: str
    body: dict[str, Any]

    @property
    def last(self) -> str:
        """The text of the last message, of a chat or of the Responses API."""
        said = self.body.get("messages") or self.body["input"]
        return said if isinstance(said, str) else str(said[-1].get("content"))

    @property
    def text(self) -> str:
        """All that was asked, as JSON."""
        return json.dumps(self.body, ensure_ascii=False)


class World:
    def __init__(self, folder: Path, reply: Script | str | None = None, engine: Any = None) -> None:
        """`engine`: something else that answers, such as a recording."""
        self.engine: Any = engine or FakeEngine(reply)
        self.store = open_store(f"sqlite:///{folder}/world.db")
        self.recorder = Recorder(self.store)
        self._models: list[ChatOpenAI] = []
        self._rollouts: dict[str, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.engine.start()
        self._undo = context.propagate_to(self.engine.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo()
        for model in self._models:
            model.http_client.close()
        self.recorder.close()
        self.store.close()
        self.engine.close()

    def llm(self, **kwargs: Any) -> ChatOpenAI:
        """LangChain's model with a static base URL: only the trace context says where a call belongs.

        Its HTTP clients are its own: those that langchain-openai shares between models by address cannot be closed,
        for a later test may get the same port.
        """
        from langchain_openai import ChatOpenAI
        from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

        given = {"base_url": self.engine.base_url, "api_key": "none", "model": "base", "max_retries": 0}
        given |= {"http_client": DefaultHttpxClient(), "http_async_client": DefaultAsyncHttpxClient()}
        model = ChatOpenAI(**(given | kwargs))
        self._models.append(model)
        return model

    @property
    def client(self) -> dict[str, Any]:
        """What an OpenAI client needs to reach the engine; the model is `base`."""
        return {"base_url": self.engine.base_url, "api_key": "none", "max_retries": 0}

    def raw(self) -> str:
        """A call past every framework."""
        from openai import OpenAI

        with OpenAI(**self.client) as client:
            answer = client.chat.completions.create(model="base", messages=[{"role": "user", "content": RAW}])
        return str(answer.choices[0].message.content)

    async def raw_async(self) -> str:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(**self.client) as client:
            answer = await client.chat.completions.create(model="base", messages=[{"role": "user", "content": RAW}])
        return str(answer.choices[0].message.content)

    def run(self, program: Coroutine[Any, Any, T]) -> T:
        """Runs async code to its end, its HTTP clients closed."""

        async def whole() -> T:
            try:
                return await program
            finally:
                for model in self._models:
                    await model.http_async_client.aclose()

        return asyncio.run(whole())

    @contextmanager
    def attempt(self) -> Iterator[context.Scope]:
        with self._lock:
            rollout = Rollout(id=new_id(), run_id="run", task={}, task_id="t", group_id="g")
            self.store.enqueue([rollout])
            ((_, attempt),) = self.store.lease("worker", run_id="run")
            self._rollouts[attempt.id] = rollout.id
        with context.use(context.Scope(attempt.id, recorder=self.recorder)) as scope:
            yield scope

    def arrivals(self, attempt_id: str | None = None) -> list[Arrival]:
        """In order of arrival; `attempt_id` "": those that named no attempt."""
        found = []
        for seen in self.engine.requests:
            trace = context.parse_traceparent(seen.headers.get("traceparent", "")) or ("", "")
            path = context.parse_baggage(seen.headers.get("baggage", "")).get(context.AGENT_KEY, "")
            found.append(Arrival(*trace, path, seen.body))
        return [arrival for arrival in found if attempt_id is None or arrival.attempt_id == attempt_id]

    def spans(self, scope: context.Scope, kind: SpanKind | None = None) -> list[Span]:
        return [span for span in self._episode(scope).spans if kind is None or span.kind is kind]

    def rewards(self, scope: context.Scope) -> list[Reward]:
        return list(self._episode(scope).rewards)

    def _episode(self, scope: context.Scope) -> Any:
        self.recorder.flush(scope.attempt_id)
        self.store.finish(scope.attempt_id, Outcome.OK)
        return self.store.episodes([self._rollouts[scope.attempt_id]])[0]

    def check(self, scope: context.Scope) -> list[str]:
        """The agent paths of the attempt's requests, in order, after every one was found under its own llm span."""
        arrivals = self.arrivals(scope.attempt_id)
        spans = {span.id: span for span in self.spans(scope)}
        for arrival in arrivals:
            assert arrival.span_id in spans, f"a request came from {arrival.span_id}, which is not in the trace"
            span = spans[arrival.span_id]
            assert span.kind is SpanKind.LLM, f"a request came from a span of kind {span.kind}"
            assert span.path == arrival.path
            assert span.end_ns is not None
            assert span.parent_id is None or span.parent_id in spans
        return [arrival.path for arrival in arrivals]
