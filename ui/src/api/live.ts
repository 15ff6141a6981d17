import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { source } from "./source";
import type { StoreChange } from "./types";

export type Connection = "live" | "lost" | "file";

/** At least this long after a refresh, in milliseconds, comes the next: changes in between are one. */
const COLLECT_MS = 400;

/** Reads again what is shown of a store whenever the server says that it changed; returns whether it is connected. */
export function useLive(): Connection {
  const client = useQueryClient();
  const [connection, setConnection] = useState<Connection>(source.isServer ? "live" : "file");
  useEffect(() => {
    if (!source.isServer) return;
    const changed = new Set<string>();
    let timer: number | undefined;
    let refreshedAt = 0;
    let isRefreshing = false;
    const refresh = async () => {
      timer = undefined;
      refreshedAt = Date.now();
      const keys = [["stores"], ...[...changed].map((store) => ["store", store])];
      changed.clear();
      // A refresh cancels requests that are on their way: the next one waits, or a slow answer would never come.
      isRefreshing = true;
      await Promise.all(keys.map((queryKey) => client.invalidateQueries({ queryKey })));
      isRefreshing = false;
      if (changed.size > 0) schedule();
    };
    const schedule = () => {
      if (isRefreshing) return;
      timer ??= window.setTimeout(() => void refresh(), Math.max(0, refreshedAt + COLLECT_MS - Date.now()));
    };
    const events = new EventSource("/api/events");
    events.onopen = () => setConnection("live");
    events.onerror = () => setConnection("lost");
    events.addEventListener("change", (event: MessageEvent<string>) => {
      changed.add((JSON.parse(event.data) as StoreChange).store_id);
      schedule();
    });
    return () => {
      changed.clear();
      events.close();
      window.clearTimeout(timer);
    };
  }, [client]);
  return connection;
}
