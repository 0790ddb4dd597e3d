// Keys, for those who would rather not reach for the mouse.

import { $, h } from "./dom.js";

const KEYS = [
  ["/", "filter jobs"], ["Esc", "clear the filter, close a window"], ["space", "hold the picture still, and go on"],
  ["+ −", "zoom in and out"], ["← →", "move through time"], ["0", "all that is kept"], ["l", "follow what runs"],
  ["j k", "next and previous job"], ["Enter", "open it"], ["t", "light or dark"], ["?", "these keys"],
];

export function listenForKeys(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape" && event.target === $("filter")) { actions.clear(); event.target.blur(); return; }
    if (typing || document.querySelector("dialog[open]")) return;
    const onButton = event.target.tagName === "BUTTON";
    const known = {
      "/": () => $("filter").focus(), Escape: actions.clear, "+": actions.zoomIn, "=": actions.zoomIn, "-": actions.zoomOut,
      ArrowLeft: () => actions.pan(-0.2), ArrowRight: () => actions.pan(0.2), 0: actions.all, l: actions.live,
      t: actions.theme, "?": showKeys, j: () => step(1), k: () => step(-1), ...(onButton ? {} : { " ": actions.pause }),
    };
    const act = known[event.key];
    if (!act || (event.target.tagName === "CANVAS" && event.key.startsWith("Arrow"))) return;
    event.preventDefault();
    act();
  });
}

function step(by) {
  const buttons = [...document.querySelectorAll("tr.job button:not(:disabled)")];
  const at = buttons.indexOf(document.activeElement);
  buttons[Math.min(buttons.length - 1, Math.max(0, at + by))]?.focus();
}

export function showKeys() {
  const box = $("keys");
  box.className = "narrow";
  box.replaceChildren(h("h2", {}, "Keys"), h("dl", { class: "keys" }, ...KEYS.flatMap(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("p", { class: "quiet small" }, "Drag the picture to move it; scroll with Ctrl or Shift, or pinch, to zoom."),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")));
  box.showModal();
}
