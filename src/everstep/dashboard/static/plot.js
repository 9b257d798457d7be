// One curve chart over the job's time: uPlot, with incidents marked above it and redone spans shaded behind it.

import { h, keyed, onResize, perFrame, rem, setText, token } from "./dom.js";
import { clock, duration } from "./format.js";

const APART = 1.7; // rem: marks that are closer become one
const ROOM = 1.1; // rem: to the right of a curve
const MANY = 24; // marks: with more of them, lines through the curves would hide these
const STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000,
  1728000, 4320000, 8640000, 17280000, 43200000,
];

const WHOLE = Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((n) => n * 10 ** power)).flat();

/** Seconds since the job's submission, as short as an axis needs it. */
export function axisTime(s, stepS) {
  if (s === 0) return "0";
  if (stepS >= 86400) return `${Math.round(s / 86400)} d`;
  const [d, hours, min, sec] = [
    Math.floor(s / 86400),
    Math.floor(s / 3600) % 24,
    Math.floor(s / 60) % 60,
    Math.floor(s % 60),
  ];
  const two = (n) => String(n).padStart(2, "0");
  if (d) return stepS >= 3600 ? `${d} d ${two(hours)} h` : `${d} d ${two(hours)}:${two(min)}`;
  if (hours) return stepS >= 3600 ? `${hours} h` : `${hours} h ${two(min)}${stepS < 60 ? `:${two(sec)}` : ""}`;
  if (min) return stepS >= 60 ? `${min} min` : `${min}:${two(sec)}`;
  return `${sec} s`;
}

/** Seconds of the job at which an axis has a label: round ones, of the day where `wall` (its submission) is given. */
export function ticks(from, to, stepS, wall) {
  const ahead = wall ? wall - new Date((wall + from) * 1000).getTimezoneOffset() * 60 : 0;
  const first = Math.ceil((from + ahead) / stepS - 1e-9);
  const num = Math.floor((to + ahead) / stepS + 1e-9) - first + 1;
  return Array.from({ length: Math.max(0, num) }, (_, i) => (first + i) * stepS - ahead);
}

/** Time of day, with the date instead at midnight. */
export function axisClock(wall, s, stepS) {
  const date = new Date(Math.round((wall + s) * 1000));
  const time = date.toLocaleTimeString("en-GB");
  if (stepS >= 86400 || time === "00:00:00") return date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return stepS < 60 ? time : time.slice(0, 5);
}

/** Whether the label of this moment would leave the chart at its right end. */
function cut(u, s, stepS) {
  const { min, max } = u.scales.x;
  const [half, room] = [(stepS < 60 ? 2 : 1.3) * rem(), ROOM * rem()];
  return ((max - s) / (max - min)) * (u.bbox.width / devicePixelRatio) + room < half;
}

/** Marks of one place in one: [{x, items}], by pixels from the left. */
export function gather(items, toPixel, width, apart) {
  const groups = [];
  for (const item of items) {
    const x = toPixel(item.opened_s);
    if (x < 0 || x > width) continue;
    const last = groups.at(-1);
    if (last && x - last.x < apart) last.items.push(item);
    else groups.push({ x, items: [item] });
  }
  return groups;
}

/**
 * `lines`: [{label, color, width?, fill?}] for uPlot; `bands`: pairs of them with the space between filled.
 * `marks`: {incidents, redone, open(items)}, `range()` -> [from, to] and `wall()` -> when the job was submitted, where
 * the time of day is wanted, are asked for at each drawing. `readout(data, index, range)`: index null: none is pointed at.
 */
export class Plot {
  constructor({
    title,
    format,
    axis = format,
    zero = false,
    whole = false,
    banded = false,
    lines,
    bands = [],
    readout,
    marks,
    range,
    wall,
    zoom,
  }) {
    Object.assign(this, { title, format, axis, zero, whole, banded, lines, bands, readout, marks, range, wall, zoom });
    this.data = [[], ...lines.map(() => [])];
    this.value = h("span", { class: "value" });
    this.more = h("span", { class: "more" });
    this.area = h("div", { class: "plot", "aria-hidden": "true" });
    const caption = h("figcaption", {}, h("span", { class: "name" }, title), this.value, this.more);
    this.element = h("figure", { class: "chart" }, caption, this.area);
    this.draw = perFrame(() => this.drawn());
    onResize(this.area, () => this.rebuild());
  }

  set(data) {
    this.data = data;
    this.draw();
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
    this.draw();
  }

  drawn() {
    const width = Math.floor(this.area.clientWidth);
    if (width < 40) return; // not shown
    if (this.plot) this.plot.setData(this.data, true);
    else this.plot = new uPlot(this.options(width), this.data, this.area);
    this.read(this.plot);
  }

  options(width) {
    const font = `${0.75 * rem()}px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { font, stroke: token("muted"), grid: { stroke: token("line"), width: 1 }, ticks: { show: false } };
    return {
      width,
      height: this.area.clientHeight,
      padding: [1.1 * rem(), ROOM * rem(), 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { show: false },
        sync: { key: "job", scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
      },
      scales: {
        x: { time: false, range: (u, low, high) => this.span(low, high) },
        y: { range: (u, low, high) => this.heights(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 1.7 * rem(),
          gap: 0.3 * rem(),
          space: 5.2 * rem(),
          incrs: STEPS_S,
          splits: (u, index, low, high, step) => ticks(low, high, step, this.wall()),
          values: (u, splits, index, space, step) => splits.map((s) => (cut(u, s, step) ? "" : this.moment(s, step))),
        },
        {
          ...axis,
          size: 4.1 * rem(),
          gap: 0.3 * rem(),
          space: (u, index, low, high, height) => Math.max(1.4 * rem(), Math.min(2.2 * rem(), height / 4)),
          ...(this.whole ? { incrs: WHOLE } : {}),
          values: (u, splits) => splits.map((y) => this.axis(y).replaceAll("\u00a0", " ")),
        },
      ],
      series: [{}, ...this.lines.map((line) => this.series(line))],
      bands: this.bands.map(([above, below, color, alpha]) => ({
        series: [above, below],
        fill: faded(token(color), alpha),
      })),
      hooks: {
        drawClear: [(u) => this.shade(u)],
        draw: [(u) => this.mark(u)],
        setCursor: [(u) => this.read(u)],
        setSelect: [(u) => this.selected(u)],
      },
    };
  }

  series(line) {
    return {
      label: line.label,
      stroke: token(line.color),
      width: ((line.width ?? 1.5) * rem()) / 14, // as the text grows with the screen
      points: { show: (u) => line.width !== 0 && u.data[0].length < 3 }, // too few for a line
      paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      fill: line.fill ? faded(token(line.color), line.fill) : undefined,
    };
  }

  moment(s, stepS) {
    const wall = this.wall();
    return wall ? axisClock(wall, s, stepS) : axisTime(s, stepS);
  }

  span(low, high) {
    const [from, to] = this.range();
    return to > from ? [from, to] : [low ?? 0, high ?? 1];
  }

  heights(low, high) {
    if (low === null || low === undefined) return [0, 1];
    [low, high] = this.within(low, high);
    const room = (high - (this.zero ? 0 : low)) * 0.08 || Math.abs(high) * 0.05 || 1;
    return this.zero ? [0, high + room] : [low - room, high + room];
  }

  /** Where a few steps of many were far off, the curve itself would be a flat line: their band may leave the chart. */
  within(low, high) {
    const middle = this.data.at(-1).filter((y) => y !== null);
    if (!this.banded || !middle.length) return [low, high];
    const [least, most] = [Math.min(...middle), Math.max(...middle)];
    const far = Math.max(most - least, 0.1 * Math.abs(most));
    return [Math.max(low, least - far), Math.min(high, most + far)];
  }

  /** Behind the curves: spans whose steps were made again, and a line for each incident. */
  shade(u) {
    const { redone, incidents } = this.marks();
    const { left, top, width, height } = u.bbox;
    const x = (s) => Math.min(left + width, Math.max(left, u.valToPos(s, "x", true)));
    u.ctx.save();
    u.ctx.fillStyle = faded(token("redone"), 0.28);
    for (const [from, to] of redone) u.ctx.fillRect(x(from), top, Math.max(devicePixelRatio, x(to) - x(from)), height);
    const within = incidents.filter(
      (incident) => incident.opened_s >= u.scales.x.min && incident.opened_s <= u.scales.x.max,
    );
    for (const incident of within.length > MANY ? [] : within) {
      const at = u.valToPos(incident.opened_s, "x", true);
      u.ctx.fillStyle = faded(token(incident.fault ? "bad-mark" : "warn-mark"), 0.55);
      u.ctx.fillRect(Math.round(at), top, Math.max(1, Math.round(devicePixelRatio)), height);
    }
    u.ctx.restore();
  }

  mark(u) {
    const { incidents, open } = this.marks();
    const groups = gather(incidents, (s) => u.valToPos(s, "x"), u.over.clientWidth, APART * rem());
    if (!u.over.contains(this.holder)) {
      this.holder = h("div", { class: "marks" });
      u.over.append(this.holder);
    }
    keyed(
      this.holder,
      groups,
      (group) => group.items[0].id,
      () => markButton(open),
    );
  }

  read(u) {
    const index = u?.cursor.idx ?? null;
    const { value, more, at } = this.readout(this.data, index, this.range());
    setText(this.value, value);
    const wall = this.wall();
    const moment = index === null || at === null ? "" : `at ${wall ? clock(wall, at) : duration(at)}`;
    setText(this.more, [more, moment].filter(Boolean).join(", "));
    this.more.title = this.more.textContent;
  }

  selected(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.zoom([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }
}

/** It stays the same button while the curves move on: a press that takes a moment still counts. */
function markButton(open) {
  const button = h("button", { type: "button", tabindex: "-1", onmousedown: (event) => event.stopPropagation() });
  let items = [];
  button.addEventListener("click", () => open(items));
  button.show = (group) => {
    items = group.items;
    const last = items.at(-1);
    const many = items.length > 1;
    button.className = `mark ${items.some((item) => item.fault) ? "bad" : "warn"}${many ? " many" : ""}`;
    button.title = many ? `${items.length} incidents, the last: ${last.label}` : last.label;
    button.style.left = `${group.x}px`;
    setText(button, many ? String(items.length) : "");
  };
  return button;
}

/** A colour of the theme (#rrggbb) with less weight. */
export function faded(color, alpha) {
  return color.length === 7
    ? color +
        Math.round(alpha * 255)
          .toString(16)
          .padStart(2, "0")
    : color;
}
