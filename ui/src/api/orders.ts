import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { storesQuery } from "./queries";
import { answer, api, source } from "./source";
import type { VoteRequest } from "./types";

/** Whether this page may write: not in a file, and not with `--read-only`. */
export function useMayWrite(): boolean {
  const { data } = useQuery(storesQuery);
  return source.isServer && data?.may_write === true;
}

function useRefresh(store: string): () => Promise<void> {
  const client = useQueryClient();
  return () => client.invalidateQueries({ queryKey: ["store", store] });
}

/** Stores a label of a rollout or a pair, or takes it back. */
export function useVote(store: string) {
  return useMutation({
    mutationFn: (order: VoteRequest) =>
      answer(api.POST("/api/stores/{store}/votes", { params: { path: { store } }, body: order })),
    onSuccess: useRefresh(store),
  });
}

/** Stores a person's decision on whether a rollout's patch is clean. */
export function useIntegrityOrder(store: string) {
  return useMutation({
    mutationFn: (body: { rollout_id: string; status: "clean" | "suspicious"; note: string }) =>
      answer(api.POST("/api/stores/{store}/integrity", { params: { path: { store } }, body })),
    onSuccess: useRefresh(store),
  });
}

/** Pauses a gateway, or lets it go on. */
export function usePause(store: string) {
  return useMutation({
    mutationFn: (paused: boolean) =>
      answer(
        api.POST("/api/stores/{store}/gateway/pause", { params: { path: { store } }, body: { paused, drain_s: 0 } }),
      ),
    onSuccess: useRefresh(store),
  });
}
