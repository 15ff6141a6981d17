import { useQuery } from "@tanstack/react-query";
import { Link, useNavigate, useParams } from "@tanstack/react-router";
import type { ReactNode } from "react";
import { reportQuery } from "../../api/queries";
import { source } from "../../api/source";
import type { ReportChart, ReportFigures, ReportView as Report } from "../../api/types";
import { Chart } from "../../components/Chart";
import { type Column, DataTable } from "../../components/DataTable";
import { Badge, Empty, Rate, Stat, Stats, type Tone } from "../../components/marks";
import { Card, Page, Trail } from "../../components/Page";
import { Loaded } from "../../components/Query";
import { TableHead } from "../../components/TableHead";
import { Text } from "../../components/Text";
import { useUrlState } from "../../components/useUrlState";
import { count, counted, duration, moment, money, percent, short } from "../../text/format";
import { figure } from "../loop/curves";
import table from "../store/HealthView.module.css";
import { agentName, chartOf, comparesMany, pointNotes, sums, type TaskLine, taskLines, type Tried } from "./report";
import styles from "./ReportView.module.css";

const TONES: Record<Report["mood"], Tone> = { better: "good", worse: "bad", open: "muted" };

function Rows({ head, rows }: { head: string[]; rows: ReactNode[][] }) {
  return (
    <div className={styles.wide} tabIndex={0} role="region" aria-label={head.filter(Boolean).join(", ")}>
      <table className={table.table}>
        <TableHead names={head} />
        <tbody>
          {rows.map((cells, row) => (
            <tr key={row}>
              {cells.map((cell, index) => (
                <td key={index}>{typeof cell === "string" ? <Text>{cell}</Text> : cell}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Verdict({ report }: { report: Report }) {
  const { headline } = report.figures;
  return (
    <Card
      title={
        <>
          {headline !== null && `${headline.difference.value > 0 ? "+" : ""}${(headline.difference.value * 100).toFixed(1)} points: `}
          <Badge tone={TONES[report.mood]}>{report.verdict}</Badge>
        </>
      }
    >
      <p>
        <Text>{report.sentence}</Text>
      </p>
      <ul className={styles.reasons}>
        {report.reasons.map((reason) => (
          <li key={reason.text} data-holds={reason.holds}>
            {reason.text}
          </li>
        ))}
      </ul>
    </Card>
  );
}

function Totals({ figures }: { figures: ReportFigures }) {
  const total = sums(figures);
  return (
    <Stats>
      <Stat label="Rollouts graded" value={count(total.graded)} />
      <Stat label="Calls" value={short(total.calls)} />
      <Stat label="Prompt tokens" value={short(total.prompt_tokens)} />
      <Stat label="Sampled tokens" value={short(total.completion_tokens)} />
      <Stat label="Infrastructure failures" value={count(total.failed)} {...(total.failed > 0 ? { tone: "warn" } : {})} />
      <Stat label="Suspicious patches" value={count(total.suspicious)} {...(total.suspicious > 0 ? { tone: "warn" } : {})} />
      {total.cost_usd > 0 && <Stat label="Spend" value={money(total.cost_usd)} />}
      {total.pending > 0 && <Stat label="Pending" value={count(total.pending)} />}
    </Stats>
  );
}

function Charts({ charts }: { charts: ReportChart[] }) {
  return (
    <div className={styles.charts}>
      {charts.map((chart) => (
        <Chart
          key={chart.title}
          label={chart.caption === "" ? chart.title : `${chart.title}, ${chart.caption}`}
          {...chartOf(chart)}
          {...(chart.share ? { range: [0, 1] as [number, number] } : {})}
          format={(value) => (chart.share ? percent(value) : figure(value))}
        />
      ))}
    </div>
  );
}

function Points({ report, title, points, stores }: { report: Report; title: string; points: ReportFigures["points"]; stores: (string | null)[] }) {
  if (points.length === 0) return null;
  return (
    <Card title={title}>
      <Rows
        head={["", "Policy", "Solved", "Rate, 95 %", "Mean reward", "Turns", "Sampled tokens", "Time", "Remarks"]}
        rows={points.map((point, index) => [
          stores[index] == null || report.figures.kind === "run" ? (
            point.label
          ) : (
            <Link to="/s/$store" params={{ store: stores[index] }}>
              <Text>{point.label}</Text>
            </Link>
          ),
          point.version ?? "–",
          `${point.solved} of ${point.solved + point.unsolved}`,
          <Rate
            key="rate"
            value={point.solve_rate?.estimate ?? null}
            low={point.solve_rate?.low ?? null}
            high={point.solve_rate?.high ?? null}
          />,
          point.reward === null ? "–" : figure(point.reward.estimate),
          point.turns === null ? "–" : figure(point.turns.estimate),
          point.sampled === null ? "–" : short(Math.round(point.sampled.estimate)),
          duration(point.seconds?.estimate),
          pointNotes(point),
        ])}
      />
    </Card>
  );
}

const tried = ({ solved, graded }: Tried) => (graded === 0 ? "–" : `${solved}/${graded}`);

const TASK: Column<TaskLine> = { id: "task", header: "Task", grows: true, cell: (row) => <Text>{row.task}</Text> };

const TASK_COLUMNS: Column<TaskLine>[] = [
  TASK,
  { id: "first", header: "First", numeric: true, cell: (row) => tried(row.first) },
  { id: "last", header: "Last", numeric: true, cell: (row) => tried(row.last) },
  {
    id: "change",
    header: "Change",
    numeric: true,
    cell: (row) => (row.change === null ? "–" : <Badge tone={row.change > 0 ? "good" : row.change < 0 ? "bad" : "muted"}>{percent(row.change)}</Badge>),
  },
  { id: "turns", header: "Turns", numeric: true, cell: (row) => (row.turns === null ? "–" : figure(row.turns)) },
];

/** A column for each of several agents. */
const agentColumns = (figures: ReportFigures): Column<TaskLine>[] => [
  TASK,
  ...figures.agents.map(
    (row, index): Column<TaskLine> => ({
      id: `agent-${index}`,
      header: row.label,
      numeric: true,
      cell: (line) => tried(line.tried[index] ?? { solved: 0, graded: 0 }),
    }),
  ),
];

const signed = (share: number) => `${share > 0 ? "+" : share < 0 ? "−" : ""}${Math.abs(share * 100).toFixed(1)}`;

function Agents({ figures }: { figures: ReportFigures }) {
  const [first, ...others] = figures.agents;
  if (first === undefined) return null;
  return (
    <Card
      title="Agents"
      note={`Each is compared with ${first.label}, task by task, over the tasks that both have. The interval takes tasks, not rollouts, for independent.`}
    >
      <Rows
        head={["Agent", "Mean over tasks", "Tasks", "Tasks in both", `To ${first.label}, points`, "95 %", "p by task", others.length > 1 ? "p adjusted" : "", ""]}
        rows={figures.agents.map((row) => [
          agentName(row),
          row.tasks === 0 ? "–" : percent(row.solve_rate),
          count(row.tasks),
          row === first ? "" : count(row.common_tasks),
          row.difference === null ? "" : signed(row.difference.estimate),
          row.difference === null ? "" : `${signed(row.difference.low)} to ${signed(row.difference.high)}`,
          row.p_by_task === null ? "" : row.p_by_task.toPrecision(2),
          row.p_adjusted === null || others.length < 2 ? "" : row.p_adjusted.toPrecision(2),
          row === first || row.difference === null ? (
            ""
          ) : (
            <Badge key="judgement" tone={TONES[row.judgement]}>
              {row.judgement === "open" ? "no difference beyond chance" : `${row.judgement}, beyond chance`}
            </Badge>
          ),
        ])}
      />
    </Card>
  );
}

function Tasks({ report }: { report: Report }) {
  const [url, setUrl] = useUrlState();
  const navigate = useNavigate();
  const lines = taskLines(report.figures);
  const store = report.point_stores.at(-1);
  if (lines.length === 0) return null;
  const many = comparesMany(report.figures);
  const changes = lines.flatMap((line) => (line.change === null ? [] : [line.change]));
  const [more, less] = [changes.filter((change) => change > 0).length, changes.filter((change) => change < 0).length];
  return (
    <Card
      title={counted(lines.length, "task")}
      note={!many && changes.length > 0 && `${count(more)} of ${count(changes.length)} are solved more often than at first, ${count(less)} less often.`}
    >
      <div className={styles.tasks}>
        <DataTable
          label="Tasks"
          columns={many ? agentColumns(report.figures) : TASK_COLUMNS}
          rows={lines}
          rowKey={(row) => row.task}
          selected={url["task"]}
          onSelect={(task) => setUrl({ task })}
          onOpen={(row) => store != null && void navigate({ to: "/s/$store/task/$task", params: { store, task: row.task } })}
        />
      </div>
    </Card>
  );
}

function Tables({ report }: { report: Report }) {
  const { figures } = report;
  return (
    <div className={styles.cards}>
      <Card title="Why rollouts were not solved">
        <Rows head={["Why", "Rollouts"]} rows={Object.entries(figures.unsolved).map(([why, number]) => [why, count(number)])} />
      </Card>
      <Card title="Failures by boundary">
        <Rows
          head={["Boundary", "Attempts", "Given up", "Most often"]}
          rows={figures.boundaries.map((row) => [row.boundary, count(row.attempts), count(row.given_up), row.example])}
        />
      </Card>
      <Card title="Policy versions">
        <Rows
          head={["Version", "Calls", "Met an update", "Sampled tokens", "First call", "Last call"]}
          rows={figures.versions.map((use) => [
            use.version ?? "unknown",
            count(use.calls),
            count(use.mixed),
            short(use.completion_tokens),
            moment(use.first_at),
            moment(use.last_at),
          ])}
        />
      </Card>
      <Card title="What was run">
        <Rows head={["Setting", "Value"]} rows={Object.entries(figures.about)} />
      </Card>
    </div>
  );
}

function Notes({ report }: { report: Report }) {
  return (
    <Card title="What to know of these figures">
      <ul className={styles.notes}>
        {report.figures.notes.map((note) => (
          <li key={note}>
            <Text>{note}</Text>
          </li>
        ))}
        <li>
          Solve rates are over graded rollouts; infrastructure failures and what is pending are in none of them. Intervals are 95 %: Wilson's
          of a rate, Student's of a mean, Newcombe's of a difference of two rates. They take rollouts for independent, which several of one task
          are not. So a difference is called beyond chance only where its interval excludes 0 and a permutation test by task gives p below 0.05.
        </li>
        {comparesMany(report.figures) ? (
          <li>
            Each agent is compared with the first. The p-values are adjusted for the number of these comparisons by Holm's method, the
            intervals are not: of many 95 % intervals, some miss the true difference. Differences between two other agents are not tested.
          </li>
        ) : (
          <li>The first point is compared with the last, never with the best: choosing the best of several makes a gain out of chance.</li>
        )}
        <li>Rewards are those of graded rollouts in the stores, not what the trainer reports. Made {moment(report.figures.made_at)}.</li>
      </ul>
    </Card>
  );
}

/** Whether a policy got better, and whether that is beyond chance: of a loop, a run, or runs that are compared. */
function Content({ stores }: { stores: string }) {
  const result = useQuery(reportQuery(stores));
  return (
    <Loaded result={result}>
      {(report) => (
        <div className={styles.page}>
          <Verdict report={report} />
          <Agents figures={report.figures} />
          <Totals figures={report.figures} />
          <Charts charts={report.charts} />
          <Points report={report} title={report.figures.kind === "loop" ? "Evaluations" : "Runs"} points={report.figures.points} stores={report.point_stores} />
          <Points report={report} title="Collected for training" points={report.figures.collected} stores={[]} />
          <Tasks report={report} />
          <Charts charts={report.training} />
          <Tables report={report} />
          <Notes report={report} />
        </div>
      )}
    </Loaded>
  );
}

/** The report of one run or loop, as a view of it. */
export function StoreReport() {
  return <Content stores={useParams({ from: "/s/$store" }).store} />;
}

/** The report of several runs, whose ids are in the address. */
export function ReportPage() {
  const [url] = useUrlState();
  return (
    <Page title="Report" trail={<Trail to="/">Runs</Trail>}>
      {source.isServer && !url["stores"] ? (
        <Empty>
          The address names no run. Open a run or a loop and choose “Report”, or choose “Compare” there for a report of two
          runs.
        </Empty>
      ) : (
        <Content stores={url["stores"] ?? ""} />
      )}
    </Page>
  );
}
