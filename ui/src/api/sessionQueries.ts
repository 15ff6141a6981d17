import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";
import { inParts } from "./parts";
import { answer, api } from "./source";

export type SessionFilter = { project?: string; agent?: string; format?: string; q?: string };
export type StateFilter = { trace?: string; where?: string };

export function sessionsQuery(store: string, filter: SessionFilter) {
  return infiniteQueryOptions({
    queryKey: ["store", store, "sessions", filter],
    initialPageParam: null as string | null,
    queryFn: ({ pageParam, signal }) =>
      answer(
        api.GET("/api/stores/{store}/sessions", {
          params: { path: { store }, query: { ...filter, ...(pageParam === null ? {} : { cursor: pageParam }) } },
          signal,
        }),
      ),
    getNextPageParam: (page) => page.next,
    placeholderData: (previous) => previous,
  });
}

export function statesQuery(store: string, filter: StateFilter) {
  return infiniteQueryOptions({
    queryKey: ["store", store, "states", filter],
    initialPageParam: null as string | null,
    queryFn: ({ pageParam, signal }) =>
      answer(
        api.GET("/api/stores/{store}/states", {
          params: { path: { store }, query: { ...filter, ...(pageParam === null ? {} : { cursor: pageParam }) } },
          signal,
        }),
      ),
    getNextPageParam: (page) => page.next,
    placeholderData: (previous) => previous,
  });
}

export function stateQuery(store: string, state: string, start: number) {
  return queryOptions({
    queryKey: ["store", store, "state", state, start],
    queryFn: ({ signal }) =>
      answer(
        api.GET("/api/stores/{store}/states/{state}", { params: { path: { store, state }, query: { start } }, signal }),
      ),
  });
}

export function pairsQuery(store: string, origin: "replay" | "rollouts") {
  return infiniteQueryOptions({
    queryKey: ["store", store, "pairs", origin],
    initialPageParam: 0,
    queryFn: ({ pageParam, signal }) =>
      answer(
        api.GET("/api/stores/{store}/pairs", { params: { path: { store }, query: { origin, start: pageParam } }, signal }),
      ),
    getNextPageParam: (page) => page.next,
  });
}

export function pairVotesQuery(store: string) {
  return queryOptions({
    queryKey: ["store", store, "votes", "pair"],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (part) =>
        answer(
          api.GET("/api/stores/{store}/votes", { params: { path: { store }, query: { subject: "pair", ...part } }, signal }),
        ),
      ),
  });
}

/** What redaction would replace before anything is exported; each answer has searched more of the store. */
export function redactionQuery(store: string) {
  return queryOptions({
    queryKey: ["store", store, "redaction"],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (query) =>
        answer(api.GET("/api/stores/{store}/redaction", { params: { path: { store }, query }, signal })),
      ),
    refetchInterval: (query) => (query.state.data?.complete === false ? 50 : false),
  });
}
