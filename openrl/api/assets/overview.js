// The first five seconds: is the engine busy, who has it, is anybody kept waiting, is there room.

import { $, h, svg, swatch } from "./dom.js";
import { colourOf, variable } from "./colours.js";
import { bytes, count, duration, percent } from "./format.js";
import { KINDS } from "./store.js";

const HOUR = 3600, SLICE = 10;
const WINDOWS = [240, 960, 1920, HOUR]; // seconds; quarters of each are whole minutes

export function drawOverview(store) {
  const last = store.recent(10), minute = store.recent(60);
  $("overview").replaceChildren(
    engineTile(store, last),
    sharesTile(store, minute),
    throughputTile(last),
    waitingTile(store),
    memoryTile(store));
}

function tile(title, big, unit, ...rest) {
  return h("article", { class: "card tile" }, h("h2", {}, title),
    h("div", { class: "big" }, big, unit ? h("small", {}, ` ${unit}`) : null), ...rest);
}

const say = (...words) => h("div", { class: "say" }, ...words);

function engineTile(store, last) {
  const now = Math.min(1, last.busy / 10);
  const hour = busyInHour(store);
  return h("article", { class: "card tile engine", id: "engine-tile" },
    h("h2", {}, "Engine busy now"),
    h("div", { class: "big" }, percent(now)),
    say(`${percent(hour.busy)} of ${hour.window}`),
    hourChart(store, "spark", 360, 72, false));
}

function busyInHour(store) {
  const first = store.hour[0]?.[0] ?? store.now();
  const window = Math.min(HOUR, Math.max(SLICE, store.now() - first));
  const busy = store.hour.reduce((sum, [, kinds]) => sum + Object.values(kinds).reduce((a, b) => a + b, 0), 0);
  return { busy: Math.min(1, busy / window), window: window > 3500 ? "the last hour" : `the last ${duration(window)}` };
}

function sharesTile(store, minute) {
  const jobs = [...minute.jobs].sort((a, b) => b[1].seconds - a[1].seconds);
  const whole = jobs.reduce((sum, [, one]) => sum + one.seconds, 0) || 1;
  const bars = jobs.map(([job, one]) =>
    h("div", { class: "fill", title: store.label(job), style: { width: `${(100 * one.seconds) / whole}%`, background: colourOf(job) } }));
  const together = minute.passes ? (minute.lanes / minute.passes).toFixed(1) : "–";
  return tile("Sharing it, last minute", String(jobs.length), jobs.length === 1 ? "job" : "jobs",
    h("div", { class: "meter" }, ...bars),
    say(`${together} jobs in a pass on average`));
}

function throughputTile(last) {
  const { train, sample } = last.tokens;
  return tile("Throughput", count((train + sample) / 10), "tokens/s",
    say(swatch(variable("--train")), ` ${count(train / 10)} trained `),
    say(swatch(variable("--sample")), ` ${count(sample / 10)} sampled and read`));
}

function waitingTile(store) {
  const engine = store.engine ?? { waiting: 0, running: 0, rows: 0 };
  const waits = store.jobs.flatMap((job) => (job.waits ?? []).filter((w) => w.since !== null && w.why !== "running"));
  const longest = Math.max(0, ...waits.map((wait) => store.now() - wait.since));
  const worst = waits.find((wait) => store.now() - wait.since === longest);
  return tile("Waiting", count(engine.waiting), engine.waiting === 1 ? "request" : "requests",
    say(`${count(engine.running)} running, ${count(engine.rows)} sequences`),
    say(worst ? `longest ${duration(longest)}` : "nobody is kept waiting"));
}

function memoryTile(store) {
  const room = store.memory?.capacity;
  if (!room) return tile("Sampling memory", "–", "", say("the engine is not ready"));
  const reserved = Object.values(store.memory.owners).reduce((sum, one) => sum + (one.kv_blocks ?? 0), 0);
  const used = Math.max(reserved, room.kv_blocks_total - room.kv_blocks_free) / Math.max(1, room.kv_blocks_total);
  return tile("Sampling memory", percent(used), "",
    h("div", { class: "meter" }, h("div", { class: "fill", style: { width: `${100 * used}%` } })),
    say(`${count(room.slots_used)} of ${count(room.slots_total)} adapters in memory`),
    say(room.headroom_bytes ? `${bytes(room.headroom_bytes)} to spare` : ""));
}

// --- the last hour ---

export function drawHour(store) {
  $("hour").replaceChildren(hourChart(store, "hourchart", 720, 150, true));
  $("hour-legend").replaceChildren(...KINDS.map((kind) => h("span", { class: "small quiet" }, swatch(variable(`--${kind}`)), kind)));
}

// Busy parts of each ten seconds, stacked by kind.
function hourChart(store, name, width, height, axis) {
  const bottom = axis ? height - 18 : height, top = 4, now = store.now();
  const age = now - (store.hour[0]?.[0] ?? now), span = WINDOWS.find((window) => window >= age) ?? HOUR;
  const size = (width * SLICE) / span, begin = now - span;
  const stacked = new Map();
  const paths = KINDS.map((kind) => {
    let path = "";
    for (const [start, kinds] of store.hour) {
      const x = ((start - begin) / SLICE) * size, part = Math.min(1, (kinds[kind] ?? 0) / SLICE);
      const below = stacked.get(start) ?? 0, tall = part * (bottom - top);
      if (x < 0 || !part) continue;
      const y = Math.max(top, bottom - below - tall);
      stacked.set(start, below + tall);
      path += `M${x.toFixed(1)} ${(bottom - below).toFixed(1)}V${y.toFixed(1)}h${Math.max(size, 1).toFixed(2)}V${(bottom - below).toFixed(1)}z`;
    }
    return svg("path", { d: path, fill: `var(--${kind})` });
  });
  const lines = [top, (top + bottom) / 2, bottom].map((y) => svg("line", { class: "grid", x1: 0, x2: width, y1: y, y2: y }));
  const labels = !axis ? [] : [-1, -0.75, -0.5, -0.25, 0].map((part, index, all) =>
    svg("text", { class: "axis", x: width * (1 + part), y: height - 4, "text-anchor": index === 0 ? "start" : index === all.length - 1 ? "end" : "middle" }, part ? `${(part * span) / 60} min` : "now"));
  return svg("svg", { class: name, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: axis ? "xMidYMid meet" : "none", role: "img", "aria-label": "Utilisation over the last hour" }, ...lines, ...paths, ...labels);
}
