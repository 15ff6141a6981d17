"""How many fabricated secrets redaction finds, how often it is wrong about clean text, and how fast it is.

    python bench/redaction.py [DIR] [--json FILE] [--each N] [--misses]
    python bench/redaction.py --corpus DIR [--json FILE] [--misses]

Fourteen kinds of secret, each planted N times (30) in places of ten sorts; 180 KB of talk about code with hashes,
ids, images, locks and logs and no secret in it; and the texts of real sessions for the speed: those below DIR, or
UNDERSTUDY_SESSIONS, else the clean text. Our own rules alone, with pybetterleaks as the product uses it,
pybetterleaks by itself, and detect-secrets, where a Python has it: this one, or the one that
UNDERSTUDY_DETECT_SECRETS_PYTHON names. Speeds are MB of text a CPU-second. The secrets and the clean text are made
by us (tests/support/secrets.py), so they say what the rules were made to do, not what the world holds.

With --corpus, our own rules alone on a corpus from outside, of which nothing is in this repository:
`DIR/secrets.jsonl`, lines of {"provider", "secret", "text"}, and `DIR/clean/LANGUAGE/*.jsonl`, lines of {"path",
"text"}, or {"path", "texts"} for a conversation. Recall is by provider: a secret is found if it is not in the
redacted text. Lines with a "class" are also counted by it: give values that nothing in their text tells from
hashes and ids a class of their own. False alarms are replacements in the clean texts, addresses and home
directories apart, which are real there; test keys in public repositories count as false alarms too, so read them
with --misses. `formed` counts those of them that are private keys or have the published form of a token, which
redaction is there for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import walk_logs
from understudy.redact.betterleaks import is_installed
from understudy.redact.redactor import Redactor
from understudy.redact.tokens import FORMS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.secrets import KINDS, Planted, clean, planted

RECALL, ALARMS, SIZE, SPEED = 0.95, 5, 180_000, 50.0
PERSONAL = ("email", "home-path", "url-user")
FORMED = {"private-key", "encoded-key", *(form.rule for form in FORMS)}
RESULTS = Path(__file__).parent / "results" / "redaction.json"


_DETECT = """
import json, sys, time
from detect_secrets.core.scan import scan_line
from detect_secrets.settings import default_settings
texts = json.load(open(sys.argv[1]))
found, start = [], time.process_time()
with default_settings():
    for text in texts:
        some = []
        for line in text.splitlines():
            some += [secret.secret_value for secret in scan_line(line) if secret.secret_value]
        found.append(some)
json.dump({"found": found, "seconds": time.process_time() - start}, sys.stdout)
"""


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from strings(one)


def real(directory: Path) -> list[str]:
    """The different texts of the sessions below a directory, as states tell them."""
    skipped: Counter[str] = Counter()
    texts: dict[str, None] = {}
    for batch in group_batches(walk_logs([directory], skipped), skipped):
        for trace in batch.format.read(batch.files):
            for node in trace.nodes:
                texts.update(dict.fromkeys(strings(trace.renderer.history(node.body))))
    return [text for text in texts if text]


def survived(one: Planted, redacted: str) -> bool:
    return any(part in redacted for part in one.parts)


def of_redactor(betterleaks: bool, plants: list[Planted], text: str, speed: list[str]) -> dict[str, Any]:
    """The figures of our redactor, by what is left of the texts."""
    redactor = Redactor(b"bench" * 8, betterleaks=betterleaks)
    missed = Counter(one.kind for one in plants if survived(one, redactor.text(one.text)))
    wrong = Redactor(b"bench" * 8, betterleaks=betterleaks)
    wrong.text(text)
    seconds = min(_seconds(betterleaks, speed) for _ in range(3 if not betterleaks else 1))
    return {
        "missed": dict(missed),
        "recall": 1 - missed.total() / len(plants),
        "alarms": wrong.report.total,
        "mb_per_cpu_s": sum(map(len, speed)) / 1e6 / seconds,
    }


def _seconds(betterleaks: bool, texts: list[str]) -> float:
    start = time.process_time()
    Redactor(b"bench" * 8, betterleaks=betterleaks).value(texts)
    return time.process_time() - start


def of_finder(
    find: Callable[[list[str]], tuple[list[list[str]], float]], plants: list[Planted], text: str, speed: list[str]
) -> dict[str, Any]:
    """The figures of one that only names secrets: each is taken out of the text wherever it stands."""
    missed: Counter[str] = Counter()
    findings, _ = find([one.text for one in plants])
    for one, secrets in zip(plants, findings, strict=True):
        redacted = one.text
        for secret in secrets:
            redacted = redacted.replace(secret, "")
        if survived(one, redacted):
            missed[one.kind] += 1
    wrong, _ = find([text])
    _, seconds = find(speed)
    return {
        "missed": dict(missed),
        "recall": 1 - missed.total() / len(plants),
        "alarms": len(wrong[0]),
        "mb_per_cpu_s": sum(map(len, speed)) / 1e6 / seconds,
    }


def betterleaks_alone(texts: list[str]) -> tuple[list[list[str]], float]:
    """As it comes, but in portions: its time grows with the square of a text."""
    from pybetterleaks import scan_text

    start = time.process_time()
    findings: list[list[str]] = []
    if len(texts) <= 1000:
        for text in texts:
            pieces = [text[at : at + 48_000] for at in range(0, len(text), 48_000)]
            scans = [scan_text(piece, validation=False, redact=False) for piece in pieces]
            findings.append([finding.secret or "" for scan in scans for finding in scan.findings])
        return findings, time.process_time() - start
    whole = "\n\n".join(texts).replace("\0", " ").encode(errors="replace").decode()
    return betterleaks_alone([whole])


def detect_secrets(python: str) -> Callable[[list[str]], tuple[list[list[str]], float]]:
    def find(texts: list[str]) -> tuple[list[list[str]], float]:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(texts, file)
            file.flush()
            done = subprocess.run([python, "-c", _DETECT, file.name], capture_output=True, check=True, text=True)
        report = json.loads(done.stdout)
        return report["found"], report["seconds"]

    return find


def peer_python() -> str | None:
    for python in (os.environ.get("UNDERSTUDY_DETECT_SECRETS_PYTHON"), sys.executable):
        if python and not subprocess.run([python, "-c", "import detect_secrets"], capture_output=True).returncode:
            return python
    return None


def of_corpus(directory: Path, show: bool) -> dict[str, Any]:
    """Recall by provider, and false alarms and speed by language, on a corpus from outside."""
    total, detected = Counter[str](), Counter[str]()
    of_class, detected_of_class = Counter[str](), Counter[str]()
    for line in (directory / "secrets.jsonl").open():
        row = json.loads(line)
        total[row["provider"]] += 1
        of_class[row.get("class", "")] += 1
        if row["secret"] not in Redactor(b"bench" * 8, betterleaks=False).text(row["text"]):
            detected[row["provider"]] += 1
            detected_of_class[row.get("class", "")] += 1
        elif show:
            print(f"missed\t{row['provider']}\t{row['text']!r}")
    languages: dict[str, dict[str, float]] = {}
    for language in sorted(path for path in (directory / "clean").iterdir() if path.is_dir()):
        size = seconds = 0.0
        alarms = personal = formed = 0
        for line in (line for file in sorted(language.glob("*.jsonl")) for line in file.open()):
            row = json.loads(line)
            texts = row.get("texts") or [row["text"]]
            redactor = Redactor(b"bench" * 8, betterleaks=False)
            start = time.process_time()
            redactor.value(texts, row["path"])
            seconds += time.process_time() - start
            size += sum(map(len, texts)) / 1e6
            counts = redactor.report.counts
            mine = sum(counts[rule] for rule in PERSONAL)
            formed += sum(counts[rule] for rule in FORMED)
            personal, alarms = personal + mine, alarms + redactor.report.total - mine
            if show and redactor.report.total > mine:
                print(f"replaced\t{language.name}\t{row['path']}\t{dict(redactor.report.counts)}")
        if not size:
            raise SystemExit(
                f"{language}: expected *.jsonl files with texts in it, found none; add some or remove it"
            )
        languages[language.name] = {
            "mb": size,
            "alarms": alarms,
            "formed": formed,
            "personal": personal,
            "seconds": seconds,
        }
    return {
        "recall": {name: detected[name] / count for name, count in sorted(total.items())},
        "secrets": total.total(),
        "found": detected.total(),
        "classes": {name: [detected_of_class[name], count] for name, count in sorted(of_class.items())},
        "languages": languages,
    }


def print_corpus(figures: dict[str, Any]) -> None:
    """The figures of a corpus as a table."""
    recall, languages = figures["recall"], figures["languages"]
    low = {name: share for name, share in recall.items() if share < 1}
    share = figures["found"] / figures["secrets"]
    print(f"recall {share:.2%} of {figures['secrets']} secrets of {len(recall)} providers")
    for name, (found, count) in figures["classes"].items():
        if name:
            print(f"  {name}: {found / count:.2%} of {count}")
    print("below 100 %: " + (", ".join(f"{name} {share:.0%}" for name, share in low.items()) or "none"))
    print(f"{'language':<14}{'MB':>8}{'alarms':>9}{'/ MB':>8}{'formed':>8}{'personal':>10}{'MB / CPU-s':>12}")
    names = ("mb", "alarms", "formed", "personal", "seconds")
    whole = {name: sum(one[name] for one in languages.values()) for name in names}
    for language, one in [*languages.items(), ("all", whole)]:
        rates = f"{one['alarms'] / one['mb']:>8.2f}{one['formed']:>8}{one['personal']:>10}"
        rates += f"{one['mb'] / one['seconds']:>12.1f}"
        print(f"{language:<14}{one['mb']:>8.1f}{one['alarms']:>9}{rates}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=os.environ.get("UNDERSTUDY_SESSIONS"))
    parser.add_argument("--json", type=Path, default=RESULTS, help="write the figures here")
    parser.add_argument("--each", type=int, default=30, metavar="N", help="secrets of a kind")
    parser.add_argument("--misses", action="store_true", help="show what our own rules miss")
    parser.add_argument("--corpus", type=Path, help="measure on a corpus from outside, as described above")
    options = parser.parse_args()
    if options.corpus:
        figures = of_corpus(options.corpus, options.misses)
        print_corpus(figures)
        if options.json != RESULTS:
            options.json.write_text(json.dumps(figures, indent=1) + "\n")
        return
    plants = list(planted(each=options.each))
    text = clean(SIZE)
    speed = real(Path(options.directory)) if options.directory else []
    named = f"{len(speed)} texts of real sessions" if speed else "the clean text, in paragraphs"
    speed = speed or text.split("\n\n")
    size = sum(map(len, speed)) / 1e6

    if options.misses:
        redactor = Redactor(b"bench" * 8, betterleaks=False)
        for one in plants:
            if survived(one, redactor.text(one.text)):
                print(f"--- {one.kind}\n{one.text}")
    figures = {"own rules": of_redactor(False, plants, text, speed)}
    if is_installed():
        figures["own rules + pybetterleaks"] = of_redactor(True, plants, text, speed)
        figures["pybetterleaks alone"] = of_finder(betterleaks_alone, plants, text, speed)
    python = peer_python()
    if python:
        figures["detect-secrets"] = of_finder(detect_secrets(python), plants, text, speed)

    cores = os.cpu_count()
    print(
        f"{platform.machine()}, {cores} cores, Python {platform.python_version()}; "
        f"{len(KINDS)} kinds × {options.each} secrets,"
    )
    print(f"{SIZE / 1000:.0f} KB of clean text, speed on {named} ({size:.1f} MB)")
    print(f"{'':<28}{'recall':>9}{'false alarms':>14}{'MB / CPU-s':>12}{'ours / it':>11}   missed")
    ours = figures["own rules"]["mb_per_cpu_s"]
    for name, one in figures.items():
        missed = ", ".join(f"{count} × {kind}" for kind, count in one["missed"].items())
        rate = one["mb_per_cpu_s"]
        print(f"{name:<28}{one['recall']:>9.1%}{one['alarms']:>14}{rate:>12.2f}{ours / rate:>10.1f}×   {missed}")
    own = figures["own rules"]
    verdicts = {
        f"recall of {RECALL:.0%}": own["recall"] >= RECALL,
        f"at most {ALARMS} false alarms": own["alarms"] <= ALARMS,
        f"{SPEED:.0f} MB a CPU-second": ours >= SPEED,
    }
    for target, met in verdicts.items():
        print(f"target {target}: {'met' if met else 'MISSED'}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps(
            {
                "machine": f"{platform.machine()}, {cores} cores, Python {platform.python_version()}",
                "secrets": len(plants),
                "clean_bytes": SIZE,
                "speed_on": named,
                "figures": figures,
                "targets": verdicts,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
