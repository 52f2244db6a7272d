"""A real but tiny language model, made on the spot: byte-level BPE, a random Llama, a chat template with tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

END, PAD = "<|im_end|>", "<|pad|>"
SPECIAL = [PAD, END, "<|im_start|>"]
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "system user assistant tool hello world answer question number name arguments",
    '<tool_call>\n{"name": "search", "arguments": {"query": "weather in Paris"}}\n</tool_call>',
    "0 1 2 3 4 5 6 7 8 9 10 11 12 what is the capital of France? Paris.",
]
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""


def tiny_tokenizer(vocabulary: int = 400) -> Any:
    """Byte-level BPE that can spell any text; `<|im_end|>` ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_model(
    tokenizer: Any, seed: int = 0, *, hidden: int = 32, layers: int = 2, context: int = 256, spread: float = 0.15
) -> Any:
    """A random Llama with grouped-query attention. `spread` is the initial scale: large enough that logits differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=spread,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def save_tiny(folder: Path, **shape: Any) -> Path:
    """Writes a tiny model as an ordinary Hugging Face folder; `shape` as in `tiny_model`."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
