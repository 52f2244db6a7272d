"""OpenAI Agents programs as users write them; none knows of the library under test."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agents import (
    Agent,
    AsyncOpenAI,
    GuardrailFunctionOutput,
    Model,
    ModelResponse,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunContextWrapper,
    Runner,
    Usage,
    function_tool,
    input_guardrail,
)
from openai import DefaultAsyncHttpxClient
from openai.types.responses import ResponseOutputMessage, ResponseOutputText

from tests.adapters.world import World

KINDS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@asynccontextmanager
async def serving(world: World, kind: str = "chat", **client: Any) -> AsyncIterator[Model]:
    """A model of the SDK with a client of its own; only the trace context says where its calls belong."""
    http = DefaultAsyncHttpxClient(verify=False)  # reading the certificates takes longer than the run
    async with AsyncOpenAI(**(world.client | client), http_client=http) as openai:
        yield KINDS[kind]("base", openai)


@function_tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return f"{word} means {word}"


def calls(name: str, arguments: Any = None, id: str = "call_0") -> dict[str, Any]:
    """A reply that calls a tool."""
    return {"content": "", "tool_calls": [{"name": name, "arguments": arguments or {}, "id": id}]}


def seen(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a request of either kind."""
    items = request.get("messages") or request["input"]
    return items if isinstance(items, list) else [{"role": "user", "content": items}]


def told(request: dict[str, Any]) -> str:
    """What the agent was told to be."""
    said = request.get("instructions")
    return str(said if said is not None else next(m["content"] for m in seen(request) if m["role"] == "system"))


def answered(request: dict[str, Any]) -> bool:
    """Whether the result of a tool is among the items."""
    return any(item.get("role") == "tool" or item.get("type") == "function_call_output" for item in seen(request))


def call_once(name: str, arguments: Any = None) -> Any:
    """A model that calls a tool when it may and has seen no result yet."""
    return lambda request: calls(name, arguments) if request.get("tools") and not answered(request) else "done"


def agent(name: str, model: Model, **kwargs: Any) -> Agent[Any]:
    return Agent(name=name, instructions=f"You are {name}.", model=model, **kwargs)


def office(model: Model) -> Agent[Any]:
    """triage -> billing -> triage, as the model wants it."""
    billing = agent("billing", model, handoff_description="Bills.")
    triage = agent("triage", model, handoffs=[billing])
    billing.handoffs = [triage]
    return triage


def hand_over(*names: str) -> Any:
    """A model that hands over along a chain of agents."""
    following = dict(itertools.pairwise(names))

    def script(request: dict[str, Any]) -> Any:
        name = told(request).removeprefix("You are ").removesuffix(".")
        goal = following.get(name)
        return calls(f"transfer_to_{goal}", id=f"call_{name}") if goal else "paid"

    return script


def boss(model: Model) -> Agent[Any]:
    """An agent that has another one as a tool."""
    helper = agent("helper", model)
    return agent("boss", model, tools=[helper.as_tool("ask_helper", "Asks the helper.")])


def guarded(model: Model, trips: bool = False) -> Agent[Any]:
    """An agent whose input is judged by another agent."""
    judge = agent("judge", model)

    @input_guardrail
    async def fair(context: RunContextWrapper[Any], agent: Agent[Any], input: Any) -> GuardrailFunctionOutput:
        result = await Runner.run(judge, input)
        return GuardrailFunctionOutput(output_info=result.final_output, tripwire_triggered=trips)

    return agent("writer", model, input_guardrails=[fair])


class Scripted(Model):
    """A model of the user's own, which makes no request."""

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        text = ResponseOutputText(text="x", type="output_text", annotations=[])
        message = ResponseOutputMessage(id="m", content=[text], role="assistant", status="completed", type="message")
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise NotImplementedError("it answers at once")
        yield
