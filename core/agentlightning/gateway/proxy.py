"""Asks the engine and answers the client: retries, streaming, and a record whatever happens.

The record is always handed to the writer before the client has the end of its answer, so that `flush` after the
program's last call is a true barrier.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from agentlightning.gateway.budget import FULL, Budgets, is_full
from agentlightning.gateway.call import Call
from agentlightning.gateway.capture import Capture, take
from agentlightning.gateway.checks import explain
from agentlightning.gateway.dialects import Speech, engine_problem
from agentlightning.gateway.gate import Gate
from agentlightning.gateway.problems import Problem, Send, respond
from agentlightning.gateway.replicas import Replicas
from agentlightning.gateway.sampling import shape
from agentlightning.gateway.stream import StreamCapture
from agentlightning.gateway.upstream import Answer, Cut, Unreachable, Upstream
from agentlightning.gateway.wire import dumps, loads
from agentlightning.gateway.writer import Writer

logger = logging.getLogger("agentlightning.gateway")

TRANSIENT = frozenset({429, 503})
"""Statuses that are tried again; all others are the client's to see at once."""
TRIES = 5
BACKOFF_S = 0.1
"""Before the second try; doubles with each further one."""
LONGEST_WAIT_S = 5.0
"""`Retry-After` is obeyed up to this; the client gets an engine's longer one to obey itself."""
REFUSED_FIELD = frozenset({400, 422})
"""What an endpoint that does not know `return_token_ids` may answer."""

FORWARDED = frozenset({b"content-type", b"retry-after", b"x-request-id", b"x-agl-version"})
"""Headers of the engine's answer that the client gets."""


class Proxy:
    """Serves calls that are ready to go. `sleep(seconds)` is awaited between tries."""

    def __init__(self, writer: Writer, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.stats: Counter[str] = Counter()
        self._writer, self._sleep = writer, sleep
        self._upstream = Upstream()
        self._budgets = Budgets(self._upstream)
        self.gate, self._replicas = Gate(), Replicas()
        self._plain: set[str] = set()
        """Base URLs that refused the token fields."""

    def close(self) -> None:
        self._upstream.close()

    async def serve(self, call: Call, send: Send) -> str | None:
        """Answers; returns the defect of the call (its first choice), None for a good one."""
        stream = StreamCapture(call.keep, call.n, call.speech)
        try:
            if call.target.policy is None:
                return await self._answer(call, stream, send)
            async with self.gate.passing():
                return await self._answer(call, stream, send)
        except Problem as problem:
            reason = "over_budget" if problem.code == FULL else "error_status"
            return await self._fail(call, stream.capture, reason, problem, send)
        except (Unreachable, Cut) as error:
            reason = "upstream_cut" if isinstance(error, Cut) else "upstream_unreachable"
            return await self._fail(call, stream.capture, reason, Problem(502, reason, str(error)), send)
        except asyncio.CancelledError:
            if call.stopped is None:
                raise
            call.task.uncancel()
            gone = Problem(410, "attempt_cancelled", "this attempt was cancelled while the model answered: stop here.")
            return await self._fail(call, stream.capture, call.stopped, gone, send)
        except Exception as error:  # a defect of ours: the call is kept and the client told
            logger.exception("the gateway failed on model call %s", call.id)
            ours = Problem(500, "gateway_error", f"the gateway failed ({type(error).__name__}): see its log.")
            return await self._fail(call, stream.capture, "gateway_error", ours, send)

    async def _answer(self, call: Call, stream: StreamCapture, send: Send) -> str | None:
        await self._budgets.admit(call)
        call.bases = self._replicas.order(call.target, call.place.rollout.id if call.place else "")
        async with await self._ask(call) as answer:
            if answer.is_stream and answer.status == 200:
                return await self._stream(call, answer, stream, send)
            return await self._whole(call, answer, send)

    async def _ask(self, call: Call) -> Answer:
        """The engine's answer, after as many tries as are sensible. Raises Unreachable or Cut after the last one."""
        while True:
            try:
                answer = await self._post(call)
                if answer.status in REFUSED_FIELD and self._without_ids(call):
                    async with answer:
                        continue
                wait = self._wait_before_next(call, answer)
                if wait is None:
                    return answer
                async with answer:
                    call.tries.append(f"status {answer.status}")
            except (Unreachable, Cut) as error:
                self._replicas.silent(call.bases[0])
                call.bases = [*call.bases[1:], call.bases[0]]
                if len(call.tries) + 1 >= TRIES:
                    raise
                wait = BACKOFF_S * 2 ** len(call.tries)
                call.tries.append(str(error))
            self.stats["upstream_retries"] += 1
            await self._sleep(wait)

    async def _post(self, call: Call) -> Answer:
        base = call.bases[0]
        answer = await self._upstream.post(f"{base.rstrip('/')}/{call.path}", call.headers(), dumps(call.asked))
        self._replicas.answered(base)
        return answer

    def _without_ids(self, call: Call) -> bool:
        """Makes `call` one without token fields, where the endpoint need not know them; False when it must."""
        if call.target.policy is not None or "return_token_ids" not in call.asked:
            return False
        plain = shape(call.request, call.target, None, None, ids=False)
        if "return_token_ids" in plain:
            return False
        call.asked = plain
        self._plain.add(call.target.base_url)
        return True

    def knows_ids(self, base_url: str) -> bool:
        """False for an endpoint that has refused the token fields."""
        return base_url not in self._plain

    def _wait_before_next(self, call: Call, answer: Answer) -> float | None:
        """Seconds before the next try; None when this answer is the one for the client."""
        if answer.status not in TRANSIENT or len(call.tries) + 1 >= TRIES:
            return None
        told = answer.headers.get(b"retry-after", b"")
        wait = float(told) if told.replace(b".", b"", 1).isdigit() else BACKOFF_S * 2 ** len(call.tries)
        return wait if wait <= LONGEST_WAIT_S else None

    async def _whole(self, call: Call, answer: Answer, send: Send) -> str | None:
        body = await answer.read()
        capture = Capture()
        reason = None
        if answer.status != 200:
            reason, capture.error = "error_status", {"status": answer.status, "body": _readable(body)}
            if is_full(answer.status, body):
                reason = "over_budget"
                body = Problem(400, FULL, engine_problem(400, _readable(body)).detail).body()
        else:
            try:
                body = take(capture, body, call.keep) or body
            except ValueError as error:
                capture.malformed = f"no JSON: {error}"
        status, body = _spoken(call.speech, capture, answer.status, body) if call.speech else (answer.status, body)
        found = self.keep(call, capture, _stamp(answer), reason)
        call.answering = call.answered = True
        await respond(send, status, body, self._head(call, answer))
        return found

    async def _stream(self, call: Call, answer: Answer, stream: StreamCapture, send: Send) -> str | None:
        call.answering = True
        await send({"type": "http.response.start", "status": 200, "headers": self._head(call, answer)})
        async for chunk in answer.chunks():
            shown = stream.feed(chunk)
            if shown:
                await send({"type": "http.response.body", "body": shown, "more_body": True})
        tail = stream.tail()
        if call.speech is not None and stream.finished:
            call.speech.remember(stream.capture.choice(0).message)
        found = self.keep(call, stream.capture, _stamp(answer), None)
        call.answered = True
        await send({"type": "http.response.body", "body": tail})
        return found

    async def _fail(self, call: Call, capture: Capture, reason: str, problem: Problem, send: Send) -> str | None:
        """Records what came so far, and tells the client, if it is still there, in the way that is still open."""
        if capture.error is None and not capture.choices:
            capture.error = problem.detail
        found = self.keep(call, capture, None, reason)
        call.answered = True
        if reason == "client_disconnected":
            return found
        if call.answering:
            told = call.speech.fail(problem) if call.speech else problem.event()
            await send({"type": "http.response.body", "body": told})
        else:
            await problem.answer(send, call.speech.error(problem) if call.speech else None)
        return found

    def keep(self, call: Call, capture: Capture, stamp: int | None, reason: str | None) -> str | None:
        """Hands the records of a call to the writer; returns the defect of its first choice."""
        records = call.completions(capture, stamp, reason)
        told = capture.completion_tokens if isinstance(capture.completion_tokens, int) else 0
        self._budgets.settle(call, max(told, sum(len(record.response_ids) for record in records)))
        for record in records:
            self.stats["completions"] += 1
            if record.defect:
                self.stats[f"defect:{record.defect}"] += 1
                choice = capture.choices.get(record.choice)
                details = explain(capture, choice) if choice else capture.error
                logger.warning("model call %s of agent %s: %s: %s", record.id, record.path, record.defect, details)
        span = call.retry_span()
        self._writer.put(*records, *([span] if span else ()))
        return records[0].defect

    def _head(self, call: Call, answer: Answer) -> list[tuple[bytes, bytes]]:
        head = [(name, value) for name, value in answer.headers.items() if name in FORWARDED]
        return [*head, (b"x-agl-completion", call.id.encode()), (b"x-agl-tries", b"%d" % (len(call.tries) + 1))]


def _stamp(answer: Answer) -> int | None:
    value = answer.headers.get(b"x-agl-version", b"")
    return int(value) if value.isdigit() else None


def _spoken(speech: Speech, capture: Capture, status: int, body: bytes) -> tuple[int, bytes]:
    """A whole answer in the client's dialect."""
    if status != 200:
        return status, speech.error(engine_problem(status, _readable(body)))
    try:
        if capture.malformed is None:
            spoken = speech.answer(loads(body))
            speech.remember(capture.choice(0).message)
            return status, spoken
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        capture.malformed = f"an answer of a shape nobody defined: {error!r}"
    told = f"the engine's answer cannot be read ({capture.malformed}): see the engine's log."
    return 502, speech.error(Problem(502, "bad_response", told))


def _readable(body: bytes) -> object:
    try:
        return loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")[:2000]
