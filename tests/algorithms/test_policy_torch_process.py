"""The process of the torch back end: it starts or says why not, it ends with its parent, and it never blocks a client."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from agentlightning.errors import ConfigError, PolicyError
from agentlightning_algorithms.policy.base import PolicySettings, Update
from agentlightning_algorithms.policy.torch import TorchPolicy
from tests.conformance.policy import Client, row_of
from tests.fakes.tiny import save_tiny

LONG = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), context=4096)


def settings(model: Path | str, **options: object) -> PolicySettings:
    return PolicySettings(model=str(model), selectors=("writer",), options={"threads": 1, **options})


@pytest.fixture(scope="module")
def policy(model: Path) -> Iterator[TorchPolicy]:
    made = TorchPolicy(settings(model))
    made.endpoint = made.start()  # type: ignore[attr-defined]
    yield made
    made.close()


@pytest.fixture
def client(policy: TorchPolicy) -> Iterator[Client]:
    with Client(policy.endpoint) as made:  # type: ignore[attr-defined]
        yield made


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.02)


def test_the_trainer_s_process_imports_no_torch() -> None:
    code = "import sys, agentlightning_algorithms.policy.torch; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False False\n"
    )


def test_close_leaves_no_process_and_no_port(model: Path) -> None:
    policy = TorchPolicy(settings(model))
    endpoint = policy.start()
    assert policy.pid is not None
    process = psutil.Process(policy.pid)
    assert {c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"} == {"127.0.0.1"}
    with pytest.raises(PolicyError, match="running already"):
        policy.start()
    policy.close()
    policy.close()
    assert not psutil.pid_exists(process.pid) and policy.pid is None
    with Client(endpoint) as client, pytest.raises(Exception, match="refused"):
        client.post("writer")
    again = policy.start()
    assert again.base_url != endpoint.base_url or again.api_key != endpoint.api_key
    policy.close()


def test_kill_minus_nine_of_the_parent_ends_the_child(model: Path) -> None:
    code = f"""
        import time
        from agentlightning_algorithms.policy.base import PolicySettings
        from agentlightning_algorithms.policy.torch import TorchPolicy
        policy = TorchPolicy(PolicySettings(model={str(model)!r}, selectors=("writer",), options={{"threads": 1}}))
        policy.start()
        print(policy.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie", "the child ends")


def test_a_child_that_dies_is_told_with_its_last_words(model: Path) -> None:
    policy = TorchPolicy(settings(model))
    try:
        policy.start()
        assert policy.pid is not None
        os.kill(policy.pid, signal.SIGKILL)
        with pytest.raises(PolicyError, match="(?s)exit code -9.*smaller model") as caught:
            policy.logprobs([])
        assert "during logprobs" in str(caught.value)
    finally:
        policy.close()


def test_an_interpreter_that_cannot_start_is_told_with_its_last_words(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nread line\necho 'no such library: libtorch' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    policy = TorchPolicy(settings(model))
    with pytest.raises(PolicyError, match="(?s)while it started.*exit code 3.*no such library: libtorch"):
        policy.start()
    assert policy.pid is None


def test_a_broken_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PolicyError, match=f"cannot load the (model|tokenizer) at {tmp_path}"):
        TorchPolicy(settings(tmp_path)).start()
    (tmp_path / "config.json").unlink()
    with pytest.raises(PolicyError, match="no model: there is neither config.json nor policy.json"):
        TorchPolicy(settings(tmp_path)).start()


def test_starting_does_not_hang(model: Path) -> None:
    with pytest.raises(PolicyError, match="start_timeout"):
        TorchPolicy(settings(model, start_timeout=0.05)).start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8"}, "float32, bfloat16 or float16"),
        ({"max_batch": 0}, "max_batch must be positive"),
        ({"chunk": "many"}, "Expected `int`"),
        ({"batch": 3}, "batch.*knows: device, dtype, threads"),
        ({"threads": -1}, "negative"),
    ],
)
def test_b81_wrong_options_are_refused_before_any_process(model: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TorchPolicy(settings(model, **options))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "/nowhere"}, "never downloaded"),
        ({"selectors": ()}, "at least one agent"),
        ({"selectors": ("a", "a")}, "differ"),
        ({"lora": -1}, "rank"),
        ({"learning_rate": 0.0}, "learning_rate"),
    ],
)
def test_wrong_settings_are_refused_before_any_process(model: Path, changes: dict[str, object], words: str) -> None:
    values = {"model": str(model), "selectors": ("writer",), **changes}
    with pytest.raises(ConfigError, match=words):
        TorchPolicy(PolicySettings(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [True, False])
def test_b91_a_client_that_goes_away_stops_the_sampling(policy: TorchPolicy, client: Client, stream: bool) -> None:
    before = policy.counts()["generated"]
    body = client.body("writer", "hello", max_tokens=LONG, stream=stream, ignore_eos=True)
    if stream:
        with client.http.stream("POST", "/chat/completions", json=body) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(Exception, match="timed out"):
            client.http.post("/chat/completions", json=body, timeout=0.2)
    last = [-1]

    def still() -> bool:
        last.append(policy.counts()["generated"])
        time.sleep(0.1)
        return last[-1] == last[-2]

    until(still, "the engine is idle")
    assert policy.counts()["generated"] - before < LONG


def test_the_next_turn_reuses_the_first_one_over_http(policy: TorchPolicy, client: Client) -> None:
    messages = [{"role": "user", "content": "the quick brown fox " * 20}]
    first = client.ask("writer", messages=messages)
    text = first["choices"][0]["message"]["content"]
    before = policy.counts()
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    second = client.ask("writer", messages=messages)
    after = policy.counts()
    assert after["reused"] - before["reused"] >= len(first["prompt_token_ids"])
    fresh = len(second["prompt_token_ids"]) - (after["reused"] - before["reused"])
    assert fresh < len(second["prompt_token_ids"]) / 3


def test_answers_do_not_depend_on_the_crowd(policy: TorchPolicy, client: Client) -> None:
    alone = {seed: client.ask("writer", f"question {seed}", seed=seed)["choices"][0]["token_ids"] for seed in range(8)}
    crowd: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        crowd[seed] = client.ask("writer", f"question {seed}", seed=seed)["choices"][0]["token_ids"]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in alone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crowd == alone


def test_requests_that_come_during_an_update_get_the_next_version(policy: TorchPolicy, client: Client) -> None:
    row = row_of(client.ask("writer"), "writer")
    version = policy.version
    answers = []

    def ask(seed: int) -> None:
        answers.append(client.ask("writer", "a question", seed=seed, max_tokens=60))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
    for thread in threads[:6]:
        thread.start()
    policy.update(Update([row] * 4, epochs=3))
    for thread in threads[6:]:
        thread.start()
    for thread in threads:
        thread.join()
    assert {int(a["x-agl-version"]) for a in answers} <= {version, version + 1}
    for answer in answers:
        if int(answer["x-agl-version"]) == version + 1:
            made = row_of(answer, "writer")
            sampled = made.weights != 0
            assert policy.logprobs([made])[0][sampled] == pytest.approx(made.logprobs[sampled], abs=1e-4)


def test_a_folder_that_cannot_be_written_is_told(policy: TorchPolicy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PolicyError, match="cannot save the policy to"):
        policy.save(tmp_path / "file" / "saved")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
