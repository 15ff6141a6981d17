import { describe, expect, it } from "vitest";
import type { BlockView } from "../../api/types";
import { alignedBlocks } from "./aligned";

const blocks = (...kinds: string[]) => kinds.map((kind, index) => ({ kind, ref: `${kind}${index}` }) as BlockView);
const shown = (chosen: BlockView[], rejected: BlockView[]) =>
  alignedBlocks(chosen, rejected).map(([one, other]) => [one?.ref ?? null, other?.ref ?? null]);

describe("alignedBlocks", () => {
  it("puts blocks of one kind side by side, and what only one answer has alone", () => {
    expect(shown(blocks("thinking", "text", "tool_use"), blocks("text", "tool_use", "tool_use"))).toEqual([
      ["thinking0", null],
      ["text1", "text0"],
      ["tool_use2", "tool_use1"],
      [null, "tool_use2"],
    ]);
  });

  it("loses none of either side", () => {
    expect(shown(blocks("text"), blocks("thinking", "text"))).toEqual([
      [null, "thinking0"],
      ["text0", "text1"],
    ]);
    expect(shown([], blocks("text"))).toEqual([[null, "text0"]]);
  });
});
