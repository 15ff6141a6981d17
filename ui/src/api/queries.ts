import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";
import { inParts } from "./parts";
import { answer, api } from "./source";
import type { RolloutFilter, TurnView } from "./types";

/** How many turns are read at once; what is cached is such chunks, by the index of the first. */
export const TURNS_PER_CHUNK = 25;

const inStore = (store: string) => ["store", store] as const;

export const storesQuery = queryOptions({
  queryKey: ["stores"],
  queryFn: ({ signal, ...context }) =>
    inParts(context, (query) => answer(api.GET("/api/stores", { params: { query }, signal }))),
});

export function storeQuery(store: string) {
  return queryOptions({
    queryKey: [...inStore(store), "summary"],
    queryFn: ({ signal }) => answer(api.GET("/api/stores/{store}", { params: { path: { store } }, signal })),
  });
}

export function healthQuery(store: string) {
  return queryOptions({
    queryKey: [...inStore(store), "health"],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (query) =>
        answer(api.GET("/api/stores/{store}/health", { params: { path: { store }, query }, signal })),
      ),
  });
}

export function rolloutsQuery(store: string, filter: RolloutFilter) {
  return infiniteQueryOptions({
    queryKey: [...inStore(store), "rollouts", filter],
    initialPageParam: null as string | null,
    queryFn: ({ pageParam, signal }) =>
      answer(
        api.GET("/api/stores/{store}/rollouts", {
          params: { path: { store }, query: { ...filter, ...(pageParam === null ? {} : { cursor: pageParam }) } },
          signal,
        }),
      ),
    getNextPageParam: (page) => page.next,
    placeholderData: (previous) => previous,
  });
}

export function tasksQuery(store: string, task: string | undefined) {
  return infiniteQueryOptions({
    queryKey: [...inStore(store), "tasks", task ?? ""],
    initialPageParam: null as string | null,
    queryFn: ({ pageParam, signal }) =>
      answer(
        api.GET("/api/stores/{store}/tasks", {
          params: {
            path: { store },
            query: { ...(task ? { task } : {}), ...(pageParam === null ? {} : { cursor: pageParam }) },
          },
          signal,
        }),
      ),
    getNextPageParam: (page) => page.next,
  });
}

export function groupQuery(store: string, task: string) {
  return queryOptions({
    queryKey: [...inStore(store), "group", task],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (part) =>
        answer(api.GET("/api/stores/{store}/group", { params: { path: { store }, query: { task, ...part } }, signal })),
      ),
  });
}

/** Which attempt of which rollout; without `attempt` the one that decided it. */
export type RolloutKey = { store: string; rollout: string; attempt?: string | undefined };

const inRollout = ({ store, rollout, attempt }: RolloutKey) =>
  [...inStore(store), "rollout", rollout, attempt ?? ""] as const;
const attemptOf = ({ attempt }: RolloutKey) => (attempt === undefined ? {} : { attempt });

export function rolloutQuery(key: RolloutKey) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "head"],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (part) =>
        answer(
          api.GET("/api/stores/{store}/rollouts/{rollout}", {
            params: { path: { store, rollout }, query: { ...attemptOf(key), ...part } },
            signal,
          }),
        ),
      ),
    // Each answer about a long rollout has read more of its calls.
    refetchInterval: (query) => ((query.state.data?.unread ?? 0) > 0 ? 50 : false),
  });
}

export function turnsQuery(key: RolloutKey, chunk: number) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "turns", chunk],
    queryFn: async ({ signal }) => {
      const turns: TurnView[] = [];
      const end = (chunk + 1) * TURNS_PER_CHUNK;
      let start: number | null = chunk * TURNS_PER_CHUNK;
      // A page has fewer turns than asked for where they are long.
      while (start !== null && start < end) {
        const page: { turns: TurnView[]; next: number | null } = await answer(
          api.GET("/api/stores/{store}/rollouts/{rollout}/turns", {
            params: { path: { store, rollout }, query: { ...attemptOf(key), start, limit: end - start } },
            signal,
          }),
        );
        turns.push(...page.turns);
        start = page.next;
      }
      return turns;
    },
  });
}

export function callsQuery(key: RolloutKey) {
  const { store, rollout } = key;
  return infiniteQueryOptions({
    queryKey: [...inRollout(key), "calls"],
    initialPageParam: 0,
    queryFn: ({ pageParam, signal }) =>
      answer(
        api.GET("/api/stores/{store}/rollouts/{rollout}/calls", {
          params: { path: { store, rollout }, query: { ...attemptOf(key), start: pageParam, limit: 1000 } },
          signal,
        }),
      ),
    getNextPageParam: (page) => page.next,
  });
}

export function bodyQuery(key: RolloutKey, ref: string, field: "text" | "arguments", offset: number) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "body", ref, field, offset],
    staleTime: Infinity,
    queryFn: ({ signal }) =>
      answer(
        api.GET("/api/stores/{store}/rollouts/{rollout}/body", {
          params: { path: { store, rollout }, query: { ...attemptOf(key), ref, field, offset, length: 50_000 } },
          signal,
        }),
      ),
  });
}

/** The data URL of an image in a block, which comes in ranges of text. */
export function imageQuery(key: RolloutKey, ref: string, image: number) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "image", ref, image],
    staleTime: Infinity,
    gcTime: 10_000, // Images are large, and are read again in no time.
    queryFn: async ({ signal }) => {
      const parts: string[] = [];
      let offset: number | null = 0;
      while (offset !== null) {
        const query = { ...attemptOf(key), ref, field: "image" as const, image, offset, length: 200_000 };
        const range: { text: string; next: number | null } = await answer(
          api.GET("/api/stores/{store}/rollouts/{rollout}/body", { params: { path: { store, rollout }, query }, signal }),
        );
        parts.push(range.text);
        offset = range.next;
      }
      return parts.join("");
    },
  });
}

export function tokensQuery(key: RolloutKey, call: string, scope: "call" | "segment", start: number | null) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "tokens", call, scope, start],
    queryFn: ({ signal }) =>
      answer(
        api.GET("/api/stores/{store}/rollouts/{rollout}/tokens", {
          params: {
            path: { store, rollout },
            query: { ...attemptOf(key), call, scope, limit: 2000, ...(start === null ? {} : { start }) },
          },
          signal,
        }),
      ),
  });
}

export function patchQuery(key: RolloutKey, offset: number) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "patch", offset],
    queryFn: ({ signal }) =>
      answer(
        api.GET("/api/stores/{store}/rollouts/{rollout}/patch", {
          params: { path: { store, rollout }, query: { ...attemptOf(key), offset, length: 200_000 } },
          signal,
        }),
      ),
  });
}

export function logQuery(key: RolloutKey, name: string, offset: number) {
  const { store, rollout } = key;
  return queryOptions({
    queryKey: [...inRollout(key), "log", name, offset],
    queryFn: ({ signal }) =>
      answer(
        api.GET("/api/stores/{store}/rollouts/{rollout}/log", {
          params: { path: { store, rollout }, query: { ...attemptOf(key), name, offset, length: 50_000 } },
          signal,
        }),
      ),
  });
}

/** The bytes of a call's request or response from `offset` on, as text, with the size of the whole in bytes. */
export function rawQuery(store: string, call: string, part: "request" | "response", offset: number) {
  return queryOptions({
    queryKey: [...inStore(store), "raw", call, part, offset],
    staleTime: Infinity,
    queryFn: async ({ signal }) => {
      const request = api.GET("/api/stores/{store}/calls/{call}/raw", {
        params: { path: { store, call }, query: { part, offset, length: 200_000 } },
        parseAs: "arrayBuffer",
        signal,
      });
      let size: number | null = null;
      const body = await answer(
        request.then((result) => {
          const header = result.response.headers.get("x-size");
          size = header === null ? null : Number(header);
          return result;
        }),
      );
      const bytes = body as unknown as ArrayBuffer;
      return { text: new TextDecoder().decode(bytes), end: offset + bytes.byteLength, size };
    },
  });
}

export function loopQuery(store: string) {
  return queryOptions({
    queryKey: [...inStore(store), "loop"],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (query) => answer(api.GET("/api/stores/{store}/loop", { params: { path: { store }, query }, signal }))),
  });
}

/** The report of a loop or a run, or of several runs, by ids with commas between. */
export function reportQuery(stores: string) {
  return queryOptions({
    queryKey: ["report", stores],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (part) => answer(api.GET("/api/report", { params: { query: { stores, ...part } }, signal }))),
  });
}

export function compareQuery(before: string, after: string) {
  return queryOptions({
    queryKey: ["compare", before, after],
    queryFn: ({ signal, ...context }) =>
      inParts(context, (part) => answer(api.GET("/api/compare", { params: { query: { before, after, ...part } }, signal }))),
  });
}

export function gatewayQuery(store: string) {
  return queryOptions({
    queryKey: [...inStore(store), "gateway"],
    refetchInterval: 2_000, // What is in flight is in no store, so no event says that it changed.
    queryFn: ({ signal, ...context }) =>
      inParts(context, (query) =>
        answer(api.GET("/api/stores/{store}/gateway", { params: { path: { store }, query }, signal })),
      ),
  });
}
