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
import { PairsView } from "./pages/pairs/PairsView";
import { ReportPage, StoreReport } from "./pages/report/ReportView";
import { RolloutPage } from "./pages/rollout/RolloutPage";
import { RunsPage } from "./pages/runs/RunsPage";
import { RedactionView } from "./pages/sessions/RedactionView";
import { StatesView } from "./pages/sessions/StatesView";
import { CompareView } from "./pages/store/CompareView";
import { GridView } from "./pages/store/GridView";
import { GroupPage } from "./pages/store/GroupPage";
import { HealthView } from "./pages/store/HealthView";
import { ScatterView } from "./pages/store/ScatterView";
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
const health = createRoute({ getParentRoute: () => store, path: "/health", component: HealthView });
const storeReport = createRoute({ getParentRoute: () => store, path: "/report", component: StoreReport });
const scatter = createRoute({ getParentRoute: () => store, path: "/scatter", component: ScatterView });
const compare = createRoute({ getParentRoute: () => store, path: "/compare", component: CompareView });
const pairs = createRoute({ getParentRoute: () => store, path: "/pairs", component: PairsView });
const states = createRoute({ getParentRoute: () => store, path: "/states", component: StatesView });
const redaction = createRoute({ getParentRoute: () => store, path: "/redaction", component: RedactionView });
const report = createRoute({ getParentRoute: () => root, path: "/report", component: ReportPage });
const group = createRoute({ getParentRoute: () => root, path: "/s/$store/task/$task", component: GroupPage });
const rollout = createRoute({ getParentRoute: () => root, path: "/s/$store/r/$rollout", component: RolloutPage });

/** A file has no paths of its own: the page's path is in the fragment there. */
function createFileHistory() {
  if (window.location.hash === "") window.history.replaceState(null, "", `#${source.start}`);
  return createHashHistory();
}

export const router = createRouter({
  routeTree: root.addChildren([
    runs,
    report,
    store.addChildren([storeIndex, grid, storeReport, scatter, health, compare, pairs, states, redaction]),
    group,
    rollout,
  ]),
  history: source.isServer ? createBrowserHistory() : createFileHistory(),
  parseSearch,
  stringifySearch,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
