// The cluster map: all workers by node, coloured by their own step time; pointer and keyboard ask for one of them.

import { announce, h, keyed, onResize, perFrame, rem, setAttributes, setText } from "./dom.js";
import { bytes, count, plural, significant, stepTime } from "./format.js";
import { loadFacts, meter } from "./load.js";
import { drawMap, drawWaffle } from "./mapdraw.js";
import { layout, waffleLayout } from "./maplayout.js";
import { SLOWER, STATE, STATE_TEXT, TROUBLE, nodesOf, waffle, workersOf } from "./workers.js";

const id = (name) => document.getElementById(name);
const WRITTEN = ["stdout.log", "stderr.log", "stacks.txt"];
const WAFFLE_CELLS = 2400;
const [LARGER, LARGE_REM] = [1.6, 24]; // times the size of text, up to this height
const FIELDS = ["workers", "nodes", "loads", "fleet", "epochs", "exit_code"];

export class ClusterMap {
  constructor(store) {
    this.store = store;
    this.canvas = id("map");
    this.wall = matchMedia("(min-width: 150em)");
    this.selected = -1; // by keyboard or click
    this.hovered = -1;
    this.draw = perFrame(() => this.drawn());
    store.on((changed) => FIELDS.some((name) => changed.has(name)) && this.renew());
    onResize(id("map-area"), () => this.store.view && this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.hover(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.hover(-1));
    this.canvas.addEventListener("click", (event) => this.select(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  renew() {
    const { view } = this.store;
    Object.assign(this, workersOf(view));
    Object.assign(this, nodesOf(view, this.workers));
    this.listed = !view.simulated || this.workers.length >= view.fleet.total; // simulations list few nodes of many
    this.draw();
  }

  drawn() {
    const width = id("map-area").clientWidth;
    if (width < 40 || !this.nodes) return;
    if (this.listed) this.drawNodes(width);
    else this.drawFleet(width);
    this.facts();
  }

  drawNodes(width) {
    const size = this.size(width);
    this.made = layout(this.nodes, width, size);
    drawMap(this.canvas, this.made, width, size, this.selected);
    const acting = this.workers.filter(acts).length;
    const lost = this.hidden ? `, ${plural(this.hidden, "node")} lost earlier not shown` : "";
    const nodes = this.nodes.filter((node) => node.workers.some(acts)).length;
    const here = acting ? `${plural(acting, "worker")} on ${plural(nodes, "node")}` : "no worker runs";
    const epoch = newestEpoch(this.store.view);
    setText(id("map-note"), `${epoch ? `epoch ${count(epoch)}: ` : ""}${here}${lost}`);
    this.legend(this.workerLegend());
  }

  /** Of text: on a wall, few workers are seen from afar. */
  size(width) {
    const large = LARGER * rem();
    const made = this.wall.matches && layout(this.nodes, width, large);
    return made && made.wide && made.height <= LARGE_REM * rem() ? large : rem();
  }

  drawFleet(width) {
    const { fleet } = this.store.view;
    const { each, parts } = waffle(fleet, WAFFLE_CELLS);
    this.made = { cells: [], blocks: [] };
    drawWaffle(this.canvas, waffleLayout(parts, width, rem()), width);
    setText(
      id("map-note"),
      `${count(fleet.total)} accelerators, not listed by name; a square is ${each === 1 ? "one" : count(each)} of them`,
    );
    const text = { acting: fleet.acting - fleet.slow, slow: fleet.slow, spare: fleet.spare, missing: fleet.missing };
    this.legend(
      Object.entries(text).map(([state, n]) => [
        `fleet-${state}`,
        `${count(n)} ${state === "acting" ? "in steps" : state}`,
      ]),
    );
  }

  /** What colours and shapes mean, with how many there are: only those that occur, and the scale of step times. */
  workerLegend() {
    const shades = [0, 1, 2, 3, 4].map((shade) => this.workers.filter((w) => w.shade === shade && fills(w)).length);
    const words = [
      ...SLOWER.map((limit) => `up to +${Math.round((limit - 1) * 100)} %`),
      `over +${Math.round((SLOWER[3] - 1) * 100)} %`,
    ];
    const scale = words
      .map((text, i) => [`step-${i}`, `${text}: ${count(shades[i])}`])
      .filter((_, i) => shades[i]);
    const base = Number.isFinite(this.medianS)
      ? [["", `own step time against the median, ${stepTime(this.medianS)}`], ...scale]
      : [["", "own step times are not known"]];
    const states = [STATE.WARMS, STATE.WAITS, STATE.SLOW, STATE.STOPPED, STATE.GONE].map((state) => [
      `state-${state}`,
      STATE_TEXT[state],
      this.workers.filter((w) => w.state === state).length,
    ]);
    const nodes = ["spare", "leaving", "lost"].map((state) => [
      `node-${state}`,
      `${state} nodes`,
      this.nodes.filter((node) => node.state === state).length,
    ]);
    return [
      ...base,
      ...[...states, ...nodes].filter(([, , n]) => n).map(([key, text, n]) => [key, `${text}: ${count(n)}`]),
    ];
  }

  legend(entries) {
    keyed(
      id("map-legend"),
      entries,
      ([key]) => key || "scale",
      ([key]) => {
        const text = h("span", {});
        const item = h("li", {}, key ? h("span", { class: `swatch ${key}`, "aria-hidden": "true" }) : null, text);
        item.show = ([, now]) => setText(text, now);
        return item;
      },
    );
  }

  at(event) {
    const [x, y] = [event.offsetX, event.offsetY];
    const hit = this.made?.cells.find((c) => x >= c.x && x <= c.x + c.width && y >= c.y && y <= c.y + c.height);
    return hit ? hit.worker.rank : -1;
  }

  hover(rank) {
    if (rank === this.hovered) return;
    this.hovered = rank;
    this.facts();
  }

  select(rank) {
    this.selected = rank;
    this.draw();
    const worker = this.workers[rank];
    if (worker)
      announce(
        this.describe(worker)
          .map(([name, value]) => `${name} ${value}`)
          .join(", "),
      );
  }

  key(event) {
    const across = this.made?.across ?? 8;
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across };
    if (event.key in moves) this.select(this.moved(moves[event.key]));
    else if (event.key === "n") this.select(this.nextTrouble());
    else if (event.key === "Escape" && this.selected >= 0) this.select(-1);
    else return;
    requestAnimationFrame(() => id("map-facts").scrollIntoView({ block: "nearest" }));
    event.preventDefault();
    event.stopPropagation();
  }

  /** Cells are in the order in which they are drawn, which is not that of ranks where nodes came late. */
  moved(by) {
    const cells = this.made.cells;
    if (!cells.length) return -1;
    const now = cells.findIndex((cell) => cell.worker.rank === this.selected);
    const next = now < 0 ? 0 : Math.min(cells.length - 1, Math.max(0, now + by));
    return cells[next].worker.rank;
  }

  nextTrouble() {
    const bad = this.workers.filter((w) => TROUBLE.has(w.state) || w.shade >= 2).map((w) => w.rank);
    return bad.find((rank) => rank > this.selected) ?? bad[0] ?? -1;
  }

  facts() {
    const worker = this.workers?.[this.hovered >= 0 ? this.hovered : this.selected];
    id("map-facts").hidden = !worker;
    this.links();
    if (!worker) return;
    keyed(id("map-facts"), this.describe(worker), ([name]) => name, fact);
  }

  /** What the selected worker wrote, where its node shares the run folder: that of its newest process. */
  links() {
    const { view, info } = this.store;
    const worker = this.workers?.[this.selected];
    const node = view.nodes[worker?.node];
    id("map-looks").hidden = !node || !this.store.isLive || !info.controls || worker.state === STATE.GONE;
    id("map-links").hidden = !node || info.mode === "simulated";
    if (!node) return;
    const place = worker.lives > 0 ? `${worker.local}.${worker.lives}` : `${worker.local}`;
    const folder = ["logs", node.name, `attempt_${view.epoch}`, place].map(encodeURIComponent).join("/");
    [...id("map-links").children].forEach((link, i) => {
      link.href = `/api/file/${folder}/${WRITTEN[i]}`;
    });
  }

  /** The selected worker's place, as controls take it. */
  get place() {
    const worker = this.workers?.[this.selected];
    return worker ? `${this.store.view.nodes[worker.node].name}/${worker.local}` : "";
  }

  describe(worker) {
    const node = this.store.view.nodes[worker.node];
    const ratio = worker.shade >= 0 ? `, ${significant(worker.ownS / this.medianS)} × the median` : "";
    const facts = [
      [
        worker.state === STATE.WAITS ? "standby" : "rank",
        worker.state === STATE.WAITS ? `on ${node?.name}` : count(worker.rank),
      ],
      ["node", node ? placeOf(node) : "unknown"],
      ["state", STATE_TEXT[worker.state]],
      ["own step time", worker.ownS >= 0 ? stepTime(worker.ownS) + ratio : "not known"],
      ["memory", bytes(worker.rss)],
      ...loadFacts(this.store.view, worker, node),
    ];
    if (worker.role >= 0) facts.splice(1, 0, ["role", count(worker.role)]);
    if (worker.lives > 0) facts.push(["processes before it here", count(worker.lives)]);
    if (node?.incidents) facts.push(["incidents of its node", count(node.incidents)]);
    return facts;
  }

  focus() {
    this.canvas.focus();
    this.canvas.scrollIntoView({ block: "nearest" });
  }
}

const newestEpoch = (view) => view.epochs.at(-1)?.epoch ?? view.epoch;
const placeOf = (node) => [node.name, node.address, node.state === "up" ? "" : node.state].filter(Boolean).join(", ");
const acts = (worker) => worker.state !== STATE.WAITS && worker.state !== STATE.GONE;
const fills = (worker) => ![STATE.WAITS, STATE.STOPPED, STATE.GONE].includes(worker.state);

export function fact() {
  const [name, value, bar] = [h("dt", {}), h("dd", {}), meter()];
  const element = h("div", {}, name, value, bar);
  element.show = ([nowName, nowValue, part = -1, scarce]) => {
    bar.show(part, scarce);
    setText(name, nowName);
    setText(value, nowValue);
    setAttributes(element, { "data-name": nowName });
  };
  return element;
}
