import { describe, expect, it } from "vitest";
import type { FunnelStage, LoopStep, LoopView } from "../../api/types";
import { evaluationsAt, figure, funnelBars, stepsOf, valueNames } from "./curves";

const step = (number: number, values: Record<string, number>) => ({ step: number, values }) as LoopStep;
const rate = { estimate: 0.5, low: 0.2, high: 0.8 };

describe("curves", () => {
  it("name what a person looks at first before the rest, once", () => {
    expect(valueNames([step(1, { zeta: 1, loss: 2 }), step(2, { entropy: 1, loss: 3 })])).toEqual([
      "loss",
      "entropy",
      "zeta",
    ]);
  });

  it("have a gap where a step was not evaluated", () => {
    const loop = { steps: [step(1, {}), step(2, {})], evaluations: [{ step: 0, rate }, { step: 2, rate }] };
    const steps = stepsOf(loop as unknown as LoopView);
    expect(steps).toEqual([0, 1, 2]);
    expect(evaluationsAt(loop as unknown as LoopView, steps).values).toEqual([0.5, null, 0.5]);
  });
});

describe("figure", () => {
  it("is short whatever the size", () => {
    expect([0, -8.04e-9, 0.25, 5.2512, 123.4, 1_234_567].map(figure)).toEqual([
      "0",
      "-8.0e-9",
      "0.25",
      "5.25",
      "123",
      "1.2e6",
    ]);
  });
});

describe("funnelBars", () => {
  it("measures rollouts by rollouts, and groups by groups", () => {
    const stages = [
      ["rollouts", 32],
      ["graded", 24],
      ["groups", 8],
      ["groups with signal", 2],
      ["groups used", 0],
      ["tokens", 0],
    ].map(([stage, amount]) => ({ stage, count: amount, lost: {} }) as FunnelStage);
    expect(funnelBars(stages).map((bar) => bar.share)).toEqual([1, 0.75, 1, 0.25, 0, 0]);
  });
});
