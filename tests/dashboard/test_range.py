"""The time that the charts show, in a real browser: typed, moved by keys, sent on by address; what curves say of it."""

from __future__ import annotations

import canned
from browsing import Watched, show
from fixture import Server
from playwright.sync_api import Browser, expect

READ = """async ([typed, wall, now]) => {
  const { parseRange, rangeText } = await import("/static/range.js");
  const found = parseRange(typed, wall, now);
  return found === undefined ? "refused" : [found, rangeText(found, wall)];
}"""
AXIS = """async ([wall, from, to, step]) => {
  const { axisClock, ticks } = await import("/static/plot.js");
  return ticks(from, to, step, wall).map((s) => axisClock(wall, s, step));
}"""
NINE = 1_790_067_600.0  # 2026-09-22 09:00:00 UTC
SPACE = "\u00a0"


def test_a_range_is_typed_as_people_say_it(browser: Browser, opened: list[Watched]) -> None:
    with Server(canned.small()) as server:
        page = show(browser, opened, server.url, timezone="UTC")
        said = {
            "15m": [900, f"15{SPACE}min"],
            "last 15 minutes": [900, f"15{SPACE}min"],
            "1 h 30 min": [5400, f"1{SPACE}h 30{SPACE}min"],
            "2.5 s": [2.5, f"2.5{SPACE}s"],
            " all ": [None, ""],
            "9:10 - 9:20:30": [[600, 1230], "09:10:00 \u2013 09:20:30"],
            "09:10 to now": [[600, 4000], "09:10:00 \u2013 10:06:40"],
            "8:50 \u2013 9:10": [[0, 600], "09:00:00 \u2013 09:10:00"],
            "2 min - 3 min": [[120, 180], "09:02:00 \u2013 09:03:00"],
            "soon": "refused",
            "9:20 - 9:10": "refused",
            "10:00 - 10:30": [[3600, 4000], "10:00:00 \u2013 10:06:40"],  # it is 10:06:40
            "9:75 - 10:00": "refused",
            "24:00 - now": "refused",
            "500 ms": "refused",
            "2 months": "refused",
            "15": "refused",
            "1-2-3": "refused",
        }
        found = {typed: page.evaluate(READ, [typed, NINE, 4000]) for typed in said}
        assert found == said
        night, day = [NINE - 36000, 4000], [NINE - 86400, 36000 + 86400]  # until 00:06:40, until 19:00 of the next day
        assert page.evaluate(READ, ["23:50 - 0:05", *night])[0] == [3000, 3900]
        assert page.evaluate(READ, ["23:50 - 23:58", *night])[0] == [3000, 3480]
        assert page.evaluate(READ, ["18:30 - 6:00", *day])[0] == [34200, 75600]
        assert page.evaluate(READ, ["9:10 - 9:20", 0, 4000]) == "refused"  # a simulated job has no time of day
        assert page.evaluate(AXIS, [NINE - 30, 0, 200, 60]) == ["09:00", "09:01", "09:02"]
        assert page.evaluate(AXIS, [NINE - 9 * 3600 - 10, 0, 35, 10]) == ["23:59:50", "22 Sept", "00:00:10", "00:00:20"]
        page.goto("about:blank")


def test_all_charts_show_the_range_and_the_address_keeps_it(browser: Browser, opened: list[Watched]) -> None:
    view = canned.small()
    with Server(view) as server:
        page = show(browser, opened, server.url, timezone="UTC")
        loss = page.locator("#charts .chart", has_text="Loss").locator(".more")
        whole = loss.inner_text()
        page.keyboard.press("r")
        page.keyboard.type("last 2 min")
        page.keyboard.press("Enter")
        assert page.url.endswith("?range=120")
        expect(loss).not_to_have_text(whole)  # least, most and mean are those of what is shown
        expect(loss).to_contain_text("mean")
        newest = loss.inner_text()
        page.locator("#charts-title").click()  # out of the field
        page.keyboard.press("[")
        expect(page.locator("#later")).to_be_enabled()
        assert page.url.endswith(f"?range={view.now_s - 180:g}-{view.now_s - 60:g}")
        expect(loss).not_to_have_text(newest)
        earlier, text = page.url, loss.inner_text()
        page.keyboard.press("]")
        assert page.url.endswith("?range=120")
        expect(loss).to_have_text(newest)
        page.goto(earlier)
        expect(loss).to_have_text(text)
        field = page.locator("#range")
        expect(field).not_to_have_value("")
        page.keyboard.press("c")
        expect(page.get_by_role("button", name="time of day")).to_have_attribute("aria-pressed", "false")
        page.keyboard.press("-")
        assert page.url.endswith(f"?range={view.now_s - 240:g}-{view.now_s:g}")
        field.fill("whenever")
        field.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="Not a time of this job")).to_be_visible()
        expect(field).to_have_attribute("aria-invalid", "true")
        field.press("Escape")
        expect(page.locator("#range-wrong")).to_be_hidden()
        page.keyboard.press("0")
        expect(field).to_have_value("")
        expect(page.locator("#range-wrong")).to_be_hidden()
        assert "range" not in page.url
        expect(loss).to_have_text(whole)
        page.goto("about:blank")


def test_a_bucket_is_hidden_from_the_chart(browser: Browser, opened: list[Watched]) -> None:
    with Server(canned.small()) as server:
        page = show(browser, opened, server.url)
        lost = page.locator("#bucket-chart figcaption")
        expect(lost).to_contain_text("2.40")
        expect(lost).to_contain_text("straggler loss 1.20")
        name = page.get_by_role("button", name="straggler loss")
        name.click()
        expect(lost).not_to_contain_text("straggler")
        expect(lost).to_contain_text("1.20")
        name.press("Enter")
        expect(lost).to_contain_text("straggler loss 1.20")
        page.goto("about:blank")


def test_from_an_incident_to_the_charts_around_it(browser: Browser, opened: list[Watched]) -> None:
    with Server(canned.small()) as server:
        page = show(browser, opened, server.url, "/#/incident/i2", width=360, timezone="UTC")
        page.set_viewport_size({"width": 360, "height": 400})  # the charts are further down
        link = page.get_by_role("link", name="charts around it")
        copied = link.get_attribute("href")
        link.click()
        expect(page.locator("#charts-title")).to_be_in_viewport()
        expect(page.locator("#incident")).to_be_hidden()
        assert page.url == f"{server.url}/{copied}"
        text = page.locator("#range").input_value()
        assert text.startswith("14:17:1")
        page.goto("about:blank")
        page.goto(f"{server.url}/{copied}")  # as somebody to whom it was sent
        expect(page.locator("#range")).to_have_value(text)
        page.goto("about:blank")
