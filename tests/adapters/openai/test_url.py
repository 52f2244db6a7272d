"""Any language, through the URL alone: attempt and agent are in it, and nothing of ours is in the program.

Each program is a process or thread that knows a base URL, as `policy.base_url` and `policy.agent("writer").base_url` give it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentlightning.program import PolicyHandle
from agentlightning.rehearsal import rehearse
from agentlightning.schema import Attempt
from agentlightning.standin import StandIn
from tests.fakes.world import World

BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]})
PATHS = ["writer", "team/作家 50%"]

CHILD = """
import json, sys, urllib.request
for url in sys.argv[2:]:
    request = urllib.request.Request(f"{url}/chat/completions", sys.argv[1].encode(), {"content-type": "application/json"})
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""

NODE = """
const [body, ...urls] = process.argv.slice(1);
for (const url of urls) {
  const answer = await fetch(`${url}/chat/completions`, {
    method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...JSON.parse(body), stream: true }),
  });
  const text = await answer.text();
  const pieces = text.split("\\n").filter((line) => line.startsWith("data: {")).map((line) => JSON.parse(line.slice(6)));
  console.log(pieces.map((piece) => piece.choices[0]?.delta?.content ?? "").join(""));
}
"""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path, "four") as world:
        yield world


def handle(world: World, attempt: Attempt) -> PolicyHandle:
    return PolicyHandle(world.base_url(attempt), f"agl-{attempt.id}", "policy", 3, "policy")


def urls(world: World, attempt: Attempt) -> list[str]:
    """One for each agent, and one that names none."""
    policy = handle(world, attempt)
    return [policy.base_url, *(policy.agent(path).base_url for path in PATHS)]


def run(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def prove(world: World, attempt: Attempt, calls: int = 1) -> None:
    """Each call is in this attempt, under its agent, with all its ids; none is left over."""
    found = world.calls(attempt)
    assert Counter(call.path for call in found) == dict.fromkeys(["agent", *PATHS], calls)
    assert all(call.defect is None and len(call.response_ids) == len("four") + 1 for call in found)
    assert world.strays() == []


def test_curl(world):
    if not (curl := shutil.which("curl")):
        pytest.skip("curl is not on this machine")
    attempt = world.attempt()
    for url in urls(world, attempt):
        said = run(curl, "-sS", "-d", BODY, "-H", "content-type: application/json", f"{url}/chat/completions")
        assert json.loads(" ".join(said))["choices"][0]["message"]["content"] == "four"
    prove(world, attempt)


def test_a_python_program_of_its_own(world):
    """`-I`: not even our environment; the standard library alone."""
    attempt = world.attempt()
    assert run(sys.executable, "-I", "-c", CHILD, BODY, *urls(world, attempt)) == ["four"] * 3
    prove(world, attempt)


def test_node_and_streaming(world):
    if not (node := shutil.which("node")):
        pytest.skip("Node.js is not on this machine")
    attempt = world.attempt()
    assert run(node, "--input-type=module", "-e", NODE, BODY, *urls(world, attempt)) == ["four"] * 3
    prove(world, attempt)


def post(url: str, **headers: str) -> Any:
    given = {"content-type": "application/json"} | headers
    with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", BODY.encode(), given)) as answer:
        return json.load(answer)


def test_b56_threads_that_share_nothing(world):
    """Two attempts at once, in one pool, by a client that no one wraps: each call goes where its URL says."""
    attempts = [world.attempt(), world.attempt()]
    wanted = [url for _ in range(8) for attempt in attempts for url in urls(world, attempt)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(post, wanted))
    for attempt in attempts:
        prove(world, attempt, calls=8)


def test_b8_the_key_alone_says_the_attempt(world):
    """A program that can set a key and a fixed address, but no path."""
    attempt = world.attempt()
    post(f"{world.gateway.url}/v1", authorization=f"Bearer agl-{attempt.id}")
    (call,) = world.calls(attempt)
    assert (call.path, call.defect) == ("agent", None)


def test_b3_the_headers_alone_say_attempt_and_agent(world):
    """A program in another language that speaks W3C trace context, as OpenTelemetry's instrumentations do."""
    attempt = world.attempt()
    trace = {"traceparent": f"00-{attempt.id}-{'7' * 16}-01", "baggage": "agl.agent=team%2Fwriter,other=1"}
    post(f"{world.gateway.url}/v1", **trace)
    (call,) = world.calls(attempt)
    assert (call.path, call.span_id) == ("team/writer", "7" * 16)


def test_one_rollout_of_four_kinds_of_callers():
    """A thread pool, a child process, curl and Node.js, all at once in one rollout that the runner leads."""
    curl, node = shutil.which("curl"), shutil.which("node")
    if not (curl and node):
        pytest.skip("curl or Node.js is not on this machine")
    callers = {
        "child": (sys.executable, "-I", "-c", CHILD, BODY),
        "node": (node, "--input-type=module", "-e", NODE, BODY),
        "curl": (curl, "-sS", "--fail", "-d", BODY, "-H", "content-type: application/json"),
    }

    def program(task: Any, policy: PolicyHandle) -> float:
        with ThreadPoolExecutor(8) as pool:
            posts = [pool.submit(post, policy.agent(f"thread/{i % 2}").base_url) for i in range(8)]
            for name, command in callers.items():
                url = policy.agent(name).base_url
                posts.append(pool.submit(run, *command, f"{url}/chat/completions" if name == "curl" else url))
            return float(len([done.result() for done in posts]))

    found = rehearse(program, {}, lambda loop: loop.serve(StandIn("four")), selectors=["*"])
    assert not found.faults, found.faults
    assert Counter(call.path for call in found.calls) == {
        "thread/0": 4,
        "thread/1": 4,
        "child": 1,
        "node": 1,
        "curl": 1,
    }
    assert found.episode is not None and {call.attempt_id for call in found.calls} == {found.episode.attempt.id}
    assert all(call.defect is None and bytes(call.response_ids[:-1].tolist()) == b"four" for call in found.calls)
