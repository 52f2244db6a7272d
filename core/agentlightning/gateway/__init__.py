"""An OpenAI-compatible proxy: the next service in the trace, and the only place that sees the sampled ids.

A request is read (`identity`), translated (`dialects`), looked up (`directory`), shaped (`sampling`), sent (`upstream`),
answered (`proxy`, `stream`) and recorded (`capture`, `places`, `checks`, `writer`).
"""

from agentlightning.gateway.server import Gateway

__all__ = ["Gateway"]
