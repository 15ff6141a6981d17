import { describe, expect, it } from "vitest";
import { difference, parseUnified } from "./difference";

const PATCH = `diff --git a/calc.py b/calc.py
index 111..222 100644
--- a/calc.py
+++ b/calc.py
@@ -1,3 +1,4 @@
 def add(a, b):
-    return a - b
+    # sums
+    return a + b
 
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+hello
\\ No newline at end of file
`;

describe("parseUnified", () => {
  it("reads files, line numbers and counts of git's diffs", () => {
    const files = parseUnified(PATCH);
    expect(files?.map((file) => [file.before, file.after, file.added, file.removed])).toEqual([
      ["calc.py", "calc.py", 2, 1],
      [null, "new.txt", 1, 0],
    ]);
    expect(files?.[0]?.hunks[0]?.lines.map((line) => [line.kind, line.before, line.after])).toEqual([
      ["same", 1, 1],
      ["removed", 2, null],
      ["added", null, 2],
      ["added", null, 3],
      ["same", 3, 4],
    ]);
  });

  it("returns null for a broken diff instead of failing", () => {
    expect(parseUnified("--- a/x\n+++ b/x\n@@ -1,5 +1,1 @@\n-only one\n")).toBeNull();
  });
});

describe("difference", () => {
  it("shows the lines that an edit changed", () => {
    const file = difference("a.py", "x = 1\ny = 2\n", "x = 1\ny = 3\n");
    expect([file.added, file.removed]).toEqual([1, 1]);
  });
});
