// The View that the page shows, and where it comes from: the server's stream, or a moment of the past.

const HIDDEN_MS = 5000; // a tab that nobody looks at gives its connection back: browsers open six to a host
const GLANCE_MS = 20000; // and only looks up, for its title
const AGAIN_MS = 2000;

export async function getJson(path, options = {}) {
  const answer = await fetch(path, { credentials: "same-origin", ...options });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(body.error ?? body.refused ?? `the server answered ${answer.status}`);
  return body;
}

export class Store {
  constructor() {
    this.info = null;
    this.live = null; // newest View
    this.liveMs = 0; // when it came
    this.past = null; // View of the moment that is looked at, null: the newest one
    this.trouble = ""; // why nothing new comes
    this.over = false; // nothing will ever
    this.listeners = [];
    this.stream = null;
    this.wanted = null; // moment that is to be fetched next
    this.fetching = false;
  }

  get view() {
    return this.past ?? this.live;
  }

  get isLive() {
    return this.info?.mode === "live" && this.past === null && this.live?.exit_code === null;
  }

  /** Nothing more comes: a record, shown up to where it ends. */
  get isCut() {
    return this.info?.mode !== "live" && this.live !== null && this.view.now_s >= this.live.now_s;
  }

  /** Seconds of the job: those of the View, and what has passed since it came. */
  get now() {
    return this.isLive ? this.live.now_s + (performance.now() - this.liveMs) / 1000 : this.view.now_s;
  }

  /** `listen(changed)` is told which fields of the View changed: a Set. */
  on(listen) {
    this.listeners.push(listen);
  }

  tell(fields) {
    if (!this.view) return;
    const changed = new Set(fields ?? Object.keys(this.view));
    for (const listen of this.listeners) listen(changed);
  }

  async start() {
    for (;;) {
      try {
        this.info = await getJson("/api/info");
        break;
      } catch (error) {
        this.fails(error.message);
        await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
      }
    }
    if (this.info.mode !== "live") return this.whole();
    this.open();
    document.addEventListener("visibilitychange", () => this.looked());
  }

  open() {
    if (this.stream) return;
    this.stream = new EventSource("/api/stream");
    this.stream.addEventListener("view", (event) => this.take(JSON.parse(event.data)));
    this.stream.addEventListener("change", (event) => this.merge(JSON.parse(event.data)));
    this.stream.addEventListener("error", () => this.broke());
  }

  close() {
    this.stream?.close();
    this.stream = null;
  }

  broke() {
    if (this.live && this.live.exit_code !== null) return this.rest();
    this.fails("connection lost, trying again");
    if (this.stream?.readyState === EventSource.CLOSED) {
      this.close(); // a refusal: the browser does not try again by itself
      setTimeout(() => this.open(), AGAIN_MS);
    }
  }

  /** The job has ended, and its server with it: that is no trouble, and there is nothing to wait for. */
  rest() {
    this.close();
    this.over = true;
    this.fails("");
  }

  fails(why) {
    this.trouble = why;
    document.dispatchEvent(new CustomEvent("everstep-trouble", { detail: why }));
  }

  /** The server may have begun anew, and know more of the job or of its record. */
  async ask() {
    try {
      this.info = await getJson("/api/info");
      this.fails("");
    } catch (error) {
      this.fails(error.message);
    }
  }

  take(view) {
    if (this.live) this.ask();
    this.live = view;
    this.came();
    if (this.past === null) this.tell();
  }

  merge(change) {
    if (!this.live) return;
    Object.assign(this.live, change);
    this.came();
    if (this.past === null) this.tell(Object.keys(change));
  }

  came() {
    this.liveMs = performance.now();
    if (this.trouble) this.fails("");
  }

  looked() {
    clearTimeout(this.hiding);
    clearInterval(this.glancing);
    if (this.over) return;
    if (!document.hidden) return this.open();
    this.hiding = setTimeout(() => {
      this.close();
      this.glancing = setInterval(() => this.glance(), GLANCE_MS);
    }, HIDDEN_MS);
  }

  async glance() {
    try {
      this.take(await getJson("/api/view"));
    } catch (error) {
      this.fails(error.message);
    }
  }

  /** A record's newest View; it is asked for until it comes. */
  async whole() {
    while (!this.live) {
      await this.glance();
      if (!this.live) await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  /** Show the moment `atS` of the job; null: the newest. Only the last wish counts while one is being fetched. */
  async goTo(atS) {
    this.wanted = atS;
    if (this.fetching) return;
    this.fetching = true;
    let shown;
    while (shown !== this.wanted) {
      shown = this.wanted;
      await this.show(shown);
    }
    this.fetching = false;
  }

  async show(atS) {
    try {
      const past = atS === null ? null : await getJson(`/api/view?at=${atS}`);
      this.past = past;
      if (this.trouble) this.fails("");
    } catch (error) {
      this.fails(error.message);
    }
    this.tell();
  }
}
