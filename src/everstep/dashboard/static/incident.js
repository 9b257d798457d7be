// The page of one incident: what happened, who and why, what was decided and what else was weighed, and the evidence.

import { h, setText } from "./dom.js";
import { UNKNOWN, clock, count, duration, plural, spent } from "./format.js";
import { rangeQuery } from "./range.js";
import { getJson } from "./store.js";
import { hrefOf } from "./incidents.js";
import { actionText, causeText, incidentTitle, isFault, isOpen, stops, total, who } from "./words.js";

const id = (name) => document.getElementById(name);
const PHASES = { detect: "last step until noticed", stop: "stopped", form: "formed anew", "first-step": "first step", recover: "until the next step" };
const ROWS = {
  sign: "sign",
  detect: "noticed",
  decide: "decided",
  act: "acted",
  recover: "recovered",
  close: "closed",
};

export class IncidentPage {
  constructor(store, span) {
    this.store = store;
    this.span = span;
    this.shown = null; // id
    this.article = id("incident");
    this.files = new Map(); // path -> element, so that a text that was opened stays open
    store.on((changed) => changed.has("incidents") && this.shown && this.draw());
  }

  open(name) {
    if (name !== this.shown) this.files.clear();
    this.shown = name;
    this.kept = null; // fetched, when the View no longer has it
    this.drawn = "";
    if (this.store.view) this.draw();
  }

  close() {
    this.shown = null;
  }

  find() {
    return this.store.view.incidents.find((incident) => incident.id === this.shown) ?? this.kept;
  }

  async draw() {
    const incident = this.find();
    if (!incident) return this.fetch();
    const text = JSON.stringify([incident, this.neighbour(-1)?.id, this.neighbour(1)?.id]);
    if (text === this.drawn) return;
    this.drawn = text;
    const focused = this.article.contains(document.activeElement);
    this.article.replaceChildren(...this.parts(incident).filter(Boolean));
    if (focused) id("incident-title").focus();
  }

  async fetch() {
    const wanted = this.shown;
    try {
      const found = await getJson(`/api/incident/${encodeURIComponent(wanted)}`);
      if (wanted !== this.shown) return;
      this.kept = found;
      this.draw();
    } catch (error) {
      const back = h("a", { href: "#/" }, "‹ back to the job");
      this.article.replaceChildren(back, h("p", {}, `No incident ${wanted}: ${error.message}`));
    }
  }

  neighbour(by) {
    const { incidents } = this.store.view;
    const at = incidents.findIndex((incident) => incident.id === this.shown);
    return at < 0 ? incidents.at(-1) : incidents[at + by];
  }

  parts(incident) {
    const wall = this.store.view.submitted_wall_s;
    return [
      this.navigation(incident),
      title(incident, wall),
      numbers(incident, wall),
      phases(incident),
      h("div", { class: "pair" }, happened(incident), decided(incident)),
      h("div", { class: "pair" }, timeline(incident, wall), this.evidence(incident)),
    ];
  }

  navigation(incident) {
    const [before, after] = [this.neighbour(-1), this.neighbour(1)];
    return h(
      "nav",
      { class: "row", "aria-label": "Incidents" },
      h("a", { href: "#/" }, "‹ the job"),
      this.charts(incident),
      before && h("a", { href: hrefOf(before), rel: "prev" }, "previous incident"),
      after && h("a", { href: hrefOf(after), rel: "next" }, "next incident"),
    );
  }

  /** The charts of the time around it: as an address, so that it can be copied. */
  charts(incident) {
    const { first_sign_s: sign, opened_s: opened, closed_s: closed } = incident;
    const around = this.span.around(sign >= 0 ? sign : opened, Math.max(opened, closed));
    const shows = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.span.choose(around);
      location.hash = "#/charts";
    };
    return h("a", { href: `?range=${rangeQuery(around)}#/charts`, onclick: shows }, "charts around it");
  }

  evidence(incident) {
    const verdicts = incident.evidence.map(([source, verdict]) =>
      h(
        "li",
        {},
        h("strong", {}, source),
        ` says ${verdict.kind}, ${who(verdict.culprits)}, ${sure(verdict)}: ${verdict.why}`,
      ),
    );
    const files = incident.files.map((path) => this.file(path));
    return panel(
      "Evidence",
      verdicts.length
        ? h("ul", { class: "plain" }, ...verdicts)
        : h("p", { class: "note" }, "No detector had to judge: what is above was seen."),
      files.length ? h("h3", {}, "Stacks and logs") : null,
      ...files,
    );
  }

  file(path) {
    const known = this.files.get(path);
    if (known) return known;
    const text = h("pre", { tabindex: "0" }, "reading …");
    const whole = h("a", { href: fileUrl(path), target: "_blank", rel: "noreferrer" }, "open alone");
    const name = path.replace(/^incidents\/[^/]+\//, "");
    const element = h("details", { class: "file" }, h("summary", {}, name), whole, text);
    element.addEventListener("toggle", () => element.open && read(path, text), { once: true });
    this.files.set(path, element);
    return element;
  }
}

const fileUrl = (path) => `/api/file/${path.split("/").map(encodeURIComponent).join("/")}`;
const sure = (verdict) => `${Math.round(verdict.confidence * 100)}\u00a0% sure`;

async function read(path, element) {
  try {
    const answer = await fetch(fileUrl(path), {
      credentials: "same-origin",
    });
    setText(
      element,
      answer.ok ? (await answer.text()) || "(empty)" : `It cannot be read: the server answered ${answer.status}.`,
    );
  } catch (error) {
    setText(element, `It cannot be read: ${error.message}.`);
  }
}

function panel(name, ...children) {
  const anchor = `part-${name.toLowerCase().replaceAll(" ", "-")}`;
  return h("section", { class: "panel", "aria-labelledby": anchor }, h("h2", { id: anchor }, name), ...children);
}

function title(incident, wall) {
  const level = isOpen(incident) ? "open" : isFault(incident) ? "bad" : "warn";
  const state = isOpen(incident) ? "open" : incident.outcome;
  return h(
    "div",
    { class: "headline", "data-level": level },
    h("h2", { tabindex: "-1", id: "incident-title" }, incidentTitle(incident)),
    h(
      "p",
      { class: "note" },
      `${incident.id} · ${clock(wall, incident.opened_s)} (${duration(incident.opened_s)} after the start) · ` +
        `epoch ${count(incident.epoch)}${incident.step >= 0 ? `, after step ${count(incident.step)}` : ""} · `,
      h("strong", {}, state),
    ),
  );
}

/** Steps that are told of late make the first sign look earlier than it was; the members' own count does not. */
function noticedS({ opened_s: opened, first_sign_s: sign, phases }) {
  return Math.min(sign >= 0 ? opened - sign : NaN, phases.detect ?? Infinity);
}

const redone = ({ cost }) => (cost["redone work"] > 0 ? "only the one that was under way" : "no step was lost");

function numbers(incident) {
  const cost = total(incident.cost);
  const since = (moment) => (incident.first_sign_s >= 0 && moment >= 0 ? moment - incident.first_sign_s : -1);
  const facts = [
    ["Without a step", duration(incident.downtime_s), stops(incident) ? "" : "nobody stopped"],
    ["Noticed after", duration(noticedS(incident)), "from its first sign on"],
    ...(incident.told_s >= 0
      ? [["All were told after", duration(since(incident.told_s)), "from its first sign on"]]
      : []),
    ["Steps redone", count(incident.redone_steps), incident.redone_steps ? "" : redone(incident)],
    [
      "Cost",
      cost > 0 ? spent(cost) : UNKNOWN,
      Object.entries(incident.cost)
        .sort((a, b) => b[1] - a[1])
        .map(([name, s]) => `${name} ${spent(s)}`)
        .join(", "),
    ],
  ];
  return h(
    "dl",
    { class: "tiles" },
    ...facts.map(([name, value, note]) =>
      h(
        "div",
        { class: "tile" },
        h("dt", {}, name),
        h("dd", {}, h("strong", {}, value), h("span", { class: "note" }, note)),
      ),
    ),
  );
}

/** The downtime in its parts, as long as they took. */
function phases(incident) {
  const parts = Object.entries(incident.phases).filter(([, s]) => s > 0);
  if (!parts.length) return null;
  const bar = h("div", {
    class: "phases",
    role: "img",
    "aria-label": parts.map(([name, s]) => `${PHASES[name] ?? name} ${duration(s)}`).join(", "),
  });
  const all = total(incident.phases);
  for (const [name, s] of parts) {
    const part = h("span", { class: `phase phase-${name}`, title: `${name}: ${duration(s)}` });
    part.style.flexGrow = s / all;
    bar.append(part);
  }
  const legend = parts.map(([name, s]) =>
    h(
      "li",
      {},
      h("span", { class: `swatch phase-${name}`, "aria-hidden": "true" }),
      `${PHASES[name] ?? name} ${duration(s)}`,
    ),
  );
  return h("div", { class: "panel" }, bar, h("ul", { class: "legend" }, ...legend));
}

function happened(incident) {
  const culprits = incident.culprits.map((blame) =>
    h(
      "li",
      {},
      h("strong", {}, who([blame])),
      `: ${causeText(blame.cause)}`,
      blame.detail ? h("code", { class: "detail" }, blame.detail) : null,
    ),
  );
  const { cause } = incident;
  return panel(
    "What happened",
    h("p", {}, incident.why),
    culprits.length ? h("h3", {}, culprits.length === 1 ? "First cause" : "First causes") : null,
    culprits.length ? h("ul", { class: "plain" }, ...culprits) : null,
    cause ? h("p", {}, `Taken together: ${cause.kind}, ${sure(cause)}. ${cause.why}`) : null,
    incident.collateral.length
      ? h("p", { class: "note" }, `Collateral: ${who(incident.collateral)} failed as a consequence.`)
      : null,
  );
}

function decided(incident) {
  const weighed = (other) =>
    h(
      "tr",
      { class: other.loss_s < 0 ? "cannot" : null },
      h("th", { scope: "row" }, actionText(other.action)),
      h("td", { class: "num" }, other.loss_s < 0 ? "not possible" : spent(other.loss_s)),
      h("td", {}, other.why),
    );
  const can = incident.alternatives.filter((other) => other.loss_s >= 0);
  const cannot = incident.alternatives.filter((other) => other.loss_s < 0);
  const answer = incident.answer
    ? h(
        "p",
        {},
        h("strong", {}, actionText(incident.answer)),
        incident.answer_loss_s >= 0 ? `, expected loss ${spent(incident.answer_loss_s)}` : "",
        incident.answer_why ? `: ${incident.answer_why}` : "",
      )
    : h("p", { class: "note" }, "Nothing had to be decided.");
  return panel(
    "What was decided",
    answer,
    can.length ? h("h3", {}, "What else was weighed") : null,
    can.length ? alternatives("What else was weighed", can.map(weighed)) : null,
    cannot.length
      ? h(
          "details",
          { class: "file" },
          h("summary", {}, `${plural(cannot.length, "other answer")} ${cannot.length > 1 ? "were" : "was"} not possible`),
          alternatives("What was not possible", cannot.map(weighed)),
        )
      : null,
  );
}

function alternatives(name, rows) {
  const cells = ["instead", "expected loss", "why"].map((text, i) =>
    h("th", { scope: "col", class: i === 1 ? "num" : null }, text),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
    h("table", {}, h("thead", {}, h("tr", {}, ...cells)), h("tbody", {}, ...rows)),
  );
}

/** Moments by phase, with the time since the first one: that is what counts in an incident. */
function timeline(incident, wall) {
  const begin = incident.timeline[0]?.at_s ?? 0;
  let phase = "";
  const told = new Set(); // a worker's end is heard twice: from its agent, and when the kernel has reaped it
  const fresh = (moment) => told.size < told.add(`${moment.phase} ${moment.text}`).size;
  const items = incident.timeline.filter(fresh).map((moment) => {
    const first = moment.phase !== phase;
    phase = moment.phase;
    const since = moment.at_s - begin;
    return h(
      "li",
      { class: first ? "fresh" : null, "data-phase": moment.phase },
      h("span", { class: "when", title: clock(wall, moment.at_s) }, `+${since > 0 ? duration(since) : "0\u00a0s"}`),
      h("span", { class: "phase-name" }, first ? (ROWS[moment.phase] ?? moment.phase) : ""),
      h("span", {}, moment.text),
    );
  });
  return panel(
    "Time line",
    items.length ? h("ol", { class: "timeline" }, ...items) : h("p", { class: "note" }, "Nothing is kept of it."),
    items.length
      ? h("p", { class: "note" }, `from ${clock(wall, begin)} on, ${plural(items.length, "entry", "entries")}`)
      : null,
  );
}
