"""What runners on other machines ask of a gateway: is it there, refuse these attempts, commit what their clients have read.

The path holds a secret that the trainer publishes in the store. A gateway that was started again has another one, so that
nobody takes its word for calls that died with the one before.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.errors import GatewayError, StoreError
from agentlightning.gateway.problems import Problem

PREFIX = "/control"
MOST = 100_000
"""Attempts in one request."""


class Control:
    """`refuse` and `stop` are told of each attempt that is over; `flush` of those whose calls are to be committed."""

    def __init__(
        self,
        secret: str,
        refuse: Callable[[str], None],
        stop: Callable[[str], None],
        flush: Callable[[Collection[str]], None],
    ) -> None:
        self._secret, self._refuse, self._stop, self._flush = secret, refuse, stop, flush
        self.routes = [
            Route(f"{PREFIX}/{{secret}}", self._here),
            Route(f"{PREFIX}/{{secret}}/end", self._end, methods=["POST"]),
            Route(f"{PREFIX}/{{secret}}/flush", self._committed, methods=["POST"]),
        ]

    async def _here(self, request: Request) -> Response:
        self._check(request)
        return Response(status_code=204)

    async def _end(self, request: Request) -> Response:
        for attempt_id in await self._attempts(request):
            self._refuse(attempt_id)
            self._stop(attempt_id)
        return Response(status_code=204)

    async def _committed(self, request: Request) -> Response:
        attempt_ids = await self._attempts(request)
        try:
            await asyncio.to_thread(self._flush, attempt_ids)
        except StoreError as error:
            raise Problem(503, "store_away", str(error)) from error
        except GatewayError as error:
            raise Problem(500, "calls_lost", str(error)) from error
        return Response(status_code=204)

    def _check(self, request: Request) -> None:
        if not hmac.compare_digest(request.path_params["secret"].encode(), self._secret.encode()):
            raise Problem(
                410, "another_gateway", "this gateway was started again: read its address from the store again."
            )

    async def _attempts(self, request: Request) -> list[str]:
        self._check(request)
        try:
            found: list[str] = msgspec.json.decode(await request.body(), type=list[str])
        except msgspec.DecodeError as error:
            raise Problem(400, "bad_request", f"send a JSON list of attempt ids ({error}).") from error
        if len(found) > MOST:
            raise Problem(413, "too_many", f"send at most {MOST} attempts at once.")
        return found
