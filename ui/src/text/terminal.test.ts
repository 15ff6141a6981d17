import { describe, expect, it } from "vitest";
import { terminalText } from "./terminal";

describe("terminalText", () => {
  it("removes colours, cursor movements, titles and links", () => {
    expect(terminalText("\u001b[31;1mred\u001b[0m \u001b]0;title\u0007x\u001b[2K")).toBe("red x");
    expect(terminalText("\u001b]8;;http://a.b\u001b\\link\u001b]8;;\u001b\\")).toBe("link");
    expect(terminalText("\u009b31mC1\u001bM")).toBe("C1");
  });

  it("shows of an overwritten line what was written last", () => {
    expect(terminalText("10%\r50%\r100%\nnext\r\nlast\r")).toBe("100%\nnext\nlast");
  });
});
