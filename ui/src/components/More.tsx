import { type ReactNode, useState } from "react";
import { count } from "../text/format";
import { Button } from "./controls";

/** How many steps of a list are in the document at once: with more, the first ones give way. */
const MOST_STEPS = 5;

/** Returns the rows of a long list that are shown, and buttons that show others; null if all are shown. */
export function useMore<Row>(rows: Row[], step = 500): [Row[], ReactNode] {
  const [wanted, setEnd] = useState(step);
  const end = Math.min(wanted, Math.max(step, rows.length));
  const start = Math.max(0, end - MOST_STEPS * step);
  const hidden = rows.length - end;
  if (hidden <= 0 && start === 0) return [rows, null];
  return [
    rows.slice(start, end),
    <span key="more">
      {start > 0 && (
        <Button onClick={() => setEnd(Math.max(step, end - step))}>Show {count(Math.min(step, start))} before</Button>
      )}{" "}
      {hidden > 0 && (
        <Button onClick={() => setEnd(end + step)}>
          Show {count(Math.min(step, hidden))} more of {count(rows.length)}
        </Button>
      )}
    </span>,
  ];
}
