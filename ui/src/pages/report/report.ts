import type { ReportChart, ReportFigures } from "../../api/types";
import type { Series } from "../../components/Chart";

type Point = ReportFigures["points"][number];

const SUMMED = ["calls", "prompt_tokens", "completion_tokens", "failed", "suspicious", "cost_usd", "pending"] as const;

/** Returns the sums over all points, those collected for training among them. */
export function sums(figures: ReportFigures): Record<(typeof SUMMED)[number] | "graded", number> {
  const every = [...figures.points, ...figures.collected];
  const total = (pick: (point: Point) => number) => every.reduce((sum, point) => sum + pick(point), 0);
  const summed = Object.fromEntries(SUMMED.map((name) => [name, total((point) => point[name])]));
  return { ...(summed as Record<(typeof SUMMED)[number], number>), graded: total((point) => point.solved + point.unsolved) };
}

/** Returns what of a point is not as it should be, in words; empty where all is. */
export function pointNotes(point: Point): string {
  const counts: [number, string][] = [
    [point.pending, "pending"],
    [point.failed, point.failed === 1 ? "infrastructure failure" : "infrastructure failures"],
    [point.suspicious, point.suspicious === 1 ? "suspicious patch" : "suspicious patches"],
    [point.timeouts, "timed out"],
  ];
  const parts = counts.filter(([number]) => number > 0).map(([number, what]) => `${number} ${what}`);
  return [...parts, ...(point.from_store ? [] : ["by the loop's own state: its store is gone"])].join(", ");
}

/** How many rollouts of a task are solved, of how many graded ones. */
export type Tried = { solved: number; graded: number };

/** A task in each point; `change` of its solve rate from the first to the last is null where one of them has none. */
export type TaskLine = {
  task: string;
  tried: Tried[];
  first: Tried;
  last: Tried;
  change: number | null;
  turns: number | null;
};

const triedOf = (counts: number[] | undefined): Tried => ({ solved: counts?.[0] ?? 0, graded: counts?.[1] ?? 0 });

/** Returns whether each of several agents is compared with the first, in place of a headline. */
export const comparesMany = (figures: ReportFigures) => figures.agents.length > 2;

/** Returns the name of a row of agents: its label, with the agent if it has another name. */
export const agentName = (row: ReportFigures["agents"][number]) => (row.label === row.agent ? row.label : `${row.label} (${row.agent})`);

export function taskLines(figures: ReportFigures): TaskLine[] {
  return figures.tasks.map((row) => {
    const tried = row.tried.map(triedOf);
    const [first, last] = [triedOf(row.tried[0]), triedOf(row.tried.at(-1))];
    const isCompared = row.tried.length > 1 && first.graded > 0 && last.graded > 0;
    const change = isCompared ? last.solved / last.graded - first.solved / first.graded : null;
    return { task: row.task_id, tried, first, last, change, turns: row.turns };
  });
}

/** Returns a chart's curves over all the places that any of them has a value at. */
export function chartOf(chart: ReportChart): { x: number[]; series: Series[] } {
  const x = [...new Set(chart.curves.flatMap((curve) => curve.x))].sort((one, other) => one - other);
  const series = chart.curves.map((curve): Series => {
    const at = <Value>(column: readonly Value[]) => {
      const values = new Map(curve.x.map((place, index) => [place, column[index] ?? null]));
      return x.map((place) => values.get(place) ?? null);
    };
    const bounds = curve.low.some((value) => value !== null) ? { low: at(curve.low), high: at(curve.high) } : {};
    return { label: curve.name, values: at(curve.values), tone: curve.main ? "accent" : "warn", ...bounds };
  });
  return { x, series };
}
