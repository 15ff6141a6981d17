import { describe, expect, it } from "vitest";
import { joinList, parseSearch, splitList, stringifySearch, toggled } from "./address";

describe("the state in the address", () => {
  it("comes back as it was written, and leaves out what is empty", () => {
    const state = { turn: "12", q: 'a "b" & c=d', view: "" };
    expect(stringifySearch(state)).toBe("?q=a+%22b%22+%26+c%3Dd&turn=12");
    expect(parseSearch(stringifySearch(state))).toEqual({ q: 'a "b" & c=d', turn: "12" });
    expect(stringifySearch({ turn: undefined })).toBe("");
  });

  it("holds lists", () => {
    expect(splitList(joinList(["cost", "turns"]))).toEqual(["cost", "turns"]);
    expect([joinList([]), splitList(undefined)]).toEqual([undefined, []]);
    expect([toggled(["a"], "b"), toggled(["a", "b"], "a")]).toEqual([["a", "b"], ["b"]]);
  });
});
