"""The shell scripts that prepare an image, or look at it, inside a container; exit codes say what is wrong."""

from __future__ import annotations

NO_DIRECTORY, NO_GIT, NO_COMMIT = 96, 97, 98

_HOME = r"""
set -eu
work=$1 owner=$2 home=$3
rm -rf "$home"; mkdir -p "$home" /tmp; chown "$owner" "$home"; chmod 1777 /tmp
"""

# The repository is made anew of what HEAD leads to: whatever else the old one holds, or points to, stays behind.
SCRUB = (
    _HOME
    + rf"""
[ -d "$work" ] && [ ! -L "$work" ] || exit {NO_DIRECTORY}
cd "$work"
find . -mindepth 1 ! -path ./.git -iname .git -prune -exec rm -rf {{}} +
if [ -e .git ]; then
  new=/understudy-new-git
  mkdir -p "$new"
  printf '[safe]\n\tdirectory = *\n' >"$new/.gitconfig"
  export HOME="$new" GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C
  command -v git >/dev/null || exit {NO_GIT}
  head=$(git rev-parse --verify --quiet 'HEAD^{{commit}}') || exit {NO_COMMIT}
  branch=$(git symbolic-ref --quiet HEAD || true)
  git for-each-ref --merged "$head" --format='%(objectname) %(refname)' refs/tags >"$new/tags"
  git init --quiet --bare --template= "$new/git"
  mkdir -p "$new/git/objects/pack"
  {{ echo "$head"; while read -r tag _; do echo "$tag"; done <"$new/tags"; }} |
    git pack-objects --quiet --revs "$new/git/objects/pack/pack" >/dev/null
  shallow=$(git rev-parse --git-dir)/shallow
  [ ! -e "$shallow" ] || cp "$shallow" "$new/git/shallow"
  rm -rf .git
  mv "$new/git" .git
  git config core.bare false
  while read -r tag name; do git update-ref "$name" "$tag"; done <"$new/tags"
  if [ -n "$branch" ]; then
    git update-ref "$branch" "$head"
    git symbolic-ref HEAD "$branch"
  else
    git update-ref --no-deref HEAD "$head"
  fi
  rm -rf .git/logs
  git read-tree HEAD
  git update-index -q --refresh || true
  cd /
  rm -rf "$new"
fi
# Where an owner is set, even to what it is, the engine copies the file up.
find "$work" ! "(" -user "${{owner%%:*}}" -group "${{owner##*:}}" ")" -exec chown -h "$owner" {{}} +
"""
)
REPLACE = (
    _HOME
    + r"""
rm -rf "$work"
mkdir -p "$work"
chown "$owner" "$work"
"""
)
ANCESTRY = rf"""
printf '[safe]\n\tdirectory = *\n' >/tmp/.gitconfig
export HOME=/tmp GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C
cd "$1" || exit {NO_DIRECTORY}
command -v git >/dev/null || exit {NO_GIT}
git rev-parse --verify HEAD || exit {NO_COMMIT}
git merge-base --is-ancestor "$2" HEAD
"""
