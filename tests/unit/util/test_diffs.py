"""A reversed diff undoes what the diff did, byte for byte."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.util.diffs import DiffError, parse_diff, reverse, unified

_TEXTS = st.text(st.sampled_from("ab \n\r\\+-@"), max_size=24).filter(lambda text: text != "")
_TREES = st.dictionaries(st.sampled_from(["a.py", "b/c.txt", "d e"]), _TEXTS, max_size=3)


def git(tree: Path, *args: str, stdin: bytes = b"") -> bytes:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false")
    done = subprocess.run(["git", *who, *args], cwd=tree, env=env, input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, (args, done.stderr.decode(), stdin.decode())
    return done.stdout


def fill(tree: Path, files: dict[str, str]) -> None:
    for path in files_of(tree):
        (tree / path).unlink()
    for name, text in files.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(text.encode())


def files_of(tree: Path) -> dict[str, str]:
    paths = (path for path in sorted(tree.rglob("*")) if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(tree)): path.read_bytes().decode() for path in paths}


@settings(max_examples=40)
@given(_TREES, _TREES)
def test_reverse_undoes_what_git_says(old: dict[str, str], new: dict[str, str]):
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        git(tree, "init", "--quiet")
        fill(tree, old)
        git(tree, "add", "--all")
        git(tree, "commit", "--quiet", "--allow-empty", "-m", "x")
        fill(tree, new)
        git(tree, "add", "--all")
        patch = git(tree, "diff", "--cached", "--no-color").decode()
        if not patch:
            return
        back = reverse(patch)
        git(tree, "apply", "--whitespace=nowarn", "-", stdin=back.encode())
        assert files_of(tree) == old
        git(tree, "apply", "--whitespace=nowarn", "-", stdin=reverse(back).encode())
        assert files_of(tree) == new


@given(_TEXTS, _TEXTS)
def test_reverse_of_our_own_diffs_is_our_own_diff(old: str, new: str):
    if old != new:
        patch = unified({"a.py": old}, {"a.py": new})
        assert reverse(reverse(patch)) == patch


def test_modes_and_renames():
    patch = """\
diff --git a/run.sh b/run.sh
old mode 100644
new mode 100755
diff --git a/one.py b/two.py
similarity index 90%
rename from one.py
rename to two.py
index 1111111..2222222 100644
--- a/one.py
+++ b/two.py
@@ -1,2 +1 @@ def x():
 a
-b
"""
    assert (
        reverse(patch)
        == """\
diff --git a/two.py b/one.py
similarity index 90%
rename from two.py
rename to one.py
index 2222222..1111111 100644
--- a/two.py
+++ b/one.py
@@ -1 +1,2 @@ def x():
 a
+b
diff --git a/run.sh b/run.sh
old mode 100755
new mode 100644
"""
    )


def test_what_surrounds_a_diff():
    """Mails with patches, empty context lines without their space, and a last line without an end."""
    patch = "From: me\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n-a\n+b\n\n c\n-- \n2.30.0\n"
    expected = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n-b\n+a\n \n c\n"
    assert reverse(patch) == expected
    assert reverse(patch.removesuffix("\n-- \n2.30.0\n")) == expected


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ("", "changes no file"),
        ("just words\n", "changes no file"),
        ("--- a/x\n+++ b/x\n", "changes no file"),
        ("diff --git a/x b/x\n--- a/x\n+++ b/x\n", "expected hunks after ---"),
        ("--- a/x\n@@ -1 +1 @@\n-a\n+b\n", "changes no file"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n", "line 3: the hunk that begins here is incomplete"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n?b\n", "line 5: expected a line of a hunk"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n\tb\n+b\n", "expected a line of a hunk|longer than its header"),
        ("--- a/x\n+++ b/x\n@@ one @@\n", "changes no file"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n+c\n", "line 6: expected a line that starts the next file"),
        (
            "diff --git a/x b/x\nGIT binary patch\nliteral 1\n",
            "of 'x' has the line 'GIT binary patch', which cannot be reversed",
        ),
        ("diff --git a/x b/y\ncopy from x\ncopy to y\n", "has the line 'copy from x', which cannot be reversed"),
        (
            "diff --git a/x b/x\nBinary files a/x and b/x differ\n",
            "line 2: expected a line that starts the next file",
        ),
    ],
)
def test_what_cannot_be_reversed(patch: str, expected: str):
    with pytest.raises(ValueError, match=expected):
        reverse(patch)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (b"diff --git a/x b/y\n", "line 1: the header that begins here names no file"),
        (
            b"--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a",
            "line 3: .* its header says 2 old and 1 new lines, but the patch ends after 1 and 0; correct",
        ),
        (b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\nb\n", "line 5: expected a line of a hunk.*got 'b'"),
    ],
)
def test_an_invalid_patch_is_explained_with_its_line(patch: bytes, message: str):
    with pytest.raises(DiffError, match=message):
        parse_diff(patch)
