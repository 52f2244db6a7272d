"""Anthropic Messages to chat completions.

The API gives tool arguments as an object, so the text that was sampled would be lost and the next prompt would differ
from it in its blanks. The text is therefore remembered by the call's id, and used again wherever the object is equal.

`metadata`, `service_tier`, `cache_control`, `thinking` and `betas` have no effect here. Keys that the API does not have
(`seed`, `min_p`, ...) are passed to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from agentlightning.gateway.dialects.base import Json, Notes
from agentlightning.gateway.dialects.messages_out import MessageEvents, answer, error, parsed
from agentlightning.gateway.problems import Problem

__all__ = ["PATH", "answer", "error", "events", "remember", "to_chat"]

PATH = "messages"

SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
WITHOUT_EFFECT = frozenset({"metadata", "service_tier", "thinking", "betas", "inference_geo"})
TRANSLATED = frozenset(
    {"system", "messages", "tools", "tool_choice", "stop_sequences", "output_config", "output_format"}
)
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def to_chat(request: Json, notes: Notes) -> Json:
    own = {*SAME, *WITHOUT_EFFECT, *TRANSLATED}
    chat = {key: value for key, value in request.items() if key not in own}
    chat.update({key: request[key] for key in SAME if request.get(key) is not None})
    messages = request.get("messages")
    if not isinstance(messages, list):
        raise Problem(400, "bad_request", "the body must have a list `messages`: send a Messages request.")
    system = _system(request.get("system"))
    chat["messages"] = [*system, *(said for message in messages for said in _message(message, notes))]
    if request.get("stop_sequences"):
        chat["stop"] = request["stop_sequences"]
    wanted = (request.get("output_config") or {}).get("format") or request.get("output_format")
    if wanted:
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": wanted.get("schema"), "strict": True},
        }
    _tools(chat, request)
    return chat


def events(request: Json, call_id: str) -> MessageEvents:
    return MessageEvents(request, call_id)


def remember(request: Json, call_id: str, chat: Json, message: Json, notes: Notes) -> None:
    for call in message.get("tool_calls") or ():
        if call.get("id"):
            notes.put("arguments", call["id"], call["function"]["arguments"])


def _system(system: Any) -> list[Json]:
    if not system:
        return []
    text = system if isinstance(system, str) else "\n".join(part.get("text", "") for part in system)
    return [{"role": "system", "content": text}]


def _message(message: Any, notes: Notes) -> Iterable[Json]:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise Problem(
            400, "bad_request", f"a message is {message!r:.200}: send objects with the role user or assistant."
        )
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, list):
        raise Problem(
            400, "bad_request", f"content {content!r} is neither a text nor a list of blocks: send one of them."
        )
    return [_sampled(content, notes)] if message["role"] == "assistant" else _given(message["role"], content)


def _sampled(blocks: list[Json], notes: Notes) -> Json:
    """An assistant's turn: all its blocks are one message."""
    message: Json = {"role": "assistant", "content": None}
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] = (message["content"] or "") + block.get("text", "")
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + block.get("thinking", "")
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": _arguments(block, notes)}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            raise _refused(f"a block of type {kind!r}", "send text, thinking and tool_use blocks")
    return message


def _arguments(block: Json, notes: Notes) -> str:
    given = block.get("input") or {}
    sampled = notes.get("arguments", block.get("id") or "")
    if isinstance(sampled, str) and parsed(sampled) == given:
        return sampled
    return json.dumps(given, ensure_ascii=False)


def _given(role: str, blocks: list[Json]) -> Iterable[Json]:
    """A user's turn: tool results first, each a message, then the rest."""
    parts: list[Json] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(block.get("content"))}
        else:
            parts.append(_part(block))
    if parts:
        yield {"role": role, "content": _joined(parts)}


def _content(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    return _joined([_part(part) for part in content])


def _joined(parts: list[Json]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Json) -> Json:
    kind, source = block.get("type"), block.get("source") or {}
    if kind == "text":
        return {"type": "text", "text": block.get("text", "")}
    if kind == "image" and source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "image" and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    raise _refused(f"a block of type {kind!r}", "send text, image and tool_result blocks")


def _tools(chat: Json, request: Json) -> None:
    choice = request.get("tool_choice") or {}
    if not request.get("tools"):
        return
    chat["tools"] = [_tool(tool) for tool in request["tools"]]
    if choice.get("type") == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice:
        chat["tool_choice"] = CHOICES.get(str(choice.get("type")), "auto")
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise _refused(f"a tool of type {tool['type']!r}", "give the agent a tool of its own with an input_schema")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": function | described}


def _refused(what: str, cure: str) -> Problem:
    return Problem(400, "unsupported", f"{what} needs Anthropic's own servers and cannot be served here: {cure}.")
