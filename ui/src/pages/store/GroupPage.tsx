import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import { useEffect } from "react";
import { groupQuery } from "../../api/queries";
import type { TaskGroup } from "../../api/types";
import { useKeys } from "../../components/keyboard";
import { Empty } from "../../components/marks";
import { Page, Trail } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useListKeys } from "../../components/useListKeys";
import { useUpKey } from "../../components/useUpKey";
import { useUrlState } from "../../components/useUrlState";
import { visible } from "../../text/escapes";
import { count, reward } from "../../text/format";
import { StatusBadge } from "./badges";
import styles from "./GroupPage.module.css";

/** Selects a turn of one rollout by keys, and opens it there; what is selected is in the address. */
function useCellKeys(store: string, members: TaskGroup["members"]): { turn: number; column: number } {
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  const turn = url["turn"] === undefined ? -1 : Number(url["turn"]) - 1;
  const column = Math.min(Math.max(0, members.length - 1), Math.max(0, Number(url["column"] ?? 0) || 0));
  const member = members[column];
  useListKeys({
    count: Math.max(0, ...members.map((each) => each.turns.length)),
    at: turn,
    select: (index) => setUrl({ turn: String(index + 1) }),
    open: () => {
      const own = member?.turns[turn];
      if (member === undefined || own === undefined) return;
      const params = { store, rollout: member.row.id };
      void navigate({ to: "/s/$store/r/$rollout", params, search: { turn: String(own.index + 1) } as never });
    },
  });
  const moveTo = (next: number) => setUrl({ column: String(next), turn: url["turn"] ?? "1" });
  useKeys({ ArrowRight: () => moveTo(Math.min(members.length - 1, column + 1)), ArrowLeft: () => moveTo(Math.max(0, column - 1)) });
  useEffect(() => {
    document.querySelector("[data-chosen]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [turn, column]);
  return { turn, column };
}

/** All rollouts of one task side by side, turn by turn, with the first turn in which solved and unsolved ones part. */
export function GroupPage() {
  const { store, task } = useParams({ from: "/s/$store/task/$task" });
  const result = useQuery(groupQuery(store, task));
  const chosen = useCellKeys(store, result.data?.members ?? []);
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
                {group.total > group.members.length &&
                  (group.next === null
                    ? ` The first ${count(group.members.length)} of ${count(group.total)} rollouts are compared.`
                    : " Reading more rollouts…")}
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
                        {group.members.map(({ row, turns }, column) => {
                          const own = turns[turn];
                          if (own === undefined) return <td key={row.id} className={styles.over} />;
                          const isShared = group.members.some(
                            (other) => other.row.id !== row.id && other.turns[turn]?.digest === own.digest,
                          );
                          return (
                            <td
                              key={row.id}
                              className={isShared ? styles.shared : undefined}
                              data-chosen={(turn === chosen.turn && column === chosen.column) || undefined}
                            >
                              <Link
                                to="/s/$store/r/$rollout"
                                params={{ store, rollout: row.id }}
                                search={{ turn: String(own.index + 1) } as never}
                                title={visible(own.action)}
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
