"""The HTTP door in front of a scripted engine: shapes, tool calls, stop strings, refusals. No model runs here."""

import asyncio
import json
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from agentlightning.errors import PolicyError
from agentlightning_algorithms.policy.chat import Chat
from agentlightning_algorithms.policy.server import Server
from agentlightning_algorithms.policy.torch_job import Job
from tests.fakes.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
EOS = TOKENIZER.eos_token_id
TOOL_TEXT = 'I look.\n<tool_call>\n{"name": "search", "arguments": {"q": "Zürich"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]


class Script:
    """An engine that says what it is told to, a few tokens at a time."""

    def __init__(self) -> None:
        self.served = {"policy": None, "base": None}
        self.text = "hello Paris"
        self.failure = ""
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        job.version = 7
        asyncio.get_running_loop().create_task(self._play(job))

    async def _play(self, job: Job) -> None:
        for number, token in enumerate([*CHAT.encode(self.text), EOS]):
            if self.failure and number == 2:
                job.finish, job.error = "error", self.failure
                return job.wake()
            if job.take(token, -0.5 - number):
                break
            if job.streaming:
                job.wake()
                await asyncio.sleep(0)
        job.wake()


class Door:
    """A client of the server; `script` is what the engine says."""

    def __init__(self) -> None:
        self.script = Script()
        self.commands: list[bytes] = []
        server = Server(
            self.script,
            CHAT,
            context=200,
            eos=frozenset([EOS]),
            seed=0,
            api_key="key",
            control_key="secret",
            control={"echo": self._echo, "refuse": self._refuse},
        )
        self.app = server.app()

    def _echo(self, body: bytes) -> "Future[Any]":
        result: Future[Any] = Future()
        result.set_result(body)
        return result

    def _refuse(self, body: bytes) -> "Future[Any]":
        result: Future[Any] = Future()
        result.set_exception(PolicyError("no such folder: give another"))
        return result

    def post(self, path: str, content: Any, key: str = "Bearer key", **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
                body = content if isinstance(content, (bytes, str)) else json.dumps(content)
                return await client.post(path, content=body, headers={"authorization": key, **headers})

        return asyncio.run(send())

    def chat(self, **more: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "where?"}]
        return self.post("/v1/chat/completions", {"model": "policy", "messages": messages, **more})

    def choice(self, **more: Any) -> dict[str, Any]:
        response = self.chat(**more)
        assert response.status_code == 200, response.text
        return dict(response.json()["choices"][0])

    def chunks(self, **more: Any) -> list[dict[str, Any]]:
        lines = [line for line in self.chat(stream=True, **more).text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.fixture
def door() -> Door:
    return Door()


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(chunks))


def test_an_answer_in_vllm_s_shape(door: Door) -> None:
    answer = door.chat(return_token_ids=True, logprobs=True).json()
    ids = [*CHAT.encode("hello Paris"), EOS]
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello Paris"}
    assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
    assert [e["logprob"] for e in choice["logprobs"]["content"]] == [-0.5 - k for k in range(len(ids))]
    assert choice["logprobs"]["content"][-1]["token"] == "<|im_end|>"
    assert answer["prompt_token_ids"] == CHAT.render([{"role": "user", "content": "where?"}])
    assert answer["usage"]["completion_tokens"] == len(ids)
    assert answer["system_fingerprint"] == "agl-7"


def test_ids_and_logprobs_come_only_where_asked_for(door: Door) -> None:
    answer = door.chat().json()
    assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None
    assert door.chat().headers["x-agl-version"] == "7"


def test_a_stream_tells_every_id_once_and_the_whole_text(door: Door) -> None:
    door.script.text = "hello 🦊 Paris"
    chunks = door.chunks(return_token_ids=True, logprobs=True, stream_options={"include_usage": True})
    ids = [*CHAT.encode("hello 🦊 Paris"), EOS]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len(parts) > 4, "it streams"
    assert [i for part in parts for i in part.get("token_ids") or ()] == ids
    assert len([e for part in parts for e in (part["logprobs"] or {}).get("content", ())]) == len(ids)
    assert text_of(chunks) == "hello 🦊 Paris"
    assert not any("\ufffd" in (d.get("content") or "") for d in deltas(chunks))
    assert deltas(chunks)[0] == {"role": "assistant", "content": ""}
    assert [p["finish_reason"] for p in parts if p["finish_reason"]] == ["stop"]
    assert chunks[0]["prompt_token_ids"] and not any("prompt_token_ids" in c for c in chunks[1:])
    assert chunks[-1]["usage"]["completion_tokens"] == len(ids) and chunks[-1]["choices"] == []


def test_tool_calls(door: Door) -> None:
    door.script.text = TOOL_TEXT
    choice = door.choice(tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "search", "arguments": '{"q": "Zürich"}'})


def test_b21_streamed_tool_calls_keep_all_their_ids(door: Door) -> None:
    door.script.text = TOOL_TEXT
    chunks = door.chunks(tools=TOOLS, return_token_ids=True)
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [i for part in parts for i in part.get("token_ids") or ()] == [*CHAT.encode(TOOL_TEXT), EOS]
    calls = [call for delta in deltas(chunks) for call in delta.get("tool_calls") or ()]
    assert [c["index"] for c in calls] == [0]
    assert calls[0]["function"] == {"name": "search", "arguments": '{"q": "Zürich"}'}
    assert text_of(chunks) == "I look."
    assert parts[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_the_text_is_left_alone(door: Door, more: dict[str, Any]) -> None:
    door.script.text = TOOL_TEXT
    assert door.choice(**more)["message"] == {"role": "assistant", "content": TOOL_TEXT}
    assert text_of(door.chunks(**more)) == TOOL_TEXT


@pytest.mark.parametrize("text", ["a <tool_call>{broken</tool_call>", "a <tool_ca", "a \n <tool_call> b", "no tools  "])
def test_what_looks_like_a_tool_call_but_is_none_is_content(door: Door, text: str) -> None:
    door.script.text = text
    assert door.choice(tools=TOOLS)["message"]["content"] == text
    assert text_of(door.chunks(tools=TOOLS)) == text


@pytest.mark.parametrize("stop", ["Paris", ["nowhere", "Paris"], "lo P"])
def test_a_stop_string_ends_the_text_but_not_the_ids(door: Door, stop: Any) -> None:
    choice = door.choice(stop=stop, return_token_ids=True)
    text = "hello Paris".partition(stop if isinstance(stop, str) else stop[1])[0]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert CHAT.decode(choice["token_ids"]).startswith(text) and EOS not in choice["token_ids"]
    chunks = door.chunks(stop=stop, return_token_ids=True)
    assert text_of(chunks) == text
    parts = [c for chunk in chunks for c in chunk["choices"]]
    assert [i for part in parts for i in part.get("token_ids") or ()] == choice["token_ids"]


def test_stop_token_ids_and_max_tokens(door: Door) -> None:
    ids = CHAT.encode("hello Paris")
    choice = door.choice(stop_token_ids=[ids[1]], return_token_ids=True)
    assert (choice["token_ids"], choice["finish_reason"]) == (ids[:2], "stop")
    for name in ("max_tokens", "max_completion_tokens"):
        choice = door.choice(**{name: 2}, return_token_ids=True)
        assert (choice["token_ids"], choice["finish_reason"]) == (ids[:2], "length")


def test_the_end_of_a_turn_is_ignored_on_request(door: Door) -> None:
    door.choice(ignore_eos=True, max_tokens=2)
    assert door.script.jobs[-1].stop_ids == frozenset()


def test_several_choices_get_streams_of_their_own(door: Door) -> None:
    answer = door.chat(n=3, seed=5, return_token_ids=True).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert len({job.uniforms[0] for job in door.script.jobs}) == 3
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    chunks = door.chunks(n=2)
    for index in (0, 1):
        pieces = [c["delta"].get("content") or "" for k in chunks for c in k["choices"] if c["index"] == index]
        assert "".join(pieces) == "hello Paris"


def test_requests_without_a_seed_differ_from_each_other(door: Door) -> None:
    door.chat()
    door.chat()
    door.chat(seed=9)
    door.chat(seed=9)
    first, second, third, fourth = (job.uniforms[0] for job in door.script.jobs)
    assert first != second and third == fourth


def test_plain_completions(door: Door) -> None:
    ids = CHAT.encode("once upon")
    for prompt in ("once upon", ids):
        answer = door.post(
            "/v1/completions", {"model": "base", "prompt": prompt, "return_token_ids": True, "logprobs": 1}
        ).json()
        assert answer["object"] == "text_completion" and answer["prompt_token_ids"] == ids
        assert answer["choices"][0]["text"] == "hello Paris"
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(answer["choices"][0]["token_ids"])
    refused = door.post("/v1/completions", {"model": "base", "prompt": [["two"], ["prompts"]]})
    assert refused.status_code == 400 and "prompt must be" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "from 0"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n is 0"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
    ],
)
def test_b83_what_cannot_be_honoured_is_refused(door: Door, more: dict[str, Any], words: str) -> None:
    response = door.chat(**more)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not door.script.jobs


def test_neutral_values_of_unsupported_parameters_are_accepted(door: Door) -> None:
    door.choice(presence_penalty=0, frequency_penalty=0.0, logit_bias={}, top_logprobs=0, user="me", store=False)


def test_the_context_limit_in_openai_s_words(door: Door) -> None:
    for more in ({"messages": [{"role": "user", "content": "x" * 900}]}, {"max_tokens": 190}):
        error = door.chat(**more).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 200 tokens" in error["message"]
    door.chat()
    prompt = CHAT.render([{"role": "user", "content": "where?"}])
    assert door.script.jobs[-1].max_tokens == 200 - len(prompt), "without a limit, what the context leaves"


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_are_counted_as_vllm_does(door: Door, tools: Any) -> None:
    messages = [{"role": "user", "content": "where?"}]
    body = {"messages": messages} | ({"tools": tools} if tools else {})
    told = door.post("/tokenize", body).json()
    assert told == {"count": len(CHAT.render(messages, tools)), "max_model_len": 200}
    assert door.post("/tokenize", {"prompt": "hello"}).json()["count"] == len(CHAT.encode("hello"))
    assert [door.post("/tokenize", wrong).status_code for wrong in ("{", "[]", "{}")] == [400, 400, 400]
    assert door.post("/tokenize", body, key="Bearer wrong").status_code == 401


def test_other_refusals(door: Door) -> None:
    assert door.chat(model="gpt-4").status_code == 404
    assert "served: policy, base" in door.chat(model=None).json()["error"]["message"]
    for content in ("{broken", "[]"):
        assert door.post("/v1/chat/completions", content).status_code == 400
    assert door.post("/v1/chat/completions", {}, key="Bearer wrong").status_code == 401


def test_a_failing_engine_is_an_error_500_also_in_the_middle_of_a_stream(door: Door) -> None:
    door.script.failure = "MemoryError: no room"
    response = door.chat()
    assert response.status_code == 500 and "no room" in response.json()["error"]["message"]
    streamed = door.chat(stream=True).text
    assert "no room" in streamed and "[DONE]" not in streamed


def test_unenforced_wishes_are_told(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    door.choice(response_format={"type": "json_object"}, tools=TOOLS, tool_choice="required")
    assert ["response_format" in caplog.text, "tool_choice" in caplog.text] == [True, True]


def test_b35_a_lone_surrogate_in_a_tool_s_output_is_served(door: Door) -> None:
    body = '{"model": "policy", "messages": [{"role": "tool", "content": "bad \\ud83d char"}]}'
    assert door.post("/v1/chat/completions", body).status_code == 200


def test_control_paths_want_their_own_key(door: Door) -> None:
    assert door.post("/control/echo", b"x").status_code == 401
    assert door.post("/control/echo", b"x", **{"x-agl-key": "key"}).status_code == 401
    assert door.post("/control/echo", b"x", **{"x-agl-key": "secret"}).content == b"x"
    refused = door.post("/control/refuse", b"", **{"x-agl-key": "secret"})
    assert (refused.status_code, refused.text) == (409, "no such folder: give another")
    assert door.post("/control/dance", b"", **{"x-agl-key": "secret"}).status_code == 404
