// A person's word on experts, one or several: asked for once more before it is given.

import { approve, decide } from "./hub.js";
import { byId, el, many, named, setText } from "./page.js";

const { role, name: person } = document.body.dataset;
export const mayDecide = role === "admin";
const WORDS = {
  active: ["Accept", "accepted", "will be part of the next bundle, whatever the screening says.", "primary"],
  quarantined: ["Keep out", "kept out", "will be left out of the next bundle, until somebody accepts.", ""],
  retired: ["Reject", "rejected", "will be retired. That is for good: a retired expert does not come back.", "danger"],
};

export function decisionButton(state, name, onClick) {
  const [text, , , className] = WORDS[state];
  const made = el("button", { type: "button", className, textContent: text, disabled: !mayDecide });
  made.setAttribute("aria-label", `${text} ${name}`);
  if (!mayDecide) made.title = "Only an administrator can decide.";
  made.addEventListener("click", onClick);
  return made;
}

// Which experts of a list are chosen, across refreshes, and buttons for all of them.
export class Selection {
  #chosen = new Set();
  #experts = [];
  #context = null;
  #count = el("span", { className: "quiet" });
  #buttons;

  constructor(bar, states) {
    this.#buttons = states.map((state) => decisionButton(state, "the chosen experts", () => act(this.#picked(), state, this.#context)));
    bar.hidden = !mayDecide;
    bar.append(...this.#buttons, this.#count);
  }

  box(expert) {
    if (!mayDecide || expert.state === "retired") return null;
    const box = el("input", { type: "checkbox", checked: this.#chosen.has(expert.id) });
    box.setAttribute("aria-label", `Choose ${named(expert.domain)}`);
    box.addEventListener("change", () => {
      this.#chosen[box.checked ? "add" : "delete"](expert.id);
      this.#update();
    });
    return box;
  }

  show(experts, context) {
    [this.#experts, this.#context] = [experts, context];
    const there = new Set(experts.filter(({ state }) => state !== "retired").map(({ id }) => id));
    for (const id of this.#chosen) if (!there.has(id)) this.#chosen.delete(id);
    this.#update();
  }

  #picked() {
    return this.#experts.filter((expert) => this.#chosen.has(expert.id));
  }

  #update() {
    for (const button of this.#buttons) button.disabled = !mayDecide || !this.#chosen.size;
    setText(this.#count, this.#chosen.size ? `${many(this.#chosen.size, "expert")} chosen` : "Choose experts to decide on several at once.");
  }
}

export async function act(experts, state, { say, refresh }) {
  const what = experts.length === 1 ? named(experts[0].domain) : many(experts.length, "expert");
  const [title, word, then, className] = WORDS[state];
  if (!(await confirmed(title, what, then, className))) return;
  let done = 0;
  try {
    for (const expert of experts) {
      await decide(expert.id, state, `${word} by ${person}${expert.reason ? ` (${expert.reason})` : ""}`);
      done += 1;
    }
    say(`${what} ${experts.length === 1 ? "is" : "are"} ${word}${state === "active" ? ": the next bundle will show it" : ""}.`);
    byId("main").focus({ preventScroll: true }); // the button that had it is about to go
  } catch (error) {
    const before = done ? `${many(done, "expert")} ${word}, then: ` : "";
    say(`${before}${named(experts[done].domain)} could not be ${word}: ${error.message}`, true);
  }
  refresh();
}

// For a contributor whose uploads wait.
export function approvalButton({ token, name }, { say, refresh }) {
  const made = el("button", { type: "button", className: "primary", textContent: "Approve" });
  made.setAttribute("aria-label", `Approve ${name}`);
  made.addEventListener("click", async () => {
    if (!(await confirmed("Approve", name, "has its uploads merged from now on, as far as the screening finds nothing odd.", "primary"))) return;
    try {
      await approve(token);
      say(`${name} is approved: the next bundle will show it.`);
      byId("main").focus({ preventScroll: true });
    } catch (error) {
      say(`${name} could not be approved: ${error.message}`, true);
    }
    refresh();
  });
  return made;
}

function confirmed(text, what, then, className) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = `${text}?`;
  byId("confirm-what").textContent = what;
  byId("confirm-then").textContent = then;
  Object.assign(byId("confirm-yes"), { textContent: text, className });
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
