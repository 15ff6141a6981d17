import type { ReactNode } from "react";
import { percent } from "../text/format";
import styles from "./marks.module.css";

export type Tone = "good" | "bad" | "warn" | "accent" | "muted";

/** A short state in a pill: solved, failed, suspicious. */
export function Badge({ tone = "muted", children, title }: { tone?: Tone; children: ReactNode; title?: string }) {
  return (
    <span className={`${styles.badge} ${styles[tone]}`} title={title}>
      {children}
    </span>
  );
}

/** A figure with its name beneath. */
export function Stat({ label, value, note, tone }: { label: string; value: ReactNode; note?: ReactNode; tone?: Tone }) {
  return (
    <div className={styles.stat}>
      <dt>{label}</dt>
      <dd className={tone ? styles[tone] : undefined}>{value}</dd>
      {note != null && <dd className={styles.note}>{note}</dd>}
    </div>
  );
}

export function Stats({ children }: { children: ReactNode }) {
  return <dl className={styles.stats}>{children}</dl>;
}

/** A share between 0 and 1 with its confidence interval, as a bar and in figures unless it is `isBare`. */
export function Rate(props: { value: number | null; low?: number | null; high?: number | null; isBare?: boolean }) {
  const { value, low, high } = props;
  if (value == null) return <span className={styles.absent}>–</span>;
  const interval = low != null && high != null;
  const label = interval ? `${percent(value)}, 95% interval ${percent(low)} to ${percent(high)}` : percent(value);
  return (
    <span className={styles.rate} title={label}>
      <svg viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true" className={styles.bar}>
        <rect x="0" y="5" width="100" height="2" className={styles.track} />
        {interval && (
          <rect x={low * 100} y="2" width={Math.max(1, (high - low) * 100)} height="8" className={styles.interval} />
        )}
        <rect x={Math.min(98, value * 100)} y="0" width="2" height="12" className={styles.point} />
      </svg>
      {!props.isBare && <span>{percent(value)}</span>}
    </span>
  );
}

/** How far something is: `done` of `total`. */
export function Progress({ done, total }: { done: number; total: number }) {
  return (
    <span className={styles.rate}>
      <progress className={styles.progress} value={done} max={Math.max(total, 1)} aria-label={`${done} of ${total}`} />
      <span>
        {done}/{total}
      </span>
    </span>
  );
}

export function Empty({ children }: { children: ReactNode }) {
  return <p className={styles.empty}>{children}</p>;
}

export function Key({ children }: { children: ReactNode }) {
  return <kbd className={styles.key}>{children}</kbd>;
}
