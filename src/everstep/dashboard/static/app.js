// The page: what is shown of a job (observe.view.View), live, recorded or simulated. No build step, no framework.
// Each part listens to the store and draws its own fields; the address says whether the job or one incident is shown.

import { announce, keep } from "./dom.js";
import { Charts, Marks } from "./charts.js";
import { Controls } from "./controls.js";
import { TimeOfDay } from "./day.js";
import { Goodput } from "./goodput.js";
import { Head } from "./head.js";
import { IncidentPage } from "./incident.js";
import { Incidents, hrefOf } from "./incidents.js";
import { Lists } from "./lists.js";
import { Look } from "./look.js";
import { ClusterMap } from "./map.js";
import { NodeTable } from "./nodes.js";
import { RangeField, Span } from "./range.js";
import { Store } from "./store.js";
import { TimeBar } from "./timebar.js";
import { incidentTitle } from "./words.js";

const id = (name) => document.getElementById(name);
const STEP = 0.01; // of the whole job, for one key press

const store = new Store();
const span = new Span(store);
const day = new TimeOfDay(store);
new RangeField(store, span);
const marks = new Marks(store, span);
new Head(store);
new Charts(store, span, marks, day);
const map = new ClusterMap(store);
new NodeTable(store);
new Goodput(store, span, marks, day);
new Incidents(store);
new Lists(store);
new Look(store, map, new Controls(store));
const timebar = new TimeBar(store);
const page = new IncidentPage(store, span);

let scrolled = 0; // where the overview was left

function route() {
  const wanted = location.hash.match(/^#\/incident\/(.+)$/);
  const before = page.shown;
  if (wanted && !before) scrolled = scrollY;
  id("overview").hidden = Boolean(wanted);
  id("incident").hidden = !wanted;
  document.body.classList.toggle("on-incident", Boolean(wanted));
  if (!wanted) {
    page.close();
    if (before) scrollTo(0, scrolled);
    if (location.hash === "#/charts") id("charts-title").scrollIntoView();
    return;
  }
  page.open(decodeURIComponent(wanted[1]));
  scrollTo(0, 0);
  id("incident-title")?.focus({ preventScroll: true });
}

function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  keep("everstep-theme", root.dataset.theme);
  document.dispatchEvent(new Event("everstep-theme"));
}

function leave() {
  if (page.shown) location.hash = "#/";
}

/** On an incident's page its neighbours; in the job, from link to link of the list. */
function next(by) {
  if (page.shown) {
    const other = page.neighbour(-by);
    if (other) location.hash = hrefOf(other);
    return;
  }
  const links = [...id("incident-list").querySelectorAll("a")];
  const at = links.indexOf(document.activeElement);
  links[Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
}

const KEYS = {
  j: () => next(1),
  k: () => next(-1),
  Escape: leave,
  m: () => map.focus(),
  0: () => span.choose(null),
  r: () => id("range").select(),
  "[": () => span.move(-1),
  "]": () => span.move(1),
  "-": () => span.widen(),
  c: () => day.toggle(),
  " ": () => timebar.shown && timebar.play(!timebar.playing),
  ",": () => timebar.step(-STEP),
  ".": () => timebar.step(STEP),
  t: toggleTheme,
  "?": () => id("help").showModal(),
};

const TYPED = "input:not([type=range]), select, textarea";

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest?.(TYPED)) return;
  if (event.key === " " && event.target.closest?.("button, a, summary, input")) return; // it presses that one
  const act = KEYS[event.key];
  if (!act || (event.key === " " && !timebar.shown)) return;
  event.preventDefault();
  act();
});

/** Incidents are told to those who do not look at the screen. */
let told = -1;
store.on((changed) => {
  if (!changed.has("num_incidents") && !changed.has("incidents")) return;
  const { num_incidents: now, incidents: kept } = store.view;
  if (told >= 0 && now > told && kept.length) announce(`New incident: ${incidentTitle(kept.at(-1))}`);
  told = now;
});

id("theme-button").addEventListener("click", toggleTheme);
id("help-button").addEventListener("click", () => id("help").showModal());
addEventListener("hashchange", route);
id("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown
  id("main").focus();
});
route();
store.start();
