import { useQueries } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { memo, useEffect, useMemo, useRef } from "react";
import { type RolloutKey, TURNS_PER_CHUNK, turnsQuery } from "../../api/queries";
import type { BlockView, RolloutHead, TurnView } from "../../api/types";
import { Button, Toolbar } from "../../components/controls";
import { useKeys } from "../../components/keyboard";
import { Badge, Empty } from "../../components/marks";
import { ErrorNote, NotHere } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { joinList, splitList, toggled } from "../../text/address";
import { duration, money, short } from "../../text/format";
import { Block } from "./Block";
import { type Kind, KINDS, kindOf, summaryOf } from "./conversation";
import { Swimlanes } from "./Swimlanes";
import styles from "./Transcript.module.css";

const ESTIMATED_HEIGHT = 180;

type TurnProps = {
  turn: TurnView;
  body: RolloutKey;
  tools: Map<string, string>;
  without: string;
  isFolded: boolean;
  isSelected: boolean;
  onFold: (index: number) => void;
  onTokens: (call: string) => void;
};

const Turn = memo(function Turn(props: TurnProps) {
  const { turn, body, tools, isFolded, isSelected } = props;
  const without = splitList(props.without) as Kind[];
  const shown = (block: BlockView) => !without.includes(kindOf(block));
  const seconds = turn.ended_at - turn.started_at;
  const isMain = turn.role === "main" || turn.role === "";
  return (
    <article className={`${styles.turn} ${isSelected ? styles.selected : ""}`} aria-label={`Turn ${turn.index + 1}`}>
      <header className={styles.head}>
        <button
          type="button"
          className={styles.fold}
          aria-expanded={!isFolded}
          onClick={() => props.onFold(turn.index)}
        >
          <span aria-hidden="true">{isFolded ? "▸" : "▾"}</span> Turn {turn.index + 1}
        </button>
        {!isMain && <Badge tone="accent">{turn.role}</Badge>}
        {turn.superseded && <Badge tone="muted">asked again</Badge>}
        {turn.alternative && <Badge tone="muted">not taken</Badge>}
        {turn.status !== "ok" && <Badge tone="bad">{turn.status}</Badge>}
        {isFolded && (
          <span className={styles.summary}>
            <Text>{summaryOf(turn)}</Text>
          </span>
        )}
        <span className={styles.figures}>
          <span title="tokens of the prompt, and sampled">
            {short(turn.usage.prompt_tokens)} → {short(turn.usage.completion_tokens)}
          </span>
          <span title="time of the call">{duration(seconds)}</span>
          {turn.cost_usd !== null && turn.cost_usd > 0 && <span title="cost">{money(turn.cost_usd)}</span>}
          <span className={styles.model} title={`${turn.requested_model} answered by ${turn.model} of ${turn.backend}`}>
            <Text>{turn.policy_versions.length > 0 ? turn.policy_versions.join(", ") : turn.model}</Text>
          </span>
          {turn.has_tokens && (
            <button type="button" className={styles.link} onClick={() => props.onTokens(turn.call_id)}>
              tokens
            </button>
          )}
        </span>
      </header>
      {!isFolded && (
        <div className={styles.body}>
          {turn.asked.filter(shown).map((block) => (
            <Block key={`asked ${block.ref}`} block={block} body={body} tool={tools.get(block.id) ?? (block.name || undefined)} />
          ))}
          <div className={styles.answer}>
            {turn.answered.filter(shown).map((block) => (
              <Block key={`answered ${block.ref}`} block={block} body={body} />
            ))}
            {turn.error !== null && (
              <p className={styles.error}>
                <Text>{`${turn.error.boundary}: ${turn.error.message}`}</Text>
              </p>
            )}
          </div>
        </div>
      )}
    </article>
  );
});

/** The conversation of a rollout, turn by turn; only what is on the screen is read and in the document. */
export function Transcript({ body, head }: { body: RolloutKey; head: RolloutHead }) {
  const [url, setUrl] = useUrlState();
  const scroller = useRef<HTMLDivElement>(null);
  const total = head.turns;
  const asked = Number(url["turn"]);
  const isMissing = url["turn"] !== undefined && !(Number.isInteger(asked) && asked >= 1 && asked <= total);
  const selected = url["turn"] === undefined ? null : Math.min(total, Math.max(1, asked || 1)) - 1;
  const without = url["without"] ?? "";
  const folded = useMemo(() => new Set(splitList(url["fold"]).map(Number)), [url]);
  const allFolded = url["folded"] === "1";
  const isFolded = (index: number) => allFolded !== folded.has(index);

  const virtualizer = useVirtualizer({
    count: total,
    getScrollElement: () => scroller.current,
    estimateSize: () => (allFolded ? 36 : ESTIMATED_HEIGHT),
    overscan: 3,
  });
  const items = virtualizer.getVirtualItems();
  const chunks = [...new Set(items.map((item) => Math.floor(item.index / TURNS_PER_CHUNK)))];
  const results = useQueries({ queries: chunks.map((chunk) => turnsQuery(body, chunk)) });
  const failure = results.find((result) => result.error !== null)?.error ?? null;
  const turns = new Map<number, TurnView>();
  for (const result of results) for (const turn of result.data ?? []) turns.set(turn.index, turn);
  const loaded = turns.size;
  const tools = useMemo(() => {
    const names = new Map<string, string>();
    for (const turn of turns.values()) {
      for (const block of turn.answered) if (block.kind === "tool_use") names.set(block.id, block.name);
    }
    return names;
    // The turns are a new map in each render; which of them are loaded changes with these.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [loaded, chunks.join()]);

  // Turns change their height when they are read, which moves the selected one: it is brought back into view until
  // the reader scrolls.
  const isPinned = useRef(true);
  const alignment = useRef<"start" | "auto">("start");
  const height = virtualizer.getTotalSize();
  useEffect(() => {
    isPinned.current = true;
    return () => {
      alignment.current = "auto";
    };
  }, [selected]);
  useEffect(() => {
    if (selected !== null && isPinned.current) virtualizer.scrollToIndex(selected, { align: alignment.current });
  }, [selected, virtualizer, loaded, height]);
  const release = () => {
    isPinned.current = false;
  };

  const select = (index: number) => {
    const next = Math.min(total - 1, Math.max(0, index));
    setUrl({ turn: String(next + 1) });
  };
  const fold = (index: number) => setUrl({ fold: joinList(toggled(splitList(url["fold"]), String(index))) });
  useKeys({
    j: () => select(selected === null ? 0 : selected + 1),
    k: () => select(selected === null ? 0 : selected - 1),
    g: () => select(0),
    G: () => select(total - 1),
    o: () => {
      if (selected !== null) fold(selected);
    },
  });

  if (total === 0) return <Empty>No call was stored for this attempt.</Empty>;
  return (
    <>
      {isMissing && <NotHere what={`turn ${url["turn"]}`} shown={`turn ${(selected ?? 0) + 1} of ${total} is shown`} />}
      {head.branches.length > 1 && <Swimlanes body={body} head={head} selected={selected} onSelect={select} />}
      <Toolbar>
        {KINDS.map(([kind, name]) => (
          <Button
            key={kind}
            aria-pressed={!splitList(without).includes(kind)}
            onClick={() => setUrl({ without: joinList(toggled(splitList(without), kind)) })}
          >
            {name}
          </Button>
        ))}
        <Button onClick={() => setUrl({ folded: allFolded ? undefined : "1", fold: undefined })}>
          {allFolded ? "Open all" : "Fold all"}
        </Button>
        <label className={styles.jump}>
          Turn
          <input
            key={selected}
            inputMode="numeric"
            defaultValue={selected === null ? "" : selected + 1}
            onKeyDown={(event) => event.key === "Enter" && select(Number(event.currentTarget.value) - 1)}
          />
          of {total}
        </label>
      </Toolbar>
      {failure !== null && <ErrorNote error={failure} />}
      <div
        ref={scroller}
        className={styles.scroller}
        tabIndex={0}
        role="region"
        aria-label="Transcript"
        onWheel={release}
        onTouchMove={release}
        onPointerDown={release}
        onKeyDown={(event) => /^(Page|Home|End| )/.test(event.key) && release()}
      >
        <div className={styles.list} style={{ height }}>
          {items.map((item) => {
            const turn = turns.get(item.index);
            return (
              <div
                key={item.key}
                ref={virtualizer.measureElement}
                data-index={item.index}
                className={styles.item}
                style={{ transform: `translateY(${item.start}px)` }}
              >
                {turn === undefined ? (
                  <p className={styles.waiting}>Turn {item.index + 1}</p>
                ) : (
                  <Turn
                    turn={turn}
                    body={body}
                    tools={tools}
                    without={without}
                    isFolded={isFolded(item.index)}
                    isSelected={item.index === selected}
                    onFold={fold}
                    onTokens={(call) => setUrl({ view: "tokens", call })}
                  />
                )}
              </div>
            );
          })}
        </div>
      </div>
    </>
  );
}
