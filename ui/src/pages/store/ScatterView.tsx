import { useInfiniteQuery } from "@tanstack/react-query";
import { useNavigate, useParams } from "@tanstack/react-router";
import { useEffect, useMemo } from "react";
import { rolloutsQuery } from "../../api/queries";
import type { RolloutRow } from "../../api/types";
import { Choice, Toolbar } from "../../components/controls";
import { Empty } from "../../components/marks";
import { Loaded } from "../../components/Query";
import { useUrlState } from "../../components/useUrlState";
import { count, counted, duration, money, short } from "../../text/format";
import { ticksOf } from "./scatter";
import styles from "./ScatterView.module.css";

/** Of more rollouts, these first ones are drawn: each is an element of the page. */
const MOST_POINTS = 2_000;

const AXES = {
  completion_tokens: { name: "tokens sampled", format: short },
  prompt_tokens: { name: "tokens of prompts", format: short },
  turns: { name: "turns", format: count },
  seconds: { name: "time", format: duration },
  cost_usd: { name: "cost", format: money },
} as const;

type Axis = keyof typeof AXES;

/** Lanes of unsolved and solved rollouts, so that points with the same reward do not hide one another. */
function laneOf(row: RolloutRow, index: number): number {
  const spread = ((index * 7919) % 100) / 100;
  return ((row.reward ?? 0) >= 1 ? 8 : 58) + spread * 32;
}

/** What rollouts cost against what they were rewarded with. */
export function ScatterView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  const axis: Axis = (url["x"] ?? "") in AXES ? (url["x"] as Axis) : "completion_tokens";
  const result = useInfiniteQuery(rolloutsQuery(store, { limit: 1000 }));
  const { hasNextPage, isFetchingNextPage, fetchNextPage } = result;
  const all = useMemo(() => result.data?.pages.flatMap((page) => page.rollouts) ?? [], [result.data]);
  useEffect(() => {
    if (hasNextPage && !isFetchingNextPage && all.length < MOST_POINTS) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage, all.length]);
  const graded = useMemo(() => all.slice(0, MOST_POINTS).filter((row) => row.reward !== null), [all]);
  const most = Math.max(1e-9, ...graded.map((row) => row[axis] ?? 0));
  const ticks = ticksOf(most);
  return (
    <>
      <Toolbar>
        <Choice
          label="Reward against"
          value={axis}
          options={Object.entries(AXES).map(([value, { name }]) => [value, name] as const)}
          onChange={(x) => setUrl({ x })}
        />
        <span className={styles.note}>
          {counted(graded.length, "graded rollout")}
          {(result.data?.pages[0]?.total ?? 0) > MOST_POINTS && `, of the first ${count(MOST_POINTS)}`}
        </span>
      </Toolbar>
      <Loaded result={result}>
        {() =>
          graded.length === 0 ? (
            <Empty>No rollout is graded so far.</Empty>
          ) : (
            <div className={styles.plot}>
              <span className={styles.solved}>solved</span>
              <span className={styles.unsolved}>unsolved</span>
              <svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label={`Reward against ${AXES[axis].name}`}>
                <line x1="0" x2="100" y1="50" y2="50" className={styles.rule} />
                {ticks.map((tick) => (
                  <line key={tick} x1={(tick / most) * 98} x2={(tick / most) * 98} y1="0" y2="100" className={styles.rule} />
                ))}
              </svg>
              {graded.map((row, index) => (
                <button
                  key={row.id}
                  type="button"
                  tabIndex={-1}
                  className={(row.reward ?? 0) >= 1 ? styles.good : styles.bad}
                  style={{ left: `${((row[axis] ?? 0) / most) * 98}%`, top: `${laneOf(row, index)}%` }}
                  title={`${row.task_id} #${row.sample_index}: ${AXES[axis].format(row[axis])}`}
                  aria-label={`${row.task_id} sample ${row.sample_index}`}
                  onClick={() => void navigate({ to: "/s/$store/r/$rollout", params: { store, rollout: row.id } })}
                />
              ))}
              {ticks.map((tick) => (
                <span key={tick} className={styles.tick} style={{ left: `${(tick / most) * 98}%` }}>
                  {AXES[axis].format(tick)}
                </span>
              ))}
            </div>
          )
        }
      </Loaded>
    </>
  );
}
