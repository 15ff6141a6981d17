/**
 * The data of an exported file, in `<script type="application/json" id="understudy-data">`: answers of the API by path.
 *
 * A key is a path, or a path with the parameters that say which thing is meant (`IDENTIFYING`), in alphabetical order:
 * `/api/stores/ID/rollouts/R/tokens?call=C`. An answer that comes in pages is there as one whole page.
 */
export type EmbeddedData = { answers: Record<string, unknown> };

const IDENTIFYING = ["attempt", "after", "before", "call", "field", "name", "origin", "part", "ref", "task", "trace"];

/** Returns the data that a document has in it; null if it is the page of a server. */
export function embeddedData(page: Document): EmbeddedData | null {
  const element = page.getElementById("understudy-data");
  return element === null ? null : (JSON.parse(element.textContent ?? "") as EmbeddedData);
}

/** Returns the keys under which the answer to a request can be, the most exact first. */
export function keysOf(path: string, query: URLSearchParams): string[] {
  const identity = [...query.entries()]
    .filter(([name]) => IDENTIFYING.includes(name))
    .sort(([one], [other]) => one.localeCompare(other))
    .map(([name, value]) => `${name}=${value}`);
  const keys = [path];
  if (identity.length > 0) keys.unshift(`${path}?${identity.join("&")}`);
  return keys;
}

type Row = Record<string, unknown>;

function rowsMatching(rows: Row[], query: URLSearchParams): Row[] {
  const contains = (value: unknown, part: string) => String(value ?? "").toLowerCase().includes(part.toLowerCase());
  const solved = (row: Row) => (row["reward"] == null ? "ungraded" : Number(row["reward"]) >= 1 ? "solved" : "unsolved");
  return rows.filter((row) =>
    [...query.entries()].every(([name, value]) => {
      if (name === "task") return contains(row["task_id"], value);
      if (name === "reason" || name === "q") return contains(row["reason"], value) || contains(row["task_id"], value);
      if (name === "outcome") return solved(row) === value;
      if (name === "status" || name === "integrity" || name === "agent") return row[name] === value;
      return true;
    }),
  );
}

const SORTED_FIELDS: Record<string, string> = {
  attempts: "attempts",
  completion_tokens: "completion_tokens",
  cost: "cost_usd",
  prompt_tokens: "prompt_tokens",
  reward: "reward",
  seconds: "seconds",
  status: "status",
  task: "task_id",
  turns: "turns",
  updated: "updated_at",
};

/** Returns a list of rollouts filtered and sorted as a server does it; the text of transcripts is not searched. */
export function selectRollouts(rows: Row[], query: URLSearchParams): Row[] {
  const selected = rowsMatching(rows, query);
  const field = SORTED_FIELDS[query.get("sort") ?? ""];
  if (field === undefined) return query.get("descending") === "true" ? selected.reverse() : selected;
  const sign = query.get("descending") === "true" ? -1 : 1;
  const order = (one: Row, other: Row) => {
    const [left, right] = [one[field], other[field]];
    if (left == null || right == null) return Number(left == null) - Number(right == null);
    return sign * (left < right ? -1 : left > right ? 1 : 0);
  };
  return selected.sort(order);
}

/** Returns a function that answers requests from an exported file's data, and with an error for what it lacks. */
export function embeddedFetch(data: EmbeddedData): (request: Request) => Promise<Response> {
  return async (request) => {
    const url = new URL(request.url);
    const path = decodeURIComponent(url.pathname);
    const key = keysOf(path, url.searchParams).find((candidate) => candidate in data.answers);
    if (key === undefined) {
      const error = {
        type: "not-exported",
        message: "This file does not hold what the page asked for.",
        remedy: "Open the run with `understudy view`, or export it again with the rollouts that you need.",
      };
      return Response.json({ error }, { status: 404 });
    }
    const answer = data.answers[key];
    if (typeof answer === "string") return new Response(answer);
    if (path.endsWith("/rollouts")) {
      const whole = answer as { rollouts: Row[] };
      const rollouts = selectRollouts([...whole.rollouts], url.searchParams);
      return Response.json({ ...whole, rollouts, total: rollouts.length, next: null });
    }
    return Response.json(answer);
  };
}
