// What a worker does just now: its stacks, or a flame graph of where it spent some seconds.

import { h } from "./dom.js";

const id = (name) => document.getElementById(name);
const KINDS = { script: "your script", torch: "torch", everstep: "Everstep", library: "Python and libraries" };
const STOP = 0.02; // the table tells of narrower ones what there is to tell: Tab goes past them
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;

export class Look {
  constructor(store, map, controls) {
    this.dialog = id("look");
    const [stacks, profile] = id("map-looks").children;
    for (const [button, verb] of [
      [stacks, "stacks"],
      [profile, "profile"],
    ])
      button.addEventListener("click", () => {
        const worker = map.place;
        controls.ask(verb, worker, (got) => this.show(verb, worker, got));
      });
  }

  show(verb, worker, got) {
    const close = h("button", { type: "button", onclick: () => this.dialog.close() }, "Close");
    const title = got.picture ? `Where ${worker} spent its time` : `Stacks of ${worker}`;
    this.dialog.replaceChildren(
      h("h2", { id: "look-title" }, title),
      ...got.notes.map((text) => h("p", { class: "answer bad" }, text)),
      ...(got.picture ? profile(got.picture) : [h("pre", { tabindex: "0" }, got.text)]),
      h("p", { class: "note" }, `Kept in the run folder: ${got.file}`),
      h("div", { class: "buttons" }, close),
    );
    this.dialog.showModal();
    close.focus();
    this.dialog.scrollTop = 0;
  }
}

function profile({ boxes, top, notes }) {
  const keys = Object.entries(KINDS).map(([kind, text]) =>
    h("li", {}, h("span", { class: `swatch flame-${kind}`, "aria-hidden": "true" }), text),
  );
  const graph = h("div", { class: "flame", role: "group", "aria-label": "Flame graph" });
  const whole = h("button", { type: "button", class: "quiet", onclick: () => draw(null) }, "all of it");
  const draw = (root) => {
    whole.disabled = !root;
    graph.replaceChildren(...zoomed(boxes, root).map((box) => element(box, draw)));
    graph.style.height = `${1.5 * (1 + Math.max(0, ...boxes.map((box) => box.depth)))}rem`;
  };
  draw(null);
  const rows = top.map((each) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, each.name, h("span", { class: "note" }, ` ${each.where}`)),
      h("td", { class: "num" }, percent(each.own)),
      h("td", { class: "num" }, percent(each.total)),
    ),
  );
  const heads = ["function", "itself", "and its calls"];
  const head = heads.map((text, i) => h("th", { scope: "col", class: i ? "num" : null }, text));
  return [
    ...notes.map((text) => h("p", { class: "note" }, text)),
    h("div", { class: "row" }, h("ul", { class: "legend" }, ...keys), whole),
    graph,
    h("table", { class: "own" }, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows)),
  ];
}

/** Boxes over and below `root`, which is as wide as all: what is beside it is left out. */
function zoomed(boxes, root) {
  if (!root) return boxes;
  const end = root.left + root.share;
  const inside = (box) => box.left >= root.left - 1e-9 && box.left + box.share <= end + 1e-9;
  return boxes
    .filter((box) => (box.depth < root.depth ? box.left <= root.left && box.left + box.share >= end : inside(box)))
    .map((box) => ({
      ...box,
      of: box,
      left: box.depth < root.depth ? 0 : (box.left - root.left) / root.share,
      share: box.depth < root.depth ? 1 : box.share / root.share,
    }));
}

function element(box, draw) {
  const whole = box.of ?? box;
  const text = `${box.name} (${box.where}): ${percent(whole.share)}`;
  const props = { type: "button", class: `flame-${box.kind}`, title: text, "aria-label": text };
  if (box.share < STOP) props.tabindex = "-1";
  const made = h("button", { ...props, onclick: () => draw(whole) }, h("span", {}, box.name));
  Object.assign(made.style, { left: percentOf(box.left), width: percentOf(box.share), top: `${1.5 * box.depth}rem` });
  return made;
}

const percentOf = (share) => `${100 * share}%`;
