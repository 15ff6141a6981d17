import { type QueryClient, useQuery, useQueryClient } from "@tanstack/react-query";
import { memo, useEffect, useMemo, useRef, useState } from "react";
import { type RolloutKey, tokensQuery } from "../../api/queries";
import { source } from "../../api/source";
import type { RolloutHead, SegmentView, TokenPage } from "../../api/types";
import { Button, Choice, Toolbar } from "../../components/controls";
import { useKeys } from "../../components/keyboard";
import { Empty, Key } from "../../components/marks";
import { useMore } from "../../components/More";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { ABSENT, count, percent } from "../../text/format";
import { leastProbable, nextImprobable, sampledLogprobs, shade, surprise, tokenLabel } from "../../text/tokens";
import styles from "./TokensView.module.css";

const COLOURS = [
  ["logprob", "logprob"],
  ["version", "policy version"],
  ["advantage", "advantage"],
  ["ratio", "trainer's ratio"],
] as const;

type Colour = (typeof COLOURS)[number][0];

/** How many calls one keypress searches beyond the shown one. */
const CALLS_SEARCHED = 50;

/** Returns the class that colours a token; tokens of the prompt have none. */
function classOf(page: TokenPage, index: number, colour: Colour): string {
  if (page.mask[index] !== 1) return styles["prompt"] ?? "";
  const trainer = page.trainer.at(-1);
  if (colour === "version") {
    const version = page.versions[index] ?? -1;
    return (version < 0 ? styles["unknown"] : styles[`version${version % 4}`]) ?? "";
  }
  if (colour === "advantage" || colour === "ratio") {
    const value = colour === "advantage" ? trainer?.advantages[index] : trainer?.ratios[index];
    const step = shade(value == null ? null : colour === "ratio" ? Math.log(value) : value);
    return (step === null ? styles["unknown"] : styles[step]) ?? "";
  }
  const step = surprise(page.logprobs[index]);
  return (step === null ? styles["unknown"] : styles[`surprise${step}`]) ?? "";
}

/** Returns where to begin so that a call's sampled tokens are shown, if they are not on the page; else null. */
function nearSampled(page: TokenPage): number | null {
  const end = page.start + page.ids.length;
  return page.call_start + 20 > end && page.call_start < page.total ? Math.max(0, page.call_start - 200) : null;
}

/** Returns the page of a call on which its sampled tokens begin. */
async function sampledPage(client: QueryClient, body: RolloutKey, call: string): Promise<TokenPage> {
  const page = await client.fetchQuery(tokensQuery(body, call, "call", null));
  const jump = nearSampled(page);
  return jump === null ? page : client.fetchQuery(tokensQuery(body, call, "call", jump));
}

/** Returns the least probable of a page's tokens, null where no logprob is known. */
function leastOf(call: string | undefined, page: TokenPage, logprobs: (number | null)[]) {
  const index = leastProbable(logprobs);
  return index === null ? null : { call, token: page.start + index, logprob: logprobs[index] ?? 0 };
}

const Tokens = memo(function Tokens(props: {
  page: TokenPage;
  colour: Colour;
  selected: number | null;
  onSelect: (index: number) => void;
}) {
  const { page, colour, selected } = props;
  return (
    <div
      className={styles.tokens}
      role="region"
      aria-label="Tokens"
      tabIndex={0}
      onClick={(event) => {
        const index = (event.target as HTMLElement).closest<HTMLElement>("[data-token]")?.dataset["token"];
        if (index !== undefined) props.onSelect(Number(index));
      }}
    >
      {page.ids.map((id, index) => {
        const text = page.texts[index];
        const label = text === undefined ? String(id) : tokenLabel(text);
        const isCut = index > 0 && page.mask[index] !== page.mask[index - 1];
        return (
          <span key={index}>
            {isCut && <span className={styles.cut} aria-hidden="true" />}
            <span
              data-token={index}
              className={`${text === undefined ? styles.id : ""} ${styles.token} ${classOf(page, index, colour)} ${index === selected ? styles.selected : ""}`}
            >
              <Text>{label}</Text>
            </span>
            {text?.includes("\n") === true && <br />}
          </span>
        );
      })}
    </div>
  );
});

function Details({ page, index }: { page: TokenPage; index: number | null }) {
  if (index === null || page.ids[index] === undefined) {
    return (
      <p className={styles.hint}>
        Choose a token, or go to the next improbable one with <Key>n</Key>, the one before with <Key>p</Key>.
      </p>
    );
  }
  const logprob = page.logprobs[index];
  const version = page.versions[index] ?? -1;
  const rows: [string, string][] = [
    ["Position", count(page.start + index)],
    ["Id", String(page.ids[index])],
    ["Text", page.texts[index] === undefined ? ABSENT : JSON.stringify(page.texts[index])],
    ["Sampled", page.mask[index] === 1 ? "yes" : "no, part of the prompt"],
    ["Logprob", logprob == null ? ABSENT : logprob.toFixed(4)],
    ["Probability", logprob == null ? ABSENT : percent(Math.exp(logprob), 2)],
    ["Policy version", version < 0 ? ABSENT : (page.policy_versions[version] ?? ABSENT)],
  ];
  for (const update of page.trainer) {
    const figure = (value: number | null | undefined) => (value == null ? ABSENT : value.toFixed(4));
    rows.push(
      [`Step ${update.step}: trainer's logprob`, figure(update.logprobs[index])],
      [`Step ${update.step}: ratio`, figure(update.ratios[index])],
      [`Step ${update.step}: advantage`, figure(update.advantages[index])],
    );
  }
  return (
    <dl className={styles.details} aria-live="polite">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            <Text>{value}</Text>
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** Segments with the indexes of their first calls in `segment_calls`. */
function segmentsOf(head: RolloutHead): { segment: SegmentView; first: number }[] {
  let first = 0;
  return head.segments.map((segment) => {
    const row = { segment, first };
    first += segment.calls;
    return row;
  });
}

/** The tokens of one call: what was sampled with which probability, by which weights, and what was trained on. */
export function TokensView({ body, head }: { body: RolloutKey; head: RolloutHead }) {
  const [url, setUrl] = useUrlState();
  const client = useQueryClient();
  const searches = useRef(0);
  const [note, setNote] = useState("");
  const calls = head.segment_calls;
  const call = url["call"] ?? calls[0];
  const segments = useMemo(() => segmentsOf(head), [head]);
  const [shownSegments, moreSegments] = useMore(segments, 100);
  const scope = url["scope"] === "segment" ? "segment" : "call";
  const start = url["from"] === undefined ? null : Number(url["from"]) || 0;
  const colour = (url["colour"] ?? "logprob") as Colour;
  const first = useQuery({ ...tokensQuery(body, call ?? "", scope, start), enabled: call !== undefined });
  // What the call sampled may come after a long prompt: without an index in the address the page begins near it.
  const jump = start === null && first.data !== undefined ? nearSampled(first.data) : null;
  const second = useQuery({ ...tokensQuery(body, call ?? "", scope, jump), enabled: call !== undefined && jump !== null });
  const result = jump === null ? first : second;
  const page = result.data;
  const selected = page === undefined || url["position"] === undefined ? null : Number(url["position"]) - page.start;
  const at = call === undefined ? -1 : calls.indexOf(call);

  const select = (index: number | null) => {
    if (page !== undefined && index !== null) setUrl({ position: String(page.start + index) });
  };
  const goTo = (index: number) => {
    setNote("");
    searches.current += 1; // a search for an improbable token ends
    if (calls[index] !== undefined) setUrl({ call: calls[index], position: undefined, from: undefined });
  };
  const improbable = async (direction: 1 | -1) => {
    if (page === undefined) return;
    const search = ++searches.current;
    const sampled = sampledLogprobs(page, scope);
    const next = nextImprobable(sampled, selected ?? (direction === 1 ? -1 : sampled.length), direction);
    if (next !== null) {
      setNote("");
      select(next);
      return;
    }
    // The least probable token of those that are looked at, for when none is improbable.
    let least = leastOf(call, page, sampled);
    const others = Array.from({ length: CALLS_SEARCHED }, (_, index) => calls[at + direction * (index + 1)]);
    for (const other of others) {
      if (other === undefined || at === -1) break;
      const otherPage = await sampledPage(client, body, other);
      if (search !== searches.current) return; // another key was pressed meanwhile
      const logprobs = sampledLogprobs(otherPage, "call");
      const found = nextImprobable(logprobs, direction === 1 ? -1 : logprobs.length, direction);
      if (found !== null) {
        setNote("");
        setUrl({ call: other, position: String(otherPage.start + found), from: undefined });
        return;
      }
      const candidate = leastOf(other, otherPage, logprobs);
      if (candidate !== null && (least === null || candidate.logprob < least.logprob)) least = candidate;
    }
    const limit = others.every((other) => other !== undefined) ? `, in ${CALLS_SEARCHED} calls` : "";
    if (selected !== null || least === null) {
      setNote(`No token less probable than 5% ${direction === 1 ? "after" : "before"} this one${limit}.`);
      return;
    }
    setNote(`No token less probable than 5% ${direction === 1 ? "from here on" : "up to here"}${limit}: this is the least probable one.`);
    setUrl({ call: least.call, position: String(least.token), from: undefined });
  };
  const findImprobable = (direction: 1 | -1) => {
    improbable(direction).catch((error: unknown) => setNote(error instanceof Error ? error.message : String(error)));
  };
  useKeys({
    n: () => findImprobable(1),
    p: () => findImprobable(-1),
    ArrowRight: () => select(Math.min((page?.ids.length ?? 1) - 1, (selected ?? -1) + 1)),
    ArrowLeft: () => select(Math.max(0, (selected ?? 1) - 1)),
    j: () => goTo(at + 1),
    k: () => goTo(at - 1),
  });
  useEffect(() => {
    if (page === undefined) return;
    const index = selected ?? page.mask.indexOf(1);
    const block = selected === null ? "center" : "nearest";
    document.querySelector(`[data-token="${index}"]`)?.scrollIntoView({ block });
  }, [selected, page]);

  if (call === undefined) return <Empty>The backend of this rollout gave no token ids.</Empty>;
  return (
    <>
      <Toolbar>
        <Button onClick={() => goTo(at - 1)} disabled={at <= 0}>
          ← Call
        </Button>
        <span className={styles.where}>
          {at === -1 ? "" : `${at + 1} of ${calls.length}`}
        </span>
        <Button onClick={() => goTo(at + 1)} disabled={at === -1 || at >= calls.length - 1}>
          Call →
        </Button>
        {source.isServer && (
          <Choice
            label="Show"
            value={scope}
            options={[
              ["call", "this call"],
              ["segment", "its whole segment"],
            ]}
            onChange={(value) => setUrl({ scope: value === "segment" ? value : undefined, from: undefined })}
          />
        )}
        <Choice label="Colour by" value={colour} options={COLOURS} onChange={(value) => setUrl({ colour: value })} />
        <Button onClick={() => findImprobable(-1)}>← Improbable</Button>
        <Button onClick={() => findImprobable(1)}>Improbable →</Button>
        {colour === "logprob" && (
          <ul className={styles.legend} aria-label="Colours by probability">
            <li className={styles.surprise0}>&gt; 37%</li>
            <li className={styles.surprise1}>37%</li>
            <li className={styles.surprise2}>14%</li>
            <li className={styles.surprise3}>5%</li>
            <li className={styles.surprise4}>&lt; 2%</li>
          </ul>
        )}
      </Toolbar>
      <ol className={styles.segments} aria-label="Segments">
        {shownSegments.map(({ segment, first }) => (
          <li key={segment.index}>
            <button
              type="button"
              aria-pressed={first <= at && at < first + segment.calls}
              title={`begins here: ${segment.reason}`}
              onClick={() => goTo(first)}
            >
              <strong>Segment {segment.index + 1}</strong> {segment.reason}
              <span>
                {count(segment.sampled)} of {count(segment.tokens)} sampled
              </span>
            </button>
          </li>
        ))}
        {moreSegments !== null && <li>{moreSegments}</li>}
      </ol>
      <Loaded result={result}>
        {(data) => (
          <div className={styles.split}>
            <div className={styles.main}>
              <p className={styles.note}>
                Tokens {count(data.start)} to {count(data.start + data.ids.length)} of {count(data.total)}
                {data.tokenizer === null ? (
                  "; no tokenizer is known, so their ids are shown"
                ) : (
                  <span title={data.tokenizer}>, by {data.tokenizer.slice(data.tokenizer.lastIndexOf("/") + 1)}</span>
                )}
              </p>
              <Tokens page={data} colour={colour} selected={selected} onSelect={select} />
              <div className={styles.pages}>
                {start !== null && start > 0 && (
                  <Button onClick={() => setUrl({ from: String(Math.max(0, start - 2000)) })}>Tokens before</Button>
                )}
                {data.next !== null && <Button onClick={() => setUrl({ from: String(data.next) })}>More tokens</Button>}
              </div>
            </div>
            <aside className={styles.aside} aria-label="The chosen token">
              <p className={styles.hint} role="status">
                {note}
              </p>
              <Details page={data} index={selected} />
            </aside>
          </div>
        )}
      </Loaded>
    </>
  );
}
