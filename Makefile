# The commands of this repository; `make help` lists them. Their results go to build/.

# An ordinary user's PATH lacks mkfs and fsck, sudo's lacks Go.
export PATH := $(PATH):/usr/sbin:/sbin:/usr/local/go/bin
# Builds work without git, and without a C compiler: only the race detector wants one.
export GOFLAGS := $(GOFLAGS) -buildvcs=false
export CGO_ENABLED := 0
# A process with the race detector sleeps for a second before it exits, and tests often start their own program.
export GORACE := atexit_sleep_ms=0

# The tag of this commit, or the commit, for --version. It is empty where git is missing.
SOURCE := $(shell git describe --tags --exact-match --match 'v*' --dirty 2>/dev/null || git describe --always --dirty --exclude '*' 2>/dev/null)
LINK := -X github.com/directvol/directvol/protocols/version.source=$(SOURCE)

# Guest programs are small, and the same bytes wherever a commit is built.
# Without huge pages in their heap (disablethp in Go's package runtime): each would take 2 MB where a few pages do.
# Functions begin at multiples of 16 bytes (the default is 32), and protobuf's are not inlined: together 210 kB less,
# and no slower by a benchmark of an answer of GetVolumeStats.
GUEST_BUILD := go build -v -trimpath -gcflags='google.golang.org/protobuf/...=-l' \
	-ldflags='-s -w -funcalign=16 -X runtime.godebugDefault=disablethp=1 $(LINK)'

# go build -v prints a line per package: about a hundred, which matter only if it fails.
QUIET := .ci/quiet

# The requirements of each target besides Go, as COMMAND-OR-FILE=PACKAGE.
DEMO_NEEDS := qemu-system-x86_64=qemu-system-x86 mkfs.ext4=e2fsprogs mkfs.xfs=xfsprogs
BENCH_NEEDS := $(DEMO_NEEDS) qemu-storage-daemon=qemu-system-common fio=fio strace=strace
TEST_NEEDS := $(DEMO_NEEDS) mkfs.btrfs=btrfs-progs dmsetup=dmsetup cryptsetup=cryptsetup-bin qemu-storage-daemon=qemu-system-common gcc=gcc /usr/include/stdlib.h=libc6-dev
LONG_NEEDS := $(TEST_NEEDS) mmdebstrap=mmdebstrap fio=fio

# The suite of Debian's archive with the kernel of the rescue image, newer than the host's.
RESCUE_SUITE := trixie-backports
# The packages of VM tests, the longest first: go test starts them in this order, two at a
# time, and both processors are busy until the end.
VM_TESTS := volumes churn killed cuts service poweroff rescue vsock ctl agentlog
ROOTFS = build/directvol-rootfs --cache build/cache
RESCUE_ROOTFS = $(ROOTFS) --suite $(RESCUE_SUITE) --kernel-out build/rescue-vmlinuz --program /init=build/directvol-agent

# A module of its own, which ./... leaves out.
BENCH := tools/bench
# The folders of all modules here.
MODULES = $(patsubst %/go.mod,%,$(shell find . -name go.mod -not -path './build/*'))

.PHONY: help demo recording dist bench test test-long build guest rescue lint generate clean deps-demo deps-bench deps-test deps-long

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: deps-demo guest ## boot a VM and take volumes through their life in it; the results go to the terminal and build/demo.json
	@rm -f build/demo.json
	build/demo

recording: deps-demo guest ## record the demo as it runs, for README.md: docs/demo.cast and, four times as fast, docs/demo.svg
	script --quiet --return --flush --log-out build/demo.out --log-timing build/demo.timing --command 'stty columns 120 rows 50 && build/demo'
	go run ./tools/recording --typescript build/demo.out --timing build/demo.timing --columns 120 --title 'make demo' --cast docs/demo.cast --svg docs/demo.svg

dist: build ## build a release in build/dist: static programs, Debian packages and checksums
	@LINK='$(LINK)' SOURCE='$(SOURCE)' .ci/dist

bench: deps-bench guest ## measure directvol beside its baselines and, with KATA_AGENT=PATH, beside kata-agent: build/bench.md; CHECK=1 fails (exit 3 of build/bench) if a target is missed
	@$(QUIET) 'build the bench' go -C $(BENCH) build -v -ldflags='$(LINK)' -o ../../build/bench .
	build/bench $(if $(CHECK),--check)

test: deps-test guest rescue ## run every test except the long ones; tests below tests/ may boot VMs, two at a time
	CGO_ENABLED=1 go -C $(BENCH) test -race -timeout 25m ./...
	CGO_ENABLED=1 go build -v -race ./...
	CGO_ENABLED=1 go test -race -p 2 -timeout 25m ./protocols/... ./agent/... ./host/... ./rootfs/... ./tools/...
	CGO_ENABLED=1 go test -race -p 2 -timeout 25m -count=1 -v $(VM_TESTS:%=./tests/%/...) ./tests/...

test-long: deps-long guest rescue dist ## run each fuzz target for FUZZTIME (5m), and campaigns and soaks in VMs: hours
	go test -tags long -p 1 -timeout 6h -count=1 -v ./tests/...

build: ## build the programs
	@$(QUIET) "build the host's programs" go build -v -ldflags='$(LINK)' -o build/ ./host/cmd/directvol ./rootfs/cmd/directvol-rootfs ./tools/agent-ctl ./tools/demo
	@$(QUIET) "build the guest's agent" $(GUEST_BUILD) -o build/ ./agent/cmd/directvol-agent
	@$(QUIET) "build the tests' guest" $(GUEST_BUILD) -o build/test-guest ./tests/guest

guest: build ## build the guest's kernel and image, and the image for tests
	$(ROOTFS) --program /init=build/directvol-agent --out build/guest.cpio --kernel-out build/vmlinuz
	$(ROOTFS) --program /init=build/directvol-agent --program /test-guest=build/test-guest --out build/guest-test.cpio --kernel-out build/vmlinuz

rescue: build ## build the same images as rescue-*, with the newer kernel of suite RESCUE_SUITE (trixie-backports)
	$(RESCUE_ROOTFS) --out build/rescue.cpio
	$(RESCUE_ROOTFS) --out build/rescue-test.cpio --program /test-guest=build/test-guest

lint: ## check every module with go vet, staticcheck, gofmt and, if its database is reachable, govulncheck
	@go build -o build/staticcheck honnef.co/go/tools/cmd/staticcheck
	@for module in $(MODULES); do \
		echo "lint $$module" && cd "$(CURDIR)/$$module" && go vet -tags long ./... && "$(CURDIR)/build/staticcheck" -tags long ./... || exit 1; \
	done
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "run gofmt -w on:" $$unformatted; exit 1; }
	@.ci/vulnerabilities $(MODULES)

generate: ## generate the Go code from protocols/proto
	go run ./protocols/internal/generate

clean: ## remove build/, including the downloaded kernel
	rm -rf build

deps-demo:
	@.ci/need $(DEMO_NEEDS)

deps-bench:
	@.ci/need $(BENCH_NEEDS)

deps-test:
	@.ci/need $(TEST_NEEDS)

deps-long:
	@.ci/need $(LONG_NEEDS)
