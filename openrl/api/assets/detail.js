// One job in full: its curves, what is open and why, what happened, and the brake.

import { $, h, swatch, toast } from "./dom.js";
import { call } from "./api.js";
import { colourOf } from "./colours.js";
import { chart, drawn, names } from "./curves.js";
import { clock, count, duration } from "./format.js";
import { jobLabel } from "./store.js";

export class Detail {
  constructor(store) {
    this.store = store;
    this.box = $("detail");
    this.job = null;
    this.curves = new Map();
    this.box.addEventListener("close", () => { this.job = null; });
    this.box.addEventListener("click", (event) => { if (event.target === this.box) this.box.close(); });
  }

  async open(id) {
    const job = this.store.jobs.find((each) => each.id === id);
    if (!job?.mine) return;
    this.job = id;
    this.model = job.models[0]?.id ?? null;
    this.curves.clear();
    this.story = [];
    this.#fill();
    if (!this.box.open) this.box.showModal();
    await this.#fetch();
  }

  // Called with each turn of the stream.
  update() {
    if (this.job === null || !this.box.open) return;
    if (this.charts) this.charts.replaceChildren(...this.#charts());
    this.open_?.replaceChildren(...this.#waits());
  }

  async #fetch() {
    if (!this.model) return;
    const model = this.model, path = `models/${encodeURIComponent(model)}`;
    try {
      const [curve, story] = await Promise.all([call("GET", `${path}/metrics`), call("GET", `${path}/story`).catch(() => ({ lines: [] }))]);
      if (model !== this.model) return;
      this.store.curves.set(model, curve.points.map(([, , at, step, values]) => ({ at, step, values: drawn(values) })));
      this.story = story.lines;
      this.#fill();
    } catch (error) { toast(error.message, true); }
  }

  #fill() {
    const job = this.store.jobs.find((each) => each.id === this.job);
    if (!job) { this.box.close(); return; }
    this.charts = h("div", { class: "charts" }, ...this.#charts());
    this.open_ = h("div", { class: "stack" }, ...this.#waits());
    this.box.replaceChildren(h("div", { class: "stack" },
      h("div", { class: "row" }, h("h2", {}, swatch(colourOf(job.id)), ` ${jobLabel(job)}`), h("code", { class: "quiet" }, job.id),
        h("button", { type: "button", class: "end", onclick: () => this.box.close() }, "Close")),
      this.#facts(job), this.#models(job),
      h("h3", {}, "Open requests, and what they wait for"), this.open_,
      h("h3", {}, "Curves"), this.charts,
      h("h3", {}, "What happened"), this.#story()));
  }

  #facts(job) {
    const wait = job.requests ? job.wait_seconds / job.requests : 0;
    return h("p", { class: "quiet" }, `${duration(job.seconds)} of the engine, ${count(job.tokens)} tokens, ${count(job.requests)} requests that waited ${duration(wait)} on average. Owner ${job.owner}${job.project ? `, project ${job.project}` : ""}.`);
  }

  #models(job) {
    const choose = (id) => { this.model = id; this.story = []; this.#fill(); this.#fetch(); };
    const buttons = job.models.map((model) => h("button", { type: "button", "aria-pressed": String(model.id === this.model), onclick: () => choose(model.id) }, `${model.base} · rank ${model.rank} · ${model.id.split(":").slice(1).join(":")}`));
    const brake = this.model ? [this.#brake("pause", "Pause"), this.#brake("resume", "Resume")] : [];
    return h("div", { class: "row" }, h("div", { class: "chips" }, ...buttons), h("div", { class: "row end" }, ...brake));
  }

  #brake(verb, title) {
    const act = () => call("POST", `models/${encodeURIComponent(this.model)}/${verb}`)
      .then(() => toast(verb === "pause" ? "Paused: nothing more of it starts until you resume it." : "It goes on."), (error) => toast(error.message, true));
    return h("button", { type: "button", onclick: act }, title);
  }

  #charts() {
    const points = this.store.curves.get(this.model) ?? [];
    if (!points.length) return [h("p", { class: "quiet" }, "Nothing yet: curves begin with the first forward_backward, or with what the client logs.")];
    return names(points).slice(0, 18).map((name) => chart(points, name, colourOf(this.job)));
  }

  #waits() {
    const job = this.store.jobs.find((each) => each.id === this.job);
    if (!job?.waits?.length) return [h("p", { class: "quiet" }, "None.")];
    return job.waits.slice(0, 20).map((wait) => h("div", {},
      h("b", {}, `${wait.count} × ${wait.kind}`), ` ${wait.why}`,
      h("div", { class: "quiet small mono" }, wait.request, wait.since === null ? "" : ` · ${duration(Math.max(0, this.store.now() - wait.since))}`)));
  }

  #story() {
    const lines = (this.story ?? []).slice(-200).reverse().map((line) => h("div", {}, h("span", { class: "quiet" }, clock(line.at + this.store.unix)), h("span", {}, `${line.request_id?.split(":").at(-1) ?? ""} ${line.what}`)));
    return lines.length ? h("div", { class: "story", tabindex: "0" }, ...lines) : h("p", { class: "quiet" }, "Nothing is remembered.");
  }
}
