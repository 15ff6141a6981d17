/** The phases of an attempt in their order, as `understudy status` names them, and what each is. */
const PHASES = new Map([
  ["prepare_s", "prepare the task's files"],
  ["open_s", "open the sandbox"],
  ["agent_s", "agent"],
  ["patch_s", "read the patch"],
  ["close_s", "close the sandbox"],
  ["check_s", "check for findings"],
  ["grade_s", "grade"],
]);

/** A part of an attempt: when it began, in Unix seconds, and for how long it went on. */
export type Phase = { name: string; started_at: number; seconds: number };

/** Returns what a phase is called on the page. */
export function phaseName(key: string): string {
  return PHASES.get(key) ?? key.replace(/_s$/, "").replaceAll("_", " ");
}

/** Returns an attempt's phases, which follow each other, with the time when each began; unknown ones come last. */
export function phasesOf(started_at: number, timings: Record<string, number>): Phase[] {
  const known = [...PHASES.keys()].filter((key) => timings[key] !== undefined);
  const others = Object.keys(timings).filter((key) => !PHASES.has(key));
  let at = started_at;
  return [...known, ...others].map((key) => {
    const seconds = timings[key] ?? 0;
    const phase = { name: phaseName(key), started_at: at, seconds };
    at += seconds;
    return phase;
  });
}
