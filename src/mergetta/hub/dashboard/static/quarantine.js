// Experts that a person must decide on.

import { decide, getExperts } from "./hub.js";
import { byId, bytes, el, fill, many, named, number, shortId, showFilled, time } from "./page.js";

const LISTED = 1000; // at most, says the hub
const { role, name: person } = document.body.dataset;
const mayDecide = role === "admin";

export function load(family) {
  return getExperts(family.id, LISTED, "quarantined");
}

export function draw(experts, context) {
  byId("only-admins").hidden = mayDecide || !experts.length;
  showFilled("quarantine", experts.length > 0);
  fill(byId("queue"), experts, (expert) => expert.id, (expert) => entry(expert, context));
}

function entry(expert, context) {
  const name = named(expert.domain);
  const facts = [expert.method || "unknown method", `norm ${number(expert.norm)}`, bytes(expert.size), shortId(expert.id)];
  if (expert.samples !== null) facts.splice(1, 0, many(expert.samples, "sample"));
  const item = el("li", { className: "panel" },
    el("h3", { textContent: name }),
    el("p", { className: "why", textContent: `⚠\uFE0E ${expert.reason || "put here by hand"}` }),
    el("p", { className: "quiet" }, `${facts.join(" · ")} · arrived `, time(expert.created)));
  const button = (text, state, className) => {
    const made = el("button", { type: "button", className, textContent: text, disabled: !mayDecide });
    made.setAttribute("aria-label", `${text} ${name}`);
    if (!mayDecide) made.title = "Only an administrator can decide.";
    made.addEventListener("click", () => act(item, expert, state, context));
    return made;
  };
  item.append(el("div", { className: "buttons" }, button("Accept", "active", "primary"), button("Reject", "retired", "danger")));
  return item;
}

async function act(item, expert, state, { say, refresh }) {
  if (state === "retired" && !(await confirmed(expert))) return;
  const buttons = item.querySelectorAll("button");
  const enable = (on) => buttons.forEach((button) => { button.disabled = !on; });
  enable(false);
  const word = state === "active" ? "accepted" : "rejected";
  try {
    await decide(expert.id, state, `${word} by ${person}${expert.reason ? ` (${expert.reason})` : ""}`);
    say(`${named(expert.domain)} is ${word}${state === "active" ? ": the next bundle contains it" : ""}.`);
    byId("main").focus({ preventScroll: true }); // the button that had it is about to go
    refresh();
  } catch (error) {
    enable(true);
    say(`${named(expert.domain)} could not be ${word}: ${error.message}`, true);
  }
}

function confirmed(expert) {
  const dialog = byId("confirm");
  byId("confirm-what").textContent = named(expert.domain);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
