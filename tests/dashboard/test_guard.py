"""Which requests are refused, by their headers alone."""

from __future__ import annotations

import pytest

from everstep.dashboard.guard import Asked, Guard

TOKEN = "0123456789abcdef" * 4
OURS = "localhost:7070"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PAGE = {"origin": "http://localhost:7070", "sec-fetch-site": "same-origin"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def judged(guard: Guard, target: str, method: str = "GET", **headers: str) -> int:
    """The status of the refusal; 0: there is none."""
    path, _, query = target.partition("?")
    fields = {"host": OURS} | {name.replace("_", "-"): value for name, value in headers.items()}
    refusal = guard.judge(Asked(method, path, query, fields))
    return refusal.status if refusal else 0


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:7070", "[::1]:8080", "10.0.0.7:1", "Dash.Example:80"])
def test_our_names_and_bare_addresses_are_served(host: str) -> None:
    assert judged(Guard(TOKEN, ("dash.example",)), "/api/view", host=host) == 0


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:7070", "localhost.evil.example", "127.0.0.1.evil.example:7070", "a:b", "[::1"],
)
def test_a_foreign_name_that_points_here_is_refused(host: str) -> None:
    assert judged(Guard(TOKEN, ("dash.example",)), "/api/view", host=host) == 421


def test_pages_of_other_sites_are_refused() -> None:
    guard = Guard(TOKEN)
    assert judged(guard, "/api/view", **PAGE) == 0
    assert judged(guard, "/api/view", sec_fetch_site="none") == 0
    for origin in ("http://evil.example", "null", "http://localhost:9999", "http://localhost:7070.evil.example", "x"):
        assert judged(guard, "/api/view", origin=origin) == 403, origin
        assert judged(guard, "/api/control/stop", "POST", origin=origin, **BEARER) == 403, origin
    for site in ("cross-site", "same-site", "anything"):
        assert judged(guard, "/api/view", sec_fetch_site=site) == 403, site
    assert judged(guard, "/", **{name.replace("-", "_"): value for name, value in LINK.items()}) == 0
    assert judged(guard, "/api/view", **{name.replace("-", "_"): value for name, value in LINK.items()}) == 403


def test_controls_need_the_token_in_a_header_and_our_page() -> None:
    for guard in (Guard(TOKEN), Guard(TOKEN, open_reading=False)):
        cookie = f"{guard.cookie_name}={guard.cookie}"
        assert judged(guard, "/api/control/save", "POST", **BEARER, **PAGE) == 0
        assert judged(guard, "/api/control/save", "POST", **BEARER) == 403  # no Origin
        assert judged(guard, "/api/control/save", "POST", **PAGE) == 401
        assert judged(guard, "/api/control/save", "POST", **PAGE, cookie=cookie) == 401
        assert judged(guard, f"/api/control/save?token={TOKEN}", "POST", **PAGE) == 401
        for wrong in (f"Bearer {TOKEN}0", f"Bearer {TOKEN[:-1]}", "Bearer ", f"Basic {TOKEN}", "Bearer \u00e9", TOKEN):
            assert judged(guard, "/api/control/save", "POST", **PAGE, authorization=wrong) == 401, wrong
        for held, why in (({}, "controls need the token in"), ({"authorization": f"Bearer {TOKEN}0"}, "not the token")):
            refusal = guard.judge(Asked("POST", "/api/control/save", "", {"host": OURS, **PAGE, **held}))
            assert refusal and why in refusal.why
        assert judged(guard, "/api/control/save", **BEARER) == 405
        assert judged(guard, "/api/view", "POST", **BEARER, **PAGE) == 405
        assert judged(guard, "/api/view", "DELETE", **BEARER, **PAGE) == 405


def test_away_from_loopback_everything_needs_the_token() -> None:
    guard, other = Guard(TOKEN, open_reading=False), Guard("f" * 64, open_reading=False)
    for path in ("/", "/static/app.js", "/api/view", "/api/stream", "/metrics"):
        assert judged(guard, path) == 401
        assert judged(guard, path, **BEARER) == 0
        assert judged(guard, path, cookie=f"a=b; {guard.cookie_name}={guard.cookie}") == 0
        assert judged(guard, path, cookie=f"{guard.cookie_name}={TOKEN}") == 401
        assert (
            judged(guard, path, cookie=f"{other.cookie_name}={other.cookie}; {guard.cookie_name}={other.cookie}") == 401
        )
    assert judged(guard, f"/?token={TOKEN}") == 0
    assert judged(guard, f"/api/view?token={TOKEN}") == 401  # only the page's own address takes it
    assert judged(guard, "/?token=wrong") == 401
    assert judged(guard, "/?" + "&".join(["token=x"] * 999)) == 401
    assert guard.admits(Asked("GET", "/", f"a=1&token={TOKEN}", {}))
    assert not guard.admits(Asked("GET", "/", "token=", {}))
    assert TOKEN not in guard.cookie and guard.cookie_name != other.cookie_name
