import { type ReactNode, useState } from "react";
import { count } from "../text/format";
import { Button } from "./controls";

/** Returns the first rows of a long list, and a button that shows more of them; null if all are shown. */
export function useMore<Row>(rows: Row[], step = 500): [Row[], ReactNode] {
  const [most, setMost] = useState(step);
  const hidden = rows.length - most;
  if (hidden <= 0) return [rows, null];
  return [
    rows.slice(0, most),
    <Button key="more" onClick={() => setMost(most + step)}>
      Show {count(Math.min(step, hidden))} more of {count(rows.length)}
    </Button>,
  ];
}
