// Who holds memory: sequences being sampled, weights of unnamed samplers, models, what is queued.

import { $, h } from "./dom.js";
import { bytes, count, ownerName, percent } from "./format.js";

const HUES = ["--train", "--sample", "--optim", "--control"];

export function drawMemory(store) {
  const memory = store.memory;
  if (!memory?.capacity) { $("memory").replaceChildren(h("p", { class: "empty" }, "The engine has not said yet.")); return; }
  const { capacity, owners } = memory, total = Math.max(1, capacity.kv_blocks_total);
  const rows = Object.entries(owners).sort((a, b) => weight(b[1]) - weight(a[1]));
  const bars = rows.filter(([, one]) => one.kv_blocks).map(([owner, one], index) =>
    h("div", { class: "fill", title: owner, style: { width: `${(100 * one.kv_blocks) / total}%`, background: `var(${HUES[index % HUES.length]})` } }));
  $("memory").replaceChildren(
    h("p", { class: "quiet small" }, `Sampling: ${count(total * capacity.block_tokens)} tokens of keys and values, ${percent(capacity.kv_blocks_free / total)} free`),
    h("div", { class: "meter" }, ...bars),
    rows.length ? h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "Owner"), ...["Models", "Sampling", "Sampler weights", "Queued"].map((title) => h("th", { class: "num" }, title)))),
      h("tbody", {}, ...rows.slice(0, 30).map(([owner, one]) => h("tr", {},
        h("td", { title: owner, class: "mono" }, ownerName(owner)),
        h("td", { class: "num" }, one.models ? count(one.models) : ""),
        h("td", { class: "num" }, one.kv_blocks ? `${count(one.kv_blocks * capacity.block_tokens)} tokens` : ""),
        h("td", { class: "num" }, one.pinned_bytes ? bytes(one.pinned_bytes) : ""),
        h("td", { class: "num" }, one.queued_bytes ? bytes(one.queued_bytes) : "")))))) : h("p", { class: "empty" }, "Nobody holds any."));
}

const weight = (one) => (one.pinned_bytes ?? 0) + (one.queued_bytes ?? 0) + 1e6 * (one.kv_blocks ?? 0) + 1e6 * (one.models ?? 0);
