import { expect, test } from "vitest";
import type { BranchView, CallLine } from "../../api/types";
import { barsPath, lanesOf, nearestCall } from "./lanes";

const branch = (name: string, role: string, above: string | null, times: [number, number], superseded = false) =>
  ({ name, role, above, started_at: times[0], ended_at: times[1], superseded, calls: 2 }) as BranchView;
const call = (index: number, started_at: number, ended_at: number) => ({ index, started_at, ended_at }) as CallLine;

test("a session that goes on after compactions is one lane, and each lane is below the one it hangs under", () => {
  const lanes = lanesOf([
    branch("main", "main", null, [0, 10]),
    branch("a", "subagent", "main", [1, 4]),
    branch("b", "subagent", "main", [2, 5]),
    branch("c", "subagent", "main", [6, 7]),
    branch("compaction", "compaction", "main", [10, 11]),
    branch("main.1", "main", null, [11, 20]),
    branch("main.2", "main", "main.1", [12, 13], true),
  ]);
  expect(lanes.map((lane) => [lane.role, lane.depth, lane.branches.map((each) => each.name)])).toEqual([
    ["main", 0, ["main", "main.1"]],
    ["subagent", 1, ["a", "c"]],
    ["subagent", 1, ["b"]],
    ["compaction", 1, ["compaction"]],
    ["main", 1, ["main.2"]],
  ]);
  expect(lanes[0]?.calls).toBe(4);
});

test("very many calls are few bars", () => {
  const spans = Array.from({ length: 10_000 }, (_, index): [number, number] => [index, index + 0.5]);
  expect(barsPath(spans, (moment) => moment / 100, 1, 8)).toBe("M0.00 1H100.09v8H0.00z");
  expect(barsPath([[0, 1], [50, 60]], (moment) => moment, 1, 8)).toBe("M0.00 1H1.00v8H0.00zM50.00 1H60.00v8H50.00z");
});

test("the nearest call to a moment", () => {
  const calls = [call(0, 0, 1), call(1, 4, 6), call(2, 9, 10)];
  expect([0.5, 3, 5, 7, 20].map((moment) => nearestCall(calls, moment)?.index)).toEqual([0, 1, 1, 1, 2]);
  expect(nearestCall([], 1)).toBeUndefined();
});
