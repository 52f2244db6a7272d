"""The suite that every policy back end passes. To test yours, subclass and say how it is made:

    class TestMine(PolicyContract):
        @pytest.fixture(scope="class")
        @classmethod
        def make(cls):
            return lambda **settings: MyPolicy(PolicySettings(model=..., **settings))

`make` is called with `selectors`, and sometimes `lora`, `learning_rate`, `seed`, `options`. The model needs a chat
template and a context of at least 200 tokens; a random one will do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest

from agentlightning.errors import ConfigError, PolicyError
from agentlightning.schema import Endpoint, Route, floats, ids
from agentlightning_algorithms.policy.base import Policy, Row, Update

Make = Callable[..., Policy]
TOLERANCE = 1e-4
"""How far the learner's log-probabilities may be from those that the engine reported."""


class Client:
    """What a program, through the gateway, asks of an endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        headers = {"authorization": f"Bearer {endpoint.api_key}"}
        self.http = httpx.Client(base_url=endpoint.base_url, headers=headers, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def model(self, agent: str) -> str:
        routes = [r for r in self.endpoint.routes if r.selector in (agent, "*")]
        return routes[0].model

    def body(self, agent: str, text: str, **more: Any) -> dict[str, Any]:
        asked = {"return_token_ids": True, "logprobs": True, "max_tokens": 12, "seed": 1}
        messages = [{"role": "user", "content": text}]
        return {"model": self.model(agent), "messages": messages, **asked, **more}

    def post(self, agent: str, text: str = "hello", **more: Any) -> httpx.Response:
        return self.http.post("/chat/completions", json=self.body(agent, text, **more))

    def ask(self, agent: str, text: str = "hello", **more: Any) -> dict[str, Any]:
        response = self.post(agent, text, **more)
        assert response.status_code == 200, response.text
        return {**response.json(), "x-agl-version": response.headers.get("x-agl-version")}

    def stream(self, agent: str, text: str = "hello", **more: Any) -> list[dict[str, Any]]:
        body = self.body(agent, text, stream=True, **more)
        with self.http.stream("POST", "/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


def tokens_of(answer: dict[str, Any], choice: int = 0) -> list[int]:
    return list(answer["choices"][choice]["token_ids"])


def row_of(answer: dict[str, Any], selector: str, advantage: float = 1.0, temperature: float = 1.0) -> Row:
    """A call as a row: its own sampled tokens, each with the weight 1 / length."""
    prompt, out = answer["prompt_token_ids"], tokens_of(answer)
    logps = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    before = [0.0] * len(prompt)
    return Row(
        selector=selector,
        ids=ids(prompt + out),
        logprobs=floats(before + logps),
        advantages=floats([advantage] * (len(prompt) + len(out))),
        weights=floats(before + [1 / len(out)] * len(out)),
        temperature=temperature,
    )


def response_part(row: Row, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values[row.weights != 0]


class PolicyContract:
    """See the module."""

    @pytest.fixture(scope="class")
    @classmethod
    def make(cls) -> Make:
        raise NotImplementedError("say how your policy is made")

    @pytest.fixture(scope="class")
    @classmethod
    def policy(cls, make: Make) -> Iterator[Policy]:
        made = make(selectors=("writer", "team/*"), learning_rate=1e-2)
        made.endpoint = made.start()  # type: ignore[attr-defined]
        yield made
        made.close()

    @pytest.fixture
    def client(self, policy: Policy) -> Iterator[Client]:
        with Client(policy.endpoint) as made:  # type: ignore[attr-defined]
            yield made

    # ---- serving

    def test_the_endpoint_routes_selected_agents_to_trained_models_and_the_rest_to_a_frozen_one(
        self, client: Client
    ) -> None:
        routes = client.endpoint.routes
        assert client.endpoint.base_url.endswith("/v1") and client.endpoint.context >= 200
        assert [(r.selector, r.trained) for r in routes if r.trained] == [("writer", True), ("team/*", True)]
        assert routes[-1] == Route("*", routes[-1].model, False)
        assert routes[-1].model not in {r.model for r in routes[:-1]}
        served = {m["id"] for m in client.http.get("/models").json()["data"]}
        assert {r.model for r in routes} <= served

    def test_answers_carry_ids_logprobs_and_the_version(self, policy: Policy, client: Client) -> None:
        answer = client.ask("writer")
        choice = answer["choices"][0]
        assert answer["prompt_token_ids"] and choice["token_ids"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert usage["completion_tokens"] == len(choice["token_ids"])
        assert choice["finish_reason"] in ("stop", "length")
        stamps = {answer["x-agl-version"], (answer.get("system_fingerprint") or "").removeprefix("agl-") or None}
        assert stamps - {None} == {str(policy.version)}

    def test_a_stream_carries_the_same_as_the_whole(self, client: Client) -> None:
        whole, chunks = client.ask("writer"), client.stream("writer")
        parts = [c for chunk in chunks for c in chunk["choices"]]
        assert [i for part in parts for i in part.get("token_ids") or ()] == tokens_of(whole)
        assert "".join(p["delta"].get("content") or "" for p in parts) == whole["choices"][0]["message"]["content"]
        assert [c["prompt_token_ids"] for c in chunks if c.get("prompt_token_ids")] == [whole["prompt_token_ids"]]
        told = [entry["logprob"] for part in parts for entry in (part.get("logprobs") or {}).get("content") or ()]
        wanted = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
        assert told == pytest.approx(wanted, abs=TOLERANCE)
        assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [whole["choices"][0]["finish_reason"]]

    def test_a_seed_repeats_an_answer_and_another_seed_does_not(self, client: Client) -> None:
        answers = [tokens_of(client.ask("writer", seed=seed)) for seed in (5, 5, 6)]
        assert answers[0] == answers[1] != answers[2]
        greedy = [tokens_of(client.ask("writer", seed=seed, temperature=0)) for seed in (5, 6)]
        assert greedy[0] == greedy[1]

    def test_choices_of_one_request_differ(self, client: Client) -> None:
        answer = client.ask("writer", n=4)
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert len({tuple(tokens_of(answer, k)) for k in range(4)}) > 1

    def test_a_prompt_that_is_too_long_is_refused_in_openai_s_words(self, client: Client) -> None:
        response = client.post("writer", "word " * client.endpoint.context)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded" or "context" in response.text

    def test_an_unknown_model_is_refused(self, client: Client) -> None:
        assert client.post("writer", model="nobody").status_code in (400, 404)

    # ---- learning

    @pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
    def test_the_learner_sees_the_numbers_that_the_engine_reported(
        self, policy: Policy, client: Client, temperature: float
    ) -> None:
        row = row_of(client.ask("writer", temperature=temperature), "writer", temperature=temperature)
        [values] = policy.logprobs([row])
        assert values.shape == row.ids.shape and values[0] == 0
        assert response_part(row, values) == pytest.approx(response_part(row, row.logprobs), abs=TOLERANCE)

    def test_an_update_makes_rewarded_tokens_likelier_and_serves_them_as_the_next_version(
        self, policy: Policy, client: Client
    ) -> None:
        version = policy.version
        good, bad = (
            row_of(client.ask("writer", seed=1), "writer", 1.0),
            row_of(client.ask("writer", seed=2), "writer", -1.0),
        )
        before = policy.logprobs([good, bad])
        metrics = policy.update(Update([good, bad]))
        after = policy.logprobs([good, bad])
        change = [float(response_part(r, a - b).sum()) for r, a, b in zip((good, bad), after, before, strict=True)]
        assert change[0] > change[1] and change[0] > 0
        assert policy.version == version + 1
        served = row_of(client.ask("writer", seed=1), "writer")
        assert client.ask("writer")["x-agl-version"] in (None, str(version + 1))
        assert response_part(served, policy.logprobs([served])[0]) == pytest.approx(
            response_part(served, served.logprobs), abs=TOLERANCE
        ), "what is served is what was learned"
        assert metrics["tokens"] == np.count_nonzero(good.weights) + np.count_nonzero(bad.weights)
        assert metrics["logprob_error"] < TOLERANCE
        assert metrics["grad_norm"] > 0 and metrics["kl"] >= 0 and metrics["seconds"] > 0
        assert 0 <= metrics["clip_fraction"] <= 1

    def test_agents_that_are_not_selected_never_change(self, policy: Policy, client: Client) -> None:
        before = client.ask("stranger", seed=3)
        policy.update(Update([row_of(client.ask("writer"), "writer")]))
        after = client.ask("stranger", seed=3)
        assert tokens_of(before) == tokens_of(after)
        assert row_of(before, "x").logprobs == pytest.approx(row_of(after, "x").logprobs, abs=TOLERANCE)

    def test_supervised_learning_raises_the_likelihood(self, policy: Policy, client: Client) -> None:
        row = row_of(client.ask("writer", seed=8), "writer")
        before = policy.logprobs([row])[0].sum()
        policy.update(Update([row], loss="likelihood", epochs=3))
        assert policy.logprobs([row])[0].sum() > before

    def test_several_epochs_clip(self, policy: Policy, client: Client) -> None:
        rows = [row_of(client.ask("writer", seed=s), "writer", a) for s, a in ((1, 1.0), (2, -1.0))]
        metrics = policy.update(Update(rows, epochs=6, clip=(0.01, 0.01)))
        assert metrics["clip_fraction"] > 0

    def test_a_kl_term_holds_the_policy_near_its_beginning(self, make: Make) -> None:
        moved = []
        for kl in (0.0, 50.0):
            policy = make(selectors=("writer",), learning_rate=5e-3)
            with closing(policy), Client(policy.start()) as client:
                row = row_of(client.ask("writer"), "writer")
                first = policy.logprobs([row])[0]
                for _ in range(6):
                    policy.update(Update([row], kl=kl))
                moved.append(abs(float((policy.logprobs([row])[0] - first).sum())))
        assert moved[1] < moved[0] / 2

    @pytest.mark.parametrize("field", ["advantages", "weights", "logprobs"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_number_that_is_none_is_refused_and_nothing_changes(
        self, policy: Policy, client: Client, field: str, value: float
    ) -> None:
        row = row_of(client.ask("writer"), "writer")
        version, before = policy.version, policy.logprobs([row])[0]
        broken = row_of(client.ask("writer"), "writer")
        getattr(broken, field)[-1] = value
        with pytest.raises(PolicyError, match=field):
            policy.update(Update([row, broken]))
        assert policy.version == version
        assert policy.logprobs([row])[0] == pytest.approx(before, abs=1e-6)

    def test_bad_rows_are_refused(self, policy: Policy, client: Client) -> None:
        row = row_of(client.ask("writer"), "writer")
        stranger = row_of(client.ask("stranger"), "stranger")
        short = Row("writer", row.ids, row.logprobs[:-1], row.advantages, row.weights)
        outside = Row("writer", ids([1, 10**6]), floats([0, 0]), floats([1, 1]), floats([0, 1]))
        idle = Row("writer", row.ids, row.logprobs, row.advantages, row.weights * 0)
        for bad, words in ((stranger, "stranger"), (short, "length"), (outside, "vocabulary"), (idle, "weight")):
            with pytest.raises(PolicyError, match=words):
                policy.update(Update([bad]))
        with pytest.raises(PolicyError, match="nothing"):
            policy.update(Update([]))

    # ---- saving and ending

    def test_a_saved_policy_is_taken_up_again(self, make: Make, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"selectors": ("writer",), "learning_rate": 1e-2}
        policy, twin = make(**settings), make(**settings)
        with closing(policy), closing(twin), Client(policy.start()) as client, Client(twin.start()) as other:
            row = row_of(client.ask("writer"), "writer")
            for _ in range(2):
                policy.update(Update([row]))
            policy.save(tmp_path / "saved")
            assert [p.name for p in tmp_path.iterdir()] == ["saved"], "nothing half-written lies about"
            stranger = tokens_of(other.ask("stranger"))
            twin.load(tmp_path / "saved")
            assert twin.version == policy.version == 2
            assert other.ask("writer")["x-agl-version"] in (None, "2")
            assert tokens_of(other.ask("stranger")) == stranger, "others still see the initial weights"
            for one in (policy, twin):  # the optimiser's state is taken up too: the next step is the same
                one.update(Update([row]))
            assert twin.logprobs([row])[0] == pytest.approx(policy.logprobs([row])[0], abs=1e-5)

    def test_saving_again_replaces_what_was_there(self, policy: Policy, tmp_path: Path) -> None:
        policy.save(tmp_path / "saved")
        policy.save(tmp_path / "saved")
        assert [p.name for p in tmp_path.iterdir()] == ["saved"]

    def test_a_folder_that_is_no_checkpoint_is_refused(self, policy: Policy, tmp_path: Path) -> None:
        with pytest.raises(PolicyError, match="not a saved policy"):
            policy.load(tmp_path)

    def test_a_policy_that_is_not_running_says_so(self, make: Make) -> None:
        policy = make(selectors=("writer",))
        with pytest.raises(PolicyError, match=r"start\(\)"):
            policy.logprobs([])
        policy.close()
        policy.close()

    def test_unknown_options_are_refused(self, make: Make) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            make(selectors=("writer",), options={"no_such_option": 1})
