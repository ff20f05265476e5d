package kernel

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/directvol/directvol/protocols/output"
)

// metaPackage is the package that depends on the newest kernel for virtual machines in apt's
// release.
const metaPackage = "linux-image-cloud-amd64"

// maxPackages limits how many packages a kernel may be split into. Debian's kernels have up to
// four.
const maxPackages = 16

// aptConfig is read after the host's own settings, and keeps apt from using the host's state: no
// lock, no change of user (the directory may be inaccessible to apt's user), no hooks, and no
// indexes except the packages'.
const aptConfig = `Debug::NoLocking "true";
APT::Sandbox::User "root";
Acquire::Languages "none";
#clear Acquire::IndexTargets::deb::DEP-11;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
`

// aptPackage is a package as apt's lists describe it. The cache stores it as JSON.
type aptPackage struct {
	Name    string `json:"package"`
	Version string `json:"version"`
	SHA256  string `json:"sha256"`
}

var hexSum = regexp.MustCompile(`^[0-9a-f]{64}$`)

// debianPackages returns the paths of Debian's kernel packages in src's cache. It downloads them if
// they are missing or incomplete.
func debianPackages(ctx context.Context, src Source) ([]string, error) {
	if debs, ok := cachedPackages(src.Cache, src.Suite); ok {
		return debs, nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return nil, errors.New("apt-get, which downloads " + metaPackage + ", is not installed")
	}
	if err := os.MkdirAll(src.Cache, 0o755); err != nil {
		return nil, err
	}
	work, err := os.MkdirTemp(src.Cache, "apt-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	a, err := newApt(work, src.Progress)
	if err != nil {
		return nil, err
	}
	if src.Suite != "" {
		if err := a.useSuite(ctx, src.Suite); err != nil {
			return nil, err
		}
	}
	packages, err := a.resolve(ctx)
	if err != nil {
		return nil, err
	}
	return a.download(ctx, packages, src.Cache)
}

// noteFile returns the path of the file in which a cache records the packages of a suite's kernel:
// JSON, one aptPackage per line. Each suite has its own file, and so does the empty suite, which
// stands for the configuration of the host's apt.
func noteFile(cache, suite string) string {
	if suite == "" {
		return filepath.Join(cache, "kernel.json")
	}
	return filepath.Join(cache, "kernel-"+suite+".json")
}

// cachedPackages returns the packages that an earlier call downloaded, if their contents are
// unchanged.
func cachedPackages(cache, suite string) ([]string, bool) {
	data, err := os.ReadFile(noteFile(cache, suite))
	if err != nil {
		return nil, false
	}
	var debs []string
	for notes := json.NewDecoder(bytes.NewReader(data)); ; {
		var pkg aptPackage
		if err := notes.Decode(&pkg); errors.Is(err, io.EOF) {
			return debs, len(debs) > 0
		} else if err != nil || !pkg.cached(cache) || len(debs) == maxPackages {
			return nil, false
		}
		debs = append(debs, pkg.file(cache))
	}
}

// file returns the package's path in the cache. The caller must have checked the format of the
// SHA-256.
func (p aptPackage) file(cache string) string { return filepath.Join(cache, p.SHA256+".deb") }

// cached reports whether the package is in the cache with the right content.
func (p aptPackage) cached(cache string) bool {
	if !hexSum.MatchString(p.SHA256) {
		return false
	}
	sum, err := fileSum(p.file(cache))
	return err == nil && sum == p.SHA256
}

// apt runs apt's programs with all their state in one directory, so that they need neither root nor
// up-to-date lists on the host.
type apt struct {
	work     string
	options  []string
	lists    string // a directory for package lists; empty means the host's
	progress *output.Progress
	archive  archive // the zero value means all sources of the host
}

func newApt(work string, progress *output.Progress) (*apt, error) {
	work, err := filepath.Abs(work)
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{"lists/partial", "cache/archives/partial", "download"} {
		if err := os.MkdirAll(filepath.Join(work, dir), 0o755); err != nil {
			return nil, err
		}
	}
	config := filepath.Join(work, "apt.conf")
	if err := os.WriteFile(config, []byte(aptConfig), 0o644); err != nil {
		return nil, err
	}
	options := []string{"-q", "-c", config, "-o", "Dir::Cache=" + filepath.Join(work, "cache")}
	return &apt{work: work, options: options, lists: filepath.Join(work, "lists"), progress: progress}, nil
}

// run runs one of apt's programs in the download directory and returns its output. The error
// contains the last line of the program's standard error.
func (a *apt) run(ctx context.Context, program string, args ...string) ([]byte, error) {
	options := slices.Clone(a.options)
	if a.lists != "" {
		options = append(options, "-o", "Dir::State::Lists="+a.lists)
	}
	cmd := command(ctx, a.work, program, append(options, args...)...)
	cmd.Dir = filepath.Join(a.work, "download")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil && bytes.Contains(stderr.Bytes(), []byte("No space left on device")) {
		return nil, fullDisk(a.work)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", program, args[0], err, lastLine(stderr.Bytes()))
	}
	if complaint := lastLine(stderr.Bytes()); complaint != "" && stdout.Len() == 0 {
		return nil, fmt.Errorf("%s %s: %s", program, args[0], complaint)
	}
	return stdout.Bytes(), nil
}

// update fetches the package lists.
func (a *apt) update(ctx context.Context) error {
	return watch(ctx, a.progress, "fetch apt's package lists", a.lists, func(ctx context.Context) error {
		_, err := a.run(ctx, "apt-get", "update")
		return err
	})
}

// resolve fetches the package lists and finds the packages of one kernel by the meta package's
// dependencies.
func (a *apt) resolve(ctx context.Context) ([]aptPackage, error) {
	if err := a.update(ctx); err != nil {
		return nil, a.archive.explain(err)
	}
	meta, err := a.run(ctx, "apt-cache", "show", "--no-all-versions", metaPackage)
	if err != nil {
		return nil, fmt.Errorf("apt does not offer %s: check the network and apt's sources (%w)", metaPackage, err)
	}
	image, err := kernelDependency(controlField(meta, "Depends"))
	if err != nil {
		return nil, err
	}
	return a.closure(ctx, image)
}

// closure returns the package image and the packages of the same kernel on which it depends,
// directly or indirectly. Until trixie, Debian's kernels were a single package; since then they are
// split. Other dependencies matter only to a host that boots the kernel.
func (a *apt) closure(ctx context.Context, image string) ([]aptPackage, error) {
	release := strings.TrimPrefix(image, "linux-image-")
	var packages []aptPackage
	for names := []string{image}; len(packages) < len(names); {
		name := names[len(packages)]
		control, err := a.run(ctx, "apt-cache", "show", "--no-all-versions", name)
		if err != nil {
			return nil, err
		}
		pkg := aptPackage{Name: name, Version: controlField(control, "Version"), SHA256: controlField(control, "SHA256")}
		if pkg.Version == "" || !hexSum.MatchString(pkg.SHA256) {
			return nil, fmt.Errorf("apt's lists name no version and SHA-256 of package %s", name)
		}
		packages = append(packages, pkg)
		for _, part := range kernelParts(controlField(control, "Depends"), release) {
			if !slices.Contains(names, part) {
				names = append(names, part)
			}
		}
		if len(names) > maxPackages {
			return nil, fmt.Errorf("package %s depends on more than %d packages of its kernel: %.200q", image, maxPackages, names)
		}
	}
	return packages, nil
}

// download downloads missing packages into the cache, and writes the note by which later calls find
// them.
func (a *apt) download(ctx context.Context, packages []aptPackage, cache string) ([]string, error) {
	var debs []string
	var note bytes.Buffer
	for _, pkg := range packages {
		if !pkg.cached(cache) {
			if err := a.downloadOne(ctx, pkg, cache); err != nil {
				return nil, err
			}
		}
		debs = append(debs, pkg.file(cache))
		if err := json.NewEncoder(&note).Encode(pkg); err != nil {
			return nil, err
		}
	}
	temp := filepath.Join(a.work, "kernel.json")
	if err := os.WriteFile(temp, note.Bytes(), 0o644); err != nil {
		return nil, err
	}
	return debs, os.Rename(temp, noteFile(cache, a.archive.suite))
}

// downloadOne downloads pkg, checks its SHA-256 and moves it into the cache.
func (a *apt) downloadOne(ctx context.Context, pkg aptPackage, cache string) error {
	dir := filepath.Join(a.work, "download")
	err := watch(ctx, a.progress, "download "+pkg.Name, dir, func(ctx context.Context) error {
		_, err := a.run(ctx, "apt-get", "download", pkg.Name+"="+pkg.Version)
		return err
	})
	if err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(escapeGlob(dir), "*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get download %s left %d package files, want one", pkg.Name, len(debs))
	}
	sum, err := fileSum(debs[0])
	if err != nil {
		return err
	}
	if sum != pkg.SHA256 {
		return fmt.Errorf("package %s has SHA-256 %s, but apt's lists say %s: try again", pkg.Name, sum, pkg.SHA256)
	}
	return os.Rename(debs[0], pkg.file(cache))
}

// controlField returns a field of the first package in control data (deb-control(5)). It does not
// support folded lines, which are not needed here.
func controlField(control []byte, field string) string {
	for line := range strings.SplitSeq(string(control), "\n") {
		if line == "" {
			return ""
		}
		if key, value, ok := strings.Cut(line, ":"); ok && key == field {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

var kernelName = regexp.MustCompile(`^linux-image-[0-9][0-9a-z.+~-]*$`)

// kernelDependency returns the kernel's package in a Depends field.
func kernelDependency(depends string) (string, error) {
	for relation := range strings.SplitSeq(depends, ",") {
		if words := strings.Fields(relation); len(words) > 0 && kernelName.MatchString(words[0]) {
			return words[0], nil
		}
	}
	return "", fmt.Errorf("package %s depends on no linux-image package: %.200q", metaPackage, depends)
}

// partName matches the first part of a kernel package's name; the rest is the kernel's release.
var partName = regexp.MustCompile(`^linux-[a-z]+-$`)

// kernelParts returns the packages of the kernel with the given release in a Depends field.
func kernelParts(depends, release string) []string {
	var parts []string
	for relation := range strings.FieldsFuncSeq(depends, func(r rune) bool { return r == ',' || r == '|' }) {
		words := strings.Fields(relation)
		if len(words) == 0 {
			continue
		}
		if kind, ok := strings.CutSuffix(words[0], release); ok && partName.MatchString(kind) {
			parts = append(parts, words[0])
		}
	}
	return parts
}
