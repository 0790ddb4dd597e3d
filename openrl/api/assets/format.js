// Numbers and times as people read them.

export function percent(part) {
  const value = 100 * part;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export function count(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
  return size >= 10 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 10 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function metric(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export const clock = (unix, fraction = 0) => {
  const date = new Date(unix * 1000);
  const pad = (number, width = 2) => String(number).padStart(width, "0");
  const base = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  return fraction ? `${base}.${pad(date.getMilliseconds(), 3).slice(0, fraction)}` : base;
};

// An owner without a listed name is called by a hash: its beginning tells it from others.
export const ownerName = (owner) => (/^[0-9a-f]{32}$/.test(owner) ? `${owner.slice(0, 6)}…` : owner);
