import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate } from "@tanstack/react-router";
import { useMemo } from "react";
import { storesQuery } from "../../api/queries";
import type { StoreSummary } from "../../api/types";
import { Choice, SearchField, Toolbar } from "../../components/controls";
import { type Column, DataTable } from "../../components/DataTable";
import { Badge, Empty, Progress, Rate, Stat, Stats } from "../../components/marks";
import { Page } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { ago, count, counted, money, percent, short } from "../../text/format";
import { ended, matches, rolloutsOf, sortStores } from "./stores";
import styles from "./RunsPage.module.css";

const KINDS = ["run", "loop", "gateway", "sessions", "empty"] as const;

function State({ store }: { store: StoreSummary }) {
  if (store.state !== "ok") return <Badge tone="bad">{store.state}</Badge>;
  if (store.live) return <Badge tone="accent">live</Badge>;
  return <span className={styles.muted}>{store.kind}</span>;
}

function Size({ store }: { store: StoreSummary }) {
  if (store.kind === "sessions") return <>{counted(store.conversations, "conversation")}</>;
  if (store.kind === "gateway") return <>{counted(store.clients, "client")}</>;
  if (store.kind === "loop") return <>{counted(store.steps, "step")}</>;
  const total = rolloutsOf(store);
  return total === 0 ? <>–</> : <Progress done={ended(store)} total={total} />;
}

const COLUMNS: Column<StoreSummary>[] = [
  {
    id: "name",
    header: "Name",
    sortable: true,
    grows: true,
    cell: (store) => (
      <Link to="/s/$store" params={{ store: store.id }} className={styles.name}>
        {store.parent_id !== null && <span className={styles.wave}>wave</span>}
        <Text>{store.name}</Text>
      </Link>
    ),
  },
  { id: "state", header: "State", cell: (store) => <State store={store} /> },
  {
    id: "rate",
    header: "Solve rate, 95 %",
    sortable: true,
    cell: (store) => (
      <Rate value={store.solve_rate?.estimate ?? null} low={store.solve_rate?.low ?? null} high={store.solve_rate?.high ?? null} />
    ),
  },
  { id: "graded", header: "Graded", numeric: true, sortable: true, cell: (store) => count(store.graded) },
  { id: "size", header: "Progress", cell: (store) => <Size store={store} /> },
  {
    id: "suspicious",
    header: "Suspicious",
    numeric: true,
    sortable: true,
    cell: (store) => (store.suspicious > 0 ? <Badge tone="warn">{store.suspicious}</Badge> : "0"),
  },
  { id: "calls", header: "Calls", numeric: true, sortable: true, cell: (store) => short(store.calls || null) },
  {
    id: "tokens",
    header: "Tokens",
    numeric: true,
    sortable: true,
    cell: (store) => short(store.prompt_tokens + store.completion_tokens || null),
  },
  { id: "cost", header: "Spend", numeric: true, sortable: true, cell: (store) => money(store.calls === 0 ? null : store.cost_usd) },
  {
    id: "changed",
    header: "Changed",
    sortable: true,
    cell: (store) => <span className={styles.muted}>{ago(store.changed_at, Date.now() / 1000)}</span>,
  },
];

function Totals({ stores }: { stores: StoreSummary[] }) {
  const sum = (field: "solved" | "graded" | "calls" | "cost_usd") =>
    stores.reduce((total, store) => total + store[field], 0);
  const graded = sum("graded");
  return (
    <Stats>
      <Stat label="Stores" value={count(stores.length)} />
      <Stat label="Live" value={count(stores.filter((store) => store.live).length)} />
      <Stat label="Solved" value={graded === 0 ? "–" : percent(sum("solved") / graded)} note={`of ${count(graded)} graded`} />
      <Stat label="Calls" value={short(sum("calls"))} />
      <Stat label="Spend" value={money(sum("cost_usd"))} />
    </Stats>
  );
}

/** All stores below the directories that the server was started with. */
export function RunsPage() {
  const result = useQuery(storesQuery);
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  const { q, kind, waves, sort = "-changed" } = url;
  const rows = useMemo(() => {
    const stores = result.data?.stores ?? [];
    const shown = stores.filter((store) => (waves === "1" || store.parent_id === null) && matches(store, q, kind));
    return sortStores(shown, sort);
  }, [result.data, q, kind, waves, sort]);
  return (
    <Page title="Runs" aside={result.data && <Totals stores={result.data.stores.filter((store) => store.parent_id === null)} />}>
      <Toolbar>
        <SearchField label="Filter by name, model, task source" value={q} onChange={(value) => setUrl({ q: value })} />
        <Choice label="Kind" value={kind} any="all" options={KINDS} onChange={(value) => setUrl({ kind: value })} />
        <label className={styles.check}>
          <input
            type="checkbox"
            checked={waves === "1"}
            onChange={(event) => setUrl({ waves: event.target.checked ? "1" : undefined })}
          />
          Waves of loops
        </label>
      </Toolbar>
      <Loaded result={result}>
        {(list) =>
          rows.length === 0 ? (
            <Empty>
              {list.stores.length === 0 ? (
                <>
                  There is no store in <Text>{list.directories.join(", ")}</Text>. Start a run there, or give{" "}
                  <code>understudy view</code> another directory.
                </>
              ) : (
                "No store meets the filter."
              )}
            </Empty>
          ) : (
            <DataTable
              label="Stores"
              columns={COLUMNS}
              rows={rows}
              rowKey={(store) => store.id}
              sort={sort}
              onSort={(value) => setUrl({ sort: value })}
              selected={url["row"]}
              onSelect={(row) => setUrl({ row })}
              onOpen={(store) => void navigate({ to: "/s/$store", params: { store: store.id } })}
            />
          )
        }
      </Loaded>
    </Page>
  );
}
