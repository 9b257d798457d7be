"""Which requests are answered: a pure judgement of their headers.

A browser sends requests for whichever page is open in it, so that a request comes from this machine proves nothing.
The host name must be one of ours (a foreign name that was made to point here would share our origin), and whatever a
foreign page sent is refused. Reading needs no token on loopback. Controls need it always, in a header that no foreign
page can set: a cookie does not do for them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Collection, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

import msgspec

CONTROLS = "/api/control/"
READ = ("GET", "HEAD")
OUR_SITE = ("same-origin", "none")  # none: the person typed the address, or took a bookmark
MAX_FIELDS = 16  # of a query


class Asked(msgspec.Struct, frozen=True):
    """What of a request is judged. Names of headers in lower case; one that came twice has both values."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]

    def header(self, name: str) -> str:
        return self.headers.get(name, "")


class Refusal(NamedTuple):
    status: int
    why: str


class Guard:
    """Judges for one dashboard. `names`: hosts beside loopback and bare addresses that it is reached by."""

    def __init__(self, token: str, names: Collection[str] = (), open_reading: bool = True) -> None:
        self._token = token
        self._names = {name.lower() for name in names} | {"localhost"}
        self.open_reading = open_reading
        # Cookies are shared by all ports of a host: the name keeps two dashboards apart, and the value tells other
        # servers of the host that are sent it too nothing about the token.
        self.cookie_name = f"everstep-{_derived(token, 'name of the cookie')[:8]}"
        self.cookie = _derived(token, "cookie")

    def judge(self, asked: Asked) -> Refusal | None:
        """Why a request is refused; None: it is not."""
        return self._wrong_host(asked) or self._foreign(asked) or _wrong_method(asked) or self._unproven(asked)

    def admits(self, asked: Asked) -> bool:
        """It carries the token in its address, as people are told to open the page first: it is to get the cookie."""
        return asked.method in READ and asked.path == "/" and self._is_token(_token_of(asked.query))

    def _wrong_host(self, asked: Asked) -> Refusal | None:
        host = _host_name(asked.header("host"))
        if host in self._names or _is_address(host):
            return None
        return Refusal(421, f"the host name {host[:80]!r} is not one of this dashboard (dashboard.names)")

    def _foreign(self, asked: Asked) -> Refusal | None:
        origin, site = asked.header("origin"), asked.header("sec-fetch-site")
        if origin and origin.partition("://")[2].lower() != asked.header("host").lower():
            return Refusal(403, f"a page of {origin[:80]!r} asked, which is another site")
        if site and site not in OUR_SITE and not _is_visit(asked):
            return Refusal(403, "a page of another site asked")
        if asked.method not in READ and not origin:
            return Refusal(403, "no Origin header: controls are for the dashboard's own page")
        return None

    def _unproven(self, asked: Asked) -> Refusal | None:
        scheme, _, bearer = asked.header("authorization").partition(" ")
        proven = scheme.lower() == "bearer" and self._is_token(bearer.strip())
        if proven:
            return None
        if asked.path.startswith(CONTROLS):
            what = "this is not the token: it is in" if bearer.strip() else "controls need the token in"
            return Refusal(401, f"{what} dashboard.token in the run folder")
        if self.open_reading or self._has_cookie(asked) or self.admits(asked):
            return None
        return Refusal(401, "the token is needed (dashboard.token in the run folder): open /?token=TOKEN once")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    def _has_cookie(self, asked: Asked) -> bool:
        pairs = (part.strip().partition("=") for part in asked.header("cookie").split(";"))
        found = [value for name, _, value in pairs if name == self.cookie_name]
        return any(hmac.compare_digest(value.encode(), self.cookie.encode()) for value in found)


def _wrong_method(asked: Asked) -> Refusal | None:
    if asked.method in (("POST",) if asked.path.startswith(CONTROLS) else READ):
        return None
    return Refusal(405, f"{asked.method[:20]!r} is not for {asked.path[:80]!r}")


def _is_visit(asked: Asked) -> bool:
    """A person followed a link of another site to the page itself."""
    modes = (asked.header("sec-fetch-mode"), asked.header("sec-fetch-dest"))
    return asked.method == "GET" and asked.path == "/" and modes == ("navigate", "document")


def _host_name(text: str) -> str:
    """Of a Host header, without the port; empty when it is none."""
    name, colon, port = text.lower().rpartition(":")
    if not colon or text.endswith("]"):
        return text.lower()
    return name if port.isdecimal() else ""


def _is_address(host: str) -> bool:
    """A bare address: no name server has a say in it."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _token_of(query: str) -> str:
    try:
        return dict(parse_qsl(query, max_num_fields=MAX_FIELDS)).get("token", "")
    except ValueError:  # there are more
        return ""


def _derived(token: str, label: str) -> str:
    return hmac.new(token.encode(), f"everstep dashboard {label}".encode(), hashlib.sha256).hexdigest()
