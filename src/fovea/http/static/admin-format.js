// Numbers as text for people. Pure functions.

const NONE = "–";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** A whole number with separators; "–" for none. */
export function count(value) {
  return value == null ? NONE : Math.round(value).toLocaleString("en");
}

/** A number with few digits, such as a rate per second. */
export function short(value) {
  if (value == null) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (value >= 100 || Number.isInteger(value)) return count(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** A number of bytes. */
export function bytes(value) {
  if (value == null) return NONE;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** A short time: milliseconds below one second. */
export function seconds(value) {
  if (value == null) return NONE;
  if (value < 0.0005) return "0 ms";
  if (value < 0.01) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(1000 * value)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

/** A long time, as 2 d 3 h, 3 h 10 min, or 5 min 20 s. */
export function duration(value) {
  if (value == null) return NONE;
  const steps = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const whole = Math.floor(value);
  const first = steps.findIndex(([, size]) => whole >= size);
  if (first < 0) return "0 s";
  let rest = whole;
  const words = [];
  for (const [unit, size] of steps.slice(first, first + 2)) {
    words.push(`${Math.floor(rest / size)} ${unit}`);
    rest %= size;
  }
  return words.filter((word, index) => index === 0 || !word.startsWith("0 ")).join(" ");
}

/** A share from 0 to 1 as percent. */
export function percent(value) {
  if (value == null) return NONE;
  const shown = 100 * value;
  return `${shown === 0 || shown >= 10 ? Math.round(shown) : shown.toFixed(1)} %`;
}

/** The time of day of a Unix time in seconds, in the browser's zone. */
export function clock(time) {
  return new Date(1000 * time).toLocaleTimeString("en-GB");
}
