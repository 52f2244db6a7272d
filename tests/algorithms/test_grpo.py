"""GRPO as its user sees it: what each knob changes, what it refuses, and that credit reaches the rows that are trained."""

import dataclasses
import logging
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, NothingToTrain, PluginError, RewardError
from agentlightning.hooks import hookimpl
from agentlightning.schema import Reward, Span, SpanKind
from agentlightning_algorithms.advantage import Advantage
from agentlightning_algorithms.credit import USES, Decision
from agentlightning_algorithms.grpo import DRAWS, GRPO
from agentlightning_algorithms.intermediate import Intermediate
from agentlightning_algorithms.policy.base import Loss, Update
from agentlightning_algorithms.presets import LOSSES, PRESETS, Preset
from tests.algorithms.grpo_world import Run, Stage, World, team


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def plain(world: World) -> Run:
    return world.fit()


WHAT_AND_WHERE = {"model", "agents", "lora", "policy", "options", "seed"}
"""Fields of GRPO that say what is trained and where; all others are knobs."""


def test_there_are_twelve_knobs_and_unknown_ones_are_refused() -> None:
    knobs = {field.name for field in dataclasses.fields(GRPO)} - WHAT_AND_WHERE
    assert len(knobs) == 12
    with pytest.raises(ConfigError, match="no clip; its knobs are.*loss"):
        agl.algorithm("grpo", model="m", agents=["w"], clip=(0.1, 0.1))


def test_the_defaults_are_the_published_grpo(plain: Run) -> None:
    (update,) = plain.updates
    assert update.spec == Loss("clip", (0.2, 0.2), kl=0.0, aggregation="token") and update.epochs == 1
    assert Preset() == Preset(Advantage("mean", "sample", 1e-6, flat="drop"), Loss())
    assert sum(float(row.weights.sum()) for row in update.rows) == pytest.approx(1)


MUTATIONS: dict[str, Any] = {
    "steps": 2,
    "tasks_per_step": 3,
    "rollouts_per_task": 3,
    "learning_rate": 2e-5,
    "schedule": "linear",
    "epochs": 2,
    "temperature": 0.7,
    "preset": "art",
    "advantage": "dr_grpo",
    "loss": "sapo",
    "credit": "turn",
    "intermediate": Intermediate("tools", form="plain"),
}


@pytest.mark.parametrize("knob", list(MUTATIONS))
def test_every_knob_changes_what_is_sampled_or_learned(world: World, plain: Run, knob: str) -> None:
    assert set(MUTATIONS) == {field.name for field in dataclasses.fields(GRPO)} - WHAT_AND_WHERE
    changed = world.fit(**(REWARDED if knob == "credit" else {}), **{knob: MUTATIONS[knob]}, **STEPS.get(knob, {}))
    base = world.fit(**STEPS[knob]) if knob in STEPS else world.fit(**REWARDED) if knob == "credit" else plain
    assert told(changed) != told(base)


STEPS: dict[str, dict[str, Any]] = {"schedule": {"steps": 2}}
"""What a knob needs beside it to matter."""


def rewarded(stage: Stage) -> float:
    """A reward for the first call too."""
    value = team(stage)
    stage.reward(0.7 if value > 1 else 0.3, f"call:{stage.calls[0].id}")
    return value


REWARDED: dict[str, Any] = {"play": rewarded}


def told(run: Run) -> Any:
    """All that an engine and a learner were told."""
    sampled = [
        (e.rollout.task_id, e.rollout.sampling, [c.response_ids.tolist() for c in e.completions]) for e in run.episodes
    ]
    updates = [
        (
            update.spec,
            update.epochs,
            update.learning_rate,
            [row.weights.tolist() for row in update.rows],
            rows_of(update),
        )
        for update in run.updates
    ]
    return sampled, updates


def rows_of(update: Update) -> Any:
    return [(row.ids.tolist(), [round(float(a), 5) for a in row.advantages]) for row in update.rows]


@pytest.mark.parametrize("credit", [*USES, lambda decisions, how: [float(d.turn + 1) for d in decisions]])
def test_credit_reaches_the_rows(world: World, credit: Any) -> None:
    """Calls of one conversation are one row, and each is pushed by an advantage of its own."""
    run = world.fit(rewarded, credit=credit, advantage={"flat": "keep"})
    per_row = [
        sorted({a for a, w in zip(row.advantages, row.weights, strict=True) if w}) for row in run.updates[0].rows
    ]
    assert len(per_row) == 8 and all(len(row.ids) > 4 for row in run.updates[0].rows)
    several = [len(found) > 1 for found in per_row]
    assert any(several) is (credit not in ("broadcast", "per_agent"))


def test_another_credit_is_another_gradient(world: World) -> None:
    """The gradient of a token at ratio 1 is -weight * advantage: it differs where credit does."""
    first, second = (world.fit(rewarded, credit=name) for name in ("broadcast", "turn"))
    gradients = [[(row.weights * row.advantages).tolist() for row in run.updates[0].rows] for run in (first, second)]
    assert [run.column("ids") for run in (first, second)] == [first.column("ids")] * 2
    assert gradients[0] != gradients[1]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_trains(world: World, preset: str) -> None:
    run = world.fit(preset=preset)
    assert run.updates[0].spec == PRESETS[preset].loss
    assert all(abs(a) < 10 for row in run.column("advantages") for a in row)


def test_sequence_losses_get_answers_that_touch_apart(world: World) -> None:
    run = world.fit(loss="gspo")
    assert run.updates[0].spec == LOSSES["gspo"]
    assert sum(float(row.weights.sum()) for row in run.updates[0].rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"preset": "verll"}, "preset='verll'.*verl, trl"),
        ({"preset": 3}, "preset=3"),
        ({"advantage": "grop"}, "advantage='grop'"),
        ({"advantage": {"sdt": "none"}}, "sdt.*baseline, std"),
        ({"advantage": {"std": "robust"}}, "std='robust'"),
        ({"advantage": {"baseline": "best"}}, "baseline='best'"),
        ({"advantage": {"flat": "skip"}}, "flat='skip'"),
        ({"advantage": {"truncated": "drop"}}, "truncated='drop'"),
        ({"advantage": {"epsilon": -1.0}}, "epsilon=-1"),
        ({"advantage": {"overlong": [10, 20]}}, "overlong"),
        ({"advantage": 3}, "advantage=3"),
        ({"loss": "ppo"}, "loss='ppo'"),
        ({"loss": {"knd": "clip"}}, "knd"),
        ({"loss": {"aggregation": "mean"}}, "aggregation='mean'"),
        ({"loss": {"aggregation": "constant"}}, "length.*give both"),
        ({"loss": {"length": 100}}, "length.*give both"),
        ({"loss": {"dual": 0.5}}, "dual=0.5"),
        ({"loss": {"clip": [-0.1, 0.2]}}, "negative"),
        ({"loss": {"correction": "tis", "bounds": [3.0, 2.0]}}, "bounds"),
        ({"loss": {"bounds": [0.0, 2.0]}}, "bounds.*changes nothing"),
        ({"loss": {"taus": [1.0, 2.0]}}, "taus.*changes nothing"),
        ({"loss": {"kl_form": "k1"}}, "kl_form.*changes nothing"),
        ({"loss": {"kind": "sapo", "clip": [0.1, 0.1]}}, "clip.*changes nothing"),
        ({"loss": {"kind": "cispo", "dual": 3.0}}, "dual.*changes nothing"),
        ({"credit": "three"}, "credit='three'.*broadcast"),
        ({"credit": {"knd": "tree"}}, "credit.*knd"),
        ({"credit": {"kind": "turn", "gamma": 0.9}}, "gamma changes nothing for 'turn'"),
        ({"credit": {"kind": "tree", "anchors": ["exat"]}}, "anchor 'exat'"),
        ({"credit": {"kind": "tree", "anchors": []}}, "anchors is empty"),
        ({"credit": {"kind": "gae", "lam": 2.0}}, "lam within"),
        ({"credit": 3}, "credit=3"),
        ({"intermediate": "tolls", "credit": "turn"}, "intermediate='tolls'"),
        ({"intermediate": {"frm": "plain"}}, "frm.*source, form"),
        ({"intermediate": {"form": "pure"}}, "form='pure'"),
        ({"intermediate": {"weight": 0}}, "weight=0"),
        ({"intermediate": "tools"}, "cancel out.*credit='turn'"),
        ({"schedule": "cosine"}, "schedule='cosine'"),
        ({"rollouts_per_task": 1}, "rollouts_per_task=1"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"agents": "writer"}, "list of names"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(knobs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        agl.algorithm("grpo", **({"model": "m", "agents": ["w"]} | knobs))


# ---- intermediate rewards, end to end


def test_intermediate_rewards_reach_the_calls_and_leave_audit_lines(world: World) -> None:
    run = world.fit(credit="turn", intermediate="tools", advantage={"flat": "keep"})
    metrics = run.steps[0].metrics
    assert metrics["intermediate_rewards"] == 16 and metrics["intermediate_sum"] == pytest.approx(0)
    lines = [span for episode in run.episodes for span in episode.spans if span.kind == SpanKind.REWARD]
    assert len(lines) == 16, "two calls of the writer in each of eight rollouts: up, and back to nothing"
    assert {line.attributes["agl.reward.why"] for line in lines} <= {"tool succeeded", "tool failed", "the end"}
    for episode in run.episodes:
        audit = [span.attributes for span in episode.spans if span.kind == SpanKind.REWARD]
        tool = next(span for span in episode.spans if span.kind == SpanKind.TOOL)
        worth = -0.5 if tool.status == "error" else 0.5
        assert [line["agl.reward.value"] for line in audit] == [worth, -worth]
        assert audit[0]["agl.reward.potential"] == [0.0, worth]
        calls = [call for call in episode.completions if call.path == "writer"]
        assert [line["agl.reward.target"] for line in audit] == [f"call:{call.id}" for call in calls]
        assert not any(reward.source == "tools" for reward in episode.rewards), "paid in the step, never twice"


class Gives:
    """A plug-in with an opinion of tools."""

    @hookimpl
    def agl_reward_from_span(self, span: Span) -> Reward | None:
        if span.kind != SpanKind.TOOL:
            return None
        return Reward("r", span.attempt_id, 0.25, "said so", f"call:{span.id}", "gives")


class Breaks:
    @hookimpl
    def agl_reward_from_span(self, span: Span) -> Reward | None:
        raise ZeroDivisionError("oops")


def test_a_plug_in_is_asked_without_a_knob(world: World) -> None:
    run = world.fit(credit="turn", observers=(Gives(),))
    lines = [span.attributes for episode in run.episodes for span in episode.spans if span.kind == SpanKind.REWARD]
    assert {(line["agl.reward.why"], line["agl.reward.value"]) for line in lines} == {
        ("said so", 0.125),
        ("the end", -0.125),
    }


def test_a_plug_in_that_fails_stops_the_run(world: World) -> None:
    with pytest.raises(PluginError, match="ZeroDivisionError: oops; mend the plug-in"):
        world.fit(credit="turn", observers=(Breaks(),))


def test_a_function_of_a_span_that_gives_no_number_stops_the_run(world: World) -> None:
    with pytest.raises(RewardError, match="intermediate reward of span 'lookup'"):
        world.fit(credit="turn", intermediate=lambda span: float("nan") if span.kind == SpanKind.TOOL else None)


def test_plain_rewards_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        agl.algorithm("grpo", model="m", agents=["w"], intermediate={"form": "plain"})
    assert "can change which policy is the best" in caplog.text


# ---- cases of the field


def always_one(stage: Stage) -> float:
    team(stage)
    return 1.0


@pytest.mark.parametrize("flat", ["drop", "resample"])
def test_b78_steps_without_a_difference_end_after_bounded_tries(world: World, flat: str) -> None:
    with pytest.raises(NothingToTrain, match="steps in a row trained nothing.*zero_variance"):
        world.fit(always_one, advantage={"flat": flat}, steps=50, tasks=1, rollouts_per_task=2)


def test_dynamic_sampling_draws_other_tasks_until_enough_differ(world: World) -> None:
    """Tasks t0, t1, ... of which one in three teaches; each step draws at most three times."""

    def mostly_flat(stage: Stage) -> float:
        value = team(stage)
        return value if stage.rollout.task_id in ("t0", "t3") else 0.0

    run = world.fit(mostly_flat, advantage={"flat": "resample"}, tasks=2)
    metrics = run.steps[0].metrics
    drawn = len({episode.rollout.group_id for episode in run.episodes})
    taught = {episode.rollout.task_id for episode in run.episodes} & {"t0", "t3"}
    assert 2 < drawn <= 2 * DRAWS and metrics["rollouts"] == drawn * 4, "each rollout is counted once"
    assert taught and run.ledger["dropped"]["zero_variance"] >= 8


def test_b75_a_flat_group_feels_the_kl_term_only_if_it_is_kept(world: World) -> None:
    """By default it is dropped: no row, so no KL either. `flat="keep"`: rows with advantage 0 and a weight."""
    with pytest.raises(NothingToTrain):
        world.fit(always_one, loss={"kl": 0.1}, steps=9, tasks=1, rollouts_per_task=2)
    kept = world.fit(always_one, loss={"kl": 0.1}, advantage={"flat": "keep"})
    (update,) = kept.updates
    assert update.spec.kl == 0.1 and {a for row in kept.column("advantages") for a in row} == {0.0}
    assert sum(float(row.weights.sum()) for row in update.rows) == pytest.approx(1)


def decided(decisions: list[Decision], how: Advantage) -> list[float | str]:
    return [float("nan") for _ in decisions]


def test_b67_a_credit_that_gives_nan_is_refused(world: World) -> None:
    with pytest.raises(RewardError, match="credit gave nan for a call of 'writer'"):
        world.fit(credit=decided)


def test_a_credit_that_forgets_calls_is_refused(world: World) -> None:
    with pytest.raises(RewardError, match="gave 0 verdicts for 16 calls"):
        world.fit(credit=lambda decisions, how: [])
