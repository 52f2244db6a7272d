"""Prompts as resources: a text with named gaps that rollouts read and algorithms rewrite, version by version.

    writer = agl.PromptTemplate("Answer in one word: {question}")

    @agl.rollout
    def solve(task, policy, writer):                 # by parameter name
        text = writer.format(question=task["question"])

Which gaps a template has is a fact about the program that fills them. So a rewrite that lost one, or wants one that nobody
fills, is refused before anything is run with it: see `refusal`.
"""

from __future__ import annotations

import string
from typing import Any

import msgspec

from agentlightning.errors import ConfigError, PromptError
from agentlightning.schema import Resource

KIND = "prompt"
"""Of resources that hold a template."""
FORMATS = ("f-string", "jinja2")


class PromptTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text with gaps. Raises PromptError for a text that cannot be read in its format, ConfigError for another format."""

    text: str
    syntax: str = "f-string"
    """`f-string`: `{name}`, as `str.format` fills it, with `{{` for a brace. `jinja2`: `{{ name }}`, with loops and filters,
    in a sandbox (extra `apo`)."""

    def __post_init__(self) -> None:
        if self.syntax not in FORMATS:
            raise ConfigError(f"syntax={self.syntax!r}: choose one of {', '.join(FORMATS)}.")
        if not isinstance(self.text, str):
            raise PromptError(f"the text of a prompt is a {type(self.text).__name__}: give a str.")
        _ = self.placeholders

    @property
    def placeholders(self) -> frozenset[str]:
        """Names of the gaps."""
        return _undeclared(self.text) if self.syntax == "jinja2" else _fields(self.text)

    def format(self, **values: Any) -> str:
        """The text with its gaps filled. Raises PromptError that names each gap without a value, and each value without a
        gap."""
        missing, unknown = sorted(self.placeholders - set(values)), sorted(set(values) - self.placeholders)
        if missing or unknown:
            told = [f"no value for {{{name}}}" for name in missing] + [f"no gap {{{name}}}" for name in unknown]
            raise PromptError(
                f"the prompt cannot be filled: {', '.join(told)}; its gaps are {_told(self.placeholders)}. "
                "Give format() exactly these."
            )
        try:
            return _rendered(self.text, values) if self.syntax == "jinja2" else self.text.format(**values)
        except Exception as error:
            raise PromptError(f"the prompt cannot be filled, {type(error).__name__}: {error}.") from error

    def with_text(self, text: str) -> PromptTemplate:
        """The same syntax with another text."""
        return PromptTemplate(text, self.syntax)

    def __str__(self) -> str:
        return self.text


def refusal(seed: PromptTemplate, text: object) -> str | None:
    """Why `text` cannot stand in for `seed` in a program that fills the seed's gaps; None when it can."""
    if not isinstance(text, str) or not text.strip():
        return f"it is no text but {type(text).__name__}" if not isinstance(text, str) else "it is empty"
    try:
        found = seed.with_text(text).placeholders
    except PromptError as error:
        return str(error)
    lost, new = sorted(seed.placeholders - found), sorted(found - seed.placeholders)
    told = [f"it lost {{{name}}}" for name in lost] + [f"it has {{{name}}}, which nothing fills" for name in new]
    return ", ".join(told) or None


def resource_of(name: str, version: int, template: PromptTemplate) -> Resource:
    """The template as a resource of a run."""
    return Resource(name, version, KIND, msgspec.to_builtins(template))


def template_of(resource: Resource) -> PromptTemplate:
    """The template in a resource. Raises ConfigError for one that holds something else."""
    try:
        return msgspec.convert(resource.value, PromptTemplate)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"resource {resource.name!r} version {resource.version} is no prompt ({error}): publish "
            "`prompts.resource_of(name, version, PromptTemplate(...))`, or use another kind than 'prompt'."
        ) from error


def _fields(text: str) -> frozenset[str]:
    cure = "write {{ and }} for braces that are no gap"
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise PromptError(f"the prompt cannot be read ({error}): {cure}.") from error
    names = set()
    for _, name, spec, _ in parts:
        if name is None:
            continue
        if not name.isidentifier() or "{" in (spec or ""):
            raise PromptError(f"the prompt has the gap {{{name}}}, which is no plain name: {cure}.")
        names.add(name)
    return frozenset(names)


def _undeclared(text: str) -> frozenset[str]:
    jinja2 = _jinja2()
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment(jinja2).parse(text)))
    except jinja2.TemplateError as error:
        raise PromptError(f"the prompt is no jinja2 ({error}): correct it, or use syntax='f-string'.") from error


def _rendered(text: str, values: dict[str, Any]) -> str:
    rendered: str = _environment(_jinja2()).from_string(text).render(values)
    return rendered


def _environment(jinja2: Any) -> Any:
    # A prompt may have been written by a model: it must not reach into the objects that it is filled with.
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


def _jinja2() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ConfigError("syntax='jinja2' needs jinja2: run `pip install jinja2`.") from error
    return jinja2


def _told(names: frozenset[str]) -> str:
    return ", ".join(f"{{{name}}}" for name in sorted(names)) or "none"
