"""Which agent a LangGraph run belongs to, from its metadata and the place of the run around it.

Every run of a graph bears the names of the graphs and nodes around it (its checkpoint namespace). The nodes that every
agent graph has inside (`model`, `agent`, `tools`) are the agent itself, not parts of it; a name that was given to the
agent, or our own `agent` metadata, says more than a node's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentlightning.context import join

GENERIC_NODES = frozenset({"model", "agent", "tools"})
"""What create_agent and create_react_agent call the nodes inside an agent."""


class Place(NamedTuple):
    """Where in the nest of graphs and agents a run is."""

    base: str = ""
    """The agent path around the outermost graph."""
    names: tuple[str, ...] = ()
    depth: int = 0
    """Levels of LangGraph's checkpoint namespace that are in `names`."""
    agent: str | None = None
    """The `create_agent` name in force."""
    forced: str | None = None
    """The `agent` metadata in force."""
    tail: str = "base"
    """What the last level is: `base`, `node`, `agent`, or `tools` (an agent's tool node)."""

    @property
    def path(self) -> str:
        return join(self.base, *self.names)

    def at(self, metadata: Mapping[str, Any]) -> Place:
        """The place of a run with this metadata, given the place of its parent."""
        nodes = _nodes(metadata)
        agent = _text(metadata.get("lc_agent_name"))
        forced = _text(metadata.get("agent"))
        place = self
        for node in nodes[self.depth :]:
            place = place._enter(node)
        if agent and agent != self.agent:
            known = len(nodes) - self.depth <= 1  # else the parent is unknown, and the agent is the one around the node
            place = place._call(agent, replace=place.tail == "node" or (place.tail == "agent" and not known))
        place = place._replace(depth=max(self.depth, len(nodes)), agent=agent or self.agent)
        if forced and "/" in forced and forced != self.forced:
            return place._replace(names=tuple(filter(None, forced.split("/"))), forced=forced, tail="agent")
        if forced and forced != self.forced:
            place = place._call(forced, replace=place.tail in ("node", "agent"))
        elif forced:
            place = place._replace(names=self.names, tail=self.tail)
        return place._replace(forced=forced)

    def _enter(self, node: str) -> Place:
        if node in GENERIC_NODES and self.names:
            return self._replace(tail="tools" if node == "tools" else "agent")
        return self._replace(names=(*self.names, node), tail="node")

    def _call(self, name: str, replace: bool) -> Place:
        kept = self.names[:-1] if replace else self.names
        return self._replace(names=(*kept, name), tail="agent")


def goals(output: object) -> list[str]:
    """The nodes that an output of a node, or what it raised to leave its graph, hands over to (`Command(goto=...)`)."""
    if isinstance(output, BaseException):
        output = output.args[0] if output.args else None
    commands = output if isinstance(output, (list, tuple)) else [output]
    found: list[str] = []
    for command in commands:
        goto = getattr(command, "goto", ()) if type(command).__name__ == "Command" else ()
        for goal in [goto] if isinstance(goto, str) or not isinstance(goto, Sequence) else goto:
            name = goal if isinstance(goal, str) else getattr(goal, "node", "")
            if name:
                found.append(name)
    return found


def _nodes(metadata: Mapping[str, Any]) -> list[str]:
    """Node names, outer to inner: `team:<uuid>|1|writer:<uuid>` is team, writer (a number counts calls)."""
    namespace = _text(metadata.get("langgraph_checkpoint_ns")) or ""
    nodes = [level.partition(":")[0] for level in namespace.split("|") if level and not level.isdigit()]
    node = _text(metadata.get("langgraph_node"))
    return nodes or ([node] if node else [])


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip("/ ") else None
