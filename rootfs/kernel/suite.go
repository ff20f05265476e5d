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

// suiteName is what a suite may be called: it becomes part of a source entry and of a file's name.
var suiteName = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,63}$`)

// archive is where apt gets one suite from: the mirror of Debian's archive that the host uses, trusted as the host
// trusts it.
type archive struct {
	suite    string
	uri      string
	signedBy string // as in a .sources file, maybe of several lines; empty trusts all of the host's keys
	file     string // the host's, which names uri
}

// entry is the archive as a .sources file (sources.list(5), "Deb822-style format").
func (r archive) entry() string {
	entry := "Types: deb\nURIs: " + r.uri + "\nSuites: " + r.suite + "\nComponents: main\n"
	if r.signedBy != "" {
		entry += "Signed-By: " + r.signedBy + "\n"
	}
	return entry
}

// explain adds to a failure of apt-get update what can be done about it.
func (r archive) explain(err error) error {
	switch {
	case r.suite == "":
		return err
	case strings.Contains(err.Error(), "is not signed"):
		return fmt.Errorf("the host has no key that verifies suite %s: install or upgrade the package debian-archive-keyring, whose keyring Signed-By in %s has to name (%w)", r.suite, r.file, err)
	case strings.Contains(err.Error(), "does not have a Release file"):
		return fmt.Errorf("mirror %s has no suite %s: check its name (%w)", r.uri, r.suite, err)
	}
	return err
}

// useSuite leaves apt one source, the suite at the host's mirror. What the host has installed, pinned or made its default
// release says nothing about that suite's packages, so apt does not see it.
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

// hostArchive finds the mirror of Debian's archive that the host's apt uses. The host may have no package lists, as a
// fresh container has none; apt knows the origin of a source only with them, so they are fetched then.
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

var errNoArchive = errors.New("apt knows no archive of Debian's: check the network and apt's sources (sources.list(5))")

// findArchive asks apt for the package lists of Debian's section main. The archives of updates and of security fixes,
// which do not hold every suite, have a dash in their codenames.
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
		if colon := strings.LastIndexByte(file, ':'); colon >= 0 { // then comes the entry's number
			file = file[:colon]
		}
		return readArchive(file, fields[1])
	}
	return archive{}, errNoArchive
}

// readArchive looks in a file of the host's sources up what Signed-By says of the archive at uri: apt 2.6 does not tell.
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
		return archive{}, fmt.Errorf("find the source %s, which apt uses, in %s: there is no entry that names it", uri, file)
	}
	return archive{uri: strings.TrimRight(uri, "/"), signedBy: signedBy, file: file}, nil
}

// sameURI compares two addresses of an archive: apt adds a slash at the end, and drops the empty host of a file's.
func sameURI(a, b string) bool {
	plain := func(uri string) string { return strings.Replace(strings.TrimRight(uri, "/"), ":///", ":/", 1) }
	return plain(a) == plain(b)
}

// stanzaSignedBy reads a .sources file: it returns Signed-By, all its lines, of the first stanza in use that has uri.
func stanzaSignedBy(data, uri string) (string, bool) {
	fields, name := map[string]string{}, ""
	for line := range strings.SplitSeq(data+"\n", "\n") {
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "": // ends a stanza
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

// lineSignedBy reads a sources.list file: it returns the option signed-by of the first entry that has uri.
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
