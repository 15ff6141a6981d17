import { useInfiniteQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import { useCallback, useEffect, useMemo } from "react";
import { rolloutsQuery } from "../../api/queries";
import { source } from "../../api/source";
import type { RolloutFilter, RolloutRow } from "../../api/types";
import { Checklist, Choice, SearchField, Toolbar } from "../../components/controls";
import { type Column, DataTable } from "../../components/DataTable";
import { Empty } from "../../components/marks";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { joinList, splitList, toggled, type UrlState } from "../../text/address";
import { ago, count, counted, duration, money, reward, short } from "../../text/format";
import { IntegrityBadge, StatusBadge } from "./badges";
import { keepListState } from "./listState";
import styles from "./RolloutsView.module.css";

const STATUSES = ["queuing", "preparing", "running", "succeeded", "failed", "cancelled", "requeuing"] as const;
const HIDDEN_AT_FIRST = ["agent", "prompt_tokens", "attempts", "updated"];

function columnsOf(store: string, matches: Record<string, string>): Column<RolloutRow>[] {
  return [
    {
      id: "task",
      header: "Task",
      sortable: true,
      cell: (row) => (
        <Link
          to="/s/$store/r/$rollout"
          params={{ store, rollout: row.id }}
          className={styles.task}
          preload={false}
        >
          <Text>{row.task_id}</Text>
          <span className={styles.sample}>#{row.sample_index}</span>
        </Link>
      ),
    },
    { id: "status", header: "Outcome", sortable: true, cell: (row) => <StatusBadge row={row} /> },
    { id: "reward", header: "Reward", numeric: true, sortable: true, cell: (row) => reward(row.reward) },
    {
      id: "reason",
      header: "Reason",
      grows: true,
      cell: (row) => (
        <span className={styles.reason} title={matches[row.id] ?? row.reason ?? row.error?.message}>
          {matches[row.id] !== undefined ? (
            <span className={styles.match}>
              <Text>{matches[row.id] ?? ""}</Text>
            </span>
          ) : (
            <Text>{row.error?.message ?? row.reason ?? ""}</Text>
          )}
        </span>
      ),
    },
    { id: "integrity", header: "Integrity", cell: (row) => <IntegrityBadge status={row.integrity} reviewed={row.reviewed} /> },
    { id: "agent", header: "Agent", cell: (row) => <Text>{row.agent}</Text> },
    { id: "turns", header: "Turns", numeric: true, sortable: true, cell: (row) => count(row.turns) },
    { id: "prompt_tokens", header: "Prompt", numeric: true, sortable: true, cell: (row) => short(row.prompt_tokens) },
    { id: "completion_tokens", header: "Sampled", numeric: true, sortable: true, cell: (row) => short(row.completion_tokens) },
    { id: "cost", header: "Cost", numeric: true, sortable: true, cell: (row) => money(row.cost_usd) },
    { id: "seconds", header: "Time", numeric: true, sortable: true, cell: (row) => duration(row.seconds) },
    { id: "attempts", header: "Attempts", numeric: true, sortable: true, cell: (row) => count(row.attempts) },
    { id: "updated", header: "Updated", sortable: true, cell: (row) => ago(row.updated_at, Date.now() / 1000) },
  ];
}

/** Returns the filter that an address asks for, as the API takes it. */
function filterOf(url: UrlState): RolloutFilter {
  const filter: RolloutFilter = { limit: 200 };
  const { sort } = url;
  for (const name of ["q", "task", "run", "agent", "reason", "label"] as const) if (url[name]) filter[name] = url[name];
  const { status, outcome, integrity } = url;
  if (status !== undefined) filter.status = status as NonNullable<RolloutFilter["status"]>;
  if (outcome !== undefined) filter.outcome = outcome as NonNullable<RolloutFilter["outcome"]>;
  if (integrity !== undefined) filter.integrity = integrity as NonNullable<RolloutFilter["integrity"]>;
  if (sort !== undefined) {
    filter.sort = sort.replace(/^-/, "") as NonNullable<RolloutFilter["sort"]>;
    filter.descending = sort.startsWith("-");
  }
  return filter;
}

/** The rollouts of a run. */
export function RolloutsView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  useEffect(() => keepListState(store, url), [store, url]);
  const filter = useMemo(() => filterOf(url), [url]);
  const result = useInfiniteQuery(rolloutsQuery(store, filter));
  const { fetchNextPage, hasNextPage, isFetchingNextPage } = result;
  const pages = result.data?.pages;
  const rows = useMemo(() => pages?.flatMap((page) => page.rollouts) ?? [], [pages]);
  const matches = useMemo(
    () => Object.assign({}, ...(pages ?? []).map((page) => page.matches)) as Record<string, string>,
    [pages],
  );
  const columns = useMemo(() => columnsOf(store, matches), [store, matches]);
  const hidden = useMemo(() => (url["hide"] === undefined ? HIDDEN_AT_FIRST : splitList(url["hide"])), [url]);
  const readMore = useCallback(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  const total = pages?.[0]?.total;
  return (
    <>
      <Toolbar>
        <SearchField
          label={source.isServer ? "Search all transcripts" : "Search tasks"}
          value={url["q"]}
          onChange={(q) => setUrl({ q })}
        />
        <Choice
          label="Outcome"
          any="any"
          value={url["outcome"]}
          options={["solved", "unsolved", "ungraded"]}
          onChange={(outcome) => setUrl({ outcome })}
        />
        <Choice label="Status" any="any" value={url["status"]} options={STATUSES} onChange={(status) => setUrl({ status })} />
        <Choice
          label="Integrity"
          any="any"
          value={url["integrity"]}
          options={["clean", "suspicious", "forged"]}
          onChange={(integrity) => setUrl({ integrity })}
        />
        <label className={styles.field}>
          <span>Task</span>
          <input
            key={url["task"] ?? ""}
            defaultValue={url["task"] ?? ""}
            placeholder="any"
            onKeyDown={(event) => event.key === "Enter" && setUrl({ task: event.currentTarget.value })}
            onBlur={(event) => setUrl({ task: event.currentTarget.value })}
          />
        </label>
        <Checklist
          label="Columns"
          options={columns.map(({ id, header }) => ({ id, name: header, isChecked: !hidden.includes(id) }))}
          onToggle={(id) => setUrl({ hide: joinList(toggled(hidden, id)) ?? "none" })}
        />
        <span className={styles.total} role="status">
          {total === undefined ? "" : counted(total, "rollout")}
        </span>
      </Toolbar>
      <Loaded result={result}>
        {() =>
          rows.length === 0 ? (
            <Empty>No rollout meets the filter.</Empty>
          ) : (
            <DataTable
              label="Rollouts"
              columns={columns}
              rows={rows}
              rowKey={(row) => row.id}
              total={total}
              sort={url["sort"]}
              onSort={(sort) => setUrl({ sort })}
              hidden={hidden}
              selected={url["row"]}
              onSelect={(row) => setUrl({ row })}
              onOpen={(row) => void navigate({ to: "/s/$store/r/$rollout", params: { store, rollout: row.id } })}
              onEnd={readMore}
              isLoadingMore={isFetchingNextPage}
            />
          )
        }
      </Loaded>
    </>
  );
}
