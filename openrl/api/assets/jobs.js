// The jobs: how much of the engine each has, how it learns, what it waits for.

import { $, h, swatch } from "./dom.js";
import { colourOf } from "./colours.js";
import { sparkline } from "./curves.js";
import { count, duration, ownerName, percent } from "./format.js";
import { jobLabel } from "./store.js";

export function drawJobs(store, choose) {
  const minute = store.recent(60);
  const seconds = Math.max(minute.busy, 1e-9);
  const rows = store.jobs.filter((job) => store.matches(job))
    .map((job) => ({ job, used: minute.jobs.get(job.id) ?? { seconds: 0, tokens: 0 } }));
  const active = store.jobs.filter((job) => store.active(job)).length;
  $("jobs-count").textContent = store.filter ? `${rows.length} of ${store.jobs.length} match` : `${active} active of ${store.jobs.length}`;
  if (!rows.length) { $("jobs").replaceChildren(nothing(store)); return; }
  // What has the keyboard keeps it when the rows are made anew.
  const held = document.activeElement?.closest?.("tr.job")?.dataset.job;
  $("jobs").replaceChildren(h("table", { class: "wide" },
    h("thead", {}, h("tr", {}, ...["Job", "Engine, last minute", "Tokens/s", "Learning", "Requests", "Why it waits"].map((title, index) => h("th", { class: index === 2 || index === 4 ? "num" : "" }, title)))),
    h("tbody", {}, ...rows.map(({ job, used }) => row(store, job, used, seconds, choose)))));
  if (held) $("jobs").querySelector(`tr[data-job="${CSS.escape(held)}"] button`)?.focus();
}

function row(store, job, used, seconds, choose) {
  const colour = colourOf(job.id), models = job.models ?? [];
  const points = models.map((model) => store.curves.get(model.id)).find((curve) => curve?.length) ?? [];
  const share = used.seconds / seconds;
  const kept = (job.waits ?? []).reduce((sum, wait) => sum + wait.count, 0);
  const open = () => job.mine && choose(job.id);
  return h("tr", { class: "job", "data-job": job.id, onclick: open },
    h("td", { class: "full" }, h("div", { class: "jobname" }, swatch(colour), h("div", {},
      h("button", { type: "button", disabled: !job.mine, title: job.id }, jobLabel(job)), h("div", {}, subtitle(store, job, models))))),
    h("td", {}, h("div", { class: "share" }, h("div", { class: "meter" }, h("div", { class: "fill", style: { width: `${100 * share}%`, background: colour } })), h("span", {}, percent(share)))),
    h("td", { class: "num", "data-unit": used.tokens ? " tokens/s" : null }, used.tokens ? count(used.tokens / 60) : ""),
    h("td", { class: "full" }, points.length ? sparkline(points, colour) : null),
    h("td", { class: "num full" }, job.mine ? `${count(job.requests)} done${kept ? `, ${count(kept)} open` : ""}` : `${duration(job.seconds)} in all`),
    h("td", { class: "why full" }, why(store, job)));
}

function subtitle(store, job, models) {
  if (!job.mine) return `${job.owner ? `of ${job.owner}` : "somebody else's"}`;
  const parts = models.slice(0, 2).map((model) => `${model.base} · rank ${model.rank}`);
  if (models.length > 2) parts.push(`${models.length - 2} more`);
  if (store.viewer?.admin) parts.push(`owner ${ownerName(job.owner)}`);
  return parts.join(" · ") || "sampling only";
}

function why(store, job) {
  if (!job.mine) return job.active ? h("span", { class: "quiet" }, "has work") : "";
  if (job.finished) return h("span", { class: "quiet" }, `finished: ${job.finished}`);
  const waits = job.waits ?? [];
  if (!waits.length) return h("span", { class: "quiet" }, idle(store, job));
  const wait = waits.find((each) => each.why !== "running") ?? waits[0];
  if (wait.why === "running") return h("span", { class: "pill good" }, "running");
  const since = wait.since === null ? "" : ` · ${duration(Math.max(0, store.now() - wait.since))}`;
  const bad = wait.why === "paused" || wait.why.startsWith("waiting for your rate");
  return h("span", {}, h("span", { class: bad ? "pill warn" : "pill" }, `waits${since}`), ` ${wait.kind}: ${wait.why}`);
}

// Not the server's doing: the client computes rewards, say, or sleeps.
function idle(store, job) {
  const served = store.served.get(job.id);
  const since = served === undefined ? "" : ` for ${duration(store.now() - served)}`;
  return store.active(job) ? "between requests" : `idle${since}: its client has sent nothing`;
}

function nothing(store) {
  if (store.filter) return h("p", { class: "empty" }, `No job matches “${store.filter}”. Esc clears the filter.`);
  return h("div", { class: "empty" }, "No jobs yet. Point a training loop at this server:",
    h("code", {}, `TINKER_BASE_URL=${location.origin} TINKER_API_KEY=tml-local python loop.py`));
}
