// Experts that a person must decide on.

import { act, decisionButton, mayDecide, Selection } from "./decisions.js";
import { getExperts } from "./hub.js";
import { byId, bytes, el, fill, many, named, number, shortId, showFilled, time, uploaderOf } from "./page.js";

const LISTED = 1000; // at most, says the hub
const selection = new Selection(byId("queue-actions"), ["active", "retired"]);

export function load(family) {
  return getExperts(family.id, LISTED, "quarantined");
}

export function draw(experts, context) {
  byId("only-admins").hidden = mayDecide || !experts.length;
  showFilled("quarantine", experts.length > 0);
  selection.show(experts, context);
  fill(byId("queue"), experts, (expert) => expert.id, (expert) => entry(expert, context));
}

function entry(expert, context) {
  const name = named(expert.domain);
  const facts = [expert.method || "unknown method", bytes(expert.size), shortId(expert.id)];
  if (expert.norm !== null) facts.splice(1, 0, `norm ${number(expert.norm)}`);
  if (expert.samples !== null) facts.splice(1, 0, many(expert.samples, "sample"));
  const button = (state) => decisionButton(state, name, () => act([expert], state, context));
  return el("li", { className: "panel" },
    el("h3", {}, el("label", {}, selection.box(expert), name)),
    el("p", { className: "why", textContent: `⚠\uFE0E ${expert.reason || "put here by hand"}` }),
    el("p", { className: "quiet" }, `${facts.join(" · ")} · from ${uploaderOf(expert)} · arrived `, time(expert.created)),
    el("div", { className: "buttons" }, button("active"), button("retired")));
}
