"""A model of the queue that hypothesis plays against a store: every move it predicts lies in `TRANSITIONS`.

Three workers lease, finish, beat, cancel and emit in any order, also with attempts that lost their say long ago. A
lease of 0 seconds is lost by the next `lease`; all others last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from agentlightning.errors import Superseded
from agentlightning.schema import FINAL_STATES, Outcome, Reward, Rollout, RolloutState, new_id
from agentlightning.store.base import RETRIED, TRANSITIONS, Store
from tests.conformance.store_records import LONG

WORKERS = st.sampled_from(["ann", "bob", "cyd"])
GOOD = {
    Outcome.OK: RolloutState.SUCCEEDED,
    Outcome.TRUNCATED: RolloutState.SUCCEEDED,
    Outcome.CANCELLED: RolloutState.CANCELLED,
}


@dataclass
class Try:
    id: str
    rollout: Model
    number: int
    dying: bool
    outcome: Outcome | None = None


@dataclass
class Model:
    id: str
    order: int
    priority: int
    max_attempts: int
    state: RolloutState = RolloutState.QUEUED
    outcome: Outcome | None = None
    tries: list[Try] = field(default_factory=list)

    def move(self, state: RolloutState) -> None:
        assert state in TRANSITIONS[self.state], f"the model itself broke TRANSITIONS: {self.state} -> {state}"
        self.state = state

    def end(self, one: Try, outcome: Outcome) -> None:
        one.outcome = outcome
        if outcome in RETRIED and len(self.tries) < self.max_attempts:
            self.move(RolloutState.QUEUED)
        else:
            self.outcome = outcome
            self.move(GOOD.get(outcome, RolloutState.FAILED))


class StoreMachine(RuleBasedStateMachine):
    rollouts: Bundle[Model] = Bundle("rollouts")
    tries: Bundle[Try] = Bundle("tries")

    def __init__(self, store: Store, run_id: str) -> None:
        super().__init__()
        self.store, self.run_id = store, run_id
        self.models: dict[str, Model] = {}
        self.rewards: dict[str, list[str]] = {}

    @rule(target=rollouts, priority=st.integers(0, 2), max_attempts=st.integers(1, 3))
    def enqueue(self, priority: int, max_attempts: int) -> Model:
        model = Model(new_id(), len(self.models), priority, max_attempts)
        self.models[model.id] = model
        self._enqueue(model)
        return model

    @rule(model=rollouts)
    def enqueue_again(self, model: Model) -> None:
        self._enqueue(model)

    def _enqueue(self, model: Model) -> None:
        more = {"priority": model.priority, "max_attempts": model.max_attempts}
        self.store.enqueue([Rollout(model.id, self.run_id, None, "t", "g", **more)])

    @rule(target=tries, worker=WORKERS, limit=st.integers(1, 3), dying=st.booleans())
    def lease(self, worker: str, limit: int, dying: bool) -> object:
        for model in self.models.values():
            for one in model.tries:
                if one.outcome is None and one.dying:
                    model.end(one, Outcome.INFRA_ERROR)
        queued = [model for model in self.models.values() if model.state == RolloutState.QUEUED]
        expected = sorted(queued, key=lambda model: (-model.priority, model.order))[:limit]
        pairs = self.store.lease(worker, limit, 0 if dying else LONG, self.run_id)
        assert [rollout.id for rollout, _ in pairs] == [model.id for model in expected]
        return multiple(*(self._begin(attempt.rollout_id, attempt.id, attempt.number, dying) for _, attempt in pairs))

    def _begin(self, rollout_id: str, attempt_id: str, number: int, dying: bool) -> Try:
        model = self.models[rollout_id]
        model.move(RolloutState.RUNNING)
        one = Try(attempt_id, model, number, dying)
        model.tries.append(one)
        assert number == len(model.tries)
        return one

    @rule(one=tries, outcome=st.sampled_from(Outcome))
    def finish(self, one: Try, outcome: Outcome) -> None:
        if one.outcome is None:
            one.rollout.end(one, outcome)
            assert self.store.finish(one.id, outcome) == one.rollout.state
        elif one.outcome == outcome:
            assert self.store.finish(one.id, outcome) == one.rollout.state
        else:
            try:
                state = self.store.finish(one.id, outcome)
            except Superseded:
                return
            raise AssertionError(f"an attempt that ended as {one.outcome} moved its rollout to {state}")

    @rule(one=tries)
    def beat(self, one: Try) -> None:
        assert self.store.heartbeat([one.id], LONG) == ([] if one.outcome is None else [one.id])
        one.dying = False

    @rule(one=tries)
    def give_back(self, one: Try) -> None:
        self.store.give_back([one.id], "it stops")
        if one.outcome is None:
            one.outcome = Outcome.INFRA_ERROR
            one.rollout.max_attempts += 1
            one.rollout.move(RolloutState.QUEUED)

    @rule(model=consumes(rollouts))
    def cancel(self, model: Model) -> None:
        self.store.cancel([model.id])
        if model.state not in FINAL_STATES:
            for one in model.tries:
                one.outcome = one.outcome or Outcome.CANCELLED
            model.outcome = Outcome.CANCELLED
            model.move(RolloutState.CANCELLED)

    @rule(one=tries)
    def emit(self, one: Try) -> None:
        reward = Reward(new_id(), one.id, 1.0)
        self.store.add(rewards=[reward])
        self.rewards.setdefault(one.id, []).append(reward.id)

    @invariant()
    def the_store_agrees(self) -> None:
        found = self.store.rollouts(self.run_id)
        assert [one.id for one in found] == list(self.models)
        for one in found:
            model = self.models[one.id]
            assert (one.state, one.outcome, one.attempts) == (model.state, model.outcome, len(model.tries))
            assert one.attempts <= one.max_attempts

    @invariant()
    def only_the_latest_attempt_decides(self) -> None:
        for episode in self.store.episodes(list(self.models)):
            model = self.models[episode.rollout.id]
            attempts = self.store.attempts(model.id)
            assert [one.outcome for one in attempts] == [one.outcome for one in model.tries]
            assert sum(one.outcome is None for one in attempts) == (model.state == RolloutState.RUNNING)
            if episode.attempt is not None:
                assert model.state in FINAL_STATES and episode.attempt.id == model.tries[-1].id
                assert [one.id for one in episode.rewards] == self.rewards.get(episode.attempt.id, [])
            elif model.state in (RolloutState.SUCCEEDED, RolloutState.FAILED):
                raise AssertionError(f"{model.id} ended as {model.state} and nothing decided it")
