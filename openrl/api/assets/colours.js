// A colour for each job: in the order in which they are first seen, greys for others'.

const LIGHT = ["#2f6fed", "#e2761b", "#12a594", "#c2459c", "#7a5af5", "#8a9a10", "#d6403d", "#0e8ac9", "#a0632c", "#4d8f3c"];
const DARK = ["#6f9dff", "#f59a50", "#35cdb9", "#e87ac6", "#a58dff", "#c3d244", "#ff7d78", "#4fbdf2", "#d6a070", "#85c873"];
const OTHERS = { light: ["#aab2be", "#c3c9d2", "#969fad"], dark: ["#5b6675", "#465060", "#717c8c"] };

const seen = new Map();
const strangers = new Map();

export const isDark = () => getComputedStyle(document.documentElement).colorScheme === "dark";

export function colourOf(job) {
  const dark = isDark();
  if (job.startsWith("other-")) {
    if (!strangers.has(job)) strangers.set(job, strangers.size);
    const greys = dark ? OTHERS.dark : OTHERS.light;
    return greys[strangers.get(job) % greys.length];
  }
  if (!seen.has(job)) seen.set(job, seen.size);
  const palette = dark ? DARK : LIGHT;
  return palette[seen.get(job) % palette.length];
}

export const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
