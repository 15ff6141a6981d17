/**
 * The data of an exported file, in `<script type="application/json" id="understudy-data">`: answers of the API by path.
 *
 * A key is a path, or a path with the parameters that say which thing is meant (`IDENTIFYING`), in alphabetical order:
 * `/api/stores/ID/rollouts/R/tokens?call=C`. An answer that comes in pages is there as one whole page, with whole
 * texts; `PARTS` makes of it what was asked for. `start` is the page that is shown first.
 */
export type EmbeddedData = { start?: string; answers: Record<string, unknown> };

const IDENTIFYING = ["attempt", "after", "before", "call", "name", "origin", "task", "trace"];

/** Lists that are in a file once, whatever they are filtered by. */
const FILTERED = /\/(rollouts|tasks|sessions|states)$/;

/** How much of a long text a turn brings along, as in `view/schema`: the rest is read by range. */
const TEXT_CHARACTERS = 4_000;

/** Returns the data that a document has in it; null if it is the page of a server. */
export function embeddedData(page: Document): EmbeddedData | null {
  const element = page.getElementById("understudy-data");
  return element === null ? null : (JSON.parse(element.textContent ?? "") as EmbeddedData);
}

/** Returns the key of the answer to a request. */
export function keyOf(path: string, query: URLSearchParams): string {
  if (FILTERED.test(path)) return path;
  const identity = [...query.entries()]
    .filter(([name]) => IDENTIFYING.includes(name))
    .sort(([one], [other]) => one.localeCompare(other))
    .map(([name, value]) => `${name}=${value}`);
  return identity.length === 0 ? path : `${path}?${identity.join("&")}`;
}

/** Whether a file has an answer at a path, with whatever parameters. */
export function holdsAnswer(data: EmbeddedData, path: string): boolean {
  return path in data.answers || Object.keys(data.answers).some((key) => key.startsWith(`${path}?`));
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

type Range = { text: string; offset: number; size: number; next: number | null };

function rangeOf(text: string, query: URLSearchParams): Range {
  const offset = Number(query.get("offset") ?? 0);
  const part = text.slice(offset, offset + Number(query.get("length") ?? 50_000));
  const after = offset + part.length;
  return { text: part, offset, size: text.length, next: part !== "" && after < text.length ? after : null };
}

type Block = { ref: string; text: string; text_size: number; arguments: string; arguments_size: number };
type Turns = { turns: { asked: Block[]; answered: Block[] }[] };

function cut(block: Block): Block {
  return {
    ...block,
    text: block.text.slice(0, TEXT_CHARACTERS),
    text_size: block.text.length,
    arguments: block.arguments.slice(0, TEXT_CHARACTERS),
    arguments_size: block.arguments.length,
  };
}

function turnsFrom(whole: Turns, query: URLSearchParams): Turns & { start: number; total: number; next: number | null } {
  const start = Number(query.get("start") ?? 0);
  const turns = whole.turns
    .slice(start, start + Number(query.get("limit") ?? 50))
    .map((turn) => ({ ...turn, asked: turn.asked.map(cut), answered: turn.answered.map(cut) }));
  const after = start + turns.length;
  return { ...whole, turns, start, total: whole.turns.length, next: after < whole.turns.length ? after : null };
}

/** Returns the tokens of a call from an index of its segment on. */
export function tokensFrom(page: Row, query: URLSearchParams): Row {
  const first = page["start"] as number;
  const size = (page["ids"] as unknown[]).length;
  const begin = Math.max(0, Number(query.get("start") ?? first) - first);
  const end = Math.min(size, begin + Number(query.get("limit") ?? 2_000));
  const part = (row: Row, names: string[]): Row =>
    Object.fromEntries(names.map((name) => [name, (row[name] as unknown[]).slice(begin, end)]));
  return {
    ...page,
    ...part(page, ["ids", "texts", "logprobs", "mask", "versions"]),
    trainer: (page["trainer"] as Row[]).map((row) => ({ ...row, ...part(row, ["logprobs", "ratios", "advantages"]) })),
    start: first + begin,
    next: end < size ? first + end : null,
  };
}

/** Makes of a whole answer the part that was asked for, by the last name in the path. */
const PARTS: Record<string, (answer: never, query: URLSearchParams) => unknown> = {
  rollouts: (whole: { rollouts: Row[] }, query) => {
    const rollouts = selectRollouts([...whole.rollouts], query);
    return { ...whole, rollouts, total: rollouts.length, next: null };
  },
  turns: turnsFrom,
  tokens: tokensFrom,
  log: (whole: Range, query) => rangeOf(whole.text, query),
  patch: (whole: { patch: Range | null }, query) => ({
    ...whole,
    patch: whole.patch === null ? null : rangeOf(whole.patch.text, query),
  }),
};

/** Returns a part of a block's text, which is in the file with the block's turn. */
function bodyOf(whole: Turns | undefined, query: URLSearchParams): Range | undefined {
  const ref = query.get("ref");
  const blocks = whole?.turns.flatMap((turn) => [...turn.asked, ...turn.answered]);
  const block = blocks?.find((candidate) => candidate.ref === ref);
  return block && rangeOf(query.get("field") === "arguments" ? block.arguments : block.text, query);
}

/** Returns the answer to a request, or undefined where the file does not hold it. */
function answerOf({ answers }: EmbeddedData, path: string, query: URLSearchParams): unknown {
  const rollout = /^(\/api\/stores\/[^/]+\/rollouts\/.+?)(\/(turns|calls|body|tokens|patch|log))?$/.exec(path)?.[1];
  const shown = rollout === undefined ? undefined : (answers[rollout] as { attempt_id?: string } | undefined);
  // The attempt that a rollout is shown by has its answers under the rollout's own path.
  if (query.get("attempt") === shown?.attempt_id) query.delete("attempt");
  const last = path.slice(path.lastIndexOf("/") + 1);
  if (last === "body") return bodyOf(answers[keyOf(path.replace(/body$/, "turns"), query)] as Turns | undefined, query);
  const whole = answers[keyOf(path, query)];
  return whole === undefined ? undefined : (PARTS[last]?.(whole as never, query) ?? whole);
}

/** Returns a function that answers requests from an exported file's data, and with an error for what it lacks. */
export function embeddedFetch(data: EmbeddedData): (request: Request) => Promise<Response> {
  return async (request) => {
    const url = new URL(request.url);
    const answer = answerOf(data, decodeURIComponent(url.pathname), url.searchParams);
    if (answer !== undefined) return Response.json(answer);
    const error = {
      type: "not-exported",
      message: "This file does not hold what the page asked for.",
      remedy: "Open the run with `understudy view`, or export it again with the rollouts that you need.",
    };
    return Response.json({ error }, { status: 404 });
  };
}
