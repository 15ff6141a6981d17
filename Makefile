# Two commands do everything: `make demo` and `make test`. Both set up what they need first.
.PHONY: demo demo-quick test test-services soak setup setup-train lint lock bench docs image view view-dev screenshots clean

# The tests start hundreds of Python processes, which must not each compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# The whole loop: collect, train, and collect again with the model that learned from it. MODEL=smollm2-135m takes a
# pretrained model in place of the tiny one. With AGENT=codex, say, scripted models do the tasks through that agent.
ifdef AGENT
demo: setup
	@.venv/bin/understudy demo --quick --agent $(AGENT) $(if $(SEED),--seed $(SEED))
else
demo: setup-train
	@.venv/bin/understudy demo $(if $(MODEL),--model $(MODEL)) $(if $(SEED),--seed $(SEED))
endif

# Scripted models, so nothing to train and no torch.
demo-quick: setup
	@.venv/bin/understudy demo --quick

# Everything that needs no service: no container engine, no environment of another package. Tests wait much, so five
# run at a time, also on two cores.
test: setup-train
	@.venv/bin/python -m pytest -n 5 --dist worksteal -m "not services"

# The rest: containers, SWE-bench's harness, LLaMA-Factory, verl, kills at random moments, the demo. What a machine lacks is
# skipped, and fails where CI is set.
test-services: setup-train
	@.venv/bin/python -m pytest -n 3 --dist worksteal -m services

# Properties with many examples, and kills at a hundred random moments while patches are graded.
soak: setup-train
	@UNDERSTUDY_TEST_EXAMPLES=3 .venv/bin/python -m pytest -n 2 -m "hypothesis and not services"
	@UNDERSTUDY_TEST_KILLS=100 .venv/bin/python -m pytest tests/attacks/test_kills.py
	@UNDERSTUDY_TEST_FAULTS=500 .venv/bin/python -m pytest -s -m services tests/attacks/test_worker_faults.py
	@UNDERSTUDY_TEST_ROLLOUTS=1000 .venv/bin/python -m pytest -s -m services tests/e2e/test_hosts.py

setup:
	@sh scripts/setup.sh

setup-train:
	@sh scripts/setup.sh train

lint: setup-train
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/pyright
	@.venv/bin/lint-imports
	@sh scripts/lock.sh --check

# Brings requirements/*.txt, the pinned and hashed packages that `make` installs, up to pyproject.toml.
lock: setup-train
	@sh scripts/lock.sh

# The documentation as a site, in build/site. A link that leads nowhere fails it.
docs: setup
	@sh scripts/docs.sh

# A container image with everything for one machine; OPTIONS are words for `docker build`.
image:
	@docker build -t understudy $(OPTIONS) .

# The viewer's page, from ui/ into the package. What it writes is committed, so that nobody else needs Node.js.
view: setup
	@sh scripts/view.sh types
	@sh scripts/view.sh test
	@sh scripts/view.sh build

# The page with hot reload, in front of `understudy view --port 8585` (or of the address in UNDERSTUDY_VIEW).
view-dev: setup
	@sh scripts/view.sh dev

# Pictures of the viewer for the documentation, of the stores that `make demo` has made; needs chromium.
screenshots: setup
	@.venv/bin/python scripts/screenshots.py runs

# Not those that need a GPU, repositories or an hour: gpu, honest, distillation.
BENCHES = $(filter-out bench/gpu.py bench/honest.py bench/distillation.py,$(sort $(wildcard bench/*.py)))

bench: setup-train
	@for file in $(BENCHES); do .venv/bin/python $$file || exit 1; done

clean:
	rm -rf .venv runs/demo runs/demo-* bench/results
