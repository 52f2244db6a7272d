"""The scope on outgoing requests: to our addresses only, by every httpx client, and gone after the undo."""

from __future__ import annotations

import asyncio
import inspect
import logging
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agentlightning import propagation
from agentlightning.context import Scope, current, propagate_to, reset_scope, set_scope, use
from agentlightning.errors import ConfigError

ATTEMPT = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
ROOT = "http://127.0.0.1:4321"
CALL = f"{ROOT}/v1/chat/completions"
BOTH = {"traceparent": f"00-{ATTEMPT}-{SPAN}-01", "baggage": "agl.agent=team%2Fwriter"}


@pytest.fixture(params=["httpx", "httpx2"])
def library(request):
    return pytest.importorskip(request.param)


@pytest.fixture
def writer():
    return Scope(ATTEMPT, "team/writer", SPAN)


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever a test does, the last undo leaves every class as it was."""
    before = (httpx.Client.send, httpx.AsyncClient.send, ThreadPoolExecutor.submit, list(sys.meta_path))
    yield
    assert before == (httpx.Client.send, httpx.AsyncClient.send, ThreadPoolExecutor.submit, list(sys.meta_path))
    assert not propagation._patches and not propagation._roots and not propagation._registered


@pytest.fixture
def registered():
    undo = propagate_to(ROOT)
    yield undo
    undo()


def sent(library: Any, url: str, **kwargs: Any) -> dict[str, str]:
    """The trace headers of a request, as the transport got it."""
    seen: dict[str, str] = {}

    def answer(request: Any) -> Any:
        seen.update(request.headers)
        return library.Response(200, json={})

    with library.Client(transport=library.MockTransport(answer)) as client:
        client.get(url, **kwargs)
    return {key: seen[key] for key in ("traceparent", "baggage") if key in seen}


def test_a_request_bears_the_scope(library, writer, registered):
    with use(writer):
        assert sent(library, CALL) == BOTH
    assert sent(library, CALL) == {}, "outside attempts requests are as they were"


def test_async_and_streamed_requests_too(library, writer, registered):
    seen: list[dict[str, str]] = []

    def answer(request: Any) -> Any:
        seen.append({key: request.headers.get(key) for key in BOTH})
        return library.Response(200, content=b"x")

    async def program() -> None:
        async with library.AsyncClient(transport=library.MockTransport(answer)) as client:
            await client.get(CALL)
            async with client.stream("POST", CALL, json={}) as response:
                await response.aread()

    with use(writer):
        asyncio.run(program())
        with library.Client(transport=library.MockTransport(answer)) as client, client.stream("GET", CALL) as response:
            response.read()
    assert seen == [BOTH] * 3
    assert inspect.iscoroutinefunction(library.AsyncClient.send), "what asks for coroutine functions still finds one"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4322/v1/x",
        "https://127.0.0.1:4321/v1/x",
        "http://example.org:4321/v1/x",
        "http://127.0.0.1/v1/x",
    ],
)
def test_other_addresses_learn_nothing(library, writer, registered, url):
    with use(writer):
        assert sent(library, url) == {}


def test_names_of_the_loopback_are_one_address(library, writer, registered):
    with use(writer):
        assert sent(library, "http://localhost:4321/v1/x") == BOTH
        assert sent(library, "http://[::1]:4321/v1/x") == BOTH


def test_a_root_with_a_path_means_what_is_below_it(library, writer):
    undo = propagate_to("https://gateway.example/agl/")
    try:
        with use(writer):
            assert sent(library, "https://gateway.example:443/agl/v1/x") == BOTH
            assert sent(library, "https://gateway.example/agl") == BOTH
            assert sent(library, "https://gateway.example/aglet/v1") == {}
            assert sent(library, "https://gateway.example/") == {}
    finally:
        undo()


def test_headers_of_others(library, writer, registered):
    """Another tracer's traceparent gives way (the gateway is ours); baggage of others stays."""
    given = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01", "baggage": "user=7"}
    with use(writer):
        assert sent(library, CALL, headers=given) == {**BOTH, "baggage": f"user=7,{BOTH['baggage']}"}
    with use(Scope(ATTEMPT, "", SPAN)):
        assert sent(library, CALL, headers={"baggage": "agl.agent=old"}) == {"traceparent": BOTH["traceparent"]}


def test_undo_counts(library, writer):
    first, second = propagate_to(ROOT), propagate_to(ROOT)
    with use(writer):
        first()
        first()
        assert sent(library, CALL) == BOTH, "the other registration still holds"
        second()
        assert sent(library, CALL) == {}


def test_two_roots(library, writer):
    other = "http://127.0.0.1:999/v1/x"
    first, second = propagate_to(ROOT), propagate_to("http://127.0.0.1:999")
    with use(writer):
        assert sent(library, CALL) == sent(library, other) == BOTH
        second()
        assert (sent(library, CALL), sent(library, other)) == (BOTH, {})
        first()


def test_someone_who_wrapped_us_is_not_unwrapped(library, writer, monkeypatch):
    """Our undo leaves their wrapper; ours below it does nothing any more."""
    undo = propagate_to(ROOT)
    ours = library.Client.send

    def theirs(self: Any, request: Any, **kwargs: Any) -> Any:
        return ours(self, request, **kwargs)

    monkeypatch.setattr(library.Client, "send", theirs)
    undo()
    assert library.Client.send is theirs
    with use(writer):
        assert sent(library, CALL) == {}
    monkeypatch.undo()
    library.Client.send = ours.__wrapped__


@pytest.mark.parametrize("root", ["", "127.0.0.1:80", "ftp://host", "http://", "http://host:port", "/v1"])
def test_what_is_no_url_is_refused(root):
    with pytest.raises(ConfigError, match="give one such as"):
        propagate_to(root)


def test_our_failure_does_not_stop_a_request(writer, registered, monkeypatch, caplog):
    monkeypatch.setattr(propagation, "traceparent", lambda scope: 1 / 0)
    monkeypatch.setattr(propagation, "_failures", type(propagation._failures)())
    with use(writer), caplog.at_level(logging.ERROR):
        assert sent(httpx, CALL) == sent(httpx, CALL) == {}
    assert propagation._failures.total() == 2
    (said,) = caplog.records
    assert "policy.base_url" in said.message


def test_thread_pools_carry_the_scope(writer, registered):
    with ThreadPoolExecutor(2) as pool:
        pool.submit(int).result()  # its worker begins outside
        with use(writer):
            future = pool.submit(current)
            mapped = list(pool.map(lambda _: current(), range(4)))
        assert future.result() is writer
        assert mapped == [writer] * 4
        assert pool.submit(current).result() is None, "a worker keeps nothing of the work before"


def test_work_keeps_the_scope_of_its_submission(registered):
    """Copied at submit: what the submitter does later does not matter."""
    with ThreadPoolExecutor(1) as pool:
        gate = pool.submit(__import__("time").sleep, 0.01)
        token = set_scope(Scope(ATTEMPT, "early"))
        early = pool.submit(current)
        reset_scope(token)
        with use(Scope(ATTEMPT, "late")):
            late = pool.submit(current)
        gate.result()
        found = [future.result() for future in (early, late)]
    assert [scope and scope.path for scope in found] == ["early", "late"]


def test_errors_and_arguments_pass_through_pools(writer, registered):
    def work(*args: int, **kwargs: int) -> Any:
        if not args:
            raise KeyError("empty")
        return args, kwargs

    with use(writer), ThreadPoolExecutor(1) as pool:
        assert pool.submit(work, 1, fn=2, self=3).result() == ((1,), {"fn": 2, "self": 3})
        with pytest.raises(KeyError):
            pool.submit(work).result()


def test_run_in_executor_carries_the_scope(writer, registered):
    async def program() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, current)

    with use(writer):
        assert asyncio.run(program()) is writer


def test_libraries_imported_later_are_wrapped_too():
    """In a fresh interpreter: neither library is imported by us, and both work when the program imports them."""
    code = """
        import sys
        from agentlightning.context import Scope, propagate_to, use
        finders = list(sys.meta_path)
        undo = propagate_to("http://127.0.0.1:4321")
        assert not {"httpx", "httpx2"} & set(sys.modules)
        import importlib
        for name in sys.argv[1:]:
            library = importlib.import_module(name)
            assert vars(library.__loader__).keys() == {"name", "path"}, "the loader is as it was"
            seen = {}
            answer = lambda request: seen.update(request.headers) or library.Response(200)
            client = library.Client(transport=library.MockTransport(answer))
            with use(Scope("a" * 32, "writer", "b" * 16)):
                client.get("http://127.0.0.1:4321/v1/x")
            assert seen["baggage"] == "agl.agent=writer", seen
        undo()
        for name in sys.argv[1:]:
            assert sys.modules[name].Client.send.__code__.co_filename.endswith("_client.py")
        assert sys.meta_path == finders
        try:
            import httpx_that_is_not_there
        except ModuleNotFoundError:
            print("fine")
    """
    names = ["httpx"]
    if propagation.importlib.util.find_spec("httpx2"):
        names.append("httpx2")
    command = [sys.executable, "-c", textwrap.dedent(code), *names]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.stdout.strip() == "fine", out.stderr
