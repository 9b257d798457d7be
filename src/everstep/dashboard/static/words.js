// What the numbers of a View mean, in words: pure functions, so that the page says the same thing everywhere.

import { duration, plural, ranges } from "./format.js";

export const WATCHED = ["slow", "anomaly"]; // incidents for which nobody stops (core.events.WATCHED)
const PLANNED = ["stop", "drain", "grow"]; // somebody asked for it: no fault
const QUIET_S = 10; // without a step, and five times what a step takes: then the page says so
const QUIET_STEPS = 5;
const RECENT = 5; // bins

const KINDS = {
  crash: "crash",
  exception: "exception",
  hang: "hang",
  slow: "slow worker",
  "node-lost": "node lost",
  stop: "asked to stop",
  drain: "drain",
  grow: "nodes join",
  incomplete: "incomplete",
  "rolled-back": "rolled back",
  "step-fell-back": "step fell back",
  "save-failed": "save failed",
  corrupt: "corrupt replica",
  anomaly: "metric anomaly",
};

/** Those that go by a word of the runtime, as everstep.observe.report says them; others speak for themselves. */
const CAUSES = {
  drain: "asked to leave",
  error: "an exception in the script",
  "exit-code": "the script ended with an error",
  grow: "new workers were taken in",
  hang: "made no progress",
  corrupt: "wrong bits in its state",
  "left-early": "left the loop before the others",
  "out-of-memory": "killed by the kernel for memory",
  signal: "killed by a signal",
  stop: "the job was asked to stop",
  stopped: "stopped (SIGSTOP, a debugger)",
  unfinished: "ended before its script had",
  start: "start and end",
};

export const causeText = (cause) => CAUSES[cause] ?? cause;

/** "re-route-micro-batches" (core.decisions.Action) as people write it. */
export const actionText = (action) =>
  action.replaceAll("-", " ").replace(/^re (?=[rp])/, "re-").replace("micro b", "micro-b");

const STAGES = {
  checking: "Checking nodes",
  forming: "Starting workers",
  running: "Training",
  "re-seating": "Re-seating members",
  suspect: "Looking into a hang",
  evicting: "Stopping workers",
  "re-forming": "Waiting for nodes",
  stopping: "Stopping",
  finished: "Finished",
  failed: "Failed",
};

export const kindText = (kind) => KINDS[kind] ?? kind;

/** Ranks and nodes in words, as everstep.observe.text says them. */
export function who(blames) {
  const nodes = [...new Set(blames.filter((b) => b.rank < 0 && b.node).map((b) => b.node))];
  const ranks = blames.filter((b) => b.rank >= 0);
  if (ranks.length === 1) nodes.push(`rank ${ranks[0].rank} on ${ranks[0].node}`);
  else if (ranks.length) nodes.push(`ranks ${ranges(ranks.map((b) => b.rank))}`);
  if (nodes.length > 4) return `${nodes.slice(0, 3).join(", ")} and ${nodes.length - 3} more`;
  return nodes.join(", ") || "no single worker";
}

/** "crash of rank 3 on node1". */
export function incidentTitle(incident) {
  const kind = kindText(incident.kind);
  return incident.culprits.length ? `${kind}: ${who(incident.culprits)}` : kind;
}

export const isOpen = (incident) => incident.outcome === "";
export const stops = (incident) => !WATCHED.includes(incident.kind);
/** A fault for which the job stands still: what a person on call must know of first. */
export const isFault = (incident) => stops(incident) && !PLANNED.includes(incident.kind);

/** What an incident cost the job, in the fewest words. */
export function toll(incident) {
  const parts = [];
  if (incident.downtime_s >= 0) parts.push(`${duration(incident.downtime_s)} without a step`);
  if (incident.redone_steps > 0) parts.push(`${plural(incident.redone_steps, "step")} redone`);
  return parts.join(", ");
}

export const total = (object) => Object.values(object).reduce((sum, x) => sum + x, 0);

/**
 * Is it training? `level`: ok, warn, bad, wait, done; `now`: seconds of the job; `live`: time passes by itself;
 * `cut`: nothing comes after this View. */
export function status(view, now, live, cut = false) {
  if (view.exit_code !== null) return ended(view);
  if (cut) return { level: "warn", label: "Broken off", detail: "the record stops without the job's end" };
  const open = view.incidents.filter(isOpen);
  const fault = open.filter(isFault).at(-1);
  if (fault) return { level: "bad", label: "Recovering", detail: incidentTitle(fault), incident: fault.id };
  if (view.stage !== "running" && view.stage !== "re-seating") {
    const level = view.steps > 0 ? "warn" : "wait";
    if (view.stage === "" && view.fleet.missing > 0) return { level, label: "Waiting for nodes", detail: missing(view) };
    const detail = open.length ? incidentTitle(open.at(-1)) : "";
    return { level, label: STAGES[view.stage] ?? (view.stage || "Not started"), detail, incident: open.at(-1)?.id };
  }
  const quiet = view.last_step_s < 0 ? -1 : now - view.last_step_s;
  if (live && quiet > Math.max(QUIET_S, QUIET_STEPS * view.step_s)) {
    return { level: "warn", label: "No new step", detail: `the last one was ${duration(quiet)} ago` };
  }
  if (view.steps === 0) return { level: "wait", label: "Starting", detail: "no step yet" };
  const watched = open.at(-1);
  if (watched) return { level: "warn", label: "Training", detail: incidentTitle(watched), incident: watched.id };
  if (view.stage === "re-seating") return { level: "ok", label: "Training", detail: "members change" };
  return { level: "ok", label: "Training", detail: missing(view) };
}

function ended(view) {
  if (view.exit_code === 0) return { level: "done", label: "Finished", detail: view.why };
  if (view.exit_code > 128) return { level: "warn", label: "Stopped", detail: view.why };
  return { level: "bad", label: "Failed", detail: `exit code ${view.exit_code}${view.why ? `: ${view.why}` : ""}` };
}

function missing(view) {
  return view.fleet.missing > 0 ? `${plural(view.fleet.missing, "accelerator")} missing` : "";
}

/** Accelerators of the job by what they do, whether its workers are listed or only counted. */
export function fleet(view) {
  if (view.fleet.total > 0) return view.fleet;
  const states = view.workers.states;
  const num = (...wanted) => states.filter((state) => wanted.includes(state)).length;
  return { total: states.length, acting: num(0, 1, 3), spare: num(2), missing: num(4, 5), slow: num(3) };
}

/** Steps per second: the middle one of the curve's newest bins, else what the recent step time says. */
export function throughput(view) {
  const curve = view.series.steps_per_s?.mean ?? [];
  const newest = curve
    .filter((x) => x > 0)
    .slice(-RECENT)
    .sort((a, b) => a - b);
  if (newest.length) return newest[newest.length >> 1];
  return view.step_s > 0 ? 1 / view.step_s : NaN;
}

/** Seconds until the goal at the recent pace, as much of the time being lost as until now; NaN: not known. */
export function remaining(view) {
  if (!(view.goal > 0) || !(view.step_s > 0) || view.exit_code !== null) return NaN;
  return ((view.goal - view.step) * view.step_s) / Math.max(0.05, view.ettr || 1);
}
