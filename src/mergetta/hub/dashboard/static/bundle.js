// What devices fetch now, and how it came about.

import { axis, colours, draw as drawChart, lineStyle, localTime, narrow, plain } from "./charts.js";
import { get } from "./hub.js";
import { ago, byId, bytes, cell, count, fillTable, named, numberCell, setText, showFilled, tiles } from "./page.js";

export async function load(family) {
  if (!family.bundle) return { bundle: null, history: [] };
  const [bundle, history] = await Promise.all([
    get("families", family.id, "bundle", "summary"),
    get("families", family.id, "bundles"),
  ]);
  return { bundle, history };
}

export function draw({ bundle, history }, { family }) {
  showFilled("bundle", bundle !== null);
  if (!bundle) return;
  const { ranks, energy, frozen, domains, members } = bundle.summary;
  const groups = Object.keys(ranks).length;
  tiles("bundle-tiles", [
    ["Experts merged", count(bundle.experts), `${count(domains)} domains`],
    ["Coefficients that move", count(bundle.dimension), `in ${count(groups - frozen.length)} of ${count(groups)} groups`],
    ["Size", bytes(bundle.size), bundle.signature ? "signed" : "not signed"],
    ["Energy kept", percent(mean(Object.values(energy))), "mean over all groups"],
    ["Built", ago(bundle.created), family.up_to_date ? "up to date" : "a newer one is being built"],
  ]);
  setText(byId("bundle-id"), bundle.id);
  byId("members").hidden = !members.length;
  fillTable("member-table", members.map((each, i) => ({ ...each, i })), (each) => each.i, memberCells);
  drawChart("ranks", rankBars(ranks, frozen, family));
  drawChart("energy", energyBars(energy, frozen, family));
  drawChart("history", steps(history, family));
}

const memberCells = ({ member, experts, contributors }) =>
  [cell(named(member)), numberCell(count(experts)), numberCell(count(contributors))];
const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

// Groups that move and groups that do not, told apart by colour and by hatching.
function bars(values, frozen, text) {
  const { accent, quiet, panel } = colours();
  const still = new Set(frozen);
  const names = Object.keys(values);
  const trace = (name, chosen, marker) => ({
    type: "bar", name, marker, x: chosen.map(plain), y: chosen.map((each) => values[each]),
    hovertemplate: `%{x}<br>${text}<extra></extra>`,
  });
  const pattern = { shape: "/", bgcolor: panel, fgcolor: quiet, size: 5, solidity: 0.4 };
  const traces = [
    trace("moves", names.filter((each) => !still.has(each)), { color: accent }),
    trace("frozen", names.filter((each) => still.has(each)), { color: quiet, pattern, line: { color: quiet, width: 1 } }),
  ].filter((each) => each.x.length);
  return { traces, names: names.map(plain) };
}

function groupAxis(names) {
  return axis({
    type: "category", categoryorder: "array", categoryarray: names, showgrid: false,
    tickangle: narrow() ? -90 : -60, tickfont: { size: narrow() ? 8 : 10, color: colours().quiet },
  });
}

function rankBars(ranks, frozen, family) {
  const { traces, names } = bars(ranks, frozen, "rank %{y}");
  const highest = Math.max(...Object.values(ranks));
  return {
    traces,
    layout: {
      height: 320, bargap: 0.3, xaxis: groupAxis(names),
      yaxis: axis({ title: "rank", rangemode: "tozero", ...(highest <= 8 && { dtick: 1 }) }),
    },
    keep: family.id, words: `Rank of ${names.length} groups`, none: "The bundle has no groups.",
  };
}

function energyBars(energy, frozen, family) {
  const { traces, names } = bars(energy, frozen, "%{y:.1%} kept");
  return {
    traces,
    layout: {
      height: 320, bargap: 0.3, xaxis: groupAxis(names),
      yaxis: axis({ range: [0, 1], dtick: 0.25, tickformat: ".0%", title: "energy" }),
    },
    keep: family.id, words: `Energy kept in ${names.length} groups`, none: "The bundle has no groups.",
  };
}

export function steps(history, family) {
  const line = (name, i, key, yaxis) => ({
    type: "scatter", mode: "lines+markers", name, yaxis, ...lineStyle(i),
    x: history.map((each) => localTime(each.created)), y: history.map((each) => each[key]),
    line: { ...lineStyle(i).line, shape: "hv" }, hovertemplate: `%{x}<br>%{y} ${name}<extra></extra>`,
  });
  return {
    traces: history.length ? [line("experts", 0, "experts", "y"), line("coefficients", 1, "dimension", "y2")] : [],
    layout: {
      height: 340, showlegend: false,
      xaxis: axis({ type: "date", anchor: "y2", nticks: narrow() ? 4 : 6, tickangle: 0 }),
      yaxis: axis({ domain: [0.56, 1], title: "experts", rangemode: "tozero", nticks: 5 }),
      yaxis2: axis({ domain: [0, 0.44], title: "coefficients", rangemode: "tozero", nticks: 5 }),
    },
    keep: family.id, words: `Experts and coefficients of the last ${history.length} bundles`,
    none: "No bundle yet: the first follows the first expert.",
  };
}
