"""CrewAI programs as users write them; none knows of the library under test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from crewai import LLM, Agent, Crew, Process, Task
from crewai.llms.base_llm import BaseLLM
from crewai.tools import tool
from crewai.tools.agent_tools.delegate_work_tool import DelegateWorkTool
from pydantic import BaseModel

from tests.adapters.world import World

DELEGATE, ASK = "delegate_work_to_coworker", "ask_question_to_coworker"


def llm(world: World, **settings: Any) -> BaseLLM:
    """A model of CrewAI's native OpenAI provider; only the trace context says where its calls belong."""
    return LLM(**({"model": "base", "provider": "openai"} | world.client | settings))


@contextmanager
def serving(world: World, **settings: Any) -> Iterator[BaseLLM]:
    """The same, its HTTP clients closed in the end."""
    model = llm(world, **settings)
    try:
        yield model
    finally:
        asyncio.run(close(model))


async def close(model: BaseLLM) -> None:
    """What CrewAI itself leaves open; its attributes were named otherwise once."""
    clients = vars(model) | (model.__pydantic_private__ or {} if isinstance(model, BaseModel) else {})
    for name in ("client", "_client"):
        if name in clients:
            clients[name].close()
    for name in ("async_client", "_async_client"):
        if name in clients:
            await clients[name].close()


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return f"{word} means {word}"


def agent(role: str, model: BaseLLM, **settings: Any) -> Agent:
    return Agent(role=role, goal=f"Be a {role}.", backstory=f"A born {role}.", llm=model, **settings)


def task(prompt: str, agent: Agent | None = None, **settings: Any) -> Task:
    return Task(description=prompt, expected_output="A word.", agent=agent, **settings)


def crew(prompt: str, *agents: Agent, **settings: Any) -> Crew:
    """Each agent does the same task, one after the other."""
    return Crew(agents=list(agents), tasks=[task(prompt, one) for one in agents], **settings)


def hierarchy(prompt: str, model: BaseLLM, *roles: str) -> Crew:
    """A manager that CrewAI makes itself, above agents of these roles."""
    agents = [agent(role, model) for role in roles]
    return Crew(agents=agents, tasks=[task(prompt)], process=Process.hierarchical, manager_llm=model)


def office(model: BaseLLM) -> Agent:
    """triage, whose answer is whatever billing says."""
    billing = agent("billing", model)
    hand_over = DelegateWorkTool(agents=[billing], description="Hands over to billing.", result_as_answer=True)
    return agent("triage", model, tools=[hand_over])


def calls(name: str, arguments: Any = None, id: str = "call_0") -> dict[str, Any]:
    """A reply that calls a tool."""
    return {"content": "", "tool_calls": [{"name": name, "arguments": arguments or {}, "id": id}]}


def delegates(coworker: str, id: str = "call_0") -> dict[str, Any]:
    return calls(DELEGATE, {"task": "help me", "context": "none", "coworker": coworker}, id)


def answered(request: dict[str, Any]) -> bool:
    """Whether the result of a tool is among the messages."""
    return any(message["role"] == "tool" for message in request["messages"])


def offers(request: dict[str, Any], name: str) -> bool:
    return any(one["function"]["name"] == name for one in request.get("tools") or ())


def call_once(name: str, arguments: Any = None) -> Any:
    """A model that calls a tool when it may and has seen no result yet."""
    return lambda request: calls(name, arguments) if offers(request, name) and not answered(request) else "done"


class Scripted(BaseLLM):
    """A model of the user's own, which makes no request."""

    def call(self, *args: Any, **kwargs: Any) -> str:
        return "x"

    async def acall(self, *args: Any, **kwargs: Any) -> str:
        return "x"
