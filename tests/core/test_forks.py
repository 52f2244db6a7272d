"""Which turns are one sequence to learn from, and why the others are not: every fork has a place and a cause."""

import itertools
import random

import numpy as np
import pytest

from agentlightning.forks import CAUSES, HARMLESS, forks
from agentlightning.schema import Completion, Transition, floats, ids
from agentlightning.trajectory import lineages
from tests.fakes.tokenizer import END, decode, encode, message_text, render

USER, SYSTEM = {"role": "user", "content": "how many?"}, {"role": "system", "content": "be brief"}
MORE = {"role": "user", "content": "and now?"}
TOOL = {"id": "t", "type": "function", "function": {"name": "count", "arguments": '{"table": "a"}'}}


def asked(messages, answer, *, response=None, prompt=None, seq=0, temperature=1.0, **request):
    """One call: its prompt as the template of the toy tokenizer renders it, its answer as it was sampled."""
    sampled = [*encode(message_text(answer)), END] if response is None else response
    completion = Completion(
        id=f"call-{seq}",
        attempt_id="a",
        path="writer",
        span_id=None,
        model="m",
        policy="policy",
        version=0,
        prompt_ids=ids(render(messages) if prompt is None else prompt),
        response_ids=ids(sampled),
        logprobs=floats([-1.0] * len(sampled)),
        finish_reason="stop",
        request={"messages": messages, **request},
        response={"role": "assistant", **answer},
        sampling={"temperature": temperature},
        seq=seq,
    )
    return Transition(completion, "writer", 0.0)


def said(content=None, **more):
    return {"role": "assistant", "content": content, **more}


def fork_of(first, second):
    """The one fork of two calls; their places are the place in the list."""
    first.completion.seq, second.completion.seq = 1, 2
    first.completion.id, second.completion.id = "first", "second"
    (fork,) = forks(lineages([first, second]))
    assert (fork.call, fork.after) == ("second", "first")
    return fork


def test_turns_that_continue_each_other_are_one_sequence_and_no_fork():
    calls = [asked([USER], said("two")), asked([USER, said("two"), MORE], said("three"))]
    (chain,) = lineages(calls)
    assert len(chain) == 2 and forks([chain]) == []


THOUGHT = said("two", reasoning_content="one and one")

CASES = {
    "asked_again": (asked([USER], said("two")), asked([USER], said("three"))),
    "other_conversation": (asked([SYSTEM, USER], said("two")), asked([SYSTEM, MORE], said("three"))),
    "sampled_otherwise": (
        asked([USER], said("two"), temperature=0.5),
        asked([USER, said("two"), MORE], said("three")),
    ),
    "tools_changed": (
        asked([USER], said("two"), tools=[TOOL], prompt=[9, *render([USER])]),
        asked([USER, said("two"), MORE], said("three")),
    ),
    "history_cut": (
        asked([SYSTEM, USER, said("two"), MORE], said("three")),
        asked([SYSTEM, USER, MORE], said("three")),
    ),
    "history_edited": (
        asked([USER, MORE], said("two")),
        asked([USER, {**MORE, "content": "and today?"}, said("two"), MORE], said("three")),
    ),
    "answer_edited": (asked([USER], said("two")), asked([USER, said("2"), MORE], said("three"))),
    "reasoning_dropped": (asked([USER], THOUGHT), asked([USER, said("two"), MORE], said("three"))),
    "tool_call_rendered": (
        asked([USER], said(tool_calls=[TOOL]), response=[*encode('<tool_call>{"name":"count"}</tool_call>'), END]),
        asked([USER, said(tool_calls=[TOOL]), MORE], said("three")),
    ),
    "template": (
        asked([USER], said(" two ")),
        asked([USER, said(" two "), MORE], said("three"), prompt=render([USER, said("two"), MORE])),
    ),
    "retokenised": (
        asked([USER], said("two"), response=[300, END]),  # one id for a text that the template spells in three
        asked([USER, said("two"), MORE], said("three")),
    ),
}


@pytest.mark.parametrize("cause", list(CASES))
def test_each_cause_is_told_from_the_others(cause):
    first, second = CASES[cause]
    fork = fork_of(first, second)
    assert fork.cause == cause
    before = np.concatenate([first.completion.prompt_ids, first.completion.response_ids])
    prompt, place = second.completion.prompt_ids, fork.position
    assert np.array_equal(prompt[:place], before[:place])
    assert place == min(len(prompt), len(before)) or prompt[place] != before[place]
    assert CAUSES[cause][0] in str(fork)


def test_every_cause_is_provoked_here():
    assert {*CASES, "branched"} == set(CAUSES)


def test_two_that_continue_one_call_are_a_branch():
    """As a search over answers makes them: the first goes on in the row, the second begins its own."""
    calls = [asked([USER], said("two"), seq=1)]
    for seq, text in ((2, "and now?"), (3, "why?")):
        calls.append(asked([USER, said("two"), {"role": "user", "content": text}], said("three"), seq=seq))
    (fork,) = forks(lineages(calls))
    assert (fork.call, fork.after, fork.cause) == ("call-3", "call-1", "branched")
    assert fork.position == len(calls[0].completion.prompt_ids) + len(calls[0].completion.response_ids)


def test_of_an_answer_that_was_lost_and_asked_for_again_the_one_in_the_history_is_continued():
    """The fork of the third call is measured at the second, whose answer it repeats, not at the first of the same prompt."""
    calls = [asked([USER], said(text, reasoning_content="hm"), seq=seq) for seq, text in ((1, "one"), (2, "two"))]
    calls.append(asked([USER, said("two"), MORE], said("three"), seq=3))
    found = forks(lineages(calls))
    assert [(f.call, f.after, f.cause) for f in found] == [
        ("call-2", "call-1", "asked_again"),
        ("call-3", "call-2", "reasoning_dropped"),
    ]


def test_b24_a_template_that_drops_reasoning_gives_three_sequences_of_three_turns():
    """Three turns of a thinking model, whose template shows the reasoning of no earlier turn."""
    history, calls = [USER], []
    for turn in ("one", "two", "three"):
        answer = said(turn, reasoning_content=f"I think {turn}")
        shown = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in history]
        calls.append(asked(list(history), answer, prompt=render(shown), seq=len(calls) + 1))
        history += [answer, MORE]
    chains = lineages(calls)
    assert len(chains) == 3
    assert [fork.cause for fork in forks(chains)] == ["reasoning_dropped", "reasoning_dropped"]
    assert not {"reasoning_dropped"} & HARMLESS


def test_b52_interleaved_sub_agents_are_merged_by_lineage_not_by_time():
    one, other = {"role": "user", "content": "task A"}, {"role": "user", "content": "task B"}
    calls = [
        asked([one], said("a"), seq=1),
        asked([other], said("b"), seq=2),
        asked([one, said("a"), MORE], said("aa"), seq=3),
        asked([other, said("b"), MORE], said("bb"), seq=4),
    ]
    chains = lineages(calls)
    assert [[t.completion.seq for t in chain] for chain in chains] == [[1, 3], [2, 4]]
    assert [fork.cause for fork in forks(chains)] == ["other_conversation"]


# Sessions that nobody wrote: conversations of several sub-agents, over templates and programs with and without faults.

WORDS = ("ja", "né", "🙂", "two", "SELECT 1", "<b>", " ")
SESSIONS = 2000
KINDS = {
    "plain": set(),
    "strips_reasoning": {"reasoning_dropped"},
    "trims": {"template", "reasoning_dropped"},
    "two_tokenizations": {"retokenised", "reasoning_dropped", "template"},
    "edits": {"history_edited", "answer_edited", "branched"},
    "cuts": {"history_cut", "history_edited", "branched"},
    "drops_thought": {"reasoning_dropped"},
}
"""Fault -> what it may be taken for; asking again is none. Where a thought or outer spaces were
sampled, no more can be told from messages."""


AGAIN = {"asked_again", "answer_edited"}
"""Where an answer was lost: the history holds the one that was given when the program asked again."""


def text(chance):
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 4)))


def shown(history, kind, chance):
    """What the program sends for a history, and what the template makes of it."""
    sent = [dict(message) for message in history]
    answers = [message for message in sent if message["role"] == "assistant"]
    if kind == "edits" and answers:
        chance.choice(answers)["content"] += " (edited)"
    if kind == "cuts" and len(sent) > 2:
        del sent[1]
    if kind == "drops_thought":
        for message in answers:
            message.pop("reasoning_content", None)
    rendered = [dict(message) for message in sent]
    for message in (m for m in rendered if m["role"] == "assistant"):
        if kind == "strips_reasoning":
            message.pop("reasoning_content", None)
        if kind == "trims":
            message["content"] = message["content"].strip()
    return sent, render(rendered)


def session(seed):
    """The calls of one agent in one rollout: up to three conversations, interleaved, each with its own fault or none."""
    chance = random.Random(seed)
    talks = [(chance.choice(list(KINDS)), [{"role": "user", "content": f"task {i} {text(chance)}"}]) for i in range(3)]
    calls = []
    for number in range(chance.randint(2, 9)):
        kind, history = chance.choice(talks)
        sent, prompt = shown(history, kind, chance)
        answer = said(text(chance) or "-")
        if kind in ("strips_reasoning", "drops_thought") or chance.random() < 0.2:
            answer["reasoning_content"] = text(chance)
        sampled = [*encode(message_text(answer)), END]
        if kind == "two_tokenizations" and chance.random() < 0.5:
            sampled = [301, *sampled[1:]]  # another id for the same first byte
        calls.append(asked(sent, answer, prompt=prompt, response=sampled, seq=number + 1, user=kind))
        if chance.random() < 0.9:  # else the program asks again, as after a lost answer
            history += [answer, {"role": "user", "content": text(chance)}]
    return calls


def test_sessions_are_merged_wherever_they_can_be_and_every_fork_is_explained():
    merged = torn = 0
    for seed in range(SESSIONS):
        calls = session(seed)
        chains = lineages(calls)
        assert sorted(t.completion.id for chain in chains for t in chain) == sorted(t.completion.id for t in calls)
        for chain in chains:
            for before, after in itertools.pairwise(chain):
                whole = [*before.completion.prompt_ids, *before.completion.response_ids]
                assert list(after.completion.prompt_ids[: len(whole)]) == whole, seed
        found = forks(chains)
        assert len(found) == len(chains) - 1, seed
        for fork in found:
            head, before = ({t.completion.id: t.completion for t in calls}[name] for name in (fork.call, fork.after))
            _cannot_continue(head, chains, seed)
            kind = head.request["user"]
            expected = KINDS[kind] | AGAIN if before.request["user"] == kind else set()
            assert fork.cause in expected | {"other_conversation"}, (seed, kind, fork)
        merged += len(calls) - len(chains)
        torn += len(found)
    assert merged and torn


def _cannot_continue(head, chains, seed):
    """No earlier chain, as it was when the call came, could have been continued by it."""
    for chain in chains:
        earlier = [t.completion for t in chain if t.completion.seq < head.seq]
        if earlier:
            tail = [*earlier[-1].prompt_ids, *earlier[-1].response_ids]
            assert list(head.prompt_ids[: len(tail)]) != tail, (seed, decode(head.prompt_ids))
