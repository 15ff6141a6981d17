import { describe, expect, it } from "vitest";
import { embeddedFetch, keysOf } from "./embedded";

const rows = [
  { id: "a", task_id: "calc-1", reward: 1, reason: "all tests passed", status: "succeeded", turns: 9 },
  { id: "b", task_id: "calc-2", reward: 0, reason: "2 tests failed", status: "succeeded", turns: 3 },
  { id: "c", task_id: "text-1", reward: null, reason: null, status: "failed", turns: 5 },
];
const fetchEmbedded = embeddedFetch({
  answers: {
    "/api/stores/s/rollouts": { rollouts: rows, total: 3, next: null },
    "/api/stores/s/rollouts/a/tokens?call=c1": { call_id: "c1" },
  },
});

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
    expect((await read("/api/stores/s/rollouts/a/tokens?limit=5&call=c1&start=0")).body).toEqual({ call_id: "c1" });
    expect(keysOf("/p", new URLSearchParams("ref=2&limit=1&field=text"))).toEqual(["/p?field=text&ref=2", "/p"]);
  });

  it("filters and sorts rollouts as the server does", async () => {
    expect(await idsOf("outcome=solved")).toEqual(["a"]);
    expect(await idsOf("task=CALC&sort=turns")).toEqual(["b", "a"]);
    expect(await idsOf("sort=reward&descending=true")).toEqual(["a", "b", "c"]);
    expect(await idsOf("sort=reward")).toEqual(["b", "a", "c"]);
  });

  it("says what it does not hold", async () => {
    const { status, body } = await read("/api/stores/s/rollouts/zzz");
    expect(status).toBe(404);
    expect(body["error"]).toMatchObject({ type: "not-exported" });
  });
});
