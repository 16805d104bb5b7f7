// The frame of the dashboard: which section of which family is shown, and keeping it fresh.

import * as bundle from "./bundle.js";
import * as devices from "./devices.js";
import * as experts from "./experts.js";
import { get, Refused, Unreachable } from "./hub.js";
import * as log from "./log.js";
import { logInFromFragment } from "./login.js";
import * as overview from "./overview.js";
import { byId, duration, el, fill, refreshTimes, setText } from "./page.js";
import * as quarantine from "./quarantine.js";

const { role } = document.body.dataset;
const SECTIONS = {
  overview, bundle, devices, ...(role !== "consume" && { experts, quarantine }), ...(role === "admin" && { log }),
};
const EVERY = interval(new URLSearchParams(location.search).get("refresh"));
let turn = 0;
let timer = 0;
let heard = null;
let toastTimer = 0;

function interval(asked) {
  const seconds = Number.parseFloat(asked ?? "");
  return Number.isFinite(seconds) ? Math.min(3600, Math.max(0.5, seconds)) : 5;
}

// The address says what is shown, as in #/experts/FAMILY, so it can be bookmarked and sent to somebody.
function place() {
  const [, section, family] = location.hash.split("/");
  let name = "";
  try {
    name = decodeURIComponent(family ?? "");
  } catch { /* not an address of ours */ }
  return { section: Object.hasOwn(SECTIONS, section) ? section : "overview", name };
}

function addressOf(section, family) {
  return `#/${section}/${encodeURIComponent(family)}`;
}

async function show(mine) {
  const families = await get("families");
  const { section, name } = place();
  const family = families.find((each) => each.id === name) ?? families[0];
  const data = family ? await SECTIONS[section].load(family) : null;
  if (mine !== turn) return; // the visitor has moved on
  byId("welcome").hidden = Boolean(family);
  drawFrame(families, family, section);
  if (!family) return;
  const linkTo = (to, id = family.id) => (Object.hasOwn(SECTIONS, to) ? addressOf(to, id) : null);
  SECTIONS[section].draw(data, { family, families, linkTo, say, refresh });
  refreshTimes();
}

function drawFrame(families, family, section) {
  for (const name of Object.keys(SECTIONS)) byId(name).hidden = !family || name !== section;
  for (const link of document.querySelectorAll("nav a")) {
    const name = link.dataset.section;
    link.hidden = !Object.hasOwn(SECTIONS, name);
    link.href = addressOf(name, family?.id ?? "");
    if (name !== section) link.removeAttribute("aria-current");
    else if (!link.ariaCurrent) {
      link.setAttribute("aria-current", "page");
      link.parentElement.scrollLeft = link.offsetLeft - 40;
    }
  }
  const waiting = family?.experts.quarantined ?? 0;
  byId("waiting").hidden = !waiting;
  setText(byId("waiting"), String(waiting));
  byId("chooser").hidden = families.length < 2;
  fill(byId("family"), families.map((each) => each.id), (id) => id, (id) => el("option", { value: id, textContent: id }));
  if (family) byId("family").value = family.id;
}

async function refresh() {
  clearTimeout(timer);
  const mine = ++turn;
  let again = true;
  try {
    await show(mine);
    if (mine === turn) connected();
  } catch (error) {
    if (mine === turn) again = explain(error);
  }
  if (mine === turn && again && !document.hidden) timer = setTimeout(refresh, EVERY * 1000);
}

function connected() {
  heard = new Date();
  byId("banner").hidden = true;
  setText(byId("banner"), "");
  status("live", `Live, every ${duration(EVERY)}`);
}

// Says what is wrong; false if asking again is of no use.
function explain(error) {
  const since = heard ? ` You see what it said at ${heard.toLocaleTimeString()}.` : "";
  if (error instanceof Unreachable) {
    status("lost", "Not connected");
    return warn(`The hub cannot be reached.${since} Trying again every ${duration(EVERY)}.`);
  }
  if (error instanceof Refused && error.status === 401) {
    status("lost", "Logged out");
    warn("The hub does not accept your token any more. ");
    byId("banner").append(el("a", { href: "./", textContent: "Log in again" }));
    return false;
  }
  if (error instanceof Refused) {
    status("lost", "Refused");
    return warn(`The hub answers: ${error.message}${since}`);
  }
  console.error(error);
  status("lost", "Fault");
  return warn(`The dashboard has a fault: ${error.message}`);
}

function warn(text) {
  byId("banner").hidden = false;
  setText(byId("banner"), text);
  return true;
}

function status(state, text) {
  byId("status").dataset.state = state;
  setText(byId("status"), text);
}

function say(text, bad = false) {
  clearTimeout(toastTimer);
  byId("toast").classList.toggle("bad", bad);
  byId("toast").textContent = text;
  toastTimer = setTimeout(() => { byId("toast").textContent = ""; }, bad ? 15_000 : 6000);
}

function watchVisibility() {
  if (!document.hidden) return refresh();
  clearTimeout(timer);
  status("paused", "Paused");
}

async function start() {
  try {
    if (await logInFromFragment()) return;
  } catch (error) {
    say(error.message, true);
  }
  for (const node of document.querySelectorAll(".address")) node.textContent = location.origin;
  byId("family").addEventListener("change", (event) => { location.hash = addressOf(place().section, event.target.value); });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  addEventListener("hashchange", refresh);
  document.addEventListener("visibilitychange", watchVisibility);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
  refresh();
}

start();
