"""Whose stacks a person means, and what the controller answers when agents do, or do not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from reform_harness import World

from everstep.control import looks, stacks
from everstep.control.crew import Worker
from everstep.control.job import Job, Stage
from everstep.control.link import Link
from everstep.control.looks import Looks, whom
from everstep.core import events as e
from everstep.core import wire
from everstep.core.errors import UsageError
from everstep.core.sampled import Function, Sampled, Stack
from everstep.core.types import StacksAsked, StacksTaken

SAMPLED = Sampled((Function("busy", "train.py", 3, "script"),), (Stack("m", (0,), 4, 10**9),), 99, 1.0, 0.01, 0.01)


class Bench:
    """A controller's part, with what it sent, wrote down and answered."""

    def __init__(self, run: Path) -> None:
        self.job = World().running().job
        self.sent: list[tuple[str, StacksAsked]] = []
        self.records: list[e.Record] = []
        self.said: list[dict[str, Any]] = []
        self.looks = Looks(run, lambda *wish: self.sent.append(wish), self.records.append)

    def send(self, message: wire.Message) -> bool:
        """As a link does it."""
        assert isinstance(message, wire.Reply)
        self.said.append(message.payload)
        return True

    async def until_said(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.said) < count:
                await asyncio.sleep(0.001)

    def ask(self, what: str = "stacks", *workers: str, seconds: float = 1.0) -> None:
        assert self.looks.ask(cast(Link, self), wire.LookRequest(what, workers, seconds), self.job)  # type: ignore[arg-type]

    def taken(self, node: str, **found: Any) -> bool:
        return self.looks.saw(StacksTaken(node, "", 1, found.pop("stacks", {}), look=self.sent[-1][1].look, **found))


def job() -> Job:
    return World().running().job


@pytest.mark.parametrize(
    ("what", "workers", "found"),
    [
        ("stacks", (), {"n1": (0, 1), "n2": (0, 1)}),
        ("stacks", ("3", "n2/1", "n1"), {"n1": (0, 1), "n2": (1,)}),
        ("profile", ("2",), {"n2": (0,)}),
    ],
)
def test_whom_a_person_means(what: Any, workers: tuple[str, ...], found: dict[str, tuple[int, ...]]) -> None:
    assert whom(job(), wire.LookRequest(what, workers)) == found


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        (wire.LookRequest("stacks", ("7",)), "no worker '7' in this job: its nodes are n1, n2; its workers are 0 to 3"),
        (wire.LookRequest("profile", ("n1",)), "a profile is of one worker, and these are 2"),
        (wire.LookRequest("profile", ("0",), 0.0), "0 s: expected 0.2 to 60"),
        (wire.LookRequest("profile", ("0",), float("nan")), "expected 0.2 to 60"),
    ],
)
def test_what_cannot_be_shown(wish: wire.LookRequest, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        whom(job(), wish)


def test_not_more_workers_than_one_message_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "MOST", 3)
    assert whom(job(), wire.LookRequest("stacks", ("n1", "n2/0")))
    with pytest.raises(UsageError, match="4 workers: at most 3 can be shown at a time"):
        whom(job(), wire.LookRequest("stacks"))


def test_nobody_runs() -> None:
    for without in (msgspec.structs.replace(job(), stage=Stage.FINISHED), msgspec.structs.replace(job(), plan=None)):
        with pytest.raises(UsageError, match="no workers run just now"):
            whom(without, wire.LookRequest("stacks"))


def test_stacks_of_two_nodes_in_one_file(tmp_path: Path) -> None:
    async def play() -> None:
        bench = Bench(tmp_path)
        bench.ask("stacks")
        assert [(node, wish.local_ranks) for node, wish in bench.sent] == [("n1", (0, 1)), ("n2", (0, 1))]
        assert bench.taken("n1", stacks={0: "in forward\n", 1: "stopped\n"}, notes={1: "it is stopped"})
        assert bench.said == []
        assert bench.taken("n2", stacks={2: "in backward\n", 3: ""}, notes={3: "no process"})
        await bench.until_said(1)
        (answer,) = bench.said
        assert (answer["what"], answer["file"]) == ("stacks", "looks/000001-stacks.txt")
        assert answer["notes"] == {"1": "rank 1 on n1: it is stopped", "3": "rank 3 on n2: no process"}
        text = (tmp_path / answer["file"]).read_text()
        assert "== rank 0 on n1\nin forward\n" in text and "== rank 3 on n2 (no process)" in text
        (record,) = bench.records
        assert record == e.LookTaken(1, "stacks", (0, 1, 2, 3), answer["file"], answer["summary"])
        assert not bench.looks.saw(StacksTaken("n1", "i1", 1, {}))  # of an incident

    asyncio.run(play())


def test_a_node_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "ANSWER_S", 0.01)

    async def play() -> None:
        bench = Bench(tmp_path)
        bench.ask("stacks", "0", "n2")
        bench.taken("n1", stacks={0: "in forward\n"})
        await bench.until_said(1)
        assert set(bench.said[0]["notes"]) == {"2", "3"}
        assert "n2 did not answer" in bench.said[0]["notes"]["2"]
        bench.taken("n2", stacks={2: "late"})  # nobody waits for it
        bench.ask("stacks", "n2")
        await bench.until_said(2)
        assert bench.said[1]["nothing"].startswith("rank 2 on n2: n2 did not answer")
        assert len(bench.records) == 1

    asyncio.run(play())


def test_a_profile_its_files_and_where_they_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "KEPT", 3)

    async def play() -> None:
        bench = Bench(tmp_path)
        for count in (1, 2):
            bench.ask("profile", "2")
            bench.taken("n2", sampled={2: SAMPLED})
            await bench.until_said(count)
        assert bench.said[1]["file"] == "looks/000002-profile-rank2.html"
        assert bench.said[1]["summary"] == "rank 2 on n2, 1.0 s: 100% busy"
        assert sorted(path.name for path in (tmp_path / "looks").iterdir()) == [  # the newest three
            "000001-profile-rank2.json", "000002-profile-rank2.html", "000002-profile-rank2.json",
        ]  # fmt: skip
        again = Bench(tmp_path)  # a later controller goes on counting
        again.ask("profile", "2")
        assert again.sent[0][1].look == 3
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "looks").write_text("no folder")
        full = Bench(tmp_path / "other")
        full.ask("profile", "2")
        full.taken("n2", sampled={2: SAMPLED})
        await full.until_said(1)
        assert full.said[0]["nothing"].startswith("it cannot be written: ") and full.records == []

    asyncio.run(play())


def test_not_more_wishes_at_a_time_than_can_be_served(tmp_path: Path) -> None:
    async def play() -> None:
        bench = Bench(tmp_path)
        for _ in range(looks.PENDING + 1):
            bench.ask("stacks", "0")
        assert len(bench.said) == 1 and "try again" in bench.said[0]["refused"]

    asyncio.run(play())


def test_of_very_long_stacks_the_end_is_kept_where_the_main_thread_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "MAX_TEXT", 20)
    file = tmp_path / "stacks"
    file.write_text(f"old\nCurrent thread{'.' * 50}in main\n")
    worker = cast(Worker, SimpleNamespace(request=SimpleNamespace(stacks=str(file))))
    assert stacks.text_from(worker, 4) == f"{'.' * 12}in main\n"
    file.write_text("old\nnew\n")
    assert stacks.text_from(worker, 4) == "new\n"
