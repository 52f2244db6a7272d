"""Takes the sampled tokens out of an answer, and out of the client's sight what it did not ask for.

Values are decoded only where they are needed; all else passes through as the bytes that the engine sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from agentlightning.gateway import places
from agentlightning.gateway.sampling import Keep
from agentlightning.gateway.wire import dumps, loads
from agentlightning.schema import Floats, Ids, Json

Raw = msgspec.Raw

NULL = Raw(b"null")
HIDDEN = frozenset({"token_ids", "prompt_token_ids", "response_token_ids", "meta_info"})
"""Keys of a choice that a client sees only when it asked for ids."""

_FINGERPRINT = "agl-"
"""Engines of ours stamp the policy version into `system_fingerprint`: `agl-7`."""


class _Token(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None
    """Of text completions."""


class Choice(msgspec.Struct):
    """One sampled message, as far as it has come."""

    message: dict[str, Json] = msgspec.field(default_factory=lambda: {"role": "assistant", "content": None})
    ids: list[int] | None = None
    """None: the engine never sent any."""
    logprobs: list[float | None] | None = None
    finish_reason: str | None = None


class Capture(msgspec.Struct):
    """All that an answer says about tokens."""

    prompt_ids: list[int] | None = None
    choices: dict[int, Choice] = {}
    prompt_tokens: int | None = None
    """By the engine's `usage`; None where it has none."""
    completion_tokens: int | None = None
    versions: set[int] = set()
    """Policy versions stamped on the answer; more than one: the weights changed while it was sampled."""
    error: Json = None
    """What the engine sent instead of an answer, or in the middle of one."""
    malformed: str | None = None
    """What could not be read."""

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def finished(self, n: int) -> bool:
        """Whether all `n` choices have ended."""
        return len(self.choices) >= n and all(c.finish_reason is not None for c in self.choices.values())


def take(capture: Capture, body: bytes, keep: Keep) -> bytes | None:
    """Reads one JSON object, an answer or a chunk of a stream, into `capture`; returns the client's version of it.

    None: a chunk with nothing for the client. Raises ValueError for what is not a JSON object.
    """
    try:
        top = msgspec.json.decode(body, type=dict[str, Raw])
        choices = msgspec.json.decode(top["choices"], type=list[dict[str, Raw]] | None) if "choices" in top else None
    except msgspec.DecodeError:
        return _take_loose(capture, body, keep)
    elsewhere = any("token_ids" not in raw or raw["token_ids"] == NULL for raw in choices or ())
    _take_top(capture, top)
    changed = not keep.ids and top.pop("prompt_token_ids", None) is not None
    for place, raw in enumerate(choices or ()):
        changed |= _take_choice(capture, raw, place, keep)
    if (elsewhere or capture.prompt_ids is None) and any(mark in body for mark in places.MARKS):
        _search(capture, body)
    if not keep.usage and top.pop("usage", None) is not None:
        changed = True
        if choices == []:
            return None
    if not changed:
        return body
    if choices is not None:
        top["choices"] = Raw(msgspec.json.encode(choices))
    return msgspec.json.encode(top)


def _take_loose(capture: Capture, body: bytes, keep: Keep) -> bytes | None:
    """JSON that msgspec refuses: brought into a form it takes, so that the rest of the road is the same."""
    clean = dumps(_paired(loads(body)))
    msgspec.json.decode(clean, type=dict[str, Raw])  # ends the recursion: raises for what is no object
    shown = take(capture, clean, keep)
    return shown if shown != clean else body


def _paired(value: Any) -> Any:
    """`value` with lone surrogates, which no UTF-8 text can hold, as U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_paired(item) for item in value]
    return {_paired(k): _paired(v) for k, v in value.items()} if isinstance(value, dict) else value


def _take_top(capture: Capture, top: dict[str, Raw]) -> None:
    if "prompt_token_ids" in top:
        capture.prompt_ids = _read(capture, top["prompt_token_ids"], list[int] | None) or capture.prompt_ids
    if "usage" in top:
        usage = _read(capture, top["usage"], dict[str, Any] | None) or {}
        capture.prompt_tokens = usage.get("prompt_tokens", capture.prompt_tokens)
        capture.completion_tokens = usage.get("completion_tokens", capture.completion_tokens)
    if "system_fingerprint" in top:
        stamp = _read(capture, top["system_fingerprint"], str | None) or ""
        if stamp.startswith(_FINGERPRINT) and stamp.removeprefix(_FINGERPRINT).isdecimal():
            capture.versions.add(int(stamp.removeprefix(_FINGERPRINT)))
    if "error" in top:
        capture.error = _read(capture, top["error"], Any)


def _take_choice(capture: Capture, raw: dict[str, Raw], place: int, keep: Keep) -> bool:
    """Reads a choice and takes out of `raw` what the client must not see; True when that changed it."""
    index = _read(capture, raw["index"], int) if "index" in raw else place
    choice = capture.choice(place if index is None else index)
    if "message" in raw:
        choice.message = _read(capture, raw["message"], dict[str, Any]) or choice.message
    if "delta" in raw:
        _take_delta(capture, choice.message, _read(capture, raw["delta"], dict[str, Any] | None) or {})
    if "token_ids" in raw:
        _extend_ids(choice, _read(capture, raw["token_ids"], list[int] | None))
    if "logprobs" in raw:
        _extend_logprobs(choice, _read(capture, raw["logprobs"], _Logprobs | None))
    if "finish_reason" in raw:
        choice.finish_reason = _read(capture, raw["finish_reason"], str | None) or choice.finish_reason
    if "text" in raw:
        _take_delta(capture, choice.message, {"content": _read(capture, raw["text"], str | None)})
    changed = False
    if not keep.ids:
        for key in HIDDEN.intersection(raw):
            del raw[key]
            changed = True
    if not keep.logprobs and "logprobs" in raw and bytes(raw["logprobs"]) != b"null":
        raw["logprobs"] = Raw(b"null")
        changed = True
    return changed


def _take_delta(capture: Capture, message: dict[str, Json], delta: dict[str, Json]) -> None:
    try:
        merge(message, delta)
    except (AttributeError, KeyError, TypeError) as error:
        capture.malformed = capture.malformed or f"delta of a shape nobody defined: {error}"


def _read(capture: Capture, raw: Raw, kind: Any) -> Any:
    """None, and a note in the capture, for a value that has not the shape it should have."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        capture.malformed = capture.malformed or str(error)
        return None


def _extend_ids(choice: Choice, more: list[int] | None) -> None:
    if more is not None:
        choice.ids = more if choice.ids is None else choice.ids + more


def _extend_logprobs(choice: Choice, more: _Logprobs | None) -> None:
    if more is None:
        return
    values = [token.logprob for token in more.content] if more.content is not None else more.token_logprobs
    if values is not None:
        choice.logprobs = values if choice.logprobs is None else choice.logprobs + values


def _search(capture: Capture, body: bytes) -> None:
    """Looks for ids in the places where only some servers put them."""
    value = loads(body)
    if capture.prompt_ids is None and (found := places.find(value, places.PROMPT)):
        capture.prompt_ids = found[0]
    for place, entry in enumerate(value.get("choices") or ()):
        found = places.find(entry, places.RESPONSE) if entry.get("token_ids") is None else None
        if found is None:
            continue
        ids, logprobs = found
        choice = capture.choice(entry.get("index") or place)
        _extend_ids(choice, ids)
        if logprobs is not None and not (entry.get("logprobs") or {}).get("content"):
            choice.logprobs = [*(choice.logprobs or ()), *logprobs]


def merge(message: dict[str, Json], delta: dict[str, Json]) -> None:
    """Adds a delta of a stream to the message: texts grow, tool calls grow by their index, all else is replaced."""
    for key, value in delta.items():
        if key == "tool_calls" and isinstance(value, list):
            _merge_calls(message.setdefault("tool_calls", []), value)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None:
            message[key] = value


def _merge_calls(calls: list[Json], deltas: list[Json]) -> None:
    for delta in deltas:
        index = delta.get("index", len(calls) - 1 if calls else 0)
        while len(calls) <= index:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[index], delta.get("function") or {}
        call.update({key: delta[key] for key in ("id", "type") if delta.get(key)})
        for key in ("name", "arguments"):
            call["function"][key] += function.get(key) or ""


class Tokens(NamedTuple):
    """What a record keeps of one choice; shapes [prompt tokens], [response tokens], [log-probabilities sent]."""

    prompt_ids: Ids
    response_ids: Ids
    logprobs: Floats
    """NaN where the engine sent none for a token."""


def tokens(capture: Capture) -> dict[int, Tokens]:
    """By choice, in order; empty arrays where the engine sent nothing or no ids of 32 bits (`malformed` says so)."""
    prompt_ids = _array(capture, capture.prompt_ids, np.int32)
    return {
        index: Tokens(prompt_ids, _array(capture, choice.ids, np.int32), _array(capture, choice.logprobs, np.float32))
        for index, choice in sorted(capture.choices.items())
    }


def _array(capture: Capture, values: list[Any] | None, kind: Any) -> Any:
    try:
        return np.array(values or (), dtype=kind)  # None becomes NaN
    except OverflowError as error:
        capture.malformed = capture.malformed or f"ids beyond 32 bits: {error}"
        return np.array((), dtype=kind)
