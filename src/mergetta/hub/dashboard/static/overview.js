// All families at a glance, and what somebody should look at.

import { steps } from "./bundle.js";
import { draw as drawChart } from "./charts.js";
import { lineChart, load as loadDevices } from "./devices.js";
import { get } from "./hub.js";
import {
  bundleOf, byId, bytes, cell, count, duration, el, fill, fillTable, many, median, number, numberCell, shortId, stateOf, tag,
  tiles, troublesOf,
} from "./page.js";

const OVERDUE = 60; // seconds without a bundle of the latest experts: builds take a second or two
const LISTED = 5;
const STATES = ["active", "pending", "quarantined", "retired"];

export async function load(family) {
  const [{ devices, lines }, history] = await Promise.all([loadDevices(family, ""), get("families", family.id, "bundles")]);
  return { devices, lines, history };
}

export function draw({ devices, lines, history }, { family, families, linkTo }) {
  drawTiles(family, history.at(-1), devices);
  fill(byId("attention"), attention(family, devices, linkTo), (item) => item.text, notice);
  const rows = families.map((each) => ({ ...each, chosen: each.id === family.id }));
  fillTable("families", rows, (each) => each.id, (each) => familyCells(each, linkTo));
  for (const row of byId("families").tBodies[0].rows) row.classList.toggle("chosen", row.key === family.id);
  drawChart("overview-entropy", lineChart(lines, "entropy", family, "No device has told of it yet."));
  drawChart("overview-history", steps(history, family));
}

function drawTiles(family, bundle, devices) {
  const { active = 0, pending = 0, quarantined = 0 } = family.experts;
  const states = devices.map(stateOf);
  const inState = (state) => states.filter((each) => each === state).length;
  const present = ["adapting", "settled", "silent"].filter(inState).map((state) => `${inState(state)} ${state}`);
  const awaited = family.lacks_probes ? "probe images or approval" : "approval";
  const waits = family.up_to_date ? `waiting for ${awaited}` : "being looked at";
  const merged = active ? "merged into the bundle" : "none yet";
  const entropy = median(devices.map((device) => device.last.entropy).filter((entropy) => entropy !== null));
  tiles("tiles", [
    ["Active experts", count(active), pending ? `${count(pending)} ${waits}` : merged],
    ["In quarantine", count(quarantined), quarantined ? "waiting for a decision" : "nothing to decide"],
    ["Coefficients that move", count(bundle?.dimension ?? null), bundle ? `${bytes(bundle.size)} per device` : "no bundle yet"],
    ["Devices", count(devices.length), present.join(", ") || "none has reported yet"],
    ["Median entropy", number(entropy), "of the last reports"],
  ]);
}

function attention(family, devices, linkTo) {
  const found = [];
  const note = (word, text, section) => found.push({ word, text, href: linkTo(section) });
  const { pending = 0, quarantined = 0 } = family.experts;
  const silent = devices.filter((device) => stateOf(device) === "silent");
  const older = devices.filter((device) => !silent.includes(device) && bundleOf(device) === "older");
  if (quarantined) note("quarantined", `${many(quarantined, "expert")} to accept or reject`, "quarantine");
  if (family.lacks_probes) note("none", "No images to try experts on, so new ones wait: mergetta hub probe", "experts");
  else if (pending && family.up_to_date) note("pending", `${many(pending, "expert")} of new tokens: approve or not`, "experts");
  if (!Object.keys(family.experts).length) note("none", "No expert yet: how to upload the first", "experts");
  if (!devices.length) note("none", "No device yet: how to start the first", "devices");
  const waited = family.waiting_since === null ? 0 : Date.now() / 1000 - family.waiting_since;
  if (waited > OVERDUE) note("failing", `No bundle with the latest experts for ${duration(waited)}: the hub's log says why`, "bundle");
  else if (!family.up_to_date) note("building", "A new bundle is on its way", "bundle");
  if (older.length) note("older", `${many(older.length, "device")} with an older bundle`, "devices");
  const some = (word, chosen, textOf) => {
    for (const device of chosen.slice(0, LISTED)) note(word, `${device.device} ${textOf(device)}`, "devices");
    if (chosen.length > LISTED) note(word, `and ${many(chosen.length - LISTED, "more device")}`, "devices");
  };
  some("trouble", devices.filter((device) => troublesOf(device, devices).length), (device) => troublesOf(device, devices).join(", "));
  some("silent", silent, (device) => `was last heard ${duration(Date.now() / 1000 - device.last_seen)} ago`);
  return found.length ? found : [{ word: "settled", text: "No build and no device reports trouble", href: null }];
}

function notice({ word, text, href }) {
  const words = href ? el("a", { href, textContent: text }) : text;
  return el("li", {}, word === "settled" ? tag(word, "fine") : tag(word), words);
}

function familyCells(family, linkTo) {
  const counts = STATES.filter((state) => family.experts[state]);
  const tags = counts.map((state) => tag(state, `${count(family.experts[state])} ${state}`));
  const bundle = family.bundle ? el("code", { textContent: shortId(family.bundle), title: family.bundle }) : "none yet";
  const empty = !counts.length;
  return [
    cell(el("a", { href: linkTo("overview", family.id), textContent: family.id }), "name"),
    cell(family.note || "–", "words"),
    numberCell(count(family.groups)),
    numberCell(count(family.parameters)),
    cell(empty ? "none yet" : el("span", { className: "tags" }, ...tags)),
    cell(bundle, "short"),
    cell(empty ? tag("none", "waiting for experts") : family.up_to_date ? tag("current", "up to date") : tag("building")),
  ];
}
