import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import { useMemo } from "react";
import { loopQuery } from "../../api/queries";
import type { LoopStep, LoopView as Loop } from "../../api/types";
import { Chart, type Series } from "../../components/Chart";
import { Checklist, Toolbar } from "../../components/controls";
import { useKeys } from "../../components/keyboard";
import { Badge, Empty, Rate } from "../../components/marks";
import { Card } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { joinList, splitList, toggled } from "../../text/address";
import { count, duration, percent } from "../../text/format";
import { evaluationsAt, figure, funnelBars, stepsOf, valueNames } from "./curves";
import styles from "./LoopView.module.css";

const SHOWN_VALUES = 4;

function Funnel({ step }: { step: LoopStep }) {
  return (
    <ol className={styles.funnel}>
      {funnelBars(step.funnel).map(({ stage, share }) => (
        <li key={stage.stage}>
          <span className={styles.stage}>{stage.stage}</span>
          <meter className={styles.meter} value={share} max={1} aria-label={`${stage.stage}: ${stage.count}`} />
          <strong>{count(stage.count)}</strong>
          <span className={styles.lost}>
            {Object.entries(stage.lost ?? {}).map(([reason, amount]) => (
              <Badge key={reason} tone="warn">
                −{count(amount)} <Text>{reason}</Text>
              </Badge>
            ))}
          </span>
        </li>
      ))}
    </ol>
  );
}

function StepDetails({ step }: { step: LoopStep }) {
  const link = (name: string, search: Record<string, string>) =>
    step.store_id === null ? null : (
      <Link to="/s/$store" params={{ store: step.store_id }} search={search as never}>
        {name}
      </Link>
    );
  return (
    <Card
      title={`Step ${step.step}: ${step.trained ? "trained" : "why nothing was trained"}`}
      note={
        <>
          sampled by <Text>{step.sampled_by}</Text>, made version <Text>{step.version || "–"}</Text>
        </>
      }
    >
      <Funnel step={step} />
      <p className={styles.links}>
        {link("All rollouts", {})} {link("Solved", { outcome: "solved" })} {link("Unsolved", { outcome: "unsolved" })}{" "}
        {link("Not graded", { outcome: "ungraded" })}
      </p>
      {Object.keys(step.skipped).length > 0 && (
        <p className={styles.note}>
          Skipped:{" "}
          <Text>
            {Object.entries(step.skipped)
              .map(([reason, amount]) => `${amount} ${reason}`)
              .join(", ")}
          </Text>
        </p>
      )}
    </Card>
  );
}

/** What the version after a step solved of the held-out tasks, with a link to these rollouts. */
function Evaluation({ evaluation }: { evaluation: Loop["evaluations"][number] }) {
  const { step, solved, total, failed, store_id: wave } = evaluation;
  const result = `${count(solved)} of ${count(total)} held-out rollouts solved`;
  return (
    <Card title={`Evaluation after step ${step}`}>
      {wave === null ? (
        result
      ) : (
        <Link to="/s/$store" params={{ store: wave }}>
          {result}
        </Link>
      )}
      {failed > 0 && `, ${count(failed)} failed`}
    </Card>
  );
}

function Steps({ loop, selected, onSelect }: { loop: Loop; selected: number | null; onSelect: (step: number) => void }) {
  return (
    <div className={styles.scroller} tabIndex={0} role="region" aria-label="Steps">
      <table className={styles.table}>
        <thead>
          <tr>
            {["Step", "Phase", "Solve rate", "Groups used", "Held", "Staleness", "Trained", "Time"].map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {loop.steps.map((step) => (
            <tr key={step.step} aria-selected={step.step === selected} onClick={() => onSelect(step.step)}>
              <td>
                <button type="button" className={styles.link} onClick={() => onSelect(step.step)}>
                  {step.step}
                </button>
              </td>
              <td>{step.phase}</td>
              <td>
                <Rate
                  value={step.solve_rate?.estimate ?? null}
                  low={step.solve_rate?.low ?? null}
                  high={step.solve_rate?.high ?? null}
                />
              </td>
              <td>
                {step.used} of {step.groups}
              </td>
              <td>{step.held}</td>
              <td>{step.staleness}</td>
              <td>{step.trained ? <Badge tone="good">yes</Badge> : <Badge tone="warn">no</Badge>}</td>
              <td>{duration(Object.values(step.seconds).reduce((sum, seconds) => sum + seconds, 0))}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A loop: how solving changes, what the trainer reports, and why a step did or did not train. */
export function LoopView() {
  const { store } = useParams({ from: "/s/$store" });
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  const result = useQuery(loopQuery(store));
  const loop = result.data;
  const names = useMemo(() => valueNames(loop?.steps ?? []), [loop]);
  const shown = url["values"] === undefined ? names.slice(0, SHOWN_VALUES) : splitList(url["values"]);
  const x = useMemo(() => (loop === undefined ? [] : stepsOf(loop)), [loop]);
  const charts = useMemo(() => {
    if (loop === undefined) return [];
    const byStep = new Map(loop.steps.map((step) => [step.step, step]));
    const at = (pick: (step: LoopStep) => number | null | undefined) =>
      x.map((step) => {
        const row = byStep.get(step);
        return row === undefined ? null : (pick(row) ?? null);
      });
    const solved: Series[] = [
      {
        label: "training tasks",
        values: at((step) => step.solve_rate?.estimate),
        low: at((step) => step.solve_rate?.low),
        high: at((step) => step.solve_rate?.high),
      },
    ];
    if (loop.evaluations.length > 0) solved.push({ label: "held-out tasks", tone: "good", ...evaluationsAt(loop, x) });
    const rewards: Series[] = [
      {
        label: "reward",
        values: at((step) => step.reward),
      },
    ];
    const groups: Series[] = [
      { label: "groups", values: at((step) => step.groups), tone: "warn", dashed: true },
      { label: "used", values: at((step) => step.used) },
    ];
    return [
      { label: "Solve rate, 95 %", series: solved, range: [0, 1] as [number, number], format: (value: number) => percent(value) },
      { label: "Mean reward", series: rewards, range: [0, 1] as [number, number], format: (value: number) => value.toFixed(2) },
      { label: "Groups", series: groups, range: [0, 1] as [number, number], format: (value: number) => (Number.isInteger(value) ? String(value) : "") },
    ];
  }, [loop, x]);
  const values = useMemo(() => {
    const byStep = new Map((loop?.steps ?? []).map((step) => [step.step, step]));
    return shown.map((name) => ({
      name,
      series: [{ label: name, values: x.map((step) => byStep.get(step)?.values[name] ?? null) }],
    }));
    // `shown` is a new list in each render; its names say whether it changed.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, [loop, x, shown.join()]);

  const steps = loop?.steps ?? [];
  const selected = url["step"] === undefined ? (steps.at(-1)?.step ?? null) : Number(url["step"]);
  const move = (by: number) => {
    const at = steps.findIndex((step) => step.step === selected);
    const next = steps[Math.min(steps.length - 1, Math.max(0, at + by))];
    if (next !== undefined) setUrl({ step: String(next.step) });
  };
  const chosen = steps.find((step) => step.step === selected);
  const evaluation = loop?.evaluations.find((each) => each.step === selected);
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowRight: () => move(1),
    ArrowLeft: () => move(-1),
    Enter: () => {
      if (chosen?.store_id == null) return false;
      void navigate({ to: "/s/$store", params: { store: chosen.store_id } });
      return true;
    },
  });
  return (
    <Loaded result={result}>
      {(data) =>
        data.steps.length === 0 && data.evaluations.length === 0 ? (
          <Empty>No step has ended so far.</Empty>
        ) : (
          <div className={styles.page}>
            <div className={styles.charts}>
              {charts.map((chart) => (
                <Chart key={chart.label} x={x} {...chart} onPoint={(index) => setUrl({ step: String(x[index]) })} />
              ))}
              {values.map(({ name, series }) => (
                <Chart
                  key={name}
                  label={name}
                  x={x}
                  series={series}
                  format={(value) => figure(value)}
                  onPoint={(index) => setUrl({ step: String(x[index]) })}
                />
              ))}
            </div>
            {names.length > SHOWN_VALUES && (
              <Toolbar>
                <Checklist
                  label="Curves of the trainer"
                  options={names.map((name) => ({ id: name, name, isChecked: shown.includes(name) }))}
                  onToggle={(name) => setUrl({ values: joinList(toggled(shown, name)) ?? "none" })}
                />
              </Toolbar>
            )}
            <div className={styles.below}>
              <Steps loop={data} selected={selected} onSelect={(step) => setUrl({ step: String(step) })} />
              <div className={styles.details}>
                {chosen !== undefined && <StepDetails step={chosen} />}
                {evaluation !== undefined && <Evaluation evaluation={evaluation} />}
              </div>
            </div>
            {Object.keys(data.refused).length > 0 && (
              <p className={styles.note}>
                Tasks that did not pass validation: <Text>{Object.entries(data.refused).map(([task, why]) => `${task}: ${why}`).join("; ")}</Text>
              </p>
            )}
          </div>
        )
      }
    </Loaded>
  );
}
