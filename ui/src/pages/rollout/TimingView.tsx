import { useInfiniteQuery } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef } from "react";
import { callsQuery, type RolloutKey } from "../../api/queries";
import type { RolloutHead } from "../../api/types";
import { Empty, Stat, Stats } from "../../components/marks";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { duration, short } from "../../text/format";
import { phasesOf } from "./phases";
import styles from "./TimingView.module.css";

const ROW_HEIGHT = 24;

/** Where an attempt's time went: its phases, then its calls, each from its start to its end. */
export function TimingView({ body, head }: { body: RolloutKey; head: RolloutHead }) {
  const [, setUrl] = useUrlState();
  const result = useInfiniteQuery(callsQuery(body));
  const { hasNextPage, isFetchingNextPage, fetchNextPage } = result;
  useEffect(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  const calls = useMemo(() => result.data?.pages.flatMap((page) => page.calls) ?? [], [result.data]);
  const attempt = head.attempts.find((candidate) => candidate.id === head.attempt_id);
  const scroller = useRef<HTMLDivElement>(null);
  const virtualizer = useVirtualizer({
    count: calls.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 10,
  });
  const phases = attempt === undefined ? [] : phasesOf(attempt.started_at, attempt.timings);
  const waiting = useMemo(() => calls.reduce((sum, call) => sum + call.ended_at - call.started_at, 0), [calls]);
  const start = Math.min(attempt?.started_at ?? Infinity, ...calls.slice(0, 1).map((call) => call.started_at));
  const lastCall = calls.reduce((latest, call) => Math.max(latest, call.ended_at), start);
  const lastPhase = phases.reduce((latest, phase) => Math.max(latest, phase.started_at + phase.seconds), start);
  const end = Math.max(attempt?.ended_at ?? start, lastCall, lastPhase, start + 0.001);
  const span = end - start;
  const percentOf = (moment: number) => ((moment - start) / span) * 100;
  if (attempt === undefined && calls.length === 0) return <Empty>Nothing was timed for this rollout.</Empty>;
  return (
    <>
      <div className={styles.figures}>
        <Stats>
          <Stat label="From start to end" value={duration(span)} />
          <Stat label="Time in calls" value={duration(waiting)} note="those at once are counted each" />
        </Stats>
      </div>
      {phases.length > 0 && (
        <ol className={styles.phases} aria-label="Phases of the attempt">
          {phases.map((phase) => (
            <li key={phase.name} className={styles.row}>
              <span className={styles.name}>
                <Text>{phase.name}</Text>
              </span>
              <svg viewBox="0 0 100 10" preserveAspectRatio="none" className={styles.lane} aria-hidden="true">
                <rect
                  x={percentOf(phase.started_at)}
                  width={Math.max(0.2, percentOf(phase.started_at + phase.seconds) - percentOf(phase.started_at))}
                  y="1"
                  height="8"
                  className={styles.phase}
                />
              </svg>
              <span className={styles.figure} />
              <span className={styles.figure}>{duration(phase.seconds)}</span>
            </li>
          ))}
        </ol>
      )}
      <Loaded result={result}>
        {() => (
          <div ref={scroller} className={styles.scroller} tabIndex={0} role="region" aria-label="Calls over time">
            <ol className={styles.list} style={{ height: virtualizer.getTotalSize() }}>
              {virtualizer.getVirtualItems().map((item) => {
                const call = calls[item.index];
                if (call === undefined) return null;
                const left = percentOf(call.started_at);
                const width = Math.max(0.2, percentOf(call.ended_at) - left);
                return (
                  <li key={call.call_id} style={{ transform: `translateY(${item.start}px)` }}>
                    <button
                      type="button"
                      className={styles.row}
                      onClick={() => setUrl({ view: undefined, turn: String(call.index + 1) })}
                      title={`${call.prompt_tokens} tokens of prompt, ${call.completion_tokens} sampled`}
                    >
                      <span className={styles.name}>
                        {call.index + 1} <Text>{call.tools.join(", ") || call.role}</Text>
                      </span>
                      <svg viewBox="0 0 100 10" preserveAspectRatio="none" className={styles.lane} aria-hidden="true">
                        <rect x={left} width={width} y="1" height="8" className={call.status === "ok" ? styles.bar : styles.bad} />
                      </svg>
                      <span className={styles.figure}>{short(call.completion_tokens)}</span>
                      <span className={styles.figure}>{duration(call.ended_at - call.started_at)}</span>
                    </button>
                  </li>
                );
              })}
            </ol>
          </div>
        )}
      </Loaded>
    </>
  );
}
