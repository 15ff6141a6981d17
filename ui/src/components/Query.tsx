import type { ReactNode } from "react";
import { ApiError } from "../api/source";
import { Text } from "./Text";
import styles from "./Query.module.css";

type Result<Data> = { data: Data | undefined; error: Error | null; isPending: boolean };

export function ErrorNote({ error }: { error: Error }) {
  return (
    <div className={styles.error} role="alert">
      <strong>{error.message}</strong>
      {error instanceof ApiError && <p>{error.remedy}</p>}
    </div>
  );
}

/** Says that what the address names is not here, and what is shown in its place. */
export function NotHere({ what, shown }: { what: string; shown: string }) {
  return (
    <p className={styles.error} role="alert">
      There is no <Text>{what}</Text> here: {shown}.
    </p>
  );
}

/** Shows the data of a query; while it is read, and where it cannot be read, says so. */
export function Loaded<Data>({ result, children }: { result: Result<Data>; children: (data: Data) => ReactNode }) {
  if (result.data !== undefined) {
    return (
      <>
        {result.error !== null && <ErrorNote error={result.error} />}
        {children(result.data)}
      </>
    );
  }
  if (result.error !== null) return <ErrorNote error={result.error} />;
  return (
    <p className={styles.loading} role="status">
      Loading…
    </p>
  );
}
