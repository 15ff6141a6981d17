import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useCallback, useMemo } from "react";
import { type StateFilter, stateQuery, statesQuery } from "../../api/sessionQueries";
import type { StateRow } from "../../api/types";
import { Button, Toolbar } from "../../components/controls";
import { type Column, DataTable } from "../../components/DataTable";
import { Badge, Empty } from "../../components/marks";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { count, counted } from "../../text/format";
import { PlainBlock } from "../rollout/PlainBlock";
import styles from "./SessionsView.module.css";

const COLUMNS: Column<StateRow>[] = [
  { id: "position", header: "Turn", numeric: true, cell: (row) => count(row.position + 1) },
  { id: "branch", header: "Branch", cell: (row) => <Text>{row.branch}</Text> },
  { id: "model", header: "Model", grows: true, cell: (row) => <Text>{row.model ?? "–"}</Text> },
  { id: "fidelity", header: "Fidelity", cell: (row) => <Text>{row.fidelity}</Text> },
  { id: "tools", header: "Tools", numeric: true, cell: (row) => count(row.tool_calls) },
  {
    id: "errors",
    header: "Errors",
    numeric: true,
    cell: (row) => (row.tool_errors > 0 ? <Badge tone="warn">{row.tool_errors}</Badge> : "0"),
  },
  { id: "tests", header: "Tests", cell: (row) => <Text>{row.tests ?? "–"}</Text> },
  { id: "edits", header: "Edits", numeric: true, cell: (row) => count(row.edits) },
  { id: "feedback", header: "Feedback", cell: (row) => <Text>{row.feedback ?? "–"}</Text> },
];

const MESSAGES = 20;

function State({ store, state }: { store: string; state: string }) {
  const [url, setUrl] = useUrlState();
  const start = url["from"] === undefined ? -MESSAGES : Number(url["from"]) || 0;
  const result = useQuery(stateQuery(store, state, start));
  return (
    <Loaded result={result}>
      {(view) => (
        <>
          {view.first > 0 && (
            <Button onClick={() => setUrl({ from: String(Math.max(0, view.first - MESSAGES)) })}>
              {counted(view.first, "message")} before
            </Button>
          )}
          {view.messages.map((block, index) => (
            <PlainBlock key={index} block={block} />
          ))}
          {view.next !== null && (
            <Button onClick={() => setUrl({ from: String(view.next) })}>{counted(view.total - view.next, "message")} after</Button>
          )}
          <div className={styles.action} role="group" aria-label="What the model did">
            {view.action.map((block, index) => (
              <PlainBlock key={index} block={block} />
            ))}
          </div>
        </>
      )}
    </Loaded>
  );
}

/** States of conversations, each with what the model saw, what it did and what became of it. */
export function StatesView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const filter = useMemo(() => {
    const chosen: StateFilter = {};
    if (url["trace"]) chosen.trace = url["trace"];
    if (url["where"]) chosen.where = url["where"];
    return chosen;
  }, [url]);
  const result = useInfiniteQuery(statesQuery(store, filter));
  const { fetchNextPage, hasNextPage, isFetchingNextPage } = result;
  const rows = useMemo(() => result.data?.pages.flatMap((page) => page.states) ?? [], [result.data]);
  const readMore = useCallback(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  const selected = url["row"] ?? rows[0]?.state_id;
  return (
    <>
      <Toolbar>
        <input
          key={url["where"] ?? ""}
          type="search"
          className={styles.where}
          aria-label="SQL condition"
          placeholder="condition in SQL, as: tool_errors > 0 AND tests = 'failed'"
          defaultValue={url["where"] ?? ""}
          onKeyDown={(event) => event.key === "Enter" && setUrl({ where: event.currentTarget.value, row: undefined })}
        />
        {url["trace"] !== undefined && (
          <Button onClick={() => setUrl({ trace: undefined, row: undefined })}>Of all conversations</Button>
        )}
        <span className={styles.total} role="status">
          {result.data && counted(result.data.pages[0]?.total, "state")}
        </span>
      </Toolbar>
      <Loaded result={result}>
        {() =>
          rows.length === 0 ? (
            <Empty>No state meets the condition.</Empty>
          ) : (
            <div className={styles.split}>
              <div className={styles.list}>
                <DataTable
                  label="States"
                  columns={COLUMNS}
                  rows={rows}
                  rowKey={(row) => row.state_id}
                  total={result.data?.pages[0]?.total}
                  selected={selected}
                  onSelect={(row) => setUrl({ row, from: undefined })}
                  onOpen={(row) => setUrl({ row: row.state_id, from: undefined })}
                  onEnd={readMore}
                  isLoadingMore={isFetchingNextPage}
                />
              </div>
              <section className={styles.detail} aria-label="The state" tabIndex={0}>
                {selected !== undefined && <State store={store} state={selected} />}
              </section>
            </div>
          )
        }
      </Loaded>
    </>
  );
}
