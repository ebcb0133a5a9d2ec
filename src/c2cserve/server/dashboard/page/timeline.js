// Requests: one bar each, whose parts are the phases; the selected one in words.

import { element, seconds, table } from "./format.js";

const PHASES = [
  ["queue", "queue_s", "queue"],
  ["slice-queue", "slice_queue_s", "queue of the slice"],
  ["switch", "switch_s", "switch"],
  ["weights", "weights_s", "weights"],
  ["prefill", "prefill_s", "prefill"],
  ["decode", "decode_s", "decode"],
];
const SVG = "http://www.w3.org/2000/svg";

let selected = null;

// What runs now has no end yet: the time since the last known phase belongs to the one after it.
function phases(one, now) {
  const known = PHASES.map(([kind, field, name]) => ({ kind, name, length: one[field] }));
  if (one.ended_s !== null) return known;
  const open = one.ttft_s !== null ? 5 : one.slice ? 4 : 0;
  const before = one.ttft_s !== null ? one.ttft_s
    : known.slice(0, open).reduce((sum, phase) => sum + (phase.length ?? 0), 0);
  known[open].length = Math.max(0, now - one.arrived_s - before);
  known[open].open = true;
  return known;
}

function bar(one, now, longest) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "bar");
  svg.setAttribute("viewBox", "0 0 1000 10");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  let x = 0;
  for (const { kind, length } of phases(one, now)) {
    if (!length) continue;
    const width = Math.max(2, (1000 * length) / longest);
    const part = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ x, y: 0, width, height: 10, class: `fill-${kind}` })) {
      part.setAttribute(name, value);
    }
    svg.append(part);
    x += width;
  }
  return svg;
}

function total(one, now) {
  return Math.max(0, (one.ended_s ?? now) - one.arrived_s);
}

function verdict(one) {
  if (one.state === "failed" || one.state === "refused") return "bad";
  if (one.met === null) return "";
  return one.met ? "good" : "warn";
}

function row(one, now, longest) {
  const made = element("div", { className: "row", role: "option", id: `request-${one.id}`, tabIndex: -1 },
    element("span", { className: "who", title: one.id }, one.model),
    element("span", { className: `where ${verdict(one)}` }, one.state === "running" ? one.slice : one.state),
    bar(one, now, longest),
    element("span", { className: "end" }, seconds(total(one, now))));
  made.setAttribute("aria-selected", String(one.id === selected));
  made.dataset.id = one.id;
  return made;
}

function detail(one, now) {
  if (!one) return [element("p", { className: "note" }, "Choose a request: click it, or press j and k.")];
  const rows = phases(one, now).map(({ name, length, open }) => [name, seconds(length) + (open ? " so far" : "")]);
  rows.push(["first token after", seconds(one.ttft_s)], ["total", seconds(total(one, now))]);
  const switched = one.switched === null ? "" : one.switched ? ", switched the slice's model" : ", no switch";
  return [
    element("h3", {}, one.id),
    element("p", {}, `${one.model}: ${one.state}${one.slice ? ` on ${one.slice}` : ""}${switched}; `
      + `${one.prompt_tokens} prompt and ${one.output_tokens ?? "?"} output tokens; `
      + `placed ${one.placed} time${one.placed === 1 ? "" : "s"}`
      + (one.met === null ? "" : one.met ? "; met its targets" : "; missed its targets")),
    element("div", { className: "scroll" }, table(["phase", "time"], rows)),
  ];
}

export function legend(place) {
  place.replaceChildren(...PHASES.map(([kind, , name]) =>
    element("span", { className: "named" }, element("span", { className: `key fill-${kind}` }), name)));
}

export function showRequests(part, state) {
  const now = state.now_s;
  const longest = Math.max(1e-6, ...state.requests.map((one) => total(one, now)));
  const list = part("requests");
  const focused = list.contains(document.activeElement);
  list.replaceChildren(...state.requests.map((one) => row(one, now, longest)));
  const chosen = state.requests.find((one) => one.id === selected);
  const reached = list.querySelector('[aria-selected="true"]') ?? list.firstElementChild;
  if (reached) reached.tabIndex = 0;
  if (focused && reached) reached.focus({ preventScroll: true });
  part("detail").replaceChildren(...detail(chosen, now));
}

export function select(id) {
  selected = id;
}

export function step(state, by) {
  const ids = state.requests.map((one) => one.id);
  if (!ids.length) return;
  const at = ids.indexOf(selected);
  selected = ids[at < 0 ? 0 : Math.min(ids.length - 1, Math.max(0, at + by))];
}
