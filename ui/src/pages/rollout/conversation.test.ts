import { describe, expect, it } from "vitest";
import type { BlockView, TurnView } from "../../api/types";
import { argumentsOf, commandOf, editsOf, fieldsOf, kindOf, summaryOf } from "./conversation";

function block(changes: Partial<BlockView>): BlockView {
  const empty = { ref: "0", role: "assistant", kind: "text", text: "", id: "", name: "", arguments: "" } as const;
  const sizes = { text_size: changes.text?.length ?? 0, arguments_size: changes.arguments?.length ?? 0 };
  return { ...empty, ...sizes, is_error: false, malformed: false, images: [], ...changes };
}

describe("argumentsOf", () => {
  it("reads objects, and nothing of what is cut or broken", () => {
    expect(argumentsOf(block({ arguments: '{"a":1}' }))).toEqual({ a: 1 });
    expect(argumentsOf(block({ arguments: '{"a":1}', arguments_size: 99 }))).toBeNull();
    expect(argumentsOf(block({ arguments: '{"a":' }))).toBeNull();
    expect(argumentsOf(block({ arguments: "[1]" }))).toBeNull();
  });
});

describe("editsOf", () => {
  it("knows edits, several edits and whole files, of two families of tools", () => {
    expect(editsOf({ file_path: "a.py", old_string: "x", new_string: "y" })).toEqual([
      { path: "a.py", before: "x", after: "y" },
    ]);
    expect(editsOf({ path: "a.py", command: "str_replace", old_str: "x", new_str: "y" })).toHaveLength(1);
    expect(editsOf({ file_path: "a", edits: [{ old_string: "1", new_string: "2" }, null] })).toHaveLength(1);
    expect(editsOf({ file_path: "a", content: "all" })).toEqual([{ path: "a", before: null, after: "all" }]);
    expect(editsOf({ command: "ls" })).toEqual([]);
  });
});

describe("commandOf", () => {
  it("finds commands of shells, as a text or a list, and not editors' own", () => {
    expect(commandOf({ command: "ls -l" })).toBe("ls -l");
    expect(commandOf({ command: ["bash", "-c", "ls"] })).toBe("bash -c ls");
    expect(commandOf({ command: "view", path: "/x" })).toBeNull();
  });
});

describe("fieldsOf", () => {
  it("shows few short arguments in a line, and no others", () => {
    expect(fieldsOf({ file_path: "/a.py", limit: 3 })).toEqual([
      ["file_path", "/a.py"],
      ["limit", "3"],
    ]);
    expect([fieldsOf({}), fieldsOf({ text: "two\nlines" }), fieldsOf({ text: "x".repeat(200) })]).toEqual([null, null, null]);
  });
});

describe("summaryOf", () => {
  const turn = (answered: BlockView[], changes: Partial<TurnView> = {}) =>
    ({ answered, status: "ok", error: null, ...changes }) as TurnView;

  it("names text and tool calls in one line", () => {
    const use = block({ kind: "tool_use", name: "Bash", arguments: '{"command":"pytest -q\\nls"}' });
    expect(summaryOf(turn([block({ text: "\nLet me test.\nMore" }), use]))).toBe("Let me test. · Bash pytest -q");
  });

  it("says why there is no answer", () => {
    const error = { boundary: "backend", type: "Timeout", message: "no answer in 60 s", retryable: true };
    expect(summaryOf(turn([], { status: "error", error: error as never }))).toBe("no answer in 60 s");
  });
});

describe("kindOf", () => {
  it("counts every block of a system prompt as such", () => {
    expect(kindOf(block({ role: "system" }))).toBe("system");
    expect(kindOf(block({ kind: "thinking" }))).toBe("thinking");
  });
});
