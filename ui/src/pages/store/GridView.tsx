import { useInfiniteQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef } from "react";
import { joinedTasks } from "../../api/parts";
import { tasksQuery } from "../../api/queries";
import type { TaskSample } from "../../api/types";
import { SearchField, Toolbar } from "../../components/controls";
import { Empty } from "../../components/marks";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useListKeys } from "../../components/useListKeys";
import { useUrlState } from "../../components/useUrlState";
import { count, counted } from "../../text/format";
import styles from "./GridView.module.css";

const ROW_HEIGHT = 28;

/** Of more samples of a task, these first ones have a cell. */
const SHOWN_SAMPLES = 200;

type Mark = { sign: string; name: string; style: string | undefined };

function markOf(sample: TaskSample): Mark {
  if (sample.integrity === "suspicious" || sample.integrity === "forged") {
    return { sign: "!", name: sample.integrity, style: styles.suspicious };
  }
  if (sample.reward !== null) {
    return sample.reward >= 1
      ? { sign: "✓", name: "solved", style: styles.solved }
      : { sign: "✗", name: "unsolved", style: styles.unsolved };
  }
  if (sample.status === "failed") return { sign: "–", name: "failed", style: styles.failed };
  return { sign: "·", name: sample.status, style: styles.open };
}

/** Tasks as rows, their samples as cells: a look at all rollouts of a run at once. */
export function GridView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const result = useInfiniteQuery(tasksQuery(store, url["q"]));
  const { fetchNextPage, hasNextPage, isFetchingNextPage } = result;
  const tasks = useMemo(() => joinedTasks(result.data?.pages.flatMap((page) => page.tasks) ?? []), [result.data]);
  const scroller = useRef<HTMLDivElement>(null);
  const virtualizer = useVirtualizer({
    count: tasks.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 15,
  });
  const navigate = useNavigate();
  const at = tasks.findIndex((task) => task.task_id === url["task"]);
  useListKeys({
    count: tasks.length,
    at,
    select: (index) => {
      setUrl({ task: tasks[index]?.task_id });
      virtualizer.scrollToIndex(index);
    },
    open: () => {
      const task = tasks[at];
      if (task !== undefined) void navigate({ to: "/s/$store/task/$task", params: { store, task: task.task_id } });
    },
  });
  const items = virtualizer.getVirtualItems();
  const last = items.at(-1)?.index ?? -1;
  useEffect(() => {
    if (last >= tasks.length - 20 && hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [last, tasks.length, hasNextPage, isFetchingNextPage, fetchNextPage]);
  return (
    <>
      <Toolbar>
        <SearchField label="Filter by task" value={url["q"]} onChange={(q) => setUrl({ q })} />
        <ul className={styles.legend} aria-label="Marks">
          <li className={styles.solved}>✓ solved</li>
          <li className={styles.unsolved}>✗ unsolved</li>
          <li className={styles.suspicious}>! suspicious</li>
          <li className={styles.failed}>– failed</li>
        </ul>
      </Toolbar>
      <Loaded result={result}>
        {(data) =>
          tasks.length === 0 ? (
            <Empty>There is no task.</Empty>
          ) : (
            <div ref={scroller} className={styles.scroller} tabIndex={0} role="region" aria-label={counted(data.pages[0]?.total, "task")}>
              <ol className={styles.grid} style={{ height: virtualizer.getTotalSize() }}>
                {items.map((item) => {
                  const task = tasks[item.index];
                  if (task === undefined) return null;
                  return (
                    <li key={task.task_id} className={`${styles.row} ${item.index === at ? styles.selected : ""}`} style={{ transform: `translateY(${item.start}px)` }}>
                      <Link to="/s/$store/task/$task" params={{ store, task: task.task_id }} className={styles.task}>
                        <Text>{task.task_id}</Text>
                      </Link>
                      <span className={styles.share}>
                        {task.solved}/{task.graded}
                      </span>
                      <span className={styles.samples}>
                        {task.samples.slice(0, SHOWN_SAMPLES).map((sample) => {
                          const mark = markOf(sample);
                          return (
                            <Link
                              key={sample.rollout_id}
                              to="/s/$store/r/$rollout"
                              params={{ store, rollout: sample.rollout_id }}
                              className={mark.style}
                              title={`sample ${sample.sample_index}, ${sample.agent}: ${mark.name}`}
                              aria-label={`sample ${sample.sample_index}: ${mark.name}`}
                            >
                              {mark.sign}
                            </Link>
                          );
                        })}
                        {task.samples.length > SHOWN_SAMPLES && ` and ${count(task.samples.length - SHOWN_SAMPLES)} more`}
                      </span>
                    </li>
                  );
                })}
              </ol>
            </div>
          )
        }
      </Loaded>
    </>
  );
}
