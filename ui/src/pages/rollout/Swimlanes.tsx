import { useInfiniteQuery } from "@tanstack/react-query";
import { type MouseEvent, useEffect, useMemo } from "react";
import { callsQuery, type RolloutKey } from "../../api/queries";
import type { CallLine, RolloutHead } from "../../api/types";
import { Text } from "../../components/Text";
import { duration } from "../../text/format";
import { barsPath, type Lane, lanesOf, nearestCall } from "./lanes";
import styles from "./Swimlanes.module.css";

/** The calls of each lane, in their order. */
function callsByLane(lanes: Lane[], calls: CallLine[]): CallLine[][] {
  const laneOf = new Map(lanes.flatMap((lane, index) => lane.branches.map((branch) => [branch.name, index] as const)));
  const own: CallLine[][] = lanes.map(() => []);
  for (const call of calls) own[laneOf.get(call.branch) ?? -1]?.push(call);
  return own;
}

const spansOf = (calls: CallLine[]) => calls.map((call): [number, number] => [call.started_at, call.ended_at]);

/** The session, subagents, compactions and retries of a rollout over the same time; a cut is where a session was summed up. */
export function Swimlanes(props: {
  body: RolloutKey;
  head: RolloutHead;
  selected: number | null;
  onSelect: (turn: number) => void;
}) {
  const { branches } = props.head;
  const result = useInfiniteQuery(callsQuery(props.body));
  const { hasNextPage, isFetchingNextPage, fetchNextPage } = result;
  useEffect(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  const lanes = useMemo(() => lanesOf(branches), [branches]);
  const start = branches.reduce((first, branch) => Math.min(first, branch.started_at), Infinity);
  const end = branches.reduce((last, branch) => Math.max(last, branch.ended_at), start + 0.001);
  const share = (moment: number) => ((moment - start) / (end - start)) * 100;
  const calls = useMemo(
    () => callsByLane(lanes, result.data?.pages.flatMap((page) => page.calls) ?? []),
    [lanes, result.data],
  );
  const paths = useMemo(
    () =>
      calls.map((own) => ({
        ok: barsPath(spansOf(own.filter((call) => call.status === "ok")), share, 1, 8),
        failed: barsPath(spansOf(own.filter((call) => call.status !== "ok")), share, 1, 8),
      })),
    // What `share` depends on are the two moments.
    // eslint-disable-next-line react-hooks/exhaustive-deps
    [calls, start, end],
  );
  const selectAt = (event: MouseEvent<SVGSVGElement>, own: CallLine[]) => {
    const box = event.currentTarget.getBoundingClientRect();
    const call = nearestCall(own, start + ((event.clientX - box.left) / box.width) * (end - start));
    if (call !== undefined) props.onSelect(call.index);
  };
  return (
    <ol className={styles.lanes} aria-label={`Branches over ${duration(end - start)}`}>
      {lanes.map((lane, index) => {
        const [first, ...later] = lane.branches;
        const own = calls[index] ?? [];
        const selected = own.filter((call) => call.index === props.selected);
        return (
          <li key={first?.name} className={lane.superseded ? styles.superseded : undefined}>
            <button
              type="button"
              className={styles.name}
              title={`${lane.role}, ${lane.calls} calls: ${lane.branches.slice(0, 20).map((branch) => branch.origin).join(", ")}`}
              onClick={() => first !== undefined && props.onSelect(first.first_turn)}
            >
              <span className={styles.indent} style={{ width: Math.min(lane.depth, 6) * 12 }} />
              <Text>{lane.superseded ? `${lane.role}, asked again` : lane.role}</Text>
              <span className={styles.calls}>{lane.calls}</span>
            </button>
            <svg
              viewBox="0 0 100 10"
              preserveAspectRatio="none"
              className={styles.lane}
              aria-hidden="true"
              onClick={(event) => selectAt(event, own)}
            >
              <path d={barsPath(lane.branches.map((each) => [each.started_at, each.ended_at]), share, 4, 2)} className={styles.span} />
              <path d={paths[index]?.ok} className={styles.call} />
              <path d={paths[index]?.failed} className={styles.failed} />
              <path d={barsPath(later.map((each) => [each.started_at, each.started_at]), share, 0, 10)} className={styles.cut} />
              <path d={barsPath(spansOf(selected), share, 0, 10)} className={styles.selected} />
            </svg>
          </li>
        );
      })}
    </ol>
  );
}
