"""Record and replay: what was asked once is answered from a file that can be committed."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from agentlightning.errors import ConfigError, ReplayError
from agentlightning.replay import Recording, Replay
from tests.fakes.engine import FakeEngine, Fault


@pytest.fixture
def model() -> Iterator[FakeEngine]:
    """A model that never says the same twice."""
    numbers = itertools.count(1)
    with FakeEngine(lambda request: f"answer {next(numbers)} to {request['messages'][-1]['content']}") as engine:
        yield engine


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


def ask(replay: Replay, text: str, **more: Any) -> str:
    with openai.OpenAI(base_url=replay.base_url, api_key="secret-key", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": text}]
        return str(client.chat.completions.create(model="m", messages=messages, **more).choices[0].message.content)


def test_what_was_recorded_is_replayed_without_the_model(model: FakeEngine, file: Path) -> None:
    with Replay(file, model.base_url) as replay:
        first = [ask(replay, "a"), ask(replay, "b")]
    model.close()
    with Replay(file, mode="replay") as replay:
        assert [ask(replay, "b"), ask(replay, "a")] == first[::-1], "in any order"
        assert replay.stats == {"replayed": 2}
    assert len(model.requests) == 2


def test_a_question_that_is_asked_again_has_an_answer_of_its_own(model: FakeEngine, file: Path) -> None:
    with Replay(file, model.base_url) as replay:
        first = [ask(replay, "a") for _ in range(3)]
    assert len(set(first)) == 3
    with Replay(file, mode="replay") as replay:
        assert [ask(replay, "a") for _ in range(3)] == first
        with pytest.raises(openai.NotFoundError, match="occurrence 4 of this call .* which has 3 calls: record it"):
            ask(replay, "a")


def test_streams_are_replayed_as_streams(model: FakeEngine, file: Path) -> None:
    def streamed(replay: Replay) -> str:
        with openai.OpenAI(base_url=replay.base_url, api_key="x", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "a"}]
            chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    with Replay(file, model.base_url) as replay:
        said = streamed(replay)
    with Replay(file, mode="replay") as replay:
        assert streamed(replay) == said == "answer 1 to a"


def test_the_file_can_be_committed(model: FakeEngine, file: Path) -> None:
    """No key, one call a line, and the same calls give the same file whatever order they came in."""
    with Replay(file, model.base_url, api_key="the-real-key") as replay:
        ask(replay, "a"), ask(replay, "b", temperature=0.5)
    assert model.requests[0].headers["authorization"] == "Bearer the-real-key"
    text = file.read_text()
    assert "key-" not in text and "-key" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["request"]["messages"][0]["content"] for line in lines] in (["a", "b"], ["b", "a"])
    with Replay(file, model.base_url) as replay:
        ask(replay, "b", temperature=0.5), ask(replay, "a")
    assert file.read_text() == text


def test_auto_adds_and_record_begins_anew(model: FakeEngine, file: Path) -> None:
    with Replay(file, model.base_url) as replay:
        ask(replay, "a")
    with Replay(file, model.base_url) as replay:
        ask(replay, "a"), ask(replay, "b")
        assert replay.stats == {"replayed": 1, "recorded": 1}
    with Replay(file, model.base_url, mode="record") as replay:
        ask(replay, "c")
    assert len(Recording(file)) == 1


def test_only_good_answers_are_recorded(file: Path) -> None:
    with FakeEngine(lambda _: Fault("status", status=500)) as model, Replay(file, model.base_url) as replay:
        with pytest.raises(openai.InternalServerError, match="scripted fault"):
            ask(replay, "a")
        model.close()
        with pytest.raises(openai.InternalServerError, match="502.*Connect"):
            ask(replay, "a")
        assert replay.stats == {"failed": 2}
    assert not file.exists()


def test_a_recording_that_was_cut_by_a_kill_goes_on(model: FakeEngine, file: Path) -> None:
    with Replay(file, model.base_url) as replay:
        first = [ask(replay, text) for text in "ab"]
    file.write_text(file.read_text()[:-20])
    with Replay(file, model.base_url) as replay:
        again = [ask(replay, text) for text in "ab"]
        assert replay.stats == {"replayed": 1, "recorded": 1}
    assert sum(a == b for a, b in zip(first, again, strict=True)) == 1
    file.write_text("no call\n" + file.read_text())
    with pytest.raises(ReplayError, match="line 1 is no recorded call"):
        Recording(file)


def test_threads_get_each_occurrence_once(file: Path) -> None:
    recording = Recording(file)
    for number in range(16):
        call, _ = recording.ask("chat/completions", {"messages": []})
        call.answer = number
        recording.add(call)
    recording.close()
    again, got = Recording(file, "replay"), []
    threads = [
        threading.Thread(target=lambda: got.append(again.ask("chat/completions", {"messages": []})[0].answer))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(16))


def test_the_order_of_keys_and_the_name_of_the_user_say_nothing(file: Path) -> None:
    recording = Recording(file)
    call, _ = recording.ask("p", {"model": "m", "temperature": 1, "user": "ann"})
    call.answer = "x"
    recording.add(call)
    found, known = Recording(file).ask("p", {"temperature": 1, "model": "m", "metadata": {"run": 2}})
    assert known and found.answer == "x"
    assert not Recording(file).ask("p", {"temperature": 2, "model": "m"})[1]


def test_what_cannot_work_is_refused_with_the_cure(file: Path) -> None:
    with pytest.raises(ConfigError, match="record, replay, auto"):
        Recording(file, "off")
    with pytest.raises(ReplayError, match="make it with mode='auto'"):
        Recording(file, "replay")
    with pytest.raises(ConfigError, match="needs an upstream"):
        Replay(file, mode="record")
    file.touch()
    with pytest.raises(ReplayError, match="only replayed"):
        Recording(file, "replay").add(Recording(file, "replay").ask("p", 1)[0])
