import { describe, expect, it } from "vitest";
import { IMPROBABLE, leastProbable, nextImprobable, sampledLogprobs, shade, surprise, tokenLabel } from "./tokens";

describe("surprise", () => {
  it("grows with improbability and says nothing where there is no logprob", () => {
    expect(surprise(null)).toBeNull();
    expect([0, -0.9, -1.1, -2.5, -3.5, -4.5, -40].map(surprise)).toEqual([0, 0, 1, 2, 3, 4, 4]);
    expect(surprise(0.001)).toBe(0);
  });
});

describe("nextImprobable", () => {
  const logprobs = [null, -0.1, -5, -0.2, IMPROBABLE, -9];

  it("goes forwards and backwards to tokens below the limit, and not at it", () => {
    expect(nextImprobable(logprobs, -1, 1)).toBe(2);
    expect(nextImprobable(logprobs, 2, 1)).toBe(5);
    expect(nextImprobable(logprobs, 5, -1)).toBe(2);
    expect(nextImprobable(logprobs, 5, 1)).toBeNull();
    expect(nextImprobable(logprobs, 2, -1)).toBeNull();
  });
});

describe("sampledLogprobs", () => {
  // Tokens 10 to 15 of a segment: an earlier call sampled 11, this one 13 and 14.
  const page = { start: 10, call_start: 13, call_end: 15, mask: [0, 1, 0, 1, 1, 0], logprobs: [null, -9, null, -1, -2, null] };

  it("has those of the call only, or of all calls of the segment", () => {
    expect(sampledLogprobs(page, "call")).toEqual([null, null, null, -1, -2, null]);
    expect(sampledLogprobs(page, "segment")).toEqual([null, -9, null, -1, -2, null]);
  });
});

describe("tokenLabel", () => {
  it("makes whitespace visible where a token is nothing else", () => {
    expect(tokenLabel(" \n\t")).toBe("·⏎⇥");
    expect(tokenLabel(" word")).toBe(" word");
    expect(tokenLabel("")).toBe("∅");
  });
});

describe("shade", () => {
  it("tells the sign and the size, and nothing where there is no value", () => {
    expect([0, 0.2, 2, -0.2, -2, null].map(shade)).toEqual(["zero", "above1", "above2", "below1", "below2", null]);
  });
});

describe("leastProbable", () => {
  it("finds the least probable token, the first of equals, and none where no logprob is known", () => {
    expect(leastProbable([null, -0.1, -2, undefined, -2, 0])).toBe(2);
    expect(leastProbable([null, undefined])).toBeNull();
  });
});
