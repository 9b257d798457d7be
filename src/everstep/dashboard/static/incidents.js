// The list of incidents, newest first: when, what, who, and what it cost. Each line opens the incident.

import { h, keyed, setAttributes, setText } from "./dom.js";
import { age, clock, count, duration, plural, spent } from "./format.js";
import { incidentTitle, isFault, isOpen, kindText, toll, total } from "./words.js";

const id = (name) => document.getElementById(name);
const FEW = 40;
const NARROW_FEW = 6; // on a phone the rest of the page is below

export const hrefOf = (incident) => `#/incident/${encodeURIComponent(incident.id)}`;

export class Incidents {
  constructor(store) {
    this.store = store;
    this.all = false;
    this.kind = id("incident-kind");
    this.kind.addEventListener("change", () => this.draw());
    this.find = id("incident-find");
    this.find.addEventListener("input", () => this.draw());
    this.more = id("more-incidents");
    this.more.addEventListener("click", () => this.toggle());
    this.narrow = matchMedia("(max-width: 69.9em)");
    this.narrow.addEventListener("change", () => this.store.view && this.draw());
    store.on((changed) => (changed.has("incidents") || changed.has("num_incidents")) && this.draw());
    setInterval(() => this.store.isLive && this.draw(), 10000); // ages
  }

  toggle() {
    this.all = !this.all;
    this.draw();
  }

  draw() {
    const { view } = this.store;
    this.kinds(view.by_kind);
    const words = this.find.value.trim().toLowerCase();
    const fits = (x) => (!this.kind.value || x.kind === this.kind.value) && (!words || said(x).includes(words));
    const found = view.incidents.filter(fits).reverse();
    found.sort((a, b) => Number(isOpen(b)) - Number(isOpen(a))); // stable: newest first among each
    const few = this.narrow.matches ? NARROW_FEW : FEW;
    const shown = this.all ? found : found.slice(0, few);
    keyed(
      id("incident-list"),
      shown.map((incident) => ({ incident, view, now: this.store.now })),
      (x) => x.incident.id,
      line,
    );
    setText(id("incidents-note"), summary(view));
    this.more.hidden = found.length <= few;
    setText(this.more, this.all ? "Show fewer" : `Show all ${count(found.length)}`);
  }

  kinds(byKind) {
    const names = Object.keys(byKind).sort((a, b) => byKind[b] - byKind[a]);
    keyed(
      this.kind,
      ["", ...names],
      (name) => `kind ${name}`,
      (name) => {
        const option = h("option", { value: name });
        option.show = () =>
          setText(option, name ? `${kindText(name)} (${count(this.store.view.by_kind[name])})` : "all");
        return option;
      },
    );
    this.kind.closest(".row").hidden = this.store.view.num_incidents < 2;
  }
}

/** All words of an incident that somebody may look for. */
function said(incident) {
  const blames = [...incident.culprits, ...incident.collateral];
  const who = blames.map((blame) => `${blame.node} rank ${blame.rank} ${blame.cause} ${blame.detail}`);
  return [incident.id, incidentTitle(incident), incident.why, incident.answer, ...who].join(" ").toLowerCase();
}

function summary(view) {
  if (!view.num_incidents) return "none since the job began";
  const older = view.num_incidents - view.incidents.length;
  const stood = view.steps ? `${duration(view.downtime_s)} without a step` : "no step was made";
  const down = `${plural(view.num_incidents, "incident")}, ${stood}`;
  return older > 0 ? `${down}; the newest ${count(view.incidents.length)} are listed` : down;
}

function line() {
  const parts = Object.fromEntries(["what", "outcome", "when"].map((name) => [name, h("span", { class: name })]));
  const link = h("a", {}, parts.what, parts.outcome, parts.when);
  const element = h("li", {}, link);
  element.show = ({ incident, view, now }) => {
    const cost = total(incident.cost);
    const when = `${clock(view.submitted_wall_s, incident.opened_s)}, ${age(now - incident.opened_s)}`;
    setAttributes(link, { href: hrefOf(incident), title: incident.why });
    setAttributes(element, { "data-level": isOpen(incident) ? "open" : isFault(incident) ? "bad" : "warn" });
    setText(parts.what, incidentTitle(incident));
    const [outcome, why] = (incident.outcome || "open").split(/: (.*)/s);
    setText(parts.outcome, outcome);
    setText(parts.when, [when, toll(incident), cost > 0 ? spent(cost) : "", incident === view.incidents.at(-1) ? why : ""].filter(Boolean).join(" · "));
  };
  return element;
}
