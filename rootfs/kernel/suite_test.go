package kernel

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/directvol/directvol/rootfs/kernel/kerneltest"
)

const hostSources = `# the main archive
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/a.gpg

Types: deb
URIs: http://mirror.example/debian-security/
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/b.gpg
`

// hostTargets writes the host's sources to a file and returns the output of apt-get indextargets
// for them.
func hostTargets(t *testing.T) (targets, file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "debian.sources")
	kerneltest.WriteFile(t, file, []byte(hostSources))
	return "bookworm-updates http://mirror.example/debian-updates/ " + file + ":3\n" +
		"bookworm-security http://mirror.example/debian-security/ " + file + ":2\n" +
		"bookworm http://mirror.example/debian/ " + file + ":1\n", file
}

func TestSuiteIsTakenFromTheHostsMirror(t *testing.T) {
	targets, _ := hostTargets(t)
	packages, _ := split(t)
	bin := fakeApt(t, targets, packages...)
	if _, err := Open(t.Context(), Source{Suite: "trixie-backports", Cache: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(bin, "suite.sources"))
	want := "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie-backports\nComponents: main\nSigned-By: /usr/share/keyrings/a.gpg\n"
	if err != nil || string(got) != want {
		t.Errorf("apt's only source:\n got %q, %v\nwant %q", got, err, want)
	}
	options, err := os.ReadFile(filepath.Join(bin, "options"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Dir::Etc::sourceparts=/dev/null\n", "Dir::Etc::preferences=/dev/null\n", "APT::Default-Release=\n", "Dir::State::status="} {
		if !strings.Contains(string(options), want) {
			t.Errorf("options of apt-get update:\n got %s\nwant %s", options, want)
		}
	}
}

func TestWithoutASuiteTheHostsSourcesAreUsed(t *testing.T) {
	packages, _ := split(t)
	bin := fakeApt(t, "", packages...)
	if _, err := Open(t.Context(), Source{Cache: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	options, err := os.ReadFile(filepath.Join(bin, "options"))
	if err != nil || strings.Contains(string(options), "Dir::Etc") {
		t.Errorf("options of apt-get update:\n got %s, %v\nwant none with Dir::Etc", options, err)
	}
}

func TestHostWithoutListsIsAskedAgain(t *testing.T) {
	targets, _ := hostTargets(t)
	packages, _ := split(t)
	bin := fakeApt(t, targets, packages...)
	kerneltest.WriteFile(t, filepath.Join(bin, "targets-none"), nil)
	if _, err := Open(t.Context(), Source{Suite: "trixie-backports", Cache: t.TempDir()}); err != nil {
		t.Error(err)
	}
	kerneltest.WriteFile(t, filepath.Join(bin, "targets-own"), nil)
	_, err := Open(t.Context(), Source{Suite: "sid", Cache: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "no Debian archive") {
		t.Errorf("no source of Debian:\n got error %v\nwant one that says so", err)
	}
}

func TestSuitesDoNotShareACache(t *testing.T) {
	targets, _ := hostTargets(t)
	packages, _ := split(t)
	cache := t.TempDir()
	fakeApt(t, targets, packages...)
	if _, err := Open(t.Context(), Source{Suite: "trixie-backports", Cache: cache}); err != nil {
		t.Fatal(err)
	}
	deb := buildDeb(t)
	fakeApt(t, targets, unsplit(deb, sumOf(t, deb))...)
	if _, err := Open(t.Context(), Source{Cache: cache}); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", "")
	for suite, want := range map[string]string{"": kerneltest.Version, "trixie-backports": "7.3.4+deb13-cloud-amd64"} {
		k, err := Open(t.Context(), Source{Suite: suite, Cache: cache})
		if err != nil {
			t.Errorf("suite %q: %v", suite, err)
		} else if k.Version != want {
			t.Errorf("suite %q:\n got %s\nwant %s", suite, k.Version, want)
		}
	}
	if _, err := Open(t.Context(), Source{Suite: "trixie", Cache: cache}); err == nil || !strings.Contains(err.Error(), "apt-get") {
		t.Errorf("a suite that was not downloaded:\n got error %v\nwant one that names apt-get", err)
	}
}

func TestRefusedSuiteSaysWhatToDo(t *testing.T) {
	targets, file := hostTargets(t)
	bin := fakeApt(t, targets)
	for refusal, want := range map[string][]string{
		"W: GPG error: NO_PUBKEY 6ED0\nE: The repository 'x sid InRelease' is not signed.\n": {"package debian-archive-keyring", file},
		"E: The repository 'x sid Release' does not have a Release file.\n":                  {"http://mirror.example/debian has no suite sid"},
		"E: no network\n": {"E: no network"},
	} {
		kerneltest.WriteFile(t, filepath.Join(bin, "refusal"), []byte(refusal))
		_, err := Open(t.Context(), Source{Suite: "sid", Cache: t.TempDir()})
		for _, want := range want {
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("refusal %q:\n got error %v\nwant one line with %q", refusal, err, want)
			}
		}
	}
}

func TestSuiteIsAName(t *testing.T) {
	for _, suite := range []string{"../x", "a b", "sid\nTrusted: yes", "-o", "a/b", strings.Repeat("a", 65)} {
		if _, err := Open(t.Context(), Source{Suite: suite, Cache: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "not a suite name") {
			t.Errorf("%q:\n got error %v\nwant one that says it is no name", suite, err)
		}
	}
}

func TestKeyringIsReadFromTheHostsSources(t *testing.T) {
	const uri = "http://mirror.example/debian/"
	for _, test := range []struct {
		name, file, data, want string
		found                  bool
	}{
		{"a stanza", "a.sources", hostSources, "/usr/share/keyrings/a.gpg", true},
		{"no key", "a.sources", "types: deb\nuris: http://other.example " + uri, "", true},
		{"a key of several lines", "a.sources", "Types: deb\nURIs: " + uri + "\nSigned-By:\n KEY\n# a remark\n .\n MORE\n", "KEY\n .\n MORE", true},
		{"a stanza out of use", "a.sources", "Enabled: No\nTypes: deb\nURIs: " + uri + "\nSigned-By: x\n \n" + hostSources, "/usr/share/keyrings/a.gpg", true},
		{"sources alone", "a.sources", "Types: deb-src\nURIs: " + uri, "", false},
		{"another archive", "a.sources", "Types: deb\nURIs: http://mirror.example/debian-security", "", false},
		{"a line", "a.list", "# deb [signed-by=x] " + uri + " sid main\ndeb [ arch=amd64 signed-by=/a.gpg,/b.gpg ] http://mirror.example/debian sid main\n", "/a.gpg,/b.gpg", true},
		{"a line without options", "a.list", "deb-src " + uri + " sid main\ndeb\t" + uri + " sid main # why", "", true},
		{"another line", "a.list", "deb http://other.example sid main", "", false},
	} {
		file := filepath.Join(t.TempDir(), test.file)
		kerneltest.WriteFile(t, file, []byte(test.data))
		got, err := readArchive(file, uri)
		if got.signedBy != test.want || (err == nil) != test.found {
			t.Errorf("%s:\n got %q, %v\nwant %q", test.name, got.signedBy, err, test.want)
		}
	}
	if !sameURI("mirror+file:///etc/apt/mirrors/debian.list", "mirror+file:/etc/apt/mirrors/debian.list/") {
		t.Error("a list of mirrors in a file:\n got another address\nwant the same")
	}
}
