import { useKeys } from "./keyboard";

type List = {
  count: number;
  /** The index of the selected item; -1 where none is. */
  at: number;
  select: (index: number) => void;
  open: () => void;
};

/** The keys of a list: `j`, `k` and the arrows select another item, `Enter` opens the selected one. */
export function useListKeys({ count, at, select, open }: List): void {
  const move = (step: number) => {
    if (count > 0) select(at === -1 ? 0 : Math.min(count - 1, Math.max(0, at + step)));
  };
  useKeys({
    j: () => move(1),
    k: () => move(-1),
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    Enter: () => {
      // A link or a button that has the focus takes the key itself.
      if (at === -1 || document.activeElement?.closest("a, button, [role=tab]") != null) return false;
      open();
      return true;
    },
  });
}
