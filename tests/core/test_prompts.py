"""Prompts as resources: what a template is, how rollouts read it, and which texts cannot stand in for it."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentlightning as agl
from agentlightning.errors import ConfigError, PromptError
from agentlightning.loop import Loop, Trial
from agentlightning.prompts import refusal, resource_of, template_of
from agentlightning.schema import Resource, decode, encode
from agentlightning.tasks import Task
from tests.core.trainer_world import TRAIN, VAL, Trainers

ASK = agl.PromptTemplate("Answer {question} in {words:>3} words; {{json}}")


def test_a_template_knows_its_gaps_and_fills_them() -> None:
    assert ASK.placeholders == {"question", "words"}
    assert ASK.format(question="why?", words=5) == "Answer why? in   5 words; {json}"
    assert str(ASK) == ASK.text


def test_jinja2_has_loops_and_filters() -> None:
    pytest.importorskip("jinja2")
    shots = agl.PromptTemplate("{% for s in shots %}- {{ s | upper }}\n{% endfor %}Q: {{ question }}", "jinja2")
    assert shots.placeholders == {"shots", "question"}
    assert shots.format(shots=["a", "b"], question="{why}?") == "- A\n- B\nQ: {why}?"


@pytest.mark.parametrize("syntax", ["f-string", "jinja2"])
def test_a_gap_without_a_value_and_a_value_without_a_gap_are_named(syntax: str) -> None:
    if syntax == "jinja2":
        pytest.importorskip("jinja2")
    ask = agl.PromptTemplate("Answer {question}" if syntax == "f-string" else "Answer {{ question }}", syntax)
    with pytest.raises(PromptError, match=r"no value for \{question\}.*no gap \{qestion\}.*its gaps are \{question\}"):
        ask.format(qestion="why?")


@pytest.mark.parametrize("text", ["{question", "{0}", "{}", "{a.b}", "{a[0]}", "{a:{b}}", "}"])
def test_what_is_no_plain_gap_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(PromptError, match="write {{ and }}"):
        agl.PromptTemplate(text)


def test_a_text_that_is_no_jinja2_is_refused() -> None:
    pytest.importorskip("jinja2")
    with pytest.raises(PromptError, match="no jinja2"):
        agl.PromptTemplate("{% for x in %}", "jinja2")


def test_a_prompt_that_a_model_wrote_cannot_reach_into_objects() -> None:
    pytest.importorskip("jinja2")
    nosy = agl.PromptTemplate("{{ task.__class__.__mro__ }}", "jinja2")
    with pytest.raises(PromptError, match="unsafe"):
        nosy.format(task="x")


def test_an_unknown_syntax_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="f-string, jinja2"):
        agl.PromptTemplate("x", "poml")


# Stand-ins.


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Say {question} in {words}.", None),
        ("Say {question} in {words}, {words}!", None),
        ("Say {question}.", r"it lost \{words\}"),
        ("Say {question} in {words} of {language}.", r"\{language\}, which nothing fills"),
        ('Say {question} in {words} as {"json": 1}', "no plain name|cannot be read"),
        ("  \n", "empty"),
        (None, "NoneType"),
        ({"text": "x"}, "dict"),
    ],
)
def test_b107_a_text_that_cannot_stand_in_is_told_why(text: Any, why: str | None) -> None:
    import re

    found = refusal(ASK, text)
    assert found is None if why is None else found is not None and re.search(why, found)


NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=5)
PLAIN = st.text(st.characters(blacklist_characters="{}", blacklist_categories=["Cs"]), max_size=20)


@given(st.lists(st.tuples(PLAIN, NAMES), max_size=5), PLAIN)
def test_a_text_is_its_parts_with_the_gaps_filled(parts: list[tuple[str, str]], tail: str) -> None:
    template = agl.PromptTemplate("".join(f"{text}{{{name}}}" for text, name in parts) + tail)
    assert template.placeholders == {name for _, name in parts}
    values = {name: f"<{name}>" for _, name in parts}
    assert template.format(**values) == "".join(f"{text}<{name}>" for text, name in parts) + tail
    if template.text.strip():
        assert refusal(template, template.text) is None
    assert decode(encode(template), agl.PromptTemplate) == template


# In a run.


class Prompting:
    """Two agents' prompts, tried side by side; nothing is trained and no policy is served."""

    def run(self, loop: Loop) -> None:
        self.loop = loop
        loop.publish(resource_of("writer", 1, agl.PromptTemplate("write {x}")))
        loop.publish(resource_of("critic", 1, agl.PromptTemplate("judge {x}")))
        for _ in loop.steps(2):
            loop.publish(resource_of("writer", 2, agl.PromptTemplate("write well {x}")))
            trials = [Trial(task, {"writer": v}, k) for task in loop.train for v in (1, 2) for k in range(2)]
            self.episodes = loop.try_out(trials)
            loop.finish()
            loop.report({})


def solve(task: Any, writer: Any, critic: Any, attempt: Any) -> float:
    read.append((attempt.rollout_id, writer.format(x=task["x"]), critic.format(x=task["x"])))
    return float("well" in writer.text)


read: list[tuple[str, str, str]] = []


def test_rollouts_read_pinned_versions_by_parameter_name(trainers: Trainers) -> None:
    read.clear()
    algorithm = Prompting()
    result = trainers(algorithm).fit(solve, train=TRAIN[:2], val=VAL)
    assert [e.rewards[0].value for e in algorithm.episodes] == [0, 0, 1, 1] * 2
    assert {(w, c) for _, w, c in read} >= {("write 0", "judge 0"), ("write well 1", "judge 1")}
    assert len({rollout for rollout, _, _ in read}) == len(read) == 2 * 2 * 2 + 2 * len(VAL), (
        "each trial is one rollout"
    )
    assert result.before["val"].mean == 0 and result.after["val"].mean == 1
    assert len(result.steps) == 1, "finish() leaves out the other step"


def test_a_trial_that_was_run_before_is_not_run_again(trainers: Trainers) -> None:
    class Twice(Prompting):
        def run(self, loop: Loop) -> None:
            super().run(loop)
            self.again = loop.try_out([Trial(loop.train[0], {"writer": 1}), Trial(loop.train[0], {"writer": 1})])

    read.clear()
    algorithm = Twice()
    trainers(algorithm).fit(solve, train=TRAIN[:2])
    assert [e.rollout.id for e in algorithm.again] == [algorithm.episodes[0].rollout.id] * 2
    assert len(read) == 8


def test_a_prompt_resource_that_holds_none_is_named() -> None:
    with pytest.raises(ConfigError, match="'hint' version 2 is no prompt"):
        template_of(Resource("hint", 2, "prompt", {"words": "x"}))


def test_a_program_that_asks_for_a_prompt_nobody_published_is_told(trainers: Trainers) -> None:
    class Half(Prompting):
        def run(self, loop: Loop) -> None:
            loop.try_out([Trial(Task("t", {"x": 1}))])

    with pytest.raises(ConfigError, match="'critic'"):
        trainers(Half()).fit(solve, train=TRAIN)
