"""The vocabulary: what goes into a record comes out of it, and what is no record is refused."""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
import math
import pickle
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning import errors, schema
from agentlightning.plain import plain
from agentlightning.schema import (
    Attempt,
    Completion,
    Endpoint,
    Episode,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Route,
    Run,
    Span,
    SpanKind,
    Step,
    Transition,
)

TEXT = st.text(max_size=20)
NUMBER = st.integers(0, 2**40)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(schema.ids)
LOGPROBS = st.lists(st.floats(-50, 0, width=32), max_size=40).map(schema.floats)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=4)

SPANS = st.builds(
    Span,
    id=st.builds(schema.new_span_id),
    attempt_id=st.builds(schema.new_id),
    kind=st.sampled_from(SpanKind),
    name=TEXT,
    parent_id=st.none() | TEXT,
    path=TEXT,
    start_ns=NUMBER,
    end_ns=st.none() | NUMBER,
    status=st.sampled_from(["ok", "error", "open"]),
    error=st.none() | TEXT,
    attributes=OBJECT,
    seq=NUMBER,
)
ROLLOUTS = st.builds(
    Rollout,
    id=TEXT,
    run_id=TEXT,
    task=JSON,
    task_id=TEXT,
    group_id=TEXT,
    step=NUMBER,
    mode=TEXT,
    resources=st.dictionaries(TEXT, NUMBER, max_size=3),
    sampling=OBJECT,
    seed=NUMBER,
    timeout_s=st.none() | st.floats(0, 1e6),
    max_attempts=st.integers(1, 9),
    priority=st.integers(-9, 9),
    state=st.sampled_from(RolloutState),
    outcome=st.none() | st.sampled_from(Outcome),
    attempts=NUMBER,
    created_ns=NUMBER,
    ended_ns=st.none() | NUMBER,
)
ATTEMPTS = st.builds(
    Attempt,
    id=st.builds(schema.new_id),
    rollout_id=TEXT,
    number=st.integers(1, 99),
    worker=TEXT,
    outcome=st.none() | st.sampled_from(Outcome),
    error=st.none() | TEXT,
    lease_until=st.floats(0, 1e10),
    started_ns=NUMBER,
    ended_ns=st.none() | NUMBER,
)
REWARDS = st.builds(
    Reward,
    id=TEXT,
    attempt_id=st.builds(schema.new_id),
    value=st.floats(allow_nan=False, allow_infinity=False),
    name=TEXT,
    target=TEXT,
    source=TEXT,
    seq=NUMBER,
)
RESOURCES = st.builds(Resource, name=TEXT, version=NUMBER, kind=TEXT, value=OBJECT)
STEPS = st.builds(
    Step,
    run_id=TEXT,
    number=st.integers(1, 99),
    metrics=st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=3),
    ledger=OBJECT,
    checkpoint=st.none() | TEXT,
    ended_ns=NUMBER,
)
RUNS = st.builds(Run, id=TEXT, name=TEXT, config=OBJECT, config_hash=TEXT, state=TEXT, owner=TEXT)
ENDPOINTS = st.builds(
    Endpoint,
    base_url=TEXT,
    api_key=TEXT,
    routes=st.lists(st.builds(Route, selector=TEXT, model=TEXT, trained=st.booleans()), max_size=3).map(tuple),
    context=NUMBER,
)
COMPLETIONS = st.builds(
    Completion,
    id=TEXT,
    attempt_id=st.none() | st.builds(schema.new_id),
    path=TEXT,
    span_id=st.none() | st.builds(schema.new_span_id),
    model=TEXT,
    policy=st.none() | TEXT,
    version=st.none() | NUMBER,
    prompt_ids=IDS,
    response_ids=IDS,
    logprobs=LOGPROBS,
    finish_reason=TEXT,
    request=OBJECT,
    response=OBJECT,
    sampling=OBJECT,
    choice=st.integers(0, 9),
    defect=st.none() | TEXT,
    start_ns=NUMBER,
    end_ns=NUMBER,
    seq=NUMBER,
)
PLAIN_RECORDS = SPANS | ROLLOUTS | ATTEMPTS | REWARDS | RESOURCES | STEPS | RUNS | ENDPOINTS


def same(left: Any, right: Any) -> bool:
    """Equality that looks into token arrays: they are equal when dtype, length and every value are."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, f), getattr(right, f)) for f in left.__struct_fields__
        )
    return bool(left == right)


# What goes in comes out.


@given(PLAIN_RECORDS)
def test_every_record_survives_the_wire(record: msgspec.Struct) -> None:
    assert schema.decode(schema.encode(record), type(record)) == record


@given(COMPLETIONS)
def test_a_completion_keeps_every_id_and_logprob_bit_for_bit(completion: Completion) -> None:
    back = schema.decode(schema.encode(completion), Completion)
    assert same(back, completion)
    assert back.prompt_ids.dtype == back.response_ids.dtype == np.int32
    assert back.logprobs.dtype == np.float32


@given(
    st.builds(
        Episode,
        rollout=ROLLOUTS,
        attempt=st.none() | ATTEMPTS,
        spans=st.lists(SPANS, max_size=2),
        completions=st.lists(COMPLETIONS, max_size=2),
        rewards=st.lists(REWARDS, max_size=2),
    )
)
def test_an_episode_survives_with_all_that_hangs_on_it(episode: Episode) -> None:
    assert same(schema.decode(schema.encode(episode), Episode), episode)


def test_token_ids_travel_as_raw_bytes_not_as_lists() -> None:
    blob = schema.encode(schema.ids(range(100_000)))
    assert len(blob) < 4 * 100_000 + 16


@pytest.mark.parametrize("array", [schema.ids([]), schema.floats([])])
def test_an_empty_array_stays_an_empty_array(array: np.ndarray) -> None:
    back = schema.decode(schema.encode(array), np.ndarray)
    assert back.shape == (0,) and back.dtype == array.dtype


# What is no record is refused.


@pytest.mark.parametrize("kind", [Span, Rollout, Attempt, Completion, Reward, Resource, Run, Step, Endpoint, Route])
def test_unknown_keys_are_refused_in_every_record(kind: type) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `surprise`|missing required field"):
        schema.decode(msgspec.msgpack.encode({"surprise": 1}), kind)
    assert kind.__struct_config__.forbid_unknown_fields


def test_a_wrong_type_is_refused() -> None:
    good = msgspec.to_builtins(Reward(id="r", attempt_id="a", value=1.0))
    with pytest.raises(msgspec.ValidationError, match="value"):
        schema.decode(msgspec.msgpack.encode({**good, "value": "1.0"}), Reward)


def test_ids_given_as_a_list_are_refused_not_converted() -> None:
    with pytest.raises((NotImplementedError, msgspec.ValidationError), match="cannot be read from list"):
        schema.decode(msgspec.msgpack.encode([1, 2, 3]), np.ndarray)


def test_what_cannot_be_stored_says_so() -> None:
    with pytest.raises(NotImplementedError, match="object cannot be stored"):
        schema.encode({"x": object()})


# Identities.


def test_ids_have_the_form_of_trace_and_span_ids() -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", schema.new_id())
    assert re.fullmatch(r"[0-9a-f]{16}", schema.new_span_id())
    assert len({schema.new_span_id() for _ in range(10_000)}) == 10_000


@pytest.mark.parametrize(
    ("path", "leaf"), [("", ""), ("writer", "writer"), ("team/writer", "writer"), ("a/b/c", "c"), ("team/", "")]
)
def test_the_agent_is_the_last_part_of_the_path(path: str, leaf: str) -> None:
    assert schema.leaf(path) == leaf
    assert Span(id="s", attempt_id="a", kind=SpanKind.LLM, name="n", path=path).agent == leaf


@pytest.mark.parametrize(
    ("selectors", "path", "chosen"),
    [
        (["writer"], "writer", "writer"),
        (["writer"], "team/writer", "writer"),
        (["team/writer"], "team/writer", "team/writer"),
        (["team/writer"], "other/writer", None),
        (["team/*"], "team/writer", "team/*"),
        (["team/*"], "writer", None),
        (["writer", "*"], "writer", "writer"),
        (["*", "writer"], "writer", "*"),
        (["rewriter"], "writer", None),
        (["Writer"], "writer", None),
        ([], "writer", None),
    ],
)
def test_an_agent_is_meant_by_name_by_path_or_by_glob(selectors: list[str], path: str, chosen: str | None) -> None:
    assert schema.selector_of(selectors, path) == chosen


def test_final_states_are_those_that_nothing_leaves() -> None:
    from agentlightning.store.base import TRANSITIONS

    assert set(TRANSITIONS) == set(RolloutState)
    assert {state for state, nexts in TRANSITIONS.items() if not nexts} == schema.FINAL_STATES


def test_an_advantage_that_nobody_set_is_not_a_number() -> None:
    completion = Completion(
        "c", None, "", None, "m", None, None, schema.ids([1]), schema.ids([2]), schema.floats([0]), "stop", {}, {}
    )
    assert math.isnan(Transition(completion, "writer", 0.0).advantage)


# Rewards are finite numbers, or an error; never silently 0.


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (decimal.Decimal("0.25"), 0.25),
        (fractions.Fraction(1, 8), 0.125),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
    ],
)
def test_every_kind_of_number_is_a_reward(value: object, number: float) -> None:
    got = schema.finite(value)
    assert got == number and type(got) is float


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        b"1",
        None,
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        decimal.Decimal("NaN"),
        10**400,
        [],
        {},
        object(),
    ],
)
def test_anything_else_is_refused_with_the_cure(value: object) -> None:
    with pytest.raises(errors.RewardError, match="finite number"):
        schema.finite(value)


@given(st.floats())
def test_a_float_is_kept_exactly_or_refused(value: float) -> None:
    if math.isfinite(value):
        assert schema.finite(value) == value
    else:
        with pytest.raises(errors.RewardError, match="reward is"):
            schema.finite(value)


# `plain` takes whatever a user's program holds.


class Grumpy:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_plain_keeps_what_json_can_say_and_shows_the_rest() -> None:
    state = {
        "n": 1,
        "when": datetime.date(2026, 1, 2),
        "nan": math.nan,
        7: (1, 2),
        "np": np.float64(0.5),
        "bad": Grumpy(),
    }
    assert plain(state) == {
        "n": 1,
        "when": "datetime.date(2026, 1, 2)",
        "nan": "nan",
        "7": [1, 2],
        "np": 0.5,
        "bad": "<Grumpy: repr failed: ValueError>",
    }


def test_plain_ends_for_circular_state() -> None:
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert json.dumps(plain(loop))


def test_plain_cuts_what_is_too_long_to_be_read() -> None:
    assert len(plain(bytes(1_000_000))) == 2000


@given(
    st.recursive(
        st.none() | st.floats() | st.binary(max_size=9) | st.text(alphabet=st.characters()), st.lists, max_leaves=9
    )
)
def test_plain_always_gives_strict_json(value: object) -> None:
    text = json.dumps(plain(value), allow_nan=False)
    assert text.encode("utf-8")


def test_plain_mends_halves_of_surrogate_pairs() -> None:
    assert plain({"\ud800": "\udfff"}) == {"?": "?"}


# Errors.


@pytest.mark.parametrize("name", [n for n, e in vars(errors).items() if isinstance(e, type)])
def test_every_error_belongs_to_the_one_tree_and_pickles(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.AgentLightningError) and kind.__doc__
    back = pickle.loads(pickle.dumps(kind("what went wrong: what cures it")))
    assert type(back) is kind and str(back) == "what went wrong: what cures it"
