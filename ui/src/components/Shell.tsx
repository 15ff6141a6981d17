import { Link, Outlet, useRouterState } from "@tanstack/react-router";
import { useEffect, useRef, useState } from "react";
import { useKeys } from "./keyboard";
import { Key } from "./marks";
import { toggleTheme, useTheme } from "./theme";
import styles from "./Shell.module.css";

// What the help shows. The keys themselves are bound by useKeys in the pages, so change both.
const SHORTCUTS: [string, [string[], string][]][] = [
  [
    "Everywhere",
    [
      [["?"], "show or hide these keys"],
      [["/"], "search or filter"],
      [["t"], "light or dark"],
      [["u"], "up: from a rollout to its run, from a run to all runs"],
      [["Esc"], "leave a field, close a dialog"],
    ],
  ],
  [
    "Lists",
    [
      [["j", "↓"], "next row"],
      [["k", "↑"], "row before"],
      [["Enter"], "open the row"],
      [["←", "→"], "in a task: another rollout"],
    ],
  ],
  [
    "Rollout",
    [
      [["1", "…", "6"], "transcript, tokens, patch, timing, calls, integrity"],
      [["j", "k"], "next turn, turn before"],
      [["o"], "open or fold the turn"],
      [["g", "G"], "first turn, last turn"],
      [["n", "p"], "next and previous improbable token"],
      [["←", "→"], "token before, next token"],
    ],
  ],
  [
    "Pairs",
    [
      [["←", "→"], "the left, the right one is better"],
      [["0"], "leave the pair out"],
      [["⌫"], "take your vote back"],
    ],
  ],
];

function Help({ onClose }: { onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog
      ref={dialog}
      className={styles.help}
      aria-labelledby="help-title"
      onClose={onClose}
      onKeyDown={(event) => event.key === "?" && dialog.current?.close()}
      onClick={(event) => event.target === dialog.current && dialog.current.close()}
    >
      <header>
        <h2 id="help-title">Keys</h2>
        <button type="button" className={styles.icon} onClick={() => dialog.current?.close()} aria-label="Close">
          ✕
        </button>
      </header>
      <div className={styles.groups}>
        {SHORTCUTS.map(([group, keys]) => (
          <section key={group}>
            <h3>{group}</h3>
            <dl>
              {keys.map(([names, action]) => (
                <div key={action}>
                  <dt>
                    {names.map((name) => (
                      <Key key={name}>{name}</Key>
                    ))}
                  </dt>
                  <dd>{action}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </dialog>
  );
}

/** The frame of every page: the bar above with the name, and the dialog of keys. */
export function Shell({ status }: { status: React.ReactNode }) {
  const [helps, setHelps] = useState(false);
  const theme = useTheme();
  const path = useRouterState({ select: (state) => state.location.pathname });
  useKeys({
    "?": () => setHelps(true),
    t: () => toggleTheme(),
    "/": () => {
      const field = document.querySelector<HTMLInputElement>("input[type=search]");
      field?.focus();
      field?.select();
      return field !== null;
    },
  });
  useEffect(() => {
    document.getElementById("content")?.focus({ preventScroll: true });
  }, [path]);
  return (
    <div className={styles.shell}>
      <a className={styles.skip} href="#content" onClick={(event) => {
        event.preventDefault();
        document.getElementById("content")?.focus();
      }}>
        Skip to the content
      </a>
      <header className={styles.bar}>
        <Link to="/" className={styles.name}>
          <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">
            <path d="M2 2h4v7a2 2 0 0 0 4 0V2h4v7a6 6 0 0 1-12 0z" fill="currentColor" />
          </svg>
          Understudy
        </Link>
        <div className={styles.status}>{status}</div>
        <button
          type="button"
          className={styles.icon}
          onClick={toggleTheme}
          aria-label={theme === "dark" ? "Use light colours" : "Use dark colours"}
        >
          {theme === "dark" ? "☀" : "☾"}
        </button>
        <button type="button" className={styles.icon} onClick={() => setHelps(true)} aria-label="Show the keys">
          ?
        </button>
      </header>
      <main id="content" className={styles.content} tabIndex={-1}>
        <Outlet />
      </main>
      {helps && <Help onClose={() => setHelps(false)} />}
    </div>
  );
}
