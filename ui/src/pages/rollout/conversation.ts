import type { BlockView, TurnView } from "../../api/types";

/** The kinds of blocks that the transcript can leave out, with their names for a person. */
export const KINDS = [
  ["text", "Text"],
  ["thinking", "Thinking"],
  ["tool_use", "Tool calls"],
  ["tool_result", "Tool results"],
  ["system", "System"],
] as const;

export type Kind = (typeof KINDS)[number][0] | "other";

/** Returns what a block counts as: system prompts are a kind of their own, whatever they consist of. */
export function kindOf(block: BlockView): Kind {
  return block.role === "system" ? "system" : block.kind;
}

/** Returns the arguments of a tool call; null where they are cut, or are no JSON object. */
export function argumentsOf(block: BlockView): Record<string, unknown> | null {
  if (block.arguments.length < block.arguments_size) return null;
  try {
    const value: unknown = JSON.parse(block.arguments);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Record<string, unknown>) : null;
  } catch {
    return null; // A model may write arguments that are no JSON: they are shown as it wrote them.
  }
}

/** One change that a tool call makes to a file; `before` is null where the file is written whole. */
export type Edit = { path: string; before: string | null; after: string };

/** Returns the changes that a tool call asks for, by the shapes that agents' tools have; none for other tools. */
export function editsOf(input: Record<string, unknown>): Edit[] {
  const path = input["file_path"] ?? input["path"] ?? input["notebook_path"];
  if (typeof path !== "string") return [];
  const one = (edit: Record<string, unknown>): Edit[] => {
    const [before, after] = [edit["old_string"] ?? edit["old_str"], edit["new_string"] ?? edit["new_str"]];
    return typeof before === "string" && typeof after === "string" ? [{ path, before, after }] : [];
  };
  if (Array.isArray(input["edits"])) return (input["edits"] as Record<string, unknown>[]).flatMap((edit) => one(edit ?? {}));
  const content = input["content"] ?? input["file_text"];
  if (typeof content === "string") return [{ path, before: null, after: content }];
  return one(input);
}

/** Returns the shell command that a tool call asks for; null for other tools. */
export function commandOf(input: Record<string, unknown>): string | null {
  const command = input["command"] ?? input["cmd"];
  if (typeof command === "string") return input["old_str"] === undefined && input["path"] === undefined ? command : null;
  if (Array.isArray(command)) return command.map(String).join(" ");
  return null;
}

/** Returns the arguments of a tool call as names and texts, where they are few and short; null where they are not. */
export function fieldsOf(input: Record<string, unknown>): [string, string][] | null {
  const fields = Object.entries(input).map(([name, value]): [string, string] => [
    name,
    typeof value === "string" ? value : (JSON.stringify(value) ?? ""),
  ]);
  const isShort = fields.every(([, value]) => value.length <= 120 && !value.includes("\n"));
  return fields.length > 0 && fields.length <= 6 && isShort ? fields : null;
}

/** Returns the first line of a text, at most `length` characters of it. */
export function firstLine(text: string, length = 160): string {
  const line = text.trimStart().split("\n", 1)[0] ?? "";
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

/** Returns a turn in one line: what the model did in it. */
export function summaryOf(turn: TurnView): string {
  const calls = turn.answered.filter((block) => block.kind === "tool_use").map((block) => {
    const input = argumentsOf(block);
    const detail = input === null ? "" : (commandOf(input) ?? Object.values(input).find((value) => typeof value === "string") ?? "");
    return `${block.name} ${firstLine(String(detail), 80)}`.trim();
  });
  const text = turn.answered.find((block) => block.kind === "text" && block.text.trim() !== "");
  const parts = [...(text === undefined ? [] : [firstLine(text.text, 120)]), ...calls];
  if (parts.length > 0) return parts.join(" · ");
  return turn.error?.message ?? (turn.status === "ok" ? "no text" : turn.status);
}
