"""OpenAI Responses to chat completions.

Items that one model call put out, reasoning, text and function calls, become one assistant message again, so that the
engine's template renders the turn as it was sampled. `previous_response_id` works within an attempt. Tools that OpenAI
runs itself, files, stored prompts and conversations need its servers, and are refused.

`store`, `include`, `truncation`, `service_tier`, `user`, `metadata` and cache keys concern OpenAI's servers and have no
effect here. Keys that the API does not have (`top_k`, `seed`, ...) are passed to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentlightning.gateway.dialects.base import Json, Notes
from agentlightning.gateway.dialects.responses_out import ResponseEvents, answer
from agentlightning.gateway.problems import Problem

__all__ = ["PATH", "answer", "error", "events", "remember", "to_chat"]

PATH = "responses"

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
"""Keys that chat completions have under the same name."""
WITHOUT_EFFECT = (
    *("store", "include", "truncation", "service_tier", "user", "metadata", "safety_identifier", "max_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "stream_options", "top_logprobs"),
)
TRANSLATED = (
    *("input", "instructions", "max_output_tokens", "tools", "tool_choice"),
    *("text", "reasoning", "previous_response_id"),
)
NEEDS_SERVERS = {
    "conversation": "send the whole history as `input`, or use previous_response_id",
    "prompt": "send the prompt's text as `instructions`",
    "background": "wait for the answer, or stream it",
}
"""What works on OpenAI's servers alone, and what to do instead."""


def to_chat(request: Json, notes: Notes) -> Json:
    for key, cure in NEEDS_SERVERS.items():
        if request.get(key):
            raise _refused(key, cure)
    own = {*SAME, *WITHOUT_EFFECT, *TRANSLATED, *NEEDS_SERVERS}
    chat = {key: value for key, value in request.items() if key not in own}
    chat.update({key: request[key] for key in SAME if request.get(key) is not None})
    system = [{"role": "system", "content": request["instructions"]}] if request.get("instructions") else []
    chat["messages"] = [*system, *_earlier(request, notes), *messages_of(request.get("input"))]
    if request.get("max_output_tokens") is not None:
        chat["max_tokens"] = request["max_output_tokens"]
    if request.get("reasoning"):
        effort = request["reasoning"].get("effort")
        chat.update({"reasoning_effort": effort} if effort else {})
    if "message.output_text.logprobs" in (request.get("include") or ()):
        chat["logprobs"] = True
        chat.update({"top_logprobs": request["top_logprobs"]} if request.get("top_logprobs") else {})
    _format(chat, request.get("text") or {})
    _tools(chat, request)
    return chat


def events(request: Json, call_id: str) -> ResponseEvents:
    return ResponseEvents(request, call_id)


def remember(request: Json, call_id: str, chat: Json, message: Json, notes: Notes) -> None:
    """For `previous_response_id`, which by the API's rule brings no instructions along."""
    if request.get("store") is not False:
        said = chat["messages"][1:] if request.get("instructions") else chat["messages"]
        notes.put("response", f"resp_{call_id}", [*said, message])


def error(problem: Problem) -> Json:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": problem.detail, "type": kind, "param": None, "code": problem.code}}


def _earlier(request: Json, notes: Notes) -> list[Json]:
    wanted = request.get("previous_response_id")
    if not wanted:
        return []
    found = notes.get("response", wanted)
    if found is None:
        raise Problem(
            400,
            "previous_response_not_found",
            f"Previous response with id {wanted!r} not found: it was not given in this attempt, was asked for with "
            "store=False, or is too old. Send the whole history as `input`.",
        )
    return list(found)


def messages_of(items: Any) -> list[Json]:
    """`input` as chat messages."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise Problem(400, "bad_request", "`input` must be a text or a list of items: send a Responses request.")
    messages: list[Json] = []
    turn: Json | None = None
    for item in items:
        if not isinstance(item, dict):
            raise Problem(
                400, "bad_request", f"an item of `input` is {item!r}: send objects with a `type` or a `role`."
            )
        if (part := _sampled(item)) is None:
            messages.append(_given(item))
            turn = None
        elif turn is None or not _joins(turn, part):
            turn = {"role": "assistant", "content": None, **part}
            messages.append(turn)
        else:
            _join(turn, part)
    return messages


def _sampled(item: Json) -> Json | None:
    """What an item that the model put out adds to its message; None for items of others."""
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") == "assistant":
        return {"content": _text(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments") or ""}
        return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        return {"reasoning_content": "".join(part.get("text", "") for part in parts)}
    return None


def _joins(turn: Json, part: Json) -> bool:
    """Whether `part` came from the same model call: a second text, or reasoning after either, begins another."""
    if "reasoning_content" in part:
        return False
    return "content" not in part or turn["content"] is None or "tool_calls" in turn


def _join(turn: Json, part: Json) -> None:
    if "tool_calls" in part:
        turn.setdefault("tool_calls", []).extend(part["tool_calls"])
    else:
        turn["content"] = (turn["content"] or "") + part["content"]


def _given(item: Json) -> Json:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "message" and item.get("role") in ("user", "system", "developer"):
        role = "user" if item["role"] == "user" else "system"  # templates know no developer
        return {"role": role, "content": _content(item.get("content"))}
    if kind == "item_reference":
        raise _refused("item_reference", "send the item itself (in the OpenAI SDKs: store=False)")
    raise _refused(
        f"an item of type {kind!r}", "send messages, reasoning, function_call and function_call_output items"
    )


def _content(content: Any) -> Any:
    """A text stays one, and so does a single text part; parts keep their order."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(
            400, "bad_request", f"content {content!r} is neither a text nor a list of parts: send one of them."
        )
    parts = [_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Json) -> Json:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text", "")}
    if kind == "input_image" and part.get("image_url"):
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    raise _refused(f"content of type {kind!r}", "send texts, and images as URLs")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content or ())


def _format(chat: Json, text: Json) -> None:
    wanted = text.get("format") or {}
    if wanted.get("type") == "json_schema":
        schema = {
            key: wanted[key] for key in ("name", "description", "schema", "strict") if wanted.get(key) is not None
        }
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted.get("type") == "json_object":
        chat["response_format"] = {"type": "json_object"}
    if text.get("verbosity"):
        chat["verbosity"] = text["verbosity"]


def _tools(chat: Json, request: Json) -> None:
    tools, choice = [_tool(tool) for tool in request.get("tools") or ()], request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names = _names(choice.get("tools") or ())
        tools, choice = [tool for tool in tools if tool["function"]["name"] in names], choice.get("mode", "auto")
    elif isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, dict):
        raise _refused(f"tool_choice of type {choice.get('type')!r}", "choose auto, none, required or a function")
    if tools:
        chat["tools"] = tools
        chat.update({"tool_choice": choice} if choice is not None else {})
    else:
        chat.pop("parallel_tool_calls", None)


def _names(tools: Iterable[Json]) -> set[Any]:
    return {tool.get("name") for tool in tools}


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise _refused(f"a tool of type {tool.get('type')!r}", "give the agent a function tool that does the same")
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _refused(what: str, cure: str) -> Problem:
    return Problem(400, "unsupported", f"{what} needs OpenAI's own servers and cannot be served here: {cure}.")
