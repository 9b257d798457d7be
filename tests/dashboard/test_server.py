"""The server over real sockets: what it answers, what it refuses, and that nothing of that troubles it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import canned
import msgspec
import pytest
from serving import JOB, TOKEN, Dash, serving, writing

from everstep.core import events as e
from everstep.core import wire
from everstep.core.types import Blame
from everstep.dashboard import files, notes, serve
from everstep.dashboard.control import Question
from everstep.dashboard.gate import MAX_BODY

INCIDENT = e.IncidentOpened("i1", "crash", (Blame(1, "node0", "exit"),), "rank 1 died")


class Controller:
    """Answers as the job's controller does, and keeps what it was asked."""

    grace_s = 7.0

    def __init__(self) -> None:
        self.asked: list[Question] = []

    async def ask(self, question: Question) -> Mapping[str, Any] | str:
        self.asked.append(question)
        match question:
            case wire.DrainRequest("node9"):
                return {"refused": "there is no node9"}
            case wire.DrainRequest(target):
                return {"target": target}
            case wire.SaveRequest():
                return {"asked": 1}
            case wire.LookRequest("stacks", ("node9/0",)):
                return {"nothing": "node9 did not answer"}
            case wire.LookRequest(what):
                name = f"looks/0001-{what}{'.html' if what == 'profile' else '.txt'}"
                return {"what": what, "file": name, "summary": "there", "notes": {"0": "rank 0: stopped"}}
        return {}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with a journal, evidence, and things that are nobody's business."""
    with writing(tmp_path) as write:
        write(INCIDENT, e.StepsSeen(1, 5, 5, 1.0))
    for folder in ("incidents/i1", "logs/node0", "logs/sub"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "incidents/i1/stacks.txt").write_text("in forward\n")
    (tmp_path / "token").write_text("secret")
    (tmp_path / "logs/outside").symlink_to(tmp_path / "token")
    (tmp_path / "logs/up").symlink_to(tmp_path)
    (tmp_path / "logs/inside").symlink_to(tmp_path / "incidents/i1/stacks.txt")
    os.mkfifo(tmp_path / "logs/pipe")
    return tmp_path


def control(dash: Dash, verb: str, body: object, **headers: str) -> Any:
    ours = {"origin": f"http://localhost:{dash.port}", "authorization": f"Bearer {TOKEN}"}
    fields = {**ours, "content_type": "application/json", **headers}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return dash.ask("POST", f"/api/control/{verb}", data, **fields)


def test_what_is_served(run: Path) -> None:
    async def look() -> None:
        async with serving(run) as dash:
            page = await dash.ask("GET", "/")
            assert page.status == 200 and page.headers["content-type"].startswith("text/html")
            assert page.headers["content-security-policy"].startswith("default-src 'self';")
            assert {page.headers[name] for name in ("x-content-type-options", "referrer-policy")} == {
                "nosniff", "no-referrer",
            }  # fmt: skip
            again = await dash.ask("GET", "/", if_none_match=page.headers["etag"])
            assert (again.status, again.body) == (304, b"")
            info = (await dash.ask("GET", "/api/info")).json
            assert (info["mode"], info["job"], info["controls"], info["needs_token"]) == ("live", JOB, False, False)
            view = await dash.ask("GET", "/api/view")
            assert view.json["incidents"][0]["id"] == "i1" and view.headers["cache-control"] == "no-store"
            assert (await dash.ask("GET", "/api/view?at=0")).json["now_s"] <= 0.1
            assert (await dash.ask("GET", "/api/incident/i1")).json["why"] == "rank 1 died"
            metrics = await dash.ask("GET", "/metrics")
            assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert f'training_job="{JOB}"'.encode() in metrics.body
            assert (await dash.ask("HEAD", "/api/view")).status == 200
            for target in ("/api/incident/i2", "/static/none.js", "/static/../app.py", "/nothing", "/api/view?at=x"):
                got = await dash.ask("GET", target)
                assert got.status in (400, 404) and got.json["error"], target

    asyncio.run(look())


def test_only_evidence_and_logs_are_handed_out(run: Path) -> None:
    big = run / "logs/node0/big.log"
    big.write_bytes(b"a" * files.NEWEST_BYTES + b"\xff<script>\n")

    async def look() -> None:
        async with serving(run) as dash:
            got = await dash.ask("GET", "/api/file/incidents/i1/stacks.txt")
            assert (got.status, got.body, got.headers["content-type"]) == (
                200,
                b"in forward\n",
                "text/plain; charset=utf-8",
            )
            assert (await dash.ask("GET", "/api/file/logs/inside")).body == b"in forward\n"
            newest = (await dash.ask("GET", "/api/file/logs/node0/big.log")).body.decode()
            assert newest.endswith("\ufffd<script>\n") and newest.count("a") == files.NEWEST_BYTES - 10
            for path in (
                "token", "logs/../token", "logs/%2e%2e/token", "logs/..%2ftoken", "logs/outside", "logs/up/token",
                "logs", "logs/pipe", "/etc/passwd", "..%2f..%2fetc/passwd", "logs/%00", "logs/%ff",
                "incidents/" + "a/" * 3000, "journal.jsonl", "logs/sub/../../token", "logs//../token", "./token", "",
            ):  # fmt: skip
                got = await dash.ask("GET", f"/api/file/{path}")
                assert got.status == 404 and b"secret" not in got.body, path

    asyncio.run(look())


def test_controls(run: Path) -> None:
    controller = Controller()

    async def ask() -> None:
        async with serving(run, controller) as dash:
            assert (await dash.ask("GET", "/api/info")).json["controls"]
            got = await control(dash, "drain", {"confirm": JOB, "target": "node1", "undo": True})
            assert (got.status, got.json) == (200, {"ok": "node1 is to be filled again"})
            assert (await control(dash, "save", {"confirm": JOB})).status == 200
            assert "within 7 s" in (await control(dash, "stop", {"confirm": JOB})).json["ok"]
            assert [type(question) for question in controller.asked] == [
                wire.DrainRequest, wire.SaveRequest, wire.StopRequest,
            ]  # fmt: skip
            del controller.asked[:]
            assert (await control(dash, "stop", {"confirm": "j2"})).json["refused"].startswith("not confirmed")
            assert (await control(dash, "stop", {"confirm": JOB}, authorization="Bearer wrong")).status == 401
            assert (await control(dash, "stop", {"confirm": JOB}, content_type="text/plain")).status == 415
            for body in (b"{", b"[]", b"\xff", b'{"confirm":1}', b'{"confirm":"j1","more":1}', b"[" * 60000):
                assert (await control(dash, "stop", body)).status == 400, body[:20]
            assert (await control(dash, "drain", {"confirm": JOB})).status == 400
            assert (await control(dash, "rm", {"confirm": JOB})).status == 404
            assert controller.asked == []
            got = await control(dash, "drain", {"confirm": JOB, "target": "node9"})
            assert (got.status, got.json) == (409, {"refused": "there is no node9"})
        async with serving(run, controller, live=False) as dash:
            assert (await control(dash, "save", {"confirm": JOB})).status == 409

    asyncio.run(ask())


def test_stacks_and_profiles_need_the_token(run: Path) -> None:
    """What there is to see comes with the answer; the files, which tell as much, nobody else is given."""
    controller = Controller()
    (run / "looks").mkdir()
    (run / "looks/0001-stacks.txt").write_text("== rank 0\nin forward\n")
    (run / "looks/0001-profile.json").write_bytes(msgspec.json.encode(canned.sampled()))
    there = {"ok": "there", "notes": ["rank 0: stopped"]}

    async def ask() -> None:
        async with serving(run, controller) as dash:
            wish = {"confirm": JOB, "target": "node0/0", "seconds": 2.5, "threads": True}
            got = await control(dash, "stacks", wish)
            assert got.json == there | {"file": "looks/0001-stacks.txt", "text": "== rank 0\nin forward\n"}
            got = await control(dash, "profile", wish)
            assert got.json["picture"] == json.loads(msgspec.json.encode(canned.shown()))
            assert controller.asked[-1] == wire.LookRequest("profile", ("node0/0",), 2.5, True)
            (run / "looks/0001-profile.json").write_bytes(b"{")
            assert "cannot be read" in (await control(dash, "profile", wish)).json["text"]
            del controller.asked[:]
            assert (await control(dash, "stacks", wish, authorization="Bearer wrong")).status == 401
            assert (await dash.ask("GET", "/api/control/stacks")).status == 405
            assert (await dash.ask("GET", "/api/file/looks/0001-stacks.txt")).status == 404
            assert (await control(dash, "stacks", {"confirm": JOB})).status == 400
            assert controller.asked == []
            got = await control(dash, "stacks", {"confirm": JOB, "target": "node9/0"})
            assert (got.status, got.json) == (409, {"refused": "node9 did not answer"})
        async with serving(run, controller, live=False) as dash:
            assert (await control(dash, "stacks", wish)).status == 409

    asyncio.run(ask())


def test_a_token_in_the_address_becomes_a_cookie(run: Path) -> None:
    async def ask() -> None:
        async with serving(run, open_reading=False) as dash:
            assert (await dash.ask("GET", "/api/view")).status == 401
            assert (await dash.ask("GET", "/?token=wrong")).status == 401
            got = await dash.ask("GET", f"/?token={TOKEN}")
            assert (got.status, got.headers["location"]) == (303, "/")
            cookie = got.headers["set-cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
            assert (await dash.ask("GET", "/api/view", cookie=cookie.split(";")[0])).status == 200

    asyncio.run(ask())


def test_huge_and_malformed_requests_trouble_nobody(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def attack() -> None:
        async with serving(run, Controller()) as dash:
            host = f"host: localhost:{dash.port}\r\n".encode()
            post = b"POST /api/control/save HTTP/1.1\r\n" + host + f"authorization: Bearer {TOKEN}\r\n".encode()
            post += f"origin: http://localhost:{dash.port}\r\n".encode()
            for data, statuses in (
                (b"\x16\x03\x01\x02\x00\x01", (0, 400)),  # TLS
                (b"GET / HTTP/1.1\r\n\r\n", (400,)),  # no Host
                (b"GET / HTTP/1.1\r\n" + host + host + b"\r\n", (400,)),
                (b"GET / HTTP/9.9\r\n" + host + b"connection: close\r\n\r\n", (200, 400)),
                (b"GET / HTTP/1.1\r\n" + host + b"a: " + b"b" * (1 << 20), (0, 400)),
                (b"GET /" + b"a" * (1 << 20), (0, 400)),
                (b"GET / HTTP/1.1\r\n" + host + b"content-length: 3\r\n\r\nabc", (400,)),
                (post + b"content-length: -1\r\n\r\n", (400,)),
                (post + b"content-length: 99999999999\r\n\r\n", (413,)),
                (post + b"transfer-encoding: chunked\r\n\r\n20000\r\n" + b"a" * 0x20000, (413,)),
                (post + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", (0, 400)),
                (post + b"content-length: 9\r\nconnection: close\r\n\r\n\0\1\2\3\4\5\6\7\b", (415,)),
            ):
                got = await dash.raw(data)
                assert got.status in statuses, (data[:60], got)
            assert (await dash.ask("GET", "/api/view", host="evil.example")).status == 421
            assert (await dash.ask("GET", "/api/view")).status == 200
            assert MAX_BODY < 0x20000

    asyncio.run(attack())
    said = capfd.readouterr().err
    assert "everstep: dashboard: refused" in said or "Invalid HTTP" in said
    assert "Traceback" not in said and said.count("\n") <= 10  # one line a second at most


def test_slow_clients_are_given_up(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "REQUEST_S", 0.2)
    monkeypatch.setattr(serve, "TAKING_S", 0.2)
    monkeypatch.setattr(notes, "EVERY_S", 0.0)
    (run / "logs/node0/big.log").write_bytes(b"a" * files.NEWEST_BYTES)

    async def attack() -> None:
        async with serving(run) as dash:
            silent, dripping, deaf = [await dash.connect() for _ in range(3)]
            host = f"host: localhost:{dash.port}\r\n\r\n".encode()
            dripping[1].write(b"GET / HTTP/1.1\r\n")
            for _ in range(64):  # 16 MB are more than all buffers on the way take
                deaf[1].write(b"GET /api/file/logs/node0/big.log HTTP/1.1\r\n" + host)
            deaf[0]._transport.pause_reading()  # type: ignore[attr-defined]
            for reader, _ in (silent, dripping):
                async with asyncio.timeout(20):
                    assert await reader.read() == b""
            view = await dash.ask("GET", "/api/view")
            assert view.status == 200
            async with asyncio.timeout(20):
                while "does not take what it is sent" not in capfd.readouterr().err:
                    await asyncio.sleep(0.05)
            for _, writer in (silent, dripping, deaf):
                writer.close()

    asyncio.run(attack())
