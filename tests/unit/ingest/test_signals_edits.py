"""Which edits are seen, and which of them are there at the end."""

from __future__ import annotations

from typing import Any

import pytest

from support.signals import annotated, signals, turns

EDIT = "Edit"


def edit(old: str, new: str, path: str = "/p/a.py") -> tuple[str, dict[str, Any], str]:
    return (EDIT, {"file_path": path, "old_string": old, "new_string": new}, "The file has been updated.")


def write(content: str, path: str = "/p/a.py") -> tuple[str, dict[str, Any], str]:
    return ("Write", {"file_path": path, "content": content}, "File created successfully at: a.py")


def sh(command: str, text: str = "") -> tuple[str, dict[str, Any], str]:
    return ("Bash", {"command": command}, text)


def survived(*steps: tuple[str, dict[str, Any], str]) -> list[int | None]:
    """What became of the edits, of the turns that made some."""
    return [one.edits_survived for one in signals(*steps) if one.edits]


def test_an_edit_that_no_later_edit_touches_survives() -> None:
    assert survived(edit("x = 1", "x = 2")) == [1]
    assert survived(edit("x = 1", "x = 2"), edit("y = 1", "y = 2"), write("other", "/p/b.py")) == [1, 1, 1]


def test_an_edit_reverted_by_a_later_one_does_not_survive() -> None:
    assert survived(edit("x = 1", "x = 2"), edit("x = 2", "x = 1")) == [0, 1]
    assert survived(edit("x = 1", "x = 2"), edit("def f():\n    x = 2\n", "def f():\n    x = 3\n")) == [0, 1]
    assert survived(write("a = 1\nb = 2\n"), write("c = 3\n")) == [0, 1]
    assert survived(write("a = 1\nb = 2\n"), write("a = 1\nb = 2\nc = 3\n")) == [1, 1]
    # Of a part of a line, too.
    assert survived(edit("return 0", "return total(a, b)"), edit("total(a, b)", "total(b, a)")) == [0, 1]


def test_an_edit_survives_if_at_least_half_of_it_remains() -> None:
    lines = [f"line {n} of it" for n in range(10)]
    assert survived(write("\n".join(lines)), edit(lines[3], "another")) == [1, 1]
    most = "\n".join(lines[:8])
    assert survived(write("\n".join(lines)), edit(most, "another")) == [0, 1]


def test_a_deletion_does_not_survive_when_the_text_is_restored() -> None:
    assert survived(edit("a = 1\nprint(a)\n", "a = 1\n")) == [1]
    assert survived(edit("a = 1\nprint(a)\n", "a = 1\n"), edit("a = 1", "a = 1\nprint(a)")) == [0, 1]


def test_a_failed_edit_is_not_counted_and_undoes_nothing() -> None:
    failed = (EDIT, {"file_path": "/p/a.py", "old_string": "x = 2", "new_string": "x = 9"}, "ERROR: not found")
    assert survived(edit("x = 1", "x = 2"), failed) == [1]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("sed -i 's/2/3/' a.py", None),
        ("perl -pi -e s/2/3/ /p/a.py", None),
        ("cat > a.py <<'EOF'\nnew\nEOF", None),
        ("echo x > /p/a.py", None),
        ("python -c \"open('a.py', 'w').write('')\"", None),
        ("python3 - <<'EOF'\nPath('a.py').write_text('')\nEOF", None),
        ("mv a.py b.py", None),
        ("git stash", None),
        ("git reset --hard", None),
        ("git revert HEAD --no-edit", None),
        ("git checkout -- a.py", 0),
        ("git restore /p/a.py", 0),
        ("git checkout .", 0),
        ("rm -f /p/a.py", 0),
        ("git rm a.py", 0),
        ("cd /p && rm a.py", 0),
        ("sed -n 1,5p a.py", 1),
        ("sed -i s/2/3/ b.py", 1),
        ("cat a.py > /tmp/x", 1),
        ("python a.py", 1),
        ("python a.py 2>/dev/null", 1),
        ("echo x >> a.py", 1),
        ("git checkout -b work", 1),
        ("git checkout -- other.py", 1),
        ("git rm --cached a.py", 1),
        ("git stash list", 1),
        ("git reset HEAD~1", 1),
        ("git add a.py && git status", 1),
        ("git restore --staged a.py", 1),
        ("grep -n 'rm a.py' notes.txt", 1),
        ("cp a.py b.py", 1),
    ],
)
def test_shell_commands_on_an_edited_file_decide_whether_the_edit_survives(
    command: str, expected: int | None
) -> None:
    assert survived(edit("x = 1", "x = 2"), sh(command)) == [expected]


def test_a_commit_is_kept_when_files_are_put_back() -> None:
    done = sh("git commit -am done", "[main 1a2b3c4] done\n 1 file changed")
    assert survived(edit("x = 1", "x = 2"), done, sh("git checkout -- a.py")) == [1]
    assert survived(edit("x = 1", "x = 2"), done, edit("y = 1", "y = 2"), sh("git checkout .")) == [1, 0]
    assert survived(edit("x = 1", "x = 2"), done, sh("git stash")) == [1]


def test_survival_of_an_edit_without_a_result_is_unknown() -> None:
    (one,) = signals((EDIT, {"file_path": "a", "old_string": "x", "new_string": "y"}, None))
    assert (one.edits, one.edits_survived) == (1, None)


def test_an_edit_on_a_branch_that_was_rewound_did_not_survive() -> None:
    trace = turns(edit("x = 1", "x = 2"), edit("y = 1", "y = 2"))
    trace.turns[0].branch = "branch"
    assert [one.edits_survived for one in annotated(trace)] == [0, 1]


PATCH = (
    "*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-x = 1\n+x = 2\n*** Add File: b.py\n+new\n*** End Patch"
)
DIFF = "<<<<<<< SEARCH\nx = 1\n=======\nx = 2\n>>>>>>> REPLACE\n"


@pytest.mark.parametrize(
    ("name", "arguments", "edits", "surviving"),
    [
        ("Edit", {"file_path": "a.py", "old_string": "x = 1", "new_string": "x = 2"}, 1, 1),
        ("MultiEdit", {"file_path": "a.py", "edits": [{"old_string": "x = 1", "new_string": "x = 2"}]}, 1, 1),
        ("Write", {"file_path": "a.py", "content": "x = 2"}, 1, 1),
        ("NotebookEdit", {"notebook_path": "a.ipynb", "cell_id": "1", "new_source": "x = 2"}, 1, 1),
        ("apply_patch", {"input": PATCH}, 2, 2),
        ("shell", {"command": ["apply_patch", PATCH]}, 2, 2),
        ("shell", {"command": ["bash", "-lc", f"apply_patch <<'EOF'\n{PATCH}\nEOF\n"]}, 2, 2),
        ("exec_command", {"cmd": f"cd src && apply_patch <<'EOF'\n{PATCH}\nEOF\n"}, 2, 2),
        (
            "str_replace_editor",
            {"command": "str_replace", "path": "a.py", "old_str": "x = 1", "new_str": "x = 2"},
            1,
            1,
        ),
        ("str_replace_editor", {"command": "create", "path": "a.py", "file_text": "x = 2"}, 1, 1),
        ("file_editor", {"command": "insert", "path": "a.py", "insert_line": 1, "new_str": "x = 2"}, 1, 1),
        ("str_replace_editor", {"command": "view", "path": "a.py"}, 0, 0),
        ("replace", {"file_path": "a.py", "old_string": "x = 1", "new_string": "x = 2"}, 1, 1),
        ("write_file", {"file_path": "a.py", "content": "x = 2"}, 1, 1),
        ("write_to_file", {"path": "a.py", "content": "x = 2"}, 1, 1),
        ("replace_in_file", {"path": "a.py", "diff": DIFF}, 1, 1),
        ("mcp__filesystem__write_file", {"path": "a.py", "content": "x = 2"}, 1, 1),
        ("edit_file", {"path": "a.py", "content": "# ... existing code ..."}, 1, None),
        ("Read", {"file_path": "a.py"}, 0, 0),
        ("Edit", {}, 1, None),
    ],
)
def test_the_editing_tools_of_every_program(name: str, arguments: Any, edits: int, surviving: int | None) -> None:
    (one,) = signals((name, arguments, "ok"))
    assert (one.edits, one.edits_survived) == (edits, surviving)


def test_an_edit_reverted_by_apply_patch_does_not_survive() -> None:
    patch = "*** Begin Patch\n*** Update File: p/a.py\n-x = 2\n+x = 1\n*** End Patch"
    assert survived(edit("x = 1", "x = 2", "p/a.py"), ("apply_patch", {"input": patch}, "Success.")) == [0, 1]
    deletion = "*** Begin Patch\n*** Delete File: p/a.py\n*** End Patch"
    assert survived(edit("x = 1", "x = 2", "p/a.py"), ("apply_patch", {"input": deletion}, "Success.")) == [0, 1]
