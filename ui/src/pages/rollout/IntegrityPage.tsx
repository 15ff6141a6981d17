import { useState } from "react";
import { useIntegrityOrder, useMayWrite, useVote } from "../../api/orders";
import type { RolloutKey } from "../../api/queries";
import type { RolloutHead } from "../../api/types";
import { Button, Toolbar } from "../../components/controls";
import { Badge, Empty } from "../../components/marks";
import { useMore } from "../../components/More";
import { Card } from "../../components/Page";
import { ErrorNote } from "../../components/Query";
import { Text } from "../../components/Text";
import { useVoter } from "../../components/voter";
import { moment } from "../../text/format";
import { IntegrityBadge } from "../store/badges";
import styles from "./IntegrityPage.module.css";

const LABELS = ["include", "exclude"] as const;

function Decision({ store, rollout }: { store: string; rollout: string }) {
  const order = useIntegrityOrder(store);
  const [note, setNote] = useState("");
  const send = (status: "clean" | "suspicious") =>
    order.mutate({ rollout_id: rollout, status, note }, { onSuccess: () => setNote("") });
  return (
    <Card title="Your decision" note="It takes the place of the grader's in lists and exports; the evidence stays.">
      <form className={styles.form} onSubmit={(event) => event.preventDefault()}>
        <label>
          Why
          <textarea value={note} maxLength={2000} rows={3} onChange={(event) => setNote(event.target.value)} />
        </label>
        <div className={styles.buttons}>
          <Button onClick={() => send("clean")} disabled={note.trim() === "" || order.isPending}>
            It is clean
          </Button>
          <Button onClick={() => send("suspicious")} disabled={note.trim() === "" || order.isPending}>
            It is suspicious
          </Button>
          <span role="status">{order.isSuccess && "Stored."}</span>
        </div>
      </form>
      {order.error !== null && <ErrorNote error={order.error} />}
    </Card>
  );
}

function Labels({ store, head }: { store: string; head: RolloutHead }) {
  const vote = useVote(store);
  const [voter, setVoter] = useVoter();
  const mayWrite = useMayWrite();
  const own = head.votes.find((each) => each.voter === voter.trim());
  const [votes, more] = useMore(head.votes, 100);
  return (
    <Card title="Labels" note="Exports leave out what is labelled “exclude”.">
      {mayWrite && (
        <Toolbar>
          <label className={styles.voter}>
            As
            <input value={voter} maxLength={80} onChange={(event) => setVoter(event.target.value)} />
          </label>
          {LABELS.map((label) => (
            <Button
              key={label}
              aria-pressed={own?.label === label}
              disabled={voter.trim() === "" || vote.isPending}
              onClick={() =>
                vote.mutate({
                  subject: "rollout",
                  subject_id: head.id,
                  voter: voter.trim(),
                  label: own?.label === label ? null : label,
                  note: "",
                })
              }
            >
              {label === "include" ? "Include" : "Exclude"}
            </Button>
          ))}
        </Toolbar>
      )}
      {head.votes.length === 0 ? (
        <p className={styles.none}>Nobody has labelled this rollout.</p>
      ) : (
        <ul>
          {votes.map((each) => (
            <li key={each.voter}>
              <Badge>{each.label}</Badge> by <Text>{each.voter}</Text>, {moment(each.voted_at)}
              {each.note !== "" && (
                <>
                  : <Text>{each.note}</Text>
                </>
              )}
            </li>
          ))}
        </ul>
      )}
      {more}
      {vote.error !== null && <ErrorNote error={vote.error} />}
    </Card>
  );
}

/** Whether a patch was made to deceive the grader: its evidence, and what people decide. */
export function IntegrityPage({ body, head }: { body: RolloutKey; head: RolloutHead }) {
  const mayWrite = useMayWrite();
  const { verdict } = head;
  const [evidences, more] = useMore(verdict?.integrity.evidence ?? [], 100);
  return (
    <div className={styles.page}>
      {verdict === null ? (
        <Empty>The rollout was not graded, so there is nothing to judge.</Empty>
      ) : (
        <Card
          title={
            <>
              <IntegrityBadge status={verdict.integrity.status} reviewed={verdict.integrity.reviewed} />{" "}
              <Text>{verdict.integrity.reason.replace(/^reviewed: /, "")}</Text>
            </>
          }
          note={
            <>
              Protection: {verdict.protection}
              {verdict.unprotected !== "" && (
                <>
                  {" ("}
                  <Text>{verdict.unprotected}</Text>)
                </>
              )}
            </>
          }
        >
          {verdict.integrity.evidence.length === 0 ? (
            <p className={styles.none}>The grader has no evidence against the patch.</p>
          ) : (
            <ol className={styles.evidence}>
              {evidences.map((evidence, index) => (
                <li key={index}>
                  <p>
                    <Badge tone="warn">{evidence.rule}</Badge>{" "}
                    <code>
                      <Text>{evidence.path ?? ""}</Text>
                      {(evidence.line ?? 0) > 0 && `:${evidence.line}`}
                    </code>
                  </p>
                  {evidence.text !== "" && (
                    <pre>
                      <Text>{evidence.text ?? ""}</Text>
                    </pre>
                  )}
                </li>
              ))}
            </ol>
          )}
          {more}
        </Card>
      )}
      {verdict !== null && mayWrite && <Decision store={body.store} rollout={head.id} />}
      {head.row !== null && <Labels store={body.store} head={head} />}
    </div>
  );
}
