import type { StoreSummary } from "../../api/types";

const ENDED = ["succeeded", "failed", "cancelled"] as const;

/** How many rollouts a store has, in any state. */
export function rolloutsOf(store: StoreSummary): number {
  return Object.values(store.rollouts).reduce((sum: number, amount) => sum + (amount ?? 0), 0);
}

/** How many rollouts of a store have ended. */
export function ended(store: StoreSummary): number {
  return ENDED.reduce((sum, status) => sum + (store.rollouts[status] ?? 0), 0);
}

/** Whether a store is of the kind, and has all the words in its name or in what it says about itself. */
export function matches(store: StoreSummary, words: string | undefined, kind: string | undefined): boolean {
  if (kind !== undefined && store.kind !== kind) return false;
  const text = [store.name, ...Object.values(store.about)].join("\n").toLowerCase();
  return (words ?? "")
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

const VALUES: Record<string, (store: StoreSummary) => string | number | null> = {
  name: (store) => store.name,
  rate: (store) => store.solve_rate?.estimate ?? null,
  graded: (store) => store.graded,
  suspicious: (store) => store.suspicious,
  calls: (store) => store.calls,
  tokens: (store) => store.prompt_tokens + store.completion_tokens,
  cost: (store) => store.cost_usd,
  changed: (store) => store.changed_at,
};

/** Returns the stores by a column, with "-" before its name for descending; unknown values come last. */
export function sortStores(stores: StoreSummary[], sort: string): StoreSummary[] {
  const value = VALUES[sort.replace(/^-/, "")];
  if (value === undefined) return stores;
  const sign = sort.startsWith("-") ? -1 : 1;
  return [...stores].sort((one, other) => {
    const [left, right] = [value(one), value(other)];
    if (left === null || right === null) return Number(left === null) - Number(right === null);
    return sign * (left < right ? -1 : left > right ? 1 : 0);
  });
}
