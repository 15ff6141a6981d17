import { useQuery } from "@tanstack/react-query";
import { Link, Outlet, useParams } from "@tanstack/react-router";
import { storeQuery } from "../../api/queries";
import type { StoreSummary } from "../../api/types";
import { Badge, Rate, Stat, Stats } from "../../components/marks";
import { Page, Tabs, Trail } from "../../components/Page";
import { ErrorNote, Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUpKey } from "../../components/useUpKey";
import { ApiError, source } from "../../api/source";
import { count, counted, money, percent, short } from "../../text/format";
import { ended, rolloutsOf } from "../runs/stores";

const INDEX = "/s/$store";

/** Views by kind of store: the page, its name, and the path of the API without which it has nothing to show. */
const VIEWS: Record<StoreSummary["kind"], readonly (readonly [string, string, string?])[]> = {
  run: [
    [INDEX, "Rollouts", "/rollouts"],
    ["/s/$store/grid", "Tasks", "/tasks"],
    ["/s/$store/scatter", "Reward and cost", "/rollouts"],
    ["/s/$store/health", "Health", "/health"],
    ["/s/$store/report", "Report", "/api/report"],
    ["/s/$store/pairs", "Pairs", "/pairs"],
    ["/s/$store/compare", "Compare", "/pairs"],
    ["/s/$store/redaction", "Redaction", "/redaction"],
  ],
  loop: [
    [INDEX, "Loop"],
    ["/s/$store/report", "Report", "/api/report"],
  ],
  sessions: [
    [INDEX, "Conversations"],
    ["/s/$store/states", "States"],
    ["/s/$store/pairs", "Pairs"],
    ["/s/$store/redaction", "Redaction"],
  ],
  gateway: [[INDEX, "Gateway"]],
  empty: [[INDEX, "Rollouts"]],
};

function viewsOf(store: StoreSummary) {
  return VIEWS[store.kind].filter(([, , path]) => path === undefined || source.holds(path.startsWith("/api") ? path : `/api/stores/${store.id}${path}`));
}

function Figures({ store }: { store: StoreSummary }) {
  const total = rolloutsOf(store);
  if (store.kind === "sessions") {
    return (
      <Stats>
        <Stat label="Conversations" value={count(store.conversations)} />
        <Stat label="States" value={count(store.states)} />
      </Stats>
    );
  }
  return (
    <Stats>
      {store.graded > 0 && (
        <Stat
          label="Solved"
          value={percent(store.solve_rate?.estimate)}
          note={
            <Rate
              value={store.solve_rate?.estimate ?? null}
              low={store.solve_rate?.low ?? null}
              high={store.solve_rate?.high ?? null}
              isBare
            />
          }
        />
      )}
      {total > 0 && <Stat label="Rollouts" value={`${count(ended(store))}/${count(total)}`} note={counted(store.tasks, "task")} />}
      {store.suspicious > 0 && <Stat label="Suspicious" value={count(store.suspicious)} tone="warn" />}
      {store.steps > 0 && <Stat label="Steps" value={count(store.steps)} />}
      {store.calls > 0 && (
        <>
          <Stat
            label="Tokens"
            value={short(store.prompt_tokens + store.completion_tokens)}
            note={`${short(store.calls)} calls`}
          />
          <Stat label="Spend" value={money(store.cost_usd)} />
        </>
      )}
    </Stats>
  );
}

/** The frame of a store's views: its name and figures, and links to the views. */
export function StorePage() {
  const { store: id } = useParams({ from: "/s/$store" });
  const result = useQuery(storeQuery(id));
  const parent = result.data?.parent_id;
  useUpKey(parent == null ? "/" : "/s/$store", parent == null ? {} : { store: parent });
  return (
    <Page
      title={result.data?.name ?? "Store"}
      heading={
        result.data && (
          <>
            <Text>{result.data.name}</Text> {result.data.live && <Badge tone="accent">live</Badge>}
          </>
        )
      }
      trail={
        <>
          <Trail to="/">Runs</Trail>
          {result.data?.parent_id != null && (
            <Trail to="/s/$store" params={{ store: result.data.parent_id }}>
              Loop
            </Trail>
          )}
        </>
      }
      aside={result.data && <Figures store={result.data} />}
    >
      <Loaded result={result}>
        {(store) =>
          store.state === "ok" ? (
            <>
              <Tabs label="Views of the store">
                {viewsOf(store).map(([to, name]) => (
                  <Link key={to} to={to} params={{ store: id }} activeOptions={{ exact: true, includeSearch: false }}>
                    {name}
                  </Link>
                ))}
              </Tabs>
              <Outlet />
            </>
          ) : (
            <ErrorNote
              error={
                store.error === null
                  ? new ApiError(store.state, `The store is ${store.state}.`, "Look whether its file is still there.")
                  : new ApiError(store.error.type, store.error.message, store.error.remedy)
              }
            />
          )
        }
      </Loaded>
    </Page>
  );
}
