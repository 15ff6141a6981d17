import { useQuery } from "@tanstack/react-query";
import { Link, useParams } from "@tanstack/react-router";
import { useMayWrite, usePause } from "../../api/orders";
import { gatewayQuery } from "../../api/queries";
import type { GatewayView as Gateway } from "../../api/types";
import { Button, Toolbar } from "../../components/controls";
import { Badge, Empty, Stat, Stats } from "../../components/marks";
import { useMore } from "../../components/More";
import { Card } from "../../components/Page";
import { ErrorNote, Loaded } from "../../components/Query";
import { TableHead } from "../../components/TableHead";
import { Text } from "../../components/Text";
import { bytes, count, duration, moment, money, short } from "../../text/format";
import styles from "./HealthView.module.css";

/** The calls without an answer yet, and how long each one has waited. */
function Calls({ store, gateway }: { store: string; gateway: Gateway }) {
  const [calls, more] = useMore(gateway.calls, 100);
  return (
    <Card title="Calls in flight">
      {calls.length === 0 ? (
        <Empty>No call is in flight.</Empty>
      ) : (
        <table className={styles.table}>
          <TableHead names={["Client", "Session", "Model", "State", "Since", "Request", "Sent so far"]} />
          <tbody>
            {calls.map((call) => (
              <tr key={call.id}>
                <td>
                  <Link to="/s/$store/r/$rollout" params={{ store, rollout: call.attempt_id }}>
                    <Text>{call.attempt_id.replace(/^client-/, "")}</Text>
                  </Link>
                </td>
                <td>
                  <Text>{[call.session_id ?? "–", call.agent_id].filter(Boolean).join(" ")}</Text>
                </td>
                <td>
                  <Text>{call.model}</Text> via <Text>{call.backend}</Text>
                </td>
                <td>
                  <Badge tone={call.generating ? "accent" : "muted"}>{call.generating ? "generating" : "waiting"}</Badge>
                </td>
                <td>{duration(Math.max(0, (gateway.read_at ?? 0) - call.started_at))}</td>
                <td>{bytes(call.request_bytes)}</td>
                <td>{call.sent_bytes === 0 ? "–" : bytes(call.sent_bytes)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {more}
    </Card>
  );
}

/** A gateway that runs as a service: what is in flight, its clients and their budgets; it can be paused. */
export function GatewayView() {
  const { store } = useParams({ from: "/s/$store" });
  const result = useQuery(gatewayQuery(store));
  const [clients, more] = useMore(result.data?.clients ?? [], 100);
  const pause = usePause(store);
  const mayWrite = useMayWrite();
  return (
    <Loaded result={result}>
      {(gateway) => (
        <div className={styles.page}>
          <Card
            title={
              <>
                {gateway.reachable ? (
                  <Badge tone={gateway.paused ? "warn" : "good"}>{gateway.paused ? "paused" : "running"}</Badge>
                ) : (
                  <Badge>not reachable</Badge>
                )}{" "}
                <Text>{gateway.url ?? ""}</Text>
              </>
            }
            note={<Text>{gateway.note}</Text>}
          >
            {gateway.reachable && (
              <Stats>
                <Stat label="In flight" value={count(gateway.in_flight)} />
                <Stat label="Waiting" value={count(gateway.waiting)} />
                <Stat label="Policy version" value={<Text>{gateway.version ?? "–"}</Text>} />
              </Stats>
            )}
            {gateway.reachable && mayWrite && (
              <Toolbar>
                <Button disabled={pause.isPending} onClick={() => pause.mutate(!gateway.paused)}>
                  {gateway.paused ? "Let it go on" : "Pause"}
                </Button>
              </Toolbar>
            )}
            {pause.error !== null && <ErrorNote error={pause.error} />}
          </Card>
          {gateway.reachable && <Calls store={store} gateway={gateway} />}
          <Card title="Clients" note="Keys are stored as hashes only.">
            {gateway.clients.length === 0 ? (
              <Empty>No key was made.</Empty>
            ) : (
              <table className={styles.table}>
                <TableHead names={["Client", "Calls", "Tokens", "Spend", "Budget", "Expires"]} />
                <tbody>
                  {clients.map((client) => (
                    <tr key={client.attempt_id}>
                      <td>
                        <Link to="/s/$store/r/$rollout" params={{ store, rollout: client.attempt_id }}>
                          <Text>{client.name}</Text>
                        </Link>{" "}
                        {client.revoked && <Badge tone="bad">revoked</Badge>}
                      </td>
                      <td>{count(client.calls)}</td>
                      <td>
                        {short(client.prompt_tokens)} → {short(client.completion_tokens)}
                      </td>
                      <td>{money(client.cost_usd)}</td>
                      <td>
                        <Text>
                          {Object.entries(client.budget)
                            .map(([name, value]) => `${name.replaceAll("_", " ")} ${JSON.stringify(value)}`)
                            .join(", ") || "none"}
                        </Text>
                      </td>
                      <td>{moment(client.expires_at)}</td>
                    </tr>
                  ))}
                </tbody>
              </table>
            )}
            {more}
          </Card>
        </div>
      )}
    </Loaded>
  );
}
