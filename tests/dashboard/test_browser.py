"""The page in a real browser: it shows what happens at once, works by keyboard, on any screen, and asks nobody else."""

from __future__ import annotations

import re
from pathlib import Path

import canned
import fixture
import pytest
from browsing import SHOWN_MS, TRIES, Watched, show, shows
from fixture import Server
from playwright.sync_api import Browser, Page, expect

from everstep.observe.view import NodeState, NodeView, View

AUDIT = Path(__file__).with_name("audit.js").read_text(encoding="utf-8")


def calm() -> View:
    """The small job before anything happened to it."""
    return fixture.cut(canned.small(), 100.0)


def happen(page: Page, server: Server) -> list[float]:
    """A kill, its recovery, a hang, a drain and a standby's promotion; how long each took to be seen."""
    killed, nodes = canned.kill(at_s=100.0, is_open=True), server.view.nodes
    leaving = [NodeView("node2", NodeState.LEAVING, "drained", slots=2), *(n for n in nodes if n.name != "node2")]
    after = canned.closed(killed)

    def seen(selector: str, text: str, **change: object) -> float:
        return shows(page, selector, text, lambda: server.push(**change))

    took = [
        seen("#status-label", "Recovering", incidents=[killed], num_incidents=1, now_s=100.1),
        seen("#incident-list .outcome", "recovered", incidents=[after], now_s=101.0),
        seen("#incident-list .what", "hang: rank 1", incidents=[after, canned.hang()]),
        seen("#map-legend", "leaving nodes: 1", nodes=leaving),
        seen("#epoch-rows", "a standby was promoted", epochs=canned.small().epochs),
    ]
    return took


def test_shows_what_happens_within_a_second(browser: Browser, opened: list[Watched]) -> None:
    slowest = []
    for _ in range(TRIES):
        view = calm()
        view.nodes[1] = NodeView("node2", slots=2)
        view.epochs = view.epochs[:-1]
        with Server(view) as server:
            page = show(browser, opened, server.url)
            expect(page.locator("#status-label")).to_have_text("Training")
            slowest.append(max(happen(page, server)))
            assert page.title().startswith("Training")
            page.goto("about:blank")  # its stream ends before its server does
        if slowest[-1] < SHOWN_MS:
            return
    pytest.fail(f"milliseconds until it was seen: {slowest}")


@pytest.mark.parametrize("name", ["small", "large", "huge"])
def test_looks(browser: Browser, opened: list[Watched], name: str) -> None:
    """Nothing is cut, overlaps, is too wide or too pale, from a phone to a wall, in both themes."""
    view, mode = next((view, mode) for scene, view, mode in fixture.scenes() if scene == name)
    with Server(view, mode) as server:
        page = show(browser, opened, server.url)
        wrong = audited(page)
        if name == "small":
            page.locator("#incident-list a").last.click()
            page.get_by_text("stacks.txt").click()
            expect(page.locator("#incident pre").last).to_contain_text("line 41 in forward")
            wrong += audited(page)
        page.goto("about:blank")
    assert wrong == []


def audited(page: Page) -> list[str]:
    wrong = []
    for width in (360, 1280, 3840):
        page.set_viewport_size({"width": width, "height": 900})
        for _ in range(2):
            page.locator("#theme-button").click()
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            theme = page.evaluate("() => document.documentElement.dataset.theme")
            wrong += [f"{width} {theme}: {text}" for text in page.evaluate(AUDIT)]
    return wrong


def test_audit_finds_what_is_wrong(browser: Browser, opened: list[Watched]) -> None:
    with Server(canned.small()) as server:
        page = show(browser, opened, server.url)
        page.evaluate("""() => {
            document.getElementById("about").style.color = "var(--page)";
            document.getElementById("job").style.cssText = "position: absolute; left: 12px; top: 12px";
            document.getElementById("tiles").style.width = "1400px";
            document.querySelector(".tile dt").style.cssText = "width: 8px; overflow: hidden; white-space: nowrap";
        }""")
        found = {text.split()[0].rstrip(":") for text in page.evaluate(AUDIT)}
        page.goto("about:blank")
    assert found == {"contrast", "overlap", "the", "cut"}


def test_keyboard(browser: Browser, opened: list[Watched]) -> None:
    with Server(canned.large(), "recorded", at=lambda at: fixture.cut(canned.large(), at)) as server:
        page = show(browser, opened, server.url)
        page.keyboard.press("Tab")
        expect(page.locator("#skip")).to_be_focused()
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page.locator("#incident h2").first).to_have_text("hang: rank 1 on node1")
        expect(page.locator("#overview")).to_be_hidden()
        page.keyboard.press("j")
        expect(page.locator("#incident h2").first).to_have_text("crash: rank 3 on node2")
        page.keyboard.press("Escape")
        expect(page.locator("#overview")).to_be_visible()
        page.keyboard.press("m")
        page.keyboard.press("n")
        expect(page.locator("#map-facts")).to_contain_text("217")
        busy = server.view.loads["gpu-a027.cluster"]
        device = f"{busy.devices[1].busy_percent} % busy, 83 % of 80 GiB"
        node = [f"{100 * busy.cpu_share:.0f} % of 192", f"{100 * busy.memory_share:.0f} % of 1.84 TiB"]
        for text in (f"{busy.workers[1]} % of one", device, *node, "210 MB/s in"):
            expect(page.locator("#map-facts")).to_contain_text(text)
        output = page.get_by_role("link", name="its output")
        assert output.get_attribute("href") == "/api/file/logs/gpu-a027.cluster/attempt_214/1/stdout.log"
        page.keyboard.press("n")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#announcer")).to_contain_text("rank 504, ")
        expect(page.locator("#announcer")).to_contain_text("state gone")
        page.get_by_role("button", name="As a table").click()
        expect(page.locator("#node-rows th").first).to_have_text("gpu-a063.cluster")
        page.locator("#node-sort").select_option("slow")
        expect(page.locator("#node-rows th").first).to_have_text("gpu-a087.cluster")
        idlest = min(server.view.loads.items(), key=lambda item: item[1].device_share)
        page.locator("#node-sort").select_option("idle")
        expect(page.locator("#node-rows th").first).to_have_text(idlest[0])
        bar = page.locator("#node-rows .device-cell .meter span").first
        assert f"width: {round(100 * idlest[1].device_share)}%" in (bar.get_attribute("style") or "")
        page.locator("#node-filter").fill("a027")
        expect(page.locator("#node-rows tr")).to_have_count(1)
        page.locator("#map-title").click()  # out of the field
        page.keyboard.press("?")
        expect(page.locator("#help")).to_be_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("t")
        assert page.evaluate("() => document.documentElement.dataset.theme") in ("dark", "light")


def test_incident_from_a_mark_and_its_files(browser: Browser, opened: list[Watched]) -> None:
    with Server(canned.small()) as server:
        page = show(browser, opened, server.url)
        page.locator("#charts .mark").first.click()
        expect(page.locator("#incident h2").first).to_have_text("crash: rank 3 on node2")
        for text in (
            "respawn in place",
            "not possible",
            "no standby is here",
            "93\u00a0% sure",
            "first sign",
            "6 links kept",
        ):
            expect(page.locator("#incident")).to_contain_text(text)
        page.get_by_text("stacks.txt").click()
        expect(page.locator("#incident pre").last).to_contain_text("line 41 in forward")
        server.push(incidents=[*server.view.incidents, canned.kill(9, 730.0, is_open=True)], num_incidents=4)
        expect(page.locator("#announcer")).to_contain_text("New incident: crash: rank 3 on node2")
        expect(page.locator("#incident pre").last).to_contain_text("line 41 in forward")
        page.goto("about:blank")


def test_controls(browser: Browser, opened: list[Watched]) -> None:
    """Only with the job's name and the token; what the server answers is shown."""
    with Server(canned.small()) as server:
        page = show(browser, opened, server.url)
        page.get_by_role("button", name="Drain a node").click()
        page.get_by_label("node, rank").fill("node2")
        page.get_by_label("the token").fill("wrong")
        go = page.get_by_role("button", name="Drain", exact=True)
        expect(go).to_be_disabled()
        page.get_by_label("type the job's name").fill("gpt-small")
        go.click()
        expect(page.locator(".answer")).to_contain_text("Refused: the token is missing or wrong")
        assert server.told == []
        opened[0].wrong.clear()  # the browser logs the refusal
        page.get_by_label("the token").fill(fixture.TOKEN)
        go.click()
        expect(page.locator(".answer")).to_have_text("node2 is asked to leave")
        assert server.told == [{"verb": "drain", "confirm": "gpt-small", "target": "node2", "undo": False}]
        page.get_by_role("button", name="Close").click()
        looks(page, server)
        server.push(exit_code=0, stage="finished")
        expect(page.locator("#status-label")).to_have_text("Finished")
        expect(page.locator("#map-looks")).to_be_hidden()
        expect(page.get_by_role("button", name="Stop the job")).to_be_disabled()
        page.goto("about:blank")


def looks(page: Page, server: Server) -> None:
    """Stacks of the worker that is chosen in the map; then a flame graph, a part of it, and all of it again."""
    expect(page.locator("#map-looks")).to_be_hidden()
    page.keyboard.press("m")
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Stacks …").click()
    page.get_by_role("button", name="Show stacks").click()  # the token is still known
    expect(page.locator("#look pre")).to_contain_text("line 41 in forward")
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Profile …").click()
    page.get_by_label("seconds").fill("2")
    page.get_by_role("button", name="Profile", exact=True).click()
    expect(page.locator("#look .own tbody th").first).to_have_text(re.compile("^scaled_dot.* torch/.*py:5812$"))
    wish = {"confirm": "gpt-small", "target": "node1/0"}
    assert server.told[-2:] == [{"verb": "stacks", **wish}, {"verb": "profile", **wish, "seconds": 2, "threads": False}]
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        found = page.evaluate(AUDIT)
        assert [text for text in found if not text.startswith("overlap")] == []  # it lies over the rest of the page
    graph = page.locator("#look .flame button")
    count = graph.count()
    page.get_by_role("button", name="Batches.__iter__").click()
    expect(graph).to_have_text(["<module>", "Batches.__iter__", "default_collate", "<lambda>"])
    left, right = (graph.nth(place).bounding_box() for place in (2, 3))
    assert left and right and left["x"] + left["width"] <= right["x"] + 1
    page.get_by_role("button", name="all of it").click()
    expect(graph).to_have_count(count)
    page.get_by_role("button", name="Close").click()
    server.shows.clear()
    page.get_by_role("button", name="Stacks …").click()
    expect(page.get_by_label("type the job's name")).to_have_count(0)  # it changes nothing
    with page.expect_response("**/api/control/stacks"):
        page.keyboard.press("Enter")
        expect(page.locator(".answer")).to_have_text("asking …")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Stop the job").click()
        server.shows.set()
    page.evaluate("async () => (await fetch('/api/info')).text()")  # by now the answer was dealt with
    expect(page.locator("#ask-title")).to_have_text("Stop the job")
    assert page.locator("#ask").is_visible() and not page.locator("#look").is_visible()
    page.get_by_role("button", name="Cancel").click()


def test_slider(browser: Browser, opened: list[Watched]) -> None:
    view = canned.small()
    with Server(view, "recorded", at=lambda at: fixture.cut(view, at)) as server:
        page = show(browser, opened, server.url)
        expect(page.locator("#incident-list li")).to_have_count(3)
        page.locator("#to-previous").click()
        page.locator("#to-previous").click()
        page.locator("#to-previous").click()
        expect(page.locator("#incident-list li")).to_have_count(1)
        expect(page.locator("#moment")).to_contain_text("2\u00a0min 01\u00a0s of 12\u00a0min 20\u00a0s")
        page.locator("#speed").select_option("600")
        page.locator("#play").click()
        expect(page.locator("#incident-list li")).to_have_count(3)
        expect(page.locator("#play")).to_have_text("Play")


def test_looking_back_while_it_runs(browser: Browser, opened: list[Watched]) -> None:
    view = canned.small()
    with Server(view, at=lambda at: fixture.cut(view, at)) as server:
        page = show(browser, opened, server.url)
        page.get_by_role("button", name="Look back").click()
        for _ in range(2):
            page.locator("#to-previous").click()
        expect(page.locator("#mode")).to_have_text("looking back")
        expect(page.locator("#incident-list li")).to_have_count(2)
        server.push(last_step_s=view.now_s - 60)
        page.get_by_role("button", name="Now", exact=True).click()
        expect(page.locator("#incident-list li")).to_have_count(3)
        expect(page.locator("#status-label")).to_have_text("No new step")
        expect(page.locator("#time")).to_be_hidden()
        page.goto("about:blank")


def test_lost_connection_is_told_and_mended(browser: Browser, opened: list[Watched]) -> None:
    """Unless the job has ended: then nothing more is to come."""
    with Server(calm()) as server:
        page = show(browser, opened, server.url)
        port = int(server.url.rpartition(":")[2])
    expect(page.locator("#trouble")).to_contain_text("No news from the server")
    with Server(canned.small(), port=port) as server:
        expect(page.locator("#trouble")).to_be_hidden()
        expect(page.locator("#incident-list li")).to_have_count(3)
        server.push(exit_code=0, stage="finished")
        expect(page.locator("#status-label")).to_have_text("Finished")
    expect(page.locator("#trouble")).to_contain_text("The job has ended, and its server with it")
    opened[0].wrong.clear()  # the browser logs that nobody answered
