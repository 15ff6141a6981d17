import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useEffect, useRef } from "react";
import { rolloutQuery, type RolloutKey, TURNS_PER_CHUNK, turnsQuery } from "../../api/queries";
import { source } from "../../api/source";
import type { RolloutHead } from "../../api/types";
import { Choice } from "../../components/controls";
import { useKeys } from "../../components/keyboard";
import { Badge, Stat, Stats } from "../../components/marks";
import { useMore } from "../../components/More";
import { Page, Tabs, Trail } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUpKey } from "../../components/useUpKey";
import { useUrlState } from "../../components/useUrlState";
import { count, duration, money, reward, short } from "../../text/format";
import { IntegrityBadge, StatusBadge } from "../store/badges";
import { lastListState } from "../store/listState";
import { IntegrityPage } from "./IntegrityPage";
import { PatchPage } from "./PatchPage";
import { RawView } from "./RawView";
import { TimingView } from "./TimingView";
import { TokensView } from "./TokensView";
import { Transcript } from "./Transcript";
import styles from "./RolloutPage.module.css";

const VIEWS: [string, string][] = [
  ["transcript", "Transcript"],
  ["tokens", "Tokens"],
  ["patch", "Patch and tests"],
  ["timing", "Timing"],
  ["calls", "Raw calls"],
  ["integrity", "Integrity"],
];

/** The views that there is something for: an exported file has no raw calls, and tokens only where they were taken. */
function viewsOf({ store, rollout }: RolloutKey): [string, string][] {
  const base = `/api/stores/${store}`;
  const needs: Record<string, string> = { tokens: `${base}/rollouts/${rollout}/tokens`, calls: `${base}/calls` };
  return VIEWS.filter(([name]) => needs[name] === undefined || source.holds(needs[name]));
}

function Figures({ head }: { head: RolloutHead }) {
  const { row } = head;
  return (
    <Stats>
      {row !== null && <Stat label="Reward" value={reward(row.reward)} />}
      <Stat label="Turns" value={head.unread > 0 ? `${count(head.turns)}, reading` : count(head.turns)} />
      {row !== null && (
        <>
          <Stat label="Tokens" value={`${short(row.prompt_tokens)} → ${short(row.completion_tokens)}`} />
          <Stat label="Time" value={duration(row.seconds)} />
          <Stat label="Cost" value={money(row.cost_usd)} />
        </>
      )}
    </Stats>
  );
}

/** Why the rollout ended as it did, and what was noticed about how the agent of the shown attempt worked. */
function Outcome({ head, chosen }: { head: RolloutHead; chosen: string | undefined }) {
  const { row, verdict } = head;
  const attempt = head.attempts.find((candidate) => candidate.id === head.attempt_id);
  const [findings, more] = useMore(attempt?.findings ?? [], 10);
  const decided = row?.error?.message ?? row?.reason ?? "";
  const why = chosen === undefined ? decided : (attempt?.error?.message ?? verdict?.reason ?? "");
  return (
    <>
      {why !== "" && (
        <p className={styles.reason}>
          <Text>{why}</Text>
        </p>
      )}
      {findings.map((finding, index) => (
        <p key={index} className={styles.reason}>
          <Badge tone="warn">{finding.kind}</Badge> <Text>{finding.message}</Text>
        </p>
      ))}
      {more}
    </>
  );
}

function View({ view, body, head }: { view: string; body: RolloutKey; head: RolloutHead }) {
  switch (view) {
    case "tokens":
      return <TokensView body={body} head={head} />;
    case "patch":
      return <PatchPage body={body} head={head} />;
    case "timing":
      return <TimingView body={body} head={head} />;
    case "calls":
      return <RawView body={body} />;
    case "integrity":
      return <IntegrityPage body={body} head={head} />;
    default:
      return <Transcript body={body} head={head} />;
  }
}

/** Asks for the turns that are shown first while the rollout's head is still on its way. */
function useFirstTurns({ store, rollout, attempt }: RolloutKey, turn: string | undefined, isWanted: boolean) {
  const client = useQueryClient();
  const first = useRef(Math.floor((Math.max(1, Number(turn) || 1) - 1) / TURNS_PER_CHUNK));
  useEffect(() => {
    if (isWanted) void client.prefetchQuery(turnsQuery({ store, rollout, attempt }, first.current));
  }, [client, store, rollout, attempt, isWanted]);
}

/** Reads the turns again once all calls are read: a later call decides whether an earlier one was asked again. */
function useRereadTurns({ store, rollout }: RolloutKey, isReading: boolean) {
  const client = useQueryClient();
  const wasReading = useRef(false);
  useEffect(() => {
    if (wasReading.current && !isReading) {
      void client.invalidateQueries({
        queryKey: ["store", store, "rollout", rollout],
        predicate: (query) => query.queryKey[4] !== "head" && query.queryKey[5] !== "head",
      });
    }
    wasReading.current = isReading;
  }, [client, store, rollout, isReading]);
}

/** One rollout, in several views of one attempt. */
export function RolloutPage() {
  const { store, rollout } = useParams({ from: "/s/$store/r/$rollout" });
  const [url, setUrl] = useUrlState();
  const body: RolloutKey = { store, rollout, attempt: url["attempt"] };
  const result = useQuery(rolloutQuery(body));
  const view = url["view"] ?? "transcript";
  const views = viewsOf(body);
  useFirstTurns(body, url["turn"], view === "transcript");
  useRereadTurns(body, (result.data?.unread ?? 0) > 0);
  useUpKey("/s/$store", { store }, lastListState(store));
  useKeys(
    Object.fromEntries(
      VIEWS.map(([name], index) => [
        String(index + 1),
        () => views.some(([each]) => each === name) && setUrl({ view: name, from: undefined }),
      ]),
    ),
  );
  const row = result.data?.row ?? null;
  return (
    <Page
      title={row === null ? rollout : `${row.task_id} #${row.sample_index}`}
      heading={
        <>
          <Text>{row === null ? rollout : row.task_id}</Text>
          {row !== null && (
            <>
              <span className={styles.sample}>#{row.sample_index}</span> <StatusBadge row={row} />{" "}
              {row.integrity !== "clean" && <IntegrityBadge status={row.integrity} reviewed={row.reviewed} />}
            </>
          )}
        </>
      }
      trail={
        <>
          <Trail to="/">Runs</Trail>
          <Trail to="/s/$store" params={{ store }} search={lastListState(store)}>
            Run
          </Trail>
          {row !== null && (
            <Trail to="/s/$store/task/$task" params={{ store, task: row.task_id }}>
              Task
            </Trail>
          )}
        </>
      }
      aside={result.data && <Figures head={result.data} />}
    >
      <Loaded result={result}>
        {(head) => (
          <>
            <Outcome head={head} chosen={url["attempt"]} />
            <Tabs label="Views of the rollout">
              {views.map(([name, label]) => (
                <a
                  key={name}
                  href="#content"
                  aria-current={view === name ? "page" : undefined}
                  onClick={(event) => {
                    event.preventDefault();
                    setUrl({ view: name, from: undefined });
                  }}
                >
                  {label}
                </a>
              ))}
              {head.attempts.length > 1 && (
                <span className={styles.attempt}>
                  <Choice
                    label="Attempt"
                    value={url["attempt"] ?? head.attempt_id ?? undefined}
                    options={head.attempts.map((attempt) => [attempt.id, `${attempt.number}, ${attempt.status}`] as const)}
                    onChange={(attempt) => setUrl({ attempt, turn: undefined, call: undefined })}
                  />
                </span>
              )}
            </Tabs>
            <View view={view} body={body} head={head} />
          </>
        )}
      </Loaded>
    </Page>
  );
}
