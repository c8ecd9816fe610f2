# gpusession: building, trying, testing, installing. `make help` lists the targets.

CARGO ?= cargo
DESTDIR ?=
prefix ?= /usr
sysconfdir ?= /etc
libexecdir ?= $(prefix)/libexec/gpusession
# /usr/lib/x86_64-linux-gnu where the distribution has such folders, else /usr/lib64
multiarch := $(shell $(CC) -print-multiarch 2>/dev/null)
libdir ?= $(prefix)/$(if $(multiarch),lib/$(multiarch),lib64)
# tcsh reads this folder on Debian, and /etc/profile.d/*.csh elsewhere
cshdir ?= $(sysconfdir)/$(if $(multiarch),csh/login.d,profile.d)
unitdir ?= $(prefix)/lib/systemd/system
dbusdir ?= $(prefix)/share/dbus-1

OUT := $(or $(CARGO_TARGET_DIR),target)
# The cargo profile of programs: release as shipped, trial for demo and tests.
PROFILE ?= release
RELEASE = $(OUT)/$(PROFILE)
TOOLS := $(OUT)/tools
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY := $(TOOLS)/bin/cargo-deny
CARGO_DEB_VERSION := 3.8.0
CARGO_GENERATE_RPM_VERSION := 0.21.1
CRATES := gpuserver gpuserver-worker gpusessiond gpusession gpusession-cuda gpusession-nvml simgpu gpusession-manual
SHELL_SCRIPTS := .ci/run .ci/setup pam-module/check units/check $(wildcard units/libexec/*) units/user-environment-generators/60-gpusession profile.d/gpusession.sh $(wildcard packaging/scripts/*.p*) tests/conformance/simgpu tests/demo/demo tests/gpu/bundle tests/parsers/fuzz tests/programs/verify
SHELL_SCRIPTS += packaging/check $(wildcard docs/examples/*/*)

.PHONY: help build fuzz programs demo quick schedules soak test test-unit test-conformance test-system release-check check style docs deny deb rpm bench gpu-bundle install clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         a whole site on this machine: server, daemon, programs on leased GPUs (simulated where there is none)'
	@echo 'make quick        unit tests that need no GPU, no root and no network'
	@echo 'make test         all tests that need no GPU, quick ones first'
	@echo 'make schedules    SCHEDULES=10000: orders in which threads of a worker may run; a part of make test has 500'
	@echo 'make test-unit test-conformance   parts of make test; make style deny: parts of make check'
	@echo 'make check        formatting, lints, licences, shell scripts, language, generated pages'
	@echo 'make gpu-bundle   target/gpu-bundle: a folder that tests and measures on a machine with a GPU'
	@echo 'make build        release binaries'
	@echo 'make programs     the CUDA test programs'
	@echo 'make docs         writes generated files: docs/coverage*.md, gpuserver.toml, gpusession.toml and their manuals'
	@echo 'make bench        what can be measured without a GPU'
	@echo 'make deb rpm      packages for distributions, into target/dist'
	@echo 'make release-check  builds and checks everything as it is shipped'
	@echo 'make soak         MINUTES=60 CLIENTS=20: many clients with faults on simulated GPUs; checks that they leave nothing over'
	@echo 'make install      into DESTDIR, after make build'
	@echo 'make test-system  installed packages on hosts with a booted systemd (root, systemd-nspawn)'

# ---- building

build:
	@.ci/setup build
	@echo 'build: programs and libraries (profile $(PROFILE)); minutes on a machine that builds them for the first time'
	$(CARGO) build --locked --profile $(PROFILE) $(addprefix -p ,$(CRATES))
	@$(MAKE) --no-print-directory $(RELEASE)/libpam_gpusession.so $(RELEASE)/libnccl-tuner.so

# With a profile of its own, for its size.
.PHONY: $(RELEASE)/libpam_gpusession.so
$(RELEASE)/libpam_gpusession.so:
	$(CARGO) build --locked --profile pam -p pam_gpusession
	@install -D -m 755 $(OUT)/pam/libpam_gpusession.so $@

# Where NCCL looks for a tuner plugin, which is a part of libcuda.so.1. A link would not do: its
# name is no beginning of that library's, so the loader's cache leaves it out.
$(RELEASE)/libnccl-tuner.so: $(RELEASE)/libgpusession_cuda.so
	$(CC) -shared -Wl,--no-as-needed -Wl,-z,noexecstack -Wl,-soname,libnccl-tuner.so -o $@ $< -lc

# Random CUDA programs, for tests only.
fuzz:
	$(CARGO) build --locked --profile $(PROFILE) -p gpusession-fuzz -p gpusession-faults

programs:
	@.ci/setup build programs
	@$(MAKE) --no-print-directory -s -j$(shell nproc) -C tests/programs

docs:
	$(CARGO) run --locked -q -p gpusession-calls --example coverage >docs/coverage.md.new
	mv docs/coverage.md.new docs/coverage.md
	$(CARGO) run --locked -q -p gpusession-nvml-calls --example coverage-nvml >docs/coverage-nvml.md.new
	mv docs/coverage-nvml.md.new docs/coverage-nvml.md
	GPUSESSION_BLESS=1 $(CARGO) test --locked -q -p gpuserver -p gpusessiond --lib comes_from_the_rows

# ---- trying

demo soak test-conformance test-system: export PROFILE := trial

demo: build
	@.ci/setup programs
	@tests/demo/demo --no-build $(DEMO_ARGUMENTS)

gpu-bundle: build fuzz
	@.ci/setup programs
	@tests/gpu/bundle --bin $(RELEASE)/cuda-fuzz --bin $(RELEASE)/gpusession --bin $(RELEASE)/gpusessiond --bin $(RELEASE)/gpuserver \
		--bin $(RELEASE)/gpuserver-worker \
		--bin $(RELEASE)/gpuserver-starter \
		--lib $(RELEASE)/libgpusession_cuda.so:gpusession/libcuda.so.1 \
		--lib $(RELEASE)/libgpusession_nvml.so:gpusession/libnvidia-ml.so.1 \
		--lib $(RELEASE)/libnccl-tuner.so:gpusession/libnccl-tuner.so

bench:
	CLIENTS=$${CLIENTS:-4000} $(CARGO) bench --locked --workspace --bench '*'

# ---- testing

# Cheapest first: a failure shows early.
test: test-unit test-conformance test-system

# No CUDA, no root, no bus, no network: these run anywhere that Rust is.
QUICK := $(addprefix -p ,gpusession-common gpusession-image gpusession-proto gpusessiond gpuserver gpuserver-worker)
quick:
	@.ci/setup build
	@echo 'quick: builds first; minutes on a machine that does so for the first time'
	@export NEXTEST_TEST_THREADS=$${NEXTEST_TEST_THREADS:-$$(($$(nproc) * 3 / 2))}; \
	if $(CARGO) nextest --version >/dev/null 2>&1; then \
		$(CARGO) nextest run --locked --lib --bins $(QUICK); \
	else $(CARGO) test --locked -q --lib --bins $(QUICK); fi

# Tests of the workspace start each other's programs, which are built first. They wait half of the
# time, so more of them run than there are processors.
test-unit:
	@.ci/setup build programs test
	@profile.d/check
	$(CARGO) build --locked --workspace --bins --lib --examples
	@export GPUSESSION_ARTEFACTS=built NEXTEST_TEST_THREADS=$${NEXTEST_TEST_THREADS:-$$(($$(nproc) * 3 / 2))}; \
	if $(CARGO) nextest --version >/dev/null 2>&1; then \
		echo '$(CARGO) nextest run --locked --profile built --workspace'; \
		$(CARGO) nextest run --locked --profile built --workspace; \
	else \
		echo '$(CARGO) test --locked --workspace'; $(CARGO) test --locked --workspace --lib --bins --tests; \
	fi
	@SCHEDULES=$${SCHEDULES:-500} $(MAKE) --no-print-directory schedules

# Schedules of a worker's executors, chosen at random: SCHEDULES=10000 by default.
schedules:
	$(CARGO) test --locked -q -p gpuserver-worker --bin gpuserver-worker --features schedules schedules::

test-conformance: build fuzz programs
	@$(MAKE) --no-print-directory -s -C tests/programs verify
	@tests/conformance/simgpu

# Many clients for a long time, some with a daemon, with faults: at the end nothing is left over.
soak: build fuzz programs
	@tests/conformance/simgpu --soak $(or $(MINUTES),60) $(or $(CLIENTS),20)

# Needs root and systemd-nspawn. REQUIRE_SYSTEM=1: it is an error if this machine cannot run it.
test-system:
	@.ci/setup system package || true
	@reason=$$(tests/system/run --why-not); if [ -n "$$reason" ]; then \
		echo "test-system: skipped: $$reason"; [ -z '$(REQUIRE_SYSTEM)' ]; \
	else $(MAKE) --no-print-directory build programs $(TOOLS)/bin/cargo-deb $(TOOLS)/bin/cargo-generate-rpm && \
		$(CARGO) build --locked --profile pam -p pam_gpusession --example pam_panicking && rm -rf target/system && \
		packaging/build deb --fast --profile $(PROFILE) --out target/system/dist && \
		packaging/build rpm --fast --profile $(PROFILE) --out target/system/rpms && \
		packaging/check target/system/dist/*.deb target/system/rpms/*.rpm && \
		tests/system/run --profile $(PROFILE) --debs target/system/dist $(SYSTEM_ARGUMENTS); fi

# Builds and checks everything as it is shipped. gpu-bundle fails if the bundle is too large.
release-check: gpu-bundle deb rpm
	@echo 'release-check: all right'

# ---- checking

# Crates inside other people's programs, whose output and end are not theirs to decide.
GUESTS := $(addprefix -p gpusession-,cuda link nvml proto common image login fatal pam) -p pam_gpusession
NOT_IN_GUESTS := $(addprefix -D clippy::,unwrap_used expect_used panic unreachable print_stdout print_stderr)

check: style deny
	@.ci/setup build check
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --no-deps --lib $(GUESTS) -- $(NOT_IN_GUESTS)
	@$(MAKE) --no-print-directory $(RELEASE)/libpam_gpusession.so
	@pam-module/check $(RELEASE)/libpam_gpusession.so
	@units/check
	@tests/gpu/check
	shellcheck --severity=warning --exclude=SC1007 $(SHELL_SCRIPTS)
	@$(CARGO) run --locked -q -p gpusession-calls --example coverage | diff -q - docs/coverage.md >/dev/null || \
		{ echo 'check: docs/coverage.md is not up to date: make docs'; exit 1; }
	@$(CARGO) run --locked -q -p gpusession-nvml-calls --example coverage-nvml | diff -q - docs/coverage-nvml.md >/dev/null || \
		{ echo 'check: docs/coverage-nvml.md is not up to date: make docs'; exit 1; }
	@echo 'check: all right'

# Language of comments, messages and documents; the order of modules; links. Each says what to do.
style:
	@tests/style/prose --self-test
	@tests/style/prose
	@tests/style/floors --self-test
	@tests/style/floors
	@tests/style/crates
	@tests/style/links
	@tests/style/sizes
	@tests/style/dependencies
	@tests/style/artefacts --self-test
	@tests/style/artefacts
	@python3 -c 'import ast, sys; [ast.parse(open(f).read(), f) for f in sys.argv[1:]]' $(wildcard tests/*/*.py tests/*/*/*.py)

deny: $(CARGO_DENY)
	$(CARGO_DENY) --locked check bans licenses sources

# Unoptimised: a tool is built in a third of the time, and runs for a second.
cargo_install = CARGO_TARGET_DIR=$(TOOLS)/build CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_LTO=off \
	CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	$(CARGO) install --quiet --locked --no-default-features --root $(TOOLS) $(1) && rm -rf $(TOOLS)/build

$(CARGO_DENY):
	@.ci/setup build
	$(call cargo_install,cargo-deny@$(CARGO_DENY_VERSION))

# ---- distribution packages, into target/dist

deb: build $(TOOLS)/bin/cargo-deb
	@.ci/setup package
	@packaging/build deb
	@packaging/check target/dist/*.deb

rpm: build $(TOOLS)/bin/cargo-generate-rpm
	@.ci/setup package
	@packaging/build rpm
	@packaging/check target/dist/*.rpm

$(TOOLS)/bin/cargo-deb:
	@.ci/setup build
	$(call cargo_install,--features lzma cargo-deb@$(CARGO_DEB_VERSION))

$(TOOLS)/bin/cargo-generate-rpm:
	@.ci/setup build
	$(call cargo_install,cargo-generate-rpm@$(CARGO_GENERATE_RPM_VERSION))

# ---- installing

# Pages for administrators and users of either kind of machine. Each package has all of them, so
# that links lead somewhere.
PAGES := user-guide.md admin-guide.md security.md sharing.md idle-and-parking.md isolation.md troubleshooting.md json.md

install:
	@test -x $(RELEASE)/gpusession || { echo 'install: make build first'; exit 1; }
	install -D -m 755 -t $(DESTDIR)$(prefix)/bin $(RELEASE)/gpusession $(RELEASE)/gpuserver
	install -D -m 755 -t $(DESTDIR)$(libexecdir) $(RELEASE)/gpusessiond $(RELEASE)/gpuserver-worker $(RELEASE)/gpuserver-signer $(RELEASE)/gpuserver-starter units/libexec/*
	install -D -m 644 $(RELEASE)/libgpusession_cuda.so $(DESTDIR)$(libdir)/gpusession/libcuda.so.1
	install -D -m 644 $(RELEASE)/libgpusession_nvml.so $(DESTDIR)$(libdir)/gpusession/libnvidia-ml.so.1
	ln -sf libcuda.so.1 $(DESTDIR)$(libdir)/gpusession/libcuda.so
	ln -sf libnvidia-ml.so.1 $(DESTDIR)$(libdir)/gpusession/libnvidia-ml.so
	install -D -m 644 -t $(DESTDIR)$(libdir)/gpusession $(RELEASE)/libnccl-tuner.so
	install -D -m 644 $(RELEASE)/libpam_gpusession.so $(DESTDIR)$(libdir)/security/pam_gpusession.so
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/pam-configs pam-module/pam-configs/gpusession
	install -D -m 644 $(RELEASE)/libsimgpu.so $(DESTDIR)$(libdir)/gpusession/sim/libcuda.so.1
	ln -sf libcuda.so.1 $(DESTDIR)$(libdir)/gpusession/sim/libnvidia-ml.so.1
	install -D -m 644 -t $(DESTDIR)$(unitdir) $(filter-out %.d,$(wildcard units/systemd/*.*))
	install -D -m 644 -t $(DESTDIR)$(unitdir)/paths.target.d units/systemd/paths.target.d/*
	install -D -m 644 -t $(DESTDIR)$(prefix)/lib/sysusers.d units/sysusers.d/*.conf
	install -D -m 644 -t $(DESTDIR)$(prefix)/lib/tmpfiles.d units/tmpfiles.d/*.conf
	install -D -m 644 -t $(DESTDIR)$(prefix)/lib/systemd/catalog units/catalog/*.catalog
	install -D -m 755 -t $(DESTDIR)$(prefix)/lib/systemd/user-environment-generators units/user-environment-generators/*
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/polkit-1/actions units/polkit-1/actions/*.policy
	install -D -m 644 -t $(DESTDIR)$(sysconfdir)/profile.d profile.d/gpusession.sh
	install -D -m 644 -t $(DESTDIR)$(cshdir) profile.d/gpusession.csh
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/fish/vendor_conf.d profile.d/gpusession.fish
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/gpusession profile.d/notice.csh
	install -D -m 644 -t $(DESTDIR)$(dbusdir)/system.d units/dbus-1/system.d/*.conf
	install -D -m 644 -t $(DESTDIR)$(dbusdir)/system-services units/dbus-1/system-services/*.service
	install -D -m 644 -t $(DESTDIR)$(dbusdir)/interfaces units/dbus-1/interfaces/*.xml
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/man/man5 docs/man/*.5
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/man/man8 docs/man/*.8
	install -d $(DESTDIR)$(prefix)/share/gpusession
	echo $(libdir)/gpusession >$(DESTDIR)$(prefix)/share/gpusession/ld.so.conf
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/doc/gpusession README.md
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/doc/gpusession/docs $(addprefix docs/,$(PAGES) coverage.md coverage-nvml.md)
	install -D -m 755 -t $(DESTDIR)$(prefix)/share/doc/gpusession/docs/examples/slurm docs/examples/slurm/*
	install -D -m 755 -t $(DESTDIR)$(prefix)/share/doc/gpusession/docs/examples/pbs docs/examples/pbs/*
	install -D -m 644 -t $(DESTDIR)$(prefix)/share/doc/gpuserver/docs $(addprefix docs/,$(PAGES))
	install -D -m 644 packaging/etc/gpusession.toml -t $(DESTDIR)$(sysconfdir)/gpusession
	install -D -m 644 packaging/etc/gpuserver.toml -t $(DESTDIR)$(sysconfdir)/gpusession
	$(RELEASE)/gpusession-manual $(DESTDIR)$(prefix)

clean:
	$(CARGO) clean
