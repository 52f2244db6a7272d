"""Why a conversation became several sequences.

Two calls are one sequence to learn from exactly when the prompt of the later one begins with every id of the earlier one,
prompt and answer (`trajectory.lineages`). Where a prompt departs from all that came before, the first position that
differs is a fact; the cause is read off the messages that were sent: it is the likeliest one, and names its cure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from agentlightning.schema import Completion, Ids, Transition

REASONING = ("reasoning_content", "reasoning")

CAUSES: dict[str, tuple[str, str]] = {
    "asked_again": ("the same messages were asked again", ""),
    "other_conversation": ("a conversation of its own", ""),
    "branched": ("continues a call that another one continues already", ""),
    "sampled_otherwise": ("continues a call that was sampled at another temperature", ""),
    "tools_changed": (
        "other tools were offered",
        "Offer an agent the same tools, in the same order, in all calls of a rollout.",
    ),
    "history_cut": (
        "the program left earlier messages out",
        "Keep the history whole, or let it be: each part is trained as a sequence of its own.",
    ),
    "history_edited": (
        "the program changed an earlier message",
        "Append messages and never change those that were sent (dates, summaries, counters).",
    ),
    "answer_edited": (
        "the program put something else into the history than the model had said",
        "Put the answer into the history as it came.",
    ),
    "reasoning_dropped": (
        "the reasoning of an earlier answer is not in the prompt",
        "Send `reasoning_content` back, and use a chat template that keeps the reasoning of earlier turns.",
    ),
    "tool_call_rendered": (
        "the template writes a tool call differently from how the model wrote it",
        "Use the chat template that the model was trained with; it must render a tool call as the model samples it.",
    ),
    "template": (
        "the template writes an earlier message differently when another follows",
        "Use a chat template that only appends (`agl doctor` names what it changes).",
    ),
    "retokenised": (
        "the same text, as other ids",
        "The tokenizer splits the text otherwise than the model sampled it; each part is trained as a sequence of its own.",
    ),
}
"""Cause -> (what happened, what to do about it; nothing where it is as it should be)."""

HARMLESS = frozenset(cause for cause, (_, cure) in CAUSES.items() if not cure)


class Fork(msgspec.Struct, frozen=True):
    """A call that could not continue the sequence of an earlier one."""

    call: str
    """Completion id."""
    after: str
    """One with the same prompt; else the longest one whose messages and answer it repeats, apart from reasoning and outer
    spaces; else the one whose ids it shares the longest beginning with."""
    position: int
    """The first position at which its prompt differs from the ids of the earlier call; 0-based."""
    cause: str
    """A key of `CAUSES`."""

    def __str__(self) -> str:
        return f"departs from {self.after} at token {self.position}: {CAUSES[self.cause][0]}"


class _Told(NamedTuple):
    """A call, prepared to be compared with many."""

    call: Completion
    tail: Ids
    asked: list[dict[str, Any]]
    """Its messages without what templates drop: reasoning, outer spaces."""
    all: list[dict[str, Any]]
    """With its answer."""
    temperature: float

    @classmethod
    def of(cls, transition: Transition) -> _Told:
        call = transition.completion
        asked = [_without_reasoning(message) for message in _messages(call)]
        answer = _without_reasoning({"role": "assistant", **call.response})
        return cls(call, tail_of(call), asked, [*asked, answer], temperature(transition))


def forks(chains: Sequence[Sequence[Transition]]) -> list[Fork]:
    """One for each chain of one trajectory but its first; `chains` are those of `trajectory.lineages`."""
    if len(chains) < 2:
        return []
    calls = [_Told.of(transition) for chain in chains for transition in chain]
    heads = {chain[0].completion.id for chain in chains[1:]}
    if all(told.call.seq for told in calls):
        calls.sort(key=lambda told: told.call.seq)
    return [_fork(told, calls[:place] or calls[1:]) for place, told in enumerate(calls) if told.call.id in heads]


def _fork(told: _Told, earlier: Sequence[_Told]) -> Fork:
    prompt = told.call.prompt_ids
    same = [other for other in earlier if np.array_equal(other.call.prompt_ids, prompt)]
    if same:
        return Fork(told.call.id, same[-1].call.id, len(prompt), "asked_again")
    nearest = _nearest(told, earlier)
    position = _shared(prompt, nearest.tail)
    if position < len(nearest.tail):
        cause = _cause(told.call, nearest.call, position)
    else:
        cause = "branched" if told.temperature == nearest.temperature else "sampled_otherwise"
    return Fork(told.call.id, nearest.call.id, position, cause)


def _nearest(told: _Told, earlier: Sequence[_Told]) -> _Told:
    """The call to compare with: see `Fork.after`."""

    def ids_shared(other: _Told) -> int:
        return _shared(told.call.prompt_ids, other.tail)

    repeated = [other for other in earlier if told.asked[: len(other.all)] == other.all]
    if not repeated:
        return max(earlier, key=ids_shared)
    parent = max(repeated, key=lambda other: (len(other.all), ids_shared(other)))
    # Where all that another call was asked comes again, and its answer does not, that answer is what was changed.
    changed = [o for o in earlier if len(o.asked) > len(parent.all) and told.asked[: len(o.asked)] == o.asked]
    return max(changed, key=lambda other: len(other.asked), default=parent)


def tail_of(call: Completion) -> Ids:
    """What a prompt must begin with to continue the call: its prompt and its answer, int32."""
    return np.concatenate([call.prompt_ids, call.response_ids])


def temperature(transition: Transition) -> float:
    """The temperature that the log-probabilities were taken at; greedy calls report those of temperature 1."""
    return float(transition.completion.sampling.get("temperature") or 1.0)


def _shared(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _cause(call: Completion, before: Completion, position: int) -> str:
    old, new = _messages(before), _messages(call)
    if call.request.get("tools") != before.request.get("tools"):
        return "tools_changed"
    if new == old:
        return "template"
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    if same < len(old):
        return _edited(old, new, same)
    said = new[len(old)]
    if said.get("role") != "assistant":
        return "history_cut"
    return _answered(before.response, said) or _rendered(before.response, position < len(before.prompt_ids), old)


def _edited(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], same: int) -> str:
    """`same`: the first message that is not what it was."""
    if all(message.get("role") in ("system", "developer") for message in old[:same]):
        return "other_conversation"
    if same >= len(new) or any(message in old[same + 1 :] for message in new[same : same + 1]):
        return "history_cut"
    if _without_reasoning(old[same]) == _without_reasoning(new[same]):
        return "reasoning_dropped"
    return "history_edited"


def _answered(answer: Mapping[str, Any], said: Mapping[str, Any]) -> str | None:
    """What the program did to an answer before it sent it back; None: nothing that can be seen."""
    if _tools(answer) != _tools(said):
        return "answer_edited"
    if _text(answer) != _text(said):
        dropped = _without_reasoning(answer)["content"] == _without_reasoning(said)["content"]
        return "reasoning_dropped" if dropped else "answer_edited"
    if _reasoning(answer) and not _reasoning(said):
        return "reasoning_dropped"
    return None


def _rendered(answer: Mapping[str, Any], in_prompt: bool, old: Sequence[Mapping[str, Any]]) -> str:
    """What the template did to messages that the program left as they were."""
    if in_prompt:
        earlier = [message for message in old if message.get("role") == "assistant"]
        return "reasoning_dropped" if any(_reasoning(m) or _thinks(m) for m in earlier) else "template"
    if _reasoning(answer) or _thinks(answer):
        return "reasoning_dropped"
    if _tools(answer):
        return "tool_call_rendered"
    text = _text(answer)
    return "template" if text != text.strip() else "retokenised"


def _messages(call: Completion) -> list[dict[str, Any]]:
    """What was asked; a text prompt counts as one message."""
    messages = call.request.get("messages")
    if isinstance(messages, list):
        return [message for message in messages if isinstance(message, dict)]
    return [{"role": "user", "content": call.request.get("prompt")}]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _reasoning(message: Mapping[str, Any]) -> str:
    return next((str(message[key]) for key in REASONING if message.get(key)), "")


def _thinks(message: Mapping[str, Any]) -> bool:
    return "</think>" in _text(message)


def _tools(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return list(_functions(message.get("tool_calls")))


def _functions(calls: Any) -> Iterator[tuple[Any, Any]]:
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield function.get("name"), function.get("arguments")


def _without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in REASONING}
    return {**kept, "content": _text(message).rpartition("</think>")[2].strip()}
