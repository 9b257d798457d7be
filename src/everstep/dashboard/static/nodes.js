// The cluster as a table: nodes with trouble first, and one can be looked for by its name.

import { h, keyed, setAttributes, setText } from "./dom.js";
import { UNKNOWN, bytes, clock, count, plural, ranges, significant, stepTime } from "./format.js";
import { meterCell, rough } from "./load.js";
import { nodesOf, severity, workersOf } from "./workers.js";

const id = (name) => document.getElementById(name);
const MOST = 200; // rows; the filter finds the others

export class NodeTable {
  constructor(store) {
    this.store = store;
    this.button = id("map-table-button");
    this.filter = id("node-filter");
    this.button.addEventListener("click", () => this.toggle());
    this.sort = id("node-sort");
    this.filter.addEventListener("input", () => this.draw());
    this.sort.addEventListener("change", () => this.draw());
    store.on((changed) => ["nodes", "workers", "loads"].some((name) => changed.has(name)) && this.draw());
  }

  toggle() {
    const shown = id("map-table").hidden;
    id("map-table").hidden = !shown;
    id("map-area").hidden = shown;
    setAttributes(this.button, { "aria-pressed": String(shown) });
    this.draw();
  }

  draw() {
    if (id("map-table").hidden || !this.store.view) return;
    const { workers, medianS } = workersOf(this.store.view);
    const wanted = this.filter.value.trim().toLowerCase();
    const { nodes } = nodesOf(this.store.view, workers);
    const found = nodes.filter((node) => node.name.toLowerCase().includes(wanted));
    id("map-table").classList.toggle("no-devices", !nodes.some((node) => node.load?.devices.length));
    found.sort(ORDERS[this.sort.value]);
    for (const node of found) Object.assign(node, { medianS, wall: this.store.view.submitted_wall_s });
    keyed(id("node-rows"), found.slice(0, MOST), (node) => node.name, row);
    const rest = found.length - MOST;
    setText(
      id("node-note"),
      rest > 0 ? `and ${plural(rest, "more node")}: look for one by its name` : plural(found.length, "node"),
    );
  }
}

const slowest = (node) => Math.max(-1, ...node.workers.map((w) => w.ownS));
const resident = (node) => node.workers.reduce((sum, w) => sum + w.rss, 0);
const cpu = (node) => node.load?.cpuShare ?? -1;
const memory = (node) => node.load?.memoryShare ?? -1;
const device = (node) => node.load?.deviceShare ?? -1;
const known = (part, otherwise) => (part >= 0 ? part : otherwise);

const ORDERS = {
  trouble: (a, b) => severity(b) - severity(a),
  slow: (a, b) => slowest(b) - slowest(a),
  cpu: (a, b) => cpu(b) - cpu(a),
  memory: (a, b) => memory(b) - memory(a) || resident(b) - resident(a),
  device: (a, b) => device(b) - device(a),
  idle: (a, b) => known(device(a), 2) - known(device(b), 2),
  incidents: (a, b) => b.incidents - a.incidents,
  name: (a, b) => a.name.localeCompare(b.name, "en", { numeric: true }),
};

// Where the table is too wide for the screen, its cells say what they are.
const LABELS = [null, null, "ranks", "slowest", "processors", "memory", "devices", "incidents"];

function row() {
  const cells = [
    h("th", { scope: "row" }),
    ...["", "", "num"].map((kind) => h("td", { class: kind || null })),
    ...["num", "num", "num device-cell"].map(meterCell),
    h("td", { class: "num" }),
  ];
  cells.forEach((cell, i) => setAttributes(cell, { "data-label": LABELS[i] }));
  const element = h("tr", {}, ...cells);
  element.show = (node) =>
    texts(node).forEach((text, i) => (Array.isArray(text) ? cells[i].show(text) : setText(cells[i], text)));
  return element;
}

function texts(node) {
  const slow = slowest(node);
  const state = [
    node.state,
    node.state === "lost" ? node.how : "",
    node.since_s > 0 ? `since ${clock(node.wall, node.since_s)}` : "",
  ].filter(Boolean);
  return [
    node.name,
    state.join(", "),
    node.workers.length
      ? ranges(
          node.workers.map((w) => w.rank),
          3,
        )
      : UNKNOWN,
    slow >= 0 ? stepTime(slow) + (node.medianS ? ` (${significant(slow / node.medianS)} ×)` : "") : UNKNOWN,
    [rough(cpu(node)), cpu(node)],
    memory(node) >= 0 ? [rough(memory(node)), memory(node), true] : [bytes(resident(node)), -1],
    [rough(device(node)), device(node)],
    count(node.incidents),
  ];
}
