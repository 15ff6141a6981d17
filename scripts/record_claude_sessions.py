"""Records sessions of Claude Code as people use it in a terminal, for `bench/fidelity.py`.

    python scripts/record_claude_sessions.py INSTALLED OUTPUT VERSION... [--sessions N]

Each VERSION is installed under INSTALLED and run in a network namespace of its own, with an empty home, against a
server of ours. A session goes through what people do, in an order that its number decides: prompts, prompts queued
while tools run, mentions of files and images, plan mode, skills, subagents, tasks in the background, stops,
compactions, and resumes. OUTPUT gets VERSION-NUMBER/projects with the logs, and VERSION-NUMBER/expected.jsonl with
what each response was given to: `message_id` and the `messages` of its request. Needs Linux, npm and node; root,
or user namespaces.
"""

# pyright: basic
from __future__ import annotations

import argparse
import base64
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record_claude_tools import MODEL, MessagesServer, environment, install

Block = dict[str, Any]
_NEWER_MODEL = "claude-opus-4-8"
_SUBAGENT = "As a subagent of the recording"
_PLAN_FILE = re.compile(r"/[\w./-]+/plans/[\w.-]+\.md")
_PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_SLOW = "python3 -c 'import time; time.sleep({})'"  # newer versions refuse a plain sleep
_ANSWER_S = 30.0
_QUIET_S = 1.2


class ScriptedServer(MessagesServer):
    """Gives the main agent the responses of `script`; keeps the messages of each request by its answer's id."""

    def __init__(self, random_: random.Random) -> None:
        super().__init__()
        self.random = random_
        self.script: list[list[Block]] = []
        self.requests: dict[str, list[dict[str, Any]]] = {}
        self.last = time.monotonic()
        self.plan_file = ""
        self._lock = threading.Lock()

    def message_id(self, body: dict[str, Any]) -> str:
        with self._lock:
            key = f"msg_01{self.random.getrandbits(88):022x}"
            self.requests[key] = body.get("messages") or []
        return key

    def answer(self, body: dict[str, Any]) -> list[Block]:
        self.last = time.monotonic()
        messages = body.get("messages") or [{}]
        names = {tool.get("name") for tool in body.get("tools") or []}
        first, last = json.dumps(messages[0]), json.dumps(messages[-1])
        self.usage = {"input_tokens": 10, "output_tokens": 5}
        if "detailed summary" in last and "tool_result" not in last:
            return [text("<analysis>Short.</analysis>\n<summary>The user asked for work on a.py.</summary>")]
        if "Bash" not in names or "[SUGGESTION MODE" in last:
            return [text('{"isNewTopic": false, "title": "Recording"}')]
        with self._lock:
            if _SUBAGENT in first:
                done = json.dumps(messages).count('"tool_result"')
                return [
                    [text("Looking."), self.bash("ls")],
                    [self.bash("cat a.py")],
                    [text("Seen, said the agent.")],
                ][min(done, 2)]
            if plans := _PLAN_FILE.findall(json.dumps(messages)):
                self.plan_file = plans[-1]
            blocks = self.script.pop(0) if self.script else [text(f"Done {self.random.randrange(1000)}.")]
        if blocks[0].get("full"):
            self.usage = {"input_tokens": 185_000, "output_tokens": 500}
            blocks = blocks[1:]
        for block in blocks:
            if block.get("name") == "Write" and block["input"]["file_path"] == "PLAN":
                block["input"]["file_path"] = self.plan_file
        return blocks

    def call(self, name: str, **arguments: Any) -> Block:
        return {
            "type": "tool_use",
            "id": f"toolu_01{self.random.getrandbits(88):022x}",
            "name": name,
            "input": arguments,
        }

    def bash(self, command: str, **more: Any) -> Block:
        return self.call("Bash", command=command, description="Run a command", **more)


def text(content: str) -> Block:
    return {"type": "text", "text": content}


class Terminal:
    """The program in a terminal."""

    def __init__(self, command: list[str], env: dict[str, str], work: Path) -> None:
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(work)
            os.execvpe(command[0], command, env)
        self.seen = b""
        self.ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while not self.ended:
                if select.select([self.terminal], [], [], 0.5)[0]:
                    self.seen += os.read(self.terminal, 65536)
        except OSError:
            self.ended = True

    def press(self, keys: str, pause: float = 0.4) -> None:
        if not self.ended:
            os.write(self.terminal, keys.encode())
        time.sleep(pause)

    def type(self, line: str) -> None:
        """Type a line, and the key once the line is shown, or it would be taken for a pasted line."""
        shown, begun = len(self.seen), time.monotonic()
        self.press(line)
        while len(self.seen) == shown and time.monotonic() - begun < 10:
            time.sleep(0.1)
        time.sleep(0.4)
        self.press("\r", 0.3)

    def end(self) -> None:
        self.press("\x03", 0.3)
        self.press("\x03", 1.0)
        self.ended = True
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self.terminal)

    def screen(self) -> str:
        return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", self.seen[-50_000:]).decode(errors="replace")


class Session:
    """One session: what the user does in it, and the project in which it is done."""

    def __init__(self, program: Path, version: str, model: str, seed: str, home: Path) -> None:
        self.random = random.Random(seed)
        self.server = ScriptedServer(random.Random(seed + "server"))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.home, self.work = home, home / "work"
        self._lay_project()
        self.env = environment(home, self.work, version, self.server)
        self.env["CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION"] = "false"
        self.command = [str(program), "--model", model]
        self.terminal = Terminal(self.command, self.env, self.work)
        self.wait_quiet(6)

    def _lay_project(self) -> None:
        allowed = "Bash Read Edit MultiEdit Write Glob Grep LS Task Agent Skill TodoWrite TaskCreate TaskUpdate"
        files = {
            "a.py": "def f():\n    return 1\n",
            "src/b.py": "\n".join(f"line_{n} = {n}" for n in range(12)) + "\n",
            "docs/read.me": "Read me.\n",
            "CLAUDE.md": "Be brief.\n",
            "sub/CLAUDE.md": "In sub, be briefer.\n",
            "sub/c.py": "C = 1\n",
            ".claude/skills/demo/SKILL.md": "---\nname: demo\ndescription: Shows a demo\n---\nShow the demo.\n",
            ".claude/settings.json": json.dumps({"permissions": {"allow": allowed.split()}}),
        }
        for path, content in files.items():
            (self.work / path).parent.mkdir(parents=True, exist_ok=True)
            (self.work / path).write_text(content)
        (self.work / "pic.png").write_bytes(_PICTURE)
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
        for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
            subprocess.run([*git, *arguments], cwd=self.work, check=True, env={"PATH": os.environ["PATH"]})

    # --- waiting --------------------------------------------------------------------------------------------

    def wait_quiet(self, quiet: float = _QUIET_S, limit: float = _ANSWER_S) -> None:
        """Wait until the script is done, and nothing was asked for a while."""
        begun = time.monotonic()
        while time.monotonic() - begun < limit:
            since = time.monotonic() - max(begun, self.server.last)
            if not self.server.script and since > quiet:
                return
            time.sleep(0.1)
        self.server.script.clear()
        self.terminal.press("\x1b", 1)

    def wait_request(self, limit: float = 8) -> bool:
        """Wait for the next request; returns whether it came."""
        last, begun = self.server.last, time.monotonic()
        while self.server.last == last and time.monotonic() - begun < limit:
            time.sleep(0.05)
        return self.server.last != last

    def ask(self, prompt: str, *script: list[Block]) -> None:
        """Type a prompt that is answered by the script and a last text."""
        self.server.script = list(script)
        self.server.script.append([text(f"Finished {self.random.randrange(1000)}.")])
        self.terminal.type(prompt)
        if not self.wait_request():
            self.terminal.press("\r")  # the program was too busy for the first one
            self.wait_request()

    # --- what people do -------------------------------------------------------------------------------------

    def some_calls(self) -> list[Block]:
        server, n = self.server, self.random.randrange(1000)
        kinds: list[Callable[[], Block]] = [
            lambda: server.bash(f"echo {n}; ls"),
            lambda: server.bash("exit 3"),
            lambda: server.call("Read", file_path=str(self.work / "a.py")),
            lambda: server.call("Read", file_path=str(self.work / "pic.png")),
            lambda: server.call("Read", file_path=str(self.work / "sub/c.py")),
            lambda: server.call("Read", file_path=str(self.work / "missing.py")),
            lambda: server.call("Write", file_path=str(self.work / f"new{n}.py"), content=f"N = {n}\n"),
            lambda: server.call("Grep", pattern="line_1", path=str(self.work)),
            lambda: server.call(
                "TodoWrite", todos=[{"content": "Do it", "status": "in_progress", "activeForm": "Doing it"}]
            ),
            lambda: server.call("TaskCreate", subject="Do it", description="Do it well", activeForm="Doing it"),
        ]
        return [self.random.choice(kinds)() for _ in range(self.random.choice((1, 1, 2, 3)))]

    def work_on(self) -> None:
        steps = [self.some_calls() for _ in range(self.random.randrange(1, 4))]
        steps[0].insert(0, text("Let me look."))
        self.ask(f"please work on a.py {self.random.randrange(1000)}", *steps)
        self.wait_quiet()

    def queue(self) -> None:
        slow = [self.server.bash(_SLOW.format(8)), *self.some_calls()]
        self.random.shuffle(slow)
        self.ask("do the slow thing", slow, self.some_calls())
        for _ in range(self.random.choice((1, 1, 2))):
            self.terminal.type(self.random.choice(("and the docs too", "also check src/b.py", "use python 3")))
        self.wait_quiet()

    def mention(self) -> None:
        what = self.random.choice(("@src/b.py", "@docs/", "@pic.png", "@sub/c.py", "@a.py and @docs/read.me"))
        self.ask(f"look at {what} please", self.some_calls())
        self.wait_quiet()

    def plan(self) -> None:
        self.terminal.press("\x1b[Z")
        self.terminal.press("\x1b[Z")
        self.ask(
            "plan the work",
            [self.server.call("Read", file_path=str(self.work / "src/b.py"))],
            [self.server.call("Write", file_path="PLAN", content="# Plan\n\nDo it.\n")],
            [self.server.call("ExitPlanMode", plan="# Plan\n\nDo it.")],
            self.some_calls(),
        )
        for _ in range(8):
            time.sleep(1)
            if len(self.server.script) <= 2:
                break
        time.sleep(1.5)
        self.terminal.press("2")
        self.wait_quiet()
        if self.random.random() < 0.5:
            self.terminal.press("\x1b[Z")

    def skill(self) -> None:
        if self.random.random() < 0.5:
            self.ask("/demo with care", self.some_calls())
        else:
            self.ask("use the skill", [self.server.call("Skill", skill="demo", command="demo")], self.some_calls())
        self.wait_quiet()

    def subagents(self) -> None:
        starters = [
            self.server.call(
                self.random.choice(("Task", "Agent")),
                description="Look around",
                prompt=f"{_SUBAGENT}, look {n}",
                subagent_type="general-purpose",
            )
            for n in range(self.random.choice((1, 2)))
        ]
        self.ask("let agents look", starters, self.some_calls())
        self.wait_quiet(2)

    def background(self) -> None:
        self.ask("run it in the background", [self.server.bash("sleep 2; echo over", run_in_background=True)])
        self.wait_quiet(4)

    def stop(self) -> None:
        self.ask("do the long thing", [self.server.bash(_SLOW.format(30))])
        time.sleep(1.5)
        self.terminal.press("\x1b", 1.5)
        self.server.script.clear()
        self.wait_quiet()

    def edit_outside(self) -> None:
        self.ask("read it", [self.server.call("Read", file_path=str(self.work / "a.py"))])
        self.wait_quiet()
        (self.work / "a.py").write_text(f"def f():\n    return {self.random.randrange(1000)}\n")
        self.ask("I changed it", self.some_calls())
        self.wait_quiet()

    def shell(self) -> None:
        self.terminal.press("!", 0.3)
        self.terminal.type("echo from the shell")
        time.sleep(1.5)
        self.terminal.press("\x1b", 0.3)
        self.work_on()

    def compact(self) -> None:
        self.terminal.type("/compact")
        self.wait_request()
        self.wait_quiet(2)

    def fill(self) -> None:
        """Let the context become full, so that the program compacts it."""
        self.ask("fill it up", [{"full": True}, *self.some_calls()], self.some_calls())
        self.wait_quiet(2)

    def resume(self) -> None:
        self.terminal.end()
        self.terminal = Terminal([*self.command, "--continue"], self.env, self.work)
        self.wait_quiet(4)
        self.work_on()

    def resume_inside(self) -> None:
        self.terminal.type("/clear")
        time.sleep(1)
        self.work_on()
        self.terminal.type("/resume")
        time.sleep(2)
        self.terminal.press("\r", 2)
        self.work_on()

    def run(self) -> None:
        """Work, and then everything once or twice in some order."""
        self.work_on()
        if not self.server.requests:
            print(self.terminal.screen()[-1500:], file=sys.stderr)
        acts = [self.queue, self.mention, self.plan, self.skill, self.subagents, self.background, self.stop]
        acts += [self.edit_outside, self.shell, self.compact, self.fill, self.resume, self.resume_inside]
        acts += [self.queue, self.mention, self.plan, self.queue, self.work_on]
        self.random.shuffle(acts)
        for act in acts:
            act()
        self.terminal.end()
        self.server.shutdown()

    def save(self, output: Path) -> int:
        """Write the logs and the requests; returns how many requests there were."""
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(self.home / ".claude/projects", output / "projects")
        lines = [
            json.dumps({"message_id": key, "messages": messages}) for key, messages in self.server.requests.items()
        ]
        (output / "expected.jsonl").write_text("\n".join(lines) + "\n")
        return len(lines)


def main() -> None:
    """Record, in a namespace without a network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("installed", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.isolated:
        for version in options.versions:
            install(version, options.installed.resolve())
        inner = 'ip link set lo up && exec "$@"'
        again = [sys.executable, __file__, *sys.argv[1:], "--isolated"]
        sys.exit(
            subprocess.run(["unshare", "--net", "--map-root-user", "sh", "-c", inner, "sh", *again]).returncode
        )
    for version in options.versions:
        program = options.installed.resolve() / version / "node_modules/.bin/claude"
        for number in range(options.sessions):
            model = _NEWER_MODEL if number % 3 == 2 else MODEL
            with tempfile.TemporaryDirectory(prefix="record-sessions-", ignore_cleanup_errors=True) as home:
                session = Session(program, version, model, f"{version}-{number}", Path(home))
                try:
                    session.run()
                finally:
                    requests = session.save(options.output / f"{version}-{number}")
            print(version, number, model, requests, "requests", flush=True)


if __name__ == "__main__":
    main()
