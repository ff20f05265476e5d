package kernel

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// suiteName matches a valid suite name. The name becomes part of a source entry and of a file name.
var suiteName = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,63}$`)

// archive is the source from which apt gets one suite: the mirror of Debian's archive that the host
// uses, with the same trusted keys as on the host.
type archive struct {
	suite    string
	uri      string
	signedBy string // as in a .sources file, possibly of several lines; empty trusts all of the host's keys
	file     string // the host's file that contains uri
}

// entry returns the archive in the format of a .sources file (sources.list(5), "Deb822-style
// format").
func (r archive) entry() string {
	entry := "Types: deb\nURIs: " + r.uri + "\nSuites: " + r.suite + "\nComponents: main\n"
	if r.signedBy != "" {
		entry += "Signed-By: " + r.signedBy + "\n"
	}
	return entry
}

// explain adds advice to a failure of apt-get update.
func (r archive) explain(err error) error {
	switch {
	case r.suite == "":
		return err
	case strings.Contains(err.Error(), "is not signed"):
		return fmt.Errorf("the host has no key that verifies suite %s: install or upgrade the package debian-archive-keyring, whose keyring Signed-By in %s must name (%w)", r.suite, r.file, err)
	case strings.Contains(err.Error(), "does not have a Release file"):
		return fmt.Errorf("mirror %s has no suite %s: check the suite's name (%w)", r.uri, r.suite, err)
	}
	return err
}

// useSuite gives apt a single source: the suite at the host's mirror. apt does not see the host's
// installed packages, pins and default release, because they do not apply to that suite's packages.
func (a *apt) useSuite(ctx context.Context, suite string) error {
	found, err := a.hostArchive(ctx)
	if err != nil {
		return err
	}
	found.suite = suite
	sources, status := filepath.Join(a.work, "suite.sources"), filepath.Join(a.work, "status")
	for file, content := range map[string]string{sources: found.entry(), status: ""} {
		if err := os.WriteFile(file, []byte(content), 0o644); err != nil {
			return err
		}
	}
	a.archive = found
	a.options = append(a.options,
		"-o", "Dir::Etc::sourcelist="+sources, "-o", "Dir::Etc::sourceparts=/dev/null",
		"-o", "Dir::Etc::preferences=/dev/null", "-o", "Dir::Etc::preferencesparts=/dev/null",
		"-o", "Dir::State::status="+status, "-o", "APT::Default-Release=",
	)
	return nil
}

// hostArchive finds the mirror of Debian's archive that the host's apt uses. apt knows the origin
// of a source only if it has package lists. If the host has none, like a fresh container,
// hostArchive fetches them.
func (a *apt) hostArchive(ctx context.Context) (archive, error) {
	host := *a
	host.lists = ""
	found, err := host.findArchive(ctx)
	if !errors.Is(err, errNoArchive) {
		return found, err
	}
	if err := a.update(ctx); err != nil {
		return archive{}, err
	}
	return a.findArchive(ctx)
}

var errNoArchive = errors.New("apt knows no Debian archive: check the network and apt's sources (sources.list(5))")

// findArchive asks apt for the package lists of Debian's section main. It skips the archives of
// updates and security fixes, which do not have every suite; their codenames contain a dash.
func (a *apt) findArchive(ctx context.Context) (archive, error) {
	targets, err := a.run(ctx, "apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI) $(SOURCESENTRY)",
		"Created-By: Packages", "Origin: Debian", "Component: main")
	if err != nil {
		return archive{}, err
	}
	for target := range strings.Lines(string(targets)) {
		fields := strings.SplitN(strings.TrimSpace(target), " ", 3)
		if len(fields) != 3 || strings.Contains(fields[0], "-") {
			continue
		}
		file := fields[2]
		if colon := strings.LastIndexByte(file, ':'); colon >= 0 { // the entry's number follows the colon
			file = file[:colon]
		}
		return readArchive(file, fields[1])
	}
	return archive{}, errNoArchive
}

// readArchive looks up Signed-By for the archive at uri in a source file of the host, because apt
// 2.6 does not report it.
func readArchive(file, uri string) (archive, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return archive{}, err
	}
	signedBy, ok := "", false
	if strings.HasSuffix(file, ".sources") {
		signedBy, ok = stanzaSignedBy(string(data), uri)
	} else {
		signedBy, ok = lineSignedBy(string(data), uri)
	}
	if !ok {
		return archive{}, fmt.Errorf("find the source %s, which apt uses, in %s: no entry names it", uri, file)
	}
	return archive{uri: strings.TrimRight(uri, "/"), signedBy: signedBy, file: file}, nil
}

// sameURI reports whether two addresses of an archive are equal. apt adds a slash at the end, and
// drops the empty host of a file URI.
func sameURI(a, b string) bool {
	plain := func(uri string) string { return strings.Replace(strings.TrimRight(uri, "/"), ":///", ":/", 1) }
	return plain(a) == plain(b)
}

// stanzaSignedBy returns, from a .sources file, all lines of Signed-By in the first enabled stanza
// that contains uri.
func stanzaSignedBy(data, uri string) (string, bool) {
	fields, name := map[string]string{}, ""
	for line := range strings.SplitSeq(data+"\n", "\n") {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "": // the stanza ends
			if stanzaHas(fields, uri) {
				return strings.TrimSpace(fields["signed-by"]), true
			}
			clear(fields)
		case line[0] == ' ' || line[0] == '\t':
			fields[name] += "\n" + line
		default:
			key, value, _ := strings.Cut(line, ":")
			name = strings.ToLower(key)
			fields[name] = value
		}
	}
	return "", false
}

func stanzaHas(fields map[string]string, uri string) bool {
	named := slices.ContainsFunc(strings.Fields(fields["uris"]), func(other string) bool { return sameURI(other, uri) })
	unused := slices.Contains([]string{"no", "false", "off", "without", "disable", "0"}, strings.ToLower(strings.TrimSpace(fields["enabled"])))
	return named && !unused && slices.Contains(strings.Fields(fields["types"]), "deb")
}

// sourceLine matches an entry of a sources.list file: its options and its address.
var sourceLine = regexp.MustCompile(`^\s*deb\s+(?:\[([^\]]*)\]\s*)?([^\s#]+)`)

// lineSignedBy returns, from a sources.list file, the option signed-by of the first entry that
// contains uri.
func lineSignedBy(data, uri string) (string, bool) {
	for line := range strings.Lines(data) {
		entry := sourceLine.FindStringSubmatch(line)
		if entry == nil || !sameURI(entry[2], uri) {
			continue
		}
		for _, option := range strings.Fields(entry[1]) {
			if key, value, _ := strings.Cut(option, "="); strings.EqualFold(key, "signed-by") {
				return value, true
			}
		}
		return "", true
	}
	return "", false
}
