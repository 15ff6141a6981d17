import { describe, expect, it } from "vitest";
import { phasesOf } from "./phases";

describe("phasesOf", () => {
  it("puts phases one after another in the order of an attempt, unknown ones last", () => {
    const phases = phasesOf(100, { grade_s: 4, new_part_s: 1, prepare_s: 2, agent_s: 10 });
    expect(phases).toEqual([
      { name: "prepare the task's files", started_at: 100, seconds: 2 },
      { name: "agent", started_at: 102, seconds: 10 },
      { name: "grade", started_at: 112, seconds: 4 },
      { name: "new part", started_at: 116, seconds: 1 },
    ]);
  });
});
