import { useInfiniteQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import { useCallback, useMemo } from "react";
import { type SessionFilter, sessionsQuery } from "../../api/sessionQueries";
import type { SessionRow } from "../../api/types";
import { Button, SearchField, Toolbar } from "../../components/controls";
import { type Column, DataTable } from "../../components/DataTable";
import { Badge, Empty } from "../../components/marks";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { count, counted } from "../../text/format";
import styles from "./SessionsView.module.css";

const FILTERS = ["project", "agent", "format"] as const;

/** Counts by name in one line, without those that are 0. */
export function Counts({ counts }: { counts: Record<string, number> }) {
  const shown = Object.entries(counts).filter(([, amount]) => amount > 0);
  return <Text>{shown.length === 0 ? "–" : shown.map(([name, amount]) => `${amount} ${name}`).join(", ")}</Text>;
}

/** A value of a column; a click shows the conversations that have it. */
function Filter({ value, onChoose }: { value: string; onChoose: () => void }) {
  return (
    <button
      type="button"
      className={styles.filter}
      title="Only those"
      onClick={(event) => {
        event.stopPropagation(); // or the row would be selected, by an address without the filter
        onChoose();
      }}
    >
      <Text>{value}</Text>
    </button>
  );
}

function columnsOf(store: string, choose: (filter: SessionFilter) => void): Column<SessionRow>[] {
  return [
    {
      id: "session",
      header: "Conversation",
      cell: (row) => (
        <Link to="/s/$store/states" params={{ store }} search={{ trace: row.trace_id } as never} className={styles.name}>
          <Text>{row.session_id}</Text>
          {row.role !== "main" && <span className={styles.role}>{row.role}</span>}
        </Link>
      ),
    },
    {
      id: "project",
      header: "Project",
      grows: true,
      cell: ({ project }) => (project === null ? "–" : <Filter value={project} onChoose={() => choose({ project })} />),
    },
    {
      id: "agent",
      header: "Agent",
      cell: ({ agent, format, version }) => (
        <>
          <Filter value={agent ?? format} onChoose={() => choose(agent === null ? { format } : { agent })} />{" "}
          <Text>{version ?? ""}</Text>
        </>
      ),
    },
    { id: "began", header: "Began", cell: (row) => <Text>{row.began ?? "–"}</Text> },
    { id: "states", header: "States", numeric: true, cell: (row) => count(row.states) },
    { id: "tools", header: "Tool calls", numeric: true, cell: (row) => count(row.tool_calls) },
    {
      id: "errors",
      header: "Errors",
      numeric: true,
      cell: (row) => (row.tool_errors > 0 ? <Badge tone="warn">{row.tool_errors}</Badge> : "0"),
    },
    {
      id: "edits",
      header: "Edits that lasted",
      numeric: true,
      cell: (row) => (row.edits_survived === null ? count(row.edits) : `${row.edits_survived} of ${row.edits}`),
    },
    { id: "commits", header: "Commits", numeric: true, cell: (row) => count(row.commits) },
    { id: "tests", header: "Tests", cell: (row) => <Counts counts={row.tests} /> },
    { id: "feedback", header: "Feedback", cell: (row) => <Counts counts={row.feedback} /> },
    { id: "fidelity", header: "Fidelity", cell: (row) => <Counts counts={row.fidelity} /> },
    { id: "losses", header: "Not in the log", cell: (row) => <Counts counts={row.losses} /> },
  ];
}

/** Logged conversations by project and agent, with what became of their turns. */
export function SessionsView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  const filter = useMemo(() => {
    const chosen: SessionFilter = {};
    for (const name of ["q", ...FILTERS] as const) if (url[name]) chosen[name] = url[name];
    return chosen;
  }, [url]);
  const result = useInfiniteQuery(sessionsQuery(store, filter));
  const { fetchNextPage, hasNextPage, isFetchingNextPage } = result;
  const rows = useMemo(() => result.data?.pages.flatMap((page) => page.sessions) ?? [], [result.data]);
  const columns = useMemo(() => columnsOf(store, setUrl), [store, setUrl]);
  const readMore = useCallback(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  return (
    <>
      <Toolbar>
        <SearchField label="Search conversations" value={url["q"]} onChange={(q) => setUrl({ q })} />
        {FILTERS.filter((name) => url[name]).map((name) => (
          <Button key={name} aria-label={`Of any ${name}`} onClick={() => setUrl({ [name]: undefined })}>
            {name} <Text>{url[name] ?? ""}</Text> ✕
          </Button>
        ))}
        <span className={styles.total} role="status">
          {result.data && counted(result.data.pages[0]?.total, "conversation")}
        </span>
      </Toolbar>
      <Loaded result={result}>
        {() =>
          rows.length === 0 ? (
            <Empty>No conversation meets the filter.</Empty>
          ) : (
            <DataTable
              label="Conversations"
              columns={columns}
              rows={rows}
              rowKey={(row) => row.trace_id}
              total={result.data?.pages[0]?.total}
              selected={url["row"]}
              onSelect={(row) => setUrl({ row })}
              onOpen={(row) =>
                void navigate({ to: "/s/$store/states", params: { store }, search: { trace: row.trace_id } as never })
              }
              onEnd={readMore}
              isLoadingMore={isFetchingNextPage}
            />
          )
        }
      </Loaded>
    </>
  );
}
