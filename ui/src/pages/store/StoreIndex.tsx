import { RolloutsView } from "./RolloutsView";

/** The first view of a store, by its kind. */
export function StoreIndex() {
  return <RolloutsView />;
}
