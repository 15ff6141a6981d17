import type { FunnelStage, LoopStep, LoopView } from "../../api/types";

/** Returns the names of the trainer's numbers that any step has, those a person looks at first before the others. */
export function valueNames(steps: readonly LoopStep[]): string[] {
  const first = ["loss", "mismatch_kl", "mismatch", "kl", "entropy", "clip_fraction", "grad_norm"];
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.values)))].sort();
  const known = first.filter((name) => names.includes(name));
  return [...known, ...names.filter((name) => !known.includes(name))];
}

/** Returns the rates of evaluations at the steps, null where a step has none. */
export function evaluationsAt(loop: LoopView, steps: number[]) {
  const byStep = new Map(loop.evaluations.map((each) => [each.step, each]));
  const pick = (field: "estimate" | "low" | "high") => steps.map((step) => byStep.get(step)?.rate[field] ?? null);
  return { values: pick("estimate"), low: pick("low"), high: pick("high") };
}

/** Returns all steps that the loop has a collection or an evaluation of, in order. */
export function stepsOf(loop: LoopView): number[] {
  return [...new Set([...loop.steps, ...loop.evaluations].map((each) => each.step))].sort((one, other) => one - other);
}

/** Returns the stages with the share that each has of the first one that counts the same thing, for bars. */
export function funnelBars(stages: readonly FunnelStage[]): { stage: FunnelStage; share: number }[] {
  const isOfRollouts = (stage: FunnelStage) => stage.stage === "rollouts" || stage.stage === "graded";
  const isOfGroups = (stage: FunnelStage) => stage.stage.startsWith("groups");
  const most = (matches: (stage: FunnelStage) => boolean) =>
    Math.max(1, ...stages.filter(matches).map((stage) => stage.count));
  return stages.map((stage) => {
    const kind = [isOfRollouts, isOfGroups].find((matches) => matches(stage));
    return { stage, share: kind === undefined ? Math.min(1, stage.count) : stage.count / most(kind) };
  });
}

/** Returns a trainer's number in at most seven characters, for an axis. */
export function figure(value: number): string {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001 || size >= 100_000) return value.toExponential(1).replace("e+", "e");
  return size >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
}
