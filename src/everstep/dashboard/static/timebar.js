// The time slider: any moment of a recorded, simulated or running job, played at any speed.

import { announce, h, onResize, rem, setAttributes, setText, token } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { isFault } from "./words.js";
import { begin } from "./mapdraw.js";

const id = (name) => document.getElementById(name);
const TICK_MS = 250;
const WHOLE_S = 60; // a whole job takes so long to play, unless told otherwise
const SPEEDS = [1, 10, 60, 600, 3600, 86400];

export class TimeBar {
  constructor(store) {
    this.store = store;
    this.playing = false;
    this.at = 0;
    this.slider = id("slider");
    this.slider.addEventListener("input", () => this.seek(Number(this.slider.value)));
    this.slider.addEventListener("change", () => this.keep());
    id("play").addEventListener("click", () => this.play(!this.playing));
    id("to-previous").addEventListener("click", () => this.jump(-1));
    id("to-next").addEventListener("click", () => this.jump(1));
    id("to-live").addEventListener("click", () => this.leave());
    id("back-button").addEventListener("click", () => this.lookBack());
    store.on(() => this.offer());
    onResize(this.slider.parentElement, () => this.marks());
  }

  get shown() {
    return !id("time").hidden;
  }

  get span() {
    return Math.max(this.store.live?.now_s ?? 0, this.store.info?.span_s ?? 0, 1e-3);
  }

  /** Recordings have the slider from the start, a running job on demand. */
  offer() {
    const { info } = this.store;
    if (!info || this.offered) return;
    this.offered = true;
    id("back-button").hidden = info.mode !== "live";
    const linked = location.hash.match(/^#\/at\/([\d.]+)$/);
    if (info.mode === "live" && !linked) return;
    this.open();
    if (linked) return this.seek(Math.min(this.span, Number(linked[1])));
    this.moved(info.play ? 0 : this.span);
    if (info.play) this.play(true);
  }

  /** The moment goes into the address, so that it can be sent to somebody. */
  keep() {
    if (location.hash.startsWith("#/incident/")) return;
    const newest = !this.shown || this.at >= this.span;
    history.replaceState(null, "", newest ? "#/" : `#/at/${Math.round(this.at * 100) / 100}`);
  }

  open() {
    id("time").hidden = false;
    document.body.classList.add("has-time");
    setAttributes(this.slider, { max: this.span });
    id("to-live").hidden = this.store.info.mode !== "live";
    const whole = Math.max(1, Math.round(this.span / WHOLE_S));
    const speeds = [...new Set([...SPEEDS.filter((speed) => speed < this.span), whole])].sort((a, b) => a - b);
    id("speed").replaceChildren(
      ...speeds.map((speed) =>
        h(
          "option",
          { value: speed, selected: speed === whole },
          `${count(speed)} ×${speed === whole ? ` (all in ${duration(this.span / whole)})` : ""}`,
        ),
      ),
    );
    this.marks();
  }

  lookBack() {
    if (this.shown) return this.leave();
    this.open();
    setAttributes(id("back-button"), { "aria-pressed": "true" });
    this.seek(this.span);
    this.slider.focus();
  }

  leave() {
    this.play(false);
    id("time").hidden = true;
    document.body.classList.remove("has-time");
    setAttributes(id("back-button"), { "aria-pressed": "false" });
    this.store.goTo(null);
    this.keep();
  }

  play(playing) {
    this.playing = playing;
    clearInterval(this.timer);
    setText(id("play"), playing ? "Pause" : "Play");
    setAttributes(id("play"), { "aria-pressed": String(playing) });
    if (!playing) return this.keep();
    if (this.at >= this.span) this.seek(0);
    else this.seek(this.at);
    this.timer = setInterval(() => this.tick(), TICK_MS);
  }

  tick() {
    const next = this.at + (Number(id("speed").value) * TICK_MS) / 1000;
    this.seek(Math.min(next, this.span));
    if (next >= this.span) this.play(false);
  }

  seek(atS) {
    this.moved(atS);
    this.store.goTo(atS);
  }

  moved(atS) {
    this.at = atS;
    this.slider.value = atS;
    const wall = this.store.view?.submitted_wall_s ?? 0;
    const text = `${duration(atS)} of ${duration(this.span)}`;
    setText(id("moment"), wall && !this.store.view.simulated ? `${clock(wall, atS)} · ${text}` : text);
    setAttributes(this.slider, { "aria-valuetext": text });
  }

  step(share) {
    if (!this.shown) return;
    this.seek(Math.min(this.span, Math.max(0, this.at + share * this.span)));
    this.keep();
  }

  /** To the moment at which the next or the previous incident opened. */
  jump(by) {
    const known = [...this.store.view.incidents, ...this.store.live.incidents]; // those of then, and the newest ones
    const opened = known.map((incident) => incident.opened_s).sort((a, b) => a - b);
    const near = 1e-6 * this.span;
    const to = by > 0 ? opened.find((s) => s > this.at + near) : opened.findLast((s) => s < this.at - near);
    if (to === undefined) return announce(by > 0 ? "no later incident" : "no earlier incident");
    this.play(false);
    this.seek(to);
    this.keep();
  }

  marks() {
    const { live } = this.store;
    const canvas = id("track");
    const width = canvas.clientWidth;
    if (!live || !this.shown || width < 20) return;
    const height = 0.6 * rem();
    const ctx = begin(canvas, width, height);
    const thumb = 0.5 * rem(); // the slider's ends are half a thumb inside
    for (const incident of live.incidents) {
      ctx.fillStyle = token(isFault(incident) ? "bad-mark" : "warn-mark");
      ctx.fillRect(thumb + ((width - 2 * thumb) * incident.opened_s) / this.span - 1, 0, 2, height);
    }
  }
}
