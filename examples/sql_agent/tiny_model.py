"""Makes a language model on the spot: a byte-level BPE tokenizer and a Llama of under a million parameters.

It is warm-started on logs of a mediocre agent and saved as an ordinary Hugging Face folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
MUON_RATE, ADAM_RATE = 4e-3, 3e-3
BATCH = 32
TEXTS = 6000
"""Demonstrations that the tokenizer is learned from; more hold no new words."""
END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = (
    "{# tools are named by the program's own prompts #}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_PIECES = r" ?\p{L}+| ?\p{N}{1,2}|\n| ?[^\s\p{L}\p{N}]+|\s"


def make_tokenizer(texts: list[str], vocabulary: int = 1400, words: Sequence[str] = ()) -> Any:
    """A byte-level BPE tokenizer, learned from `texts`, in which nearly every word and number of them is one token.

    `words` are one token each, whatever they are: what a program always writes in the same way.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, END, *(f"<|{role}|>" for role in ROLES), *words]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(
    tokenizer: Any, seed: int, *, hidden: int = 128, layers: int = 4, feed: int = 320, context: int = 256
) -> Any:
    """An untrained Llama in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=feed,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def encode(demonstration: Any, tokenizer: Any) -> tuple[list[int], int]:
    """Token ids of a call, the closing token included, and how many of them are prompt."""
    messages = [_message(message) for message in demonstration.messages]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(demonstration.answer + END, add_special_tokens=False)["input_ids"]
    return prompt_ids + answer, len(prompt_ids)


def _message(message: Any) -> dict[str, Any]:
    return message if isinstance(message, dict) else {"role": message[0], "content": message[1]}


def warm_start(
    model: Any,
    examples: list[tuple[list[int], int]],
    *,
    steps: int,
    batch: int = BATCH,
    seed: int = 0,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Supervised training on the answers. `progress` is told the step and its loss."""
    import torch

    from .muon import Muon

    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon, adam = Muon(inner, MUON_RATE), torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step, rows in zip(range(steps), _batches(examples, batch, seed), strict=False):
        scale = _schedule(step / steps)
        loss = _answer_loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.param_groups[0]["lr"] = ADAM_RATE * scale
        muon.step(scale)
        adam.step()
        model.zero_grad(set_to_none=True)
        progress(step, loss.item())
    model.eval()


def _schedule(done: float) -> float:
    """Warm-up over 4 %, constant, then linear to 0 over the last 40 %."""
    return min(1.0, done / 0.04 + 0.02, (1 - done) / 0.4)


def _batches(examples: list[tuple[list[int], int]], batch: int, seed: int) -> Iterator[list[tuple[list[int], int]]]:
    import random

    rng = random.Random(seed)
    while True:
        order = rng.sample(range(len(examples)), len(examples))
        for chunk in range(0, len(order), batch * 16):
            near = sorted(order[chunk : chunk + batch * 16], key=lambda i: len(examples[i][0]))
            starts = list(range(0, len(near), batch))
            rng.shuffle(starts)
            for start in starts:
                yield [examples[i] for i in near[start : start + batch]]


def _answer_loss(model: Any, rows: list[tuple[list[int], int]]) -> Any:
    """Cross entropy of the answer tokens. A token weighs 1 / sqrt(length of its answer), so that short verdicts count too.

    Padding stands at the right, where a causal model never sees it.
    """
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    weights = torch.zeros(ids.shape)
    for weight, (row, prompt) in zip(weights, rows, strict=True):
        weight[prompt - 1 : len(row) - 1] = (len(row) - prompt) ** -0.5
    where = weights > 0
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden[where]), torch.roll(ids, -1, dims=1)[where], reduction="none"
    )
    return (losses * weights[where]).sum() / weights.sum()


def make_tiny_model(
    folder: Path,
    demonstrations: list[Any],
    *,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
    words: Sequence[str] = (),
) -> Path:
    """Makes model and tokenizer, learns from the demonstrations once, and saves both into `folder`.

    A demonstration has `messages`, pairs of role and text or messages of the OpenAI API, and the `answer` as text.

    A folder that exists is complete and is returned as it is: it is put there in one move.
    """
    if folder.exists():
        return folder
    some = demonstrations[:TEXTS]
    texts = {_message(message)["content"] for d in some for message in d.messages} | {d.answer for d in some}
    tokenizer = make_tokenizer(sorted(texts), words=words)
    model = make_model(tokenizer, seed)
    examples = [encode(demonstration, tokenizer) for demonstration in demonstrations]
    warm_start(model, examples, steps=len(examples) // BATCH, seed=seed, progress=progress or (lambda step, loss: None))
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, folder)
    return folder
