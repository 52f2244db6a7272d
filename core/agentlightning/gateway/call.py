"""One model call on its way through the gateway, and the records it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from agentlightning.gateway.capture import Capture, Tokens, tokens
from agentlightning.gateway.checks import Ends, defect
from agentlightning.gateway.dialects import Speech
from agentlightning.gateway.directory import Place, Target
from agentlightning.gateway.identity import Caller
from agentlightning.gateway.sampling import Keep, sampling_of
from agentlightning.schema import Completion, Span, SpanKind, new_span_id, now_ns

Json = dict[str, Any]


class Call(msgspec.Struct, eq=False):
    """Made when a request has been understood; its task is the one that answers the client."""

    id: str
    """Id of the completion of choice 0; choice i has `<id>-<i>`."""
    caller: Caller
    place: Place | None
    """None: unattributed."""
    target: Target
    request: Json
    """As the client sent it; in chat completions' form, whatever it was sent in."""
    asked: Json
    """As the engine gets it."""
    keep: Keep
    ticket: tuple[bytes, int] | None
    """Of the seed; given back when the call fails."""
    task: asyncio.Task[None]
    path: str = "chat/completions"
    """Where the engine serves it, below its base URL."""
    speech: Speech | None = None
    """The dialect that the client speaks; None: chat completions."""
    start_ns: int = msgspec.field(default_factory=now_ns)
    stopped: str | None = None
    """Why we ended it ourselves: `cancelled`, `client_disconnected`."""
    answering: bool = False
    """The head of the answer is out."""
    answered: bool = False
    """All of it is: the client may go."""
    size: int = 0
    """Bytes of the request."""
    promised: int = 0
    """Tokens of its attempt's budget that it may use and has not yet used."""
    bases: list[str] = msgspec.field(default_factory=list)
    """Base URLs of the servers that may answer, the next one to try first."""
    tries: list[str] = msgspec.field(default_factory=list)
    """What went wrong in each try before the last one."""

    @property
    def attempt_id(self) -> str | None:
        return self.place.attempt.id if self.place else None

    @property
    def n(self) -> int:
        n = self.asked.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of a request to the endpoint on behalf of this call."""
        return [
            (b"authorization", b"Bearer " + self.target.api_key.encode()),
            (b"content-type", b"application/json"),
            (b"accept-encoding", b"identity"),
            (b"x-request-id", self.id.encode()),
        ]

    def stop(self, reason: str) -> None:
        """Ends the call: its task aborts the engine's request and records `reason`."""
        if self.stopped is None and not self.answered:
            self.stopped = reason
            self.task.cancel()

    def completions(self, capture: Capture, stamp: int | None, reason: str | None) -> list[Completion]:
        """One record per choice, at least one. `stamp`: version in the answer's head. `reason`: a defect of the
        whole call."""
        if not capture.choices:
            capture.choice(0)
        arrays = tokens(capture)
        sampled = sum(len(each.response_ids) for each in arrays.values())
        records, ends = [], Ends.of(self.asked, self.target.stop_ids)
        for index, each in arrays.items():
            choice = capture.choices[index]
            found = reason or self._beyond(each) or self._forgiven(defect(capture, choice, each, sampled, ends))
            records.append(self._completion(capture, index, each, stamp, found))
        return records

    def _beyond(self, each: Tokens) -> str | None:
        longest = self.target.budget.prompt
        return "over_budget" if longest is not None and len(each.prompt_ids) > longest else None

    def _forgiven(self, found: str | None) -> str | None:
        # An endpoint that is no policy owes us no tokens; the ledger calls it `not_policy`.
        return None if self.target.policy is None and found in ("no_token_ids", "no_logprobs") else found

    def _completion(
        self, capture: Capture, index: int, each: Tokens, stamp: int | None, reason: str | None
    ) -> Completion:
        choice = capture.choices[index]
        version = max(capture.versions) if capture.versions else stamp
        response = choice.message
        if capture.error is not None:
            response = {"error": capture.error}
        return Completion(
            id=f"{self.id}-{index}" if index else self.id,
            attempt_id=self.attempt_id,
            path=self.caller.path,
            span_id=self.caller.span_id,
            model=self.target.model,
            policy=self.target.policy,
            version=version if version is not None else self.target.version,
            prompt_ids=each.prompt_ids,
            response_ids=each.response_ids,
            logprobs=each.logprobs,
            finish_reason=choice.finish_reason or "",
            request=self.request,
            response=response,
            sampling=sampling_of(self.asked, self.target),
            choice=index,
            defect=reason,
            start_ns=self.start_ns,
            end_ns=now_ns(),
        )

    def retry_span(self) -> Span | None:
        """What is kept of the tries that failed before the engine answered; None when the first one worked."""
        if not self.tries or self.attempt_id is None:
            return None
        return Span(
            id=new_span_id(),
            attempt_id=self.attempt_id,
            kind=SpanKind.ANNOTATION,
            name="gateway.retry",
            parent_id=self.caller.span_id,
            path=self.caller.path,
            start_ns=self.start_ns,
            end_ns=now_ns(),
            attributes={"completion": self.id, "failed_tries": self.tries},
        )
