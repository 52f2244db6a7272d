"""The program that is trained: a plain AutoGen team. Nothing in it knows of training.

solver (calls the calculator and says what came out) -> critic -> end, when it approves
   ^                                                   |
   └──────────────── at most two attempts ─────────────┘
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ChatCompletionClient, ModelFamily
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient

SOLVER = "Solve the problem with the calculator. Give it the whole expression."
CRITIC = "Is this solution right? Say APPROVE or REVISE."
TURNS = 3
"""solver, critic, solver: after the second attempt nothing can be changed any more, so nobody is asked."""

_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """Calculates an expression of numbers, + - * / and brackets."""
    if len(expression) > 200:
        raise ValueError("the expression is too long")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError("this is no expression") from None
    return f"{expression.strip()} = {int(value) if value == int(value) else round(value, 4)}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, symbol, right) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_value(left), _value(right))
        case ast.UnaryOp(symbol, operand) if type(symbol) in _OPERATORS:
            return _OPERATORS[type(symbol)](_value(operand))
    raise ValueError("the calculator knows numbers, + - * / and brackets")


TOOL = FunctionTool(calculator, description="Calculates an expression.")


def client(base_url: str, api_key: str, model: str, *, max_tokens: int = 48) -> ChatCompletionClient:
    """A model of an OpenAI-compatible server. It keeps no connection, so that nobody need close it."""
    info: Any = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "structured_output": False,
        "family": ModelFamily.UNKNOWN,
    }
    return OpenAIChatCompletionClient(
        model=model,
        base_url=base_url,
        api_key=api_key,
        model_info=info,
        temperature=0.0,
        max_tokens=max_tokens,
        default_headers={"Connection": "close"},
    )


def build_team(model: ChatCompletionClient) -> RoundRobinGroupChat:
    """Agents remember what was said, so each problem has a team of its own."""
    solver = AssistantAgent("solver", model, tools=[TOOL], system_message=SOLVER, tool_call_summary_format="{result}")
    critic = AssistantAgent("critic", model, system_message=CRITIC)
    return RoundRobinGroupChat(
        [solver, critic], termination_condition=TextMentionTermination("APPROVE"), max_turns=TURNS
    )


def answer_of(result: TaskResult) -> float | None:
    """The last number that the solver said, in its last attempt; None without one."""
    said = [message for message in result.messages if message.source == "solver" and hasattr(message, "to_text")]
    texts = [text for message in said if isinstance(text := message.content, str)]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", texts[-1].replace(",", "")) if texts else []
    return float(numbers[-1]) if numbers else None
