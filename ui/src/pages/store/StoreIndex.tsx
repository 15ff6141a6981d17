import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { storeQuery } from "../../api/queries";
import { LoopView } from "../loop/LoopView";
import { SessionsView } from "../sessions/SessionsView";
import { GatewayView } from "./GatewayView";
import { RolloutsView } from "./RolloutsView";

/** The first view of a store, by its kind. */
export function StoreIndex() {
  const { store } = useParams({ from: "/s/$store" });
  const { data } = useQuery(storeQuery(store));
  switch (data?.kind) {
    case undefined:
      return null;
    case "loop":
      return <LoopView />;
    case "sessions":
      return <SessionsView />;
    case "gateway":
      return <GatewayView />;
    default:
      return <RolloutsView />;
  }
}
