// Do charts say the time of day, as other people's logs do, or the time since the job's start?

import { keep, kept, setAttributes } from "./dom.js";

const KEPT = "everstep-time-of-day";

export class TimeOfDay {
  constructor(store) {
    Object.assign(this, { store, changed: [], on: kept(KEPT) !== "off" });
    this.button = document.getElementById("day-button");
    this.button.addEventListener("click", () => this.toggle());
    store.on(() => this.show());
  }

  /** When the job was submitted, in seconds since 1970; 0: the time since its start is wanted, or all that there is. */
  get wall() {
    const { view } = this.store;
    return this.on && view && !view.simulated ? view.submitted_wall_s : 0;
  }

  toggle() {
    this.on = !this.on;
    keep(KEPT, this.on ? "on" : "off");
    this.show();
    for (const draw of this.changed) draw();
  }

  show() {
    const { view } = this.store;
    this.button.hidden = view.simulated || !view.submitted_wall_s;
    setAttributes(this.button, { "aria-pressed": String(this.on) });
  }
}
