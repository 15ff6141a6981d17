#!/bin/sh
# The documentation as a site in build/site, for `make docs`: docs/, the README as its first page, and the reference.
set -eu
cd "$(dirname "$0")/.."
lock=requirements/docs.txt
stamp=.venv/.docs
if [ "$(cat $stamp 2>/dev/null || true)" != "$(cksum <$lock)" ]; then
  .venv/bin/python -m pip install -qq --disable-pip-version-check --require-hashes --no-deps -r $lock
  cksum <$lock >$stamp
fi
rm -rf build/docs build/site
mkdir -p build/docs
cp -r docs/. CHANGELOG.md CONTRIBUTING.md SECURITY.md build/docs/
sed 's#](docs/#](#g' README.md >build/docs/index.md
sed -i 's#](docs/#](#g' build/docs/*.md
.venv/bin/python scripts/reference.py build/docs
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet
printf '%s\n' "docs: the site is in build/site; open build/site/index.html"
