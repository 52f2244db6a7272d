"""The program that is trained: a plain LangGraph of three agents. Nothing in it knows of training.

write_query -> execute -> check_query -> end, when correct
                  ^            |
                  └─ rewrite_query  (at most `MAX_TURNS` queries)
"""

from __future__ import annotations

from operator import add
from typing import Annotated, Any, Literal, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

from . import prompts
from .judge import show

MAX_TURNS = 3


class State(TypedDict, total=False):
    """`question`, `schema` and `database` come in; `sql` is the answer, `queries` are all that were tried."""

    question: str
    schema: str
    database: str
    sql: str
    queries: Annotated[list[str], add]
    result: str
    verdict: str
    turns: int


def build_graph(
    base_url: str,
    api_key: str,
    model: str,
    *,
    temperature: float = 0.0,
    max_tokens: int = 64,
    timeout: float = 120.0,
    max_turns: int = MAX_TURNS,
) -> Any:
    """The compiled graph, speaking to an OpenAI-compatible server."""
    llm = ChatOpenAI(
        base_url=base_url,
        api_key=api_key,
        model=model,
        temperature=temperature,
        max_tokens=max_tokens,
        timeout=timeout,
        max_retries=2,
    )

    def tried(sql: str, turns: int) -> State:
        return {"sql": sql, "queries": [sql], "turns": turns}

    def write_query(state: State) -> State:
        messages = prompts.write_prompt(state["schema"], state["question"])
        return tried(prompts.query_in(llm.invoke(messages).text), 1)

    def execute(state: State) -> State:
        return {"result": show(state["database"], state["sql"])}

    def check_query(state: State) -> State:
        messages = prompts.check_prompt(state["question"], state["sql"], state["result"])
        return {"verdict": llm.invoke(messages).text.strip()}

    def rewrite_query(state: State) -> State:
        messages = prompts.rewrite_prompt(
            state["schema"], state["question"], state["sql"], state["result"], state["verdict"]
        )
        return tried(prompts.query_in(llm.invoke(messages).text), state["turns"] + 1)

    def after_execute(state: State) -> Literal["check_query", "__end__"]:
        # After the last turn nothing can be changed any more, so nobody is asked.
        return "check_query" if state["turns"] < max_turns else END

    def after_check(state: State) -> Literal["rewrite_query", "__end__"]:
        return END if state["verdict"].lower().startswith("correct") else "rewrite_query"

    graph = StateGraph(State)
    for node in (write_query, execute, check_query, rewrite_query):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "write_query")
    graph.add_edge("write_query", "execute")
    graph.add_conditional_edges("execute", after_execute)
    graph.add_conditional_edges("check_query", after_check)
    graph.add_edge("rewrite_query", "execute")
    return graph.compile()
