"""LangGraph programs as users write them; none knows of the library under test."""

from __future__ import annotations

import operator
import re
from importlib import metadata
from typing import Annotated, Any, TypedDict

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

NAMES_REACH_US = [int(part) for part in re.findall(r"\d+", metadata.version("langchain"))][:3] >= [1, 2, 4]
"""Since then create_agent(name=...) tells its name to callbacks; before, the node's name is what there is."""


class Notes(TypedDict):
    question: str
    notes: Annotated[list[str], operator.add]


def start(question: str = "q") -> dict[str, Any]:
    return {"question": question, "notes": []}


@tool
def look_up(word: str) -> str:
    """Looks a word up."""
    return f"{word} means {word}"


def call_tool_once(request: dict[str, Any]) -> str | dict[str, Any]:
    """A model that asks for a tool when it has one and has seen no result yet."""
    if request.get("tools") and not any(message["role"] == "tool" for message in request["messages"]):
        return {"content": "", "tool_calls": [{"name": "look_up", "arguments": {"word": "x"}}]}
    return "done"


def ask(llm: BaseChatModel, role: str) -> Any:
    """A node that asks once; its prompt names the role and carries the question."""

    def node(state: Notes) -> dict[str, Any]:
        return {"notes": [llm.invoke(f"{role}: {state['question']}").content]}

    return node


def ask_async(llm: BaseChatModel, role: str) -> Any:
    async def node(state: Notes) -> dict[str, Any]:
        return {"notes": [(await llm.ainvoke(f"{role}: {state['question']}")).content]}

    return node


def pair(llm: BaseChatModel, make: Any = ask) -> Any:
    """writer -> checker"""
    graph = StateGraph(Notes)
    graph.add_node("writer", make(llm, "writer"))
    graph.add_node("checker", make(llm, "checker"))
    graph.add_edge(START, "writer")
    graph.add_edge("writer", "checker")
    graph.add_edge("checker", END)
    return graph.compile()


def fan_out(llm: BaseChatModel, width: int = 3, make: Any = ask) -> Any:
    """`width` checkers at once, through Send."""
    graph = StateGraph(Notes)
    graph.add_node("checker", make(llm, "checker"))
    graph.add_conditional_edges(
        START, lambda state: [Send("checker", {"question": f"{state['question']} {i}"}) for i in range(width)]
    )
    graph.add_edge("checker", END)
    return graph.compile()


def single(name: str, node: Any) -> Any:
    """One node."""
    graph = StateGraph(Notes)
    graph.add_node(name, node)
    graph.add_edge(START, name)
    return graph.compile()


def nested(llm: BaseChatModel, make: Any = ask) -> Any:
    """A team graph (writer -> checker) in the node `team`, then an editor."""
    graph = StateGraph(Notes)
    graph.add_node("team", pair(llm, make))
    graph.add_node("editor", make(llm, "editor"))
    graph.add_edge(START, "team")
    graph.add_edge("team", "editor")
    return graph.compile()


def helper(llm: BaseChatModel, name: str | None = None) -> Any:
    """A create_agent with a tool, called in the node `helper`."""
    agent = create_agent(llm, [look_up], name=name)
    return single("helper", lambda state: {"notes": [talk(agent, state["question"])]})


def talk(agent: Any, text: str) -> str:
    return str(agent.invoke({"messages": [("user", text)]})["messages"][-1].content)
