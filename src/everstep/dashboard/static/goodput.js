// Where the accelerators' time went: a bar of the whole job, a table, and the lost share over time.

import { h, keyed, setText } from "./dom.js";
import { UNKNOWN, percent, spent } from "./format.js";
import { causeText, total } from "./words.js";
import { Plot } from "./plot.js";
import { newest, percentAxis, within } from "./curves.js";

const id = (name) => document.getElementById(name);

/** Buckets of observe.view in the order in which they are stacked, and what is in them (docs/goodput.md). */
const MEANING = {
  productive: "members make steps, and these last",
  "redundant work": "steps that are computed twice as a precaution",
  "redone work": "steps that are made again, and the one that was under way when a fault came",
  detection: "from a fault until it was known",
  recovery: "from there until steps are made again",
  "checkpoint stall": "members stand still for a save",
  "straggler loss": "the part of each step in which all wait for one that is slow",
  start: "before the first step and after the last one, and a newcomer's way to its first",
  "waiting for capacity": "accelerators that the job wants and has not, or has and cannot run with",
  "idle standby": "spares, and places that were drained",
};
export const BUCKETS = Object.keys(MEANING);
const SHOWN = { start: "start and end" };
const LOST = BUCKETS.slice(1);
const CAUSES_SHOWN = 6;
const AREA = 0.75; // weight of the areas under the lines

export const slug = (bucket) => `bucket-${bucket.replaceAll(" ", "-")}`;

export class Goodput {
  constructor(store, span, marks, day) {
    Object.assign(this, { store, span, marks, day, hidden: new Set() });
    this.plot = this.makePlot();
    id("bucket-chart").append(this.plot.element);
    for (const shared of [span, day]) shared.changed.push(() => this.plot.draw());
    store.on((changed) => {
      if (changed.has("buckets") || changed.has("costs")) this.draw();
      if (changed.has("bucket_series")) this.curve();
    });
  }

  draw() {
    const { buckets, costs, exit_code } = this.store.view;
    const sum = total(buckets);
    const rows = BUCKETS.filter((name) => buckets[name] > 0).map((name) => ({
      name,
      spent: buckets[name],
      share: buckets[name] / sum,
    }));
    keyed(id("share"), rows, (row) => row.name, segment);
    const said = rows.map((row) => `${row.name} ${percent(row.share)}`).join(", ");
    id("share").setAttribute("aria-label", said || "nothing yet");
    keyed(
      id("bucket-rows"),
      rows,
      (row) => row.name,
      (row) => shareRow(row, swatch(row), LOST.includes(row.name) && this.toggle(row.name)),
    );
    setText(id("goodput-note"), sum > 0 ? `${spent(sum)} of accelerators (acc) ${exit_code === null ? "until now" : "in all"}` : "nothing yet");
    this.causes(costs, sum);
  }

  causes(costs, sum) {
    const rows = Object.entries(costs)
      .filter(([, lost]) => lost > 0)
      .sort((a, b) => b[1] - a[1]);
    const shown = rows.slice(0, CAUSES_SHOWN).map(([name, lost]) => ({ name, spent: lost, share: lost / sum }));
    const rest = rows.slice(CAUSES_SHOWN).reduce((all, [, lost]) => all + lost, 0);
    if (rest > 0) shown.push({ name: "all others", spent: rest, share: rest / sum });
    id("causes-title").hidden = !shown.length;
    keyed(
      id("cause-rows"),
      shown,
      (row) => row.name,
      (row) => shareRow(row, null),
    );
  }

  makePlot() {
    const lines = LOST.map((name, i) => ({ label: name, color: slug(name), width: 1, fill: i ? 0 : AREA }));
    return new Plot({
      title: "Lost share",
      format: percent,
      axis: percentAxis,
      zero: true,
      lines,
      // From the top line down: each one's area reaches to the line below it.
      bands: lines.map((line, i) => [i + 1, i, line.color, AREA]).slice(1),
      readout: (data, index, range) => this.readout(data, index, range),
      marks: () => this.marks.made,
      range: () => this.span.range(),
      wall: () => this.day.wall,
      zoom: (range) => this.span.choose(range),
    });
  }

  /** A bucket's name is the legend of the chart: pressed, it hides what would dwarf the others. */
  toggle(name) {
    const press = () => {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      this.curve();
    };
    const said = SHOWN[name] ?? name;
    const about = { type: "button", class: "legend-name", title: `${MEANING[name]}; a press hides it in the chart` };
    const button = h("button", { ...about, "aria-pressed": "true", onclick: press }, said);
    return button;
  }

  /** Shares stacked: line i is the sum of the first i + 1 buckets. */
  curve() {
    const { bucket_series: all } = this.store.view;
    const lead = Object.values(all)[0];
    if (!lead) return this.plot.set([[], ...LOST.map(() => [])]);
    const known = lead.mean.map((_, i) => BUCKETS.some((name) => (all[name]?.mean[i] ?? null) !== null));
    const times = lead.mean.map((_, i) => (i + 0.5) * lead.every_s);
    let below = times.map(() => 0);
    const stacked = LOST.map((name) => {
      if (!this.hidden.has(name)) below = below.map((sum, i) => sum + (all[name]?.mean[i] ?? 0));
      return below.map((sum, i) => (known[i] ? sum : null));
    });
    this.plot.set([times, ...stacked]);
  }

  readout([times, ...stacked], index, range) {
    const [first, end] = index === null ? within(times, range) : [index, index + 1];
    const at = newest(stacked.at(-1) ?? [], end);
    if (at < first || stacked.at(-1)[at] === null) return { value: UNKNOWN, more: "", at: null };
    const shares = LOST.map((name, i) => [name, stacked[i][at] - (i ? stacked[i - 1][at] : 0)]).filter(
      ([, x]) => x > 5e-4,
    );
    shares.sort((a, b) => b[1] - a[1]);
    const parts = shares.slice(0, 2).map(([name, x]) => `${name} ${percent(x)}`);
    return { value: percent(Math.min(1, stacked.at(-1)[at])), more: parts.join(", "), at: times[at] };
  }
}

function segment(row) {
  const element = h("span", { class: slug(row.name) });
  element.show = ({ name, share }) => {
    element.style.flexGrow = share;
    element.title = `${SHOWN[name] ?? name}, ${percent(share)}: ${MEANING[name]}`;
  };
  return element;
}

const swatch = (row) => h("span", { class: `swatch ${slug(row.name)}`, "aria-hidden": "true" });

function shareRow(row, mark, button) {
  const [share, time] = [h("td", { class: "num" }), h("td", { class: "num" })];
  const element = h(
    "tr",
    {},
    h(
      "th",
      { scope: "row", title: MEANING[row.name] },
      mark,
      button || (mark ? (SHOWN[row.name] ?? row.name) : causeText(row.name)),
    ),
    share,
    time,
  );
  element.show = (now) => {
    setText(share, percent(now.share));
    setText(time, spent(now.spent));
  };
  return element;
}
