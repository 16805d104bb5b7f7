// Who did what: for administrators.

import { get } from "./hub.js";
import { cell, fillTable, shortId, time } from "./page.js";

export function load() {
  return get("audit");
}

export function draw(entries) {
  fillTable("log-table", entries, (entry) => entry.number, (entry) => [
    cell(time(entry.time), "short"),
    cell(entry.name, "name"),
    cell(entry.action, "short"),
    cell(entry.subject === entry.family ? "–" : shortId(entry.subject), "short"),
    cell(entry.family || "–", "short"),
    cell(entry.why || "–", "words"),
  ]);
}
