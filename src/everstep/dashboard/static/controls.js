// Drain, save and stop: each says what it will do, and asks for the token; what ends something, for the job's name.

import { h, keyed, setText } from "./dom.js";
import { count } from "./format.js";
import { getJson } from "./store.js";

const id = (name) => document.getElementById(name);

const ACTIONS = {
  save: {
    label: "Save now …",
    title: "Save now",
    what: () => "The state is saved to the job's checkpoints after the step under way. Training goes on meanwhile.",
    go: "Save",
    harmless: true, // the name is filled in
  },
  drain: {
    label: "Drain a node …",
    title: "Drain",
    what: () =>
      "The node, or one worker, leaves between two steps. The others go on, a standby takes its place if there is one.",
    go: "Drain",
    target: true,
  },
  stop: {
    label: "Stop the job …",
    title: "Stop the job",
    what: (view) =>
      `All workers of ${view.job} are stopped, after step ${count(view.step)}. The job does not go on by itself.`,
    go: "Stop the job",
    danger: true,
  },
  stacks: {
    title: "Stacks",
    what: (_, worker) => `Where all threads of ${worker} are now. Training goes on, nobody waits for it.`,
    go: "Show stacks",
    harmless: true,
    looks: true, // at a worker, and has something to show
  },
  profile: {
    title: "Profile",
    what: (_, worker) => `Where ${worker} spends the next seconds, sampled 99 times a second. Training goes on.`,
    go: "Profile",
    harmless: true,
    looks: true,
    seconds: true,
  },
};

export class Controls {
  constructor(store) {
    this.store = store;
    this.dialog = id("ask");
    this.token = ""; // kept as long as this page is open, and nowhere else
    store.on((changed) => (changed.has("stage") || changed.has("exit_code") || changed.has("job")) && this.draw());
  }

  draw() {
    const why = this.whyNot();
    setText(id("control-note"), why || "Each asks before it acts, and needs the job's token.");
    const own = Object.entries(ACTIONS).filter(([, action]) => !action.looks);
    const buttons = own.map(([name, action]) => ({ name, action, why }));
    keyed(
      id("control-buttons"),
      buttons,
      ({ name }) => name,
      ({ name, action }) => {
        const button = h(
          "button",
          { type: "button", class: action.danger ? "danger" : null, onclick: () => this.ask(name) },
          action.label,
        );
        button.show = (now) => {
          button.disabled = Boolean(now.why);
        };
        return button;
      },
    );
  }

  whyNot() {
    const { info, live } = this.store;
    if (!info?.controls)
      return info?.mode === "live"
        ? "This page only shows the job: it cannot control it."
        : `This is a ${info?.mode} job: there is nothing to control.`;
    return live && live.exit_code !== null ? "The job has ended." : "";
  }

  /** `worker`: node/local_rank, of those that look at one; `show` is given what there is to see. */
  ask(name, worker = "", show = null) {
    const action = ACTIONS[name];
    const view = this.store.live;
    const form = h("form", { method: "dialog", class: "ask" });
    const fields = {
      token: this.tokenField(),
      confirm: confirmField(view.job, action.harmless ? view.job : ""),
      target: action.target ? targetField(view) : null,
      seconds: action.seconds ? secondsField() : null,
      worker,
      show,
    };
    const answer = h("p", { class: "answer", role: "status" });
    const go = h("button", { type: "submit", class: action.danger ? "danger" : "primary", disabled: true }, action.go);
    const cancel = h("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Cancel");
    form.append(
      h("h2", { id: "ask-title" }, action.title),
      h("p", {}, action.what(view, worker)),
      ...[fields.target?.label, fields.seconds?.label, action.looks ? null : fields.confirm.label].filter(Boolean),
      fields.token.label,
      answer,
      h("div", { class: "buttons" }, go, cancel),
    );
    const ready = () => {
      go.disabled =
        fields.confirm.input.value !== view.job ||
        !fields.token.input.value ||
        (fields.target && !fields.target.input.value);
    };
    form.addEventListener("input", ready);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(name, fields, go, answer, cancel);
    });
    this.dialog.replaceChildren(form);
    this.dialog.showModal();
    ready();
    this.first(action, fields).focus();
  }

  /** What is to be typed first; with nothing, the button can be pressed. */
  first(action, { target, seconds, confirm, token }) {
    if (!action.looks) return (target ?? confirm).input;
    return (this.token ? seconds : token)?.input ?? this.dialog.querySelector("[type=submit]");
  }

  tokenField() {
    const input = h("input", { type: "password", autocomplete: "off", value: this.token, required: true });
    return { input, label: h("label", {}, "the token, from dashboard.token in the run folder", input) };
  }

  async send(name, fields, go, answer, cancel) {
    this.token = fields.token.input.value.trim();
    go.disabled = true;
    setText(answer, fields.seconds ? `sampling for ${fields.seconds.input.value} s …` : "asking …");
    const undo = fields.target?.undo.checked;
    const body = {
      confirm: fields.confirm.input.value,
      ...(fields.target ? { target: fields.target.input.value.trim(), undo } : {}),
      ...(fields.worker ? { target: fields.worker } : {}),
      ...(fields.seconds ? { seconds: Number(fields.seconds.input.value), threads: fields.seconds.threads.checked } : {}),
    };
    try {
      const got = await getJson(`/api/control/${name}`, {
        method: "POST",
        headers: { "Content-Type": "application/json", Authorization: `Bearer ${this.token}` },
        body: JSON.stringify(body),
      });
      if (fields.show) {
        if (!this.dialog.open || !answer.isConnected) return; // nobody waits for it any more; the run folder has it
        this.dialog.close();
        return fields.show(got);
      }
      setText(answer, got.ok);
      answer.className = "answer ok";
      setText(cancel, "Close");
    } catch (error) {
      setText(answer, `Refused: ${error.message}`);
      answer.className = "answer bad";
      go.disabled = false;
    }
  }
}

function confirmField(job, value) {
  const input = h("input", { type: "text", autocomplete: "off", value, spellcheck: "false", required: true });
  return {
    input,
    label: h("label", {}, h("span", {}, "type the job's name, ", h("strong", {}, job), ", to confirm"), input),
  };
}

function secondsField() {
  const input = h("input", { type: "number", min: "0.2", max: "60", step: "any", value: "5", required: true });
  const threads = h("input", { type: "checkbox" });
  const label = h(
    "div",
    { class: "target" },
    h("label", {}, "seconds", input),
    h("label", { class: "check" }, threads, "all threads, not only the main one"),
  );
  return { input, threads, label };
}

/** A node's name, a worker's rank, or node/local_rank; names of nodes that are here are offered. */
function targetField(view) {
  const options = view.nodes
    .filter((node) => node.state !== "lost")
    .slice(0, 500)
    .map((node) => h("option", { value: node.name }, node.state));
  const input = h("input", { type: "text", list: "targets", autocomplete: "off", spellcheck: "false", required: true });
  const undo = h("input", { type: "checkbox" });
  const label = h(
    "div",
    { class: "target" },
    h("label", {}, "node, rank, or node/local rank", input),
    h("datalist", { id: "targets" }, ...options),
    h("label", { class: "check" }, undo, "take it back: its place is to be filled again"),
  );
  return { input, undo, label };
}
