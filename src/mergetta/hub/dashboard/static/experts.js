// Who has contributed, and how alike the contributions are.

import { axis, brief, colours, draw as drawChart, narrow, plain } from "./charts.js";
import { approvalButton, mayDecide, Selection } from "./decisions.js";
import { get, getExperts } from "./hub.js";
import {
  byId, cell, count, el, fillTable, named, number, numberCell, setText, showFilled, tag, time, uploaderOf,
} from "./page.js";

const SHOWN = 200;
const WITH_NUMBERS = 24;
let map = { mark: "", similarity: null };
let redraw = () => {};
const selection = new Selection(byId("expert-actions"), ["active", "quarantined", "retired"]);

byId("expert-state").addEventListener("change", () => redraw());

export async function load(family) {
  const experts = await getExperts(family.id, SHOWN);
  const bundle = family.bundle ? await get("families", family.id, "bundle", "summary") : null;
  const mark = JSON.stringify([family.id, experts.map((expert) => [expert.id, expert.state])]);
  if (map.mark !== mark) map = { mark, similarity: await get("families", family.id, "similarity") };
  return { experts, similarity: map.similarity, less: bundle?.summary.counts_less };
}

export function draw({ experts, similarity, less }, context) {
  const { family } = context;
  selection.show(experts, context);
  fillTable("contributor-table", contributors(experts, less), (each) => each.token, (each) => contributorCells(each, context));
  redraw = () => drawTable(experts, family);
  showFilled("experts", experts.length > 0);
  redraw();
  if (similarity.experts.length) drawChart("similarity", heatmap(experts, similarity, family));
}

function drawTable(experts, family) {
  const state = byId("expert-state").value;
  const rows = experts.filter((expert) => !state || expert.state === state).reverse();
  fillTable("expert-table", rows, (expert) => expert.id, expertCells);
  const total = Object.values(family.experts).reduce((sum, each) => sum + each, 0);
  const latest = total > experts.length ? `Of the latest ${count(experts.length)} of ${count(total)} experts, ` : "";
  setText(byId("expert-note"), `${latest}${count(rows.length)} shown, newest first.`);
}

function expertCells(expert) {
  const reason = expert.reason || (expert.decided ? "decided by a person" : "");
  const domain = cell(el("label", {}, selection.box(expert), named(expert.domain)), "name");
  domain.title = `SHA-256 ${expert.id}`;
  return [
    domain,
    cell(tag(expert.state), "short"),
    cell(expert.method || "–", "short"),
    numberCell(count(expert.samples)),
    numberCell(number(expert.norm)),
    cell(uploaderOf(expert), "short"),
    cell(reason, "words"),
    cell(time(expert.created), "short"),
  ];
}

// Of the experts shown: who has sent how many, and counts how much in the merge, which is for administrators to know.
function contributors(experts, less) {
  const found = new Map();
  for (const expert of experts) {
    const { token, state, created, waits } = expert;
    const known = found.get(token) ?? { token, name: uploaderOf(expert), active: 0, pending: 0, quarantined: 0, retired: 0, waits: false };
    found.set(token, { ...known, [state]: known[state] + 1, last: created, waits: known.waits || waits });
  }
  const weight = ({ token, active }) => (less === undefined ? null : active ? (less[token] ?? 1) : 0);
  return [...found.values()].map((each) => ({ ...each, weight: weight(each) })).sort((a, b) => b.active - a.active);
}

function contributorCells(contributor, context) {
  const { name, active, weight, pending, quarantined, retired, last, waits } = contributor;
  const numbers = [count(active), number(weight), count(pending), count(quarantined), count(retired)];
  const approval = waits && mayDecide ? approvalButton(contributor, context) : waits ? "waits for an administrator" : "";
  return [cell(name, "name"), ...numbers.map(numberCell), cell(time(last), "short"), cell(approval, "short")];
}

// Kept-out experts come last, so that they stand apart from the others.
function order(experts, similarity) {
  const states = new Map(experts.map((expert) => [expert.id, expert.state]));
  const odd = (i) => states.get(similarity.experts[i]) === "quarantined";
  const all = similarity.experts.map((_, i) => i);
  return { places: [...all.filter((i) => !odd(i)), ...all.filter(odd)], odd };
}

function heatmap(experts, similarity, family) {
  const { places, odd } = order(experts, similarity);
  const sign = (i) => (odd(i) ? "⚠\uFE0E " : "");
  const names = places.map((i) => plain(sign(i) + named(similarity.domains[i])));
  const labels = places.map((i) => plain(sign(i) + brief(named(similarity.domains[i]), narrow() ? 12 : 20)));
  const z = places.map((i) => places.map((j) => similarity.cosines[i][j]));
  const ticks = placeTicks(labels);
  return {
    traces: places.length ? [cells(z, names)] : [],
    layout: {
      height: narrow() ? Math.min(560, 60 + 16 * places.length) : Math.min(900, 130 + 24 * places.length),
      xaxis: axis({ ...ticks, tickangle: -45, showticklabels: !narrow() }),
      yaxis: axis({ ...ticks, autorange: "reversed" }),
    },
    keep: `${family.id} ${places.length}`,
    words: `Similarity of ${places.length} experts`,
    none: "All experts are retired.",
  };
}

// Two experts may share a domain: places, not names, tell them apart.
function placeTicks(labels) {
  const tickfont = { size: labels.length > 40 ? 8 : 11, color: colours().quiet };
  return { tickvals: labels.map((_, i) => i), ticktext: labels, tickfont, showgrid: false, zeroline: false, ticks: "" };
}

function cells(z, names) {
  const { plus, zero, minus, quiet } = colours();
  const withNumbers = z.length <= WITH_NUMBERS && !narrow();
  return {
    type: "heatmap", z, zmin: -1, zmax: 1, xgap: 1, ygap: 1, showscale: !narrow(),
    colorscale: [[0, minus], [0.5, zero], [1, plus]],
    colorbar: { thickness: 10, outlinewidth: 0, dtick: 0.5, len: 0.9, tickfont: { color: quiet, size: 11 } },
    customdata: names.map((row) => names.map((column) => [row, column])),
    hovertemplate: "%{customdata[0]}<br>%{customdata[1]}<br>cosine %{z:.2f}<extra></extra>",
    ...(withNumbers && { texttemplate: "%{z:.1f}", textfont: { size: 10 } }),
  };
}
