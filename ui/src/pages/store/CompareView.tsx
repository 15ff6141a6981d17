import { useQuery } from "@tanstack/react-query";
import { Link, useParams } from "@tanstack/react-router";
import { compareQuery, storesQuery } from "../../api/queries";
import { Choice, Toolbar } from "../../components/controls";
import { Badge, Empty, Stat, Stats } from "../../components/marks";
import { useMore } from "../../components/More";
import { Loaded } from "../../components/Query";
import { TableHead } from "../../components/TableHead";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { count, percent } from "../../text/format";
import health from "./HealthView.module.css";
import styles from "./CompareView.module.css";

function points(share: number | null): string {
  return share === null ? "–" : `${share > 0 ? "+" : ""}${(share * 100).toFixed(1)} points`;
}

function Comparison({ before, after }: { before: string; after: string }) {
  const result = useQuery(compareQuery(before, after));
  const [tasks, more] = useMore(result.data?.tasks ?? []);
  return (
    <Loaded result={result}>
      {(compared) => (
        <div className={styles.page}>
          <Stats>
            <Stat
              label="Difference of solve rates"
              value={compared.paired_tasks === 0 ? "–" : points(compared.difference)}
              tone={compared.low !== null && compared.low > 0 ? "good" : compared.high !== null && compared.high < 0 ? "bad" : "muted"}
              note={
                compared.paired_tasks === 0
                  ? "the runs have no task in common"
                  : `95 %: ${points(compared.low)} to ${points(compared.high)}`
              }
            />
            <Stat label="p" value={compared.p_value === null ? "–" : compared.p_value.toPrecision(2)} note="two-sided, by task" />
            <Stat label="Tasks in both" value={count(compared.paired_tasks)} />
          </Stats>
          <p className={styles.note}>
            <Link to="/report" search={{ stores: `${before},${after}` } as never}>
              Report of both
            </Link>
          </p>
          <table className={health.table}>
            <TableHead names={["Task", "Other run", "This run", "Change"]} />
            <tbody>
              {tasks.map((task) => {
                const rate = (solved: number, graded: number) => (graded === 0 ? null : solved / graded);
                const [one, other] = [
                  rate(task.before_solved, task.before_graded),
                  rate(task.after_solved, task.after_graded),
                ];
                const change = one === null || other === null ? null : other - one;
                return (
                  <tr key={task.task_id}>
                    <td>
                      <Link to="/s/$store/task/$task" params={{ store: after, task: task.task_id }}>
                        <Text>{task.task_id}</Text>
                      </Link>
                    </td>
                    <td>
                      {task.before_solved}/{task.before_graded}
                    </td>
                    <td>
                      {task.after_solved}/{task.after_graded}
                    </td>
                    <td>
                      {change === null ? (
                        "–"
                      ) : (
                        <Badge tone={change > 0 ? "good" : change < 0 ? "bad" : "muted"}>
                          {change > 0 ? "+" : ""}
                          {percent(change)}
                        </Badge>
                      )}
                    </td>
                  </tr>
                );
              })}
            </tbody>
          </table>
          {more}
        </div>
      )}
    </Loaded>
  );
}

/** This run beside another one, task by task. */
export function CompareView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const stores = useQuery(storesQuery);
  const other = url["with"];
  return (
    <>
      <Toolbar>
        <Choice
          label="Compare with"
          any="choose a run"
          value={other}
          options={(stores.data?.stores ?? [])
            .filter((each) => each.id !== store && each.kind === "run" && each.graded > 0)
            .map((each) => [each.id, each.name] as const)}
          onChange={(value) => setUrl({ with: value })}
        />
      </Toolbar>
      {other === undefined ? (
        <Empty>Choose the run that this one is compared with.</Empty>
      ) : (
        <Comparison before={other} after={store} />
      )}
    </>
  );
}
