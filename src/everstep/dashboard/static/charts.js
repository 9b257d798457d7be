// The panel of curves: which ones, over which span of time, with incidents that can be opened.

import { h, keyed, setAttributes, setText } from "./dom.js";
import { clock, plural } from "./format.js";
import { kindOf, order, points, readout } from "./curves.js";
import { incidentTitle, isFault, toll } from "./words.js";
import { Plot } from "./plot.js";

const SPANS = [
  ["30 d", 2592000],
  ["7 d", 604800],
  ["1 d", 86400],
  ["1 h", 3600],
  ["10 min", 600],
  ["1 min", 60],
];
const LEAST_BINS = 10; // a span of fewer shows nothing
const FEW = 3; // more than so many extra metrics wait behind a button
const REDRAW_MS = 400;

/** Incidents and redone spans of the View, ready for charts; made once for each View. */
export class Marks {
  constructor(store, span) {
    this.store = store;
    this.span = span;
    this.made = { incidents: [], redone: [], open: (items) => this.open(items) };
    store.on((changed) => {
      if (changed.has("incidents") || changed.has("redone")) this.renew();
    });
  }

  renew() {
    const { incidents, redone, submitted_wall_s: wall } = this.store.view;
    this.made.incidents = incidents.map((incident) => ({
      id: incident.id,
      opened_s: incident.opened_s,
      fault: isFault(incident),
      label: [`${clock(wall, incident.opened_s)} ${incidentTitle(incident)}`, toll(incident)]
        .filter(Boolean)
        .join("; "),
    }));
    this.made.redone = redone;
  }

  /** One incident: its page. Several: look closer, unless they are too near for that. */
  open(items) {
    const [first, last] = [items[0].opened_s, items.at(-1).opened_s];
    const [from, to] = this.span.range();
    if (items.length > 1 && last - first > (to - from) / 1000) {
      const pad = (last - first) * 0.3;
      return this.span.choose([Math.max(0, first - pad), last + pad]);
    }
    location.hash = `#/incident/${encodeURIComponent(items.at(-1).id)}`;
  }
}

export class Charts {
  constructor(store, span, marks, day) {
    Object.assign(this, { store, span, marks, day, plots: new Map(), all: false, dueMs: 0 });
    this.more = document.getElementById("more-metrics");
    this.more.addEventListener("click", () => this.toggle());
    span.changed.push(() => this.redraw());
    day.changed.push(() => this.redraw());
    store.on((changed) => {
      if (changed.has("series")) this.later();
      else if (changed.has("incidents") || changed.has("redone")) this.redraw();
    });
    document.getElementById("charts").addEventListener("dblclick", () => span.choose(null));
  }

  /** Curves change with every step: twice a second is enough for eyes. */
  later() {
    const waits = this.dueMs - performance.now();
    if (waits <= 0) return this.draw();
    this.timer ??= setTimeout(() => this.draw(), waits);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    this.dueMs = performance.now() + REDRAW_MS;
    const { series } = this.store.view;
    const { main, more } = order(Object.keys(series).filter((name) => series[name].mean.some((y) => y !== null)));
    const shown = this.all || more.length <= FEW ? [...main, ...more] : main;
    document.getElementById("charts-note").hidden = shown.length > 0;
    this.offer(more);
    keyed(
      document.getElementById("charts"),
      shown,
      (name) => name,
      (name) => this.make(name),
    );
    this.buttons();
  }

  offer(more) {
    this.more.hidden = more.length <= FEW;
    setAttributes(this.more, { "aria-expanded": String(this.all) });
    setText(this.more, this.all ? "Fewer metrics" : `${plural(more.length, "more metric")}`);
  }

  toggle() {
    this.all = !this.all;
    this.draw();
  }

  make(name) {
    const kind = kindOf(name);
    const { title, format, axis, color, zero, stepped } = kind;
    const edge = { label: "", color, width: 0, stepped };
    const plot = new Plot({
      title,
      format,
      axis,
      zero,
      whole: kind.whole,
      banded: true,
      lines: [edge, edge, { label: title, color, stepped }],
      bands: [[2, 1, color, 0.22]],
      readout: readout(kind),
      marks: () => this.marks.made,
      range: () => this.span.range(),
      wall: () => this.day.wall,
      zoom: (range) => this.span.choose(range),
    });
    plot.element.show = (wanted) => plot.set(points(this.store.view.series[wanted]));
    this.plots.set(name, plot);
    return plot.element;
  }

  redraw() {
    for (const plot of this.plots.values()) plot.draw();
    this.buttons();
  }

  /** Those spans that are shorter than the job; others are typed. */
  buttons() {
    const { now_s: now, series } = this.store.view;
    const least = LEAST_BINS * Math.min(...Object.values(series).map((curve) => curve.every_s));
    const fit = SPANS.filter(([, seconds]) => seconds < now && seconds >= least);
    const offers = [["whole job", null], ...fit];
    keyed(
      document.getElementById("spans"),
      offers,
      ([name]) => name,
      ([name, span]) => this.button(name, span),
    );
  }

  button(name, span) {
    const button = h("button", { type: "button", class: "quiet", onclick: () => this.span.choose(span) }, name);
    button.show = ([, now]) => setAttributes(button, { "aria-pressed": String(now === this.span.chosen) });
    return button;
  }
}
