import {
  createBrowserHistory,
  createHashHistory,
  createRootRoute,
  createRoute,
  createRouter,
} from "@tanstack/react-router";
import { useLive } from "./api/live";
import { source } from "./api/source";
import { Empty } from "./components/marks";
import { Shell } from "./components/Shell";
import { RolloutPage } from "./pages/rollout/RolloutPage";
import { RunsPage } from "./pages/runs/RunsPage";
import { GridView } from "./pages/store/GridView";
import { StoreIndex } from "./pages/store/StoreIndex";
import { StorePage } from "./pages/store/StorePage";
import { parseSearch, stringifySearch } from "./text/address";

const CONNECTIONS = { live: "", lost: "not connected: trying again", file: "a saved copy" } as const;

function Root() {
  return <Shell status={CONNECTIONS[useLive()]} />;
}

const root = createRootRoute({
  component: Root,
  notFoundComponent: () => <Empty>There is no such page.</Empty>,
});
const runs = createRoute({ getParentRoute: () => root, path: "/", component: RunsPage });
const store = createRoute({ getParentRoute: () => root, path: "/s/$store", component: StorePage });
const storeIndex = createRoute({ getParentRoute: () => store, path: "/", component: StoreIndex });
const grid = createRoute({ getParentRoute: () => store, path: "/grid", component: GridView });
const rollout = createRoute({ getParentRoute: () => root, path: "/s/$store/r/$rollout", component: RolloutPage });

export const router = createRouter({
  routeTree: root.addChildren([runs, store.addChildren([storeIndex, grid]), rollout]),
  // A file has no paths of its own: the page's path is in the fragment there.
  history: source.isServer ? createBrowserHistory() : createHashHistory(),
  parseSearch,
  stringifySearch,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
