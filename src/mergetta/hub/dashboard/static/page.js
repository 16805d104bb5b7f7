// Small things to build a page from. Whatever comes from the hub becomes text, never markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, properties);
  node.append(...children.filter((child) => child !== null));
  return node;
}

// Show items in a list or table. Elements of unchanged items stay, and with them focus and selection.
export function fill(parent, items, keyOf, make) {
  const known = new Map([...parent.children].map((child) => [child.key, child]));
  const nodes = items.map((item) => {
    const mark = JSON.stringify(item);
    const old = known.get(keyOf(item));
    return old?.mark === mark ? old : Object.assign(make(item), { key: keyOf(item), mark });
  });
  const kept = new Set(nodes);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  nodes.forEach((node, i) => {
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
  });
}

export function fillTable(id, rows, keyOf, cells) {
  fill(byId(id).tBodies[0], rows, keyOf, (row) => el("tr", {}, ...cells(row)));
}

export const cell = (content, className = "") => el("td", { className }, content);
export const numberCell = (value) => cell(value, "number");

export function tiles(id, entries) {
  fill(byId(id), entries, ([name]) => name, ([name, value, note]) =>
    el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }), el("dd", { textContent: note })));
}

// An empty section says what to do next; a filled one shows its contents.
export function showFilled(section, filled) {
  const root = byId(section);
  root.querySelector(":scope > .empty").hidden = filled;
  root.querySelector(":scope > .filled").hidden = !filled;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text; // screen readers speak again when it is set
}

// A sign, a word and a colour: none of them alone carries the meaning.
const TAGS = {
  active: ["✓", "good"],
  pending: ["…", ""],
  quarantined: ["⚠\uFE0E", "warn"],
  retired: ["–", "off"],
  adapting: ["↻", ""],
  settled: ["✓", "good"],
  silent: ["◌", "off"],
  current: ["✓", "good"],
  older: ["↓", "warn"],
  trouble: ["⚠\uFE0E", "warn"],
  failing: ["✗", "bad"],
  none: ["–", "off"],
  building: ["↻", ""],
};

export function tag(word, text = word) {
  const [sign, kind] = TAGS[word] ?? ["", ""];
  return el("span", { className: `tag ${kind}`, textContent: `${sign} ${text}` });
}

const integers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (value) => (value === null ? "–" : integers.format(value));
export const many = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;
export function number(value) {
  if (value === null) return "–";
  return Math.abs(value) >= 1000 ? integers.format(value) : value.toPrecision(3);
}
export const shortId = (id) => id.slice(0, 12);
export const named = (domain) => domain || "(no name)";
// Contributors are told their own tokens only.
export const uploaderOf = ({ uploader, token }) => uploader || token || "others";

export function bytes(size) {
  const units = ["B", "kB", "MB", "GB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(size, 1)) / 3));
  return step ? `${number(size / 1000 ** step)} ${units[step]}` : `${size} B`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

const age = (seconds) => Date.now() / 1000 - seconds;
export const ago = (seconds) => `${duration(age(seconds))} ago`;

export function time(seconds) {
  const date = new Date(seconds * 1000);
  return el("time", { dateTime: date.toISOString(), title: date.toLocaleString(), textContent: ago(seconds) });
}

export function refreshTimes() {
  for (const node of document.querySelectorAll("time")) setText(node, ago(Date.parse(node.dateTime) / 1000));
}

const SILENT = 900;
export const stateOf = (device) => (age(device.last_seen) > SILENT ? "silent" : device.last.state);
export function bundleOf(device) {
  if (!device.last.bundle) return "none";
  return device.has_latest ? "current" : "older";
}

const UNCERTAIN = 2; // times the fleet's median entropy
const FLEET = 4; // devices that a median is worth something of

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.ceil((sorted.length - 1) / 2)]) / 2;
}

// What a device's own numbers say is wrong. Whether its predictions are right, only labels could say.
export function troublesOf({ last }, fleet) {
  const found = [];
  const entropies = fleet.map((each) => each.last.entropy).filter((entropy) => entropy !== null);
  if (last.fallbacks) found.push(`fell back ${many(last.fallbacks, "time")}`);
  if (last.refused) found.push(`refused ${many(last.refused, "bundle")}`);
  if (last.bad) found.push(`could not read ${many(last.bad, "image")}`);
  if (entropies.length >= FLEET && last.entropy > UNCERTAIN * median(entropies)) found.push("far less certain than the others");
  return found;
}
