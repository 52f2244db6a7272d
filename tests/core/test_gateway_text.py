"""Text completions: no template, the same record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import tokenizer
from tests.fakes.answers import logprob
from tests.fakes.engine import Fault
from tests.fakes.world import World


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon ü", tokenizer.encode("Once upon ü")])
def test_a_text_is_continued_and_recorded(tmp_path: Path, prompt: Any, stream: bool) -> None:
    with World(tmp_path, " a time 😀") as world:
        attempt = world.attempt(sampling={"temperature": 0.5})
        answer: Any = world.client(attempt).completions.create(model="policy", prompt=prompt, stream=stream)
        texts = [chunk.choices[0].text for chunk in answer if chunk.choices] if stream else [answer.choices[0].text]
        (call,) = world.calls(attempt)
    ids = [*tokenizer.encode(" a time 😀"), tokenizer.END]
    assert "".join(texts) == " a time 😀" == call.response["content"]
    assert call.prompt_ids.tolist() == tokenizer.encode("Once upon ü") and call.response_ids.tolist() == ids
    assert call.logprobs.tolist() == [logprob(token, i) for i, token in enumerate(ids)]
    assert (call.defect, call.finish_reason, call.version) == (None, "stop", 3)
    assert call.request["prompt"] == prompt and call.sampling["temperature"] == 0.5 and "prompt" not in call.sampling
    assert world.engine.requests[0].path == "/v1/completions"


def test_the_client_sees_no_field_that_it_did_not_ask_for(tmp_path: Path) -> None:
    with World(tmp_path, "x") as world:
        attempt = world.attempt()
        plain: Any = world.client(attempt).completions.create(model="policy", prompt="p")
        told: Any = world.client(attempt).completions.create(model="policy", prompt="p", logprobs=1)
    assert plain.choices[0].logprobs is None and not plain.choices[0].model_extra
    assert told.choices[0].logprobs.token_logprobs == [logprob(t, i) for i, t in enumerate([*tokenizer.encode("x"), 2])]


@pytest.mark.parametrize("prompt", [None, [], ["two", "texts"], [[1], [2]], [True], 5])
def test_one_prompt_a_call(tmp_path: Path, prompt: Any) -> None:
    with World(tmp_path) as world:
        url = f"{world.base_url(world.attempt())}/completions"
        response = world.http.post(url, json={"model": "policy", "prompt": prompt})
    assert response.status_code == 400 and "one list of token ids" in response.json()["detail"]


def test_an_engine_that_has_no_text_completions_is_heard(tmp_path: Path) -> None:
    with World(tmp_path, lambda _: Fault("status", status=404)) as world:
        attempt = world.attempt()
        with pytest.raises(openai.NotFoundError, match="scripted fault"):
            world.client(attempt).completions.create(model="policy", prompt="p")
        (call,) = world.calls(attempt)
    assert call.defect == "error_status"
