import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { Link, useParams } from "@tanstack/react-router";
import { useEffect, useMemo } from "react";
import { useMayWrite, useVote } from "../../api/orders";
import { pairsQuery, pairVotesQuery } from "../../api/sessionQueries";
import type { PairView } from "../../api/types";
import { Button, Choice, Toolbar } from "../../components/controls";
import { useKeys } from "../../components/keyboard";
import { Badge, Empty, Key } from "../../components/marks";
import { useMore } from "../../components/More";
import { ErrorNote, Loaded, NotHere } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { useVoter } from "../../components/voter";
import { count, counted, percent } from "../../text/format";
import { PlainBlock } from "../rollout/PlainBlock";
import { alignedBlocks } from "./aligned";
import styles from "./PairsView.module.css";

const LABELS: Record<string, string> = { chosen: "left is better", rejected: "right is better", skip: "leave it out" };

/** A value of the evidence; a rollout's is a link to it. */
function Value({ store, value }: { store: string; value: unknown }) {
  if (typeof value !== "object" || value === null) return <Text>{String(value)}</Text>;
  const { rollout_id: rollout, ...rest } = value as Record<string, unknown>;
  return (
    <>
      {typeof rollout === "string" && (
        <>
          <Link to="/s/$store/r/$rollout" params={{ store, rollout }}>
            <Text>{rollout}</Text>
          </Link>{" "}
        </>
      )}
      <Text>{JSON.stringify(rollout === undefined ? value : rest)}</Text>
    </>
  );
}

function Evidence({ store, pair }: { store: string; pair: PairView }) {
  return (
    <dl className={styles.evidence}>
      {Object.entries(pair.evidence).map(([name, value]) => (
        <div key={name}>
          <dt>
            <Text>{name.replaceAll("_", " ")}</Text>
          </dt>
          <dd>
            <Value store={store} value={value} />
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** Preference pairs side by side, one at a time, with votes by key. */
export function PairsView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const origin = url["origin"] === "replay" ? "replay" : "rollouts";
  const result = useInfiniteQuery(pairsQuery(store, origin));
  const agreement = useQuery(pairVotesQuery(store)).data;
  const { fetchNextPage, hasNextPage, isFetchingNextPage } = result;
  const pairs = useMemo(() => result.data?.pages.flatMap((page) => page.pairs) ?? [], [result.data]);
  const found = pairs.findIndex((pair) => pair.id === url["pair"]);
  const isSought = url["pair"] !== undefined && found === -1;
  const at = Math.max(0, found);
  const pair = pairs[at];
  const vote = useVote(store);
  const mayWrite = useMayWrite();
  const [voter, setVoter] = useVoter();
  const votes = useMemo(
    () => agreement?.votes.filter((each) => each.subject_id === pair?.id) ?? [],
    [agreement, pair?.id],
  );
  const own = votes.find((each) => each.voter === voter.trim());
  const [shownVotes, more] = useMore(votes, 50);
  useEffect(() => {
    if ((isSought || at >= pairs.length - 5) && hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [at, isSought, pairs.length, hasNextPage, isFetchingNextPage, fetchNextPage]);

  const goTo = (index: number) => {
    const next = pairs[Math.min(pairs.length - 1, Math.max(0, index))];
    if (next !== undefined) setUrl({ pair: next.id });
  };
  const send = (label: string | null) => {
    if (pair === undefined || !mayWrite || voter.trim() === "") return;
    vote.mutate(
      { subject: "pair", subject_id: pair.id, voter: voter.trim(), label, note: "" },
      { onSuccess: () => label !== null && goTo(at + 1) },
    );
  };
  useKeys({
    j: () => goTo(at + 1),
    k: () => goTo(at - 1),
    ArrowLeft: () => send("chosen"),
    ArrowRight: () => send("rejected"),
    "0": () => send("skip"),
    Backspace: () => send(null),
  });
  const first = result.data?.pages[0];
  return (
    <>
      <Toolbar>
        <Choice
          label="Made of"
          value={origin}
          options={[
            ["rollouts", "rollouts of one task"],
            ["replay", "teachers' answers"],
          ]}
          onChange={(value) => setUrl({ origin: value === "replay" ? value : undefined, pair: undefined })}
        />
        <Button onClick={() => goTo(at - 1)} disabled={at === 0}>
          ← Pair
        </Button>
        <span className={styles.muted}>
          {pairs.length === 0 ? "" : `${at + 1} of ${count(pairs.length)}${hasNextPage ? "+" : ""}`}
        </span>
        <Button onClick={() => goTo(at + 1)} disabled={at >= pairs.length - 1}>
          Pair →
        </Button>
        {agreement !== undefined && (
          <span className={styles.muted}>
            {counted(agreement.votes.length, "vote")}
            {agreement.agreement !== null && `, voters agree in ${percent(agreement.agreement)}`}
          </span>
        )}
        {mayWrite && (
          <label className={styles.voter}>
            Vote as
            <input value={voter} maxLength={80} onChange={(event) => setVoter(event.target.value)} />
          </label>
        )}
      </Toolbar>
      {vote.error !== null && <ErrorNote error={vote.error} />}
      {isSought && !hasNextPage && pair !== undefined && (
        <NotHere what={`pair “${url["pair"]}”`} shown="the first pair is shown" />
      )}
      <Loaded result={result}>
        {() =>
          pair === undefined ? (
            <Empty>
              No pair: {counted(first?.compared, "comparison")} made.{" "}
              <Text>
                {Object.entries(first?.left_out ?? {})
                  .map(([reason, amount]) => `${amount} ${reason}`)
                  .join(", ")}
              </Text>
            </Empty>
          ) : (
            <div className={styles.page}>
              <details className={styles.prompt}>
                <summary>What was asked: {counted(pair.prompt_messages, "message")}</summary>
                {pair.prompt.map((block, index) => (
                  <PlainBlock key={index} block={block} />
                ))}
              </details>
              <div className={styles.sides}>
                <h2 className={styles.chosen}>Chosen</h2>
                <h2 className={styles.rejected}>Rejected</h2>
                {alignedBlocks(pair.chosen, pair.rejected).map((row, index) =>
                  row.map((block, side) => (
                    <div key={`${index} ${side}`} className={side === 0 ? styles.left : styles.right}>
                      {block !== null && <PlainBlock block={block} />}
                    </div>
                  )),
                )}
              </div>
              {mayWrite && (
                <div className={styles.votes}>
                  {Object.entries(LABELS).map(([label, name]) => (
                    <Button
                      key={label}
                      aria-pressed={own?.label === label}
                      disabled={vote.isPending || voter.trim() === ""}
                      onClick={() => send(label)}
                    >
                      <Key>{label === "chosen" ? "←" : label === "rejected" ? "→" : "0"}</Key> {name}
                    </Button>
                  ))}
                  {own !== undefined && <Button onClick={() => send(null)}>Take my vote back</Button>}
                  <span role="status">{vote.isSuccess && "Stored."}</span>
                </div>
              )}
              {votes.length > 0 && (
                <p className={styles.muted}>
                  {shownVotes.map((each) => (
                    <span key={each.voter}>
                      <Text>{each.voter}</Text>: <Badge>{each.label}</Badge>{" "}
                    </span>
                  ))}
                  {more}
                </p>
              )}
              <Evidence store={store} pair={pair} />
            </div>
          )
        }
      </Loaded>
    </>
  );
}
