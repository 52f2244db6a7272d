"""Each place where a server puts ids and log-probabilities, in the shape that this server sends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentlightning.gateway import places
from agentlightning.gateway.capture import Capture, take, tokens
from agentlightning.gateway.checks import defect
from agentlightning.gateway.sampling import Keep
from tests.core.test_gateway_capture import HIDE, SHOW, answer, logprobs, read, without

IDS, LOGPS = [7, 8], [-0.5, -0.25]
NOT_IDS: list[Any] = [None, "7", [7.5], ["7"], [True], {"a": 7}, [[7]], [{"x": 7}], [{"id": "7"}], [None]]


def below(keys: tuple[str | int, ...], value: Any) -> Any:
    """`value` under these keys; the only entry of a list stands for index 0."""
    for key in reversed(keys):
        value = {key: value} if isinstance(key, str) else [value]
    return value


def merged(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {k: merged(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in a | b}
    return [merged(a[0], b[0])] if isinstance(a, list) and isinstance(b, list) else b


def shaped(place: places.Place, ids: list[int]) -> Any:
    """`ids` as this place has them, with the log-probabilities that stand beside them."""
    pairs = list(zip(LOGPS * 2, ids, strict=False))
    if place.ids is places.paired:
        return [[logprob, token, "text"] for logprob, token in pairs]
    if place.ids is places.listed:
        return [{"id": token, "logprob": logprob, "token": "t"} for logprob, token in pairs]
    if place.ids is places.named and place.path[-1] == "content":
        return [{"token": f"token_id:{token}", "logprob": logprob} for logprob, token in pairs]
    return [f"token_id:{token}" for token in ids] if place.ids is places.named else ids


@pytest.mark.parametrize("place", places.PROMPT, ids=lambda place: ".".join(map(str, place.path)))
def test_b22_prompt_ids_are_found_in_each_place(place: places.Place) -> None:
    capture, _ = read(merged(without(answer(), "prompt_token_ids"), below(place.path, shaped(place, [4, 5]))))
    assert capture.prompt_ids == [4, 5]


@pytest.mark.parametrize("null", [True, False])
@pytest.mark.parametrize(
    "place", places.RESPONSE, ids=lambda place: f"{place.server}: {'.'.join(map(str, place.path))}"
)
def test_b22_response_ids_are_found_in_each_place(place: places.Place, null: bool) -> None:
    """With the log-probabilities, wherever these are, and nothing is told twice."""
    value = answer()
    choice = without(value["choices"][0], "token_ids") | ({"token_ids": None} if null else {})
    if place.path[0] == "logprobs":
        choice["logprobs"] = {"token_logprobs": LOGPS} if place.path[-1] == "tokens" else {}
    elif place.logprobs is not None:
        choice["logprobs"] = None
    if place.path == ("token_ids",):
        choice.pop("token_ids", None)
    if place.path[0] == "delta":
        choice["delta"] = choice.pop("message")
    value["choices"] = [merged(choice, below(place.path, shaped(place, IDS)))]
    capture, _ = read(value)
    found = capture.choices[0]
    assert (found.ids, found.logprobs) == (IDS, LOGPS)
    assert defect(capture, found, tokens(capture)[0], 2) is None


@pytest.mark.parametrize("place", places.RESPONSE, ids=lambda place: ".".join(map(str, place.path)))
def test_b22_each_place_adds_up_over_the_chunks_of_a_stream(place: places.Place) -> None:
    capture = Capture()
    for token, logprob in zip(IDS, LOGPS, strict=True):
        there = shaped(place._replace(), [token])
        there = set_logprob(there, logprob)
        choice: Any = merged({"index": 0, "delta": {"content": "x"}}, below(place.path, there))
        if place.path[0] != "logprobs" and place.logprobs is None:
            choice["logprobs"] = logprobs(logprob)
        if place.path == ("logprobs", "tokens"):
            choice["logprobs"]["token_logprobs"] = [logprob]
        take(capture, msgspec.json.encode({"choices": [choice]}), SHOW)
    assert (capture.choices[0].ids, capture.choices[0].logprobs) == (IDS, LOGPS)


def set_logprob(there: Any, logprob: float) -> Any:
    (entry,) = there
    if isinstance(entry, list):
        return [[logprob, *entry[1:]]]
    return [entry | {"logprob": logprob}] if isinstance(entry, dict) else there


@pytest.mark.parametrize("place", [*places.PROMPT, *places.RESPONSE], ids=lambda place: ".".join(map(str, place.path)))
@pytest.mark.parametrize("value", NOT_IDS)
def test_b1_what_is_no_list_of_ids_is_none(place: places.Place, value: Any) -> None:
    assert place.ids(value) is None


def test_the_usual_place_is_stronger_than_all_others() -> None:
    value = answer()
    value["choices"][0] |= {"response_token_ids": [1], "meta_info": {"output_token_logprobs": [[-9.0, 1, ""]]}}
    capture, _ = read(value)
    assert (capture.choices[0].ids, capture.choices[0].logprobs) == (IDS, LOGPS)


def test_ids_are_found_for_each_choice() -> None:
    value = answer()
    choice = without(value["choices"][0], "token_ids")
    value["choices"] = [
        choice | {"index": i, "meta_info": {"output_token_logprobs": [[-0.5, i, ""]]}, "logprobs": None} for i in (0, 1)
    ]
    capture, _ = read(value)
    assert [capture.choices[i].ids for i in (0, 1)] == [[0], [1]]


def test_the_client_does_not_see_what_it_did_not_ask_for() -> None:
    value = answer()
    value["choices"][0] |= {"meta_info": {"id": "x"}, "prompt_token_ids": [1], "response_token_ids": [1]}
    _, shown = read(value, HIDE)
    assert shown is not None and msgspec.json.decode(shown)["choices"][0].keys() == {
        "index",
        "message",
        "finish_reason",
        "logprobs",
    }
    _, shown = read(value, Keep(True, True, True))
    assert shown is not None and "meta_info" in msgspec.json.decode(shown)["choices"][0]
