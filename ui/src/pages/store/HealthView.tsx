import { useQuery } from "@tanstack/react-query";
import { Link, useParams } from "@tanstack/react-router";
import { healthQuery } from "../../api/queries";
import type { StoreHealth } from "../../api/types";
import { Badge, Empty } from "../../components/marks";
import { useMore } from "../../components/More";
import { Card } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { TableHead } from "../../components/TableHead";
import { Text } from "../../components/Text";
import { count, duration } from "../../text/format";
import { phaseName } from "../rollout/phases";
import styles from "./HealthView.module.css";

function Amounts({ amounts, name, search }: { amounts: Record<string, number>; name: string; search?: string }) {
  const { store } = useParams({ from: "/s/$store" });
  const rows = Object.entries(amounts).sort(([, one], [, other]) => other - one);
  if (rows.length === 0) return <Empty>None.</Empty>;
  return (
    <table className={styles.table}>
      <TableHead names={[name, "Number"]} />
      <tbody>
        {rows.map(([text, amount]) => (
          <tr key={text}>
            <td>
              {search === undefined ? (
                <Text>{text}</Text>
              ) : (
                <Link to="/s/$store" params={{ store }} search={{ [search]: text, outcome: "unsolved" } as never}>
                  <Text>{text}</Text>
                </Link>
              )}
            </td>
            <td>{count(amount)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

const WAITS_FOR: Record<StoreHealth["open"][number]["status"], string> = {
  queuing: "a free place",
  requeuing: "a free place, after a fault",
  preparing: "its files and its sandbox",
  running: "the agent, then the grader",
  succeeded: "",
  failed: "",
  cancelled: "",
};

/** What waits for what, while a run is on its way. */
function Open({ store, rows }: { store: string; rows: StoreHealth["open"] }) {
  return (
    <Card title="What waits for what">
      <table className={styles.table}>
        <TableHead names={["Rollouts", "Number", "Wait for", "The longest"]} />
        <tbody>
          {rows.map((row) => (
            <tr key={row.status}>
              <td>
                <Link to="/s/$store" params={{ store }} search={{ status: row.status } as never}>
                  {row.status}
                </Link>
              </td>
              <td>{count(row.rollouts)}</td>
              <td>{WAITS_FOR[row.status]}</td>
              <td>
                <Link to="/s/$store/r/$rollout" params={{ store, rollout: row.oldest_id }}>
                  {duration(row.oldest_s)}
                </Link>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Card>
  );
}

function Workers({ workers }: { workers: StoreHealth["workers"] }) {
  const [shown, more] = useMore(workers, 100);
  return (
    <Card title="Who works">
      <table className={styles.table}>
        <TableHead names={["Process", "Executes", "At most", "Heard of"]} />
        <tbody>
          {shown.map((worker) => (
            <tr key={worker.id}>
              <td>
                <Text>{worker.id}</Text> {!worker.alive && <Badge tone="bad">lost</Badge>}
              </td>
              <td>{count(worker.held)}</td>
              <td>{count(worker.capacity || null)}</td>
              <td>{duration(worker.silent_s)} ago</td>
            </tr>
          ))}
        </tbody>
      </table>
      {more}
    </Card>
  );
}

/** How a run goes: what waits, where time goes, what failed at which boundary, and why rollouts were not solved. */
export function HealthView() {
  const { store } = useParams({ from: "/s/$store" });
  const result = useQuery(healthQuery(store));
  return (
    <Loaded result={result}>
      {(health) => (
        <div className={styles.page}>
          {health.open.length > 0 && <Open store={store} rows={health.open} />}
          {health.workers.length > 0 && <Workers workers={health.workers} />}
          <Card title="Phases of attempts">
            {health.phases.length === 0 ? (
              <Empty>No attempt has ended so far.</Empty>
            ) : (
              <table className={styles.table}>
                <TableHead names={["Phase", "Attempts", "Median", "99th percentile"]} />
                <tbody>
                  {health.phases.map((phase) => (
                    <tr key={phase.phase}>
                      <td>
                        <Text>{phaseName(phase.phase)}</Text>
                      </td>
                      <td>{count(phase.attempts)}</td>
                      <td>{duration(phase.p50)}</td>
                      <td>{duration(phase.p99)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            )}
          </Card>
          <Card title="Faults of the infrastructure" note="Attempts are retried; none of these is a reward of 0.">
            {health.faults.length === 0 ? (
              <Empty>There was none.</Empty>
            ) : (
              <table className={styles.table}>
                <TableHead names={["Boundary", "Attempts", "Given up", "One of the messages"]} />
                <tbody>
                  {health.faults.map((fault) => (
                    <tr key={fault.boundary}>
                      <td>{fault.boundary}</td>
                      <td>{count(fault.attempts)}</td>
                      <td>{count(fault.given_up)}</td>
                      <td>
                        <Text>{fault.example}</Text>
                      </td>
                    </tr>
                  ))}
                </tbody>
              </table>
            )}
          </Card>
          <Card title="Why rollouts were not solved">
            <Amounts amounts={health.unsolved} name="Reason" search="reason" />
          </Card>
          <Card title="Calls by policy version">
            <Amounts amounts={health.versions} name="Version" />
          </Card>
        </div>
      )}
    </Loaded>
  );
}
