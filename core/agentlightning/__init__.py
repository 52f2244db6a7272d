"""Train the agents you choose inside the multi-agent program you already have: `import agentlightning as agl`.

This is the one public door. Each name is loaded when it is first used, so that the import costs next to nothing and
asks for no framework.
"""

TYPE_CHECKING = False  # what type checkers read as true, without the 10 ms that importing `typing` takes

if TYPE_CHECKING:
    from agentlightning.context import agent
    from agentlightning.emit import emit_annotation, emit_exception, emit_message, emit_object, emit_reward, operation
    from agentlightning.errors import AgentLightningError
    from agentlightning.hooks import hookimpl
    from agentlightning.plugins import algorithm, algorithm_plugin, callback, install
    from agentlightning.prompts import PromptTemplate
    from agentlightning.runner import rollout
    from agentlightning.schema import Attempt, Completion, Group, Reward, Rollout, Span, Transition
    from agentlightning.store import open_store
    from agentlightning.trainer import Trainer

__all__ = [
    "AgentLightningError",
    "Attempt",
    "Completion",
    "Group",
    "PromptTemplate",
    "Reward",
    "Rollout",
    "Span",
    "Trainer",
    "Transition",
    "agent",
    "algorithm",
    "algorithm_plugin",
    "callback",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "hookimpl",
    "install",
    "open_store",
    "operation",
    "rollout",
]

_HOMES = {
    "context": ("agent",),
    "emit": ("emit_annotation", "emit_exception", "emit_message", "emit_object", "emit_reward", "operation"),
    "errors": ("AgentLightningError",),
    "hooks": ("hookimpl",),
    "plugins": ("algorithm", "algorithm_plugin", "callback", "install"),
    "prompts": ("PromptTemplate",),
    "runner": ("rollout",),
    "schema": ("Attempt", "Completion", "Group", "Reward", "Rollout", "Span", "Transition"),
    "store": ("open_store",),
    "trainer": ("Trainer",),
}

# Hidden from type checkers: to them a name that is not listed above must stay an error.
if not TYPE_CHECKING:

    def __getattr__(name):
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"agentlightning has no {name!r}; it offers {', '.join(__all__)}.")
        from importlib import import_module

        globals()[name] = value = getattr(import_module(f"agentlightning.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING"})
