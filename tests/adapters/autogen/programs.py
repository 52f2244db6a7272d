"""AutoGen programs as users write them; none knows of the library under test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from inspect import signature
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_core import CancellationToken
from autogen_core.models import ChatCompletionClient, ModelFamily
from autogen_core.tools import BaseTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.models.replay import ReplayChatCompletionClient

from tests.adapters.world import World

NAMED = "name" in signature(RoundRobinGroupChat.__init__).parameters
named = pytest.mark.skipif(not NAMED, reason="this release gives teams no names, and lets them be no members or tools")
IDS_REACH_TOOLS = "call_id" in signature(BaseTool.run_json).parameters
INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": ModelFamily.UNKNOWN,
    "multiple_system_messages": True,
}


@asynccontextmanager
async def serving(world: World, **client: Any) -> AsyncIterator[ChatCompletionClient]:
    """A model client; only the trace context says where its calls belong."""
    given = {"model": "base", "model_info": INFO} | world.client | client
    model = OpenAIChatCompletionClient(**given)
    try:
        yield model
    finally:
        await model.close()


async def look_up(word: str) -> str:
    """Looks a word up."""
    return f"{word} means {word}"


def agent(name: str, model: ChatCompletionClient, **kwargs: Any) -> AssistantAgent:
    return AssistantAgent(name, model, system_message=f"You are {name}.", description=f"It is {name}.", **kwargs)


def round_robin(*members: Any, turns: int | None = None, **kwargs: Any) -> RoundRobinGroupChat:
    """Each speaks once, or `turns` in all."""
    return RoundRobinGroupChat(list(members), max_turns=turns or len(members), **kwargs)


def swarm(model: ChatCompletionClient) -> Swarm:
    """triage -> billing, as the model wants it."""
    triage = agent("triage", model, handoffs=["billing"])
    return Swarm([triage, agent("billing", model, handoffs=["triage"])], termination_condition=MaxMessageTermination(8))


def calls(name: str, arguments: Any = None, id: str = "call_0") -> dict[str, Any]:
    """A reply that calls a tool."""
    return {"content": "", "tool_calls": [{"name": name, "arguments": arguments or {}, "id": id}]}


def told(request: dict[str, Any]) -> str:
    """Who the agent was told to be."""
    said = next((m["content"] for m in request["messages"] if m["role"] == "system"), "")
    return str(said).removeprefix("You are ").removesuffix(".")


def answered(request: dict[str, Any]) -> bool:
    """Whether the result of a tool is among the messages."""
    return any(message["role"] == "tool" for message in request["messages"])


def call_once(name: str, arguments: Any = None) -> Any:
    """A model that calls a tool when it may and has seen no result yet."""
    return lambda request: calls(name, arguments) if request.get("tools") and not answered(request) else "done"


class Broken(BaseChatAgent):
    """An agent of the user's own, which raises."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name, "It breaks.")
        self._error = error

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        raise self._error

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """It has no state."""


def scripted(*answers: str) -> ReplayChatCompletionClient:
    """A model inside this process."""
    return ReplayChatCompletionClient(list(answers), model_info=INFO)
