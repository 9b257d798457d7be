"""The page of a real job: started by `everstep run`, seen by a client, and of no consequence for the job."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from everstep.cli.showing import NICE
from everstep.testing.local import LocalRun

TRAIN = Path(__file__).parent / "scripts" / "train.py"


class Page:
    """What a browser's page knows, kept up to date by a thread; and what it may ask."""

    def __init__(self, run: LocalRun) -> None:
        self.address = urlsplit(run.dashboard_url()).netloc
        self.bearer = {"authorization": "Bearer " + run.until(lambda: _read(run.run_dir / "dashboard.token"))}
        self.view: dict[str, Any] = {}
        self.names: list[str] = []
        self.thread = threading.Thread(target=self._follow)
        self.thread.start()

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        link = http.client.HTTPConnection(self.address, timeout=20)
        ours = {"origin": f"http://{self.address}", "content-type": "application/json", **self.bearer}
        link.request(method, path, body and json.dumps(body), ours | headers)
        answer = link.getresponse()
        text = answer.read()
        link.close()
        return answer.status, json.loads(text) if text.startswith(b"{") else text.decode()

    def control(self, verb: str, **wish: object) -> tuple[int, Any]:
        return self.ask("POST", f"/api/control/{verb}", {"confirm": self.view["job"], **wish})

    def _follow(self) -> None:
        link = http.client.HTTPConnection(self.address, timeout=20)
        link.request("GET", "/api/stream", headers=self.bearer)
        for name, data in _events(link.getresponse()):
            self.names.append(name)
            if name != "end":
                self.view.update(data)
        link.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    while line := answer.readline().decode():
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def test_a_job_is_seen_and_controlled(tmp_path: Path) -> None:
    """A worker dies, and the page shows it. The page's process dies, and nothing happens. Then stop."""
    options = ("--nproc-per-node", "2", "--set", "dashboard.private=true", "--set", "dashboard.names=['a.example']")
    with LocalRun(tmp_path, TRAIN, *options, args=("--steps", "100000"), dashboard=True) as run:
        page = Page(run)
        run.until_step(3)
        run.until(lambda: page.view.get("step", -1) >= 3)
        run.kill(rank=1)
        kept = run.until(lambda: [i for i in page.view["incidents"] if i["outcome"] and i["files"]])[0]
        assert {page.ask("GET", f"/api/file/{name}")[0] for name in kept["files"]} == {200}

        (pid,) = [pid for pid in children(run.process.pid) if b"dashboard" in command(pid)]  # type: ignore[union-attr]
        assert os.getpriority(os.PRIO_PROCESS, pid) == NICE
        os.kill(pid, signal.SIGKILL)
        page.thread.join(20)
        run.until_step(run.until_step(3).step + 3)
        run.until(lambda: "the dashboard died (status -9" in run.text())

        page = Page(run)  # at the same address
        run.until(lambda: page.view)
        assert page.view["job"] == run.run_dir.name and page.ask("GET", "/api/info")[1]["controls"] is True
        assert page.ask("GET", "/api/view", authorization="")[0] == 401
        assert page.ask("GET", "/api/info", host="a.example", origin="http://a.example")[0] == 200
        status, answer = page.control("drain", target="node7")
        assert status == 409 and "node7" in answer["refused"]
        status, answer = page.control("stop")
        assert status == 200, answer
        assert run.wait() == 128 + signal.SIGTERM
        page.thread.join(20)
        assert page.names[0] == "view" and "end" in page.names
        assert page.view["exit_code"] == 128 + signal.SIGTERM


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
