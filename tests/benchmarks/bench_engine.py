"""Tokens per second of the embedded engine, over HTTP, against plain `generate` on the same model in the same run.

    python -m tests.benchmarks.bench_engine [--rounds 3]

Four loads: one client with fresh prompts; 16 clients with fresh prompts; 16 clients that start one after the other and
hold conversations of three turns; the same, where 8 at a time begin alike, as the rollouts of a group do. The peer gets
the same work as static batches, all rows at once, without HTTP, log-probabilities or chat, and with one thread or all,
whichever is faster: its best case. Rounds of both alternate; the best of each counts, as other load on the machine only
ever slows down. `fresh_ratio`, `prefix_ratio` and `group_ratio` are engine over peer at 16 clients. One model is made on
the spot (hidden 256, 6 layers); SmolLM2-135M is measured too where its package is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

os.environ.setdefault(
    "GOMP_SPINCOUNT", "1000"
)  # before torch is loaded: the peer gets what the back end's process gets

from agentlightning.errors import ConfigError
from agentlightning.schema import Endpoint
from agentlightning_algorithms.policy.base import PolicySettings
from agentlightning_algorithms.policy.torch import TorchPolicy
from agentlightning_algorithms.policy.torch_model import load_network, load_tokenizer
from agentlightning_algorithms.policy.torch_options import TorchOptions, find_model
from tests.benchmarks._bench import report
from tests.fakes.tiny import save_tiny

CLIENTS, TURNS, ANSWER = 16, 3, 48
STAGGER_S = 0.01
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "system",
    "tool",
    "question",
    "answer",
    "number",
    "name",
    "hello",
    "world",
]


@dataclass(frozen=True)
class Load:
    clients: int
    system: int
    """Words of the system prompt. 400 are 430 to 550 tokens; a call of tau-bench has 3,280."""
    turns: int
    stagger_s: float = 0.0
    """Seconds between the starts of two clients."""
    group: int = 1
    """How many clients begin alike."""


LOADS = {
    "single": ("fresh, 1 client", Load(1, 60, 1)),
    "fresh": ("fresh, 16 clients", Load(CLIENTS, 60, 1)),
    "prefix": ("3 turns, 16 clients", Load(CLIENTS, 400, TURNS, STAGGER_S)),
    "group": ("3 turns, 2 groups of 8", Load(CLIENTS, 400, TURNS, STAGGER_S, 8)),
}


def words(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def conversation(client: str, system: int) -> list[dict[str, str]]:
    """How a conversation begins. Other names share nothing with it, but the first token of the template."""
    return [
        {"role": "system", "content": words(f"system {client}", system)},
        {"role": "user", "content": words(f"user {client}", 15)},
    ]


@dataclass
class Engine:
    """The back end, asked over HTTP like the gateway asks it."""

    endpoint: Endpoint

    def _client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.endpoint.api_key}"}
        return httpx.AsyncClient(base_url=self.endpoint.base_url, headers=headers, timeout=600)

    async def _ask(self, http: httpx.AsyncClient, messages: list[dict[str, str]], seed: int) -> str:
        body = {
            "model": self.endpoint.routes[0].model,
            "messages": messages,
            "max_tokens": ANSWER,
            "ignore_eos": True,
            "seed": seed,
            "logprobs": True,
            "return_token_ids": True,
        }
        response = await http.post("/chat/completions", json=body)
        response.raise_for_status()
        return str(response.json()["choices"][0]["message"]["content"])

    async def _converse(self, http: httpx.AsyncClient, key: str, client: int, load: Load) -> None:
        await asyncio.sleep(client * load.stagger_s)
        messages = conversation(f"{key}/{client // load.group}", load.system)
        for turn in range(load.turns):
            text = await self._ask(http, messages, client * 100 + turn)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": words(f"{key} turn {turn}", 15)})

    def run(self, key: str, load: Load) -> float:
        """Seconds for everything. The same `key` gives the same prompts."""

        async def everything() -> float:
            async with self._client() as http:
                started = time.perf_counter()
                await asyncio.gather(*(self._converse(http, key, client, load) for client in range(load.clients)))
                return time.perf_counter() - started

        return asyncio.run(everything())


class Generate:
    """The peer: transformers' `generate` with static batches, padded at the left."""

    def __init__(self, path: Path, threads: int) -> None:
        options = TorchOptions()
        self.threads = threads
        self.model = load_network(path, options).model
        self.tokenizer = load_tokenizer(path, options)
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def run(self, key: str, load: Load) -> float:
        import torch

        torch.set_num_threads(self.threads)
        started = time.perf_counter()
        talks = [conversation(f"{key}/{client // load.group}", load.system) for client in range(load.clients)]
        for turn in range(load.turns):
            for messages, text in zip(talks, self._answers(talks), strict=True):
                messages.append({"role": "assistant", "content": text})
                messages.append({"role": "user", "content": words(f"{key} turn {turn}", 15)})
        return time.perf_counter() - started

    def _answers(self, talks: list[list[dict[str, str]]]) -> list[str]:
        import torch

        texts = [self.tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in talks]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                do_sample=True,
                max_new_tokens=ANSWER,
                min_new_tokens=ANSWER,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        new = out[:, batch["input_ids"].shape[1] :]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in new]


def measure(path: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Tokens per second of engine and peer for each load."""
    policy = TorchPolicy(PolicySettings(model=str(path), selectors=("agent",)))
    with closing(policy):
        peers = [Generate(path, threads) for threads in (1, os.cpu_count() or 1)]
        sides: list[Callable[..., float]] = [Engine(policy.start()).run, *(peer.run for peer in peers)]
        for side in sides:
            side("warm up", Load(2, 10, 1))
        best: dict[str, list[float]] = {key: [0.0, 0.0] for key in LOADS}
        for number in range(rounds):
            for key, (_, load) in LOADS.items():
                for which, side in enumerate(sides):
                    speed = load.clients * load.turns * ANSWER / side(f"{key} {number}", load)
                    best[key][which > 0] = max(best[key][which > 0], speed)
    return {key: (engine, peer) for key, (engine, peer) in best.items()}


def models(folder: Path) -> dict[str, tuple[Path, str]]:
    """Name -> where it is, and the prefix of its metrics."""
    found = {"Llama 256 x 6": (save_tiny(folder / "llama", hidden=256, layers=6, context=2048, spread=0.05), "")}
    try:
        found["SmolLM2-135M"] = (find_model("smollm2"), "smollm2_")
    except ConfigError:
        print("SmolLM2 is not installed: only the model made on the spot is measured")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="measure models whose name contains this")
    arguments = parser.parse_args()
    rows: list[list[Any]] = [["model", "load", "engine tok/s", "generate tok/s", "ratio"]]
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, prefix) in models(Path(folder)).items():
            if arguments.only not in name:
                continue
            for key, (engine, peer) in measure(path, arguments.rounds).items():
                rows.append([name, LOADS[key][0], engine, peer, engine / peer])
                metrics |= {f"{prefix}{key}_ratio": engine / peer, f"{prefix}{key}_tokens_per_s": engine}
    report("engine", metrics, rows)


if __name__ == "__main__":
    main()
