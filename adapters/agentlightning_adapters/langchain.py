"""LangChain and LangGraph: their callbacks say who is speaking, and run before the request leaves.

A handler that runs inline opens a span for each model call and sets the scope, so that the HTTP request bears the span's
id and the agent's path. What is open is kept on the attempt (`Scope.memory`), never here: it goes when the attempt goes.

Agent path: the `agent` key of the metadata, else the name given to `create_agent`, else the node, below the names of
the graphs around it: `team/writer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any
from uuid import UUID
from weakref import WeakValueDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tracers import context as hooks
from langchain_core.tracers.context import register_configure_hook

from agentlightning.context import Scope, Token, reset_scope, set_scope, surrounding
from agentlightning.hooks import hookimpl
from agentlightning.listening import guarded
from agentlightning.plain import brief, plain
from agentlightning.recorder import Recorder
from agentlightning.schema import Span, SpanKind, leaf
from agentlightning_adapters.langgraph_place import Place, goals


class Run:
    """A LangChain run that has not ended."""

    __slots__ = (
        "__weakref__",
        "giver",
        "handed",
        "home",
        "id",
        "parent_id",
        "place",
        "recorder",
        "scope",
        "span",
        "token",
    )

    def __init__(self, run_id: UUID, parent_id: UUID | None, place: Place, scope: Scope, recorder: Recorder) -> None:
        self.id = run_id
        self.parent_id = parent_id
        self.place = place
        self.scope = scope
        """The scope that is in force inside this run."""
        self.recorder = recorder
        self.span: Span | None = None
        self.token: Token | None = None
        self.handed: list[tuple[str, str]] = []
        """Of a graph: a node that will begin, and the path of the agent that handed over to it."""
        self.giver = place.path
        """Who hands over when this run does: itself, or the agent inside that left it."""
        self.home: dict[UUID, Run] = scope.memory.kept.setdefault((__name__, "runs"), {})


_runs: WeakValueDictionary[UUID, Run] = WeakValueDictionary()
"""Finds an open run from any handler, thread and context; the attempt's memory is what keeps it alive."""


class LangChainCallback(BaseCallbackHandler):
    """The handler to pass as `config={"callbacks": [...]}`. It has no state: one may serve any number of rollouts."""

    run_inline = True  # else async programs call us in a copy of the context, and no request bears a header
    raise_error = False
    ignore_retriever = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self) -> None:
        self.active = True

    @guarded
    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        found = self._begin(run_id, parent_run_id, metadata)
        if found is None:
            return
        run, outer = found
        path, forced = run.place.path, run.place.forced != outer.forced
        if path and path != outer.path:
            told = {"gen_ai.operation.name": "invoke_agent", "agl.handoff.from": _giver(parent_run_id, metadata)}
            self._open(run, SpanKind.AGENT, leaf(path), told)
        if run.place.depth > outer.depth or (forced and parent_run_id is not None):
            run.token = set_scope(run.scope)  # nodes only: a graph that is left half-way would stay in force

    @guarded
    def on_chat_model_start(
        self, serialized: dict[str, Any] | None, messages: list[list[BaseMessage]], **kwargs: Any
    ) -> None:
        self._call(kwargs, "chat")

    @guarded
    def on_llm_start(self, serialized: dict[str, Any] | None, prompts: list[str], **kwargs: Any) -> None:
        self._call(kwargs, "text_completion")

    def _call(self, said: dict[str, Any], operation: str) -> None:
        found = self._begin(said["run_id"], said.get("parent_run_id"), said.get("metadata"))
        if found is None:
            return
        run, _ = found
        attributes = _request(said, operation)
        self._open(run, SpanKind.LLM, str(attributes.get("gen_ai.request.model", "model")), attributes)
        run.token = set_scope(run.scope, lasting=False)

    @guarded
    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        inputs: dict[str, Any] | None = None,
        **said: Any,
    ) -> None:
        found = self._begin(run_id, parent_run_id, metadata)
        if found is None:
            return
        run, _ = found
        name = str((serialized or {}).get("name") or said.get("name") or "tool")
        attributes = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": said.get("tool_call_id"),
            "gen_ai.tool.call.arguments": brief(inputs if inputs is not None else input_str, convert=_look),
        }
        self._open(run, SpanKind.TOOL, name, attributes)
        run.token = set_scope(run.scope)

    @guarded
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        run = _runs.get(run_id)
        if run is not None:
            _hand_over(run, outputs)
            self._close(run, attributes={"output": brief(outputs, convert=_look)} if run.span else None)

    @guarded
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        run = _runs.get(run_id)
        if run is not None:
            self._close(run, attributes=_response(response))

    @guarded
    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        run = _runs.get(run_id)
        if run is None:
            return
        attributes = {"gen_ai.tool.call.result": brief(getattr(output, "content", output), convert=_look)}
        if call_id := getattr(output, "tool_call_id", None):
            attributes["gen_ai.tool.call.id"] = call_id
        failed = getattr(output, "status", None) == "error"
        self._close(run, f"tool error: {plain(getattr(output, 'content', ''))}"[:2000] if failed else None, attributes)

    @guarded
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self._fail(run_id, error)

    @guarded
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self._fail(run_id, error)

    @guarded
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:
        self._fail(run_id, error)

    def _begin(
        self, run_id: UUID, parent_run_id: UUID | None, metadata: Mapping[str, Any] | None
    ) -> tuple[Run, Place] | None:
        """The new run and the place around it; None outside attempts and when another handler has it already."""
        scope = surrounding()
        parent = _runs.get(parent_run_id) if parent_run_id else None
        if parent is not None and (scope is None or scope.attempt_id != parent.scope.attempt_id):
            scope = parent.scope  # a thread of the program's own, which has no context or a stale one
        if not self.active or scope is None or scope.recorder is None or run_id in _runs:
            return None
        outer, around = _around(parent, scope)
        run = Run(run_id, parent_run_id, outer.at(metadata or {}), around, scope.recorder)
        _runs[run_id] = run.home[run_id] = run
        return run, outer

    def _open(self, run: Run, kind: SpanKind, name: str, attributes: dict[str, Any]) -> None:
        path = run.place.path
        given = {key: value for key, value in attributes.items() if value is not None}
        if path:
            given["gen_ai.agent.name"] = leaf(path)
        run.span = run.recorder.start(kind, name, path=path, attributes=given, scope=run.scope)
        run.scope = run.scope.inside(run.span)
        if kind is not SpanKind.LLM:
            _places(run.scope)[run.span.id] = run.place

    def _close(
        self,
        run: Run,
        error: BaseException | str | None = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        run.home.pop(run.id, None)
        _runs.pop(run.id, None)
        if run.token is not None:
            reset_scope(run.token)
        if run.span is not None:
            run.recorder.end(run.span, error=error, attributes=attributes)

    def _fail(self, run_id: UUID, error: BaseException) -> None:
        run = _runs.get(run_id)
        if run is None:
            return
        if not isinstance(error, Exception):  # cancelled or left: what runs inside is not told, and will not end
            for child in [child for child in list(run.home.values()) if child.parent_id == run_id]:
                self._fail(child.id, error)
        if isinstance(error, GeneratorExit):
            self._close(run, attributes={"agl.stopped_early": True})
        elif any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__):  # interrupts, hand-offs
            _hand_over(run, error)
            self._close(run, attributes={"langgraph.left_by": type(error).__name__})
        else:
            self._close(run, error)


def _hand_over(run: Run, output: object) -> None:
    """Notes on the graph around a node whom the node hands over to."""
    graph = _runs.get(run.parent_id) if run.parent_id else None
    if graph is None:
        return
    for goal in goals(output):
        graph.giver = run.giver
        graph.handed.append((goal, run.giver))


def _giver(graph_id: UUID | None, metadata: Mapping[str, Any] | None) -> str | None:
    """The agent that handed over to the node that begins; None where an ordinary edge leads to it."""
    graph = _runs.get(graph_id) if graph_id else None
    node = (metadata or {}).get("langgraph_node")
    edge = next((edge for edge in graph.handed if edge[0] == node), None) if graph is not None else None
    if graph is None or edge is None:
        return None
    graph.handed.remove(edge)
    return edge[1]


def _places(scope: Scope) -> dict[str, Place]:
    return scope.memory.kept.setdefault((__name__, "places"), {})  # type: ignore[no-any-return]


def _around(parent: Run | None, scope: Scope) -> tuple[Place, Scope]:
    """The place and the scope around a run that begins here.

    LangChain's parent says it, unless it is unknown (its own callbacks were passed) or the program has entered an
    `agl.agent` or an operation since.
    """
    places = _places(scope)
    inside_ours = scope.span_id in places
    if parent is not None and (inside_ours or not _below(scope, parent)):
        return parent.place, parent.scope
    known = next((places[span] for span in scope.memory.up(scope.span_id) if span in places), None)
    if known is None:
        return Place(base=scope.path), scope
    if known.path == scope.path:
        return known, scope
    return Place(base=scope.path, depth=known.depth, agent=known.agent, forced=known.forced), scope


def _below(scope: Scope, run: Run) -> bool:
    """Whether the scope was entered inside the run."""
    return scope.span_id != run.scope.span_id and run.scope.span_id in scope.memory.up(scope.span_id)


def _request(said: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """GenAI attributes of a call that begins."""
    params = said.get("invocation_params") or {}
    metadata = said.get("metadata") or {}
    found = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": params.get("model") or params.get("model_name") or metadata.get("ls_model_name"),
        "gen_ai.provider.name": metadata.get("ls_provider"),
    }
    for key in ("temperature", "top_p", "seed", "max_tokens"):
        found[f"gen_ai.request.{key}"] = params.get(key)
    return found


def _response(response: LLMResult) -> dict[str, Any]:
    """GenAI attributes of a call that ended. Streams of chat completions tell no id, and usage only on request."""
    generations = [generation for several in response.generations for generation in several]
    messages = [message for message in (getattr(g, "message", None) for g in generations) if message is not None]
    told: dict[str, Any] = dict(messages[0].response_metadata) if messages else {}
    told |= {key: value for key, value in (response.llm_output or {}).items() if value}
    usage = (getattr(messages[0], "usage_metadata", None) if messages else None) or {}
    counted = told.get("token_usage") or {}
    found = {
        "gen_ai.response.id": told.get("id"),
        "gen_ai.response.model": told.get("model_name"),
        "gen_ai.usage.input_tokens": usage.get("input_tokens", counted.get("prompt_tokens")),
        "gen_ai.usage.output_tokens": usage.get("output_tokens", counted.get("completion_tokens")),
        "gen_ai.response.finish_reasons": [
            reason for g in generations if (reason := (g.generation_info or {}).get("finish_reason"))
        ],
    }
    return {key: value for key, value in found.items() if value not in (None, [])}


def _look(value: object) -> object:
    """Messages as what matters in them."""
    if not isinstance(value, BaseMessage):
        return value
    look = {"type": value.type, "content": value.content}
    calls = getattr(value, "tool_calls", None)
    return {**look, "tool_calls": calls} if calls else look


@hookimpl
def agl_callback() -> LangChainCallback:
    """The handler for `config={"callbacks": [...]}`; it finds the recorder of the attempt at each event."""
    return LangChainCallback()


@hookimpl
def agl_install() -> Callable[[], None]:
    """Adds the handler to every LangChain run of this process; returns the undo.

    The default of the context variable matters: a value that is set would not be seen in other threads.
    """
    handler = LangChainCallback()
    variable: ContextVar[Any] = ContextVar("agl_langchain", default=handler)
    register_configure_hook(variable, inheritable=True)

    def undo() -> None:
        handler.active = False  # managers that exist already still hold it
        registered = hooks._configure_hooks
        registered[:] = [hook for hook in registered if hook[0] is not variable]

    return undo
