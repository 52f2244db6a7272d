"""Anthropic Messages, spoken by the real SDK: the same tokens as chat completions, in the API's own shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.gateway.problems import Problem
from agentlightning.schema import Attempt
from tests.fakes import tokenizer
from tests.fakes.engine import Fault
from tests.fakes.world import HELLO, World

anthropic = pytest.importorskip("anthropic", reason="Anthropic's SDK is not installed: pip install --group test")

TOOLS: Any = [{"name": "search", "description": "d", "input_schema": {"type": "object"}}]
ARGUMENTS = '{"q": "ü<&\\"😀",  "n": 1.50}'
SEARCH: Any = {"tool_calls": [{"id": "call_a", "name": "search", "arguments": ARGUMENTS}]}
THINKING: Any = {"reasoning_content": "let me see", "content": "say 😀", **SEARCH}


class Spoken:
    """A world and a client of the SDK for one attempt of it."""

    def __init__(self, world: World, attempt: Attempt, base_url: str | None = None) -> None:
        self.client = anthropic.Anthropic(base_url=base_url or world.base_url(attempt), api_key="any", max_retries=0)
        self.attempt, self.world = attempt, world

    def ask(self, stream: bool = False, **request: Any) -> Any:
        request = {"model": "policy", "max_tokens": 500, "messages": HELLO} | request
        if not stream:
            return self.client.messages.create(**request)
        with self.client.messages.stream(**request) as events:
            return events.get_final_message()

    def calls(self) -> Any:
        return self.world.calls(self.attempt)


@pytest.fixture
def spoken(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Spoken]:
    with World(tmp_path) as world:
        one = Spoken(world, world.attempt())
        yield one
        one.client.close()


def replies(spoken: Spoken, *given: Any) -> None:
    left = iter(given)
    spoken.world.engine.reply = lambda _: next(left)


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_asked_and_answered(spoken: Spoken, stream: bool) -> None:
    replies(spoken, "SELECT 1")
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    answer = spoken.ask(stream, system=system, stop_sequences=["\n"], extra_body={"temperature": 0.5, "top_k": 3})
    (call,) = spoken.calls()
    assert [(block.type, block.text) for block in answer.content] == [("text", "SELECT 1")]
    assert (answer.stop_reason, answer.stop_sequence, answer.role, answer.id) == (
        "end_turn",
        None,
        "assistant",
        f"msg_{call.id}",
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(call.prompt_ids), len(call.response_ids))
    assert call.prompt_ids.tolist() == tokenizer.render([{"role": "system", "content": "be\nbrief"}, *HELLO])
    assert call.response_ids.tolist() == [*tokenizer.encode("SELECT 1"), tokenizer.END] and call.defect is None
    assert {key: call.sampling[key] for key in ("temperature", "top_k", "stop", "max_tokens")} == {
        "temperature": 0.5,
        "top_k": 3,
        "stop": ["\n"],
        "max_tokens": 500,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_b28_a_turn_with_thinking_and_tools_comes_back_as_it_was_sampled(spoken: Spoken, stream: bool) -> None:
    """The API hands tool arguments on as an object; the text that was sampled, with its blanks, is used again."""
    replies(spoken, THINKING, "done")
    first = spoken.ask(stream, tools=TOOLS)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.stop_reason, first.content[2].input) == ("tool_use", {"q": 'ü<&"😀', "n": 1.5})
    result = {"type": "tool_result", "tool_use_id": "call_a", "content": [{"type": "text", "text": "found"}]}
    history = [*HELLO, {"role": "assistant", "content": first.content}]
    history += [{"role": "user", "content": [result, {"type": "text", "text": "well?"}]}]
    assert spoken.ask(stream, messages=history, tools=TOOLS).content[0].text == "done"
    one, two = spoken.calls()
    turn = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
    assert two.prompt_ids.tolist()[: len(turn)] == turn and not one.defect and not two.defect
    assert two.request["messages"][-2:] == [
        {"role": "tool", "tool_call_id": "call_a", "content": "found"},
        {"role": "user", "content": "well?"},
    ]
    assert two.request["tools"][0]["function"] == {
        "name": "search",
        "parameters": {"type": "object"},
        "description": "d",
    }


def test_arguments_that_the_program_changed_are_its_own(spoken: Spoken) -> None:
    replies(spoken, SEARCH, "done")
    first = spoken.ask(tools=TOOLS)
    edited = [{**first.content[0].model_dump(), "input": {"q": "é"}}]
    spoken.ask(messages=[*HELLO, {"role": "assistant", "content": edited}], tools=TOOLS)
    assert spoken.calls()[1].request["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"q": "é"}'


def test_the_events_of_a_stream_have_the_apis_order(spoken: Spoken) -> None:
    replies(spoken, {**THINKING, "tool_calls": [*SEARCH["tool_calls"], {"id": "b", "name": "f", "arguments": "{}"}]})
    request: Any = {"model": "policy", "max_tokens": 500, "messages": HELLO, "tools": TOOLS}
    events: Any = list(spoken.client.messages.create(**request, stream=True))
    kinds = [event.type for event in events]
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]] == [
        "message_start",
        *blocks * 4,
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1, 2, 3]
    pieces = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(piece.partial_json for piece in pieces if piece.type == "input_json_delta") == ARGUMENTS + "{}"
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == len(spoken.calls()[0].response_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_by_length_says_so(spoken: Spoken, stream: bool) -> None:
    replies(spoken, "a long answer")
    assert spoken.ask(stream, max_tokens=4).stop_reason == "max_tokens"
    (call,) = spoken.calls()
    assert (call.finish_reason, call.defect) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_nothing_in_it_has_no_blocks(spoken: Spoken, stream: bool) -> None:
    replies(spoken, "")
    answer = spoken.ask(stream)
    assert (answer.content, answer.stop_reason) == ([], "end_turn")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "t"}]}, [{"role": "user", "content": "t"}]),
        (
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}],
            },
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}]}],
        ),
        (
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}]},
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}],
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            [{"role": "tool", "tool_call_id": "c", "content": ""}],
        ),
        ({"role": "assistant", "content": "a"}, [{"role": "assistant", "content": "a"}]),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            [{"role": "assistant", "content": "ab"}],
        ),
    ],
)
def test_blocks_become_messages(spoken: Spoken, message: Any, said: Any) -> None:
    spoken.ask(messages=[message])
    assert spoken.world.engine.requests[0].body["messages"] == said


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"tool_choice": {"type": "auto"}}, {"tool_choice": "auto"}),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        ({"tool_choice": {"type": "none"}}, {"tool_choice": "none"}),
        (
            {"tool_choice": {"type": "tool", "name": "search"}},
            {"tool_choice": {"type": "function", "function": {"name": "search"}}},
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}}, {}),
        ({"extra_body": {"min_p": 0.1}}, {"min_p": 0.1}),
    ],
)
def test_parameters_are_translated(spoken: Spoken, given: Any, asked: Any) -> None:
    spoken.ask(**{"tools": TOOLS} | given)
    ours = {"messages", "model", "tools", "seed", "return_token_ids", "logprobs", "max_tokens"}
    body = spoken.world.engine.requests[0].body
    assert {key: value for key, value in body.items() if key not in ours} == asked


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "a tool of its own"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "text, image and tool_result",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "send text, thinking",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "neither a text nor a list"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "role user or assistant"),
        ({"messages": {}}, "must have a list `messages`"),
    ],
)
def test_what_cannot_be_served_is_refused_in_the_apis_shape(spoken: Spoken, given: Any, cure: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=cure) as caught:
        spoken.ask(**given)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert not spoken.world.engine.requests


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (404, "not_found_error", anthropic.NotFoundError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
    ],
)
def test_an_engines_refusal_has_the_apis_type(spoken: Spoken, status: int, kind: str, error: Any) -> None:
    spoken.world.engine.reply = lambda _: Fault("status", status=status)
    with pytest.raises(error, match="scripted fault") as caught:
        spoken.ask()
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == kind
    assert spoken.calls()[0].defect == "error_status"


def test_a_full_context_has_anthropics_words() -> None:
    from agentlightning.gateway.dialects import messages

    told = messages.error(Problem(400, "context_length_exceeded", "5 tokens"))
    assert told["error"]["message"] == "prompt is too long: 5 tokens"


@pytest.mark.parametrize("kind", ["cut", "error_chunk"])
def test_a_stream_that_breaks_raises_in_the_sdk(spoken: Spoken, kind: str) -> None:
    replies(spoken, Fault(kind, "a longer answer", after=3))
    with pytest.raises(anthropic.APIStatusError, match="the engine"):
        spoken.ask(stream=True)
    assert spoken.calls()[0].defect == {"cut": "upstream_cut", "error_chunk": "upstream_error"}[kind]


@pytest.mark.parametrize("arguments", ["{", "[1]", "", '"text"'])
def test_arguments_that_are_no_object_are_kept(spoken: Spoken, arguments: str) -> None:
    """A weak policy samples such things; they must reach the agent, the record, and the next prompt unchanged."""
    replies(spoken, {"tool_calls": [{"id": "c", "name": "search", "arguments": arguments}]}, "done")
    first = spoken.ask(tools=TOOLS)
    assert first.content[0].input == ({} if not arguments else {"arguments": arguments})
    spoken.ask(messages=[*HELLO, {"role": "assistant", "content": first.content}], tools=TOOLS)
    one, two = spoken.calls()
    turn = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
    assert two.prompt_ids.tolist()[: len(turn)] == turn


@pytest.mark.parametrize("where", ["/attempts/{id}", "/attempts/{id}/v1", "/attempts/{id}/agents/team/writer/v1", ""])
def test_any_base_url_of_ours_works(tmp_path: Path, where: str) -> None:
    """The SDK adds /v1/messages to whatever it is given; its key goes into `x-api-key`."""
    with World(tmp_path) as world:
        attempt = world.attempt()
        url = world.gateway.url + where.format(id=attempt.id)
        with anthropic.Anthropic(base_url=url, api_key=f"agl-{attempt.id}") as client:
            client.messages.create(model="policy", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
        (call,) = world.calls(attempt)
    assert call.path == ("team/writer" if "writer" in where else "agent")
