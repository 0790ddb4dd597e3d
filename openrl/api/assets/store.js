// What the page knows, and figures that follow from it. Bounded as the server's own memory is.

import { drawn } from "./curves.js";

const PASSES = 20000;
const POINTS = 1024; // of each model

export const KINDS = ["train", "sample", "optim", "control"];

export class Store {
  constructor() {
    this.filter = "";
    this.kinds = new Set(KINDS);
    this.reset();
  }

  reset() {
    this.passes = []; // {id, kind, start, end, seconds, tokens, requests, jobs: [[job, seconds]]}
    this.served = new Map(); // job -> when its last pass ended
    this.curves = new Map(); // model -> [{step, at, values}]
    this.hour = [];
    this.engine = null;
    this.jobs = [];
    this.memory = null;
    this.viewer = null;
    this.offset = 0; // server clock minus this page's
    this.unix = 0; // Unix seconds minus server clock
  }

  take(name, value) {
    switch (name) {
      case "hello":
        if (!value.resumed) this.reset();
        this.viewer = { ...value.viewer, keyless: value.keyless };
        this.boot = value.boot;
        this.#clock(value);
        break;
      case "clock": this.#clock(value); break;
      case "passes": this.#passes(value); break;
      case "points": this.#points(value); break;
      case "hour": this.#hour(value); break;
      case "jobs": this.jobs = value.jobs.sort(byPlace); break;
      default: this[name] = value;
    }
  }

  now() { return performance.now() / 1000 + this.offset; }

  #clock({ clock, unix }) {
    this.offset = clock - performance.now() / 1000;
    this.unix = unix - clock;
  }

  #passes(rows) {
    for (const [id, kind, start, end, seconds, tokens, requests, jobs] of rows) {
      this.passes.push({ id, kind, start, end, seconds, tokens, requests, jobs });
      for (const [job] of jobs) this.served.set(job, end);
    }
    if (this.passes.length > PASSES) this.passes = this.passes.slice(-PASSES);
  }

  #points(rows) {
    for (const [, model, at, step, values] of rows) {
      const curve = this.curves.get(model) ?? [];
      curve.push({ at, step, values: drawn(values) });
      this.curves.set(model, curve.length > POINTS ? curve.slice(-POINTS) : curve);
    }
  }

  #hour(slices) {
    const first = slices[0][0];
    const kept = this.hour.filter(([start]) => start < first && start > this.now() - 3610);
    this.hour = [...kept, ...slices];
  }

  // --- figures ---

  // Of the passes that ended in the last `seconds`; a short time after the start counts as itself.
  recent(seconds) {
    const since = this.now() - seconds;
    const sums = { busy: 0, passes: 0, lanes: 0, tokens: { train: 0, sample: 0 }, jobs: new Map(), fused: 0 };
    for (let i = this.passes.length - 1; i >= 0 && this.passes[i].end > since; i -= 1) {
      const pass = this.passes[i];
      const inside = pass.start >= since ? 1 : (pass.end - since) / (pass.end - pass.start);
      sums.busy += pass.seconds * inside;
      if (pass.kind in sums.tokens) sums.tokens[pass.kind] += pass.tokens * inside;
      if (pass.kind !== "control") {
        sums.passes += 1;
        sums.lanes += pass.jobs.length;
        sums.fused += pass.jobs.length > 1;
      }
      for (const [job, used] of pass.jobs) {
        const one = sums.jobs.get(job) ?? { seconds: 0, tokens: 0 };
        one.seconds += used * inside;
        one.tokens += (pass.tokens * inside * used) / (pass.seconds || 1);
        sums.jobs.set(job, one);
      }
    }
    return sums;
  }

  active(job) { return job.active || this.now() - (this.served.get(job.id) ?? -Infinity) < 5; }

  label(id) {
    const job = this.jobs.find((each) => each.id === id);
    return job ? jobLabel(job) : id.startsWith("other-") ? id : id.slice(-10);
  }

  matches(job) {
    if (!this.filter) return true;
    const models = (job.models ?? []).flatMap((m) => [m.id, m.base]);
    const words = [job.id, job.name, job.owner, job.project, ...models, ...(job.waits ?? []).map((w) => w.why)];
    return words.join(" ").toLowerCase().includes(this.filter.toLowerCase());
  }

  matchesId(id) {
    const job = this.jobs.find((each) => each.id === id);
    return job ? this.matches(job) : !this.filter || id.includes(this.filter);
  }
}

// One's own first, what goes on before what is over, the newest first.
function byPlace(a, b) {
  return Number(b.mine) - Number(a.mine) || Number(Boolean(a.finished)) - Number(Boolean(b.finished)) || (b.created ?? 0) - (a.created ?? 0) || a.id.localeCompare(b.id);
}

export function jobLabel(job) {
  return job.name || (job.id.startsWith("other-") ? job.id : job.id.slice(-10));
}
