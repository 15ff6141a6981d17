import { describe, expect, it } from "vitest";
import { highlight, highlightLines, languageOf } from "./highlight";

describe("highlight", () => {
  it("loses no character", () => {
    const source = 'def f(x):\n    """<b>doc</b>"""\n    return "</script>" # é\n';
    expect(highlight(source, "python").map((span) => span.text).join("")).toBe(source);
    const lines = highlightLines(source, "python");
    expect(lines.map((line) => line.map((span) => span.text).join("")).join("\n")).toBe(source);
  });

  it("reads texts that are nested as deeply as a model can write them", () => {
    for (const language of ["bash", "css", "javascript", "json", "python", "typescript", "xml"]) {
      for (const unit of ["(", "[", "{", "$(", "${", "`${", "<a>", "f'{"]) {
        const source = `${unit.repeat(240)}\n`.repeat(40);
        expect(highlight(source, language).map((span) => span.text).join("")).toBe(source);
      }
    }
  });

  it("leaves long lines and unknown languages plain", () => {
    expect(highlight("x".repeat(5000), "python")).toHaveLength(1);
    expect(highlight("def f()", null)).toEqual([{ text: "def f()", kind: null }]);
  });

  it("knows languages by file name", () => {
    expect([languageOf("src/a.py"), languageOf("Makefile"), languageOf("x/y.TSX")]).toEqual([
      "python",
      null,
      "typescript",
    ]);
  });
});
