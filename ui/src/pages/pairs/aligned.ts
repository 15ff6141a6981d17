import type { BlockView } from "../../api/types";

export type AlignedBlocks = [BlockView | null, BlockView | null];

/**
 * Returns the blocks of two answers side by side: the n-th of a kind of the one beside the n-th of that kind of the
 * other, in the order of the first; what only one of them has stands alone, where it came.
 */
export function alignedBlocks(chosen: readonly BlockView[], rejected: readonly BlockView[]): AlignedBlocks[] {
  const rows: AlignedBlocks[] = [];
  let next = 0;
  for (const block of chosen) {
    const at = rejected.findIndex((other, index) => index >= next && other.kind === block.kind);
    if (at === -1) {
      rows.push([block, null]);
      continue;
    }
    for (const other of rejected.slice(next, at)) rows.push([null, other]);
    rows.push([block, rejected[at] ?? null]);
    next = at + 1;
  }
  for (const other of rejected.slice(next)) rows.push([null, other]);
  return rows;
}
