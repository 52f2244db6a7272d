"""The fake engine's answers in the shape of the Responses API: one object, or the events of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from tests.fakes.http import Exchange

Json = dict[str, Any]


async def send(exchange: Exchange, body: Json, message: Json, tokens: int, number: int) -> None:
    """Answers a request with an assistant message, in the form of a chat, of so many tokens; `number` makes its ids."""
    whole = response(body, message, tokens, number)
    if not body.get("stream"):
        return exchange.send(200, json.dumps(whole).encode())
    exchange.start_stream()
    for place, event in enumerate(events(whole)):
        data = json.dumps({**event, "sequence_number": place})
        exchange.chunk(f"event: {event['type']}\ndata: {data}\n\n".encode())
        await asyncio.sleep(0)
    exchange.end_stream()


def response(body: Json, message: Json, tokens: int, number: int) -> Json:
    said = len(json.dumps(body["input"]).split())
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1_700_000_000,
        "status": "completed",
        "model": body.get("model"),
        "output": list(_items(message, number)),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "usage": {
            "input_tokens": said,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said + tokens,
        },
    }


def _items(message: Json, number: int) -> Iterator[Json]:
    if message.get("content"):
        text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
        yield item | {"content": [text]}
    for index, call in enumerate(message.get("tool_calls") or []):
        item = {"type": "function_call", "id": f"fc_{number}_{index}", "status": "completed", "call_id": call["id"]}
        yield item | call["function"]


def events(whole: Json) -> Iterator[Json]:
    """The events of a stream whose end is `whole`."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for index, item in enumerate(whole["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        yield from _text(item["content"][0], place) if item["type"] == "message" else _arguments(item, place)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": "response.completed", "response": whole}


def _text(part: Json, place: Json) -> Iterator[Json]:
    place = {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    for word in part["text"].split(" "):
        yield {"type": "response.output_text.delta", **place, "delta": f"{word} ", "logprobs": []}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}


def _arguments(item: Json, place: Json) -> Iterator[Json]:
    for letter in item["arguments"]:
        yield {"type": "response.function_call_arguments.delta", **place, "delta": letter}
    yield {
        "type": "response.function_call_arguments.done",
        **place,
        "name": item["name"],
        "arguments": item["arguments"],
    }
