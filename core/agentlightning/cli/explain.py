"""`agl explain`: how rewards became advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentlightning.cli.output import SHORT, console, line, opened, print_json
from agentlightning.cli.show import one_record
from agentlightning.errors import NotFound
from agentlightning.explain import CallStory, Story, comparison, explain

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from agentlightning.store.base import Store


def print_explanation(beginning: str, url: str, as_json: bool) -> None:
    with opened(url) as store:
        story = explain(store, _rollout(store, one_record(store, beginning)))
    if as_json:
        print_json(story)
    else:
        console().print(_tree(story))


def _rollout(store: Store, record: str) -> str:
    if any(run.id == record for run in store.runs()):
        raise NotFound(f"{record} is a run: name one of its rollouts (`agl show {record[:SHORT]}` lists them).")
    return record if store.rollouts(ids=[record]) else store.trace(record).rollout.id


def _tree(story: Story) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    rollout = story.rollout
    outcome = rollout.outcome.value if rollout.outcome else rollout.state.value
    step = f"step {rollout.step}" + ("" if story.finished else " (not finished)")
    tree = Tree(Text(f"rollout {rollout.id[:SHORT]}  {step}  {rollout.mode}  {outcome}  {line(rollout.task, 60)}"))
    agents: dict[str, Tree] = {}
    for call in story.calls:
        if call.path not in agents:
            agents[call.path] = _agent(tree, call)
        agents[call.path].add(_call(call))
    if not story.calls:
        tree.add(Text("no model call"))
    return tree


def _agent(tree: Tree, call: CallStory) -> Tree:
    from rich.text import Text

    chosen = f"chosen by agents=[{call.selector!r}]" if call.selector else "not chosen by agents="
    node = tree.add(Text(f"agent {line(call.path)}  {chosen}", style="bold"))
    total = "none" if call.total is None else f"{call.total:.4g}"
    rewards = node.add(Text(f"return {total}, the sum of"))
    for part in call.parts:
        value = "-" if part.value is None else f"{part.value:.4g}"
        if part.value is not None or not part.target.startswith("call:"):
            rewards.add(Text(f"{line(part.target)}  {value}  {line(part.rule, 200)}"))
    if call.group:
        node.add(Text(f"compared with {comparison(call)}"))
    return node


def _call(call: CallStory) -> Text:
    from rich.text import Text

    head = f"call {call.id[:SHORT]}  {call.prompt_tokens} + {call.response_tokens} tokens"
    if call.fork:
        head += f"  ({call.fork}. {call.fork_cure}".rstrip(" .") + ")"
    if call.left_out:
        return Text(head).append(f"  left out: {call.left_out}  {call.cure}".rstrip(), style="yellow")
    return Text(head).append(f"  advantage {call.advantage:+.4g} on each of its {call.response_tokens} tokens", "green")
