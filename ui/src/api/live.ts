import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { source } from "./source";
import type { StoreChange } from "./types";

export type Connection = "live" | "lost" | "file";

/** Changes of one store within this time, in milliseconds, are one: what is shown is read anew once. */
const COLLECT_MS = 400;

/** Reads again what is shown of a store whenever the server says that it changed; returns whether it is connected. */
export function useLive(): Connection {
  const client = useQueryClient();
  const [connection, setConnection] = useState<Connection>(source.isServer ? "live" : "file");
  useEffect(() => {
    if (!source.isServer) return;
    const changed = new Set<string>();
    let timer: number | undefined;
    const refresh = () => {
      timer = undefined;
      for (const store of changed) void client.invalidateQueries({ queryKey: ["store", store] });
      changed.clear();
      void client.invalidateQueries({ queryKey: ["stores"] });
    };
    const events = new EventSource("/api/events");
    events.onopen = () => setConnection("live");
    events.onerror = () => setConnection("lost");
    events.addEventListener("change", (event: MessageEvent<string>) => {
      changed.add((JSON.parse(event.data) as StoreChange).store_id);
      timer ??= window.setTimeout(refresh, COLLECT_MS);
    });
    return () => {
      events.close();
      window.clearTimeout(timer);
    };
  }, [client]);
  return connection;
}
