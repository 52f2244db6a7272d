"""Messages to token ids and back: chat templates, tool calls, and text that comes token by token."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from agentlightning.errors import AgentLightningError

log = logging.getLogger(__name__)

TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
_TOOL_CALL = re.compile(rf"{TOOL_OPEN}(.*?){TOOL_CLOSE}", re.DOTALL)
_PROBE = '{"agl_probe": "x"}'


class ChatError(AgentLightningError):
    """A request that cannot be turned into a prompt; the caller's fault."""


class Chat:
    """One tokenizer with its chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        visible = {tokenizer.convert_tokens_to_ids(t) for t in (TOOL_OPEN, TOOL_CLOSE)}
        self.hidden = frozenset(tokenizer.all_special_ids) - visible
        """Ids that are not part of the text; the ids themselves stay in the answer."""
        self._token_texts: dict[int, str] = {}
        self._arguments_as_text: bool | None = None
        self._warned: set[str] = set()

    def render(self, messages: Any, tools: Any = None, words: dict[str, Any] | None = None) -> list[int]:
        """Prompt ids of a conversation. Raises ChatError naming what the template refuses."""
        if not self.tokenizer.chat_template:
            raise ChatError(
                "the model has no chat template: set the policy option chat_template, or call /completions."
            )
        cleaned = [self._message(message, number) for number, message in enumerate(_list(messages, "messages"))]
        words = {"add_generation_prompt": True, **(words or {})}
        if tools:
            words["tools"] = _scrub(_list(tools, "tools"))
            self._warn_without_tools()
        return self.encode(self._template(cleaned, words))

    def _template(self, messages: list[dict[str, Any]], words: dict[str, Any]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **words)
        except Exception as error:  # templates raise what they like; the caller needs their words
            raise ChatError(f"the chat template refuses these messages: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are spelled out already."""
        return list(self.tokenizer(_scrub(text), add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text that a person sees."""
        shown = [i for i in ids if i not in self.hidden]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_text(self, token: int) -> str:
        """One token by itself, special ones too."""
        text = self._token_texts.get(token)
        if text is None:
            text = str(self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
            self._token_texts[token] = text
        return text

    def _message(self, message: Any, number: int) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise ChatError(f"messages[{number}] is not an object.")
        clean: dict[str, Any] = {key: value for key, value in _scrub(message).items() if value is not None}
        clean["role"] = clean.get("role") or _role(clean, number)
        clean["content"] = _content(clean.get("content"), number)
        if clean.get("tool_calls"):
            clean["tool_calls"] = [self._call(call, number) for call in clean["tool_calls"]]
        return clean

    def _call(self, call: dict[str, Any], number: int) -> dict[str, Any]:
        """A tool call of the history with its arguments in the form that the template writes correctly."""
        function = dict(call.get("function") or {})
        arguments = function.get("arguments") or {}
        try:
            if self._wants_text():
                function["arguments"] = arguments if isinstance(arguments, str) else _json(arguments)
            else:
                function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            # What a model once wrote may be no JSON at all: it is shown to the next call as it was.
            function["arguments"] = arguments
            log.debug("messages[%d]: arguments of a tool call are not JSON", number)
        return {**call, "function": function}

    def _wants_text(self) -> bool:
        """Whether the template writes arguments as they are, so that they must be JSON text already."""
        if self._arguments_as_text is None:
            as_mapping = self._probe(json.loads(_PROBE))
            self._arguments_as_text = _PROBE not in as_mapping and _PROBE in self._probe(_PROBE)
        return self._arguments_as_text

    def _probe(self, arguments: Any) -> str:
        call = {"type": "function", "id": "call_0", "function": {"name": "f", "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}, answer]
        try:
            return self._template(messages, {})
        except ChatError:
            return ""

    def _warn_without_tools(self) -> None:
        if "tools" not in str(self.tokenizer.chat_template) and "tools" not in self._warned:
            self._warned.add("tools")
            log.warning("the chat template does not mention tools: the model will not see their definitions")


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ChatError(f"{what} must be a list that is not empty.")
    return value


def _role(message: dict[str, Any], number: int) -> str:
    """The role of a message that names none, where its shape tells it."""
    if message.get("tool_calls"):
        return "assistant"
    if "tool_call_id" in message:
        return "tool"
    raise ChatError(f"messages[{number}] has no role.")


def _content(content: Any, number: int) -> str:
    """Content as plain text; parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"messages[{number}].content is neither text nor a list of parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise ChatError(f"messages[{number}] has a part of type {kind!r}; this model reads text only.")
        texts.append(str(part.get(kind, "")))
    return "".join(texts)


def _scrub(value: Any) -> Any:
    """Without lone surrogates, which no tokenizer can encode: each becomes `?`."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_scrub(k): _scrub(v) for k, v in value.items()}
    return [_scrub(v) for v in value] if isinstance(value, list) else value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tool_calls(text: str, key: str) -> tuple[str | None, list[dict[str, Any]]]:
    """Content and OpenAI tool calls of an answer in Hermes form, `<tool_call>{"name", "arguments"}</tool_call>`.

    Blocks that are not such JSON stay in the content. `key` makes call ids that repeat when a run repeats.
    """
    calls: list[dict[str, Any]] = []

    def cut(match: re.Match[str]) -> str:
        call = _parse_call(match[1])
        if call is None:
            return match[0]
        digest = hashlib.blake2s(f"{key}/{len(calls)}".encode()).hexdigest()[:24]
        calls.append({"id": f"call_{digest}", "type": "function", "function": call})
        return ""

    head, mark, rest = text.partition(TOOL_OPEN)
    rest = _TOOL_CALL.sub(cut, mark + rest)
    return (head.rstrip() + rest.strip() or None, calls) if calls else (text, [])


def _parse_call(text: str) -> dict[str, str] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return {"name": call["name"], "arguments": arguments if isinstance(arguments, str) else _json(arguments)}


class TextStream:
    """Turns ids that come one by one into text of whole characters; the pieces add up to the text of all ids."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._ids: list[int] = []
        self._context = 0
        self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; bytes of an unfinished character are held back."""
        self._ids.extend(i for i in ids if i not in self._chat.hidden)
        return self._take(held="\ufffd")

    def end(self) -> str:
        """What was held back."""
        return self._take(held="")

    def _take(self, held: str) -> str:
        # Decoded with the piece before, since decoders treat the first token of a text differently.
        before = self._decode(self._context, self._read)
        after = self._decode(self._context, len(self._ids))
        end = len(self._ids)
        if held and after.endswith(held):
            end = self._clean_cut(after)
            after = self._decode(self._context, end)
        if end == self._read:
            return ""
        self._context, self._read = self._read, end
        return after[len(before) :]

    def _clean_cut(self, whole: str) -> int:
        """Where bytes that will never be a character end. One takes at most four tokens: before that we only wait."""
        for end in range(len(self._ids) - 4, self._read + 4, -1):
            if self._decode(self._context, end) + self._decode(end, len(self._ids)) == whole:
                return end
        return self._read

    def _decode(self, start: int, end: int) -> str:
        return self._chat.decode(self._ids[start:end])


class StopFinder:
    """Whether the text of an answer so far holds one of its stop strings."""

    def __init__(self, chat: Chat, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._stream = TextStream(chat)
        self._tail = ""
        self._seen = 0

    def __call__(self, out: list[int]) -> bool:
        self._tail += self._stream.feed(out[self._seen :])
        self._seen = len(out)
        found = any(stop in self._tail for stop in self._stops)
        self._tail = self._tail[-max(map(len, self._stops)) :]
        return found


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many last characters of `text` could be the beginning of one of `marks`."""
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
