import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useEffect, useMemo } from "react";
import { callsQuery, rawQuery, type RolloutKey } from "../../api/queries";
import { Button, Toolbar } from "../../components/controls";
import { Code } from "../../components/Code";
import { useKeys } from "../../components/keyboard";
import { Empty } from "../../components/marks";
import { Loaded, NotHere } from "../../components/Query";
import { useUrlState } from "../../components/useUrlState";
import { bytes } from "../../text/format";
import styles from "./RawView.module.css";

/** Returns a JSON text with line breaks and indentation; the text itself if it is no JSON, such as a stream of events. */
export function indented(text: string): { text: string; isJson: boolean } {
  try {
    return { text: JSON.stringify(JSON.parse(text), null, 2), isJson: true };
  } catch {
    return { text, isJson: false };
  }
}

function Body({ store, call, part }: { store: string; call: string; part: "request" | "response" }) {
  const [url, setUrl] = useUrlState();
  const offset = Number(url["from"] ?? 0) || 0;
  const asSent = url["form"] === "sent";
  const result = useQuery(rawQuery(store, call, part, offset));
  return (
    <Loaded result={result}>
      {(range) => {
        const shown = asSent || offset > 0 ? { text: range.text, isJson: false } : indented(range.text);
        return (
          <>
            <p className={styles.note}>
              {range.size === null || (range.end >= range.size && offset === 0)
                ? bytes(range.end)
                : `${bytes(offset)} to ${bytes(range.end)} of ${bytes(range.size)}, cut here`}{" "}
              {offset > 0 && <Button onClick={() => setUrl({ from: String(Math.max(0, offset - 200_000)) })}>Before</Button>}
              {range.size !== null && range.end < range.size && (
                <Button onClick={() => setUrl({ from: String(range.end) })}>Go on</Button>
              )}
            </p>
            <div className={styles.body} tabIndex={0} role="region" aria-label={part}>
              <Code text={shown.text} language={shown.isJson ? "json" : null} />
            </div>
          </>
        );
      }}
    </Loaded>
  );
}

/** A call's request and response as they were sent. */
export function RawView({ body }: { body: RolloutKey }) {
  const [url, setUrl] = useUrlState();
  const result = useInfiniteQuery(callsQuery(body));
  const { hasNextPage, isFetchingNextPage, fetchNextPage } = result;
  useEffect(() => {
    if (hasNextPage && !isFetchingNextPage) void fetchNextPage();
  }, [hasNextPage, isFetchingNextPage, fetchNextPage]);
  const calls = useMemo(() => result.data?.pages.flatMap((page) => page.calls) ?? [], [result.data]);
  const turn = Number(url["turn"] ?? 1) || 1;
  const wanted = url["call"] === undefined ? turn - 1 : calls.findIndex((call) => call.call_id === url["call"]);
  const isMissing = !hasNextPage && calls.length > 0 && calls[wanted] === undefined;
  const at = isMissing ? 0 : Math.max(0, wanted);
  const call = calls[at];
  const part = url["part"] === "response" ? "response" : "request";
  const goTo = (index: number) => {
    if (calls[index] !== undefined) setUrl({ call: calls[index].call_id, turn: String(index + 1), from: undefined });
  };
  useKeys({ j: () => goTo(at + 1), k: () => goTo(at - 1) });
  return (
    <Loaded result={result}>
      {() =>
        call === undefined ? (
          <Empty>No call was stored for this attempt.</Empty>
        ) : (
          <>
            {isMissing && (
              <NotHere
                what={url["call"] === undefined ? `turn ${turn}` : `call “${url["call"]}”`}
                shown="the first call of this attempt is shown"
              />
            )}
            <Toolbar>
              <Button onClick={() => goTo(at - 1)} disabled={at === 0}>
                ← Call
              </Button>
              <span className={styles.note}>
                {at + 1} of {calls.length}
              </span>
              <Button onClick={() => goTo(at + 1)} disabled={at >= calls.length - 1}>
                Call →
              </Button>
              {(["request", "response"] as const).map((name) => (
                <Button key={name} aria-pressed={part === name} onClick={() => setUrl({ part: name, from: undefined })}>
                  {name === "request" ? "Request" : "Response"}
                </Button>
              ))}
              <Button
                aria-pressed={url["form"] === "sent"}
                onClick={() => setUrl({ form: url["form"] === "sent" ? undefined : "sent" })}
              >
                Exactly as sent
              </Button>
              <code className={styles.id}>{call.call_id}</code>
            </Toolbar>
            <Body store={body.store} call={call.call_id} part={part} />
          </>
        )
      }
    </Loaded>
  );
}
