// Puts the page together: the stream feeds the store, and what is in sight is drawn from it.

import { $, h, swatch } from "./dom.js";
import { key } from "./api.js";
import { Checkpoints } from "./checkpoints.js";
import { isDark, variable } from "./colours.js";
import { Detail } from "./detail.js";
import { drawJobs } from "./jobs.js";
import { drawMemory } from "./memory.js";
import { drawHour, drawOverview } from "./overview.js";
import { ownerName } from "./format.js";
import { listenForKeys, showKeys } from "./shortcuts.js";
import { KINDS, Store } from "./store.js";
import { Stream } from "./stream.js";
import { ALPHA, Timeline } from "./timeline.js";

const store = new Store();
const detail = new Detail(store);
const choose = (id) => detail.open(id);
const timeline = new Timeline(store, choose);
const checkpoints = new Checkpoints(store);
let still = false;

// --- the stream ---

const stream = new Stream({
  event(name, value) {
    store.take(name, value);
    if (name === "hello") welcome();
    if (name === "clock") draw();
  },
  state: (text) => { state = text; drawStatus(); },
  refused: (text) => askForKey(text),
});
let state = "connecting";

function welcome() {
  $("login").hidden = true;
  $("main").hidden = false;
  $("main").dataset.boot = store.boot;
  $("leave").hidden = !key.get();
  const { owner, admin, keyless } = store.viewer;
  $("viewer").textContent = admin ? (key.get() ? "administrator" : "this machine, all jobs") : `owner ${ownerName(owner)}`;
  $("viewer").dataset.admin = admin;
  $("viewer").title = keyless && !key.get() ? "No keys are checked here: whoever sits at this machine sees all." : "";
  checkpoints.load();
}

function askForKey(text) {
  $("main").hidden = true;
  $("login").hidden = false;
  $("leave").hidden = true;
  state = "no key";
  drawStatus();
  $("login-error").textContent = key.get() ? text : "";
  $("key").focus();
}

// --- drawing ---

function draw() {
  if (still) return;
  drawAll();
}

function drawAll() {
  drawStatus();
  drawOverview(store);
  timeline.draw();
  drawJobs(store, choose);
  drawHour(store);
  drawMemory(store);
  detail.update();
}

function drawStatus() {
  const loading = store.engine?.models.find((model) => model.state !== "ready" && model.state !== "loaded");
  const [text, tone] = state !== "live" ? [state, state === "no key" ? "warn" : "bad"]
    : still ? ["paused", "warn"]
      : store.engine && !store.engine.ready ? [loading?.state === "failed" ? "engine lost" : `loading ${Math.round(100 * (loading?.fraction ?? 0))} %`, loading?.state === "failed" ? "bad" : "warn"]
        : store.engine?.trouble ? ["disk trouble", "bad"] : ["live", "good"];
  $("status").title = store.engine?.trouble ?? "";
  $("status").textContent = text;
  $("status").className = `pill ${tone}`;
  document.title = state === "live" ? "OpenRL" : `OpenRL · ${state}`;
}

// Between turns the timeline glides; a page that nobody sees rests.
function glide() {
  if (!document.hidden && !still && timeline.follow && store.passes.length) timeline.draw();
  setTimeout(() => requestAnimationFrame(glide), 120);
}

// As the kind looks in the picture, where the hue is the job's.
function faded(kind) {
  const mark = swatch(variable("--ink"));
  mark.style.opacity = ALPHA[kind];
  return mark;
}

function drawKinds() {
  $("kinds").replaceChildren(...KINDS.map((kind) => h("button", {
    type: "button", "data-kind": kind, "aria-pressed": String(store.kinds.has(kind)), title: `Show or hide ${kind} passes`,
    onclick: () => {
      if (!store.kinds.delete(kind)) store.kinds.add(kind);
      drawKinds();
      timeline.draw();
    },
  }, faded(kind), kind)));
}

// --- hands ---

function filter(text) {
  store.filter = text.trim();
  $("filter").value = text;
  drawAll();
  checkpoints.draw();
}

function pause() {
  still = !still;
  $("pause").setAttribute("aria-pressed", String(still));
  $("pause").textContent = still ? "Go on" : "Pause";
  timeline.freeze(still);
  drawAll();
}

function theme(value = isDark() ? "light" : "dark") {
  document.documentElement.dataset.theme = value;
  localStorage.setItem("openrl-theme", value);
  drawKinds();
  drawAll();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  stream.start();
});
$("leave").addEventListener("click", () => { key.forget(); store.reset(); stream.start(); });
$("filter").addEventListener("input", (event) => filter(event.target.value));
$("pause").addEventListener("click", pause);
$("theme").addEventListener("click", () => theme());
$("help").addEventListener("click", showKeys);
$("zoom-in").addEventListener("click", () => timeline.zoom(1 / 1.6));
$("zoom-out").addEventListener("click", () => timeline.zoom(1.6));
$("zoom-all").addEventListener("click", () => timeline.all());
$("zoom-live").addEventListener("click", () => { if (still) pause(); timeline.live(); });
listenForKeys({
  clear: () => filter(""), zoomIn: () => timeline.zoom(1 / 1.6), zoomOut: () => timeline.zoom(1.6), all: () => timeline.all(),
  live: () => timeline.live(), pan: (part) => timeline.pan(part * timeline.span), theme: () => theme(), pause,
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawKinds(); drawAll(); });

const chosen = localStorage.getItem("openrl-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
drawKinds();
stream.start();
glide();
