import { QueryClient } from "@tanstack/react-query";
import { expect, test } from "vitest";
import { inParts, joined, joinedTasks } from "./parts";

test("lists of parts are joined, and the rest is as in the first part", () => {
  const one: Record<string, unknown> = { total: 5, names: ["a"], verdict: { reward: 1, tests: [1, 2] }, logs: { x: 1 }, task: null };
  const other: Record<string, unknown> = { total: 6, names: [], verdict: { reward: 1, tests: [3] }, logs: { y: 2 }, task: null };
  expect(joined(one, other)).toEqual({
    total: 5,
    names: ["a"],
    verdict: { reward: 1, tests: [1, 2, 3] },
    logs: { x: 1, y: 2 },
    task: null,
  });
});

test("all parts are read, and shown as they come only where nothing was shown before", async () => {
  const parts = [
    { rows: [1, 2], next: "1" },
    { rows: [3], next: "2" },
    { rows: [4], next: null },
  ];
  const read = ({ cursor }: { cursor?: string }) => Promise.resolve(parts[Number(cursor ?? 0)]!);
  const client = new QueryClient();
  const shown: unknown[] = [];
  client.getQueryCache().subscribe((event) => event.type === "updated" && shown.push(event.query.state.data));
  expect(await inParts({ client, queryKey: ["one"] }, read)).toEqual({ rows: [1, 2, 3, 4], next: null });
  expect(shown).toEqual([
    { rows: [1, 2], next: "1" },
    { rows: [1, 2, 3], next: "2" },
  ]);
  client.setQueryData(["two"], { rows: [9], next: null });
  shown.length = 0;
  await inParts({ client, queryKey: ["two"] }, read);
  expect(shown).toEqual([]);
});

test("a task whose samples go on in the next row is one row", () => {
  const rows = [
    { task_id: "a", samples: [1] },
    { task_id: "b", samples: [2, 3] },
    { task_id: "b", samples: [4] },
  ];
  expect(joinedTasks(rows)).toEqual([
    { task_id: "a", samples: [1] },
    { task_id: "b", samples: [2, 3, 4] },
  ]);
});
