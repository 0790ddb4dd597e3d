// Lines through a model's numbers: small ones in the list, whole ones in a job's window.

import { h, svg } from "./dom.js";
import { metric } from "./format.js";

// A reward that the client logs says more than a loss; a loss for each token more than its sum.
const FIRST = [/reward/i, /^nll/, /^loss\/token/, /loss/i];

// A sum grows with the batch: for the eye it is divided by the tokens that it is over.
export function drawn(values) {
  const { "loss:sum": loss, "num_tokens:sum": tokens } = values;
  return loss !== undefined && tokens ? { "loss/token": loss / tokens, ...values } : values;
}

export function series(points, name) {
  return points.filter((point) => point.values[name] !== undefined).map((point) => [point.step, point.values[name]]);
}

export function names(points) {
  const all = new Set();
  for (const point of points) for (const name of Object.keys(point.values)) all.add(name);
  return [...all].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

function rank(name) {
  const index = FIRST.findIndex((pattern) => pattern.test(name));
  return index < 0 ? FIRST.length : index;
}

export function sparkline(points, colour) {
  const name = names(points)[0];
  if (!name) return null;
  const all = series(points, name), stride = Math.ceil(all.length / 200);
  const values = all.filter((_, index) => index % stride === 0 || index === all.length - 1);
  const box = { left: 1, top: 3, width: 108, height: 20 };
  return h("div", { class: "sparkcell" },
    svg("svg", { viewBox: "0 0 110 26", preserveAspectRatio: "none", role: "img", "aria-label": name }, line(values, box, colour)),
    h("span", {}, h("b", {}, metric(values.at(-1)[1])), h("span", { class: "quiet small" }, ` ${name.split(":")[0]}`)));
}

export function chart(points, name, colour) {
  const values = series(points, name);
  const ys = values.map(([, y]) => y), xs = values.map(([x]) => x);
  const low = Math.min(...ys), high = Math.max(...ys), box = { left: 2, top: 8, width: 296, height: 78 };
  return h("figure", { class: "chart", style: { margin: 0 } },
    h("h3", {}, h("span", {}, name), h("b", {}, metric(ys.at(-1)))),
    svg("svg", { viewBox: "0 0 300 92", preserveAspectRatio: "none", role: "img", "aria-label": `${name}, ${values.length} points, from ${metric(ys[0])} to ${metric(ys.at(-1))}` },
      svg("line", { class: "grid", x1: 2, x2: 298, y1: 8, y2: 8 }),
      svg("line", { class: "grid", x1: 2, x2: 298, y1: 86, y2: 86 }),
      line(values, box, colour)),
    h("div", { class: "row small quiet" },
      h("span", {}, `${metric(low)} … ${metric(high)}`),
      h("span", { class: "end" }, `step ${metric(Math.min(...xs))} – ${metric(Math.max(...xs))}`)));
}

function line(values, box, colour) {
  const xs = values.map(([x]) => x), ys = values.map(([, y]) => y);
  const flat = Math.min(...xs) === Math.max(...xs); // several points of one step: in their order
  const place = flat ? values.map((_, index) => index) : xs;
  const [x0, x1] = [Math.min(...place), Math.max(...place)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  const level = y1 - y0 <= 1e-5 * Math.max(Math.abs(y0), Math.abs(y1)); // rounding is no curve
  const at = (value, index) => {
    const x = box.left + box.width * (x1 === x0 ? 0.5 : (place[index] - x0) / (x1 - x0));
    const y = box.top + box.height * (level ? 0.5 : 1 - (value - y0) / (y1 - y0));
    return `${x.toFixed(1)} ${y.toFixed(1)}`;
  };
  if (values.length === 1) {
    const [x, y] = at(ys[0], 0).split(" ");
    return svg("circle", { cx: x, cy: y, r: 2.5, fill: colour });
  }
  return svg("path", { d: `M${ys.map(at).join("L")}`, fill: "none", stroke: colour, "stroke-width": 1.8, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" });
}
