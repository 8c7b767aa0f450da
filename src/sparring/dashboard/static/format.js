// Numbers and times as people read them. No state, no DOM.

const THIN = "\u202f"; // narrow no-break space between a number and its unit
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
export const NONE = "–";

// 999 → "999", 12345 → "12.3 k". For whole numbers of things.
export function count(n) {
  if (n == null) return NONE;
  return large(n) ?? String(Math.round(n));
}

// 312.44 → "312.4", 0.002134 → "0.00213". For measurements.
export function number(x) {
  if (x == null || !Number.isFinite(x)) return NONE;
  const size = Math.abs(x);
  if (size === 0) return "0";
  const small = () => (size >= 1 ? x.toFixed(1) : size >= 1e-4 ? trim(x.toPrecision(3)) : x.toExponential(1));
  return (large(x) ?? small()).replaceAll("-", "−");
}

export function signed(x) {
  return x > 0 ? "+" + number(x) : number(x);
}

export function percent(share) {
  return trim((share * 100).toFixed(1)) + THIN + "%";
}

export function bytes(n) {
  return (large(n) ?? n + THIN) + "B";
}

export function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}

export function ago(seconds) {
  if (seconds < 2) return "just now";
  return duration(seconds) + " ago";
}

export function duration(seconds) {
  const [size, unit] =
    seconds < 60 ? [1, "s"] : seconds < 3600 ? [60, "min"] : seconds < 2 * 86400 ? [3600, "h"] : [86400, "days"];
  return `${Math.floor(seconds / size)}${THIN}${unit}`;
}

const two = (n) => String(n).padStart(2, "0");

export function clock(time, withSeconds = true) {
  const date = new Date(time * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? ":" + two(date.getSeconds()) : ""}`;
}

export function day(time) {
  return new Date(time * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

function large(x) {
  for (const [size, unit] of UNITS) {
    // 999 950 is nearer to "1 M" than to "1000 k"
    if (Math.abs(x) >= size * 0.9995) return trim((x / size).toPrecision(3)) + THIN + unit;
  }
  return null;
}

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
