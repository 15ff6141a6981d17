import { useQuery } from "@tanstack/react-query";
import { Link, useParams } from "@tanstack/react-router";
import { groupQuery } from "../../api/queries";
import { Empty } from "../../components/marks";
import { Page, Trail } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUpKey } from "../../components/useUpKey";
import { reward } from "../../text/format";
import { StatusBadge } from "./badges";
import styles from "./GroupPage.module.css";

/** All rollouts of one task side by side, turn by turn, with the first turn in which solved and unsolved ones part. */
export function GroupPage() {
  const { store, task } = useParams({ from: "/s/$store/task/$task" });
  const result = useQuery(groupQuery(store, task));
  useUpKey("/s/$store", { store });
  return (
    <Page
      title={task}
      heading={<Text>{task}</Text>}
      trail={
        <>
          <Trail to="/">Runs</Trail>
          <Trail to="/s/$store" params={{ store }}>
            Run
          </Trail>
        </>
      }
    >
      <Loaded result={result}>
        {(group) => {
          const longest = Math.max(0, ...group.members.map((member) => member.turns.length));
          if (group.members.length === 0) return <Empty>The task has no rollout.</Empty>;
          return (
            <>
              <p className={styles.note}>
                {group.parting === null
                  ? "No turn tells the solved rollouts from the unsolved ones."
                  : `Solved and unsolved rollouts part in turn ${group.parting + 1}.`}
                {group.cut && " Only the first turns of long rollouts are compared."}
              </p>
              <div className={styles.scroller} tabIndex={0} role="region" aria-label="Rollouts of the task">
                <table className={styles.table}>
                  <thead>
                    <tr>
                      <th scope="col">Turn</th>
                      {group.members.map(({ row, advantage }) => (
                        <th key={row.id} scope="col">
                          <Link to="/s/$store/r/$rollout" params={{ store, rollout: row.id }}>
                            Sample {row.sample_index}
                          </Link>{" "}
                          <StatusBadge row={row} />
                          <span className={styles.advantage}>
                            reward {reward(row.reward)}
                            {advantage !== null && `, advantage ${advantage > 0 ? "+" : ""}${advantage.toFixed(2)}`}
                          </span>
                        </th>
                      ))}
                    </tr>
                  </thead>
                  <tbody>
                    {Array.from({ length: longest }, (_, turn) => (
                      <tr key={turn} className={turn === group.parting ? styles.parting : undefined}>
                        <th scope="row">{turn + 1}</th>
                        {group.members.map(({ row, turns }) => {
                          const own = turns[turn];
                          if (own === undefined) return <td key={row.id} className={styles.over} />;
                          const isShared = group.members.some(
                            (other) => other.row.id !== row.id && other.turns[turn]?.digest === own.digest,
                          );
                          return (
                            <td key={row.id} className={isShared ? styles.shared : undefined}>
                              <Link
                                to="/s/$store/r/$rollout"
                                params={{ store, rollout: row.id }}
                                search={{ turn: String(own.index + 1) } as never}
                                title={own.action}
                              >
                                <Text>{own.action}</Text>
                              </Link>
                            </td>
                          );
                        })}
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            </>
          );
        }}
      </Loaded>
    </Page>
  );
}
