// How the fleet is doing: numbers that devices report, never images.

import { axis, draw as drawChart, lineStyle, localTime, narrow } from "./charts.js";
import { get } from "./hub.js";
import {
  bundleOf, byId, cell, count, fillTable, many, numberCell, setText, showFilled, stateOf, tag, time, troublesOf,
} from "./page.js";

const LINES = 12;
const ROWS = 300;
const KEPT = 500;
const WHOLE_AGAIN = 60_000; // in between, the last report is added to those we have
const known = new Map();
let again = () => {};

byId("device-filter").addEventListener("input", () => again());

export async function load(family, part = byId("device-filter").value.trim().toLowerCase()) {
  const devices = await get("families", family.id, "devices");
  const chosen = devices.filter((each) => each.device.toLowerCase().includes(part)).sort(byName);
  const drawn = [...chosen].sort((a, b) => isSilent(a) - isSilent(b)).slice(0, LINES).sort(byName);
  const reports = await Promise.all(drawn.map((device) => reportsOf(family, device)));
  return { devices, chosen, lines: drawn.map((device, i) => ({ name: device.device, reports: reports[i] })) };
}

const byName = (a, b) => (a.device < b.device ? -1 : 1);
const isSilent = (device) => Number(stateOf(device) === "silent");

async function reportsOf(family, device) {
  const key = `${family.id} ${device.device}`;
  const have = known.get(key);
  if (!have || Date.now() - have.fetched > WHOLE_AGAIN) {
    const reports = await get("families", family.id, "devices", device.device, "reports");
    known.set(key, { reports, seen: device.last_seen, fetched: Date.now() });
  } else if (have.seen !== device.last_seen) {
    known.set(key, { ...have, reports: [...have.reports, device.last].slice(-KEPT), seen: device.last_seen });
  }
  return known.get(key).reports;
}

export function draw({ devices, chosen, lines }, { family, refresh }) {
  again = refresh;
  showFilled("devices", devices.length > 0);
  if (!devices.length) return;
  const rows = chosen.slice(0, ROWS).map((device) => ({
    ...device, state: stateOf(device), bundle: bundleOf(device), troubles: troublesOf(device, devices),
  }));
  fillTable("device-table", rows, (device) => device.device, deviceCells);
  const notes = [`${count(rows.length)} of ${many(devices.length, "device")}.`];
  if (chosen.length > LINES) notes.push(`The charts show ${LINES} of them; filter to see others.`);
  setText(byId("device-note"), notes.join(" "));
  drawChart("entropy", lineChart(lines, "entropy", family, "No device has told of it yet."));
  drawChart("loss", lineChart(lines, "loss", family, "No device has taken a step yet."));
}

function deviceCells({ device, state, bundle, troubles, last, last_seen }) {
  return [
    cell(device, "name"),
    cell(tag(state), "short"),
    cell(time(last_seen), "short"),
    cell(tag(bundle), "short"),
    numberCell(count(last.batches)),
    numberCell(count(last.steps)),
    numberCell(last.entropy === null ? "–" : last.entropy.toFixed(3)),
    numberCell(last.forwards.toFixed(2)),
    numberCell(count(last.shifts)),
    cell(troubles.join(", ") || "–", troubles.length ? "words warn" : "words"),
  ];
}

export function lineChart(lines, key, family, none) {
  const traces = lines.map(({ name, reports }, i) => {
    const told = reports.filter((report) => report[key] !== null);
    return {
      type: "scatter", mode: "lines+markers", name, ...lineStyle(i),
      x: told.map((report) => localTime(report.time)), y: told.map((report) => report[key]),
      hovertemplate: `${name}<br>%{x}<br>${key} %{y:.3f}<extra></extra>`,
    };
  }).filter((trace) => trace.x.length);
  return {
    traces,
    layout: {
      height: 340, showlegend: true, xaxis: axis({ type: "date", nticks: narrow() ? 4 : 6, tickangle: 0 }),
      yaxis: axis({ title: key, rangemode: key === "entropy" ? "tozero" : "normal" }),
      legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top" }, margin: { l: 48, r: 12, t: 12, b: 12 },
    },
    keep: family.id, none, words: `${key} over time of ${traces.length} devices`,
  };
}
