"""The `agl` command: what a store holds, for people and (`--json`) for programs.

Commands import what they need when they run, so that `agl --help` answers at once. Whatever goes wrong on purpose is
one line on stderr that names the cure, and exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from agentlightning.errors import AgentLightningError

app = typer.Typer(
    help="Look into what agents did and what training made of it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StoreUrl = Annotated[str, typer.Option("--store", envvar="AGL_STORE", help="URL of the store.", metavar="URL")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with everything, for programs.")]
DEFAULT_STORE = "sqlite:///agl.db"


@app.callback()
def _agl() -> None:
    """Makes each command a word of its own, however few there are."""


@app.command()
def runs(store: StoreUrl = DEFAULT_STORE, json: AsJson = False) -> None:
    """List the runs, oldest first."""
    from agentlightning.cli.runs import print_runs

    print_runs(store, json)


@app.command()
def show(
    record: Annotated[str, typer.Argument(help="Id of a run, rollout or attempt, or its beginning.", metavar="ID")],
    store: StoreUrl = DEFAULT_STORE,
    json: AsJson = False,
) -> None:
    """Show a rollout or one attempt as a tree: agents, calls, tokens, rewards. A run is shown as its rollouts."""
    from agentlightning.cli.show import print_record

    print_record(record, store, json)


Where = Annotated[str, typer.Argument(help="The program: MODULE:FUNCTION or FILE.py:FUNCTION.", metavar="PROGRAM")]
TaskText = Annotated[str, typer.Option("--task", help="One task as JSON, or @FILE (JSON, or JSON lines: the first).")]
EndpointUrl = Annotated[
    str, typer.Option("--endpoint", help="An OpenAI-compatible server that answers.", metavar="URL")
]
ModelName = Annotated[str, typer.Option("--model", help="Its model; without --endpoint, a folder to serve here.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="AGL_API_KEY", help="Its key.")]
Reply = Annotated[str, typer.Option("--reply", help="What a stand-in says where there is no model.")]
TimeLimit = Annotated[float, typer.Option("--timeout", help="Seconds that the program may take.")]


@app.command()
def doctor(
    program: Where,
    task: TaskText = "{}",
    agents: Annotated[str, typer.Option("--agents", help="Agents to train, separated by commas.")] = "*",
    endpoint: EndpointUrl = "",
    model: ModelName = "",
    api_key: ApiKey = "none",
    reply: Reply = "ok",
    timeout: TimeLimit = 120.0,
    json: AsJson = False,
) -> None:
    """Run a program once and check all that training needs. Exit code 1 when something keeps it from learning."""
    from agentlightning.cli.doctor import Answering, print_findings

    print_findings(program, task, agents, Answering(endpoint, model, api_key, reply), timeout, json)


@app.command()
def agents(
    program: Where,
    task: TaskText = "{}",
    endpoint: EndpointUrl = "",
    model: ModelName = "",
    api_key: ApiKey = "none",
    reply: Reply = "ok",
    timeout: TimeLimit = 120.0,
    json: AsJson = False,
) -> None:
    """Run a program once and list the agents that made calls, by the names that `agents=` takes."""
    from agentlightning.cli.agents import print_agents
    from agentlightning.cli.doctor import Answering

    print_agents(program, task, Answering(endpoint, model, api_key, reply), timeout, json)


@app.command()
def explain(
    record: Annotated[str, typer.Argument(help="Id of a rollout or attempt, or its beginning.", metavar="ID")],
    store: StoreUrl = DEFAULT_STORE,
    json: AsJson = False,
) -> None:
    """Show how rewards became the advantage of each call, with every rule that applied."""
    from agentlightning.cli.explain import print_explanation

    print_explanation(record, store, json)


store_app = typer.Typer(help="Serve a store to other machines.", no_args_is_help=True)
app.add_typer(store_app, name="store")


@store_app.command()
def serve(
    url: Annotated[str, typer.Argument(help="The store: sqlite:///runs.db, postgresql://...", metavar="STORE")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on; others need a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.")] = 4747,
    key: Annotated[str, typer.Option("--key", envvar="AGL_STORE_KEY", help="What every caller must bring.")] = "",
    most_mb: Annotated[int, typer.Option("--max-body-mb", help="The largest request, in MiB.")] = 256,
) -> None:
    """Serve a store over HTTP; others open it as http://HOST:PORT."""
    from agentlightning.cli.store import serve as serve_store

    serve_store(url, host, port, key, most_mb)


@store_app.command()
def key(attempt: Annotated[str, typer.Argument(help="Id of an attempt.", metavar="ATTEMPT")]) -> None:
    """Print the key that may write this attempt and nothing else (from AGL_STORE_KEY)."""
    from agentlightning.cli.store import print_attempt_key

    print_attempt_key(attempt)


@app.command()
def worker(
    program: Where,
    store: StoreUrl = DEFAULT_STORE,
    concurrency: Annotated[int, typer.Option("--concurrency", "-n", help="Rollouts at a time.")] = 1,
    run: Annotated[str, typer.Option("--run", help="Only this run, by name or id; ends when it has ended.")] = "",
    processes: Annotated[bool, typer.Option("--processes", help="Each rollout in a process of its own.")] = False,
    drain: Annotated[
        float | None, typer.Option("--drain", help="Seconds to finish what it holds when told to end.")
    ] = None,
    lease: Annotated[
        float, typer.Option("--lease", help="Seconds without a sign of life until others take over.")
    ] = 30.0,
    render_k8s: Annotated[bool, typer.Option("--render-k8s", help="Print a Kubernetes Job instead.")] = False,
    image: Annotated[str, typer.Option("--image", help="Of the Job's pods.")] = "",
    pods: Annotated[int, typer.Option("--pods", help="How many.")] = 1,
    name: Annotated[str, typer.Option("--name", help="Of the Job.")] = "agl-worker",
    key_secret: Annotated[str, typer.Option("--key-secret", help="Secret that holds AGL_STORE_KEY.")] = "",
    json: AsJson = False,
) -> None:
    """Run rollouts of a store's queue on this machine. SIGTERM: finish what it holds; a second one: give it back."""
    from agentlightning.cli.worker import Pods, Settings, render_job, run_worker

    settings = Settings(program, store, concurrency, run, processes, drain, lease)
    if render_k8s:
        render_job(settings, Pods(image, pods, name, key_secret))
    else:
        run_worker(settings, json)


def main(args: Sequence[str] | None = None) -> None:
    """Runs `agl` and ends the process: 0 when done, 2 for an error with its cure on stderr."""
    try:
        app(args=args, prog_name="agl")
    except AgentLightningError as error:
        typer.echo(f"agl: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2) from None
