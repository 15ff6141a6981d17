import { useInfiniteQuery } from "@tanstack/react-query";
import { useEffect, useMemo } from "react";
import { callsQuery, type RolloutKey } from "../../api/queries";
import type { RolloutHead } from "../../api/types";
import { Text } from "../../components/Text";
import { duration } from "../../text/format";
import styles from "./Swimlanes.module.css";

const MARKS_PER_LANE = 300;

/** One lane for each branch of the calls: the session, subagents, compactions, retries, over the same time. */
export function Swimlanes(props: {
  body: RolloutKey;
  head: RolloutHead;
  selected: number | null;
  onSelect: (turn: number) => void;
}) {
  const { head, selected } = props;
  const result = useInfiniteQuery(callsQuery(props.body));
  const { hasNextPage, isFetchingNextPage, fetchNextPage } = result;
  useEffect(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  const calls = useMemo(() => result.data?.pages.flatMap((page) => page.calls) ?? [], [result.data]);
  const start = Math.min(...head.branches.map((branch) => branch.started_at));
  const end = Math.max(...head.branches.map((branch) => branch.ended_at), start + 0.001);
  const share = (moment: number) => ((moment - start) / (end - start)) * 100;
  return (
    <ol className={styles.lanes} aria-label={`Branches over ${duration(end - start)}`}>
      {head.branches.map((branch) => {
        const own = calls.filter((call) => call.branch === branch.name);
        // Of very many calls every n-th is drawn: a lane has no room for more.
        const step = Math.ceil(own.length / MARKS_PER_LANE) || 1;
        return (
          <li key={branch.name} className={branch.superseded ? styles.superseded : undefined}>
            <button
              type="button"
              className={styles.name}
              title={`${branch.role}, ${branch.origin}: ${branch.calls} calls`}
              onClick={() => props.onSelect(branch.first_turn)}
            >
              <span className={styles.indent} style={{ width: branch.depth * 12 }} />
              <Text>{branch.role}</Text>
              <span className={styles.calls}>{branch.calls}</span>
            </button>
            <svg viewBox="0 0 100 10" preserveAspectRatio="none" className={styles.lane} aria-hidden="true">
              <rect
                x={share(branch.started_at)}
                width={Math.max(0.3, share(branch.ended_at) - share(branch.started_at))}
                y="4"
                height="2"
                className={styles.span}
              />
              {own
                .filter((_, index) => index % step === 0)
                .map((call) => (
                  <rect
                    key={call.call_id}
                    x={share(call.started_at)}
                    width={Math.max(0.25, share(call.ended_at) - share(call.started_at))}
                    y="1"
                    height="8"
                    className={call.index === selected ? styles.selected : call.status === "ok" ? styles.call : styles.failed}
                    onClick={() => props.onSelect(call.index)}
                  />
                ))}
            </svg>
          </li>
        );
      })}
    </ol>
  );
}
