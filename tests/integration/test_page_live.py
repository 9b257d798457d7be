"""The page of a real session job in a real browser: a kill, a standby's promotion, a hang and a drain, each of which it
shows within a second of the journal; and then the record of the same job, played."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from browsing import CHROMIUM, Watched, chromium
from playwright.sync_api import Page, expect
from session_harness import SessionRun

from everstep.core import events as e

pytestmark = [
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}"),
    pytest.mark.timeout(150),  # less than 30 s on a quiet machine
]

JOB = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "1", "--standbys", "1", "--hang-timeout", "1")
# Other work on the machine delays a page, and its server before all, which has a low priority. How much, a request says
# that the page makes again and again: a change may take that much longer, as it goes through more hands than an answer.
SHOWN_S, HANDS = 1.0, 3

# In the page: wall time at which each text was there first, by selector; and when requests began and ended.
NOTES = """(selectors) => {
  const texts = Object.fromEntries(selectors.map((selector) => [selector, {}]));
  const notes = (globalThis.notes = { texts, asked: [], asking: true });
  const wall = () => Date.now() / 1000;
  const look = () => {
    for (const selector of selectors)
      for (const found of document.querySelectorAll(selector)) texts[selector][found.textContent] ??= wall();
  };
  const ask = async () => {
    const began = wall();
    await (await fetch("/api/info")).json();
    notes.asked.push([began, wall()]);
    if (notes.asking) setTimeout(ask, 100);
  };
  new MutationObserver(look).observe(document, { subtree: true, childList: true, characterData: true });
  look();
  ask();
}"""
INCIDENT, EPOCH, LEGEND, STATUS = "#incident-list li", "#epoch-rows .text-cell", "#map-legend li", "#status-label"


class Told(NamedTuple):
    """Something of the journal, and where and how the page says so."""

    wall_s: float
    selector: str
    text: str  # regular expression


def told(run: SessionRun) -> Iterator[Told]:
    kinds: dict[str, str] = {}
    before: set[str] = set()
    for entry in run.entries():
        match entry.event:
            case e.IncidentOpened(incident, kind):
                kinds[incident] = kind
                yield Told(entry.wall_s, INCIDENT, rf"^{kind}\b")
            case e.IncidentClosed(incident, outcome):
                yield Told(entry.wall_s, INCIDENT, rf"^{kinds[incident]}\b.*{outcome}")
            case e.FormationMade(formation):
                names = {seat.worker for seat in formation.seats}
                for name in names - before if before else ():
                    yield Told(entry.wall_s, EPOCH, rf"\+ .*{re.escape(name)}")
                before = names
            case e.DrainAsked():
                yield Told(entry.wall_s, LEGEND, "^(leaving|lost) nodes: 1")


class Late(NamedTuple):
    """Seconds from what the journal tells until the page showed it, and the longest that a request took meanwhile."""

    late_s: float
    busy_s: float


def lateness(run: SessionRun, page: Page) -> dict[Told, Late]:
    notes = page.evaluate("() => Object.assign(globalThis.notes, { asking: false })")
    found = {}
    for each in told(run):
        shown = [at_s for text, at_s in notes["texts"][each.selector].items() if re.search(each.text, text)]
        at_s = min((at_s for at_s in shown if at_s >= each.wall_s - 0.01), default=math.inf)
        meanwhile = [end - begin for begin, end in notes["asked"] if end >= each.wall_s and begin <= at_s]
        found[each] = Late(at_s - each.wall_s, max(meanwhile, default=0.0))
    return found


def lose(run: SessionRun, signum: int) -> None:
    """One member, whose place the standby takes; then there is another standby."""
    run.until_standby()
    lost = run.kill_member(1, signum)
    run.until(lambda: len(members := run.members()) == 2 and lost not in members.values())
    run.until_committed(run.committed() + 5)


def drain(run: SessionRun, page: Page, node: str) -> None:
    page.get_by_role("button", name="Drain a node").click()
    page.get_by_label("node, rank").fill(node)
    page.get_by_label("the token").fill((run.run_dir / "dashboard.token").read_text().strip())
    page.get_by_label("type the job's name").fill(run.run_dir.name)
    page.get_by_role("button", name="Drain", exact=True).click()
    expect(page.locator(".answer")).to_have_text(f"{node} is asked to leave")
    page.get_by_role("button", name="Close").click()
    run.until(lambda: node in {lost.node for lost in run.events(e.NodeLost)})


def looks(run: SessionRun, page: Page) -> None:
    """Stacks and a profile of a member of the session, through all of the way."""
    page.keyboard.press("m")
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Stacks …").click()
    page.get_by_label("the token").fill((run.run_dir / "dashboard.token").read_text().strip())
    page.get_by_role("button", name="Show stacks").click()
    expect(page.locator("#look pre")).to_contain_text("session_train.py")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Profile …").click()
    page.get_by_label("seconds").fill("1")
    page.get_by_role("button", name="Profile", exact=True).click()
    expect(page.locator("#look .flame button").first).to_have_text("<module>")
    expect(page.locator("#look")).to_contain_text("session_train.py")
    page.get_by_role("button", name="Close").click()


@contextlib.contextmanager
def replayed(run: SessionRun) -> Iterator[str]:
    command = [sys.executable, "-m", "everstep", "replay", str(run.run_dir), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield server.stderr.readline().partition("dashboard at ")[2].partition(";")[0].strip()
        finally:
            server.send_signal(signal.SIGINT)


def test_a_live_job_and_its_record(tmp_path: Path) -> None:
    with chromium() as browser:
        with SessionRun(tmp_path, *JOB, args=("--steps", "5000", "--pause", "0.02"), dashboard=True) as run:
            live = Watched(browser, run.dashboard_url())
            live.page.goto(run.dashboard_url())
            run.until_committed(20)
            expect(live.page.locator(STATUS)).to_have_text("Training")
            looks(run, live.page)
            live.page.evaluate(NOTES, [INCIDENT, EPOCH, LEGEND])
            lose(run, signal.SIGKILL)
            lose(run, signal.SIGSTOP)
            run.until_standby()
            drain(run, live.page, run.events(e.FormationMade)[-1].formation.seats[-1].node)
            expect(live.page.locator(LEGEND, has_text="lost nodes")).to_have_text("lost nodes: 1")
            late = lateness(run, live.page)
            for each, (late_s, busy_s) in late.items():
                print(f"{late_s:.2f} s, a request {busy_s:.2f} s: {each.text}")
            live.page.get_by_role("button", name="As a table").click()
            expect(live.page.locator("#node-rows", has=live.page.locator(".meter:visible"))).to_contain_text("%")
            assert live.wrong == []
            run.signal(signal.SIGTERM)
            expect(live.page.locator(STATUS)).to_have_text("Stopped")
            live.page.close()  # its server ends with the job
            assert run.wait() == 128 + signal.SIGTERM
        told_of = [load for record in run.events(e.LoadSeen) for load in record.nodes.values()]
        assert any(percent > 0 for load in told_of for percent in load.workers)
        assert {each.selector for each in late} == {INCIDENT, EPOCH, LEGEND} and len(late) >= 7
        assert [x for x in late.items() if not x[1].late_s < SHOWN_S + HANDS * x[1].busy_s] == []
        with replayed(run) as url:
            record = Watched(browser, url)
            record.page.goto(url)
            plays_and_slides(record.page)
            expect(record.page.locator("#map-looks")).to_be_hidden()
            record.page.close()
        assert record.wrong == []


def plays_and_slides(page: Page) -> None:
    """From before the first step to the end, and back to a moment in between."""
    expect(page.locator("#mode")).to_have_text("recorded")
    expect(page.locator("#play")).to_have_text("Pause")  # it plays from the start
    fastest = page.locator("#speed option").last.get_attribute("value")
    page.locator("#speed").select_option(fastest)
    expect(page.locator("#play")).to_have_text("Play")
    expect(page.locator(STATUS)).to_have_text("Stopped")
    what = page.locator("#incident-list .what")
    expect(what).to_have_text([re.compile("asked to stop"), re.compile("^hang: rank"), re.compile("^crash: rank")])
    for kind in ("asked to stop", "hang: rank", "crash: rank"):
        page.locator("#to-previous").click()
        expect(what.first).to_have_text(re.compile(kind))
    expect(page.locator(STATUS)).to_have_text("Recovering")
    page.locator("#slider").fill("0")
    expect(what).to_have_count(0)
