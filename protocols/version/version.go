// Package version contains the one version of all programs of this repository.
package version

import "runtime/debug"

// Number is the version (semver.org) of the next release of this source. The release's tag is "v"
// followed by Number; .ci/dist checks that.
const Number = "0.1.0"

// source is set by make through the linker: the tag of the built commit, or the commit. It is empty
// in a build without git or without make.
var source string

// String returns the version for --version and for the agent's answer to Health.Version: Number in
// a release, and Number-dev+COMMIT in a build between releases.
func String() string {
	module := ""
	if info, ok := debug.ReadBuildInfo(); ok {
		module = info.Main.Version
	}
	return text(source, module)
}

// text returns String for a source and for the module version, which a program has if built by `go
// install PACKAGE@VERSION`.
func text(source, module string) string {
	switch {
	case source == "v"+Number, source == "" && module == "v"+Number:
		return Number
	case source == "":
		return Number + "-dev"
	}
	return Number + "-dev+" + source
}
