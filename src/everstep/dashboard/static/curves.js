// A View's Series as what uPlot draws, and which charts there are.

import { UNKNOWN, count, percent, rate, significant, stepTime } from "./format.js";

const GAP = 4; // times what is usual between two points: more is a gap in the curve

/** Series -> [times, low, high, mean] of the bins that hold something, with a hole where the curve has one. */
export function points(series) {
  const data = [[], [], [], []];
  const { every_s: every, mean, low, high } = series;
  const filled = [];
  mean.forEach((value, i) => value !== null && filled.push(i));
  const hole = GAP * usual(filled);
  let before = -1;
  for (const i of filled) {
    if (before >= 0 && i - before > hole) push(data, ((before + i + 1) / 2) * every, null, null, null);
    push(data, (i + 0.5) * every, low[i] ?? mean[i], high[i] ?? mean[i], mean[i]);
    before = i;
  }
  return data;
}

function push(data, ...values) {
  values.forEach((value, i) => data[i].push(value));
}

/** Bins from one filled one to the next, in the middle of all. */
function usual(filled) {
  const apart = filled
    .slice(1)
    .map((i, at) => i - filled[at])
    .sort((a, b) => a - b);
  return apart[Math.floor(apart.length / 2)] ?? 1;
}

export function newest(values, until = values.length) {
  for (let i = until - 1; i >= 0; i--) if (values[i] !== null) return i;
  return -1;
}

/** Bins of this stretch of time: [first, end). */
export function within(times, [from, to]) {
  const first = times.findIndex((at) => at >= from);
  const end = times.findLastIndex((at) => at <= to) + 1;
  return first < 0 ? [0, 0] : [first, Math.max(first, end)];
}

/** What a curve's caption says: the value under the cursor, and how far it went in that bin; else the newest one that
 * is shown, and how far all went that are. */
export function readout({ format, axis }) {
  const bare = axis ?? format;
  return ([times, low, high, mean], index, range) => {
    const pointed = index !== null && mean[index] !== null;
    const [first, end] = pointed ? [index, index + 1] : within(times, range);
    const at = newest(mean, end);
    if (at < first) return { value: UNKNOWN, more: "", at: null };
    const [least, most] = extent(low.slice(first, end), high.slice(first, end));
    const middle = average(mean.slice(first, end));
    const wide = most - least > (pointed ? 0.02 * Math.abs(mean[at]) : 0);
    const said = pointed ? [] : [`mean ${bare(middle)}`];
    const more = wide ? [`${bare(least)} to ${bare(most)}`, ...said].join(", ") : "";
    return { value: format(mean[at]), more, at: times[at] };
  };
}

function extent(low, high) {
  const known = (values) => values.filter((y) => y !== null);
  return [Math.min(...known(low)), Math.max(...known(high))];
}

function average(values) {
  const known = values.filter((y) => y !== null);
  return known.reduce((sum, y) => sum + y, 0) / known.length;
}

export const percentAxis = (y) => `${significant(y * 100)} %`;

const FIRST = { steps_per_s: 0, step_s: 1, members: 2, ettr: 3 };
const KNOWN = {
  steps_per_s: { title: "Throughput", format: rate, axis: (y) => significant(y), color: "accent", zero: true },
  step_s: { title: "Step time", format: stepTime, axis: (y) => (y > 0 ? stepTime(y) : "0"), color: "accent" },
  members: { title: "Accelerators in steps", format: count, whole: true, stepped: true, color: "accent", zero: true },
  ettr: { title: "ETTR", format: percent, axis: percentAxis, color: "good-mark" },
};

/** How the series NAME is drawn. A metric has the unit that the script gave it: none that we know. */
export function kindOf(name) {
  if (KNOWN[name]) return KNOWN[name];
  const title = name.replace(/^metric:/, "");
  return {
    title: title === "loss" ? "Loss" : title,
    format: (y) => significant(y, 4),
    axis: (y) => significant(y),
    color: "metric",
  };
}

/** Loss first, then what every job has, then the script's other metrics. */
export function order(names) {
  const metrics = names.filter((name) => name.startsWith("metric:")).sort();
  const lead =
    metrics.find((name) => name === "metric:loss") ?? metrics.find((name) => name.includes("loss")) ?? metrics[0];
  const ours = names.filter((name) => name in FIRST).sort((a, b) => FIRST[a] - FIRST[b]);
  const others = names.filter((name) => !ours.includes(name) && !metrics.includes(name)).sort();
  return { main: lead ? [lead, ...ours] : ours, more: [...metrics.filter((name) => name !== lead), ...others] };
}
