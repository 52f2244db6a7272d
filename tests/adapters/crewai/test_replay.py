"""Recorded runs of CrewAI programs, played again.

One recording cannot be: `test_manager_agent_delegating_to_assigned_task_agent` is of a release of 2024, which asked again
where an answer held both an action and a final answer. The releases that we promise take such a final answer and are done:
the recorded calls 4 to 8 are never made. Its prompts, with the tools and their results in one text, are not made either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.schema import SpanKind
from tests.adapters import replay
from tests.adapters.world import World

pytest.importorskip("crewai", reason="the crewai extra is not installed")

from crewai import Agent, Crew, Process, Task
from crewai.tools import tool

from tests.adapters.crewai.programs import serving

BOILERPLATE = (
    r"\n\n(This is VERY important to you, your job depends on it!|Provide your complete response:)"
    r"|\nyou MUST return the actual complete content as the final answer, not a summary\."
    r"|^Analyze the tool result\..*"
)
"""What CrewAI adds to every task, in words that change between releases."""


@contextmanager
def played(recording: replay.Recording, folder: Path) -> Iterator[World]:
    with replay.play(recording, folder, BOILERPLATE) as world, agl.install("crewai"):
        yield world


def test_a_manager_whose_coworker_has_a_tool_that_fails(recorded, tmp_path):
    @tool
    def scoring_examples() -> str:
        """Useful examples for scoring titles."""
        raise RuntimeError("Error")

    def program(world: World) -> None:
        with serving(world, model="gpt-4-0125-preview") as big, serving(world, model="gpt-4.1-mini") as small:
            scorer = Agent(
                role="Scorer",
                goal="Score the title",
                backstory="You're an expert scorer, specialized in scoring titles.",
                tools=[scoring_examples],
                llm=small,
            )
            task = Task(
                description="Give me an integer score between 1-5 for the following title: 'The impact of AI in the"
                " future of work', check examples to based your evaluation.",
                expected_output="The score of the title.",
            )
            Crew(agents=[scorer], tasks=[task], manager_llm=big, process=Process.hierarchical).kickoff()

    manager, scorer = "Crew Manager", "Crew Manager/Scorer"
    delegate = "delegate_work_to_coworker"
    with played(recorded("crewai--crewAI--test_increment_tool_errors"), tmp_path) as world:
        with world.attempt() as scope:
            program(world)
        tools = {delegate: manager, "scoring_examples": scorer}
        replay.prove(world, scope, [manager, scorer, scorer, manager], tools=tools, failed=["scoring_examples"])
        edges = [(span.attributes.get("agl.handoff.from"), span.path) for span in world.spans(scope, SpanKind.AGENT)]
        assert edges == [(None, manager), (manager, scorer)]


QUESTIONS = [
    (
        "What is the population of Tokyo and how many people would that be per square kilometer if Tokyo's area is 2,194"
        " square kilometers?"
    ),
    "What are the effects of climate change on coral reefs?",
]


@pytest.mark.parametrize("number", [0, 1])
def test_an_agent_on_its_own(recorded, tmp_path, number):
    recording = recorded("crewai--crewAI--test_lite_agent_with_tools", number, 2)
    told = recording.results("search_web")

    @tool
    def search_web(query: str) -> str:
        """Search the web for information about a topic."""
        return next(told)

    with played(recording, tmp_path) as world:
        with world.attempt() as scope, serving(world, model="gpt-4o-mini") as model:
            agent = Agent(
                role="Research Assistant",
                goal="Find information about the population of Tokyo",
                backstory="You are a helpful research assistant who can search for information about the population of"
                " Tokyo.",
                llm=model,
                tools=[search_web],
            )
            agent.kickoff(QUESTIONS[number])
        replay.prove(world, scope, ["Research Assistant"] * 2, tools={"search_web": "Research Assistant"})


def test_a_crew_of_two(recorded, tmp_path):
    recording = recorded("crewai--openinference--test_crewai_instrumentation")
    told = recording.results("scrape_website")
    ((_, used),) = recording.tools_used
    page = used["url"]

    @tool
    def scrape_website(url: str) -> str:
        """Scrape text content from a website URL"""
        return next(told)

    def agent(role: str, goal: str, backstory: str, model: Any, *tools: Any) -> Agent:
        return Agent(role=role, goal=goal, backstory=backstory, llm=model, tools=list(tools))

    with played(recording, tmp_path) as world:
        with world.attempt() as scope, serving(world, model="gpt-4.1-nano", temperature=0) as model:
            words = ("Scrape content from URL", "You extract text from websites")
            scraper = agent("Website Scraper", *words, model, scrape_website)
            analyzer = agent("Content Analyzer", "Extract quotes from text", "You extract quotes from text", model)
            scrape = Task(
                description=f"Call the scrape_website tool to fetch text from {page} and return the result.",
                expected_output="Text content from the website.",
                agent=scraper,
            )
            quote = Task(
                description="Extract the first quote from the content.",
                expected_output="Quote with author.",
                agent=analyzer,
                context=[scrape],
            )
            Crew(agents=[scraper, analyzer], tasks=[scrape, quote]).kickoff()
        paths = ["Website Scraper", "Website Scraper", "Content Analyzer"]
        replay.prove(world, scope, paths, tools={"scrape_website": "Website Scraper"})
