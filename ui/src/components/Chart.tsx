import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { Text } from "./Text";
import { useTheme } from "./theme";
import styles from "./Chart.module.css";

export type Series = {
  label: string;
  values: (number | null)[];
  /** An interval around each value, drawn as a band. */
  low?: (number | null)[];
  high?: (number | null)[];
  tone?: "accent" | "warn" | "good" | "bad";
  dashed?: boolean;
};

type Props = {
  label: string;
  x: number[];
  series: Series[];
  /** The least range of the vertical axis; more where values are outside of it. */
  range?: [number, number];
  format: (value: number) => string;
  onPoint?: (index: number) => void;
};

const HEIGHT = 190;

function optionsOf(element: HTMLElement, props: Props): uPlot.Options {
  const style = getComputedStyle(element);
  const colour = (name: string) => style.getPropertyValue(`--${name}`).trim();
  const axis = {
    stroke: colour("muted"),
    grid: { stroke: colour("line"), width: 1 },
    ticks: { stroke: colour("line"), width: 1 },
    font: "11px system-ui, sans-serif",
  };
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  for (const one of props.series) {
    const stroke = colour(one.tone ?? "accent");
    const isAlone = one.values.filter((value) => value !== null).length < 40;
    const line: uPlot.Series = { label: one.label, stroke, width: 1.75, points: { show: isAlone, size: 5 }, spanGaps: true };
    if (one.dashed) line.dash = [5, 4];
    series.push(line);
    if (one.low !== undefined && one.high !== undefined) {
      const first = series.length;
      const edge: uPlot.Series = { stroke: "transparent", points: { show: false }, spanGaps: true };
      series.push({ ...edge, label: `${one.label} low` }, { ...edge, label: `${one.label} high` });
      bands.push({ series: [first + 1, first], fill: `${stroke}26` });
    }
  }
  return {
    width: element.clientWidth,
    height: HEIGHT,
    series,
    bands,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: {
      x: { time: false },
      y: {
        range: (_, low, high) => {
          const [least, most] = props.range ?? [low, high];
          const bottom = Math.min(least, low ?? least);
          const top = Math.max(most, high ?? most);
          return bottom === top ? [bottom - 0.5, top + 0.5] : [bottom, top];
        },
      },
    },
    axes: [
      { ...axis, size: 28, values: (_, values) => values.map((value) => (Number.isInteger(value) ? String(value) : "")) },
      {
        ...axis,
        size: (_, values) => 18 + 6.5 * Math.max(5, ...(values ?? []).map((value) => value.length)),
        values: (_, values) => values.map(props.format),
      },
    ],
  };
}

/** Curves over steps. A click on a point calls `onPoint`; a table of the values is there for who cannot see them. */
export function Chart(props: Props) {
  const container = useRef<HTMLDivElement>(null);
  const theme = useTheme();
  const { onPoint } = props;
  const hover = useRef<HTMLParagraphElement>(null);
  useEffect(() => {
    const element = container.current;
    if (element === null) return;
    const data: uPlot.AlignedData = [props.x];
    for (const one of props.series) {
      data.push(one.values);
      if (one.low !== undefined && one.high !== undefined) data.push(one.low, one.high);
    }
    const options = optionsOf(element, props);
    options.hooks = {
      setCursor: [
        (plot) => {
          const index = plot.cursor.idx;
          if (hover.current === null) return;
          hover.current.textContent =
            index == null || props.x[index] === undefined
              ? ""
              : [
                  `step ${props.x[index]}`,
                  ...props.series.map((one) => {
                    const value = one.values[index];
                    return `${one.label} ${value == null ? "–" : props.format(value)}`;
                  }),
                ].join(" · ");
        },
      ],
    };
    const plot = new uPlot(options, data, element);
    const click = () => {
      if (plot.cursor.idx != null) onPoint?.(plot.cursor.idx);
    };
    plot.over.addEventListener("click", click);
    const observer = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.destroy();
    };
    // A chart is drawn anew when its data or the colours change.
  }, [props, onPoint, theme]);
  return (
    <figure className={styles.figure}>
      <figcaption>
        <span className={styles.title}>
          <Text>{props.label}</Text>
        </span>
        <p ref={hover} className={styles.hover} />
        {props.series.length > 1 && (
          <ul className={styles.legend} aria-hidden="true">
            {props.series.map((one) => (
              <li key={one.label} className={styles[one.tone ?? "accent"]}>
                {one.label}
              </li>
            ))}
          </ul>
        )}
      </figcaption>
      <div ref={container} className={styles.plot} aria-hidden="true" data-clickable={onPoint !== undefined} />
      <table className="visually-hidden">
        <caption>{props.label}</caption>
        <thead>
          <tr>
            <th scope="col">Step</th>
            {props.series.map((one) => (
              <th key={one.label} scope="col">
                {one.label}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.x.slice(-100).map((step, index) => (
            <tr key={step}>
              <td>{step}</td>
              {props.series.map((one) => {
                const value = one.values.slice(-100)[index];
                return <td key={one.label}>{value == null ? "–" : props.format(value)}</td>;
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </figure>
  );
}
