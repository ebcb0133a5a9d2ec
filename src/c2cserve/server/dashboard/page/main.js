// The page: a stream of states in, the parts of the page out; keys and colours.

import { show } from "./panels.js";
import { legend, select, showRequests, step } from "./timeline.js";
import { seconds } from "./format.js";

const STALE_MS = 15000;
const part = (name) => document.querySelector(`[data-part="${name}"]`);
const byId = (id) => document.getElementById(id);

let state = null;
let source = null;
let paused = false;
let heardMs = 0;
let wanted = null; // of a replay: where it is to go on, seconds

function draw() {
  if (!state) return;
  byId("name").textContent = state.name;
  document.title = `c2cserve ${state.name}`;
  byId("trouble").hidden = !state.trouble;
  byId("trouble").textContent = state.trouble;
  show(part, state);
  showRequests(part, state);
  if (state.playback) drawPlayback(state);
  say();
}

function say() {
  const stale = !paused && Date.now() - heardMs > STALE_MS;
  const status = byId("status");
  status.classList.toggle("bad", stale || source?.readyState === EventSource.CLOSED);
  let text = state?.source === "record" ? "replay" : "live";
  if (paused) text = "paused";
  else if (state?.playback?.over) text = "the record ends here";
  else if (source?.readyState !== EventSource.OPEN || stale) text = "no connection; trying again";
  else if (state?.draining) text += ", draining";
  if (status.textContent !== text) status.textContent = text;
}

function drawPlayback({ playback, now_s }) {
  byId("playback").hidden = false;
  const seek = byId("seek");
  seek.max = playback.end_s - playback.begin_s;
  if (document.activeElement !== seek || wanted === null) seek.value = now_s - playback.begin_s;
  byId("clock").textContent = `${seconds(now_s - playback.begin_s)} of ${seconds(playback.end_s - playback.begin_s)}`;
}

function address() {
  const asked = new URLSearchParams();
  if (state?.playback) {
    asked.set("at", String(wanted ?? state.now_s));
    asked.set("speed", byId("speed").value);
  }
  return `/dashboard/events?${asked}`;
}

function connect() {
  source?.close();
  source = new EventSource(address());
  source.addEventListener("state", (event) => {
    state = JSON.parse(event.data);
    heardMs = Date.now();
    wanted = null;
    draw();
    if (state.playback?.over) source.close();
  });
  source.addEventListener("error", () => {
    // A browser would ask again for the same time of a record, not for the one that it had reached.
    if (state?.playback && !paused && !state.playback.over) {
      source.close();
      setTimeout(() => paused || connect(), 2000);
    }
    say();
  });
}

function pause(stop) {
  paused = stop;
  byId("play").textContent = paused ? "go on" : "pause";
  if (paused) source?.close();
  else connect();
  say();
}

function seek(at) {
  wanted = state.playback.begin_s + at;
  paused = false;
  byId("play").textContent = "pause";
  connect();
}

function nextTheme() {
  const root = document.documentElement;
  const order = ["", "dark", "light"];
  const next = order[(order.indexOf(root.dataset.theme ?? "") + 1) % order.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  try {
    localStorage.setItem("c2cserve-theme", next);
  } catch {
    // Storage may be switched off: the theme then lasts as long as the page.
  }
}

function restoreTheme() {
  try {
    const kept = localStorage.getItem("c2cserve-theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch {
    // As above.
  }
}

function choose(by) {
  if (!state) return;
  step(state, by);
  draw();
  document.querySelector('.row[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
}

const SECTIONS = ["slices", "models", "links", "queue", "requests"];
const KEYS = {
  j: () => choose(1),
  k: () => choose(-1),
  t: nextTheme,
  " ": () => pause(!paused),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, button, a")) return;
  const section = SECTIONS[Number(event.key) - 1];
  const inList = event.target.closest('[role="listbox"]');
  const run = inList && event.key === "ArrowDown" ? KEYS.j
    : inList && event.key === "ArrowUp" ? KEYS.k : KEYS[event.key];
  if (section) {
    byId(section).scrollIntoView();
    byId(section).focus({ preventScroll: true });
  } else if (run) {
    run();
  } else {
    return;
  }
  event.preventDefault();
});

part("requests").addEventListener("click", (event) => {
  const row = event.target.closest(".row");
  if (!row) return;
  select(row.dataset.id);
  draw();
});
byId("theme").addEventListener("click", nextTheme);
byId("play").addEventListener("click", () => pause(!paused));
byId("playback").addEventListener("submit", (event) => event.preventDefault());
byId("seek").addEventListener("change", (event) => seek(Number(event.target.value)));
byId("speed").addEventListener("change", () => !paused && connect());

restoreTheme();
legend(part("legend"));
connect();
setInterval(say, 1000);
