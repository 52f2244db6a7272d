"""`agl worker`: rollouts of a store on this machine, or (`--render-k8s`) on many as a Kubernetes Job."""

from __future__ import annotations

import re
import signal
from contextlib import closing
from typing import Any

import msgspec
import typer

from agentlightning.cli.output import console, print_json
from agentlightning.errors import ConfigError

GRACE_S = 300.0
"""Seconds that pods have to finish what they hold, where `--drain` does not say."""
KEY = "AGL_STORE_KEY"


class Settings(msgspec.Struct, frozen=True):
    """What a worker is told, here or in a pod."""

    program: str
    store: str
    concurrency: int = 1
    run: str = ""
    processes: bool = False
    drain_s: float | None = None
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.lease_s <= 0 or (self.drain_s is not None and self.drain_s < 0):
            raise ConfigError("give -n at least 1, --lease more than 0 seconds, and --drain at least 0.")


class Pods(msgspec.Struct, frozen=True):
    """Where the workers of a Job run."""

    image: str
    count: int = 1
    name: str = "agl-worker"
    secret: str = ""
    """Name of the Kubernetes secret whose key `AGL_STORE_KEY` opens the store."""


def run_worker(settings: Settings, as_json: bool) -> None:
    """Works until its run has ended, or until SIGTERM or SIGINT; a second one gives back what is held.

    Exit code 143 when it was told to end before the run that it was given had ended, so that a supervisor starts it again.
    """
    from agentlightning.rehearsal import find_program
    from agentlightning.store import open_store
    from agentlightning.worker import work

    program = find_program(settings.program)
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))

    def begun(worker: str) -> None:
        if as_json:
            print_line({"event": "begun", "worker": worker, "program": program.name})
        else:
            console().print(f"worker {worker} runs {program.name}; Ctrl-C or SIGTERM ends it in order", markup=False)

    with closing(open_store(settings.store, create=False)) as store:
        report = work(
            store,
            program,
            concurrency=settings.concurrency,
            run=settings.run,
            processes=settings.processes,
            lease_s=settings.lease_s,
            drain_s=settings.drain_s,
            told=lambda: len(signals),
            begun=begun,
        )
    if as_json:
        print_line({"event": "ended", **msgspec.to_builtins(report)})
    else:
        console().print(_told(msgspec.to_builtins(report)), markup=False)
    if signals and settings.run:
        raise typer.Exit(128 + signal.SIGTERM)


def print_line(value: dict[str, Any]) -> None:
    """One JSON object a line, at once."""
    typer.echo(msgspec.json.encode(value))


def _told(report: dict[str, Any]) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in report.items() if name != "worker" and count)
    return f"worker {report['worker']} has ended: {counts or 'no rollout came'}"


def render_job(settings: Settings, pods: Pods) -> None:
    """Prints the Job as JSON, which `kubectl apply -f -` takes as it is."""
    print_json(job(settings, pods))


def job(settings: Settings, pods: Pods) -> dict[str, Any]:
    """A batch/v1 Job of `pods.count` workers with these settings; it is complete when their run is.

    Raises ConfigError for what cannot work in a cluster.
    """
    _refuse(settings, pods)
    arguments = ["worker", settings.program, "--store", settings.store, "-n", str(settings.concurrency), "--json"]
    arguments += ["--run", settings.run] if settings.run else []
    arguments += ["--processes"] if settings.processes else []
    arguments += ["--lease", f"{settings.lease_s:g}"] if settings.lease_s != Settings("", "").lease_s else []
    drain_s = GRACE_S if settings.drain_s is None else settings.drain_s
    container: dict[str, Any] = {
        "name": "worker",
        "image": pods.image,
        "command": ["agl"],
        "args": [*arguments, "--drain", f"{drain_s:g}"],
    }
    if pods.secret:
        source = {"secretKeyRef": {"name": pods.secret, "key": KEY}}
        container["env"] = [{"name": KEY, "valueFrom": source}]
    labels = {"app.kubernetes.io/name": "agl-worker", "app.kubernetes.io/instance": pods.name}
    # One that ends well has seen its run end, so the others may; one that fails is started again.
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": pods.name, "labels": labels},
        "spec": {
            "parallelism": pods.count,
            "backoffLimit": 6 * pods.count,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "restartPolicy": "OnFailure",
                    "terminationGracePeriodSeconds": int(drain_s) + 30,
                    "containers": [container],
                },
            },
        },
    }


def _refuse(settings: Settings, pods: Pods) -> None:
    if not settings.store.startswith(("http://", "https://", "postgres")):
        raise ConfigError(
            f"--store {settings.store}: pods reach a store over the network; serve it with `agl store serve` and give its "
            "http:// URL, or use a postgresql:// one."
        )
    if re.search(r"://[^/@]*:[^/@]*@", settings.store):
        raise ConfigError(
            "the store's URL holds a password, which everybody who sees the Job could read: use a server's key."
        )
    if settings.program.rpartition(":")[0].endswith(".py"):
        raise ConfigError(f"{settings.program} is a file of this machine: give a module that the image has.")
    if not pods.image or pods.count < 1:
        raise ConfigError(
            "--render-k8s needs --image with the program and this library in it, and --pods of at least 1."
        )
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", pods.name):
        raise ConfigError(f"--name {pods.name!r} is no name in Kubernetes: use lower-case letters, digits and dashes.")
