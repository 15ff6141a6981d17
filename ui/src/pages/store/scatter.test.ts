import { describe, expect, it } from "vitest";
import { ticksOf } from "./scatter";

describe("ticksOf", () => {
  it("gives a few round values whatever the size", () => {
    expect(ticksOf(100)).toEqual([0, 20, 40, 60, 80, 100]);
    expect(ticksOf(7)).toEqual([0, 2, 4, 6]);
    for (const most of [0.003, 0.9, 12, 98_765]) {
      const ticks = ticksOf(most);
      expect(ticks.length).toBeGreaterThanOrEqual(3);
      expect(ticks.length).toBeLessThanOrEqual(6);
    }
  });
});
