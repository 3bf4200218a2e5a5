"use strict";
// Formats numbers and settings. Unknown values become a dash; nothing here relies on the types of its arguments.

const known = value => typeof value === "number" && Number.isFinite(value);
const DASH = "–";
const clamp = (low, value, high) => Math.min(high, Math.max(low, value));

// Rounds to this many significant digits, but keeps all digits before the decimal point.
function digits(value, significant = 3) {
  if (!known(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-6)) return value.toExponential(significant - 1);
  const decimals = size === 0 ? 0 : clamp(0, significant - 1 - Math.floor(Math.log10(size)), 9);
  return fixed(value, decimals);
}

const fixed = (value, decimals) =>
  value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });

// A value and the larger half of its interval, the latter to two digits.
function within(value, low, high) {
  const half = Math.max(value - low, high - value);
  if (!known(value) || !known(half) || half <= 0 || half < Math.abs(value) * 1e-6) return digits(value, 4);
  const decimals = clamp(0, 1 - Math.floor(Math.log10(half)), 9);
  return `${fixed(value, decimals)} ± ${fixed(half, decimals)}`;
}

// A common unit for all values of a column or an axis: the divisor and its name.
function unitOf(unit, values) {
  const largest = Math.max(0, ...values.filter(known).map(Math.abs));
  const first = steps => steps.find(([by]) => largest >= by) ?? steps[steps.length - 1];
  if (unit === "B") return first([[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]);
  if (unit === "s") return first([[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
  if (/^FLOP/i.test(unit)) return first([[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1, ""]].map(([by, p]) => [by, p + unit]));
  return [1, unit];
}

function amount(value, unit, significant = 3) {
  if (!known(value)) return "unknown";
  const [by, name] = unitOf(unit, [value]);
  return `${digits(value / by, significant)} ${name}`.trim();
}

function duration(seconds) {
  if (!known(seconds)) return "unknown";
  if (seconds < 60) return amount(seconds, "s");
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const percent = share => `${digits(share * 100, share < 0.1 ? 2 : 3)} %`;
const plural = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// The shortest suffixes of dotted keys that still distinguish them, at least two words long: `stages` alone says
// little.
function shortKeys(keys) {
  const ends = keys.map(key => key.split(".").map((_, index, words) => words.slice(index).join(".")));
  const isOnly = end => ends.filter(other => other.includes(end)).length === 1;
  return new Map(keys.map((key, index) => [key, ends[index].slice(0, -1).reverse().find(isOnly) ?? key]));
}
