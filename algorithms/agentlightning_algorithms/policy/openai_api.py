"""OpenAI's request and answer shapes, with the token fields that vLLM adds. Plain functions: no server, no model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from agentlightning.errors import AgentLightningError

from .chat import TOOL_OPEN, Chat, TextStream, cut_at_stop, held_back, tool_calls

log = logging.getLogger(__name__)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_p": (0, None),
    "logit_bias": ({}, None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
}
"""What would change the sampled distribution, or the answer, in a way that is not built in; refused unless neutral."""


class ApiError(AgentLightningError):
    """A refusal in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Answer(Protocol):
    """What is read of a job."""

    prompt: list[int]
    out: list[int]
    logps: list[float]
    finish: str | None
    version: int


class Ask(NamedTuple):
    """A checked request."""

    model: str
    prompt: list[int]
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    usage: bool
    logprobs: bool
    ids: bool
    tools: bool
    chat: bool


def parse(body: Any, chat: Chat, *, models: Sequence[str], context: int, is_chat: bool) -> Ask:
    """The request as an `Ask`. Raises ApiError (400, 404) or ChatError."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object.")
    _refuse_unsupported(body)
    model = body.get("model")
    if not isinstance(model, str) or model not in models:
        raise ApiError(f"no model {model!r} here; served: {', '.join(models)}.", status=404, code="model_not_found")
    tools = _has_tools(body)
    prompt = _rendered(body, chat) if is_chat else _prompt(body.get("prompt"), chat)
    stop = body.get("stop") or []
    logprobs = body.get("logprobs")
    return Ask(
        model=model,
        prompt=prompt,
        max_tokens=_length(body, len(prompt), context),
        n=int(_number(body, "n", 1, 1, 128)),
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 1e9))),
        seed=None if body.get("seed") is None else int(_number(body, "seed", 0, -(2**63), 2**64)),
        stops=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s),
        stop_ids=frozenset(int(i) for i in body.get("stop_token_ids") or ()),
        ignore_eos=bool(body.get("ignore_eos")),
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=logprobs is not None and logprobs is not False,
        ids=bool(body.get("return_token_ids")),
        tools=tools,
        chat=is_chat,
    )


def prompt_tokens(body: Any, chat: Chat) -> int:
    """How many tokens the prompt of a chat or text request has. Raises ApiError or ChatError."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object.")
    return len(_rendered(body, chat) if "messages" in body else _prompt(body.get("prompt"), chat))


def _has_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def _rendered(body: dict[str, Any], chat: Chat) -> list[int]:
    words = body.get("chat_template_kwargs") or {}
    return chat.render(body.get("messages"), body["tools"] if _has_tools(body) else None, words)


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if body.get(name) not in neutral:
            raise ApiError(f"{name} is not supported by this engine: leave it out.", param=name)
    if (body.get("response_format") or {}).get("type", "text") != "text":
        log.warning("response_format is not enforced: the model is asked, not forced")
    if body.get("tool_choice") not in (None, "auto", "none"):
        log.warning("tool_choice is not enforced: the model is asked, not forced")


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ApiError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}.", param=name)
    return value


def _prompt(prompt: Any, chat: Chat) -> list[int]:
    """The prompt of /completions: a text or a list of ids."""
    if isinstance(prompt, str) and prompt:
        return chat.encode(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(i, int) and i >= 0 for i in prompt):
        return list(prompt)
    raise ApiError("prompt must be one text or one list of token ids, not empty.", param="prompt")


def _length(body: dict[str, Any], prompt: int, context: int) -> int:
    """How many tokens may be sampled. Raises ApiError in OpenAI's words where the context is too short."""
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = int(_number(body, name, 0, 1, 1e9))
    if prompt >= context or prompt + wanted > context:
        asked = f"{prompt} in the messages" + (f", {wanted} in the completion" if wanted else "")
        raise ApiError(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt + wanted} tokens "
            f"({asked}). Please reduce the length of the messages or completion.",
            param="messages",
            code="context_length_exceeded",
        )
    return wanted or context - prompt


def head(ask: Ask, key: str, version: int, *, chunk: bool = False) -> dict[str, Any]:
    """The fields that all answers and chunks share."""
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if ask.chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{key}",
        "object": kind,
        "created": int(time.time()),
        "model": ask.model,
        "system_fingerprint": f"agl-{version}",
    }


def whole(ask: Ask, jobs: Sequence[Answer], chat: Chat, key: str) -> dict[str, Any]:
    """The answer to a request that does not stream."""
    answer = head(ask, key, jobs[0].version)
    answer["choices"] = [_choice(ask, job, index, chat, key) for index, job in enumerate(jobs)]
    answer["usage"] = usage(jobs)
    if ask.ids:
        answer["prompt_token_ids"] = jobs[0].prompt
    return answer


def usage(jobs: Sequence[Answer]) -> dict[str, int]:
    """Token counts; the prompt is counted once."""
    sampled = sum(len(job.out) for job in jobs)
    prompt = len(jobs[0].prompt)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _choice(ask: Ask, job: Answer, index: int, chat: Chat, key: str) -> dict[str, Any]:
    text: str | None = cut_at_stop(chat.decode(job.out), ask.stops)
    choice: dict[str, Any] = {"index": index, "finish_reason": job.finish} | _tokens(ask, job, 0, chat)
    if not ask.chat:
        return choice | {"text": text}
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if ask.tools:
        message["content"], calls = tool_calls(text or "", f"{key}/{index}")
        if calls:
            message["tool_calls"] = calls
            choice["finish_reason"] = "tool_calls" if job.finish == "stop" else job.finish
    return choice | {"message": message}


def _tokens(ask: Ask, job: Answer, start: int, chat: Chat, end: int | None = None) -> dict[str, Any]:
    """Ids and log-probabilities from `start` to `end`, as far as they were asked for."""
    fields: dict[str, Any] = {"logprobs": None}
    ids, logps = job.out[start:end], job.logps[start:end]
    if ask.ids:
        fields["token_ids"] = ids
    if ask.logprobs and ask.chat:
        pairs = zip(ids, logps, strict=True)
        fields["logprobs"] = {"content": [_logprob(chat.token_text(token), logp) for token, logp in pairs]}
    elif ask.logprobs:
        texts = [chat.token_text(token) for token in ids]
        fields["logprobs"] = {"tokens": texts, "token_logprobs": logps, "top_logprobs": None}
    return fields


def _logprob(text: str, logp: float) -> dict[str, Any]:
    whole_text = "\ufffd" not in text
    return {"token": text, "logprob": logp, "bytes": list(text.encode()) if whole_text else None, "top_logprobs": []}


class ChoiceStream:
    """One choice as deltas. Text that may yet turn out to be a stop string or a tool call is held back."""

    def __init__(self, ask: Ask, job: Answer, index: int, chat: Chat, key: str) -> None:
        self.ask, self.job, self.index, self.chat, self.key = ask, job, index, chat, key
        self.done = False
        self._text = TextStream(chat)
        self._held = ""
        self._sent = 0
        self._begun = self._cut = False

    def advance(self) -> list[dict[str, Any]]:
        """The chunks' choices that have become ready since the last call."""
        finish = self.job.finish  # read before the ids: what follows is then complete
        count = len(self.job.out)
        if self.done or (count == self._sent and finish is None):
            return []
        self._held += self._text.feed(self.job.out[self._sent : count]) + (self._text.end() if finish else "")
        content, calls = self._ready(finish)
        if calls and finish == "stop":
            finish = "tool_calls"
        deltas = self._deltas(content, calls)
        tokens = _tokens(self.ask, self.job, self._sent, self.chat, count)
        self._sent, self.done = count, finish is not None
        return self._choices(deltas, tokens, finish)

    def _ready(self, finish: str | None) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certain by now, and at the end the tool calls."""
        if self._cut:
            return "", []
        text = cut_at_stop(self._held, self.ask.stops)
        self._cut = len(text) < len(self._held)
        if self.ask.tools and self.ask.chat:
            return self._ready_with_tools(text, finish)
        keep = 0 if finish or self._cut else held_back(text, self.ask.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], []

    def _ready_with_tools(self, text: str, finish: str | None) -> tuple[str, list[dict[str, Any]]]:
        if finish:
            content, calls = tool_calls(text, f"{self.key}/{self.index}")
            return content or "", calls
        free = text.partition(TOOL_OPEN)[0]
        if free == text:
            free = text[: len(text) - held_back(text, (*self.ask.stops, TOOL_OPEN))]
        free = free.rstrip()
        self._held = text[len(free) :]
        return free, []

    def _deltas(self, content: str, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not self.ask.chat:
            return [{"text": content}]
        deltas: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            deltas.append({"delta": {"role": "assistant", "content": ""}})
        if content:
            deltas.append({"delta": {"content": content}})
        deltas += [{"delta": {"tool_calls": [{"index": i, **call}]}} for i, call in enumerate(calls)]
        return deltas or [{"delta": {}}]

    def _choices(
        self, deltas: list[dict[str, Any]], tokens: dict[str, Any], finish: str | None
    ) -> list[dict[str, Any]]:
        """All new ids go with the last delta, so that each id is told once."""
        none: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        choices = [{"index": self.index, **delta, **none} for delta in deltas]
        choices[-1] |= {**tokens, "finish_reason": finish}
        return choices
