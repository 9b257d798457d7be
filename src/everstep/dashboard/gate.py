"""The outermost layer of the server: refuses what the guard refuses, bounds bodies, adds the headers of every answer.

An ASGI middleware, without a framework: what is refused here has not touched anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from everstep.dashboard.guard import READ, Asked, Guard, Refusal
from everstep.dashboard.notes import Notes

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY = 64 << 10
BODY_S = 10.0  # a body has this long to come
POLICY = b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
ALWAYS: Headers = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NO_STORE: Headers = [(b"cache-control", b"no-store")]
JSON: Headers = [(b"content-type", b"application/json")]
CLOSE: Headers = [(b"connection", b"close")]  # what else its sender has to say is not read


class Gate:
    """`app` behind a guard."""

    def __init__(self, app: App, guard: Guard, notes: Notes) -> None:
        self._app, self._guard, self._notes = app, guard, notes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server has neither a lifespan nor WebSockets"
        asked, send = _asked(scope), _with_headers(send, scope["path"])
        refusal = self._guard.judge(asked) or _wrong_length(asked)
        if refusal is None and self._guard.admits(asked):
            await self._let_in(send)
        elif refusal is None and asked.method in READ:
            await self._app(scope, receive, send)
        elif refusal is None:
            body = await _read(receive)
            if isinstance(body, Refusal):
                await self._refuse(scope, asked, body, send)
            else:
                await self._app(scope, _replay(body, receive), send)
        else:
            await self._refuse(scope, asked, refusal, send)

    async def _let_in(self, send: Send) -> None:
        """The cookie, and the page again without the token in its address."""
        cookie = f"{self._guard.cookie_name}={self._guard.cookie}; HttpOnly; SameSite=Strict; Path=/"
        await respond(send, 303, b"", [(b"location", b"/"), (b"set-cookie", cookie.encode()), *NO_STORE])

    async def _refuse(self, scope: MutableMapping[str, Any], asked: Asked, refusal: Refusal, send: Send) -> None:
        who = (scope.get("client") or ("somebody",))[0]
        self._notes.say(f"refused {asked.method[:20]!a} {asked.path[:80]!a} of {who}: {refusal.why}")
        more = [(b"www-authenticate", b"Bearer")] if refusal.status == 401 else []
        await respond(send, refusal.status, error(refusal.why), [*JSON, *CLOSE, *more])


def error(why: str) -> bytes:
    return msgspec.json.encode({"error": why})


async def respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


def _asked(scope: MutableMapping[str, Any]) -> Asked:
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Asked(scope["method"], scope["path"], scope["query_string"].decode("latin-1"), headers)


def _wrong_length(asked: Asked) -> Refusal | None:
    """Told before the body is read, where its sender says how long it is."""
    length = asked.header("content-length")
    if length.isdecimal() and int(length) > MAX_BODY:
        return Refusal(413, f"a body of {length[:20]} bytes; at most {MAX_BODY} are taken")
    if asked.method in READ and (length not in ("", "0") or asked.header("transfer-encoding")):
        return Refusal(400, f"a {asked.method} has no body")
    return None


async def _read(receive: Receive) -> bytes | Refusal:
    body, more = b"", True
    try:
        async with asyncio.timeout(BODY_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return Refusal(400, "the connection ended before the body")
                body, more = body + message.get("body", b""), message.get("more_body", False)
                if len(body) > MAX_BODY:
                    return Refusal(413, f"the body has more than {MAX_BODY} bytes")
    except TimeoutError:
        return Refusal(408, f"the body did not come within {BODY_S:.0f} s")
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, for the application; then whatever else comes."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return pending.pop() if pending else await receive()

    return again


def _with_headers(send: Send, path: str) -> Send:
    own = [*ALWAYS, *NO_STORE] if path.startswith(("/api/", "/metrics")) else ALWAYS

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *own]
        await send(message)

    return sending
