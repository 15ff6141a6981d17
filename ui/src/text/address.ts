/** What a page's address says after its path: names to texts. A page's whole state is in there. */
export type UrlState = Record<string, string | undefined>;

/** Reads an address's query; all values are texts. */
export function parseSearch(query: string): UrlState {
  return Object.fromEntries(new URLSearchParams(query));
}

/** Writes an address's query, in the order of names, without what is empty. */
export function stringifySearch(state: Record<string, unknown>): string {
  const entries = Object.entries(state)
    .filter((entry): entry is [string, string] => typeof entry[1] === "string" && entry[1] !== "")
    .sort(([one], [other]) => one.localeCompare(other));
  const query = new URLSearchParams(entries).toString();
  return query === "" ? "" : `?${query}`;
}

/** Reads a list that was written by `joinList`; an absent one is empty. */
export function splitList(value: string | undefined): string[] {
  return value === undefined || value === "" ? [] : value.split(",");
}

export function joinList(values: string[]): string | undefined {
  return values.length === 0 ? undefined : values.join(",");
}

/** Returns the list with the value added, or removed if it was there. */
export function toggled(values: string[], value: string): string[] {
  return values.includes(value) ? values.filter((other) => other !== value) : [...values, value];
}
