"""From records to what can be trained: every call is counted once, where it fell out or as trained."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.schema import (
    Attempt,
    Completion,
    Episode,
    Outcome,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    floats,
    ids,
    selector_of,
)
from agentlightning.trajectory import Ledger, agent_return, collect, lineages, rollout_reward


def call(path="writer", prompt=(1, 2), response=(3, 4), *, name="c", **more):
    fields = {"policy": "policy", "version": 0, "span_id": None, **more}
    return Completion(
        id=name,
        attempt_id="a",
        path=path,
        model="m",
        prompt_ids=ids(prompt),
        response_ids=ids(response),
        logprobs=floats([-0.5] * len(response)),
        finish_reason="stop",
        request={},
        response={},
        **fields,
    )


def reward(value, target="rollout", name="reward", source="emit"):
    return Reward("r", "a", value, name, target, source)


def episode(completions, rewards=(), *, outcome=Outcome.OK, group="g", rollout="r", superseded=0):
    record = Rollout(rollout, "run", {}, "t", group, state=RolloutState.SUCCEEDED, outcome=outcome)
    return Episode(record, Attempt("a", rollout, 1, "w"), [], list(completions), list(rewards), superseded)


def test_each_reason_is_counted_where_the_call_fell_out():
    calls = [
        call(name="good"),
        call("checker", name="other"),
        call(name="old", version=7),
        call(name="fixed", policy=None),
        call(name="bare", defect="no_token_ids"),
        call(name="torn", response=(3, 4, 5)),
    ]
    calls[-1].logprobs = floats([-1.0])
    batch = collect([episode(calls, [reward(1)], superseded=2)], ["writer"], version=0)
    ledger = batch.ledger
    assert (ledger.seen, ledger.attributed, ledger.selected, ledger.complete) == (8, 8, 5, 1)
    assert ledger.dropped == {
        "superseded": 2,
        "not_selected": 1,
        "stale": 1,
        "not_policy": 1,
        "no_token_ids": 1,
        "length_mismatch": 1,
    }
    assert ledger.agents == {"writer": 5, "checker": 1} and ledger.chosen == {"writer": 5}
    assert [t.completion.id for g in batch.groups for j in g.trajectories for t in j.transitions] == ["good"]


def test_b6_an_empty_call_is_left_out_and_its_neighbours_stay():
    batch = collect([episode([call(response=()), call(name="d")], [reward(1)])], ["writer"])
    assert batch.ledger.dropped == {"no_token_ids": 1} and batch.ledger.complete == 1


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in (Outcome.OK, Outcome.TRUNCATED)])
def test_calls_of_failed_rollouts_name_the_outcome(outcome):
    batch = collect([episode([call()], [reward(1)], outcome=outcome)], ["writer"])
    assert batch.ledger.dropped == {f"outcome_{outcome}": 1} and not batch.groups


def test_a_truncated_rollout_with_a_reward_is_used():
    assert collect([episode([call()], [reward(0)], outcome=Outcome.TRUNCATED)], ["writer"]).ledger.complete == 1


def test_no_reward_is_missing_and_never_zero():
    batch = collect([episode([call()])], ["writer"])
    assert batch.ledger.dropped == {"reward_missing": 1} and not batch.groups


GOLDEN = [
    ([reward(0.3), reward(1.0, source="return")], 1.0),
    ([reward(0.3, "call:c"), reward(1.0, source="return")], 1.3),
    ([reward(0.3)], 0.3),
    ([reward(1.0, source="return")], 1.0),
    ([reward(0.5, name="style"), reward(0.25, name="format")], 0.75),
    ([reward(0.5, name="style"), reward(1.0)], 1.0),
    ([reward(0.2, "agent:writer"), reward(1.0)], 1.2),
    ([reward(0.2, "agent:checker"), reward(1.0)], 1.0),
    ([reward(0.2, "call:span1"), reward(0.4, "call:elsewhere")], 0.2),
    ([reward(0.4, "agent:checker")], None),
    ([], None),
]


@pytest.mark.parametrize(("rewards", "total"), GOLDEN)
def test_b68_one_rule_decides_what_an_agent_is_paid(rewards, total):
    own = call(span_id="span1")
    found = agent_return(episode([own], rewards), "writer", [own])
    assert found == pytest.approx(total) if total is not None else found is None


def test_an_agent_is_paid_by_its_path_or_its_last_name():
    for target in ("agent:team/writer", "agent:writer"):
        assert agent_return(episode([], [reward(1, target)]), "team/writer", []) == 1


def test_b51_rewards_of_an_agent_that_was_not_chosen_stay_with_it():
    batch = collect([episode([call(), call("checker")], [reward(5, "agent:checker"), reward(1)])], ["writer"])
    assert [t.reward for g in batch.groups for t in g.trajectories] == [1.0]


def test_a_reward_of_one_call_is_kept_with_that_call():
    calls = [call(name="c1"), call(name="c2")]
    (group,) = collect([episode(calls, [reward(1), reward(0.5, "call:c2")])], ["writer"]).groups
    assert [t.reward for t in group.trajectories[0].transitions] == [0.0, 0.5]
    assert group.trajectories[0].reward == 1.5


def test_groups_are_by_task_and_selector_and_never_mixed():
    episodes = [
        episode([call("writer"), call("team/checker")], [reward(i)], group=g, rollout=f"{g}{i}")
        for g in "xy"
        for i in range(2)
    ]
    groups = {g.key: [t.reward for t in g.trajectories] for g in collect(episodes, ["writer", "team/*"]).groups}
    assert groups == {
        ("x", "writer"): [0, 1],
        ("x", "team/*"): [0, 1],
        ("y", "writer"): [0, 1],
        ("y", "team/*"): [0, 1],
    }


@pytest.mark.parametrize(
    ("selectors", "path", "chosen"),
    [
        (["write"], "rewrite", None),
        (["writer"], "team/writer", "writer"),
        (["team/writer"], "team/writer", "team/writer"),
        (["team/writer"], "other/writer", None),
        (["team/*"], "team/a/b", "team/*"),
        (["*"], "anything", "*"),
        (["b", "a"], "a", "a"),
        (["Writer"], "writer", None),
    ],
)
def test_selection_is_exact_or_a_glob(selectors, path, chosen):
    assert selector_of(selectors, path) == chosen


def transition(prompt, response, **more):
    return Transition(call(prompt=prompt, response=response, **more), "writer", 0.0)


def test_turns_are_one_sequence_only_on_an_exact_prefix():
    first, second = transition([1, 2], [3]), transition([1, 2, 3, 9], [4])
    edited = transition([1, 2, 8, 9], [4])
    assert lineages([first, second, edited]) == [[first, second], [edited]]


def test_b52_interleaved_sub_agents_follow_their_own_lineage():
    a1, b1 = transition([1], [2]), transition([5], [6])
    a2, b2 = transition([1, 2, 3], [4]), transition([5, 6, 7], [8])
    assert lineages([a1, b1, a2, b2]) == [[a1, a2], [b1, b2]]


def test_an_identical_prompt_asked_twice_is_two_samples():
    twice = [transition([1, 2], [3]), transition([1, 2], [4])]
    assert lineages(twice) == [[twice[0]], [twice[1]]]


def test_temperatures_are_not_mixed_in_one_sequence():
    hot, cold = (
        transition([1], [2], sampling={"temperature": 1.0}),
        transition([1, 2], [3], sampling={"temperature": 0.5}),
    )
    assert lineages([hot, cold]) == [[hot], [cold]]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=1)))
)
def test_every_call_is_in_one_lineage_and_each_lineage_is_a_prefix_chain(pairs):
    transitions = [transition(prompt, response) for prompt, response in pairs]
    chains = lineages(transitions)
    assert sorted(id(t) for chain in chains for t in chain) == sorted(map(id, transitions))
    for chain in chains:
        for one, two in itertools.pairwise(chain):
            whole = np.concatenate([one.completion.prompt_ids, one.completion.response_ids])
            assert np.array_equal(two.completion.prompt_ids[: len(whole)], whole)


@given(
    st.lists(
        st.tuples(st.sampled_from(["writer", "checker"]), st.sampled_from([None, "no_token_ids"]), st.booleans()),
        max_size=12,
    )
)
def test_the_ledger_always_adds_up(calls):
    episodes = [
        episode([call(path, defect=defect, name=f"c{i}")], [reward(1)] if paid else [])
        for i, (path, defect, paid) in enumerate(calls)
    ]
    ledger = collect(episodes, ["writer"]).ledger
    assert ledger.seen == len(calls) == ledger.complete + sum(ledger.dropped.values())


def test_rollout_reward_and_ledger_text():
    assert rollout_reward([reward(1, "agent:x")]) is None
    ledger = Ledger(seen=3, attributed=3, selected=2, complete=2, trained=2)
    ledger.drop("not_selected")
    assert str(ledger) == (
        "calls: 3 seen -> 3 attributed -> 2 selected -> 2 complete -> 2 trained (left out: not_selected 1)"
    )
