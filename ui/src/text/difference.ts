import { parsePatch, structuredPatch } from "diff";

export type DiffLine = { kind: "same" | "added" | "removed"; text: string; before: number | null; after: number | null };
export type Hunk = { header: string; lines: DiffLine[] };
export type FileDiff = { before: string | null; after: string | null; hunks: Hunk[]; added: number; removed: number };

type ParsedHunk = { oldStart: number; oldLines: number; newStart: number; newLines: number; lines: string[] };

function hunkOf(parsed: ParsedHunk): Hunk {
  let before = parsed.oldStart;
  let after = parsed.newStart;
  const lines: DiffLine[] = [];
  for (const line of parsed.lines) {
    const text = line.slice(1);
    if (line.startsWith("+")) lines.push({ kind: "added", text, before: null, after: after++ });
    else if (line.startsWith("-")) lines.push({ kind: "removed", text, before: before++, after: null });
    else if (!line.startsWith("\\")) lines.push({ kind: "same", text, before: before++, after: after++ });
  }
  const header = `@@ -${parsed.oldStart},${parsed.oldLines} +${parsed.newStart},${parsed.newLines} @@`;
  return { header, lines };
}

function fileDiff(before: string | null, after: string | null, parsed: ParsedHunk[]): FileDiff {
  const hunks = parsed.map(hunkOf);
  const number = (kind: DiffLine["kind"]) =>
    hunks.reduce((sum, hunk) => sum + hunk.lines.filter((line) => line.kind === kind).length, 0);
  return { before, after, hunks, added: number("added"), removed: number("removed") };
}

function pathOf(name: string | undefined): string | null {
  if (name === undefined || name === "/dev/null") return null;
  return name.replace(/^[ab]\//, "");
}

/** Returns the files of a unified diff as git writes it; null where it cannot be read as one. */
export function parseUnified(patch: string): FileDiff[] | null {
  try {
    return parsePatch(patch)
      .filter((file) => file.hunks.length > 0 || file.oldFileName !== undefined)
      .map((file) => fileDiff(pathOf(file.oldFileName), pathOf(file.newFileName), file.hunks));
  } catch {
    return null; // The patch is an agent's: what is not a diff is shown as it is.
  }
}

/** Returns the difference of two texts of one file, with `context` lines around each change. */
export function difference(path: string, before: string, after: string, context = 3): FileDiff {
  const patch = structuredPatch(path, path, before, after, "", "", { context, timeout: 500 });
  if (patch === undefined) {
    // Too different to be compared in half a second: all lines of one, then all of the other.
    const lines = (text: string, mark: string) => text.split("\n").map((line) => mark + line);
    const both = [...lines(before, "-"), ...lines(after, "+")];
    const removed = before.split("\n").length;
    return fileDiff(path, path, [
      { oldStart: 1, oldLines: removed, newStart: 1, newLines: both.length - removed, lines: both },
    ]);
  }
  return fileDiff(path, path, patch.hunks);
}
