"""Recorded runs of real programs, played again: a server answers each model call with what the real model said then.

`play` gives a world whose engine is the recording. A test writes the program that was recorded, runs it, and calls
`prove`: the program asked the model what the recorded one asked, as often, and the trace says who asked and which tools
were used. What is compared of a request is `gist`: what a person would read in it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from agentlightning import context
from agentlightning.schema import SpanKind
from tests.adapters.world import World
from tests.conformance.adapter_proof import prove as prove_trace
from tests.fakes.engine import Seen
from tests.fakes.http import Exchange, Server

FOLDER = "agent_traces"
CALLS = ("/v1/chat/completions", "/v1/responses")
"""Model calls; what else was recorded (searches, telemetry) is for the program to do without."""
Json = dict[str, Any]


class Recording:
    """One file: model calls in order, and what the tools said."""

    def __init__(self, file: Path, run: int = 0, of: int = 1) -> None:
        """`run` of several equal runs that are in one file."""
        told = json.loads(file.read_text("utf-8"))
        calls = [one for one in told["interactions"] if one["request"]["uri"].endswith(CALLS)]
        self.calls = calls[run * len(calls) // of : (run + 1) * len(calls) // of]

    @property
    def tools_used(self) -> list[tuple[str, Any]]:
        """Name and arguments of every tool that the model asked for, in order, and that the program ran."""
        asked: dict[str, tuple[str, Any]] = {}
        for call in self.calls:
            for item in _items(call["request"]["body"]):
                asked |= {item["id"]: (item["name"], item["arguments"])} if item["kind"] == "call" else {}
        return list(asked.values())

    def results(self, name: str) -> Iterator[str]:
        """What a tool said, each time."""
        seen, names = set[str](), dict[str, str]()
        for call in self.calls:
            for item in _items(call["request"]["body"]):
                if item["kind"] == "call":
                    names[item["id"]] = item["name"]
                elif item["kind"] == "result" and names.get(item["id"]) == name and item["id"] not in seen:
                    seen.add(item["id"])
                    yield item["text"]


class Player:
    """An engine (`tests.fakes.engine.FakeEngine`) that plays a recording, one answer after the other."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.requests: list[Seen] = []
        self.odd: list[str] = []
        """Requests that the recording has no answer to."""
        self._server = Server(self._answer)

    def start(self) -> Self:
        self._server.start()
        return self

    def close(self) -> None:
        self._server.stop()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def base_url(self) -> str:
        return f"{self._server.url}/v1"

    async def _answer(self, exchange: Exchange) -> None:
        left = self.recording.calls[len(self.requests) :]
        if not left or not left[0]["request"]["uri"].endswith(exchange.path):
            self.odd.append(f"{exchange.method} {exchange.path}")
            return exchange.send(404, b'{"error": {"message": "the recording ends here"}}')
        self.requests.append(Seen(json.loads(exchange.body), exchange.headers, exchange.path))
        response = left[0]["response"]
        if isinstance(response["body"], str):
            exchange.start_stream()
            exchange.chunk(response["body"].encode())
            exchange.end_stream()
        else:
            exchange.send(int(response["status"]), json.dumps(response["body"]).encode())


@contextmanager
def play(recording: Recording, folder: Path, boilerplate: str = "") -> Iterator[World]:
    """`boilerplate`: a pattern of what the framework itself adds in some releases; it is not compared."""
    with World(folder, engine=Player(recording)) as world:
        yield world
        player = world.engine
        assert not player.odd, f"the program asks for what was not recorded: {player.odd}"
        assert len(player.requests) == len(recording.calls), "the program makes fewer model calls than the recorded one"
        for number, (seen, call) in enumerate(zip(player.requests, recording.calls, strict=True)):
            asked, recorded = (gist(body, boilerplate) for body in (seen.body, call["request"]["body"]))
            assert asked == recorded, f"model call {number} asks something else"


def prove(
    world: World,
    scope: context.Scope,
    paths: Sequence[str],
    *,
    tools: Mapping[str, str] | None = None,
    failed: Sequence[str] = (),
) -> None:
    """Model calls by agent, in order; and all tools that were used, with their arguments.

    `tools`: name -> agent path, for every tool; a hand-off is none. `failed`: names of those that failed.
    """
    recording: Recording = world.engine.recording
    assert prove_trace(world, scope, {"chat"}) == list(paths)
    used = world.spans(scope, SpanKind.TOOL)
    expected = [(name, _plain(arguments)) for name, arguments in recording.tools_used if name in (tools or {})]
    said = [(span.name, _plain(span.attributes["gen_ai.tool.call.arguments"])) for span in used]
    assert _counted(said) == _counted(expected)
    assert {span.name: span.path for span in used} == dict(tools or {})
    assert {span.name for span in used if span.status == "error"} == set(failed)


def _counted(used: Sequence[tuple[str, Any]]) -> Counter[str]:
    return Counter(json.dumps(one, sort_keys=True) for one in used)


def gist(body: Json, boilerplate: str = "") -> Json:
    """What a request asks: model, streaming, tools, and what was said, by whom. CrewAI changed the case of tools."""
    system = [{"kind": "system", "text": body["instructions"]}] if body.get("instructions") else []
    said = [{key: value for key, value in item.items() if key != "id"} for item in _items(body)]
    if boilerplate:
        said = [item | {"text": re.sub(boilerplate, "", item["text"])} if "text" in item else item for item in said]
        said = [item for item in said if item.get("text") != ""]
    tools = sorted((tool.get("function") or tool)["name"].lower() for tool in body.get("tools") or ())
    return {"model": body["model"], "stream": bool(body.get("stream")), "tools": tools, "said": system + said}


def _items(body: Json) -> Iterator[Json]:
    """Messages, tool calls and their results, of a chat or of the Responses API, as one kind of list."""
    said = body.get("messages") or body.get("input") or []
    for item in [{"role": "user", "content": said}] if isinstance(said, str) else said:
        if item.get("type") == "function_call":
            yield _call(item["call_id"], item)
        elif item.get("type") == "function_call_output":
            yield {"kind": "result", "id": item["call_id"], "text": item["output"]}
        elif item["role"] == "tool":
            yield {"kind": "result", "id": item["tool_call_id"], "text": _text(item["content"])}
        else:
            text = _text(item.get("content"))
            if text or not item.get("tool_calls"):
                yield {"kind": item["role"], "text": text}
            for call in item.get("tool_calls") or ():
                yield _call(call["id"], call["function"])


def _call(key: str, function: Json) -> Json:
    return {"kind": "call", "id": key, "name": function["name"].lower(), "arguments": _plain(function["arguments"])}


def _plain(arguments: Any) -> Any:
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
