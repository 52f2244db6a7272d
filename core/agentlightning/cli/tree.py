"""The picture of a rollout. Everything hangs where it happened; what names no known parent hangs at its agent."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from rich.tree import Tree

from agentlightning.cli.output import SHORT, line
from agentlightning.schema import Attempt, Completion, Episode, Json, Reward, Rollout, Span, SpanKind


def rollout_tree(rollout: Rollout, traces: Sequence[Episode]) -> Tree:
    """A rollout and the attempts given, each with all that happened in it, in order of arrival."""
    words = [f"rollout {rollout.id[:SHORT]}", f"step {rollout.step}", rollout.mode, _state(rollout)]
    tree = Tree(_text("  ".join(words), line(rollout.task)))
    for trace in traces:
        _Branch(tree, trace)
    if not traces:
        tree.add(Text("no attempt yet: no worker has leased it", style="dim"))
    return tree


class _Branch:
    """One attempt on its way into the tree."""

    def __init__(self, tree: Tree, trace: Episode) -> None:
        assert trace.attempt is not None
        self.root = tree.add(_attempt(trace.attempt))
        self.spans = {span.id: span for span in trace.spans}
        self.nodes: dict[str, Tree] = {}
        self.agents: dict[str, Tree] = {}
        happened: list[Span | Completion] = [*trace.spans, *trace.completions]
        for one in sorted(happened, key=lambda one: one.seq):
            if isinstance(one, Span):
                self.span(one)
            else:
                self.nodes[one.id] = self.place(one.span_id, one.path).add(_completion(one))
        for reward in trace.rewards:  # last, so that whatever they are for is there
            self.target(reward.target).add(_reward(reward))

    def span(self, span: Span, below: frozenset[str] = frozenset()) -> Tree:
        """The node of `span`; its parents are made first, also when they arrived later or name each other."""
        if span.id not in self.nodes:
            parent = self.spans.get(span.parent_id or "")
            if parent is not None and parent.id not in below | {span.id}:
                place = self.span(parent, below | {span.id})
            else:
                place = self.root if span.kind == SpanKind.AGENT else self.place(None, span.path)
            if span.id not in self.nodes:
                self.nodes[span.id] = place.add(_span(span))
            if span.kind == SpanKind.AGENT and span.path:
                self.agents.setdefault(span.path, self.nodes[span.id])
        return self.nodes[span.id]

    def place(self, span_id: str | None, path: str) -> Tree:
        if span_id in self.spans:
            return self.span(self.spans[span_id])
        if not path:
            return self.root
        if path not in self.agents:
            self.agents[path] = self.root.add(_text(f"agent {line(path)}", style="bold"))
        return self.agents[path]

    def target(self, target: str) -> Tree:
        kind, _, name = target.partition(":")
        if kind == "call" and name in self.spans:
            return self.span(self.spans[name])
        if kind == "call":
            return self.nodes.get(name, self.root)
        return self.agents.get(name, self.root)


def _text(head: str, tail: str = "", style: str = "", tail_style: str = "dim") -> Text:
    text = Text(head, style=style)
    return text.append(f"  {tail}", style=tail_style) if tail else text


def _state(rollout: Rollout) -> str:
    return f"{rollout.state.value} ({rollout.outcome.value})" if rollout.outcome else rollout.state.value


def _seconds(start_ns: int, end_ns: int | None) -> str:
    return f"{(end_ns - start_ns) / 1e9:.2f} s" if end_ns and start_ns else ""


def _attempt(attempt: Attempt) -> Text:
    outcome = attempt.outcome.value if attempt.outcome else "running"
    words = (f"attempt {attempt.number}", attempt.id[:SHORT], outcome, _seconds(attempt.started_ns, attempt.ended_ns))
    good = outcome in ("ok", "truncated", "running")
    text = _text("  ".join(word for word in words if word), line(attempt.worker), style="" if good else "red")
    return text.append(f"  {line(attempt.error, 200)}", style="red") if attempt.error else text


def _span(span: Span) -> Text:
    name = span.path or span.name if span.kind == SpanKind.AGENT else span.name
    style = {SpanKind.AGENT: "bold", SpanKind.TOOL: "cyan", SpanKind.EXCEPTION: "red"}.get(span.kind, "")
    text = _text(f"{span.kind.value} {line(name)}", _seconds(span.start_ns, span.end_ns), style)
    if span.status == "open":
        text.append("  never closed", style="yellow")
    return text.append(f"  {line(span.error or 'error', 200)}", style="red") if span.status == "error" else text


def _completion(call: Completion) -> Text:
    tokens = f"{len(call.prompt_ids)} + {len(call.response_ids)} tokens"
    version = "" if call.version is None else f"v{call.version}"
    words = ("call", line(call.model, 40), version, tokens, call.finish_reason, _seconds(call.start_ns, call.end_ns))
    text = _text("  ".join(word for word in words if word), _answer(call), style="green")
    return text.append(f"  {call.defect}", style="red") if call.defect else text


def _answer(call: Completion) -> str:
    """What the model said, or the tools that it called."""
    choices = call.response.get("choices")
    message = _get(choices[0] if isinstance(choices, list) and choices else None, "message")
    content, tools = _get(message, "content"), _get(message, "tool_calls")
    if content or not isinstance(tools, list):
        return line(content or "")
    return line(" ".join(f"-> {_get(_get(tool, 'function'), 'name')}" for tool in tools))


def _get(value: Json, key: str) -> Json:
    """Engines and faults put anything into a response."""
    return value.get(key) if isinstance(value, dict) else None


def _reward(reward: Reward) -> Text:
    return _text(
        f"reward {reward.value:.4g}", f"{line(reward.name)} for {line(reward.target)}, by {reward.source}", "magenta"
    )
