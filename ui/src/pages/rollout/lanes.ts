import type { BranchView, CallLine } from "../../api/types";

/** Branches that are drawn on one line: of one role, under one lane, and none at the time of another. */
export type Lane = { role: string; depth: number; superseded: boolean; branches: BranchView[]; calls: number };

/**
 * Returns the lanes of a rollout, each below the one it hangs under. A session that went on after compactions is one
 * lane; subagents that ran at once have a lane each.
 */
export function lanesOf(branches: BranchView[]): Lane[] {
  const roots: Node[] = [];
  const byBranch = new Map<string, Node>();
  for (const branch of branches) {
    const above = branch.above === null ? undefined : byBranch.get(branch.above);
    const beside = above?.below ?? roots;
    let node = beside.find(
      ({ lane }) =>
        lane.role === branch.role &&
        lane.superseded === branch.superseded &&
        (lane.branches.at(-1)?.ended_at ?? 0) <= branch.started_at,
    );
    if (node === undefined) {
      const depth = above === undefined ? 0 : above.lane.depth + 1;
      node = { lane: { role: branch.role, depth, superseded: branch.superseded, branches: [], calls: 0 }, below: [] };
      beside.push(node);
    }
    node.lane.branches.push(branch);
    node.lane.calls += branch.calls;
    byBranch.set(branch.name, node);
  }
  return flat(roots);
}

type Node = { lane: Lane; below: Node[] };

const flat = (nodes: Node[]): Lane[] => nodes.flatMap(({ lane, below }) => [lane, ...flat(below)]);

/** Calls this close, in per cent of the width, are drawn as one. */
const NARROW = 0.1;

/** Returns bars as the path of one SVG element, from `top` down; `share` gives the place of a moment in per cent. */
export function barsPath(spans: [number, number][], share: (moment: number) => number, top: number, height: number): string {
  const bars: [number, number][] = [];
  for (const [start, end] of spans) {
    const [left, right] = [share(start), Math.max(share(start) + NARROW, share(end))];
    const last = bars.at(-1);
    if (last !== undefined && left >= last[0] && left - last[1] < NARROW) last[1] = Math.max(last[1], right);
    else bars.push([left, right]);
  }
  return bars.map(([left, right]) => `M${left.toFixed(2)} ${top}H${right.toFixed(2)}v${height}H${left.toFixed(2)}z`).join("");
}

/** Returns the call of a lane that is nearest to a moment; undefined where there is none. */
export function nearestCall(calls: CallLine[], moment: number): CallLine | undefined {
  const distance = (call: CallLine) => Math.max(call.started_at - moment, moment - call.ended_at, 0);
  return calls.reduce<CallLine | undefined>(
    (best, call) => (best === undefined || distance(call) < distance(best) ? call : best),
    undefined,
  );
}
