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
	"strings"
	"time"
)

// metaPackage depends on the newest kernel for virtual machines of the release that the host's apt knows.
const metaPackage = "linux-image-cloud-amd64"

// aptConfig, read after the host's own settings, keeps apt away from the host's state: no lock, no change of user (the
// folder may be closed to apt's), no hook, and no index but the packages'.
const aptConfig = `Debug::NoLocking "true";
APT::Sandbox::User "root";
Acquire::Languages "none";
#clear Acquire::IndexTargets::deb::DEP-11;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
`

// aptPackage is one package as apt's lists describe it; the cache remembers it as JSON.
type aptPackage struct {
	Name    string `json:"package"`
	Version string `json:"version"`
	SHA256  string `json:"sha256"`
}

var hexSum = regexp.MustCompile(`^[0-9a-f]{64}$`)

// debianPackage gives the path of Debian's kernel package in cache, downloaded when it is not there whole.
func debianPackage(ctx context.Context, cache string, progress io.Writer) (string, error) {
	if deb, ok := cachedPackage(cache); ok {
		return deb, nil
	}
	if _, err := exec.LookPath("apt-get"); err != nil {
		return "", errors.New("apt-get, which downloads " + metaPackage + ", is not installed")
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	work, err := os.MkdirTemp(cache, "apt-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	a, err := newApt(work, progress)
	if err != nil {
		return "", err
	}
	pkg, err := a.resolve(ctx)
	if err != nil {
		return "", err
	}
	return a.download(ctx, pkg, cache)
}

// cachedPackage finds the package that an earlier call downloaded, if it still has the bytes it had.
func cachedPackage(cache string) (string, bool) {
	data, err := os.ReadFile(filepath.Join(cache, "kernel.json"))
	if err != nil {
		return "", false
	}
	var pkg aptPackage
	if err := json.Unmarshal(data, &pkg); err != nil || !hexSum.MatchString(pkg.SHA256) {
		return "", false
	}
	deb := filepath.Join(cache, pkg.SHA256+".deb")
	sum, err := fileSum(deb)
	return deb, err == nil && sum == pkg.SHA256
}

// apt runs apt's programs with all their state in one folder, so that neither root nor fresh lists on the host are needed.
type apt struct {
	work     string
	options  []string
	progress io.Writer
}

func newApt(work string, progress io.Writer) (*apt, error) {
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
	return &apt{work: work, progress: progress, options: []string{
		"-q", "-c", config,
		"-o", "Dir::State::Lists=" + filepath.Join(work, "lists"),
		"-o", "Dir::Cache=" + filepath.Join(work, "cache"),
	}}, nil
}

// run runs one of apt's programs in the download folder and returns what it prints. The error is its last complaint.
func (a *apt) run(ctx context.Context, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, append(append([]string{}, a.options...), args...)...)
	cmd.Dir = filepath.Join(a.work, "download")
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	cmd.WaitDelay = 5 * time.Second // its transport programs hold the pipes too
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", program, args[0], err, lastLine(stderr.Bytes()))
	}
	if complaint := lastLine(stderr.Bytes()); complaint != "" && stdout.Len() == 0 {
		return nil, fmt.Errorf("%s %s: %s", program, args[0], complaint)
	}
	return stdout.Bytes(), nil
}

// resolve fetches the package lists and follows the meta package to the kernel of one version.
func (a *apt) resolve(ctx context.Context) (aptPackage, error) {
	stop := watch(a.progress, "fetching apt's package lists", filepath.Join(a.work, "lists"))
	_, err := a.run(ctx, "apt-get", "update")
	stop()
	if err != nil {
		return aptPackage{}, err
	}
	meta, err := a.run(ctx, "apt-cache", "show", "--no-all-versions", metaPackage)
	if err != nil {
		return aptPackage{}, fmt.Errorf("apt offers no %s: check the network and apt's sources (%w)", metaPackage, err)
	}
	name, err := kernelDependency(controlField(meta, "Depends"))
	if err != nil {
		return aptPackage{}, err
	}
	control, err := a.run(ctx, "apt-cache", "show", "--no-all-versions", name)
	if err != nil {
		return aptPackage{}, err
	}
	pkg := aptPackage{Name: name, Version: controlField(control, "Version"), SHA256: controlField(control, "SHA256")}
	if pkg.Version == "" || !hexSum.MatchString(pkg.SHA256) {
		return aptPackage{}, fmt.Errorf("apt's lists name no version and SHA-256 of package %s", name)
	}
	return pkg, nil
}

// download fetches pkg, checks its bytes and moves it into cache, with a note that later calls find it by.
func (a *apt) download(ctx context.Context, pkg aptPackage, cache string) (string, error) {
	dir := filepath.Join(a.work, "download")
	stop := watch(a.progress, "downloading "+pkg.Name, dir)
	_, err := a.run(ctx, "apt-get", "download", pkg.Name+"="+pkg.Version)
	stop()
	if err != nil {
		return "", err
	}
	debs, err := filepath.Glob(filepath.Join(escapeGlob(dir), "*.deb"))
	if err != nil || len(debs) != 1 {
		return "", fmt.Errorf("apt-get download %s left %d package files, not one", pkg.Name, len(debs))
	}
	sum, err := fileSum(debs[0])
	if err != nil {
		return "", err
	}
	if sum != pkg.SHA256 {
		return "", fmt.Errorf("package %s has SHA-256 %s, but apt's lists say %s: try again", pkg.Name, sum, pkg.SHA256)
	}
	deb := filepath.Join(cache, sum+".deb")
	if err := os.Rename(debs[0], deb); err != nil {
		return "", err
	}
	note, err := json.Marshal(pkg)
	if err != nil {
		return "", err
	}
	temp := filepath.Join(a.work, "kernel.json")
	if err := os.WriteFile(temp, append(note, '\n'), 0o644); err != nil {
		return "", err
	}
	return deb, os.Rename(temp, filepath.Join(cache, "kernel.json"))
}

// controlField gives a field of the first package in control data (deb-control(5)); folded lines are not needed here.
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

// kernelDependency finds the kernel's package in a Depends field.
func kernelDependency(depends string) (string, error) {
	for relation := range strings.SplitSeq(depends, ",") {
		if words := strings.Fields(relation); len(words) > 0 && kernelName.MatchString(words[0]) {
			return words[0], nil
		}
	}
	return "", fmt.Errorf("package %s depends on no linux-image package: %.200q", metaPackage, depends)
}
