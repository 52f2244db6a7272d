"""Programs of no framework pass the suite of all adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import httpx
import pytest

import agentlightning as agl
from tests.adapters.world import RAW, World
from tests.conformance.adapter import AdapterConformance, Driver, Paths

pytest.importorskip("openai", reason="the openai extra is not installed")

import openai
from openai._base_client import AsyncAPIClient, SyncAPIClient

from tests.adapters.openai import programs


class OpenAI(Driver):
    name: ClassVar[str] = "openai"
    names_itself: ClassVar[bool] = True
    cannot: ClassVar[Mapping[str, str]] = {
        "handoff": "a plain program enters one agl.agent block after another; nothing hands over",
        "tool_ok": "the client runs no tools: the program does, in an agl.operation if it wants a span",
        "tool_error": "the client runs no tools: the program does, in an agl.operation if it wants a span",
    }

    def touched(self) -> list[object]:
        return [SyncAPIClient, AsyncAPIClient, openai.Stream, openai.AsyncStream]

    def single(self, world: World, prompt: str, name: str = "writer") -> Paths:
        with programs.client(world) as client:
            programs.ask_as(client, name, prompt)
        return [name]

    async def single_async(self, world: World, prompt: str) -> Paths:
        async with programs.client_async(world) as client:
            with agl.agent("writer"):
                await programs.ask_async(client, prompt)
        return ["writer"]

    def nested(self, world: World, prompt: str) -> Paths:
        with programs.client(world) as client, agl.agent("team"):
            programs.ask_as(client, "writer", prompt)
            programs.ask(client, prompt)
        return ["team/writer", "team"]

    def parallel(self, world: World, prompt: str) -> Paths:
        with programs.client(world) as client, ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda name: programs.ask_as(client, name, prompt), ["a", "b", "b"]))
        return ["a", "b", "b"]

    def stream(self, world: World, prompt: str) -> Paths:
        with programs.client(world) as client:
            assert len(list(programs.ask_as(client, "writer", prompt, stream=True))) > 2
        return ["writer"]

    def stream_break(self, world: World, prompt: str) -> Paths:
        async def program() -> None:
            async with programs.client_async(world) as client:
                with agl.agent("writer"):
                    async for _ in await programs.ask_async(client, prompt, stream=True):
                        break
            async with httpx.AsyncClient() as http:
                await http.post(**raw(world))

        asyncio.run(program())
        return ["writer", ""]

    def retry(self, world: World, prompt: str) -> Paths:
        with programs.client(world, max_retries=3) as client:
            programs.ask_as(client, "writer", prompt)
        return ["writer"] * 3

    def cancel(self, world: World, prompt: str) -> Paths:
        async def program() -> None:
            async with programs.client_async(world) as client:
                with agl.agent("writer"):
                    running = asyncio.create_task(programs.ask_async(client, prompt))
                    while not world.engine.requests:
                        await asyncio.sleep(0.001)
                    running.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await running

        asyncio.run(program())
        return ["writer"]

    def raw_client(self, world: World, prompt: str) -> Paths:
        with agl.agent("writer"):
            httpx.post(**raw(world)).raise_for_status()
        return ["writer"]

    def program_error(self, world: World, prompt: str, error: Exception) -> Paths:
        with programs.client(world) as client, agl.agent("writer"):
            programs.ask(client, prompt)
            raise error

    def duplicates(self, world: World, prompt: str) -> Paths:
        with programs.client(world) as client:
            for _ in range(2):
                programs.ask_as(client, "writer", prompt)
        return ["writer", "writer"]

    def tiny(self, world: World) -> Callable[[], object]:
        client = programs.scripted_client("x")
        return lambda: programs.ask_as(client, "writer", "q")


def raw(world: World) -> dict[str, object]:
    """A call by plain HTTP: past this adapter, which hears all OpenAI clients."""
    body = {"model": "base", "messages": [{"role": "user", "content": RAW}]}
    return {"url": f"{world.engine.base_url}/chat/completions", "json": body}


class TestOpenAI(AdapterConformance):
    @pytest.fixture
    def driver(self) -> Driver:
        return OpenAI()
