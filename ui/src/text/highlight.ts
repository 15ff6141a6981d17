import type { Root, RootContent } from "hast";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import markdown from "highlight.js/lib/languages/markdown";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";

const lowlight = createLowlight({
  bash,
  c,
  cpp,
  css,
  go,
  ini,
  java,
  javascript,
  json,
  markdown,
  python,
  rust,
  sql,
  typescript,
  xml,
  yaml,
});

/** Longer texts and lines are shown without colours: highlighting would hold the page up. */
const LONGEST_TEXT = 60_000;
const LONGEST_LINE = 1_000;
const DEEPEST = 200;

const LANGUAGES: Record<string, string> = {
  bash: "bash",
  c: "c",
  cc: "cpp",
  cfg: "ini",
  cpp: "cpp",
  css: "css",
  go: "go",
  h: "c",
  hpp: "cpp",
  html: "xml",
  ini: "ini",
  java: "java",
  js: "javascript",
  json: "json",
  jsx: "javascript",
  md: "markdown",
  mjs: "javascript",
  py: "python",
  pyi: "python",
  rs: "rust",
  sh: "bash",
  sql: "sql",
  svg: "xml",
  toml: "ini",
  ts: "typescript",
  tsx: "typescript",
  xml: "xml",
  yaml: "yaml",
  yml: "yaml",
};

/** A piece of highlighted text with the name of its colour, e.g. "keyword"; null for plain text. */
export type Span = { text: string; kind: string | null };

/** Returns the language of a file by its name; null where it is not one of those that are highlighted. */
export function languageOf(path: string): string | null {
  const extension = /\.([A-Za-z0-9]+)$/.exec(path)?.[1]?.toLowerCase();
  return extension === undefined ? null : (LANGUAGES[extension] ?? null);
}

/** Returns the texts of a tree in order. The tree may be as deep as a text is long, so no function calls itself. */
function flatten(root: Root): Span[] {
  const spans: Span[] = [];
  const waiting: { node: RootContent; kind: string | null }[] = [];
  const visit = (nodes: RootContent[], kind: string | null) => {
    for (const node of nodes.toReversed()) waiting.push({ node, kind });
  };
  visit(root.children, null);
  for (let next = waiting.pop(); next !== undefined; next = waiting.pop()) {
    const { node, kind } = next;
    if (node.type === "text") spans.push({ text: node.value, kind });
    else if (node.type === "element") {
      const names = node.properties["className"];
      const name = Array.isArray(names) ? String(names[0] ?? "").replace(/^hljs-/, "") : null;
      visit(node.children as RootContent[], name || kind);
    }
  }
  return spans;
}

/** Whether more brackets are open somewhere than in any program: highlighting takes their number squared. */
function isNestedDeeply(text: string): boolean {
  let depth = 0;
  for (const sign of text) {
    if ("([{".includes(sign)) depth += 1;
    else if (")]}".includes(sign)) depth = Math.max(0, depth - 1);
    if (depth > DEEPEST) return true;
  }
  return false;
}

/** Returns `text` in coloured pieces whose texts joined are `text`; one plain piece if it is not highlighted. */
export function highlight(text: string, language: string | null): Span[] {
  const plain: Span[] = [{ text, kind: null }];
  if (language === null || text.length > LONGEST_TEXT || isNestedDeeply(text)) return plain;
  if (text.split("\n").some((line) => line.length > LONGEST_LINE)) return plain;
  return flatten(lowlight.highlight(language, text));
}

/** Returns the pieces of `highlight` line by line, without the newlines. */
export function highlightLines(text: string, language: string | null): Span[][] {
  const lines: Span[][] = [[]];
  for (const span of highlight(text, language)) {
    span.text.split("\n").forEach((part, index) => {
      if (index > 0) lines.push([]);
      if (part !== "") lines.at(-1)?.push({ text: part, kind: span.kind });
    });
  }
  return lines;
}
