"""What a program may look like, what it gets, and what it may return."""

import asyncio
import functools
import math
import pickle
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from agentlightning.errors import ConfigError, RewardError, RolloutError
from agentlightning.program import PolicyHandle, Program, program_of, returned_rewards, rollout
from agentlightning.prompts import PromptTemplate, resource_of
from agentlightning.schema import Attempt, Resource, Rollout, new_id

GATEWAY = "http://127.0.0.1:4321"
ATTEMPT = Attempt(id=new_id(), rollout_id="r", number=1, worker="w")
RESOURCES = {
    "policy": Resource("policy", 7, "policy", {"base_url": "http://engine/v1"}),
    "judge": Resource("judge", 1, "llm", {"base_url": "http://judge/v1"}),
    "prompt": resource_of("prompt", 3, PromptTemplate("Answer {question}")),
    "tools": Resource("tools", 2, "settings", {"names": ["search"]}),
}
ROLLOUT = Rollout("r", "run", {"question": "?"}, "t", "g", resources={name: r.version for name, r in RESOURCES.items()})


def bind(function, record=ROLLOUT):
    return program_of(function).bind(record, ATTEMPT, RESOURCES.__getitem__, GATEWAY)


@rollout
def decorated(task, policy):
    return len(task) + 0.5


class TestParameters:
    def test_resources_are_filled_by_name_and_kind(self):
        def solve(task, policy, judge, prompt, tools): ...

        given = bind(solve)
        root = f"{GATEWAY}/attempts/{ATTEMPT.id}/v1"
        assert given["policy"] == PolicyHandle(root, f"agl-{ATTEMPT.id}", "policy", 7, "policy")
        assert (given["judge"].model, given["judge"].version) == ("judge", 1)
        assert given["prompt"] == PromptTemplate("Answer {question}")
        assert given["tools"] == {"names": ["search"]}

    def test_only_what_is_asked_for_is_read(self):
        asked = []

        def solve(task, prompt): ...

        program_of(solve).bind(ROLLOUT, ATTEMPT, lambda name: asked.append(name) or RESOURCES[name], GATEWAY)
        assert asked == ["prompt"]

    def test_a_program_may_edit_what_it_got(self):
        def solve(task, tools): ...

        bind(solve)["tools"]["names"].append("mine")
        assert bind(solve)["tools"] == {"names": ["search"]}

    def test_reserved_names_give_the_records(self):
        def solve(task, *, attempt, rollout): ...

        assert bind(solve) == {"attempt": ATTEMPT, "rollout": ROLLOUT}

    def test_a_default_stands_in_for_a_missing_resource(self):
        def solve(task, critic=None, prompt=None): ...

        assert bind(solve) == {"prompt": PromptTemplate("Answer {question}")}

    def test_b94_an_unknown_parameter_names_what_is_known(self):
        def solve(task, polciy): ...

        with pytest.raises(ConfigError, match="'polciy'.*'judge', 'policy', 'prompt', 'tools'"):
            Program(solve).check(RESOURCES)
        with pytest.raises(ConfigError, match="polciy"):
            bind(solve)

    def test_known_parameters_pass(self):
        def solve(task, policy, rollout, extra=1): ...

        Program(solve).check(["policy"])
        with pytest.raises(ConfigError, match="'policy'.*are none"):
            Program(solve).check([])


class TestShape:
    def test_a_decorated_function_stays_what_it_was(self):
        assert decorated([1, 2], policy=None) == 2.5
        assert decorated.__name__ == "decorated"
        assert pickle.loads(pickle.dumps(decorated)) is decorated

    def test_async_functions_methods_partials_and_objects(self):
        class Solver:
            @rollout
            async def solve(self, task, policy): ...

            async def __call__(self, task, prompt): ...

        async def plain(task, policy, depth): ...

        assert Program(Solver().solve).wants == ("policy",)
        assert Program(Solver().solve).is_async
        assert Program(Solver()).wants == ("prompt",)
        assert Program(Solver()).is_async
        partial = Program(functools.partial(plain, depth=3))
        assert partial.is_async
        assert partial.optional == {"depth"}
        assert not Program(lambda task: 1.0).is_async
        assert program_of(partial) is partial

    @pytest.mark.parametrize(
        ("source", "complaint"),
        [
            ("def f(): ...", "takes no task"),
            ("def f(*, task): ...", "takes no task"),
            ("def f(*tasks): ...", "takes no task"),
            ("def f(self): ...", "takes no task"),
            ("def f(task, *rest): ...", r"'\*rest'"),
            ("def f(task, **rest): ...", r"'\*\*rest'"),
            ("def f(task, policy, /): ...", "'policy'"),
            ("def f(task): yield 1", "generator"),
            ("async def f(task): yield 1", "generator"),
        ],
    )
    def test_what_cannot_run_is_refused_where_it_is_declared(self, source, complaint):
        space = {}
        exec(source, space)  # noqa: S102  the sources are the parameters above
        with pytest.raises(RolloutError, match=complaint):
            rollout(space["f"])

    def test_something_without_a_signature(self):
        with pytest.raises(RolloutError, match="wrap it in a def"):
            Program(classmethod(lambda cls, task: 1))

    def test_both_faces_of_an_async_program(self):
        @rollout
        async def solve(task):
            return task * 2

        assert asyncio.run(solve(2)) == 4


class TestPolicyHandle:
    def test_an_agent_goes_into_the_address(self):
        handle = bind(decorated)["policy"]
        assert handle.agent("writer").base_url == f"{GATEWAY}/attempts/{ATTEMPT.id}/agents/writer/v1"
        assert handle.agent("team/the writer?").base_url.endswith("/agents/team/the%20writer%3F/v1")
        assert handle.agent("a").agent("b") == handle.agent("b")
        assert handle.agent("a").api_key == handle.api_key

    def test_an_empty_name(self):
        with pytest.raises(ConfigError, match="needs an agent name"):
            bind(decorated)["policy"].agent("/")


class Strange:
    def __float__(self):
        raise OverflowError("too much")


class TestB10ReturnValues:
    @pytest.mark.parametrize(
        "value", [2, -1, 0, True, 0.5, np.float32(2), np.int64(3), np.array(1.5), Decimal("0.25"), Fraction(1, 2)]
    )
    def test_b65_numbers(self, value):
        (reward,) = returned_rewards(value, ATTEMPT.id)
        assert reward.value == float(value)
        assert type(reward.value) is float
        assert (reward.name, reward.target, reward.source, reward.attempt_id) == (
            "reward",
            "rollout",
            "return",
            ATTEMPT.id,
        )

    def test_none_is_no_reward(self):
        assert returned_rewards(None, ATTEMPT.id) == []
        assert returned_rewards({}, ATTEMPT.id) == []

    def test_named_rewards(self):
        rewards = returned_rewards({"right": 1, "short": np.float32(0.5)}, ATTEMPT.id)
        assert [(r.name, r.value) for r in rewards] == [("right", 1.0), ("short", 0.5)]
        assert len({r.id for r in rewards}) == 2

    @pytest.mark.parametrize(
        ("value", "named"),
        [
            ([1.0], "list"),
            ((1.0, 2.0), "tuple"),
            ({1.0}, "set"),
            (np.array([1.0]), "ndarray"),
            (np.array([]), "ndarray"),
            ("1", "'1'"),
            (b"1", "b'1'"),
            (object(), "object"),
            (1j, "complex"),
            (Strange(), "Strange"),
            (math.nan, "nan"),
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (10**400, "int"),
            ({"a": 1.0, "b": None}, "'b'"),
            ({"a": math.nan}, "'a'"),
            ({"a": [1]}, "'a'.*list"),
            ({"a": {"b": 1}}, "'a'.*dict"),
            ({1: 1.0}, "key 1"),
            ({"": 1.0}, "key ''"),
        ],
    )
    def test_b67_all_else_is_refused_by_name(self, value, named):
        with pytest.raises(RewardError, match=named):
            returned_rewards(value, ATTEMPT.id, "solve")
