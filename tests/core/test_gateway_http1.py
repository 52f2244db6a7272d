"""The reader of answers, held against h11, and the client around it against servers that behave badly."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway import upstream
from agentlightning.gateway.http1 import Broken, Reader
from agentlightning.gateway.upstream import Cut, Unreachable, Upstream, split

Body = list[bytes]


def wire(body: Body, framing: str, close: bool, continued: bool) -> bytes:
    """An answer as h11 writes it; `until_end` answers have no length."""
    peer = h11.Connection(h11.SERVER)
    peer.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\n%s\r\n" % (b"connection: close\r\n" if close else b""))
    peer.next_event()
    out = peer.send(h11.InformationalResponse(status_code=103, headers=[])) if continued else b""
    headers = [("x-a", "1"), ("X-A", "2")]
    if framing == "length":
        headers.append(("content-length", str(len(b"".join(body)))))
    elif framing == "chunked":
        headers.append(("transfer-encoding", "chunked"))
    if framing == "until_end":
        return (out or b"") + b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a:2\r\n\r\n" + b"".join(body)
    events = [h11.Response(status_code=200, headers=headers), *map(h11.Data, body), h11.EndOfMessage()]
    return (out or b"") + b"".join(peer.send(event) or b"" for event in events)


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.sampled_from(["length", "chunked", "until_end"]),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_it_reads_what_h11_writes_however_it_is_cut(
    body: Body, framing: str, close: bool, continued: bool, cuts: list[int]
) -> None:
    data = wire(body, framing, close, continued)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    reader = Reader()
    for a, b in itertools.pairwise(edges):
        reader.feed(data[a:b])
    if framing == "until_end":
        assert not reader.complete
        reader.end()
    assert reader.complete and reader.status == 200 and reader.headers[b"x-a"] == b"1, 2"
    assert reader.take() == b"".join(body) and reader.take() == b""
    assert reader.reusable == (framing != "until_end" and not close)


def test_answers_follow_each_other() -> None:
    reader = Reader()
    for body in ([b"first"], [], [b"a", b"b"]):
        reader.feed(wire(body, "chunked", False, False))
        assert reader.complete and reader.take() == b"".join(body)
        reader.reset()


def test_a_body_is_there_before_its_chunk_is_complete() -> None:
    reader = Reader()
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\nhalf")
    assert reader.take() == b"half" and not reader.complete


@pytest.mark.parametrize("status", [204, 304])
def test_some_statuses_have_no_body(status: int) -> None:
    reader = Reader()
    reader.feed(b"HTTP/1.1 %d x\r\n\r\n" % status)
    assert reader.complete and reader.reusable


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc",
        b"x" * 100_000,
    ],
)
def test_what_is_no_http_is_refused(data: bytes) -> None:
    with pytest.raises(Broken, match="HTTP/1.1"):
        Reader().feed(data)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhalf"])
def test_an_end_in_the_middle_is_an_error(data: bytes) -> None:
    reader = Reader()
    reader.feed(data)
    with pytest.raises(Broken, match="before its answer was complete"):
        reader.end()


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    reader = Reader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxHTTP/1.1 200 OK")
    assert reader.complete and reader.take() == b"x" and not reader.reusable


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Serve = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(serve: Serve, **options: Any) -> AsyncIterator[str]:
    """A server that gives each connection, with its number, to `serve`."""
    count = itertools.count()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(next(count), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went away, as some tests want it to
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, **options)
    scheme = "https" if options else "http"
    try:
        yield f"{scheme}://localhost:{server.sockets[0].getsockname()[1]}/v1/x?y=1"
    finally:
        server.close()
        await asyncio.sleep(0.01)


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))


async def ask(client: Upstream, url: str) -> tuple[int, bytes]:
    async with await client.post(url, [(b"a", b"b")], b"body") as answer:
        return answer.status, await answer.read()


def test_a_connection_is_used_again() -> None:
    seen: list[tuple[int, bytes]] = []

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append((number, await request(reader)))
            writer.write(OK)

    async def main() -> None:
        client = Upstream()
        async with served(serve) as url:
            for _ in range(3):
                assert await ask(client, url) == (200, b"ok")
            client.close()

    asyncio.run(main())
    assert [number for number, _ in seen] == [0, 0, 0]
    assert seen[0][1].startswith(b"POST /v1/x?y=1 HTTP/1.1\r\nhost: localhost:") and seen[0][1].endswith(
        b"\r\n\r\nbody"
    )


@pytest.mark.parametrize("how", ["close", "garbage", "connection: close"])
def test_a_resting_connection_that_has_ended_is_replaced(how: str) -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") if "connection" in how else OK)
        if how == "garbage":
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(b"unasked")
            await reader.read()

    async def main() -> None:
        client = Upstream()
        async with served(serve) as url:
            assert await ask(client, url) == (200, b"ok")
            await asyncio.sleep(0.03)
            assert await ask(client, url) == (200, b"ok")
            client.close()

    asyncio.run(main())


def test_a_server_that_closes_just_as_we_ask_is_asked_again_once() -> None:
    connections: list[int] = []

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(number)
        await request(reader)
        writer.write(OK)
        await request(reader)  # the second request on this connection is read and never answered

    async def main() -> None:
        client = Upstream()
        async with served(serve) as url:
            await ask(client, url)
            assert await ask(client, url) == (200, b"ok")
            client.close()

    asyncio.run(main())
    assert connections == [0, 1]


def test_a_fresh_connection_that_is_cut_is_an_error() -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)

    async def main() -> None:
        async with served(serve) as url:
            with pytest.raises(Cut, match="see the engine's log"):
                await ask(Upstream(), url)

    asyncio.run(main())


def test_what_speaks_no_http_is_an_error() -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

    async def main() -> None:
        async with served(serve) as url:
            with pytest.raises(Cut, match="check the base URL"):
                await ask(Upstream(), url)

    asyncio.run(main())


def test_a_connection_that_takes_too_long_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async def never(*_: Any, **__: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never, raising=False)
        with pytest.raises(Unreachable, match="no answer within 0.01 s"):
            await ask(Upstream(connect_s=0.01), "http://localhost:1/v1")

    asyncio.run(main())


def test_no_more_connections_rest_than_allowed() -> None:
    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            writer.write(OK)

    async def main() -> None:
        client = Upstream(idle=2)
        async with served(serve) as url:
            await asyncio.gather(*(ask(client, url) for _ in range(8)))
            assert len(client._resting[split(url)[0]]) == 2
            client.close()
            assert await ask(client, url) == (200, b"ok")
            assert not client._resting[split(url)[0]], "a closed client keeps nothing"

    asyncio.run(main())


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command, which makes the certificate, is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*made.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)

    async def serve(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)

    async def main() -> None:
        async with served(serve, ssl=server) as url:
            with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
                await ask(Upstream(), url)
            trusting = ssl.create_default_context(cafile=str(cert))
            monkeypatch.setattr(upstream, "_tls", lambda: trusting)
            client = Upstream()
            assert await ask(client, url) == (200, b"ok")
            client.close()

    asyncio.run(main())
