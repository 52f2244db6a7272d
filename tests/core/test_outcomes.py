"""Whose fault an exception is: real exceptions of real client libraries, against a real server where that is simple."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from agentlightning import errors
from agentlightning.outcomes import classify, describe
from agentlightning.schema import Outcome
from tests.fakes.http import Exchange, Server

try:
    import httpx2 as http  # what openai >= 3 sends with
except ImportError:
    http = httpx  # type: ignore[misc]

HERE = "http://127.0.0.1:4321"
REQUEST: Any = http.Request("POST", f"{HERE}/attempts/1/v1/chat/completions")


def status(code: int, message: str = "no", /, **body: Any) -> openai.APIStatusError:
    response: Any = http.Response(code, request=REQUEST)
    kind = openai.BadRequestError if code == 400 else openai.APIStatusError
    return kind(message, response=response, body={"message": message, **body})


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("x"), Outcome.AGENT_ERROR),
        (TimeoutError(), Outcome.AGENT_ERROR),
        (asyncio.CancelledError(), Outcome.AGENT_ERROR),
        (SystemExit(1), Outcome.AGENT_ERROR),
        (ConnectionResetError(), Outcome.AGENT_ERROR),
        (errors.RewardError("nan"), Outcome.GRADER_ERROR),
        (errors.StoreError("x"), Outcome.INFRA_ERROR),
        (errors.GatewayError("x"), Outcome.INFRA_ERROR),
        (errors.PolicyError("x"), Outcome.INFRA_ERROR),
        (errors.ConfigError("x"), Outcome.AGENT_ERROR),
        (errors.PluginError("x"), Outcome.AGENT_ERROR),
        (openai.APIConnectionError(request=REQUEST), Outcome.MODEL_ERROR),
        (openai.APITimeoutError(REQUEST), Outcome.MODEL_ERROR),
        (openai.OpenAIError("no api key"), Outcome.AGENT_ERROR),
        (
            openai.LengthFinishReasonError(completion=openai.types.chat.ChatCompletion.model_construct(usage=None)),
            Outcome.TRUNCATED,
        ),
        (caused(RuntimeError("node failed"), openai.APIConnectionError(request=REQUEST)), Outcome.MODEL_ERROR),
        (ExceptionGroup("all", [status(503), status(429)]), Outcome.MODEL_ERROR),
        (ExceptionGroup("some", [status(503), ValueError("x")]), Outcome.AGENT_ERROR),
        (ExceptionGroup("in", [ExceptionGroup("out", [status(503)])]), Outcome.MODEL_ERROR),
    ],
    ids=repr,
)
def test_kinds(error: BaseException, outcome: Outcome) -> None:
    assert classify(error, HERE) is outcome


@pytest.mark.parametrize("code", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_b92_what_may_pass(code: int) -> None:
    assert classify(status(code), HERE) is Outcome.MODEL_ERROR


@pytest.mark.parametrize("code", [400, 401, 403, 404, 405, 413, 422])
def test_b92_what_will_fail_again(code: int) -> None:
    assert classify(status(code), HERE) is Outcome.AGENT_ERROR


def test_a_call_that_the_gateway_refuses_because_the_attempt_is_over() -> None:
    assert classify(status(410), HERE) is Outcome.CANCELLED


@pytest.mark.parametrize(
    "error",
    [
        status(400, "no", code="context_length_exceeded"),
        status(400, "This model's maximum context length is 8 tokens, you asked for 9"),
        status(400, "prompt is too long: 9 tokens > 8 maximum"),
        status(422, "input exceeds the context window"),
    ],
)
def test_a_full_context_is_a_truncation(error: BaseException) -> None:
    assert classify(error, HERE) is Outcome.TRUNCATED


def test_errors_by_the_names_that_other_sdks_use() -> None:
    full = type("ContextWindowExceededError", (Exception,), {"__module__": "litellm.exceptions"})
    api = type("APIError", (Exception,), {"__module__": "anthropic"})
    overloaded = type("OverloadedError", (api,), {"__module__": "anthropic", "status_code": 529})
    lookalike = type("APIError", (Exception,), {"__module__": "my_app", "status_code": 529})
    assert classify(full("x")) is Outcome.TRUNCATED
    assert classify(overloaded("x")) is Outcome.MODEL_ERROR
    assert classify(lookalike("x")) is Outcome.AGENT_ERROR


def test_a_loop_of_causes_ends() -> None:
    one, two = ValueError(1), ValueError(2)
    one.__cause__, two.__cause__ = two, one
    assert classify(one) is Outcome.AGENT_ERROR


class TestPlainHttp:
    """A program without an SDK: its calls to the gateway are model calls, its calls elsewhere are its own affair."""

    @staticmethod
    def answer(code: int) -> Server:
        async def handler(exchange: Exchange) -> None:
            if code:
                exchange.send(code, b"{}")
            else:
                exchange.cut()

        server = Server(handler)
        server.start()
        return server

    @pytest.mark.parametrize("name", ["httpx", "httpx2"])
    @pytest.mark.parametrize(
        ("code", "outcome"), [(503, Outcome.MODEL_ERROR), (0, Outcome.MODEL_ERROR), (400, Outcome.AGENT_ERROR)]
    )
    def test_only_the_gateways_errors_count_as_the_models(self, name: str, code: int, outcome: Outcome) -> None:
        library = pytest.importorskip(name)
        server = self.answer(code)
        try:
            with pytest.raises(library.HTTPError) as caught:
                library.post(f"{server.url}/v1/chat/completions", json={}).raise_for_status()
            assert classify(caught.value, server.url) is outcome
            assert classify(caught.value, HERE) is Outcome.AGENT_ERROR
        finally:
            server.stop()

    def test_an_error_without_a_request(self) -> None:
        assert classify(httpx.ConnectError("no request was set"), HERE) is Outcome.AGENT_ERROR


class TestDescribe:
    def test_the_traceback_ends_in_the_error(self) -> None:
        text = describe(_raised(lambda: 1 / 0))
        assert text.startswith("Traceback") and text.endswith("ZeroDivisionError: division by zero")
        assert "1 / 0" in text

    def test_long_ones_keep_both_ends(self) -> None:
        text = describe(ValueError("x" * 10_000 + "the end"), limit=1000)
        assert len(text) == 1000 and text.startswith("ValueError: xxx") and text.endswith("the end") and "..." in text

    def test_deep_recursion_is_short(self) -> None:
        def deeper(n: int) -> int:
            return deeper(n + 1)

        text = describe(_raised(lambda: deeper(0)))
        assert "RecursionError" in text and len(text) <= 4000

    def test_text_that_cannot_be_shown_or_stored(self) -> None:
        class Rude(Exception):
            def __str__(self) -> str:
                raise SystemError("no text for you")

        assert "Rude" in describe(Rude())
        describe(ValueError("\ud800")).encode()


def _raised(function: Any) -> BaseException:
    try:
        function()
    except Exception as error:  # noqa: BLE001  that is the point
        return error
    raise AssertionError("it did not raise")
