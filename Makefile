# Two commands do everything: `make demo` and `make test`. Both set up what they need first.
.PHONY: demo demo-quick test setup setup-train lint bench clean

# The whole loop: collect, train, and collect again with the model that learned from it.
demo: setup-train
	@.venv/bin/python scripts/demo.py

# Scripted models, so nothing to train and no torch.
demo-quick: setup
	@.venv/bin/python scripts/demo_quick.py

test: setup-train
	@.venv/bin/python -m pytest -n 3 --dist worksteal

setup:
	@sh scripts/setup.sh

setup-train:
	@sh scripts/setup.sh train

lint: setup-train
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports

bench: setup-train
	@for file in bench/*.py; do .venv/bin/python $$file || exit 1; done

clean:
	rm -rf .venv runs/demo runs/demo-quick tasks/demo tasks/demo-quick bench/results
