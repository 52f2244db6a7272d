"""Rewards on the way: what a span is worth, whose call it was, and that potentials never change which policy is the best."""

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.errors import RewardError
from agentlightning.schema import Span, SpanKind
from agentlightning.trajectory import collect
from agentlightning_algorithms.intermediate import (
    Intermediate,
    ToolRewards,
    audit,
    caller,
    intermediate_of,
    pay,
    shaping,
)
from tests.algorithms.credit_world import call, episode, tool

# ---- what a span is worth


@pytest.mark.parametrize(
    ("span", "score", "why"),
    [
        (tool("search", "w", result="3 hits"), 1.0, "tool succeeded"),
        (tool("search", "w", error="connection refused"), -1.0, "tool failed"),
        (tool("search", "w", error="1 validation error for Search: q Field required"), -1.0, "arguments refused"),
        (tool("search", "w", error="f() missing 1 required positional argument: 'q'"), -1.0, "arguments refused"),
        (tool("pytest", "w", result="== 3 passed, 1 failed in 0.1s =="), 0.5, "3 of 4 tests passed"),
        (tool("pytest", "w", error="exit 1", result="2 failed, 1 error"), -1.0, "0 of 3 tests passed"),
    ],
)
def test_a_tool_span_has_a_score(span: Span, score: float, why: str) -> None:
    found = ToolRewards().agl_reward_from_span(span)
    assert found is not None and (found.value, found.name) == (score, why)
    assert found.source == "tools" and found.target == f"call:{span.id}"


def test_other_spans_and_open_ones_have_none() -> None:
    waiting = tool("search", "w")
    waiting.status = "open"
    others = [Span("s", "a", kind, "x") for kind in SpanKind if kind != SpanKind.TOOL]
    assert [ToolRewards().agl_reward_from_span(span) for span in [waiting, *others]] == [None] * len(SpanKind)


# ---- whose call it was


def paid(one: Any, how: Intermediate | None = None, gamma: float = 1.0, path: str = "w") -> tuple[list[float], Any]:
    """What each call of an agent got, and the payments."""
    batch = collect([one], [path])
    payments = pay(batch.groups, [one], how or Intermediate(), gamma)
    (trajectory,) = batch.groups[0].trajectories
    assert trajectory.reward == pytest.approx(1.0 + sum(p.value for _, p in payments))
    return [round(t.reward, 9) for t in trajectory.transitions], payments


def test_a_tool_that_was_asked_for_by_id_is_that_call_s() -> None:
    first = call("w", [1], [2], tools=[("search", {})])
    second = call("w", [1, 2, 3], [4])
    late = tool("search", "w", id=first.response["choices"][0]["message"]["tool_calls"][0]["id"])
    third = call("w", [1, 2, 3, 4, 5], [6])
    found, _ = paid(episode([first, second, third], 1.0, [late]))
    assert found == [0.5, 0.0, -0.5]


def test_otherwise_it_is_the_agent_s_latest_call_before() -> None:
    early = tool("setup", "w")
    first = call("w", [1], [2])
    span = tool("search", "w")
    elsewhere = tool("search", "other")
    second = call("w", [1, 2, 3], [4])
    one = episode([first, second], 1.0, [early, span, elsewhere])
    (trajectory,) = collect([one], ["w"]).groups[0].trajectories
    assert [caller(s, trajectory, one) for s in (early, span, elsewhere)] == [None, 0, None]


def test_what_another_agent_asked_for_is_not_ours() -> None:
    other = call("other", [1], [2], tools=[("search", {})])
    ours = call("w", [3], [4])
    span = tool("search", "w", id=other.response["choices"][0]["message"]["tool_calls"][0]["id"])
    one = episode([other, ours], 1.0, [span])
    (trajectory,) = collect([one], ["w"]).groups[0].trajectories
    assert caller(span, trajectory, one) is None


def conversation(*errors: str | None) -> Any:
    """A call, a tool, a call, a tool, ..., a call."""
    calls, spans = [], []
    for error in errors:
        calls.append(call("w", [1], [2]))
        spans.append(tool("search", "w", error=error))
    return episode([*calls, call("w", [1], [2])], 1.0, spans)


def test_retries_make_a_later_success_worth_less() -> None:
    _, payments = paid(conversation("no", "no", None, None), Intermediate(form="plain"))
    assert [(p.score, p.why) for _, p in payments] == [
        (-1.0, "tool failed"),
        (-1.0, "tool failed"),
        (pytest.approx(1 / 3), "tool succeeded, after 2 failed"),
        (1.0, "tool succeeded"),
    ]


# ---- how it is paid


def test_potentials_by_hand() -> None:
    """Scores 1, -1 and, after one failure, 1/2: Phi is half their mean so far, 1/2, 0, 1/12, and 0 at the end."""
    found, payments = paid(conversation(None, "no", None))
    assert found == pytest.approx([1 / 2, -1 / 2, 1 / 12, -1 / 12])
    ends = [end for _, p in payments for end in (p.before, p.after)]
    assert ends == pytest.approx([0, 1 / 2, 1 / 2, 0, 0, 1 / 12, 1 / 12, 0])
    assert sum(found) == pytest.approx(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([None, "no"]), max_size=6), st.floats(0.5, 1.0))
def test_discounted_potentials_always_cancel_out(errors: list[str | None], gamma: float) -> None:
    """sum_t gamma^t F_t = 0, whatever happened (Ng et al. 1999, proof of theorem 1 with Phi = 0 at both ends)."""
    found, _ = paid(conversation(*errors), gamma=gamma)
    assert sum(gamma**t * value for t, value in enumerate(found)) == pytest.approx(0, abs=1e-8)


def test_plain_rewards_are_paid_as_they_are() -> None:
    found, payments = paid(conversation(None, "no"), Intermediate(form="plain", weight=0.1))
    assert found == [0.1, -0.1, 0.0] and len(payments) == 2


def test_a_function_of_a_span() -> None:
    def long_result(span: Span) -> float | None:
        return 0.4 if span.kind == SpanKind.TOOL else None

    found, payments = paid(conversation(None), Intermediate(long_result, weight=1.0))
    assert found == [0.4, -0.4] and payments[0][1].why == "long_result"


def test_a_source_that_gives_no_number_is_refused() -> None:
    with pytest.raises(RewardError, match="intermediate reward of span 'search'"):
        paid(conversation(None), Intermediate(lambda span: "good"))


def test_a_missing_reward_stays_missing() -> None:
    """Rewards on the way never stand for the one at the end: a trajectory without it is left out before they are paid."""
    one = conversation(None)
    one.rewards.clear()
    batch = collect([one], ["w"])
    assert pay(batch.groups, [one], Intermediate()) == [] and batch.ledger.dropped == {"reward_missing": 2}


def test_every_payment_has_an_audit_line_with_the_same_id_when_it_is_paid_again() -> None:
    one = conversation(None, None)
    lines = [audit(paid(one)[1], None) for _ in range(2)]
    assert [span.id for span in lines[0]] == [span.id for span in lines[1]]
    assert len({span.id for span in lines[0]}) == len(lines[0]) == 3
    first = lines[0][0]
    assert first.kind == SpanKind.REWARD and first.parent_id == one.spans[0].id and first.attempt_id == "a"
    assert first.attributes == {
        "agl.reward.value": 0.5,
        "agl.reward.target": f"call:{one.completions[0].id}",
        "agl.reward.form": "potential",
        "agl.reward.score": 1.0,
        "agl.reward.why": "tool succeeded",
        "agl.reward.potential": [0.0, 0.5],
    }
    assert lines[0][-1].attributes["agl.reward.why"] == "the end"


def test_audit_lines_are_never_read_as_rewards() -> None:
    one = conversation(None)
    one.spans += audit(paid(one)[1], None)
    seen: list[Span] = []
    paid(one, Intermediate(lambda span: seen.append(span)))
    assert {span.kind for span in seen} == {SpanKind.TOOL}


def test_the_plain_form_warns_and_the_other_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        intermediate_of("tools")
        assert not caplog.records
        intermediate_of({"source": "tools", "form": "plain"})
    assert "can change which policy is the best" in caplog.text


# ---- the proof, on tables


class Maze:
    """A random finite-horizon problem: `steps` x `states` x `actions`, transition chances and rewards at every step."""

    def __init__(self, rng: np.random.Generator, steps: int = 3, states: int = 3, actions: int = 2) -> None:
        self.steps, self.states, self.actions = steps, states, actions
        self.chance = rng.dirichlet(np.ones(states), (steps, states, actions))
        self.reward = rng.normal(size=(steps, states, actions))

    def q(self, bonus: np.ndarray, gamma: float) -> np.ndarray:
        """Best Q with `bonus[t, s, a, s']` paid too, by backward induction."""
        value, found = np.zeros(self.states), []
        for t in reversed(range(self.steps)):
            q = self.reward[t] + (self.chance[t] * (bonus[t] + gamma * value)).sum(-1)
            value = q.max(-1)
            found.append(q)
        return np.array(found[::-1])


def bonus_of(maze: Maze, score: np.ndarray, form: str, gamma: float) -> np.ndarray:
    """What `score` (of a state, [steps + 1, states]) pays on each move: by our own `shaping`, or as it is."""
    bonus = np.zeros((maze.steps, maze.states, maze.actions, maze.states))
    ends = np.array(score)
    ends[0], ends[-1] = 0, 0
    for t, s, a, after in itertools.product(*map(range, bonus.shape)):
        bonus[t, s, a, after] = (
            shaping([ends[t, s], ends[t + 1, after]], gamma)[0] if form == "potential" else score[t + 1, after]
        )
    return bonus


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_potentials_the_best_policy_stays_the_best_and_with_plain_rewards_it_may_not(gamma: float) -> None:
    """Tables of 200 problems: the same best action in every state of every step; in plain form it changes in most."""
    rng = np.random.default_rng(7)
    changed = {"potential": 0, "plain": 0}
    for _ in range(200):
        maze = Maze(rng)
        score = rng.normal(size=(maze.steps + 1, maze.states)) * 2
        best = maze.q(np.zeros((maze.steps, maze.states, maze.actions, maze.states)), gamma).argmax(-1)
        for form in changed:
            changed[form] += bool((maze.q(bonus_of(maze, score, form, gamma), gamma).argmax(-1) != best).any())
    assert changed["potential"] == 0
    assert changed["plain"] > 100


def test_a_case_where_plain_rewards_change_the_best_policy() -> None:
    """Solve at once (1.0), or play with a tool that works, three times, for half a point each, and solve nothing."""
    solve, play = 1.0 + 0.5 * 0, 0.0 + 0.5 * 3
    assert play > solve, "in plain form"
    potentials = [0.0, 0.5, 0.5, 0.5, 0.0]
    assert sum(shaping(potentials, 1.0)) + 0.0 < 1.0 + sum(shaping([0.0, 0.0], 1.0)), "in potential form"
