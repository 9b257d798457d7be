// Numbers as people read them. Each returns text with its unit; unknown (negative, null, NaN) is a dash.

export const UNKNOWN = "–";
const SPACE = "\u00a0"; // no line break between a number and its unit

const known = (x) => typeof x === "number" && Number.isFinite(x);

/** 12345 -> "12,345". */
export function count(x) {
  return known(x) ? x.toLocaleString("en-US", { maximumFractionDigits: 0 }) : UNKNOWN;
}

/** `digits` significant ones, without an exponent unless that is shorter: 0.0412, 2.43, 1,230. */
export function significant(x, digits = 3) {
  if (!known(x)) return UNKNOWN;
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return x.toExponential(digits - 1);
  const before = size < 1 ? 0 : Math.floor(Math.log10(size)) + 1;
  if (before >= digits) return count(x);
  return Number(x.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits });
}

/** A ratio of 1 as percent: 98.2 %. Near 0 and near 1 more digits, never a rounded 100 % of something that lacks. */
export function percent(x) {
  if (!known(x)) return UNKNOWN;
  const value = x * 100;
  if (value !== 0 && Math.abs(value) < 0.001) return `<${SPACE}0.001${SPACE}%`;
  const far = Math.min(Math.abs(value), Math.abs(100 - value));
  const digits = far === 0 ? 0 : value > 100 ? 1 : far < 0.1 ? 3 : far < 10 ? 2 : 1;
  return `${value.toFixed(digits)}${SPACE}%`;
}

/** Seconds as everybody says them: 12 ms, 3.4 s, 2 min 05 s, 3 h 07 min, 12 d 04 h. */
export function duration(s) {
  if (!known(s) || s < 0) return UNKNOWN;
  if (s === 0) return `0${SPACE}s`;
  if (s < 0.9995) return `${s < 0.00995 ? significant(s * 1e3, 2) : Math.round(s * 1e3)}${SPACE}ms`;
  if (s < 59.95) return `${s.toFixed(1)}${SPACE}s`;
  if (Math.round(s) < 3600) return pair(Math.round(s), 60, "min", "s");
  if (Math.round(s / 60) < 1440) return pair(Math.round(s / 60), 60, "h", "min");
  return pair(Math.round(s / 3600), 24, "d", "h");
}

function pair(units, base, big, small) {
  const rest = String(units % base).padStart(2, "0");
  return `${Math.floor(units / base)}${SPACE}${big} ${rest}${SPACE}${small}`;
}

/** Step times need more digits than waits: 412 ms, 1.23 s, 83.2 s. */
export function stepTime(s) {
  if (!known(s) || s <= 0) return UNKNOWN;
  return s < 1 ? `${significant(s * 1e3)}${SPACE}ms` : `${significant(s)}${SPACE}s`;
}

/** Accelerator-seconds in the unit that suits: acc-s, acc-min, acc-h, and M (10^6) acc-h. */
export function spent(acceleratorS) {
  if (!known(acceleratorS) || acceleratorS < 0) return UNKNOWN;
  if (acceleratorS < 120) return `${significant(acceleratorS)}${SPACE}acc‑s`;
  if (acceleratorS < 7200) return `${significant(acceleratorS / 60)}${SPACE}acc‑min`;
  if (acceleratorS >= 3.6e9) return `${significant(acceleratorS / 3.6e9, 4)}${SPACE}M${SPACE}acc‑h`;
  return `${significant(acceleratorS / 3600)}${SPACE}acc‑h`;
}

/** Steps a second, or a minute or an hour where that is easier to read. */
export function rate(perS) {
  if (!known(perS)) return UNKNOWN;
  if (perS >= 0.1 || perS === 0) return `${significant(perS)}${SPACE}steps/s`;
  return perS >= 0.1 / 60 ? `${significant(perS * 60)}${SPACE}steps/min` : `${significant(perS * 3600)}${SPACE}steps/h`;
}

export function bytes(n) {
  if (!known(n) || n <= 0) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(n) / 10), units.length - 1);
  return `${significant(n / 1024 ** power)}${SPACE}${units[power]}`;
}

/** "1 step", "12 steps", "12 batches" (with the plural given). */
export function plural(n, one, many = `${one}s`) {
  return `${count(n)}${SPACE}${n === 1 ? one : many}`;
}

/** Moment of the job as time of day here, with the date when that is another day than `now`'s. */
export function clock(submittedWallS, atS, now = new Date()) {
  if (!known(atS) || atS < 0) return UNKNOWN;
  if (!submittedWallS) return `at ${duration(atS)}`;
  const date = new Date((submittedWallS + atS) * 1000);
  const time = date.toLocaleTimeString("en-GB");
  if (date.toDateString() === now.toDateString()) return time;
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return `${day}${SPACE}${time}`;
}

/** One unit is enough for an age: 12 s, 4 min, 3 h, 2 d. */
export function age(s) {
  if (!known(s) || s < 0) return UNKNOWN;
  if (s < 1) return "just now";
  if (s < 100) return `${Math.floor(s)}${SPACE}s ago`;
  if (s < 6000) return `${Math.round(s / 60)}${SPACE}min ago`;
  return s < 172800 ? `${Math.round(s / 3600)}${SPACE}h ago` : `${Math.round(s / 86400)}${SPACE}d ago`;
}

/** [0, 1, 2, 5] -> "0–2, 5"; at most `most` parts, then how many more there are. */
export function ranges(numbers, most = 6) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const parts = [];
  for (const n of sorted) {
    const last = parts.at(-1);
    if (last && n === last[1] + 1) last[1] = n;
    else parts.push([n, n]);
  }
  const shown = parts.slice(0, most).map(([a, b]) => (a === b ? `${a}` : `${a}–${b}`));
  const left = parts.slice(most).reduce((sum, [a, b]) => sum + b - a + 1, 0);
  return shown.join(", ") + (left ? ` and ${count(left)} more` : "");
}
