"""Programs of no framework, as their users write them: an OpenAI client and `agl.agent` blocks."""

from __future__ import annotations

import ssl
import sys
from typing import Any

import openai

import agentlightning as agl
from tests.adapters.world import World

HTTP = sys.modules[next(kind.__module__ for kind in openai.DefaultHttpxClient.__mro__[1:]).partition(".")[0]]
"""httpx2 for the SDK from version 3 on, httpx before."""
TLS = ssl.create_default_context()
"""Shared: a client that makes its own takes tens of milliseconds."""


def client(world: World, **more: Any) -> openai.OpenAI:
    """A context manager that closes it, as every client of the SDK is."""
    return openai.OpenAI(**(world.client | more), http_client=openai.DefaultHttpxClient(verify=TLS))


def client_async(world: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**world.client, http_client=openai.DefaultAsyncHttpxClient(verify=TLS))


def ask(client: openai.OpenAI, prompt: str, **more: Any) -> Any:
    return client.chat.completions.create(model="base", messages=[{"role": "user", "content": prompt}], **more)


async def ask_async(client: openai.AsyncOpenAI, prompt: str, **more: Any) -> Any:
    return await client.chat.completions.create(model="base", messages=[{"role": "user", "content": prompt}], **more)


def ask_as(client: openai.OpenAI, name: str, prompt: str, **more: Any) -> Any:
    with agl.agent(name):
        return ask(client, prompt, **more)


def scripted_client(text: str) -> openai.OpenAI:
    """Its model is a function in this process: no socket."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "base", "choices": [choice]}
    transport = HTTP.MockTransport(lambda request: HTTP.Response(200, json=body))
    http = openai.DefaultHttpxClient(transport=transport)
    return openai.OpenAI(base_url="http://model.test/v1", api_key="none", http_client=http)
