// How busy nodes, their workers and devices are: what a View's `loads` says, in words and as small bars.

import { h, setText } from "./dom.js";
import { UNKNOWN, bytes, plural, significant } from "./format.js";

// everstep.core.load.NodeLoad and DeviceLoad travel as arrays.
const NODE = "busy cpus free memory shmFree shm inKb outKb workers deviceMb devices".split(" ");
const DEVICE = ["busy", "used", "celsius"]; // both in percent
const [KB, MB] = [1e3, 1e6];
const SCARCE = 0.95;

const named = (names, values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));
const share = (part, whole) => (part >= 0 && whole > 0 ? Math.min(1, part / whole) : -1);

/** Of a node: its columns, and shares from 0 to 1 (-1: not known); null where nothing is known. */
export function loadOf(view, name) {
  const told = view.loads?.[name];
  if (!told) return null;
  const load = named(NODE, told);
  load.devices = load.devices.map((device) => named(DEVICE, device));
  const busy = load.devices.map((device) => device.busy).filter((percent) => percent >= 0);
  load.cpuShare = share(load.busy / 100, load.cpus);
  load.memoryShare = load.free >= 0 ? share(load.memory - load.free, load.memory) : -1;
  load.deviceShare = share(busy.length ? busy.reduce((sum, x) => sum + x, 0) / busy.length : -1, 100);
  return load;
}

/** Whole percent are enough here: they change with every look. */
export const rough = (part) => (part >= 0 ? `${Math.round(part * 100)}\u00a0%` : UNKNOWN);

/** Facts of a worker and of its node, each [name, text, share of the bar, whether that is scarce]. */
export function loadFacts(view, worker, node) {
  const load = node && loadOf(view, node.name);
  if (!load) return [];
  const facts = [];
  const percent = load.workers[worker.local] ?? -1;
  if (percent >= 0) {
    const part = share(percent / 100, load.cpus / Math.max(1, load.workers.length));
    facts.push(["processor", `${percent}\u00a0% of one`, part]);
  }
  // Where there is a device for each worker, they have them in order.
  const device = load.devices.length >= load.workers.length ? load.devices[worker.local] : null;
  if (device) facts.push(["device", deviceText(device, load), share(device.busy, 100)]);
  facts.push(["node’s processors", `${rough(load.cpuShare)} of ${load.cpus}`, load.cpuShare]);
  const shm = load.shm > 0 ? `; /dev/shm ${rough(share(load.shm - load.shmFree, load.shm))}` : "";
  facts.push(["node’s memory", `${rough(load.memoryShare)} of ${bytes(load.memory * MB)}${shm}`, load.memoryShare, true]);
  if (load.devices.length > 0 && !device)
    facts.push(["node’s devices", `${plural(load.devices.length, "device")}, ${rough(load.deviceShare)}`, load.deviceShare]);
  if (load.inKb >= 0) facts.push(["node’s network", `${pace(load.inKb)} in, ${pace(load.outKb)} out`]);
  return facts;
}

function deviceText({ busy, used, celsius }, { deviceMb }) {
  const memory = used >= 0 ? `, ${used}\u00a0% of ${deviceMb ? bytes(deviceMb * MB) : "its memory"}` : "";
  return `${busy >= 0 ? `${busy}\u00a0% busy` : "busy: not known"}${memory}${celsius >= 0 ? `, ${celsius}\u00a0°C` : ""}`;
}

/** Of a network, in its own units: powers of 10. */
function pace(kb) {
  const power = Math.min(2, Math.max(0, Math.floor(Math.log10(kb) / 3)));
  return `${significant(kb / KB ** power)}\u00a0${["kB", "MB", "GB"][power]}/s`;
}

/** A bar with `show(share, scarce)`; not there where nothing is known. The number beside it says the same. `scarce`: it
 * should not become full. */
export function meter() {
  const bar = h("span", {});
  const element = h("span", { class: "meter", "aria-hidden": "true" }, bar);
  element.show = (part, scarce = false) => {
    element.hidden = !(part >= 0);
    bar.style.width = `${Math.round(100 * part)}%`;
    element.dataset.level = scarce && part >= SCARCE ? "full" : "";
  };
  return element;
}

/** A cell of a table: text with a bar below it. `show([text, share, scarce])`. */
export function meterCell(kind) {
  const [text, bar] = [h("span", {}), meter()];
  const element = h("td", { class: kind }, text, bar);
  element.show = ([now, part, scarce]) => {
    setText(text, now);
    bar.show(part, scarce);
  };
  return element;
}
