"""The tiny model: its tokenizer, its logs, its warm start, and the folder that it is saved in."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch")

from examples.sql_agent import prompts, tiny_model
from examples.sql_agent.logs import make_logs
from examples.sql_agent.muon import Muon, orthogonal
from examples.sql_agent.world import score


@pytest.fixture(scope="module")
def logs(world):
    return make_logs(world, 1500, 0)


@pytest.fixture(scope="module")
def tokenizer(logs):
    return tiny_model.make_tokenizer(sorted({t for d in logs for _, t in d.messages} | {d.answer for d in logs}))


def messages(demonstration, answer=False):
    listed = [{"role": role, "content": text} for role, text in demonstration.messages]
    return [*listed, {"role": "assistant", "content": demonstration.answer}] if answer else listed


def test_logs_repeat_themselves_and_differ_by_seed(world, logs):
    assert make_logs(world, 1500, 0) == logs
    assert make_logs(world, 1500, 1) != logs


def test_logs_hold_three_agents_with_their_flaws(world, logs):
    roles = Counter(d.messages[0][1] for d in logs)
    assert len(roles) == 3 and min(roles.values()) > 150
    by_prompt = {f"{q.task['schema']}\n{q.task['question']}": q for q in world.warm}
    written = [(by_prompt[d.messages[1][1]], d.answer) for d in logs if d.messages[0][1].startswith("Answer")]
    right = {True: [], False: []}
    for question, answer in written:
        right[question.kind in ("both", "top")].append(score(question.task, answer))
    share = {flawed: sum(values) / len(values) for flawed, values in right.items()}
    assert share[False] > 0.85 and 0.25 < share[True] < 0.55


def test_logs_never_show_a_question_that_is_held_out(world, logs):
    heldout = {task["question"] for task in world.heldout + world.validation}
    shown = {line for d in logs for _, text in d.messages for line in text.split("\n")}
    assert not heldout & shown


def test_any_text_survives_the_tokenizer(tokenizer, logs):
    texts = ["SELECT 'naïve' — 雪 \t\n  two  spaces", *(d.answer for d in logs[:50])]
    for text in texts:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_names_values_and_numbers_are_single_tokens(tokenizer):
    text = "SELECT COUNT(*) FROM players WHERE team = 'hawks' AND age > 30"
    tokens = [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert tokens == [
        "SELECT",
        " COUNT",
        "(*)",
        " FROM",
        " players",
        " WHERE",
        " team",
        " =",
        " '",
        "hawks",
        "'",
        " AND",
        " age",
        " >",
        " 30",
    ]


def test_the_chat_template_only_appends(tokenizer, logs):
    demonstration = logs[0]
    asked = tokenizer.apply_chat_template(messages(demonstration), tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(messages(demonstration, answer=True), tokenize=False)
    assert answered == asked + demonstration.answer + tiny_model.END
    longer = [*messages(demonstration, answer=True), {"role": "user", "content": "more"}]
    assert tokenizer.apply_chat_template(longer, tokenize=False).startswith(answered)


def test_examples_are_what_the_template_makes(tokenizer, logs):
    for demonstration in logs[:30]:
        ids, prompt = tiny_model.encode(demonstration, tokenizer)
        asked = tokenizer.apply_chat_template(messages(demonstration), tokenize=False, add_generation_prompt=True)
        assert ids[:prompt] == tokenizer(asked, add_special_tokens=False)["input_ids"]
        assert ids[-1] == tokenizer.eos_token_id


def test_the_loss_sees_answers_only_and_no_padding(tokenizer, logs):
    model = tiny_model.make_model(tokenizer, 0, hidden=32, layers=1, feed=32)
    one, two = (tiny_model.encode(d, tokenizer) for d in sorted(logs[:40], key=lambda d: len(d.answer))[::39])
    alone = [tiny_model._answer_loss(model, [row]) for row in (one, two)]
    size = [(len(ids) - prompt) ** 0.5 for ids, prompt in (one, two)]
    together = tiny_model._answer_loss(model, [one, two])
    expected = (alone[0] * size[0] + alone[1] * size[1]) / sum(size)
    torch.testing.assert_close(together, expected)


def test_batches_hold_each_example_once_per_pass():
    examples = [([0] * (n % 7 + 2), 1) for n in range(100)]
    batches = tiny_model._batches(examples, 8, seed=0)
    seen = [id(row) for _ in range(13) for row in next(batches)]
    assert Counter(seen) == Counter(id(row) for row in examples)


def test_a_model_is_made_saved_and_loaded_by_plain_transformers(tmp_path, logs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    losses = []
    folder = tiny_model.make_tiny_model(
        tmp_path / "model", logs[: 32 * 12], seed=0, progress=lambda step, loss: losses.append(loss)
    )
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert 800_000 < model.num_parameters() < 1_000_000 and model.dtype == torch.float32
    asked = tokenizer.apply_chat_template(messages(logs[0]), add_generation_prompt=True, return_tensors="pt")[
        "input_ids"
    ]
    out = model.generate(asked, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(asked))
    assert out.shape[1] <= asked.shape[1] + 4
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_there_is_not_made_again(tmp_path, logs):
    (tmp_path / "model").mkdir()
    assert tiny_model.make_tiny_model(tmp_path / "model", logs, seed=0) == tmp_path / "model"
    assert not list((tmp_path / "model").iterdir())


def test_a_warm_start_that_dies_leaves_no_model(tmp_path, logs):
    def die(step, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_model.make_tiny_model(tmp_path / "model", logs[:64], seed=0, progress=die)
    assert not (tmp_path / "model").exists()


def test_every_prompt_fits_the_window(tokenizer, logs):
    longest = max(len(tiny_model.encode(d, tokenizer)[0]) for d in logs)
    wild = prompts.rewrite_prompt("s " * 20, "q " * 20, "SELECT " * 64, "1234567890" * 6, "wrong " * 10)
    assert longest < 150 and wild


def test_muon_makes_matrices_orthogonal_whatever_their_shape():
    torch.manual_seed(0)
    for shape in ((3, 8, 8), (2, 4, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert 0.6 < float(values.min()) and float(values.max()) < 1.3


def test_muon_finds_a_minimum():
    torch.manual_seed(0)
    tall, wide = (torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 3), (3, 6)))
    goals = [torch.randn(6, 3), torch.randn(3, 6)]
    muon = Muon([tall, wide], 0.1, momentum=0.5)
    for step in range(300):
        loss = sum(((p - goal) ** 2).sum() for p, goal in zip((tall, wide), goals, strict=True))
        loss.backward()
        muon.step(1 - step / 300)
        tall.grad = wide.grad = None
    assert loss.item() < 0.05
