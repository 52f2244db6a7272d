"""OpenAI Responses, spoken by the real SDK: the same tokens as chat completions, in the API's own shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import tokenizer
from tests.fakes.engine import Fault
from tests.fakes.world import World

TOOLS: Any = [
    {"type": "function", "name": "search", "description": "d", "parameters": {"type": "object"}, "strict": True}
]
ARGUMENTS = '{"q": "ü<&\\"😀",  "n": 1.50}'
SEARCH: Any = {"tool_calls": [{"id": "call_a", "name": "search", "arguments": ARGUMENTS}]}
THINKING: Any = {"reasoning_content": "let me see", "content": "say 😀", **SEARCH}


def test_a_text_is_asked_and_answered(tmp_path: Path) -> None:
    with World(tmp_path, "SELECT 1") as world:
        attempt = world.attempt()
        answer = world.client(attempt).responses.create(
            model="policy", input="hello", instructions="be brief", max_output_tokens=50, temperature=0.5
        )
        (call,) = world.calls(attempt)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (answer.output_text, answer.status, answer.error) == ("SELECT 1", "completed", None)
    assert answer.usage and (answer.usage.input_tokens, answer.usage.output_tokens) == (
        len(call.prompt_ids),
        len(call.response_ids),
    )
    assert call.prompt_ids.tolist() == tokenizer.render(messages) and call.defect is None
    assert call.response_ids.tolist() == [*tokenizer.encode("SELECT 1"), tokenizer.END]
    assert call.request["messages"] == messages and call.sampling["max_tokens"] == 50
    assert answer.id == f"resp_{call.id}" and answer.instructions == "be brief"


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_with_reasoning_and_tools_comes_back_as_it_was_sampled(tmp_path: Path, stream: bool) -> None:
    """The next prompt begins with every token of the turn before."""
    replies: Any = iter([THINKING, "done"])
    with World(tmp_path, lambda _: next(replies)) as world:
        attempt = world.attempt()
        client = world.client(attempt)
        history: list[Any] = [{"role": "user", "content": "hello"}]
        output = ask(client, stream, input=history, tools=TOOLS).output
        assert [item.type for item in output] == ["reasoning", "message", "function_call"]
        history += [item.model_dump(exclude_none=True) for item in output]
        history.append({"type": "function_call_output", "call_id": "call_a", "output": "found"})
        assert ask(client, stream, input=history, tools=TOOLS).output_text == "done"
        first, second = world.calls(attempt)
    assert output[2].arguments == ARGUMENTS and output[2].call_id == "call_a"
    assert first.finish_reason == "tool_calls" and not first.defect and not second.defect
    turn = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    assert second.prompt_ids.tolist()[: len(turn)] == turn
    assert second.request["messages"][-1] == {"role": "tool", "tool_call_id": "call_a", "content": "found"}
    function = {"name": "search", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert second.request["tools"] == [{"type": "function", "function": function}]


def ask(client: openai.OpenAI, stream: bool, **request: Any) -> Any:
    if not stream:
        return client.responses.create(model="policy", **request)
    with client.responses.stream(model="policy", **request) as events:
        *_, last = events
    return last.response


def test_the_events_of_a_stream_have_the_apis_order(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: THINKING) as world:
        attempt = world.attempt()
        events: Any = list(world.client(attempt).responses.create(model="policy", input="hi", tools=TOOLS, stream=True))
        (call,) = world.calls(attempt)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert squeezed(kinds) == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    final = events[-1].response
    deltas = {kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta") for kind in DELTAS}
    assert deltas == dict(zip(DELTAS, ("let me see", "say 😀", ARGUMENTS), strict=True))
    assert final.status == "completed" and final.output_text == "say 😀" and final.output[2].arguments == ARGUMENTS
    assert final.usage.output_tokens == len(call.response_ids) and call.defect is None


DELTAS = ("reasoning_text", "output_text", "function_call_arguments")


def squeezed(kinds: list[str]) -> list[str]:
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


def test_the_whole_answer_and_the_stream_end_in_the_same_response(tmp_path: Path) -> None:
    calls = [{**SEARCH["tool_calls"][0], "id": name} for name in "ab"]
    with World(tmp_path, lambda _: {**THINKING, "tool_calls": calls}) as world:
        attempt = world.attempt()
        whole, streamed = (
            ask(world.client(attempt), stream, input="hi", tools=TOOLS, temperature=0.2).model_dump()
            for stream in (False, True)
        )
    for response in (whole, streamed):
        for item in response["output"]:
            for key in ("id", "parsed_arguments"):
                item.pop(key, None)
            for part in item.get("content") or ():
                part.pop("parsed", None)
    assert len(whole["output"]) == 4
    for key in whole.keys() - {"id", "created_at", "tools"}:
        assert whole[key] == streamed[key], key


def test_the_previous_response_goes_on_within_its_attempt(tmp_path: Path) -> None:
    replies: Any = iter([SEARCH, "done", "more"])
    with World(tmp_path, lambda _: next(replies)) as world:
        attempt = world.attempt()
        client = world.client(attempt)
        first = client.responses.create(model="policy", input="hello", instructions="old", tools=TOOLS)
        result: Any = [{"type": "function_call_output", "call_id": "call_a", "output": "found"}]
        second = client.responses.create(
            model="policy", input=result, previous_response_id=first.id, instructions="new"
        )
        client.responses.create(model="policy", input="go on", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError, match="not given in this attempt") as caught:
            world.client(world.attempt()).responses.create(model="policy", input="x", previous_response_id=second.id)
        calls = world.calls(attempt)
    assert caught.value.code == "previous_response_not_found"
    assert [m["role"] for m in calls[1].request["messages"]] == ["system", "user", "assistant", "tool"]
    assert calls[1].request["messages"][0]["content"] == "new", "instructions are not handed on, by the API's rule"
    assert [m["role"] for m in calls[2].request["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    assert calls[1].request["messages"][2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_what_is_not_stored_cannot_be_gone_on_from(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        client = world.client(world.attempt())
        first = client.responses.create(model="policy", input="hello", store=False)
        with pytest.raises(openai.BadRequestError, match="Send the whole history as `input`"):
            client.responses.create(model="policy", input="x", previous_response_id=first.id)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_cut_by_length_is_incomplete(tmp_path: Path, stream: bool) -> None:
    with World(tmp_path, "a long answer") as world:
        attempt = world.attempt()
        answer = ask(world.client(attempt), stream, input="hi", max_output_tokens=4)
        (call,) = world.calls(attempt)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "a lo" and (call.finish_reason, call.defect) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_nothing_in_it_is_an_empty_text(tmp_path: Path, stream: bool) -> None:
    with World(tmp_path, "") as world:
        answer = ask(world.client(world.attempt()), stream, input="hi")
    assert answer.output_text == "" and [item.type for item in answer.output] == ["message"]


def test_log_probabilities_come_when_they_are_included(tmp_path: Path) -> None:
    with World(tmp_path, "hi") as world:
        attempt, include = world.attempt(), ["message.output_text.logprobs"]
        answer: Any = world.client(attempt).responses.create(model="policy", input="x", include=include, top_logprobs=1)  # type: ignore[arg-type]
        plain: Any = world.client(attempt).responses.create(model="policy", input="x")
        (first, _) = world.calls(attempt)
    told = answer.output[0].content[0].logprobs
    assert [entry.logprob for entry in told] == first.logprobs.tolist()
    assert plain.output[0].content[0].logprobs == []


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
        ({"role": "user", "content": [{"type": "input_text", "text": "t"}]}, {"role": "user", "content": "t"}),
        (
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "t"},
                    {"type": "input_image", "image_url": "data:x", "detail": "low"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "t"},
                    {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
                ],
            },
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            {"role": "tool", "tool_call_id": "c", "content": "o"},
        ),
        ({"role": "assistant", "content": "said"}, {"role": "assistant", "content": "said"}),
    ],
)
def test_items_become_messages(tmp_path: Path, item: Any, message: Any) -> None:
    with World(tmp_path) as world:
        world.client(world.attempt()).responses.create(model="policy", input=[item])
    assert world.engine.requests[0].body["messages"] == [message]


def test_texts_of_two_agents_in_a_row_stay_two_messages(tmp_path: Path) -> None:
    """After a hand-off; a text that follows its own call is the same turn."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items: Any = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, call]
    items += [
        {"role": "assistant", "content": "c"},
        {"type": "reasoning", "id": "r", "summary": []},
        {**call, "call_id": "d"},
    ]
    with World(tmp_path) as world:
        world.client(world.attempt()).responses.create(model="policy", input=items)
    said = world.engine.requests[0].body["messages"]
    assert [(m["content"], [c["id"] for c in m.get("tool_calls", ())]) for m in said] == [
        ("a", []),
        ("bc", ["c"]),
        (None, ["d"]),
    ]


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            {"tool_choice": {"type": "function", "name": "search"}},
            {"tool_choice": {"type": "function", "function": {"name": "search"}}},
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "required",
                    "tools": [{"type": "function", "name": "search"}],
                }
            },
            {"tool_choice": "required"},
        ),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"text": {"verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"extra_body": {"top_k": 5, "stop": ["x"]}}, {"top_k": 5, "stop": ["x"]}),
        ({"user": "u", "metadata": {"a": "b"}, "truncation": "auto"}, {}),
    ],
)
def test_parameters_are_translated(tmp_path: Path, given: Any, asked: Any) -> None:
    with World(tmp_path) as world:
        world.client(world.attempt()).responses.create(**{"model": "policy", "input": "hi", "tools": TOOLS} | given)
    body = world.engine.requests[0].body
    ours = {"messages", "model", "tools", "seed", "return_token_ids", "logprobs"}
    assert {key: value for key, value in body.items() if key not in ours} == asked


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"tools": [{"type": "web_search"}]}, "function tool that does the same"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "choose auto"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "store=False"),
        ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "images as URLs"),
        ({"input": [{"role": "user", "content": None}]}, "neither a text nor a list"),
        ({"input": ["x"]}, "send objects"),
        ({"input": {}}, "a text or a list of items"),
        ({"conversation": "c"}, "the whole history"),
        ({"prompt": {"id": "p"}}, "as `instructions`"),
        ({"background": True}, "wait for the answer"),
    ],
)
def test_what_needs_openais_servers_is_refused_with_the_cure(tmp_path: Path, given: Any, cure: str) -> None:
    with World(tmp_path) as world:
        client = world.client(world.attempt())
        with pytest.raises(openai.BadRequestError, match=cure) as caught:
            client.responses.create(**{"model": "policy", "input": "hi"} | given)
        assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index]
        assert not world.engine.requests


@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_has_the_apis_shape(tmp_path: Path, stream: bool) -> None:
    with World(tmp_path, lambda _: Fault("status", status=401)) as world:
        attempt = world.attempt()
        with pytest.raises(openai.AuthenticationError, match="scripted fault"):
            world.client(attempt).responses.create(model="policy", input="hi", stream=stream)
        (call,) = world.calls(attempt)
    assert call.defect == "error_status"


@pytest.mark.parametrize("kind", ["cut", "error_chunk"])
def test_a_stream_that_breaks_raises_in_the_sdk(tmp_path: Path, kind: str) -> None:
    with World(tmp_path, lambda _: Fault(kind, "a longer answer", after=3)) as world:
        attempt = world.attempt()
        with pytest.raises(openai.APIError, match="the engine"):
            list(world.client(attempt).responses.create(model="policy", input="hi", stream=True))
        (call,) = world.calls(attempt)
    assert call.defect == {"cut": "upstream_cut", "error_chunk": "upstream_error"}[kind]


def test_an_answer_that_is_no_json_is_a_bad_gateway(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("bad_json")) as world:
        attempt = world.attempt()
        with pytest.raises(openai.InternalServerError, match="see the engine's log"):
            world.client(attempt).responses.create(model="policy", input="hi")
        (call,) = world.calls(attempt)
    assert call.defect == "bad_response"


def test_an_attempt_that_is_over_is_told_in_the_apis_shape(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        world.gateway.cancel(attempt.id)
        with pytest.raises(openai.APIStatusError, match="was cancelled") as caught:
            world.client(attempt).responses.create(model="policy", input="hi")
    assert caught.value.status_code == 410 and caught.value.code == "attempt_ended"


def test_the_agent_of_the_url_and_the_key_count_here_too(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        attempt = world.attempt()
        world.client(attempt, "team/writer").responses.create(model="policy", input="hi")
        (call,) = world.calls(attempt)
    assert call.path == "team/writer"


def test_events_are_json_lines_with_their_type(tmp_path: Path) -> None:
    with World(tmp_path, "hi") as world:
        url = f"{world.base_url(world.attempt())}/responses"
        response = world.http.post(url, json={"model": "policy", "input": "x", "stream": True})
    assert response.headers["content-type"] == "text/event-stream"
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
