"""`agl show`: what happened in a rollout, as a tree of agents, calls, tools, rewards and errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.cli.output import console, opened, print_json
from agentlightning.errors import NotFound, StoreError

if TYPE_CHECKING:
    from agentlightning.store.base import Store


def print_record(beginning: str, url: str, as_json: bool) -> None:
    with opened(url) as store:
        found = one_record(store, beginning)
        run = next((run for run in store.runs() if run.id == found), None)
        if run is not None:
            from agentlightning.cli.runs import print_run

            print_run(store, run, as_json)
        else:
            _print_rollout(store, found, as_json)


def one_record(store: Store, beginning: str) -> str:
    """The only id that begins so."""
    if not beginning:
        raise StoreError("the id is empty: give an id or its beginning (`agl runs` lists runs).")
    found = [run.id for run in store.runs() if run.id.startswith(beginning)] + store.find(beginning)
    if beginning in found:
        return beginning
    if not found:
        raise NotFound(
            f"nothing in {store.url} has an id that begins with {beginning!r}: `agl runs` lists runs, `agl show RUN` their rollouts."
        )
    if len(found) > 1:
        raise StoreError(f"{beginning!r} is the beginning of several ids: give more digits of {', '.join(found)}.")
    return found[0]


def _print_rollout(store: Store, record_id: str, as_json: bool) -> None:
    known = store.rollouts(ids=[record_id])
    attempt_ids = [attempt.id for attempt in store.attempts(record_id)] if known else [record_id]
    traces = [store.trace(attempt_id) for attempt_id in attempt_ids]
    rollout = known[0] if known else traces[0].rollout
    if as_json:
        fields = ("attempt", "spans", "completions", "rewards")
        print_json(
            {"rollout": rollout, "attempts": [{name: getattr(trace, name) for name in fields} for trace in traces]}
        )
    else:
        from agentlightning.cli.tree import rollout_tree

        console().print(rollout_tree(rollout, traces))
