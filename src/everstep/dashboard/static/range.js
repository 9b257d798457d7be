// Which part of the job's time all charts show: chosen, typed, moved by keys, and kept in the address to be sent on.

import { announce, setAttributes, setText } from "./dom.js";
import { clock, duration } from "./format.js";

const id = (name) => document.getElementById(name);
const UNITS = { s: 1, m: 60, h: 3600, d: 86400, w: 604800 };
const PART = /(\d+(?:\.\d+)?)\s*(s|m|h|d|w)(?:ecs?|econds?|ins?|inutes?|rs?|ours?|ays?|eeks?)?(?![a-z])/g;
const CLOCK = /^([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?$/;
const SHORTEST_S = 0.01;
const [TIMES, LENGTHS] = ["15 min, 1 h 30 min, 13:50 - 14:05", "15 min, 3 d, 2 d - 3 d 12 h"];
const BINS_AROUND = 30; // of the finest curve, before and after an incident

/** "15m", "last 15 minutes", "1 h 30 min" -> seconds; NaN: it is no length of time. */
export function lengthOf(text) {
  const wanted = text.replace(/^(the\s+)?last\s+/, "").replaceAll(",", " ");
  let found = 0;
  const rest = wanted.replace(PART, (_, number, unit) => {
    found += Number(number) * UNITS[unit];
    return "";
  });
  return found > 0 && rest.trim() === "" ? found : NaN;
}

/** "14:05", "14:05:30" -> its newest moment that is not after `now`, in seconds of the job; "now", "2 min" too. */
function momentOf(text, wall, now) {
  if (text === "now") return now;
  if (text === "0" || text === "start") return 0;
  const found = text.match(CLOCK);
  if (!found || !wall) return lengthOf(text);
  const date = new Date((wall + now) * 1000);
  date.setHours(Number(found[1]), Number(found[2]), Number(found[3] ?? 0), 0);
  if (date.getTime() / 1000 > wall + now) date.setDate(date.getDate() - 1);
  return date.getTime() / 1000 - wall;
}

/**
 * What somebody typed -> null: the whole job, a number: its newest seconds, [from, to] in seconds of the job;
 * undefined: nothing that we understand. `wall`: when the job was submitted, 0: not known.
 */
export function parseRange(typed, wall, now) {
  const text = typed.trim().toLowerCase();
  if (["", "all", "whole", "whole job"].includes(text)) return null;
  const [first, second, ...more] = text.split(/\s*(?:[-–—]|\bto\b)\s*/);
  if (more.length) return undefined;
  if (second === undefined) return lengthOf(first) || undefined;
  let [from, to] = [momentOf(first, wall, now), momentOf(second || "now", wall, now)];
  if (from > to && CLOCK.test(first) && from - UNITS.d >= 0) from -= UNITS.d; // over midnight
  else if (from - to > UNITS.d / 2 && CLOCK.test(second)) to = now; // its end is yet to come
  return to - from >= SHORTEST_S && to > 0 ? [Math.max(0, from), to] : undefined;
}

/** As it can be typed again. */
export function rangeText(chosen, wall) {
  if (chosen === null) return "";
  if (!Array.isArray(chosen)) return duration(chosen).replace(/\.0(?=\D)|\s00\s\w+$/, "");
  const short = wall && chosen[1] - chosen[0] >= 2;
  const say = (s) => (short ? clock(wall, s, new Date((wall + s) * 1000)) : duration(s));
  return `${say(chosen[0])} – ${say(chosen[1])}`;
}

/** As it stands in the address. */
export const rangeQuery = (chosen) => [chosen].flat().map((s) => +s.toFixed(2)).join("-");

export class Span {
  constructor(store) {
    this.store = store;
    this.chosen = null; // null: all, number: newest seconds, [from, to]
    this.changed = [];
    const linked = new URLSearchParams(location.search).get("range") ?? "";
    const [, from, to] = linked.match(/^([\d.]+)-([\d.]+)$/) ?? [];
    if (Number(to) > Number(from)) this.chosen = [Number(from), Number(to)];
    else if (/^[\d.]+$/.test(linked) && Number(linked) > 0) this.chosen = Number(linked);
  }

  choose(span) {
    this.chosen = span;
    this.keep();
    for (const draw of this.changed) draw();
  }

  get end() {
    return Math.max(this.store.view?.now_s ?? 1, 1);
  }

  range() {
    if (Array.isArray(this.chosen)) return this.chosen;
    return this.chosen === null ? [0, this.end] : [Math.max(0, this.end - this.chosen), this.end];
  }

  /** Earlier or later by half of what is shown; at the job's end it follows it again. */
  move(by) {
    const [from, to] = this.range();
    const [width, end] = [to - from, this.end];
    const next = Math.min(end, Math.max(width, to + (by * width) / 2));
    if (next >= end) return this.chosen === null ? null : this.choose(width < end ? width : null);
    this.choose([next - width, next]);
  }

  /** Twice as much around the middle, at most all. */
  widen() {
    const [from, to] = this.range();
    const [width, end] = [2 * (to - from), this.end];
    if (width >= end) return this.choose(null);
    if (!Array.isArray(this.chosen)) return this.choose(width);
    const begin = Math.min(end - width, Math.max(0, (from + to - width) / 2));
    this.choose([begin, begin + width]);
  }

  /** This time, and as much before and after it; enough for a curve. */
  around(from, to) {
    const bins = Object.values(this.store.view.series).map((curve) => curve.every_s);
    const pad = Math.max(to - from, bins.length ? BINS_AROUND * Math.min(...bins) : 0);
    return [Math.max(0, from - pad), Math.max(from + 1, Math.min(this.end, to + pad))];
  }

  keep() {
    const url = new URL(location.href);
    const { chosen } = this;
    if (chosen === null) url.searchParams.delete("range");
    else url.searchParams.set("range", rangeQuery(chosen));
    history.replaceState(history.state, "", url);
  }
}

/** The field in which a range is typed, and the buttons beside it. */
export class RangeField {
  constructor(store, span) {
    Object.assign(this, { store, span, field: id("range") });
    id("range-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.take();
    });
    this.field.addEventListener("change", () => this.take());
    this.field.addEventListener("input", () => this.refuse(false));
    this.field.addEventListener("keydown", (event) => event.key === "Escape" && this.giveUp());
    id("earlier").addEventListener("click", () => span.move(-1));
    id("later").addEventListener("click", () => span.move(1));
    id("wider").addEventListener("click", () => span.widen());
    span.changed.push(() => this.show());
    store.on(() => this.field.value === this.said && this.show());
    this.said = "";
  }

  get wall() {
    const { view } = this.store;
    return view && !view.simulated ? view.submitted_wall_s : 0;
  }

  take() {
    if (!this.store.view || this.field.value === this.said) return;
    const chosen = parseRange(this.field.value, this.wall, this.span.end);
    if (chosen === undefined) return this.refuse(true);
    this.span.choose(chosen);
    const [from, to] = this.span.range();
    announce(chosen === null ? "charts show the whole job" : `charts show ${duration(to - from)}`);
  }

  giveUp() {
    this.field.value = this.said;
    this.refuse(false);
    this.field.blur();
  }

  refuse(wrong) {
    setAttributes(this.field, { "aria-invalid": wrong ? "true" : null });
    id("range-wrong").hidden = !wrong;
    if (wrong) setText(id("range-wrong"), `Not a time of this job. Try ${this.wall ? TIMES : LENGTHS}, or all.`);
  }

  show() {
    this.refuse(false);
    this.said = rangeText(this.span.chosen, this.wall);
    this.field.placeholder = this.wall ? "15 min, 9:00-9:30" : "3 d, 2 d - 4 d";
    if (this.field.value !== this.said) this.field.value = this.said;
    const whole = this.span.chosen === null;
    for (const name of ["earlier", "later", "wider"]) id(name).disabled = whole;
    id("later").disabled = !Array.isArray(this.span.chosen);
  }
}
