"""The APIs that agents speak besides chat completions, each in a file of its own."""

from agentlightning.gateway.dialects import messages, responses
from agentlightning.gateway.dialects.base import Dialect, Memory, Speech, engine_problem

DIALECTS: tuple[Dialect, ...] = (responses, messages)

__all__ = ["DIALECTS", "Dialect", "Memory", "Speech", "engine_problem"]
