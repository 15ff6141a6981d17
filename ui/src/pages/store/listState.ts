import type { UrlState } from "../../text/address";

const states = new Map<string, UrlState>();

/** Keeps how a store's list of rollouts is filtered and sorted, for the way back from one of them. */
export function keepListState(store: string, state: UrlState): void {
  states.set(store, state);
}

/** Returns the state in which a store's list of rollouts was left. */
export function lastListState(store: string): UrlState {
  return states.get(store) ?? {};
}
