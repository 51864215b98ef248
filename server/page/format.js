/** Numbers as people read them; no line breaks before a unit. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const SPACE = "\u00a0";

/** 1536 → "1.5 KiB". */
export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : Number(value.toFixed(1))}${SPACE}${UNITS[unit]}`;
}

/** 0.714 → "71 %"; null → "–". */
export function percent(ratio, digits = 0) {
  return ratio === null ? "–" : `${(ratio * 100).toFixed(digits)}${SPACE}%`;
}

/** 17.93 → "17.9 tok/s". */
export function speed(tokensPerSecond) {
  const digits = tokensPerSecond < 100 ? 1 : 0;
  return `${tokensPerSecond.toFixed(digits)}${SPACE}tok/s`;
}

/** 4096 → "4,096". */
export function count(number) {
  return number.toLocaleString("en");
}

/** 2.345 → "2.3 s"; 0.0421 → "42 ms". */
export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)}${SPACE}ms`;
  return `${value.toFixed(value < 10 ? 1 : 0)}${SPACE}s`;
}
