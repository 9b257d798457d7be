// Workers and nodes of a View, ready to be drawn: pure functions.

import { loadOf } from "./load.js";

export const STATE = { ACTS: 0, WARMS: 1, WAITS: 2, SLOW: 3, STOPPED: 4, GONE: 5 }; // observe.view.WorkerState
export const STATE_TEXT = ["acts", "warming up", "standby", "slow", "stopped", "gone"];
export const TROUBLE = new Set([STATE.SLOW, STATE.STOPPED, STATE.GONE]);
const LOST_SHOWN = 16; // newest lost nodes that keep a place in the map

/** Own step time against the median: upper limits of the colours 0 to 3; more is colour 4. */
export const SLOWER = [1.05, 1.15, 1.3, 1.6];

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return NaN;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** 0 (as the others) to 4 (much slower); -1: nothing known. */
export function shade(ownS, medianS) {
  if (!(ownS >= 0) || !(medianS > 0)) return -1;
  const at = SLOWER.findIndex((limit) => ownS <= medianS * limit);
  return at < 0 ? SLOWER.length : at;
}

/** One object for each worker, in the order of ranks, and the median of their own step times. */
export function workersOf(view) {
  const columns = view.workers;
  const acting = columns.own_s.filter((own, i) => own >= 0 && columns.states[i] !== STATE.WAITS);
  const medianS = median(acting);
  const workers = columns.states.map((state, rank) => ({
    rank,
    // Who has steps of its own acts, also where a formation's first step was not told of each member.
    state: state === STATE.WARMS && columns.own_s[rank] >= 0 ? STATE.ACTS : state,
    node: columns.nodes[rank],
    local: columns.locals[rank] ?? -1,
    lives: columns.lives[rank] ?? 0,
    role: columns.roles[rank] ?? -1,
    ownS: columns.own_s[rank] ?? -1,
    rss: columns.rss_bytes[rank] ?? 0,
    shade: shade(columns.own_s[rank], medianS),
  }));
  return { workers, medianS };
}

/** Nodes with their workers: those that act by first rank, then spares and leavers, then the newest lost ones. */
export function nodesOf(view, workers) {
  const nodes = view.nodes.map((node, index) => ({ ...node, index, workers: [], load: loadOf(view, node.name) }));
  for (const worker of workers) nodes[worker.node]?.workers.push(worker);
  const here = nodes.filter((node) => node.state !== "lost" || node.workers.length);
  const lost = nodes.filter((node) => node.state === "lost" && !node.workers.length);
  lost.sort((a, b) => b.since_s - a.since_s);
  here.sort((a, b) => firstRank(a) - firstRank(b));
  const shared = domain(nodes);
  for (const node of nodes) node.short = node.name.slice(0, node.name.length - shared.length);
  return { nodes: [...here, ...lost.slice(0, LOST_SHOWN)], hidden: Math.max(0, lost.length - LOST_SHOWN) };
}

/** What all names have in common from a dot on: nobody needs to read it 125 times. */
function domain(nodes) {
  const ends = new Set(nodes.map((node) => node.name.slice(node.name.indexOf(".") >>> 0)));
  return ends.size === 1 && nodes.length > 1 ? [...ends][0] : "";
}

const firstRank = (node) => node.workers[0]?.rank ?? Number.MAX_SAFE_INTEGER;

/** Worst worker first: what a person on call looks for. */
export function severity(node) {
  const state = node.state === "lost" ? 6 : node.state === "leaving" ? 3 : 0;
  const workers = node.workers.map((w) => (TROUBLE.has(w.state) ? 4 + w.state : Math.max(0, w.shade) / 2));
  return Math.max(state, 0, ...workers);
}

/**
 * Many accelerators as few cells: each stands for `each` of them, and no state that has any is left out.
 * -> [{state, cells}] in order, and `each`.
 */
export function waffle(fleet, most) {
  const each = Math.max(1, niceAbove(fleet.total / most));
  const slow = Math.min(fleet.slow, fleet.acting);
  const parts = [
    ["acting", fleet.acting - slow],
    ["slow", slow],
    ["spare", fleet.spare],
    ["missing", fleet.missing],
  ];
  return {
    each,
    parts: parts.filter(([, n]) => n > 0).map(([state, n]) => ({ state, cells: Math.max(1, Math.round(n / each)) })),
  };
}

function niceAbove(x) {
  for (let base = 1; ; base *= 10) for (const step of [1, 2, 5]) if (base * step >= x) return base * step;
}
