"""The engine in this process, one step at a time: what it samples must not depend on how it was batched or cached."""

import queue
import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from agentlightning.errors import PolicyError
from agentlightning_algorithms.policy.torch_engine import Engine, Served
from agentlightning_algorithms.policy.torch_job import Job
from agentlightning_algorithms.policy.torch_lane import Lane, common_prefix
from agentlightning_algorithms.policy.torch_model import Network
from agentlightning_algorithms.policy.torch_options import TorchOptions
from agentlightning_algorithms.policy.torch_sampling import Uniforms
from tests.fakes.tiny import tiny_model, tiny_tokenizer

CONTEXT = 256


@pytest.fixture(scope="module")
def network() -> Network:
    made = Network(tiny_model(tiny_tokenizer(), context=CONTEXT).requires_grad_(False), CONTEXT)
    made.check()
    return made


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def job(prompt: list[int], *, seed: int = 0, tokens: int = 12, temperature: float = 1.0, **more: Any) -> Job:
    return Job(prompt=prompt, model="m", max_tokens=tokens, uniforms=Uniforms(seed, 0), temperature=temperature, **more)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(length)]


def run(lane: Lane, jobs: list[Job], adapter: str | None = None) -> list[Job]:
    """Steps until all are done; jobs join as soon as the lane takes them."""
    waiting = list(jobs)
    for _ in range(2000):
        waiting = [j for j in waiting if not lane.admit(j, adapter)]
        lane.step()
        if all(j.finish for j in jobs):
            return jobs
    raise AssertionError("the lane never finished")


def alone(network: Network, wanted: Job) -> Job:
    """The same request on an engine of its own."""
    twin = Job(
        prompt=wanted.prompt,
        model="m",
        max_tokens=wanted.max_tokens,
        uniforms=wanted.uniforms,
        temperature=wanted.temperature,
        stop_ids=wanted.stop_ids,
    )
    return run(Lane(network, TorchOptions()), [twin])[0]


def assert_truthful(network: Network, done: Job) -> None:
    """The reported log-probabilities are those of a plain forward pass over prompt and answer."""
    ids = torch.tensor([done.prompt + done.out])
    logits = network.model(input_ids=ids).logits[0, len(done.prompt) - 1 : -1] / (done.temperature or 1.0)
    wanted = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(done.out)[:, None])[:, 0]
    assert torch.tensor(done.logps) == pytest.approx(wanted, abs=2e-5)


def test_greedy_is_what_generate_gives(network: Network) -> None:
    prompt = prompt_of(20)
    [done] = run(Lane(network, TorchOptions()), [job(prompt, tokens=40, temperature=0.0)])
    peer = network.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 20), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert done.out == peer[0, 20:].tolist()
    assert_truthful(network, done)


@pytest.mark.parametrize("chunk", [3, 1024])
def test_a_crowd_changes_nobody_s_answer(network: Network, chunk: int) -> None:
    jobs = [
        job(prompt_of(5 + 9 * k, k), seed=k, tokens=6 + 5 * (k % 4), temperature=(1.0, 0.7, 0.0)[k % 3])
        for k in range(13)
    ]
    lane = Lane(network, TorchOptions(chunk=chunk))
    for step, one in enumerate(jobs):  # staggered: they join while others are in the middle
        assert lane.admit(one, None)
        if step % 3 == 2:
            lane.step()
    run(lane, [job([5], tokens=1)])
    while not all(j.finish for j in jobs):
        lane.step()
    for done in jobs:
        assert done.out == alone(network, done).out
        assert_truthful(network, done)


def test_the_next_turn_computes_only_what_is_new(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    [first] = run(lane, [job(prompt_of(50))])
    before = lane.counts.computed
    history = first.prompt + first.out
    [second] = run(lane, [job(history + [7, 8, 9], seed=1)])
    assert second.reused == len(history) - 1, "all but the last sampled token, whose keys nobody needed before"
    assert lane.counts.computed - before == 4 + len(second.out) - 1
    assert len(lane.slots) == 1, "the conversation goes on in its own slot"
    assert second.out == alone(network, second).out
    assert_truthful(network, second)


def test_a_group_of_equal_prompts_is_read_once(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    jobs = run(lane, [job(prompt_of(60), seed=k, tokens=5) for k in range(8)])
    assert lane.counts.computed == 60 + 7 * 1 + 8 * 4
    assert [j.reused for j in jobs] == [0] + [59] * 7
    assert len({tuple(j.out) for j in jobs}) > 1
    for done in jobs:
        assert done.out == alone(network, done).out


def test_a_branch_copies_the_shared_part_and_leaves_its_donor_alone(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    system = prompt_of(40)
    [first] = run(lane, [job(system + prompt_of(30, 1), seed=1)])
    [branch] = run(lane, [job(system + prompt_of(30, 2), seed=2)])
    assert branch.reused == 40
    [again] = run(lane, [job(first.prompt + first.out + [9], seed=3)])
    assert again.reused == len(first.prompt) + len(first.out) - 1
    for done in (branch, again):
        assert done.out == alone(network, done).out


def test_another_adapter_s_keys_are_never_reused(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    prompt = prompt_of(30)
    for adapter, reused in (("a", 0), ("b", 0), ("a", 29)):
        one = job(prompt)
        assert lane.admit(one, adapter)
        assert one.reused == reused
        one.cancelled = True
        for slot in lane.slots:
            slot.done = len(slot.ids)  # as if read
        lane.sweep()


def test_an_update_forgets_the_keys_of_what_it_changed(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    prompt = prompt_of(30)
    run(lane, [job(prompt)], "a")
    run(lane, [job(prompt)], "b")
    lane.forget({"a"})
    [trained] = run(lane, [job(prompt)], "a")
    [idle] = run(lane, [job(prompt)], "b")
    assert (trained.reused, idle.reused) == (0, 29)


def test_memory_is_bounded_and_the_oldest_conversation_makes_room(network: Network) -> None:
    slots = 3
    lane = Lane(network, TorchOptions(cache_mb=1))
    lane.options = TorchOptions(cache_mb=1, max_batch=slots)
    network_bytes, network.token_bytes = network.token_bytes, 2**20 / (slots * 64)
    try:
        for k in range(6):
            run(lane, [job(prompt_of(20, k), tokens=4)])
        assert len(lane.slots) == slots
        [kept], [lost] = run(lane, [job(prompt_of(20, 5), tokens=1)]), run(lane, [job(prompt_of(20, 0), tokens=1)])
        assert (kept.reused, lost.reused) == (19, 0)
        jobs = run(lane, [job(prompt_of(30, 100 + k), seed=k, tokens=8) for k in range(7)])
        for done in jobs:
            assert done.out == alone(network, done).out
        [long] = run(lane, [job(prompt_of(150, 9), tokens=8)])
        assert long.out == alone(network, long).out
        assert len(lane.slots) < slots, "slots grew longer, so there are fewer"
    finally:
        network.token_bytes = network_bytes


def test_rows_that_work_are_moved_together(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    short = [job(prompt_of(10, k), seed=k, tokens=2) for k in range(10)]
    long = [job(prompt_of(12, 50 + k), seed=k, tokens=30) for k in range(2)]
    run(lane, [long[0], *short, long[1]])
    for done in [*short, *long]:
        assert done.out == alone(network, done).out
    assert [slot.index for slot in lane.slots] == list(range(len(lane.slots)))
    [again] = run(lane, [job(long[1].prompt + long[1].out)])
    assert again.reused > 30, "what was moved is still found"


def test_the_answer_ends_where_it_is_told_to(network: Network) -> None:
    free = run(Lane(network, TorchOptions()), [job(prompt_of(10), tokens=12)])[0]
    stop = free.out[5]
    first = free.out.index(stop)
    by_id = run(Lane(network, TorchOptions()), [job(prompt_of(10), tokens=12, stop_ids=frozenset([stop]))])[0]
    assert (by_id.finish, by_id.out) == ("stop", free.out[: first + 1]), "the stopping id is part of the answer"
    by_text = run(Lane(network, TorchOptions()), [job(prompt_of(10), stopped=lambda out: len(out) == 3)])[0]
    assert (by_text.finish, by_text.out) == ("stop", free.out[:3])
    assert (free.finish, len(free.out)) == ("length", 12)


def test_a_cancelled_request_frees_its_slot(network: Network) -> None:
    lane = Lane(network, TorchOptions())
    one = job(prompt_of(10), tokens=100)
    lane.admit(one, None)
    for _ in range(4):
        lane.step()
    one.cancelled = True
    assert lane.sweep() == [one] and one.finish == "cancelled" and not lane.active
    [after] = run(lane, [job(one.prompt + one.out)])
    assert after.reused >= 10
    assert after.out == alone(network, after).out


def test_waiting_for_a_prefix_ends_when_its_reader_is_cancelled(network: Network) -> None:
    lane = Lane(network, TorchOptions(chunk=8))
    reader, waiter = job(prompt_of(60)), job(prompt_of(60), seed=1)
    assert lane.admit(reader, None)
    assert not lane.admit(waiter, None)
    lane.step()
    reader.cancelled = True
    lane.sweep()
    run(lane, [waiter])
    assert waiter.reused == 8
    assert waiter.out == alone(network, waiter).out


@pytest.mark.parametrize(
    ("one", "other", "limit", "length"),
    [
        ([1, 2, 3], [1, 2, 4], 9, 2),
        ([1], [2], 9, 0),
        ([1, 2], [1, 2, 3], 9, 2),
        ([1, 2, 3], [1, 2, 3], 2, 2),
        ([], [1], 9, 0),
    ],
)
def test_common_prefix(one: list[int], other: list[int], limit: int, length: int) -> None:
    assert common_prefix(one, other, limit) == length


def test_common_prefix_at_every_place() -> None:
    base = prompt_of(70)
    for place in range(70):
        other = base[:place] + [999] + base[place + 1 :]
        assert common_prefix(base, other, 100) == place


class Running:
    """An engine on its own thread, with a queue of what it notified."""

    def __init__(self, lane: Lane, max_batch: int = 8) -> None:
        self.news: queue.Queue[Job] = queue.Queue()
        self.version = 0
        served = {"m": Served(lambda: lane, None), "broken": Served(self._refuse, None)}
        self.engine = Engine(served, lambda: self.version, max_batch, lambda jobs: [self.news.put(j) for j in jobs])
        self.engine.start()

    def _refuse(self) -> Lane:
        raise PolicyError("the initial weights are gone")

    def wait(self, count: int) -> list[Job]:
        return [self.news.get(timeout=30) for _ in range(count)]


@pytest.fixture
def running(network: Network) -> Iterator[Running]:
    made = Running(Lane(network, TorchOptions()))
    yield made
    made.engine.stop()


def test_more_requests_than_places_are_all_answered(running: Running) -> None:
    jobs = [job(prompt_of(10, k), seed=k) for k in range(30)]
    for one in jobs:
        running.engine.submit(one)
    assert {id(j) for j in running.wait(30)} == {id(j) for j in jobs}
    assert {j.finish for j in jobs} == {"length"}


def test_no_answer_mixes_versions(running: Running) -> None:
    before = [job(prompt_of(10, k), seed=k, tokens=40) for k in range(3)]
    begun = job(prompt_of(10, 9), tokens=40, streaming=True)
    for one in [*before, begun]:
        running.engine.submit(one)
    running.wait(1)

    def update() -> bool:
        running.version += 1
        return all(j.finish for j in before)

    result = running.engine.call(update, exclusive=True)
    after = [job(prompt_of(10, k), seed=k) for k in range(4)]
    for one in after:
        running.engine.submit(one)
    before.append(begun)
    assert result.result(timeout=30), "what was begun is finished before weights change"
    while not all(j.finish for j in after):
        running.wait(1)
    assert {j.version for j in before} == {0} and {j.version for j in after} == {1}


def test_other_commands_do_not_wait_for_answers(running: Running) -> None:
    slow = job(prompt_of(10), tokens=200)
    running.engine.submit(slow)
    assert running.engine.call(lambda: slow.finish).result(timeout=30) is None
    running.wait(1)


def test_an_error_of_a_command_goes_to_its_caller_and_the_engine_lives(running: Running) -> None:
    def broken() -> None:
        raise ZeroDivisionError("oh")

    with pytest.raises(PolicyError, match="ZeroDivisionError: oh"):
        running.engine.call(broken).result(timeout=30)
    with pytest.raises(PolicyError, match="the cause"):
        running.engine.call(lambda: (_ for _ in ()).throw(PolicyError("the cause"))).result(timeout=30)
    running.engine.submit(job(prompt_of(5)))
    assert running.wait(1)[0].finish == "length"


def test_a_failing_step_fails_its_requests_and_the_engine_lives(running: Running, monkeypatch: Any) -> None:
    real = Network.hidden

    def broken(self: Network, *arguments: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(Network, "hidden", broken)
    running.engine.submit(job(prompt_of(5)))
    [failed] = running.wait(1)
    assert (failed.finish, failed.error) == ("error", "MemoryError: no room")
    monkeypatch.setattr(Network, "hidden", real)
    running.engine.submit(job(prompt_of(5)))
    assert running.wait(1)[0].finish == "length"


def test_weights_that_cannot_be_loaded_fail_the_request(running: Running) -> None:
    one = job(prompt_of(5))
    one.model = "broken"
    running.engine.submit(one)
    assert running.wait(1)[0].error == "the initial weights are gone"


def test_a_request_cancelled_while_it_waits_is_ended(running: Running) -> None:
    for k in range(8):
        running.engine.submit(job(prompt_of(5, k), tokens=60))
    late = job(prompt_of(6))
    late.cancelled = True
    running.engine.submit(late)
    assert late in running.wait(9)
    assert late.finish == "cancelled" and not late.out
