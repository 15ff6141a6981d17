import { describe, expect, it } from "vitest";
import { pieces, visible } from "./escapes";

describe("pieces", () => {
  it("leaves ordinary text, tabs, newlines, accents and emoji as they are", () => {
    const text = "a\tb\nc é 你好 👩";
    expect(pieces(text)).toEqual([{ text, escaped: false }]);
  });

  it("names direction overrides, zero-width characters, tags and controls by code point", () => {
    expect(visible("pay\u202Eexe\u2066.txt")).toBe("pay[U+202E]exe[U+2066].txt");
    expect(visible("a\u200Bb\u0000c\u001b[0m")).toBe("a[U+200B]b[U+0000]c[U+001B][0m");
    expect(visible("\u{E0041}x\uFEFF")).toBe("[U+E0041]x[U+FEFF]");
  });

  it("loses nothing else", () => {
    const text = "x\u202Ey\r\nz";
    expect(pieces(text).filter((piece) => !piece.escaped).map((piece) => piece.text)).toEqual(["x", "y\nz"]);
  });
});
