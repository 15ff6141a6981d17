/** What is shown where a value is not known. */
export const ABSENT = "–";

const COUNT = new Intl.NumberFormat("en-US");
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export function count(value: number | null | undefined): string {
  return value == null ? ABSENT : COUNT.format(value);
}

/** Returns a number with the noun that it counts: 1 vote, 2 votes. */
export function counted(value: number | null | undefined, noun: string): string {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Returns a large number with a unit prefix: 12.3K, 4M. */
export function short(value: number | null | undefined): string {
  return value == null ? ABSENT : value < 10_000 ? COUNT.format(value) : SHORT.format(value);
}

export function money(dollars: number | null | undefined): string {
  if (dollars == null) return ABSENT;
  if (dollars === 0) return "$0";
  return dollars < 0.01 ? `$${dollars.toFixed(4)}` : `$${dollars.toFixed(2)}`;
}

export function percent(share: number | null | undefined, digits = 0): string {
  return share == null ? ABSENT : `${(share * 100).toFixed(digits)}%`;
}

export function reward(value: number | null | undefined): string {
  if (value == null) return ABSENT;
  return Number.isInteger(value) ? String(value) : value.toFixed(2);
}

/** Returns a duration given in seconds, with two units at most: 820 ms, 4.2 s, 3 m 05 s, 2 h 10 m. */
export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return ABSENT;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (value: number) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
}

export function bytes(size: number | null | undefined): string {
  if (size == null) return ABSENT;
  if (size < 1000) return `${size} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = size;
  let unit = -1;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(value < 10 ? 1 : 0)} ${units[unit] ?? ""}`;
}

/** Returns a time given in seconds since 1970, in this machine's time zone. */
export function moment(seconds: number | null | undefined): string {
  if (seconds == null) return ABSENT;
  const date = new Date(seconds * 1000);
  const two = (value: number) => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Returns how long before `now` a time was, both in seconds since 1970: "3 minutes ago". */
export function ago(seconds: number | null | undefined, now: number): string {
  if (seconds == null) return ABSENT;
  const passed = Math.max(0, now - seconds);
  const units: [number, string][] = [
    [86_400, "day"],
    [3600, "hour"],
    [60, "minute"],
  ];
  for (const [size, name] of units) {
    const amount = Math.floor(passed / size);
    if (amount >= 1) return `${amount} ${name}${amount === 1 ? "" : "s"} ago`;
  }
  return "just now";
}
