import * as Popover from "@radix-ui/react-popover";
import { type ReactNode, useEffect, useState } from "react";
import { Key } from "./marks";
import styles from "./controls.module.css";

/** A row of fields and buttons above a list. */
export function Toolbar({ children }: { children: ReactNode }) {
  return <div className={styles.toolbar}>{children}</div>;
}

export function Button(props: React.ComponentProps<"button"> & { strong?: boolean }) {
  const { strong, className, ...rest } = props;
  const classes = [styles.button, strong && styles.strong, className].filter(Boolean).join(" ");
  return <button type="button" {...rest} className={classes} />;
}

/** A field for words to search for, reached with "/"; `onChange` follows a short pause in typing. */
export function SearchField(props: {
  label: string;
  value: string | undefined;
  onChange: (value: string | undefined) => void;
}) {
  const { value, onChange } = props;
  const [text, setText] = useState(value ?? "");
  useEffect(() => setText(value ?? ""), [value]);
  useEffect(() => {
    if (text === (value ?? "")) return;
    const timer = window.setTimeout(() => onChange(text === "" ? undefined : text), 250);
    return () => window.clearTimeout(timer);
  }, [text, value, onChange]);
  return (
    <label className={styles.search}>
      <span className="visually-hidden">{props.label}</span>
      <input
        type="search"
        value={text}
        placeholder={props.label}
        onChange={(event) => setText(event.target.value)}
        spellCheck={false}
        autoComplete="off"
      />
      <Key>/</Key>
    </label>
  );
}

/** One of a few values, or any of them. */
export function Choice(props: {
  label: string;
  value: string | undefined;
  options: readonly (string | readonly [string, string])[];
  any?: string;
  onChange: (value: string | undefined) => void;
}) {
  return (
    <label className={styles.choice}>
      <span>{props.label}</span>
      <select
        value={props.value ?? ""}
        onChange={(event) => props.onChange(event.target.value === "" ? undefined : event.target.value)}
      >
        {props.any !== undefined && <option value="">{props.any}</option>}
        {props.options.map((option) => {
          const [value, name] = typeof option === "string" ? [option, option] : option;
          return (
            <option key={value} value={value}>
              {name}
            </option>
          );
        })}
      </select>
    </label>
  );
}

/** Checkboxes behind a button, such as the columns of a table. */
export function Checklist(props: {
  label: string;
  options: { id: string; name: string; isChecked: boolean }[];
  onToggle: (id: string) => void;
}) {
  return (
    <Popover.Root>
      <Popover.Trigger className={styles.button}>{props.label} ▾</Popover.Trigger>
      <Popover.Portal>
        <Popover.Content className={styles.popover} align="end" sideOffset={4} aria-label={props.label}>
          {props.options.map((option) => (
            <label key={option.id} className={styles.option}>
              <input type="checkbox" checked={option.isChecked} onChange={() => props.onToggle(option.id)} />
              {option.name}
            </label>
          ))}
        </Popover.Content>
      </Popover.Portal>
    </Popover.Root>
  );
}
