import type { RolloutRow } from "../../api/types";
import { Badge } from "../../components/marks";

/** What became of a rollout: solved, unsolved, or where it stands. */
export function StatusBadge({ row }: { row: Pick<RolloutRow, "status" | "reward"> }) {
  if (row.reward !== null) {
    return row.reward >= 1 ? <Badge tone="good">✓ solved</Badge> : <Badge tone="bad">✗ unsolved</Badge>;
  }
  if (row.status === "failed") return <Badge tone="warn">! failed</Badge>;
  if (row.status === "running" || row.status === "preparing") return <Badge tone="accent">{row.status}</Badge>;
  return <Badge>{row.status}</Badge>;
}

export function IntegrityBadge({ status, reviewed }: { status: RolloutRow["integrity"]; reviewed: boolean }) {
  if (status === null) return null;
  const tone = status === "clean" ? "muted" : status === "forged" ? "bad" : "warn";
  return (
    <Badge tone={tone}>
      {status}
      {reviewed && <span title="a person has looked at it"> · reviewed</span>}
    </Badge>
  );
}
