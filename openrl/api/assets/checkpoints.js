// Checkpoints and what can be done to them: download, publish, a time to live, delete.

import { $, h, toast } from "./dom.js";
import { call } from "./api.js";
import { bytes, ownerName } from "./format.js";

const EVERY = 10000;
const DAY = 86400;
const FEW = 8;
const LIVES = [["Keep", null], ["1 day", DAY], ["7 days", 7 * DAY], ["30 days", 30 * DAY]];

export class Checkpoints {
  constructor(store) {
    this.store = store;
    this.rows = [];
    this.all = false;
    setInterval(() => { if (!document.hidden && store.viewer) this.load(); }, EVERY);
  }

  async load() {
    try {
      const answer = await call("GET", "checkpoints");
      this.rows = answer.checkpoints;
      this.total = answer.total;
      // A menu that is open is left alone.
      if (!$("checkpoints").contains(document.activeElement)) this.draw();
      else this.late = true;
    } catch { /* the stream says what is wrong */ }
  }

  draw() {
    this.late = false;
    const filter = this.store.filter.toLowerCase();
    const rows = this.rows.filter((row) => !filter || `${row.tinker_path} ${row.base_model} ${row.owner}`.toLowerCase().includes(filter));
    $("checkpoints-count").textContent = this.total ? `${this.total}, ${bytes(this.rows.reduce((sum, row) => sum + row.size_bytes, 0))}` : "";
    if (!rows.length) { $("checkpoints").replaceChildren(h("p", { class: "empty" }, filter ? "None matches." : "None yet: they come with save_weights.")); return; }
    $("checkpoints").replaceChildren(h("table", { class: "wide" },
      h("thead", {}, h("tr", {}, ...["Name", "Kind", "Size", "Saved", "Expires", ""].map((title) => h("th", { class: title === "Size" ? "num" : "" }, title)))),
      h("tbody", {}, ...rows.slice(0, this.all ? 500 : FEW).map((row) => this.#row(row)))),
      rows.length > FEW && !this.all ? h("button", { type: "button", onclick: () => { this.all = true; this.draw(); } }, `Show all ${rows.length}`) : "");
  }

  #row(row) {
    const name = row.checkpoint_id.split("/").slice(1).join("/");
    return h("tr", { "data-path": row.tinker_path },
      h("td", { class: "full" }, h("b", {}, name), row.public ? h("span", { class: "pill good" }, "public") : null,
        h("div", { class: "quiet small" }, `${this.#run(row)} · ${row.base_model}${this.store.viewer?.admin ? ` · owner ${ownerName(row.owner)}` : ""}`)),
      h("td", {}, row.checkpoint_type),
      h("td", { class: "num" }, bytes(row.size_bytes)),
      h("td", { title: row.time }, when(row.time)),
      h("td", { title: row.expires_at ?? "" }, row.expires_at ? when(row.expires_at) : "never"),
      h("td", { class: "full" }, h("div", { class: "actions" }, ...this.#actions(row, name))));
  }

  #run({ run }) {
    const [session, ...rest] = run.split(":");
    return [this.store.label(session), ...rest].join(":");
  }

  #actions(row, name) {
    const path = `checkpoints/${encodeURIComponent(row.run)}/${row.checkpoint_id.split("/").map(encodeURIComponent).join("/")}`;
    const act = (work, said) => async () => {
      try { await work(); if (said) toast(said); document.activeElement?.blur?.(); await this.load(); } catch (error) { toast(error.message, true); }
    };
    const download = h("button", { type: "button", onclick: act(async () => { location.assign((await call("GET", `${path}/archive`)).url); }) }, "Download");
    const publish = row.public
      ? h("button", { type: "button", onclick: act(() => call("DELETE", `${path}/publish`), `${name} is yours alone again`) }, "Unpublish")
      : h("button", { type: "button", onclick: act(() => call("POST", `${path}/publish`), `Every key can read ${name} now`) }, "Publish");
    const life = h("select", { "aria-label": `Keep ${name} for` }, h("option", { value: "" }, "Expiry…"), ...LIVES.map(([title, seconds]) => h("option", { value: String(seconds) }, title)));
    life.addEventListener("change", act(() => call("PUT", `${path}/ttl`, { ttl_seconds: JSON.parse(life.value) }), "Its expiry is set"));
    const remove = h("button", { type: "button", class: "danger", onclick: async () => {
      if (await confirmed(`Delete ${name}?`, `${row.tinker_path} and its ${bytes(row.size_bytes)} go for good.`)) await act(() => call("DELETE", path), `${name} is deleted`)();
    } }, "Delete");
    return [row.checkpoint_type === "external" ? null : download, publish, life, remove];
  }
}

function confirmed(title, text) {
  const box = $("ask");
  box.className = "narrow";
  return new Promise((resolve) => {
    box.replaceChildren(h("form", { method: "dialog", class: "stack" }, h("h2", {}, title), h("p", { class: "quiet" }, text),
      h("div", { class: "row" }, h("button", { value: "no", autofocus: true }, "Keep it"), h("button", { value: "yes", class: "danger" }, "Delete"))));
    box.returnValue = "no";
    box.addEventListener("close", () => resolve(box.returnValue === "yes"), { once: true });
    box.showModal();
  });
}

function when(text) {
  const date = new Date(text), today = new Date().toDateString() === date.toDateString();
  return date.toLocaleString([], today ? { hour: "2-digit", minute: "2-digit" } : { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit" });
}
