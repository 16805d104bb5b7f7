// Charts by plotly, which is large: it is loaded when the first chart is drawn, and tables do not wait for it.

import { byId, setText } from "./page.js";

const DASHES = ["solid", "dash", "dot", "dashdot"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon"];
// Only these buttons: by default plotly offers to send a chart to its maker's cloud.
const BUTTONS = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
let loading = null;

function loadPlotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.body.dataset.plotly;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loading = null;
      reject(new Error("The charts could not be loaded from the hub."));
    };
    document.head.append(script);
  });
  return loading;
}

// The colours of the page, in light and in dark.
export function colours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["text", "quiet", "grid", "panel", "accent", "plus", "zero", "minus", "line"];
  return { ...Object.fromEntries(names.map((name) => [name, value(name)])), series: value("series").split(" ") };
}

// Plotly reads a little HTML in its texts; names from outside must stay as they are.
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

export function brief(text, length = 18) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

// Plotly shows times as it is told them: tell it the visitor's own.
export function localTime(seconds) {
  const date = new Date(seconds * 1000);
  return new Date(date - date.getTimezoneOffset() * 60_000).toISOString().slice(0, -1);
}

export function lineStyle(i) {
  const { series } = colours();
  const color = series[i % series.length];
  const turn = Math.floor(i / series.length) % DASHES.length;
  return {
    line: { color, width: 2, dash: DASHES[turn] },
    marker: { color, size: 6, symbol: SYMBOLS[i % SYMBOLS.length], maxdisplayed: 25 },
  };
}

export const narrow = () => window.innerWidth < 736;

const config = () => ({
  responsive: true, displaylogo: false, displayModeBar: narrow() ? false : "hover", modeBarButtons: BUTTONS,
  showSendToCloud: false, plotlyServerURL: "",
});

export function axis(more = {}) {
  const { grid, line, quiet } = colours();
  return {
    gridcolor: grid, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true, fixedrange: narrow(),
    tickfont: { color: quiet, size: 11 }, ...more, title: { text: more.title ?? "", font: { color: quiet, size: 12 } },
  };
}

function dressed(layout, keep) {
  const { text, panel, line } = colours();
  return {
    margin: { l: 48, r: 12, t: 12, b: 12 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", color: text, size: 12 },
    hoverlabel: { bgcolor: panel, bordercolor: line, font: { color: text } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    modebar: { bgcolor: "rgba(0,0,0,0)" },
    dragmode: narrow() ? false : "zoom",
    uirevision: keep, // same value: zoom and hidden lines survive new data
    ...layout,
  };
}

function sayInstead(div, words) {
  div.hidden = words !== "";
  const note = div.parentElement.querySelector(".none");
  note.hidden = words === "";
  setText(note, words);
}

// Draw, or say why there is nothing to draw. `keep` names what is shown: zoom survives while it stays the same.
export async function draw(id, { traces, layout, keep, words, none }) {
  const div = byId(id);
  if (!traces.length) return sayInstead(div, none);
  const whole = dressed(layout, keep);
  const mark = JSON.stringify([traces, whole]);
  if (div.mark === mark) return;
  div.style.height = `${layout.height}px`;
  let plotly;
  try {
    plotly = await loadPlotly();
  } catch (error) {
    return sayInstead(div, error.message);
  }
  if (div.closest("section").hidden) return; // the visitor has moved on
  sayInstead(div, "");
  await plotly.react(div, traces, whole, config());
  div.mark = mark;
  div.setAttribute("aria-label", words);
}
