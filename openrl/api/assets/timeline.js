// The engine's passes over time: what each job had of every pass, and where passes were shared.
// Zoomed out, many passes lie in a pixel: then heights say how busy the time was.

import { $, h, swatch } from "./dom.js";
import { colourOf, variable } from "./colours.js";
import { clock, count, duration } from "./format.js";

const ENGINE = 62, TRACK = 22, GAP = 6, AXIS = 22, TRACKS = 14;
export const ALPHA = { train: 1, sample: 0.5, optim: 0.75, control: 0.25 };
const LEAST = 0.05, MOST = 3600; // seconds in sight

export class Timeline {
  constructor(store, choose) {
    this.store = store;
    this.choose = choose;
    this.span = 30;
    this.follow = true;
    this.end = 0;
    this.canvas = h("canvas", { tabindex: "0", role: "img", "aria-label": "Passes of the engine over time" });
    this.tip = h("div", { class: "tip", hidden: true });
    $("timeline").append(this.canvas, this.tip);
    this.#listen();
  }

  // --- the part in sight ---

  get until() { return this.follow ? this.store.now() : this.end; }

  zoom(factor, at = 1) {
    const until = this.until, span = Math.min(MOST, Math.max(LEAST, this.span * factor));
    const fixed = until - this.span * (1 - at);
    this.span = span;
    if (!this.follow) this.end = fixed + span * (1 - at);
    if (this.follow && at < 0.9) { this.follow = false; this.end = fixed + span * (1 - at); }
    this.draw();
  }

  pan(seconds) {
    this.end = this.until + seconds;
    this.follow = this.end >= this.store.now();
    this.draw();
  }

  all() {
    const first = this.store.passes[0];
    if (first) this.span = Math.max(LEAST, this.store.now() - first.start);
    this.follow = true;
    this.draw();
  }

  live() {
    this.follow = true;
    if (this.span > 120) this.span = 30;
    this.draw();
  }

  freeze(still) {
    if (still) { this.end = this.until; this.follow = false; } else this.live();
  }

  // --- drawing ---

  draw() {
    const width = this.canvas.clientWidth;
    if (!width) return;
    const from = this.until - this.span;
    const passes = this.#inSight(from, this.until);
    this.tracks = this.#tracks(passes);
    const height = ENGINE + GAP + this.tracks.length * TRACK + AXIS;
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const frame = { pen, width, height, from, left: width > 620 ? 132 : 0, scale: 0 };
    frame.scale = (width - frame.left) / this.span;
    this.frame = frame;
    this.passes = passes;
    this.#ground(frame);
    const dense = passes.length > (width - frame.left) / 2.5;
    if (dense) this.#dense(frame, passes); else passes.forEach((pass) => this.#pass(frame, pass));
    this.#labels(frame);
    this.canvas.dataset.passes = passes.length;
    this.canvas.dataset.tracks = this.tracks.map((track) => track.id).join(" ");
    this.canvas.dataset.follow = this.follow;
  }

  #inSight(from, until) {
    const all = this.store.passes, kinds = this.store.kinds;
    let low = 0, high = all.length;
    while (low < high) { const mid = (low + high) >> 1; if (all[mid].end < from) low = mid + 1; else high = mid; }
    const found = [];
    for (let i = low; i < all.length && all[i].start <= until; i += 1) if (kinds.has(all[i].kind)) found.push(all[i]);
    return found;
  }

  // The jobs that had most of the engine, in the order of the list below so that rows stay put.
  #tracks(passes) {
    const used = new Map();
    for (const pass of passes) for (const [job, seconds] of pass.jobs) used.set(job, (used.get(job) ?? 0) + seconds);
    const order = new Map(this.store.jobs.map((job, index) => [job.id, index]));
    return [...used].filter(([id]) => this.store.matchesId(id)).sort((a, b) => b[1] - a[1]).slice(0, TRACKS)
      .sort(([a], [b]) => (order.get(a) ?? 1e9) - (order.get(b) ?? 1e9) || a.localeCompare(b))
      .map(([id, seconds]) => ({ id, seconds, colour: colourOf(id) }));
  }

  #ground({ pen, width, height, from, left, scale }) {
    pen.fillStyle = variable("--sunk");
    round(pen, left, 0, width - left, ENGINE, 6);
    this.tracks.forEach((_, index) => round(pen, left, this.#top(index) + 3, width - left, TRACK - 6, 4));
    pen.strokeStyle = variable("--line");
    pen.fillStyle = variable("--quiet");
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    const step = niceStep((this.span * 110) / (width - left));
    for (let at = Math.ceil((from + this.store.unix) / step) * step; at - this.store.unix < this.until; at += step) {
      const x = left + (at - this.store.unix - from) * scale;
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, height - AXIS + 3); pen.stroke();
      if (x > left + 26 && x < width - 26) pen.fillText(clock(at, step < 0.01 ? 3 : step < 0.1 ? 2 : step < 1 ? 1 : 0), x, height - 5);
    }
  }

  #pass({ pen, from, left, scale, width }, pass) {
    const x = Math.max(left, left + (pass.start - from) * scale);
    const right = Math.min(width, left + (pass.end - from) * scale);
    const wide = Math.max(1, right - x - (right - x > 4 ? 1 : 0));
    pen.globalAlpha = ALPHA[pass.kind];
    let y = ENGINE;
    const whole = pass.jobs.reduce((sum, [, used]) => sum + used, 0) || 1;
    for (const [job, used] of pass.jobs) {
      const tall = (ENGINE * used) / whole;
      y -= tall;
      pen.fillStyle = this.store.matchesId(job) ? colourOf(job) : variable("--line");
      pen.fillRect(x, y, wide, tall);
      const index = this.tracks.findIndex((track) => track.id === job);
      if (index >= 0) pen.fillRect(x, this.#top(index) + 3, wide, TRACK - 6);
    }
    pen.globalAlpha = 1;
  }

  #dense({ pen, width, left, from, scale }, passes) {
    const size = 2, bins = Math.ceil((width - left) / size), room = size / scale;
    const engine = Array.from({ length: bins }, () => new Map());
    for (const pass of passes) {
      const length = Math.max(pass.end - pass.start, 1e-9), density = pass.seconds / length;
      const first = Math.max(0, Math.floor((pass.start - from) / room));
      const last = Math.min(bins - 1, Math.floor((pass.end - from) / room));
      const whole = pass.jobs.reduce((sum, [, used]) => sum + used, 0) || 1;
      for (let bin = first; bin <= last; bin += 1) {
        const start = from + bin * room;
        const part = (Math.min(pass.end, start + room) - Math.max(pass.start, start)) * density;
        for (const [job, used] of pass.jobs) engine[bin].set(job, (engine[bin].get(job) ?? 0) + (part * used) / whole);
      }
    }
    engine.forEach((jobs, bin) => {
      let y = ENGINE;
      const x = left + bin * size;
      for (const [job, seconds] of [...jobs].sort(([a], [b]) => a.localeCompare(b))) {
        const part = Math.min(1, seconds / room), tall = ENGINE * part;
        y -= tall;
        pen.fillStyle = this.store.matchesId(job) ? colourOf(job) : variable("--line");
        pen.fillRect(x, y, size, tall);
        const index = this.tracks.findIndex((track) => track.id === job);
        if (index < 0) continue;
        pen.globalAlpha = 0.15 + 0.85 * part;
        pen.fillRect(x, this.#top(index) + 3, size, TRACK - 6);
        pen.globalAlpha = 1;
      }
    });
  }

  #labels({ pen, left }) {
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.font = "12px system-ui, sans-serif";
    const text = (words, y, colour) => {
      if (!left) { // on a phone names lie on the rows, in the colour of the card behind them
        pen.lineWidth = 3; pen.strokeStyle = variable("--card"); pen.strokeText(words, 6, y); pen.lineWidth = 1;
      }
      pen.fillStyle = colour;
      pen.fillText(words, left ? 14 : 6, y);
    };
    text("Engine", left ? ENGINE / 2 : 10, variable("--ink"));
    this.tracks.forEach((track, index) => {
      const y = this.#top(index) + TRACK / 2;
      if (left) { pen.fillStyle = track.colour; round(pen, 0, y - 5, 9, 10, 3); }
      let name = this.store.label(track.id);
      while (left && pen.measureText(name).width > left - 22) name = `${name.slice(0, -2)}…`;
      text(name, y, variable("--ink"));
    });
  }

  #top(index) { return ENGINE + GAP + index * TRACK; }

  // --- hands ---

  #listen() {
    const canvas = this.canvas, touches = new Map();
    let moved = 0;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return { x: event.clientX - box.left, y: event.clientY - box.top };
    };
    const part = (x) => Math.min(1, Math.max(0, (x - this.frame.left) / (this.frame.width - this.frame.left)));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && Math.abs(event.deltaY) < Math.abs(event.deltaX)) { event.preventDefault(); this.pan(event.deltaX / this.frame.scale); return; }
      if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // the page scrolls
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * 0.002), part(place(event).x));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); touches.set(event.pointerId, place(event)); moved = 0; });
    canvas.addEventListener("pointermove", (event) => {
      const before = touches.get(event.pointerId), at = place(event);
      if (!before) { this.#hover(at); return; }
      if (touches.size === 2) {
        const [a, b] = [...touches.values()], gap = Math.abs(a.x - b.x);
        touches.set(event.pointerId, at);
        const [c, d] = [...touches.values()];
        this.zoom(gap / Math.max(20, Math.abs(c.x - d.x)), part((c.x + d.x) / 2));
        return;
      }
      touches.set(event.pointerId, at);
      moved += Math.abs(at.x - before.x);
      if (moved > 3) { this.tip.hidden = true; this.pan((before.x - at.x) / this.frame.scale); }
    });
    const up = (event) => {
      if (touches.delete(event.pointerId) && moved <= 3) this.#click(place(event));
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", (event) => touches.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key];
      if (step) { this.pan(step * this.span); event.preventDefault(); }
      if (event.key === "ArrowUp" || event.key === "ArrowDown") { this.zoom(event.key === "ArrowUp" ? 1 / 1.5 : 1.5, 0.5); event.preventDefault(); }
    });
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  #at({ x }) {
    const at = this.frame.from + (x - this.frame.left) / this.frame.scale, slack = 2 / this.frame.scale;
    return this.passes.find((pass) => pass.start - slack <= at && at <= pass.end + slack);
  }

  #click(place) {
    const track = this.tracks[Math.floor((place.y - ENGINE - GAP) / TRACK)];
    if (track && place.y > ENGINE + GAP) this.choose(track.id);
    else this.#hover(place);
  }

  #hover(place) {
    const pass = this.frame && place.x >= this.frame.left && this.#at(place);
    this.tip.hidden = !pass;
    if (!pass) return;
    const whole = pass.jobs.reduce((sum, [, used]) => sum + used, 0) || 1;
    const parts = pass.jobs.slice(0, 8).map(([job, used]) =>
      h("span", {}, swatch(colourOf(job)), ` ${this.store.label(job)} ${Math.round((100 * used) / whole)} %`));
    this.tip.replaceChildren(
      h("b", {}, `${pass.kind} · ${duration(pass.seconds)}`),
      h("span", {}, `${count(pass.tokens)} tokens, ${pass.requests} ${pass.requests === 1 ? "request" : "requests"}`),
      ...parts,
      h("span", {}, `${clock(pass.start + this.store.unix, 3)} · pass ${pass.id}`));
    const left = Math.min(place.x + 14, this.frame.width - this.tip.offsetWidth - 4);
    Object.assign(this.tip.style, { left: `${Math.max(4, left)}px`, top: `${place.y + 14}px` });
  }
}

function round(pen, x, y, width, height, radius) {
  pen.beginPath();
  pen.roundRect(x, y, Math.max(0, width), height, radius);
  pen.fill();
}

function niceStep(least) {
  const steps = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200];
  return steps.find((step) => step >= least) ?? 1800;
}
