"""The graph against a scripted model: who is asked what, how often, and what becomes of failures."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import openai
import pytest

from examples.sql_agent import prompts
from examples.sql_agent.graph import build_graph
from examples.sql_agent.world import score
from tests.fakes.engine import FakeEngine, Fault

WRITE, CHECK, REWRITE = (
    prompts.write_prompt("", "")[0][1],
    prompts.check_prompt("", "", "")[0][1],
    prompts.rewrite_prompt("", "", "", "", "")[0][1],
)


def scripted(answers):
    """A model that gives each agent its answers in turn, the last one again and again; and the prompts that it saw."""
    seen = []

    def reply(request):
        agent = {WRITE: "write", CHECK: "check", REWRITE: "rewrite"}[request["messages"][0]["content"]]
        seen.append((agent, request["messages"][1]["content"]))
        given = answers[agent]
        return given.pop(0) if len(given) > 1 else given[0]

    return reply, seen


def ask(task, answers, **settings):
    reply, seen = scripted(answers)
    with FakeEngine(reply) as engine:
        graph = build_graph(engine.base_url, "none", "policy", **settings)
        state = graph.invoke({name: task[name] for name in ("question", "schema", "database")})
    return state, seen


@pytest.fixture
def task(world):
    return world.heldout[0]


def test_a_right_query_takes_two_calls(task):
    state, seen = ask(task, {"write": [task["gold_sql"]], "check": ["correct"]})
    assert [agent for agent, _ in seen] == ["write", "check"]
    assert score(task, state["sql"]) and state["turns"] == 1


def test_a_wrong_query_is_checked_rewritten_and_checked_again(task):
    answers = {"write": ["SELECT 1"], "check": ["wrong order", "correct"], "rewrite": [task["gold_sql"]]}
    state, seen = ask(task, answers)
    assert [agent for agent, _ in seen] == ["write", "check", "rewrite", "check"]
    assert score(task, state["sql"]) and state["turns"] == 2


def test_three_turns_are_the_most_and_the_last_one_is_not_checked(task):
    state, seen = ask(task, {"write": ["SELECT 1"], "check": ["wrong value"], "rewrite": ["SELECT 2", "SELECT 3"]})
    assert [agent for agent, _ in seen] == ["write", "check", "rewrite", "check", "rewrite"]
    assert state["sql"] == "SELECT 3" and state["result"] == "3" and state["turns"] == 3


def test_one_turn_only(task):
    state, seen = ask(task, {"write": ["SELECT 1"]}, max_turns=1)
    assert [agent for agent, _ in seen] == ["write"] and state["result"] == "1"


def test_each_agent_reads_what_it_needs(task):
    _, seen = ask(task, {"write": ["SELECT 7"], "check": ["wrong column", "correct"], "rewrite": ["SELECT 8"]})
    question, schema = task["question"], task["schema"]
    assert seen == [
        ("write", f"{schema}\n{question}"),
        ("check", f"{question}\nSELECT 7\n7"),
        ("rewrite", f"{schema}\n{question}\nSELECT 7\n7\nwrong column"),
        ("check", f"{question}\nSELECT 8\n8"),
    ]


def test_sql_that_does_not_run_becomes_a_result(task):
    _, seen = ask(task, {"write": ["SELEC 1"], "check": ["wrong error", "correct"], "rewrite": ["SELECT 1"]})
    assert seen[1][1].endswith('SELEC 1\nerror: near "SELEC": syntax error')


def test_prose_and_nothing_at_all_are_wrong_answers(task):
    for text in ("I do not know", ""):
        state, _ = ask(task, {"write": [text], "check": ["correct"]})
        assert not score(task, state["sql"])


def test_a_server_error_reaches_the_caller(task):
    with FakeEngine(lambda request: Fault("status", status=400)) as engine:
        graph = build_graph(engine.base_url, "none", "policy")
        with pytest.raises(openai.BadRequestError):
            graph.invoke(dict(task))


def test_async_and_streamed_runs_are_the_same_program(task):
    reply, _ = scripted({"write": [task["gold_sql"]], "check": ["correct"]})
    with FakeEngine(reply) as engine:
        graph = build_graph(engine.base_url, "none", "policy")
        assert score(task, asyncio.run(graph.ainvoke(dict(task)))["sql"])
        nodes = [name for event in graph.stream(dict(task), stream_mode="updates") for name in event]
    assert nodes == ["write_query", "execute", "check_query"]


def test_sampling_settings_reach_the_server(task):
    with FakeEngine(lambda request: "correct") as engine:
        build_graph(engine.base_url, "none", "policy", temperature=0.5, max_tokens=9).invoke(dict(task))
        body = engine.requests[0].body
    assert body["temperature"] == 0.5 and body["model"] == "policy"
    assert body.get("max_tokens", body.get("max_completion_tokens")) == 9


@pytest.mark.parametrize(
    "text, sql",
    [
        ("SELECT 1", "SELECT 1"),
        (" SELECT 1;\n", "SELECT 1"),
        ("```sql\nSELECT 1;\n```", "SELECT 1"),
        ("Here it is:\n```\nSELECT 1\n``` as asked", "SELECT 1"),
        ("```SQLite\nSELECT 1", "SELECT 1"),
        ("SELECT ';' AS x", "SELECT ';' AS x"),
        ("", ""),
    ],
)
def test_the_query_in_an_answer(text, sql):
    assert prompts.query_in(text) == sql


def test_the_graph_knows_nothing_of_training():
    code = (
        "import sys, examples.sql_agent.graph; print([n for n in sys.modules if 'agentlightning' in n or n == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
