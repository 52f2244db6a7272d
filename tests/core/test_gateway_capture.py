"""Where tokens are found in an answer, and what is wrong with those that are."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from agentlightning.gateway.capture import Capture, merge, take, tokens
from agentlightning.gateway.checks import Ends, defect, explain
from agentlightning.gateway.sampling import Keep

SHOW, HIDE = Keep(True, True, True), Keep(False, False, False)


def logprobs(*values: float | None) -> dict[str, Any]:
    return {"content": [{"token": "x", "logprob": v, "bytes": None, "top_logprobs": []} for v in values]}


def answer(**changes: Any) -> dict[str, Any]:
    """A good answer of two ids for a prompt of three; changes to its choice begin with `choice_`."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "token_ids": [7, 8],
        "logprobs": logprobs(-0.5, -0.25),
    }
    choice |= {k.removeprefix("choice_"): v for k, v in changes.items() if k.startswith("choice_")}
    top = {"prompt_token_ids": [1, 2, 3], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "choices": [choice]}
    return top | {k: v for k, v in changes.items() if not k.startswith("choice_")}


def read(value: Any, keep: Keep = SHOW) -> tuple[Capture, bytes | None]:
    capture = Capture()
    return capture, take(capture, msgspec.json.encode(value), keep)


def defect_of(value: Any) -> str | None:
    capture, _ = read(value)
    found = tokens(capture)
    return defect(capture, capture.choices[0], found[0], sum(len(each.response_ids) for each in found.values()))


def without(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in value.items() if k != key}


def test_a_text_about_token_ids_is_no_token_ids() -> None:
    value = without(answer(choice_message={"content": '"token_ids": [1]'}), "prompt_token_ids")
    del value["choices"][0]["token_ids"]
    capture, _ = read(value)
    assert capture.prompt_ids is None and capture.choices[0].ids is None


def test_what_nobody_knows_passes_untouched() -> None:
    raw = b'{"choices":[{"index":0,"message":{"content":"x","n":1.50},"token_ids":[1],"new":{"a": 1e2}}],"z":[ 1 ]}'
    shown = take(Capture(), raw, HIDE)
    assert shown == raw.replace(b',"token_ids":[1]', b"")


def test_an_answer_with_nothing_to_hide_is_passed_as_it_is() -> None:
    raw = msgspec.json.encode(answer())
    assert take(Capture(), raw, SHOW) is raw


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (answer(), None),
        (answer(choice_finish_reason="length"), None),
        (answer(choice_finish_reason="tool_calls"), None),
        (without(answer(), "usage"), None),
        (answer(usage=None), None),
        (answer(usage={"prompt_tokens": None, "completion_tokens": None}), None),
        (answer(choice_logprobs=logprobs(-0.5, 0.0001)), None),
        (without(answer(), "prompt_token_ids"), "no_token_ids"),
        (answer(prompt_token_ids=[]), "no_token_ids"),
        (answer(choice_token_ids=None), "no_token_ids"),
        (answer(choice_token_ids=[]), "empty"),
        (answer(choice_logprobs=None), "no_logprobs"),
        (answer(choice_logprobs={"content": None}), "no_logprobs"),
        (answer(choice_logprobs=logprobs(-0.5)), "length_mismatch"),
        (answer(usage={"prompt_tokens": 4, "completion_tokens": 2}), "length_mismatch"),
        (answer(usage={"prompt_tokens": 3, "completion_tokens": 20}), "length_mismatch"),
        (answer(choice_logprobs=logprobs(-0.5, None)), "bad_logprobs"),
        (answer(choice_logprobs=logprobs(-0.5, -9999.0)), "bad_logprobs"),
        (answer(choice_logprobs=logprobs(-0.5, 0.5)), "bad_logprobs"),
        (answer(choice_token_ids=[7, -8]), "bad_token_ids"),
        (answer(prompt_token_ids=[1, -2, 3]), "bad_token_ids"),
        (answer(choice_token_ids=[7, 2**40]), "bad_response"),
        (answer(choice_token_ids=["7", "8"]), "bad_response"),
        (answer(choice_token_ids=[7.5, 8.0]), "bad_response"),
        (answer(choice_message=5), "bad_response"),
        (answer(choice_finish_reason=None), "no_finish_reason"),
        (answer(choice_finish_reason="abort"), "finish_abort"),
        (answer(error={"message": "out of memory"}), "upstream_error"),
    ],
)
def test_b1_b21_b23_every_defect(value: Any, expected: str | None) -> None:
    assert defect_of(value) == expected


@pytest.mark.parametrize(
    ("ids", "finish", "asked", "expected"),
    [
        ([7, 2], "stop", {}, None),
        ([7, 8], "stop", {}, "bad_ending"),
        ([7, 2], "tool_calls", {}, None),
        ([7, 8], "tool_calls", {}, "bad_ending"),
        ([7, 8], "length", {}, None),
        ([7, 2], "length", {}, "bad_ending"),
        ([7, 8], "stop", {"stop": ["\n"]}, None),
        ([7, 8], "stop", {"stop_token_ids": [8]}, None),
        ([2, 2], "length", {"ignore_eos": True}, None),
        ([7, 8], "stop", {"stop": []}, "bad_ending"),
    ],
)
def test_the_last_id_ends_a_turn_exactly_when_the_sample_was_stopped(
    ids: list[int], finish: str, asked: dict[str, Any], expected: str | None
) -> None:
    capture, _ = read(answer(choice_token_ids=ids, choice_finish_reason=finish))
    found = tokens(capture)
    assert defect(capture, capture.choices[0], found[0], 2, Ends.of(asked, frozenset({2}))) == expected
    assert defect(capture, capture.choices[0], found[0], 2, Ends.of(asked, frozenset())) is None


def test_nan_is_a_defect_and_not_a_crash() -> None:
    raw = msgspec.json.encode(answer()).replace(b"-0.5", b"NaN")
    capture = Capture()
    assert take(capture, raw, SHOW) is not None
    assert defect(capture, capture.choices[0], tokens(capture)[0], 2) == "bad_logprobs"


def test_weights_that_change_within_a_stream_are_a_defect() -> None:
    capture = Capture()
    for stamp in ("agl-3", None, "fp_other", "agl-4"):
        take(capture, msgspec.json.encode(answer(system_fingerprint=stamp)), SHOW)
    capture.prompt_tokens = capture.completion_tokens = None
    assert capture.versions == {3, 4}
    assert defect(capture, capture.choices[0], tokens(capture)[0], 8) == "mixed_versions"


def test_the_numbers_behind_a_defect_are_told() -> None:
    capture, _ = read(answer(choice_logprobs=logprobs(-0.5), choice_message=5))
    told = explain(capture, capture.choices[0])
    assert "3 prompt ids" in told and "2 response ids" in told and "1 log-probabilities" in told
    assert "unreadable" in told


def test_tokens_are_compact_arrays() -> None:
    capture, _ = read(answer())
    found = tokens(capture)[0]
    assert (found.prompt_ids.dtype, found.response_ids.dtype, found.logprobs.dtype) == (np.int32, np.int32, np.float32)
    assert found.response_ids.tolist() == [7, 8] and found.logprobs.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize("raw", [b"[]", b"1", b'"text"', b"{", b"\xff"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="Expect|codec"):
        take(Capture(), raw, HIDE)


def test_deltas_merge_like_the_whole_message() -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning_content": "so"},
        {"reasoning_content": "...", "content": None},
        {"content": "a"},
        {"content": "b", "refusal": None},
        {"tool_calls": [{"index": 1, "id": "c1", "function": {"name": "g", "arguments": ""}}]},
        {
            "tool_calls": [
                {"index": 0, "id": "c0", "function": {"name": "f"}},
                {"index": 1, "function": {"arguments": "{"}},
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ):
        merge(message, delta)
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": ""}, "id": "c0"},
        {"type": "function", "function": {"name": "g", "arguments": "{}"}, "id": "c1"},
    ]
    assert message == {"role": "assistant", "content": "ab", "reasoning_content": "so...", "tool_calls": calls}


def test_a_delta_of_a_strange_shape_is_a_defect_and_not_a_crash() -> None:
    capture, shown = read({"choices": [{"index": 0, "delta": {"tool_calls": [5]}, "token_ids": [1]}]}, HIDE)
    assert capture.malformed and shown == b'{"choices":[{"index":0,"delta":{"tool_calls":[5]}}]}'
