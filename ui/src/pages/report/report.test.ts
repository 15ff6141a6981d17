import { describe, expect, it } from "vitest";
import type { ReportFigures } from "../../api/types";
import { chartOf, pointNotes, sums, taskLines } from "./report";

const point = { solved: 1, unsolved: 2, calls: 5, prompt_tokens: 0, completion_tokens: 0, failed: 1, suspicious: 2, cost_usd: 0, pending: 0, timeouts: 3, from_store: false };
const tasks = [
  { task_id: "a", tried: [[0, 2], [1, 2]], turns: 3 },
  { task_id: "b", tried: [[0, 0], [1, 2]], turns: null },
];
const figures = { points: [point], collected: [point], tasks } as unknown as ReportFigures;

describe("the figures of a report", () => {
  it("are summed over all points and said in words", () => {
    expect(sums(figures)).toMatchObject({ graded: 6, calls: 10, failed: 2 });
    expect(pointNotes(figures.points[0]!)).toBe(
      "1 infrastructure failure, 2 suspicious patches, 3 timed out, by the loop's own state: its store is gone",
    );
  });

  it("change by task where both ends are graded", () => {
    expect(taskLines(figures).map((line) => line.change)).toEqual([0.5, null]);
  });

  it("are curves over all places, with bounds where there are any", () => {
    const curve = (name: string, x: number[], low: (number | null)[]) => ({ name, main: name === "a", x, values: x, low, high: low });
    const { x, series } = chartOf({ title: "", caption: "", x_name: "", share: true, curves: [curve("a", [0, 4], [null, 3]), curve("b", [2], [null])] });
    expect(x).toEqual([0, 2, 4]);
    expect(series[0]).toMatchObject({ values: [0, null, 4], low: [null, null, 3], tone: "accent" });
    expect(series[1]).toEqual({ label: "b", values: [null, 2, null], tone: "warn" });
  });
});
