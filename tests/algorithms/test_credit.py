"""Which call is paid for what: each method by hand on a few calls, and what must hold for all of them."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import ConfigError
from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.calltree import parents
from agentlightning_algorithms.credit import USES, Credit, Decision
from tests.algorithms.credit_world import CENTRED, agent, call, credited, episode


def two_turns(reward: float, first: float = 0.0, words: tuple[int, int] = (5, 6)) -> Any:
    """A conversation of two calls; `first` is given to its first call."""
    calls = [call("w", [1], [words[0]]), call("w", [1, words[0], 9], [words[1]])]
    return episode(calls, reward, given={f"call:{calls[0].id}": first} if first else None)


# ---- by hand


def test_broadcast_gives_every_call_what_its_rollout_got() -> None:
    found, ledger, _ = credited([two_turns(1), two_turns(0), two_turns(0), two_turns(0)], "broadcast")
    assert found == [[0.75, 0.75], [-0.25] * 2, [-0.25] * 2, [-0.25] * 2] and ledger.trained == 8


def test_per_agent_compares_each_agent_path_by_itself() -> None:
    """Both agents are one entry of `agents=`: broadcast takes their returns together, Dr.MAS apart."""

    def team(reward: float, bonus: float) -> Any:
        return episode([call("t/a", [1], [2]), call("t/b", [3], [4])], reward, given={"agent:t/b": bonus})

    rollouts = [team(1, 3), team(0, 1)]
    assert credited(rollouts, "broadcast", agents=["t/*"])[0] == [[-0.5, 2.5], [-1.5, -0.5]]
    assert credited([team(1, 3), team(0, 1)], "per_agent", agents=["t/*"])[0] == [[0.5, 1.5], [-0.5, -1.5]]


def test_turn_compares_what_is_still_to_come_at_each_turn() -> None:
    found, _, _ = credited([two_turns(1, first=0.5), two_turns(1), two_turns(0, first=0.25)], "turn")
    firsts, seconds = np.array([1.5, 1.0, 0.25]), np.array([1.0, 1.0, 0.0])
    assert [pair[0] for pair in found] == pytest.approx(list(firsts - firsts.mean()))
    assert [pair[1] for pair in found] == pytest.approx(list(seconds - seconds.mean()))


def test_a_turn_that_nobody_else_reached_is_single() -> None:
    short = episode([call("w", [1], [5])], 0)
    found, ledger, groups = credited([two_turns(1), short], "turn")
    assert found == [[0.5, None], [-0.5]] and ledger.dropped == {"single": 1} and len(groups) == 1


def test_gigpo_adds_a_step_part_where_observations_are_equal() -> None:
    """Both read [1] at first; only the first two read [1, 5, 9] later. Returns 1, 0, 0; discount 1/2."""
    rollouts = [two_turns(1, words=(5, 6)), two_turns(0, words=(5, 7)), two_turns(0, words=(4, 7))]
    found, _, _ = credited(rollouts, Credit("gigpo", gamma=0.5, weight=2.0))
    whole = np.array([2 / 3, -1 / 3, -1 / 3])
    first = np.array([0.5, 0.0, 0.0]) - 1 / 6
    second = np.array([0.5, -0.5, 0.0])
    assert [pair[0] for pair in found] == pytest.approx(list(whole + 2 * first))
    assert [pair[1] for pair in found] == pytest.approx(list(whole + 2 * second)), "alone: no step part"


def test_tree_by_hand() -> None:
    """All read [1]. Two said 5 (returns 1, 0), two said 4 (returns 0, 0). Those who said 5 read [1, 5, 9]: one said 6."""
    rollouts = [
        two_turns(1, words=(5, 6)),
        two_turns(0, words=(5, 7)),
        two_turns(0, words=(4, 7)),
        two_turns(0, words=(4, 7)),
    ]
    found, ledger, _ = credited(rollouts, Credit("tree", anchors=("exact",), prior=0.0))
    said_five = [1 / 2 - 0, 1 / 2 - 1 / 3]  # mean below, less the mean of the others in the situation
    assert [found[0][0], found[1][0]] == pytest.approx(said_five)
    assert [found[2][0], found[3][0]] == pytest.approx([0 - 1 / 3] * 2)
    assert [found[0][1], found[1][1]] == pytest.approx([1 - 0, 0 - 1])
    assert [found[2][1], found[3][1]] == [None, None], "nothing differs after 4"
    assert ledger.dropped == {"zero_variance": 2}


def test_tree_shrinks_what_few_rollouts_say() -> None:
    rollouts = [two_turns(r, words=w) for r, w in ((1, (5, 6)), (0, (5, 7)), (0, (4, 7)), (0, (4, 7)))]
    found, _, _ = credited(rollouts, Credit("tree", anchors=("exact",), prior=1.0))
    assert found[0] == pytest.approx([0.5 * 2 / 3, 1.0 * 1 / 2])


def test_gae_by_hand() -> None:
    """Values: all read [1]: mean of the others. [1, 5, 9] and [1, 4, 9] likewise. One step: V(next) - V; many: R - V."""
    rollouts = [two_turns(r, words=w) for r, w in ((1, (5, 6)), (0, (5, 7)), (1, (4, 7)), (1, (4, 7)))]
    exact = ("exact",)
    near, _, _ = credited(rollouts, Credit("gae", lam=0.0, anchors=exact))
    far, _, _ = credited(rollouts, Credit("gae", lam=1.0, anchors=exact))
    value = [2 / 3, 1, 2 / 3, 2 / 3]
    later = [0, 1, 1, 1]
    returns = [1, 0, 1, 1]
    assert [pair[0] for pair in near] == pytest.approx([b - a for a, b in zip(value, later, strict=True)])
    assert [pair[1] for pair in near] == pytest.approx([r - b for r, b in zip(returns, later, strict=True)])
    assert [pair[0] for pair in far] == pytest.approx([r - a for r, a in zip(returns, value, strict=True)])


def test_gae_pays_an_agent_s_own_reward_with_its_last_call() -> None:
    def team(reward: float, own: float) -> Any:
        return episode([call("a", [1], [2]), call("b", [3], [4])], reward, given={"agent:a": own})

    found, _, _ = credited([team(1, 2), team(0, 0)], Credit("gae", lam=0.0, anchors=("exact",)), agents=["a", "b"])
    assert found == [[2 + 0 - 0, 1 - 0], [0 + 1 - 3, 0 - 1]]


def test_a_function_of_one_s_own() -> None:
    def by_length(decisions: Any, how: Advantage) -> list[float | str]:
        return ["too_short" if d.turn else float(len(d.transition.completion.prompt_ids)) for d in decisions]

    found, ledger, _ = credited([two_turns(1), two_turns(0)], by_length)
    assert found == [[1.0, None], [1.0, None]] and ledger.dropped == {"too_short": 2}


# ---- anchors


def free(reward: float, name: str, prose: str, **given: Any) -> Any:
    """A planner that asks for a tool in words of its own, and a writer that answers likewise."""
    token = [hash(prose) % 1000 + 10]
    first = call("planner", [1], token, content=prose, tools=[(name, given)])
    return episode([first, call("writer", [*token, 2], [hash(prose[::-1]) % 1000 + 10], content=prose[::-1])], reward)


WORDED = [
    ("search", "I will look it up", {"q": "x", "n": 1}, 1),
    ("search", "let me see what there is", {"n": 1, "q": "X"}, 0.5),
    ("guess", "no need to look", {}, 0),
    ("guess", "I think I know", {}, 0),
]


def test_text_that_never_repeats_is_told_by_its_tools() -> None:
    found, _, _ = credited([free(r, n, p, **g) for n, p, g, r in WORDED], Credit("tree", prior=0.0), agents=["planner"])
    assert [row[0] for row in found] == pytest.approx([0.75 - 0.5 / 3, 0.75 - 1 / 3, 0 - 0.5, 0 - 0.5])
    exact, _, _ = credited(
        [free(r, n, p, **g) for n, p, g, r in WORDED], Credit("tree", anchors=("exact",), prior=0.0), agents=["planner"]
    )
    assert [row[0] for row in exact] == pytest.approx([1 - 0.5 / 3, 0.5 - 1 / 3, -0.5, -0.5]), "each by its own return"


def test_the_next_speaker_is_an_anchor_too() -> None:
    """A router chooses who goes on, in words that never repeat."""

    def routed(to: str, reward: float, number: int) -> Any:
        return episode([call("router", [1], [number]), call(to, [number, 2], [number])], reward)

    rollouts = [routed("solver", 1, 11), routed("solver", 0.5, 12), routed("joker", 0, 13), routed("joker", 0, 14)]
    found, _, _ = credited(rollouts, Credit("tree", anchors=("node",), prior=0.0), agents=["router"])
    assert [row[0] for row in found] == pytest.approx([0.75 - 0.5 / 3, 0.75 - 1 / 3, -0.5, -0.5])


def test_numbers_and_case_do_not_make_a_state() -> None:
    def said(text: str, reward: float, token: int) -> Any:
        return episode([call("w", [1], [token], content=text)], reward)

    rollouts = [said("Order 17  FAILED", 1, 11), said("order 98a7 failed", 0, 12), said("all is well", 0, 13)]
    found, _, _ = credited(rollouts, Credit("tree", anchors=("exact", "state"), prior=0.0))
    assert [row[0] for row in found] == pytest.approx([0.5 - 0, 0.5 - 0.5, 0 - 0.5])


def test_an_anchor_may_be_a_function() -> None:
    def parity(completion: Any) -> int:
        return int(completion.response_ids[0] % 2)

    rollouts = [episode([call("w", [1], [token])], reward) for token, reward in ((11, 1), (13, 0), (12, 0), (14, 0))]
    found, _, _ = credited(rollouts, Credit("tree", anchors=(parity,), prior=0.0))
    assert [row[0] for row in found] == pytest.approx([0.5, 0.5 - 1 / 3, -1 / 3, -1 / 3])


# ---- the call tree


def sub_agents() -> tuple[list[Any], list[Any]]:
    """root -> (a -> a1), (b): B69."""
    spans = [agent("root"), agent("A", "root", "root/a"), agent("A1", "A", "root/a/a1"), agent("B", "root", "root/b")]
    calls = [
        call("root", [1], [2], span="root"),
        call("root/a", [3], [4], span="A"),
        call("root/b", [5], [6], span="B"),
        call("root/a/a1", [7], [8], span="A1"),
    ]
    return calls, spans


def test_b69_a_discount_does_not_leak_into_a_sibling() -> None:
    calls, spans = sub_agents()
    assert parents(calls, spans) == [None, 0, 0, 1]
    paid = episode(calls, 0.0, spans, {f"call:{calls[3].id}": 1.0})
    rivals, spans = sub_agents()
    found, _, _ = credited([paid, episode(rivals, 0.0, spans)], Credit("discounted", gamma=0.5), agents=["root*"])
    assert found[0] == [0.125, 0.25, None, 0.5], "root, a, b, a1: half of it for each call between"
    assert found[1] == [-0.125, -0.25, None, -0.5]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=6),
    st.floats(-5, 5),
    st.floats(0.1, 1.0),
)
def test_b69_a_chain_has_the_closed_form(rewards: list[float], end: float, gamma: float) -> None:
    """sum_k gamma^(k - t) r_k + gamma^(T - 1 - t) R"""
    from agentlightning.schema import Group, Trajectory, Transition
    from agentlightning_algorithms.calltree import discounted

    calls = [call("w", [1], [2]) for _ in rewards]
    one = episode(calls, end)
    transitions = [Transition(c, "w", r) for c, r in zip(calls, rewards, strict=True)]
    trajectory = Trajectory(one.rollout.id, "a", "w", end + math.fsum(rewards), transitions)
    group = Group(("g", "w"), [trajectory])
    found = discounted([Decision(t, trajectory, group, one, n, 0.0) for n, t in enumerate(transitions)], gamma)
    last = len(rewards) - 1
    closed = [
        sum(gamma ** (k - t) * rewards[k] for k in range(t, last + 1)) + gamma ** (last - t) * end
        for t in range(last + 1)
    ]
    assert found == pytest.approx(closed, abs=1e-9)


def test_who_handed_over_is_who_came_before() -> None:
    spans = [agent("g"), agent("P", "g", "p"), agent("W", "g", "w", **{"agl.handoff.from": "p"}), agent("V", "g", "v")]
    calls = [
        call("p", [1], [2], span="P", start_ns=1, end_ns=2),
        call("v", [1], [2], span="V", start_ns=1, end_ns=3),
        call("w", [3], [4], span="W", start_ns=4, end_ns=5),
    ]
    assert parents(calls, spans) == [None, None, 0], "p and v at the same time; w of p, who handed over, not of v"


def test_nodes_that_follow_each_other_are_a_chain_and_parallel_ones_are_not() -> None:
    sequential = [call(name, [1], [2], start_ns=2 * n, end_ns=2 * n + 1) for n, name in enumerate("abc")]
    parallel = [call(name, [1], [2], start_ns=1, end_ns=9) for name in "abc"]
    assert parents(sequential, []) == [None, 0, 1] and parents(parallel, []) == [None, None, None]


# ---- what holds for all


@pytest.mark.parametrize("kind", list(USES))
def test_one_rollout_teaches_nothing_and_is_counted(kind: str) -> None:
    found, ledger, groups = credited([two_turns(1)], kind)
    assert found == [[None, None]] and groups == [] and ledger.dropped == {"single": 2}


@pytest.mark.parametrize("kind", list(USES))
def test_equal_returns_teach_nothing_unless_they_are_kept(kind: str) -> None:
    _, ledger, groups = credited([two_turns(1), two_turns(1)], kind)
    assert groups == [] and ledger.dropped == {"zero_variance": 4}
    found, ledger, _ = credited([two_turns(1), two_turns(1)], kind, Advantage(std="none", flat="keep"))
    assert found == [[0.0, 0.0], [0.0, 0.0]] and ledger.trained == 4


@pytest.mark.parametrize("kind", list(USES))
@pytest.mark.parametrize("std", ["sample", "population", "batch", "none"])
def test_tasks_are_never_mixed(kind: str, std: str) -> None:
    """What another task brought changes nothing (but for a scale that is the step's)."""
    first = lambda: [two_turns(1, words=(5, 6)), two_turns(0, words=(4, 6))]
    other = [episode([call("w", [1], [8])], r, task="other") for r in (5.0, -7.0)]
    alone, _, _ = credited(first(), kind, Advantage(std=std))
    beside, _, _ = credited(first() + other, kind, Advantage(std=std))
    if std == "batch":
        assert np.sign(np.array(alone, float)).tolist() == np.sign(np.array(beside[:2], float)).tolist()
    else:
        assert beside[:2] == alone


@pytest.mark.parametrize("kind", list(USES))
def test_the_ledger_counts_every_call_once(kind: str) -> None:
    rollouts = [two_turns(1), two_turns(0), episode([call("w", [1], [5])], None), episode([call("w", [2], [5])], 0.5)]
    _, ledger, _ = credited(rollouts, kind)
    assert ledger.seen == 6 == ledger.trained + sum(ledger.dropped.values())
    assert ledger.dropped["reward_missing"] == 1


def test_methods_without_an_episode_know_the_trajectory_alone() -> None:
    from agentlightning.trajectory import Ledger, collect
    from agentlightning_algorithms.credit import assign

    for kind in USES:
        batch = collect([two_turns(1, words=(5, 6)), two_turns(0, words=(4, 6))], ["w"])
        assert assign(batch.groups, batch.ledger, CENTRED, kind)
        assert isinstance(batch.ledger, Ledger)


def test_scales_are_the_group_s() -> None:
    """`tree` on the scale that the estimator gives: differences of returns over the deviation of the returns."""
    rewards, words = [1.0, 0.0, 0.0, 0.0], [(5, 6), (5, 7), (4, 7), (4, 7)]
    make = lambda: [two_turns(r, words=w) for r, w in zip(rewards, words, strict=True)]
    plain, _, _ = credited(make(), "tree")
    scaled, _, _ = credited(make(), "tree", Advantage())
    assert scaled[0][0] == pytest.approx(plain[0][0] / (np.std(rewards, ddof=1) + 1e-6))


@pytest.mark.parametrize("kind", ["broadcast", "tree"])
def test_over_many_samples_the_gradient_is_the_true_one(kind: str) -> None:
    """Cross-fitted, the mean of advantage * grad log p is the policy gradient: one agent, two choices, p = (0.3, 0.7),
    rewards 1 and 0 with chances 0.8 and 0.4. d value / d logit_0 = p0 (Q0 - V)."""
    rng = np.random.default_rng(0)
    chance, p0, total, count = (0.8, 0.4), 0.3, 0.0, 1500
    how = Advantage("loo", "none", flat="keep")
    for _ in range(count):
        choices = (rng.random(4) >= p0).astype(int)
        returns = [float(rng.random() < chance[c]) for c in choices]
        rollouts = [episode([call("w", [1], [int(c) + 5])], r) for c, r in zip(choices, returns, strict=True)]
        found, _, _ = credited(rollouts, Credit("tree", prior=0.0) if kind == "tree" else kind, how)
        total += sum((row[0] or 0.0) * ((c == 0) - p0) for row, c in zip(found, choices, strict=True)) / 4
    value = p0 * chance[0] + (1 - p0) * chance[1]
    assert total / count == pytest.approx(p0 * (chance[0] - value), abs=0.012)


def test_unknown_names_and_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of broadcast"):
        Credit("shapley")
    with pytest.raises(ConfigError, match="weight changes nothing for 'tree'"):
        Credit("tree", weight=2.0)
