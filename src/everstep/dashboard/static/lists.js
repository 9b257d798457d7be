// Saves and copies by tier, epochs with their links, and alerts.

import { h, keyed, setAttributes, setText } from "./dom.js";
import { UNKNOWN, age, clock, count, duration, plural, ranges } from "./format.js";
import { incidentTitle } from "./words.js";
import { fact } from "./map.js";

const id = (name) => document.getElementById(name);

const LATE_S = 5; // heartbeats of two nodes are less apart
const EPOCH_CELLS = ["num", "time-cell", "num", "text-cell", "num", "num"];
// Where the table is too wide for the screen, its cells say what they are.
const EPOCH_LABELS = ["epoch", null, "members", null, "links kept / new", "first step"];

export class Lists {
  constructor(store) {
    this.store = store;
    store.on((changed) => {
      if (["saves", "saved_step", "memory_steps", "step"].some((name) => changed.has(name))) this.saves();
      if (changed.has("epochs")) this.epochs();
      if (changed.has("alerts")) this.alerts();
    });
  }

  saves() {
    const { view, now } = this.store;
    id("tiers").parentElement.hidden = view.simulated && view.saved_step <= 0; // where nothing is saved to disk
    keyed(id("tiers"), tiers(view, now), ([name]) => name, fact);
    const rows = [...view.saves].reverse().map((save) => ({ save, view }));
    keyed(
      id("save-rows"),
      rows,
      ({ save }) => `${save.step} ${save.requested_s}`,
      () => row(["num", "time-cell", "text-cell"], saveTexts),
    );
    id("save-rows").closest(".scroll").hidden = !rows.length;
  }

  epochs() {
    const { view } = this.store;
    const rows = [...view.epochs].reverse().map((epoch) => ({ epoch, view }));
    id("epochs-note").hidden = rows.length > 0;
    id("epoch-rows").closest(".scroll").hidden = !rows.length;
    keyed(
      id("epoch-rows"),
      rows,
      ({ epoch }) => `${epoch.epoch} ${epoch.formed_s}`,
      () => row(EPOCH_CELLS, epochTexts, EPOCH_LABELS),
    );
  }

  alerts() {
    const { view } = this.store;
    id("alerts-title").hidden = !view.alerts.length;
    const items = view.alerts.map((alert, i) => ({ alert, view, key: `${alert.at_s} ${i}` })).reverse();
    keyed(
      id("alert-list"),
      items,
      (item) => item.key,
      () => {
        const [when, text] = [h("span", { class: "when" }), h("span", {})];
        const element = h("li", {}, when, text);
        element.show = ({ alert }) => {
          setText(when, `${clock(view.submitted_wall_s, alert.at_s)} ${alert.kind}`);
          setText(text, alert.text);
        };
        return element;
      },
    );
  }
}

/** What would be lost if everything stopped now: the question that saves are an answer to. */
function tiers(view, now) {
  const facts = [];
  const ages = Object.entries(view.memory_steps);
  if (ages.length) {
    const oldest = Math.min(...ages.map(([, step]) => step));
    facts.push(["In memory of all roles", `step ${count(oldest)} or newer`]); // it is told of every 10 s, or less often
    const newest = Math.max(...ages.map(([, step]) => step));
    const late = ages.filter(([, step]) => (newest - step) * view.step_s > LATE_S);
    if (late.length) facts.push(["Behind the others", `${late.length > 1 ? "roles" : "role"} ${names(late.map(([role]) => role))}`]);
    facts.push(["Roles with copies", count(ages.length)]);
  }
  const saved = view.saves.filter((save) => save.durable_s >= 0).at(-1);
  if (view.saved_step >= 0) {
    const when = saved ? `, ${age(now - saved.durable_s)}` : "";
    facts.push(["On disk", `step ${count(view.saved_step)}${behind(view, view.saved_step)}${when}`]);
  } else facts.push(["On disk", "nothing yet"]);
  facts.push(["Saves that became durable", count(view.num_saves)]);
  if (view.saves_failed) facts.push(["Saves that failed", count(view.saves_failed)]);
  return facts;
}

function behind(view, step) {
  const lost = view.step - step;
  if (!(lost > 0)) return ", the newest";
  return `, ${plural(lost, "step")} (${duration(lost * view.step_s)}) behind`;
}

const names = (roles) =>
  roles.every((role) => /^\d+$/.test(role)) ? ranges(roles.map(Number)) : roles.slice(0, 6).join(", ");

function row(kinds, texts, labels = []) {
  const cells = kinds.map((kind, i) =>
    h(i ? "td" : "th", { class: kind, scope: i ? null : "row", "data-label": labels[i] }),
  );
  const element = h("tr", {}, ...cells);
  element.show = (item) => {
    texts(item, element).forEach((text, i) => setText(cells[i], text));
  };
  return element;
}

function saveTexts({ save, view }, element) {
  setAttributes(element, { class: save.failed ? "failed" : null });
  const asked = save.requested_s >= 0; // nobody tells when a script's own saves began
  const at = (s) => clock(view.submitted_wall_s, s);
  const done = asked ? `after ${duration(save.durable_s - save.requested_s)}` : at(save.durable_s);
  const durable = save.failed ? `failed: ${save.failed}` : save.durable_s < 0 ? "under way" : done;
  return [count(save.step), asked ? at(save.requested_s) : UNKNOWN, durable];
}

function epochTexts({ epoch, view }, element) {
  setAttributes(element, { title: epoch.why || null });
  const links = epoch.links_kept < 0 ? UNKNOWN : `${count(epoch.links_kept)} / ${count(Math.max(0, epoch.links_new))}`;
  const first =
    epoch.first_step_s < epoch.formed_s ? UNKNOWN : `after ${duration(epoch.first_step_s - epoch.formed_s)}`;
  return [
    count(epoch.epoch),
    clock(view.submitted_wall_s, epoch.formed_s),
    count(epoch.members),
    change(epoch, view),
    links,
    first,
  ];
}

function change({ came, left, why, epoch, formation }, view) {
  const parts = [came.length ? `+ ${some(came)}` : "", left.length ? `− ${some(left)}` : ""].filter(Boolean);
  const incident = view.incidents.find((known) => known.id === why);
  const reason = incident ? `${incidentTitle(incident)} (${why})` : why;
  const first = formation ? "its first formation" : "the first members";
  const members = reason ? "" : epoch === 1 ? first : "the same members";
  return [parts.join("  ") || members, reason].filter(Boolean).join("; ");
}

const some = (list) =>
  list.length > 3 ? `${list.slice(0, 2).join(", ")} and ${list.length - 2} more` : list.join(", ");
