# Every command of the project. `make` alone lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
# pyproject.toml's lower bounds.
OLDEST_TORCH = $(shell sed -n 's/^trainer = .*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLDEST_TRANSFORMERS = $(shell sed -n 's/^hf = .*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml)
# A Python for `make gpu`, which says what it lacks; absent: .venv's.
GPU_PYTHON ?=
# Not empty: `make setup` installs only files with the hashes of requirements-dev.txt, which are those of PyPI.
REQUIRE_HASHES ?=
# Fewer tests for `make test` and `make test-all`; for example TESTS="tests/unit -k rules".
TESTS ?=
# Steps of tests/run.py that `make test-all` leaves out.
WITHOUT ?=
# What `make fast` runs. A contract in pyproject.toml keeps torch out of them.
FAST := tests/unit/api tests/unit/decide tests/unit/gate tests/unit/operator tests/unit/plan

CRD := crds/disttrain.io_disttrainingjobs.yaml
CHART_CRD := helm/disttrain/templates/crd.yaml
POD_TEMPLATE := api/disttrain_api/pod_template.json
REFERENCE := docs/reference.md
AGENT_API := docs/agent-api.json
CHART_DOCUMENTS := helm/disttrain/values.schema.json helm/disttrain/README.md
GENERATED := $(CRD) $(CHART_CRD) $(REFERENCE) $(AGENT_API) $(CHART_DOCUMENTS)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

##@ Every day

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} \
		/^##@/ {printf "\n%s\n", substr($$0, 5)} \
		/^[a-zA-Z0-9_-]+:.*## / {printf "  %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(VENV)/.stamp ## Make .venv with everything in it; does nothing when nothing changed
	@:

$(VENV)/.stamp: pyproject.toml constraints.txt
	@# One that works is kept, whichever Python made it: two in one folder do not.
	$(BIN)/python -c 'import ssl' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
ifneq ($(REQUIRE_HASHES),)
	$(BIN)/python -m pip install --quiet --require-hashes -r trainer_image/requirements-pip.txt
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
else
	$(BIN)/python -m pip install --quiet -c constraints.txt pip # an older one may take half as long again
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
endif
	@touch $@

.PHONY: run
run: setup ## Train examples/ddp.yaml on this machine
	$(BIN)/disttrain run examples/ddp.yaml

.PHONY: test
test: setup ## The gate: linters, then the tests that are fast and certain (TESTS=… for those alone)
	$(BIN)/python -m tests.run $(TESTS)

.PHONY: test-all
test-all: setup ## Everything, up to a real cluster that it starts itself: 50 minutes (TESTS=… for a part, WITHOUT=e2e without one)
	$(BIN)/python -m tests.run --all $(addprefix --without ,$(WITHOUT)) $(TESTS)

.PHONY: test-oldest
test-oldest: setup-oldest ## The gate's tests of the trainer and the session, and those of all families of models, with the oldest torch and transformers that pyproject.toml allows (TESTS=… for others)
ifdef TESTS
	$(OLDEST)/bin/python -m pytest $(TESTS)
else
	DISTTRAIN_TESTS=gate $(OLDEST)/bin/python -m pytest tests/unit/trainer tests/unit/session
	$(OLDEST)/bin/python -m pytest $$($(BIN)/python -c "from tests.run import FAMILIES; print(FAMILIES)")
endif

.PHONY: mutants
mutants: setup ## Break 100 places of the operator's core and 60 of the trainer, and name what no test of the gate notices: hours
	$(BIN)/python -m pip install --quiet -c constraints.txt coverage
	$(BIN)/python -m tools.mutants --count 100 api/disttrain_api/rules $(addprefix operator/disttrain_operator/,decide gate plan) \
		--tests $(FAST)
	$(BIN)/python -m tools.mutants --count 60 trainer_image/disttrain_trainer --tests tests/unit/trainer --by-file --seconds 1200

.PHONY: setup-oldest
setup-oldest: $(OLDEST)/.stamp
	@:

# That torch and that transformers alone, for which pip needs half a minute; all else, CUDA's libraries included, is .venv's.
$(OLDEST)/.stamp: pyproject.toml $(VENV)/.stamp
	$(BIN)/python -m venv --clear --without-pip $(OLDEST)
	$(BIN)/python -m pip --python $(OLDEST)/bin/python install --quiet --no-deps torch==$(OLDEST_TORCH) \
		"transformers~=$(OLDEST_TRANSFORMERS).0"
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(OLDEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth
	@touch $@

.PHONY: fast
fast: $(if $(wildcard $(VENV)/.stamp),,$(VENV)/.operator-stamp) ## Tests of the API and the operator alone: no torch, no cluster, under a minute
	$(BIN)/python -m pytest -q $(FAST)

$(VENV)/.operator-stamp: pyproject.toml constraints.txt
	$(BIN)/python -c 'import ssl' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[operator-dev]'
	@touch $@

.PHONY: lint
lint: setup ## Style, types, and who may import whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks helm release tools
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

.PHONY: format
format: setup ## Put the code in shape
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: docs
docs: setup ## Build the documentation site into build/site; a link or an anchor that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict # quiet, it would be strict about nothing

.PHONY: figures
figures: setup ## Draw the figures of docs/figures
	$(BIN)/python -m tools.figures

##@ Generated files

.PHONY: generate
generate: setup ## Write the CRD, its copy in the chart, docs/reference.md and docs/agent-api.json from api/, the chart's README from its values
	@mkdir -p $(dir $(GENERATED))
	$(BIN)/python -m disttrain_api.crd > $(CRD).new && mv $(CRD).new $(CRD)
	$(BIN)/python -m disttrain_api.crd --helm > $(CHART_CRD).new && mv $(CHART_CRD).new $(CHART_CRD)
	$(BIN)/python -m disttrain_api.reference > $(REFERENCE).new && mv $(REFERENCE).new $(REFERENCE)
	$(BIN)/python -m disttrain_api.agent_api > $(AGENT_API).new && mv $(AGENT_API).new $(AGENT_API)
	$(BIN)/python helm/document.py

.PHONY: verify
verify: generate ## Fail if a generated file is not what `make generate` writes
	git diff --exit-code -- $(GENERATED)

.PHONY: package
package: ## Build what `pip install disttrain` installs into build/package: a wheel and a source archive
	rm -rf build/package build/package-tools
	$(PYTHON) -m venv build/package-tools
	build/package-tools/bin/python -m pip install --quiet --no-deps --require-hashes -r operator/requirements.txt
	build/package-tools/bin/python -m hatchling build -d build/package

.PHONY: lock
lock: ## Write the hashed requirements of images and CI from pyproject.toml and constraints.txt (needs uv)
	$(PYTHON) -m release.lock

.PHONY: generate-pod-template
generate-pod-template: setup ## Take the schema of pod templates from the API server of KUBECONFIG, then generate
	kubectl get --raw /openapi/v3/api/v1 | $(BIN)/python -m disttrain_api.pod_template > $(POD_TEMPLATE).new
	mv $(POD_TEMPLATE).new $(POD_TEMPLATE)
	$(MAKE) generate

##@ Clusters and images

.PHONY: cluster-up
cluster-up: setup ## Start the test cluster on this machine (its KUBECONFIG is printed)
	$(BIN)/python -m tools.cluster up

.PHONY: cluster-down
cluster-down: setup ## Stop it and clean up
	$(BIN)/python -m tools.cluster down

.PHONY: images
images: ## Build both images; PUSH=registry/prefix or CLUSTER=kind|minikube|k3d says where to (TAG=… BUILD_OPTIONS=…)
	@$(PYTHON) -m release.images

.PHONY: cluster-images
cluster-images: setup ## Build both images, without docker, and put them on the test cluster
	$(BIN)/python -m tools.cluster images

.PHONY: e2e
e2e: setup ## End-to-end tests alone, on the cluster of KUBECONFIG or on one of our own
	$(BIN)/pytest tests/e2e

.PHONY: gpu
gpu: $(if $(GPU_PYTHON),,setup) ## Tests and the benchmark of one GPU, written down in docs/gpu.md
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu_record.py

.PHONY: soak
soak: setup ## All tests in their long variants
	DISTTRAIN_SOAK=1 $(BIN)/pytest $(TESTS)
