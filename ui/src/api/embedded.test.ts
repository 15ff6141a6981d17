import { describe, expect, it } from "vitest";
import { embeddedFetch, holdsAnswer, keyOf, tokensFrom } from "./embedded";

const rows = [
  { id: "a", task_id: "calc-1", reward: 1, reason: "all tests passed", status: "succeeded", turns: 9 },
  { id: "b", task_id: "calc-2", reward: 0, reason: "2 tests failed", status: "succeeded", turns: 3 },
  { id: "c", task_id: "text-1", reward: null, reason: null, status: "failed", turns: 5 },
];
const block = (ref: string, text: string) => ({ ref, text, text_size: 0, arguments: "", arguments_size: 0 });
const turn = (name: string) => ({ call_id: name, asked: [block(`${name}/asked/0`, "é".repeat(9_000))], answered: [] });
const data = {
  answers: {
    "/api/stores/s/rollouts": { rollouts: rows, total: 3, next: null },
    "/api/stores/s/rollouts/a": { attempt_id: "a2" },
    "/api/stores/s/rollouts/a?attempt=a1": { attempt_id: "a1" },
    "/api/stores/s/rollouts/a/turns": { turns: ["c1", "c2", "c3"].map(turn) },
    "/api/stores/s/rollouts/a/patch": { patch: { text: "0123456789" } },
    "/api/stores/s/rollouts/a/calls": { calls: [] },
  },
};
const fetchEmbedded = embeddedFetch(data);

async function read(path: string): Promise<{ status: number; body: Record<string, unknown> }> {
  const response = await fetchEmbedded(new Request(`http://file.invalid${path}`));
  return { status: response.status, body: (await response.json()) as Record<string, unknown> };
}

async function idsOf(query: string): Promise<unknown[]> {
  const { body } = await read(`/api/stores/s/rollouts?${query}`);
  return (body["rollouts"] as { id: string }[]).map((row) => row.id);
}

describe("embeddedFetch", () => {
  it("answers by path and by the parameters that name a thing, whatever the page's size", async () => {
    expect(keyOf("/p/tokens", new URLSearchParams("limit=1&call=c&attempt=a"))).toBe("/p/tokens?attempt=a&call=c");
    expect(keyOf("/api/stores/s/tasks", new URLSearchParams("task=c"))).toBe("/api/stores/s/tasks");
    expect((await read("/api/stores/s/rollouts/a?attempt=a1")).body).toEqual({ attempt_id: "a1" });
    expect((await read("/api/stores/s/rollouts/a?attempt=a2")).body).toEqual({ attempt_id: "a2" });
    expect((await read("/api/stores/s/rollouts/a/calls?attempt=a1")).status).toBe(404);
    expect(holdsAnswer(data, "/api/stores/s/rollouts/a")).toBe(true);
    expect(holdsAnswer(data, "/api/stores/s/rollouts/a/tokens")).toBe(false);
  });

  it("cuts turns, texts and tokens as a server does", async () => {
    const base = "/api/stores/s/rollouts/a";
    const { body } = await read(`${base}/turns?start=1&limit=1&attempt=a2`);
    expect(body).toMatchObject({ start: 1, total: 3, next: 2, turns: [{ call_id: "c2" }] });
    expect((body["turns"] as ReturnType<typeof turn>[])[0]?.asked[0]).toMatchObject({ text: "é".repeat(4_000), text_size: 9_000 });
    const rest = (await read(`${base}/body?ref=c3/asked/0&field=text&offset=8999&length=50`)).body;
    expect(rest).toEqual({ text: "é", offset: 8_999, size: 9_000, next: null });
    expect((await read(`${base}/body?ref=c9/asked/0&field=text`)).status).toBe(404);
    expect((await read(`${base}/patch?offset=2&length=3`)).body).toEqual({
      patch: { text: "234", offset: 2, size: 10, next: 5 },
    });
    const columns = { texts: ["a", "b", "c"], logprobs: [1, 2, 3], mask: [0, 1, 1], versions: [0, 0, 0] };
    const trainer = [{ step: 1, logprobs: [4, 5, 6], ratios: [1, 1, 1], advantages: [0, 0, 0] }];
    const page = tokensFrom({ ids: [7, 8, 9], ...columns, trainer, start: 10, next: null }, new URLSearchParams("start=11&limit=1"));
    expect(page).toMatchObject({ ids: [8], texts: ["b"], logprobs: [2], start: 11, next: 12, trainer: [{ step: 1, logprobs: [5] }] });
  });

  it("filters and sorts rollouts as the server does", async () => {
    expect(await idsOf("outcome=solved")).toEqual(["a"]);
    expect(await idsOf("task=CALC&sort=turns")).toEqual(["b", "a"]);
    expect(await idsOf("sort=reward&descending=true")).toEqual(["a", "b", "c"]);
    expect(await idsOf("sort=reward")).toEqual(["b", "a", "c"]);
  });

  it("says what it does not hold", async () => {
    const { status, body } = await read("/api/stores/s/rollouts/zzz/log?name=x");
    expect(status).toBe(404);
    expect(body["error"]).toMatchObject({ type: "not-exported" });
  });
});
