import type { QueryFunctionContext } from "@tanstack/react-query";

/** An answer whose lists may come in several parts; `next` is the cursor of the following one. */
type Part = { next: string | null };

const isObject = (value: unknown): value is Record<string, unknown> =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/** Joins two parts of an answer: lists one after the other, everything else as the first part has it. */
export function joined<Value>(one: Value, other: Value): Value {
  if (Array.isArray(one) && Array.isArray(other)) return [...one, ...other] as Value;
  if (!isObject(one) || !isObject(other)) return one;
  const both = Object.entries(one).map(([name, value]) => [name, name in other ? joined(value, other[name]) : value]);
  return { ...other, ...Object.fromEntries(both) } as Value;
}

/** Reads an answer with all its parts. Where nothing is shown yet, the parts that have come are, with a `next`. */
export async function inParts<Answer extends Part>(
  { client, queryKey }: Pick<QueryFunctionContext, "client" | "queryKey">,
  read: (part: { cursor?: string }) => Promise<Answer>,
): Promise<Answer> {
  const isFirst = client.getQueryData(queryKey) === undefined;
  let all = await read({});
  while (all.next !== null) {
    if (isFirst) client.setQueryData(queryKey, all);
    const part = await read({ cursor: all.next });
    all = { ...joined(all, part), next: part.next };
  }
  return all;
}

/** Joins rows of which one may be continued by the next, having the same `task_id`. */
export function joinedTasks<Row extends { task_id: string; samples: unknown[] }>(rows: Row[]): Row[] {
  const tasks = new Map<string, Row>();
  for (const row of rows) {
    const before = tasks.get(row.task_id);
    tasks.set(row.task_id, before === undefined ? row : { ...row, samples: [...before.samples, ...row.samples] });
  }
  return [...tasks.values()];
}
