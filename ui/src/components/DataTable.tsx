import {
  columnVisibilityFeature,
  createColumnHelper,
  type RowData,
  tableFeatures,
  useTable,
} from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import { type ReactNode, useEffect, useMemo, useRef } from "react";
import { useListKeys } from "./useListKeys";
import styles from "./DataTable.module.css";

export type Column<Row> = {
  id: string;
  header: string;
  cell: (row: Row) => ReactNode;
  /** The server can sort by it. */
  sortable?: boolean;
  /** Figures are set flush right. */
  numeric?: boolean;
  /** Takes the width that the others leave. */
  grows?: boolean;
};

type Props<Row> = {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
  rowKey: (row: Row) => string;
  /** How many rows there are on the server, where that is known. */
  total?: number | undefined;
  /** The column that rows are sorted by, with "-" before it for descending. */
  sort?: string | undefined;
  onSort?: (sort: string) => void;
  hidden?: string[];
  selected?: string | undefined;
  onSelect: (key: string) => void;
  onOpen: (row: Row) => void;
  onEnd?: () => void;
  isLoadingMore?: boolean;
};

const ROW_HEIGHT = 32;
const features = tableFeatures({ columnVisibilityFeature });

/**
 * A table of any number of rows, of which those on the screen are in the document. `j`, `k` and the arrows move the
 * selection, `Enter` opens it, a click on a header sorts.
 */
export function DataTable<Row extends RowData>(props: Props<Row>) {
  const { rows, rowKey, onEnd } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const definitions = useMemo(() => {
    const helper = createColumnHelper<typeof features, Row>();
    return helper.columns(
      props.columns.map((column) =>
        helper.display({ id: column.id, header: column.header, cell: ({ row }) => column.cell(row.original) }),
      ),
    );
  }, [props.columns]);
  const byId = useMemo(() => new Map(props.columns.map((column) => [column.id, column])), [props.columns]);
  const columnVisibility = useMemo(
    () => Object.fromEntries((props.hidden ?? []).map((id) => [id, false])),
    [props.hidden],
  );
  const table = useTable({
    features,
    columns: definitions,
    data: rows,
    getRowId: rowKey,
    state: { columnVisibility },
    onColumnVisibilityChange: () => undefined,
  });
  const models = table.getRowModel().rows;
  const virtualizer = useVirtualizer({
    count: models.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 12,
  });
  const items = virtualizer.getVirtualItems();
  const first = items[0]?.start ?? 0;
  const after = virtualizer.getTotalSize() - (items.at(-1)?.end ?? 0);
  const lastShown = items.at(-1)?.index ?? -1;

  useEffect(() => {
    if (onEnd !== undefined && lastShown >= models.length - 30) onEnd();
  }, [onEnd, lastShown, models.length]);

  const at = rows.findIndex((row) => rowKey(row) === props.selected);
  const wasShown = useRef(false);
  useEffect(() => {
    if (at < 0 || wasShown.current) return;
    wasShown.current = true;
    virtualizer.scrollToIndex(at); // the row in the address, once it is there
  }, [at, virtualizer]);
  useListKeys({
    count: rows.length,
    at,
    select: (index) => {
      const row = rows[index];
      if (row === undefined) return;
      props.onSelect(rowKey(row));
      virtualizer.scrollToIndex(index);
    },
    open: () => {
      const row = rows[at];
      if (row !== undefined) props.onOpen(row);
    },
  });

  const sortedBy = props.sort?.replace(/^-/, "");
  const descending = props.sort?.startsWith("-") ?? false;
  const ariaSort = (id: string) => (id !== sortedBy ? undefined : descending ? "descending" : "ascending");
  const span = table.getVisibleLeafColumns().length;

  return (
    <div className={styles.scroller} ref={scroller} tabIndex={0} role="region" aria-label={props.label}>
      <table className={styles.table} aria-rowcount={(props.total ?? rows.length) + 1}>
        <thead>
          {table.getHeaderGroups().map((group) => (
            <tr key={group.id}>
              {group.headers.map((header) => {
                const column = byId.get(header.column.id);
                const classes = [column?.numeric && styles.numeric, column?.grows && styles.grows];
                return (
                  <th
                    key={header.id}
                    scope="col"
                    className={classes.filter(Boolean).join(" ")}
                    aria-sort={ariaSort(header.column.id)}
                  >
                    {column?.sortable && props.onSort ? (
                      <button
                        type="button"
                        className={styles.sort}
                        onClick={(event) => {
                          if (event.detail > 0) event.currentTarget.blur(); // a mouse: Enter opens rows again
                          props.onSort?.(sortedBy === column.id && !descending ? `-${column.id}` : column.id);
                        }}
                      >
                        {column.header}
                        <span aria-hidden="true" className={styles.arrow}>
                          {sortedBy === column.id ? (descending ? "↓" : "↑") : ""}
                        </span>
                      </button>
                    ) : (
                      column?.header
                    )}
                  </th>
                );
              })}
            </tr>
          ))}
        </thead>
        <tbody>
          {first > 0 && (
            <tr aria-hidden="true">
              <td colSpan={span} style={{ height: first, padding: 0, border: 0 }} />
            </tr>
          )}
          {items.map((item) => {
            const row = models[item.index];
            if (row === undefined) return null;
            const isSelected = row.id === props.selected;
            return (
              <tr
                key={row.id}
                aria-rowindex={item.index + 2}
                aria-selected={isSelected}
                className={isSelected ? styles.selected : undefined}
                onClick={(event) => {
                  props.onSelect(row.id);
                  if ((event.target as HTMLElement).closest("a, button, input") === null) props.onOpen(row.original);
                }}
              >
                {row.getVisibleCells().map((cell) => {
                  const column = byId.get(cell.column.id);
                  const classes = [column?.numeric && styles.numeric, column?.grows && styles.grows];
                  return (
                    <td key={cell.id} className={classes.filter(Boolean).join(" ")}>
                      <table.FlexRender cell={cell} />
                    </td>
                  );
                })}
              </tr>
            );
          })}
          {after > 0 && (
            <tr aria-hidden="true">
              <td colSpan={span} style={{ height: after, padding: 0, border: 0 }} />
            </tr>
          )}
        </tbody>
      </table>
      {props.isLoadingMore && <p className={styles.more}>Loading more rows…</p>}
    </div>
  );
}
