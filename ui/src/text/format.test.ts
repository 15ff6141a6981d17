import { describe, expect, it } from "vitest";
import { ABSENT, ago, bytes, counted, duration, money, percent, reward, short } from "./format";

describe("formats", () => {
  it("show durations in at most two units", () => {
    expect([0.0123, 4.21, 185, 7800].map(duration)).toEqual(["12 ms", "4.2 s", "3 m 05 s", "2 h 10 m"]);
  });
  it("show sizes, money, shares and rewards", () => {
    expect([12, 1500, 12_345_678].map(bytes)).toEqual(["12 B", "1.5 kB", "12 MB"]);
    expect([0, 0.0012, 12.345].map(money)).toEqual(["$0", "$0.0012", "$12.35"]);
    expect(percent(0.256)).toBe("26%");
    expect([0, 1, 0.5].map(reward)).toEqual(["0", "1", "0.50"]);
    expect([950, 12_345].map(short)).toEqual(["950", "12.3K"]);
  });
  it("show what is not known as such, and never as 0", () => {
    expect([duration(null), bytes(undefined), money(null), percent(null), reward(null), short(null)]).toEqual(
      Array(6).fill(ABSENT),
    );
  });
  it("show how long ago a time was", () => {
    expect([ago(100, 130), ago(0, 60), ago(0, 7200), ago(0, 86_400)]).toEqual([
      "just now",
      "1 minute ago",
      "2 hours ago",
      "1 day ago",
    ]);
  });
  it("count one of a thing without a plural", () => {
    expect([0, 1, 2, 1200].map((value) => counted(value, "vote"))).toEqual(["0 votes", "1 vote", "2 votes", "1,200 votes"]);
  });
});
