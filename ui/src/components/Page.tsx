import { Link } from "@tanstack/react-router";
import type { ReactNode } from "react";
import { useEffect, useRef } from "react";
import type { UrlState } from "../text/address";
import { visible } from "../text/escapes";
import styles from "./Page.module.css";

/** A page: its title, where it is, and its content, which takes the height that is left. */
export function Page(props: {
  title: string;
  heading?: ReactNode;
  trail?: ReactNode;
  aside?: ReactNode;
  children: ReactNode;
  scrolls?: boolean;
}) {
  useEffect(() => {
    document.title = `${visible(props.title)} · Understudy`;
  }, [props.title]);
  return (
    <div className={props.scrolls ? styles.scrolling : styles.page}>
      <header className={styles.head}>
        <div>
          {props.trail !== undefined && <nav aria-label="Trail">{props.trail}</nav>}
          <h1>{props.heading ?? props.title}</h1>
        </div>
        {props.aside}
      </header>
      {props.children}
    </div>
  );
}

/** Links to views of one thing; the present one is marked. */
export function Tabs({ label, children }: { label: string; children: ReactNode }) {
  const nav = useRef<HTMLElement>(null);
  const shown = useRef<Element | null>(null);
  useEffect(() => {
    const active = nav.current?.querySelector('[aria-current="page"]') ?? null;
    if (active !== shown.current) active?.scrollIntoView({ block: "nearest", inline: "nearest" });
    shown.current = active;
  });
  return (
    <nav ref={nav} className={styles.tabs} aria-label={label}>
      {children}
    </nav>
  );
}

export function Trail(props: { to: string; params?: Record<string, string>; search?: UrlState; children: ReactNode }) {
  const { to, children, ...place } = props;
  return (
    <Link to={to} {...(place as object)} className={styles.trail}>
      {children}
    </Link>
  );
}

export function Card({ title, note, children }: { title?: ReactNode; note?: ReactNode; children: ReactNode }) {
  return (
    <section className={styles.card}>
      {title !== undefined && (
        <header>
          <h2>{title}</h2>
          {note !== undefined && <p>{note}</p>}
        </header>
      )}
      {children}
    </section>
  );
}
