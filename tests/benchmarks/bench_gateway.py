"""What the gateway adds to a model call: CPU, and latency over a direct call to the same engine.

    python -m tests.benchmarks.bench_gateway

The engine answers from memory in a process of its own, 600 prompt ids and 100 response ids with log-probabilities, as one
JSON body or as 25 chunks. The gateway, with its store (SQLite), runs in a second process, whose CPU time is read from
outside; the clients, in this one, keep their connections. Direct and proxied calls alternate in blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil

from tests.benchmarks._bench import report

PROMPT, RESPONSE, CHUNKS = 600, 100, 25
CLIENTS = (1, 64)


def _engine(pipe: Connection) -> None:
    """Answers from memory, so that its own cost disturbs nothing."""
    from tests.fakes.http import Exchange, Server

    whole, stream = _canned()

    async def answer(exchange: Exchange) -> None:
        if b'"stream":true' not in exchange.body:
            return exchange.send(200, whole)
        exchange.start_stream()
        for chunk in stream:
            exchange.chunk(chunk)
            await asyncio.sleep(0)
        exchange.end_stream()

    server = Server(answer)
    server.start()
    pipe.send(server.url)
    pipe.recv()
    server.stop()


def _canned() -> tuple[bytes, list[bytes]]:
    tokens = [
        {"token": f"tok{i}", "logprob": -0.125 * (i % 7 + 1), "bytes": [116, 111, 107], "top_logprobs": []}
        for i in range(RESPONSE)
    ]
    prompt, ids, text = list(range(1000, 1000 + PROMPT)), list(range(5000, 5000 + RESPONSE)), "word " * RESPONSE
    usage = {"prompt_tokens": PROMPT, "completion_tokens": RESPONSE, "total_tokens": PROMPT + RESPONSE}
    head = {"id": "chatcmpl-1", "created": 1, "model": "m", "system_fingerprint": "agl-1"}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    choice |= {"token_ids": ids, "logprobs": {"content": tokens}}
    whole = head | {"object": "chat.completion", "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
    size = RESPONSE // CHUNKS
    chunks: list[dict[str, Any]] = []
    for a in range(0, RESPONSE, size):
        delta = {"index": 0, "delta": {"content": "word " * size}, "finish_reason": None}
        delta |= {"token_ids": ids[a : a + size], "logprobs": {"content": tokens[a : a + size]}}
        chunks.append(head | {"object": "chat.completion.chunk", "choices": [delta]})
    chunks[0]["prompt_token_ids"] = prompt
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    chunks.append(head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})
    events = [b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks]
    return msgspec.json.encode(whole), [*events, b"data: [DONE]\n\n"]


def _gateway(pipe: Connection, engine: str, folder: str) -> None:
    from agentlightning.gateway import Gateway
    from agentlightning.schema import Endpoint, Resource, Rollout, Route
    from agentlightning.store import open_store

    store = open_store(f"sqlite:///{folder}/store.db")
    run = store.begin_run("bench", {}, "here:1:nonce")
    endpoint = Endpoint(f"{engine}/v1", "key", (Route("*", "m", True),), 4096)
    store.publish(run.id, [Resource("policy", 1, "policy", msgspec.to_builtins(endpoint))])
    rollouts = [
        Rollout(f"r{i}", run.id, {}, "t", "g", resources={"policy": 1}, sampling={"temperature": 1.0})
        for i in range(max(CLIENTS))
    ]
    store.enqueue(rollouts)
    attempts = [attempt.id for _, attempt in store.lease("bench", len(rollouts), lease_s=3600)]
    with Gateway(store) as gateway:
        pipe.send((gateway.url, attempts))
        while pipe.recv() == "flush":
            gateway.flush()
            pipe.send(gateway.stats)
    store.close()


@contextmanager
def _process(target: Callable[..., None], *args: Any) -> Any:
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    try:
        yield process.pid, ours
    finally:
        ours.send("end")
        process.join(30)


def _request(stream: bool) -> bytes:
    text = "a question of some length, " * 90  # about 600 tokens of a usual tokenizer
    body = {"model": "policy", "messages": [{"role": "user", "content": text}], "temperature": 0.7}
    return msgspec.json.encode(body | ({"stream": True} if stream else {}))


async def _ask(port: int, path: str, body: bytes, calls: int) -> list[float]:
    """Milliseconds of each of `calls` calls, one after the other, on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise RuntimeError(f"the call failed: {answer!r}")
        if b"content-length:" in answer:
            await reader.readexactly(int(answer.partition(b"content-length:")[2].split(b"\r\n")[0]))
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        times.append((time.perf_counter() - start) * 1e3)
    writer.close()
    return times


async def _block(base: str, paths: list[str], stream: bool, calls: int) -> list[float]:
    port = int(base.rpartition(":")[2])
    share, body = max(1, calls // len(paths)), _request(stream)
    blocks = await asyncio.gather(*(_ask(port, f"{path}/v1/chat/completions", body, share) for path in paths))
    return [value for block in blocks for value in block]


def measure(clients: int, stream: bool, calls: int, repeats: int, engine: str, gateway: Any, pid: int) -> list[float]:
    """CPU ms of the gateway for each call; median ms of a direct call, of a proxied call, and their difference."""
    pipe, url, attempts = gateway
    process, cpu, direct, proxied = psutil.Process(pid), [], [], []
    scoped = [f"/attempts/{attempt}" for attempt in attempts[:clients]]
    asyncio.run(_block(url, scoped, stream, clients * 4))
    for _ in range(repeats):
        direct.append(statistics.median(asyncio.run(_block(engine, [""] * clients, stream, calls))))
        _flush(pipe)
        before = sum(process.cpu_times()[:2])
        times = asyncio.run(_block(url, scoped, stream, calls))
        _flush(pipe)
        cpu.append((sum(process.cpu_times()[:2]) - before) / len(times) * 1e3)
        proxied.append(statistics.median(times))
    added = [b - a for a, b in zip(direct, proxied, strict=True)]
    return [statistics.median(values) for values in (cpu, direct, proxied, added)]


def _flush(pipe: Connection) -> None:
    """Waits for the store, so that its work counts for the calls that caused it."""
    pipe.send("flush")
    stats = pipe.recv()
    bad = {key: count for key, count in stats.items() if key.startswith(("defect", "refused", "unattributed"))}
    if bad:
        raise RuntimeError(f"the gateway did not record every call as good: {bad}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=512, help="calls in a block")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows: list[list[object]] = [
        ["clients", "answer", "gateway CPU ms", "direct p50 ms", "proxied p50 ms", "added p50 ms"]
    ]
    metrics: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        _process(_engine) as (_, engine_pipe),
        _process(_gateway, engine := engine_pipe.recv(), folder) as (pid, pipe),
    ):
        url, attempts = pipe.recv()
        for clients in CLIENTS:
            for stream in (False, True):
                calls = args.calls // 4 if stream else args.calls
                found = measure(clients, stream, calls, args.repeats, engine, (pipe, url, attempts), pid)
                rows.append([clients, "stream" if stream else "whole", *found])
                mark = "_stream" if stream else ""
                metrics[f"cpu_ms_per_call{mark}_{clients}"] = found[0]
                metrics[f"p50_added_ms{mark}_{clients}"] = found[3]
    metrics["cpu_ms_per_call"] = metrics["cpu_ms_per_call_1"]
    report("gateway", metrics, rows)


if __name__ == "__main__":
    main()
