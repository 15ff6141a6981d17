import { type ReactNode, useState } from "react";
import { Button } from "../../components/controls";
import { bytes, counted } from "../../text/format";
import styles from "./Block.module.css";

/** Longer texts are folded to their first lines until they are opened. */
const FOLDED_LINES = 14;
const FOLDED_CHARACTERS = 2_500;

/** Reads a long text from an index on; `next` is where to go on, null at its end. */
export type ReadMore = (offset: number) => Promise<{ text: string; next: number | null }>;

/** A text of any size: its beginning, then more of it by button, each with how much there is. */
export function LongText(props: {
  text: string;
  size: number;
  more?: ReadMore | undefined;
  render: (text: string) => ReactNode;
}) {
  const { size } = props;
  const [read, setRead] = useState("");
  const [failure, setFailure] = useState<string | null>(null);
  const [isOpen, setOpen] = useState(false);
  const text = props.text + read;
  const lines = text.split("\n");
  const isLong = lines.length > FOLDED_LINES + 4 || text.length > FOLDED_CHARACTERS;
  const shown = isOpen || !isLong ? text : lines.slice(0, FOLDED_LINES).join("\n").slice(0, FOLDED_CHARACTERS);
  const rest = size - text.length;
  const readMore = () =>
    props.more?.(text.length).then(
      (range) => setRead((before) => before + range.text),
      (error: Error) => setFailure(error.message),
    );
  return (
    <>
      {props.render(shown)}
      {(isLong || rest > 0) && (
        <div className={styles.more}>
          {isLong && (
            <Button onClick={() => setOpen(!isOpen)} aria-expanded={isOpen}>
              {isOpen ? "Fold" : `Show ${counted(lines.length, "line")}`}
            </Button>
          )}
          {(isOpen || !isLong) && rest > 0 && props.more !== undefined && (
            <Button onClick={() => void readMore()}>
              Read more: {bytes(text.length)} of {bytes(size)}
            </Button>
          )}
          {rest > 0 && (props.more === undefined || (!isOpen && isLong)) && <span>{bytes(size)} in all</span>}
          {failure !== null && <span role="alert">{failure}</span>}
        </div>
      )}
    </>
  );
}
