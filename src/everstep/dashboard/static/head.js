// The first line: is it training? And the numbers that a person on call asks for next.

import { announce, h, keyed, setText } from "./dom.js";
import { UNKNOWN, age, count, duration, percent, rate, significant, stepTime } from "./format.js";
import { fleet, incidentTitle, remaining, status, throughput, toll } from "./words.js";

const OVER =
  "The job has ended, and its server with it: this is the last of it. `everstep dashboard` shows its record.";
const PATIENCE_MS = 1500; // long records take their time
const id = (name) => document.getElementById(name);

export class Head {
  constructor(store) {
    this.store = store;
    store.on(() => this.draw());
    setTimeout(() => store.view || setText(id("status-detail"), "the record is being read"), PATIENCE_MS);
    setInterval(() => store.view && this.draw(), 1000); // ages grow although nothing comes
    document.addEventListener("everstep-trouble", (event) => this.trouble(event.detail));
  }

  draw() {
    const { view, now } = this.store;
    const says = status(view, now, this.store.isLive, this.store.isCut);
    id("status").dataset.level = says.level;
    setText(id("status-label"), says.label);
    if (this.level && this.level !== says.level) announce(`${says.label}. ${says.detail}`);
    this.level = says.level;
    this.detail(says);
    setText(id("job"), view.job);
    setText(id("about"), about(view, now, this.store.isCut));
    keyed(id("tiles"), tiles(view, now), (tile) => `${tile.name} ${Boolean(tile.href)}`, makeTile);
    document.title = `${says.label} · ${view.job || "job"} · step ${count(view.step)}`;
    this.mode();
    this.trouble(this.store.trouble);
  }

  detail(says) {
    const key = `${says.detail} ${says.incident ?? ""}`;
    if (key === this.said) return;
    this.said = key;
    const link = says.incident && h("a", { href: `#/incident/${encodeURIComponent(says.incident)}` }, says.detail);
    id("status-detail").replaceChildren(link || says.detail);
  }

  mode() {
    const { info, past } = this.store;
    const text = past && info?.mode === "live" ? "looking back" : info?.mode === "live" ? "" : info?.mode;
    id("mode").hidden = !text;
    setText(id("mode"), text ?? "");
  }

  trouble(lost) {
    const damage = this.store.info?.trouble;
    const { over } = this.store;
    id("trouble").hidden = !lost && !damage && !over;
    id("trouble").classList.toggle("calm", over);
    if (over) return setText(id("trouble"), OVER);
    const old = this.store.live ? "; what you see may be old" : "";
    setText(id("trouble"), lost ? `No news from the server: ${lost}${old}.` : damage ? `The record: ${damage}` : "");
  }
}

function about(view, now, isCut) {
  const parts = [
    view.script.split("/").at(-1),
    view.epochs.length || view.epoch ? `epoch ${count(view.epochs.at(-1)?.epoch ?? view.epoch)}` : "",
    `${view.exit_code !== null || isCut ? "ran" : "running"} for ${duration(now)}`,
  ];
  if (view.restarts > 0) parts.push(`formed anew ${view.restarts === 1 ? "once" : `${count(view.restarts)} times`}`);
  return parts.filter(Boolean).join(" · ");
}

function tiles(view, now) {
  return [step(view), speed(view), pace(view), loss(view), members(view), effective(view), last(view, now)].filter(
    Boolean,
  );
}

function step(view) {
  const goal = view.goal > 0 ? `of ${count(view.goal)}, ${percent(Math.max(0, view.step) / view.goal)}` : "";
  const left = remaining(view);
  const rest = Number.isFinite(left) ? `${duration(left)} to go` : "";
  return {
    name: "Step",
    value: view.step < 0 ? UNKNOWN : count(view.step),
    note: [goal, rest].filter(Boolean).join(", "),
  };
}

function speed(view) {
  return { name: "Step time", value: stepTime(view.step_s), note: view.step_s > 0 ? "recent mean" : "" };
}

function pace(view) {
  const redone = view.redone_steps > 0 ? `${count(view.redone_steps)} of ${count(view.steps)} steps were redone` : "";
  return { name: "Throughput", value: rate(throughput(view)), note: redone || (view.steps ? "no step redone" : "") };
}

function loss(view) {
  const name = "loss" in view.metrics ? "loss" : Object.keys(view.metrics).find((key) => key.includes("loss"));
  if (!name) return null;
  return {
    name: name === "loss" ? "Loss" : name,
    value: significant(view.metrics[name], 4),
    note: "newest, logged by the script",
  };
}

function members(view) {
  const now = fleet(view);
  if (view.exit_code !== null) return { name: "Accelerators", value: count(now.total), note: "at its end" };
  const notes = [`of ${count(now.total)}`];
  if (now.spare) notes.push(`${count(now.spare)} spare`);
  if (now.missing) notes.push(`${count(now.missing)} missing`);
  if (now.slow) notes.push(`${count(now.slow)} slow`);
  const unit = view.epoch || view.simulated ? "acting" : "here";
  return { name: "Accelerators", value: count(now.acting), unit, note: notes.join(", ") };
}

function effective(view) {
  const down = view.steps ? `${duration(view.downtime_s)} without a step` : "no step was made";
  return { name: "ETTR", value: percent(view.ettr), note: `effective training time; ${down}` };
}

function last(view, now) {
  const incident = view.incidents.at(-1);
  if (!incident) return { name: "Last incident", value: "none", note: "since the job began" };
  const note = [incidentTitle(incident), incident.outcome ? toll(incident) : "open"].filter(Boolean).join("; ");
  const href = `#/incident/${encodeURIComponent(incident.id)}`;
  return { name: "Last incident", value: age(now - incident.opened_s), note, href, wide: true };
}

function makeTile(tile) {
  const value = h("strong", {});
  const unit = h("span", { class: "unit" });
  const note = h(tile.href ? "a" : "span", { class: "note" });
  const element = h(
    "div",
    { class: tile.wide ? "tile wide" : "tile" },
    h("dt", {}, tile.name),
    h("dd", {}, value, unit, note),
  );
  element.show = (now) => {
    setText(value, now.value);
    setText(unit, now.unit ? ` ${now.unit}` : "");
    setText(note, now.note);
    if (now.href) note.setAttribute("href", now.href);
  };
  return element;
}
