"""Chat templates, tool calls and streamed text, on a tokenizer that splits characters into bytes."""

import json
from typing import Any

import pytest

pytest.importorskip("transformers")
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning_algorithms.policy.chat import (
    Chat,
    ChatError,
    StopFinder,
    TextStream,
    cut_at_stop,
    held_back,
    tool_calls,
)
from tests.fakes.tiny import TEMPLATE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
STRING_ARGUMENTS = TEMPLATE.replace("call.function.arguments | tojson", "call.function.arguments")


def spelled(chat: Chat, ids: list[int]) -> str:
    return "".join(TOKENIZER.decode(ids, skip_special_tokens=False))


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [{"role": "user", "content": "find"}, {"role": "assistant", "content": None, "tool_calls": [call]}]


def test_a_conversation_becomes_the_template_s_ids() -> None:
    ids = CHAT.render([{"role": "user", "content": "hello"}])
    assert spelled(CHAT, ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == TOKENIZER.convert_tokens_to_ids("<|im_start|>")


def test_text_parts_are_joined_and_images_refused() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert CHAT.render([{"role": "user", "content": parts}]) == CHAT.render([{"role": "user", "content": "hello"}])
    with pytest.raises(ChatError, match=r"messages\[0\].*image_url.*text only"):
        CHAT.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_b4_a_role_is_inferred_where_the_shape_tells_it() -> None:
    [user, assistant] = called("{}")
    bare = {k: v for k, v in assistant.items() if k != "role"}
    result = {"tool_call_id": "call_1", "content": "sunny"}
    text = spelled(CHAT, CHAT.render([user, bare, result]))
    assert "<|im_start|>assistant\n" in text and "<|im_start|>tool\nsunny" in text
    with pytest.raises(ChatError, match=r"messages\[0\] has no role"):
        CHAT.render([{"content": "who am I?"}])


@pytest.mark.parametrize("template", [TEMPLATE, STRING_ARGUMENTS], ids=["wants mapping", "wants text"])
@pytest.mark.parametrize("as_text", [True, False])
def test_b32_arguments_take_the_form_that_the_template_wants(template: str, as_text: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    arguments = {"query": "Paris", "days": 2}
    messages = called(json.dumps(arguments) if as_text else arguments)
    original = json.dumps(messages)
    text = tokenizer.decode(Chat(tokenizer).render(messages))
    assert '{"name": "search", "arguments": {"query": "Paris", "days": 2}}' in text
    assert json.dumps(messages) == original, "the caller's messages are not ours to change"


def test_b33_arguments_are_not_escaped() -> None:
    text = spelled(CHAT, CHAT.render(called('{"q": "<&\\"\'> \\u00fc"}')))
    assert '{"q": "<&\\"\'> ü"}' in text


def test_arguments_that_are_no_json_are_shown_as_they_were() -> None:
    assert "{broken" in spelled(CHAT, CHAT.render(called("{broken")))


def test_b35_lone_surrogates_do_not_break_the_tokenizer() -> None:
    assert "a?b" in spelled(CHAT, CHAT.render([{"role": "user", "content": "a\ud83db"}]))


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    assert '"name": "search"' in spelled(CHAT, CHAT.render([{"role": "user", "content": "x"}], tools))


def test_a_template_that_ignores_tools_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = Chat(tokenizer)
    for _ in range(2):
        chat.render([{"role": "user", "content": "x"}], [{"type": "function"}])
    assert [r.message for r in caplog.records if "tools" in r.message] == [
        "the chat template does not mention tools: the model will not see their definitions"
    ]


def test_refusals_say_what_is_wrong() -> None:
    for messages in (None, [], "hello"):
        with pytest.raises(ChatError, match="messages must be a list that is not empty"):
            CHAT.render(messages)
    with pytest.raises(ChatError, match=r"messages\[0\] is not an object"):
        CHAT.render(["hello"])
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatError, match="refuses these messages: roles must alternate"):
        Chat(tokenizer).render([{"role": "user", "content": "x"}])
    tokenizer.chat_template = None
    with pytest.raises(ChatError, match="chat_template"):
        Chat(tokenizer).render([{"role": "user", "content": "x"}])


def test_special_tokens_are_hidden_from_the_text_but_not_counted_away() -> None:
    ids = [*CHAT.encode("Paris"), TOKENIZER.eos_token_id]
    assert CHAT.decode(ids) == "Paris"
    assert CHAT.token_text(ids[-1]) == "<|im_end|>"


def test_tool_calls_in_hermes_form() -> None:
    text = 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    content, calls = tool_calls(text, "key")
    assert content == "I look."
    assert [c["function"] for c in calls] == [
        {"name": "f", "arguments": '{"a": "ü"}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert len({c["id"] for c in calls}) == 2
    assert tool_calls(text, "key")[1] == calls


@pytest.mark.parametrize("block", ["{broken", '["no object"]', '{"arguments": {}}', '{"name": 1}'])
def test_what_is_no_tool_call_stays_content(block: str) -> None:
    text = f"a <tool_call>{block}</tool_call> b"
    assert tool_calls(text, "key") == (text, [])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.lists(st.integers(1, 4), max_size=30))
def test_b35_streamed_pieces_add_up_to_the_whole(text: str, cuts: list[int]) -> None:
    ids = CHAT.encode(text)
    stream, pieces, start = TextStream(CHAT), [], 0
    for size in [*cuts, len(ids)]:
        pieces.append(stream.feed(ids[start : start + size]))
        start += size
    assert "".join(pieces) + stream.end() == CHAT.decode(ids)
    if "\ufffd" not in CHAT.decode(ids):
        assert all("\ufffd" not in piece for piece in pieces), "a character went out in halves"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60))
def test_any_ids_at_all_add_up(ids: list[int]) -> None:
    stream = TextStream(CHAT)
    assert "".join(stream.feed([i]) for i in ids) + stream.end() == CHAT.decode(ids)


def test_bytes_that_never_become_a_character_do_not_hold_the_stream_for_ever() -> None:
    [byte] = [i for i in range(len(TOKENIZER)) if TOKENIZER.convert_ids_to_tokens(i) == "Ģ"]  # a lone 0x82... byte
    stream = TextStream(CHAT)
    longest, waited = 0, 0
    for _ in range(40):
        waited = 0 if stream.feed([byte]) else waited + 1
        longest = max(longest, waited)
    assert longest <= 10


def test_a_stop_string_is_found_across_tokens() -> None:
    ids = CHAT.encode("hello STOP world")
    finder = StopFinder(CHAT, ["STOP"])
    found = [finder(ids[: n + 1]) for n in range(len(ids))]
    first = found.index(True)
    assert "STOP" in CHAT.decode(ids[: first + 1]) and "STOP" not in CHAT.decode(ids[:first])


def test_cutting_and_holding_back() -> None:
    assert cut_at_stop("one two three", ["three", "two"]) == "one "
    assert cut_at_stop("one", ["two"]) == "one"
    assert held_back("call <tool", ["<tool_call>"]) == 5
    assert held_back("call it", ["<tool_call>"]) == 0
    assert held_back("abc", []) == 0
